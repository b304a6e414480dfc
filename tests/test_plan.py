"""The plan that a run announces: the figures that the published runs have."""

import os
import subprocess
import sys

import pytest
from conftest import REPOSITORY
from memory import CASES
from small_configs import small_config

from training.config_file import load_run_config
from training.document_rows import DocumentSummary
from training.layout import plan_layout
from training.plan import GIB, estimated_memory, plan_lines


def plan(name: str, world_size: int, *overrides: str, microbatch: int | None = None, device: str = "cuda") -> list[str]:
    config = load_run_config(name, overrides)
    return plan_lines(config, plan_layout(config.batch, world_size, microbatch), config.total_steps, device)


def test_the_plan_of_a_published_run() -> None:
    """Oracles: steps, tokens, parameters and warm-up, with thousands commas."""
    lines = plan("1xrtx3090-stacked-interventions", 1)
    assert lines[0] == (
        "run 1xrtx3090-stacked-interventions with gradient-clipping, weight-decay-gpt2, no-dropout, "
        "schedule-learning-rate: 163,009,536 parameters, 33,165 steps of 98,304 tokens: 3,260,252,160 tokens"
    )
    assert lines[1] == "layout: 96 sequences per step = 1 process x microbatch 6 x accumulation 16"
    assert lines[2] == "learning rate: 0.0014 after a warm-up of 1,658 steps, then a cosine to 0.00014"
    assert lines[3] == "precision: fp16 autocast, float32 products high, on cuda"
    assert lines[4].startswith("memory: about ")
    assert len(lines) == 5


@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("8xb200m160", "163,009,536 parameters, 6,219 steps of 524,288 tokens: 3,260,547,072 tokens"),
        ("original", "163,009,536 parameters, 530,630 steps of 6,144 tokens: 3,260,190,720 tokens"),
        (
            "1xgtx1660-stacked-interventions",
            "76,933,120 parameters, 46,957 steps of 32,768 tokens: 1,538,686,976 tokens",
        ),
        ("test", "163,009,536 parameters, 4 steps of 98,304 tokens: 393,216 tokens"),
    ],
)
def test_the_figures_of_other_runs(name: str, figures: str) -> None:
    assert plan(name, 1)[0].endswith(figures)


def test_another_layout_is_the_same_run() -> None:
    """The global batch, steps and tokens are those of the config, whatever was started."""
    own, other = plan("8xa100m40-baseline", 8), plan("8xa100m40-baseline", 3, microbatch=5)
    assert own[1] == "layout: 96 sequences per step = 8 processes x microbatch 12 x accumulation 1"
    assert other[1].startswith("layout: 96 sequences per step over 3 processes x microbatch 5 x accumulation 7, uneven")
    assert other[1].endswith("(the config says 8 x 12 x 1: the same run)")
    assert other[0] == own[0]
    assert other[2:4] == own[2:4] == ["learning rate: 0.0004, constant", own[3]]


def test_a_length_that_the_data_decide() -> None:
    """Without the data the plan says so, and gives the warm-up as a share."""
    lines = plan("test", 1, "data.train_tokens=-1", "schedule.warmup_percent=2.5")
    assert lines[0].endswith("as many steps of 98,304 tokens as gpjt/fineweb-gpt2-tokens holds")
    assert lines[2] == "learning rate: 0.0014 after a warm-up of 2.5 % of the steps, then a cosine to 0.00014"


def test_epochs_count() -> None:
    config = small_config(data={"train_tokens": 100, "epochs": 1000})
    line = plan_lines(config, plan_layout(config.batch, 2), config.total_steps, "cpu")[0]
    assert line == "run run: 156,608 parameters, 2,000 steps of 64 tokens: 128,000 tokens"


def test_documents_have_no_tokens_per_step() -> None:
    """Documents, steps and tokens instead, and what becomes of them."""
    config = small_config(data={"epochs": 3})
    summary = DocumentSummary(1300, 20_500, 9_000, 2, 17, 0)
    lines = plan_lines(config, plan_layout(config.batch, 2), 489, "cpu", summary)
    assert lines[0] == "run run: 156,608 parameters, 489 steps over 1,300 documents x 3 epochs: 61,500 tokens"
    assert lines[1] == "data: 1,300 documents with 9,000 targets, 2 truncated to 9 tokens (17 left out)"
    assert lines[2].startswith("layout: 8 sequences per step")


def test_precision_without_autocast() -> None:
    assert plan("8xa100m80-no-amp", 8, device="cpu")[3] == "precision: float32, float32 products highest, on cpu"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny, 64", "tiny, 64, recomputing"])
def test_the_memory_estimate_is_what_the_tensors_of_a_step_take(name: str) -> None:
    """Within 15 %, where each tensor has pages of its own; the C library's gaps between them are not ours to know."""
    command = [sys.executable, str(REPOSITORY / "benchmarks" / "memory.py"), "--case", name]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    case = CASES[name]
    estimate = estimated_memory(case.config, case.microbatch, "cpu", case.recomputing)
    assert estimate / int(done.stdout) == pytest.approx(1, abs=0.15)


def test_the_memory_estimate() -> None:
    """At least weights, gradients and both moments; more with a larger microbatch and in float32."""
    config = load_run_config("8xa100m40-baseline")
    estimates = [estimated_memory(config, microbatch, "cuda") for microbatch in (1, 6, 12, 64)]
    assert estimates == sorted(set(estimates))
    assert 16 * 163_009_536 < estimates[0] < 6 * GIB
    assert 4 * GIB < estimates[2] < 40 * GIB  # it was trained on GPUs of 40 GiB
    float32 = load_run_config("8xa100m40-baseline", ["precision.amp=off"])
    assert estimated_memory(float32, 12, "cuda") > estimates[2]
    without_dropout = load_run_config("8xa100m40-baseline", ["model.dropout=0"])
    for_dropout = estimates[2] - estimated_memory(without_dropout, 12, "cuda")
    # In each of 12 layers two masks and what attention makes, and the embedding's mask in float32; for a moment 512
    # rows of each head's attention weights and what follows from them, in place of 2,048 rows of logits and the head's
    # gradient, which need less.
    kept, rows, head = (12 * 3 * 2 + 4) * 12 * 1024 * 768, 12 * 12 * 512 * 1024 * 20, 2048 * 50257 * 6 + 50257 * 768 * 4
    assert for_dropout == kept + rows - head
    small_head = load_run_config("8xa100m40-baseline", ["model.dropout=0", "model.vocab_size=100"])
    one, again = (estimated_memory(small_head, 12, "cuda", recomputing) for recomputing in (False, True))
    # Of 11 of the 12 blocks only the input is kept: 4 bytes instead of 2 * 4 + 16 * 2 for each number of the stream.
    assert one - again == (11 * 40 - 12 * 4) * 12 * 1024 * 768
    layout = plan_layout(small_head.batch, 8)
    assert plan_lines(small_head, layout, None, "cuda", None, recomputing=True)[-1].endswith("activation checkpointing")
