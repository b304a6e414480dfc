"""benchmarks/gpu.py, but for the GPU: what it measures in which order, the time it keeps, its files, its refusal."""

import json
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
from conftest import REPOSITORY
from gpu import MOST_SEQUENCES, Outcome, Part, carry_out, file_name, microbatch_found, parts, result_of, search, table

MACHINE: dict[str, Any] = {"name": "2x NVIDIA H100 80GB HBM3", "date": "2026-12-01", "torch": "2.13", "cuda": "13.0"}
SPREAD = {"median": 0.5e12, "low": 0.4e12, "high": 0.6e12}
ROW = {
    "world_size": 1,
    "microbatch": 8,
    "accumulation": 4,
    "tokens_per_second": {"median": 12_345.6},
    "flops_per_second": SPREAD,
    "share": {"median": 0.5},
    "peak_memory": 3 * 2**30,
}


def python(code: str, least_seconds: float = 0) -> Part:
    """A part that needs no PyTorch."""
    return Part(code, [sys.executable, "-S", "-c", code], least_seconds)


def test_bf16_and_fp16_are_measured_eager_and_compiled() -> None:
    """What matters most comes first; several GPUs only where there are some."""
    names = [part.name for part in parts(8, gpus=1)]
    assert names[:2] == ["bf16", "bf16, compiled"]
    assert {"fp16", "fp16, compiled", "bf16, dropout 0.1", "transformers' Trainer"} < set(names)
    assert [part.name for part in parts(8, gpus=4) if part.name not in names] == ["bf16, 4 GPUs"]
    assert "batch.microbatch=8" in parts(8, gpus=1)[0].command
    assert "--find-max-microbatch" in search().command
    seconds = sum(part.least_seconds for part in [search(), *parts(8, gpus=8)])
    assert seconds <= 7.5 * 60, "there is time to begin each, if each takes what it needs"


def test_the_time_is_kept() -> None:
    """A part that takes too long is ended, and what has too little time is not begun."""
    todo = [python("print('one')"), python("import time; time.sleep(600)"), python("print('never')", least_seconds=1)]
    begun = time.monotonic()
    one, slow, never = carry_out(todo, begun + 3)
    assert time.monotonic() - begun < 30
    assert (one.status, one.output) == ("done", "one\n")
    assert slow.status.startswith("left out: not done after ")
    assert (never.status, never.output) == ("left out: needs 1 s", "")


def test_what_failed_is_told_and_the_others_go_on() -> None:
    """With the sentence that it said, also where typer draws a box around it; else with the last line."""
    unknown = "import sys; print('╭─ Error ─╮\\n│ No such option: --compile │\\n╰───╯', file=sys.stderr); sys.exit(2)"
    sentence = "import sys; sys.exit('error: no room; make some\\nmore of it')"
    found = list(
        carry_out([python(unknown), python(sentence), python("1 / 0"), python("print(1)")], time.monotonic() + 60)
    )
    assert [outcome.status for outcome in found] == [
        "failed: No such option: --compile",
        "failed: error: no room; make some",
        "failed: ZeroDivisionError: division by zero",
        "done",
    ]


@pytest.mark.parametrize(
    ("output", "microbatch"),
    [
        ("the largest microbatch that fits is 12 of 96\nlayout: 96\ntrain with --microbatch 12\n", 12),
        ("train with --activation-checkpointing --microbatch 7\n", 7),
        ("train with --microbatch 96\n", MOST_SEQUENCES),
        ("", 4),
    ],
)
def test_the_microbatch_is_that_of_the_search(output: str, microbatch: int) -> None:
    assert microbatch_found(Outcome("largest microbatch", "", "done", 1.0, output)) == microbatch


def test_the_result_has_the_machines_name_and_is_readable() -> None:
    assert file_name(MACHINE) == "2x-nvidia-h100-80gb-hbm3-2026-12-01"
    measured = json.dumps({"rows": [ROW], "rates": {"1": {"median": 1e12}}})
    outcomes = [
        Outcome("largest microbatch", "ddp_train.py", "done", 9.0, "a line\ntrain with --microbatch 8\n"),
        Outcome("bf16", "bench", "done", 30.0, measured),
        Outcome("bf16, compiled", "bench --compile", "failed: No such option: --compile", 1.0, ""),
    ]
    result = result_of(MACHINE, 8, outcomes)
    assert json.loads(json.dumps(result))["parts"][1]["output"]["rows"][0]["microbatch"] == 8
    lines = table(result).splitlines()
    assert lines[0] == "# 2x NVIDIA H100 80GB HBM3, 2026-12-01"
    assert lines[-3:] == [
        "| largest microbatch | train with --microbatch 8 | | | | | |",
        "| bf16 | 1 x 8 x 4 | 12,346 | 0.5 | 1.0 | 50.0 | 3.0 |",
        "| bf16, compiled | failed: No such option: --compile | | | | | |",
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_refuses() -> None:
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "benchmarks" / "gpu.py")], capture_output=True, text=True, check=False
    )
    sentence = "error: gpu.py: this machine has no CUDA device; isobatch bench measures a CPU\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", sentence)
