"""Bitwise mode through whole steps and the whole command: the same bytes on any number of processes, or a refusal."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import REPOSITORY, Finished, Workplace, golden_tokens
from known_model import Steps, build_trainer, context_for, known_gpt, train
from ranks import on_ranks
from small_checkpoints import set_final_norm
from small_documents import write_documents

from training.config import Batch, Loss
from training.distributed import Group
from training.errors import UserError
from training.step_records import StepRecord

TIMES = ("seconds", "tokens_per_second")


def bitwise_config(workplace: Workplace) -> Path:
    """12 steps of 7 microbatches of 3 sequences: no number of processes but 1 and 7 divides them."""
    return workplace.write_config(
        model={"dropout": 0.1, "tie_weights": True},
        batch={"world_size": 7, "microbatch": 3, "accumulation": 1},
        data={"train_tokens": 12 * 21 * 32, "shuffle": True, "validation_tokens": 40 * 32},
        optimizer={"clip_norm": 0.3, "learning_rate": 1e-3},
        schedule={"name": "cosine", "warmup_percent": 20},
        evaluation={"every": 5},
        checkpoint={"every": 2, "keep": 2},
        reproducibility="bitwise",
    )


def digests(run: Finished) -> dict[str, str]:
    """sha256 of the weights, of the optimizer state, and of the metrics but for times."""
    assert run.status == 0, run.errors
    folder = run.folder / "latest"
    files = {name: (folder / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors")}
    lines = [line for line in run.lines if line["kind"] != "event"]
    kept = [{key: value for key, value in line.items() if key not in TIMES} for line in lines]
    files["metrics"] = json.dumps(kept).encode()
    return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}


@pytest.mark.slow
def test_the_same_bytes_on_any_number_of_processes(workplace: Workplace) -> None:
    """One, two, three and four; and where somebody gives the one process two threads."""
    config = bitwise_config(workplace)
    found = {n: digests(workplace.train_on_ranks(config, n, output=f"on{n}")) for n in (2, 3, 4)}
    workplace.environment = {"OMP_NUM_THREADS": "2"}
    found[1] = digests(workplace.train(config, output="on1"))
    assert all(digest == found[1] for digest in found.values()), found


@pytest.mark.slow
def test_masked_documents_in_bf16_too(workplace: Workplace) -> None:
    """Padding, a last step of two documents for three processes, a loss that is a sum, another kind of product."""
    generator = np.random.default_rng(5)
    documents = [generator.integers(0, 97, length).tolist() for length in generator.integers(2, 40, 23)]
    masks = [(generator.random(len(document)) < 0.5).astype(int).tolist() for document in documents]
    write_documents(workplace.datasets / "documents" / "train.safetensors", documents, masks)
    config = workplace.write_config(
        model={"dropout": 0.1},
        data={"dataset": "documents", "train_tokens": -1, "validation_start": 0, "validation_tokens": -1, "epochs": 2},
        batch={"world_size": 7, "microbatch": 1, "accumulation": 1},
        precision={"amp": "bf16"},
        loss={"reduction": "sum"},
        evaluation={"every": None},
        reproducibility="bitwise",
    )
    one = digests(workplace.train_here(config, output="on1"))
    assert digests(workplace.train_on_ranks(config, 3, output="on3")) == one


@pytest.mark.slow
def test_the_same_bytes_after_a_kill_and_a_resume_on_another_number(workplace: Workplace) -> None:
    """Killed on two processes, gone on with on three, stopped there, and ended on one."""
    config = bitwise_config(workplace)
    whole = digests(workplace.train_here(config, output="whole"))
    killed = workplace.start(config, processes=2, output="parts")
    folder = workplace.folder / "parts" / "run"
    deadline = time.monotonic() + 120
    while not (folder / "latest").exists():
        assert time.monotonic() < deadline, "no checkpoint after two minutes"
        time.sleep(0.02)
    for pid in [killed.pid, *children_of(killed.pid)]:
        os.kill(pid, signal.SIGKILL)
    killed.communicate()
    workplace.train_on_ranks(config, 3, output="parts", resume="latest", stop_after=9)
    assert digests(workplace.train_here(config, output="parts", resume="latest")) == whole


def children_of(pid: int) -> list[int]:
    """The processes that a process has started."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def test_another_microbatch_is_refused(workplace: Workplace) -> None:
    """It rounds otherwise, so the promise could not be kept."""
    with pytest.raises(UserError, match=r"^--microbatch 2: the config says 3, and with reproducibility: bitwise"):
        workplace.train_here(bitwise_config(workplace), microbatch=2)


@pytest.mark.slow
def test_gradients_that_stay_out_of_range_end_the_run(workplace: Workplace) -> None:
    """They are finite, and told apart from those that are not; nothing is changed on any process."""
    config = workplace.write_config(data={"train_tokens": 30 * 512}, evaluation={"every": None})
    bitwise = ["--set", "reproducibility=bitwise"]
    run = workplace.train(config, *bitwise, "--stop-after", "4")
    assert run.status == 0, run.errors
    saved = set_final_norm(run.folder / "step_00000004", 1e7)
    run = workplace.train(config, "--resume", "latest", processes=2)
    assert run.status == 1
    assert run.errors.count("the gradient was out of bitwise mode's range 5 steps in a row") == 1
    events = [line for line in run.of_kind("event") if line["event"] == "nonfinite"]
    assert [(line["step"], line["out_of_range"], line["overflow"]) for line in events[:5]] == [
        (step, True, False) for step in range(5, 10)
    ]
    assert all(line["skipped"] and line["loss"] is not None for line in run.of_kind("train")[4:])
    assert (run.folder / "step_00000005" / "model.safetensors").read_bytes() == saved


# The reduction sum, whose gradients are the largest


def summed(group: Group, steps: Steps, accumulation: int) -> tuple[StepRecord, list[float]]:
    """A step's record, and the gradient of the four numbers."""
    model = known_gpt(context_for(steps[0]))
    batch = Batch(world_size=1, microbatch=1, accumulation=accumulation)
    trainer = build_trainer(group, model, steps, batch, loss=Loss(reduction="sum"), reproducibility="bitwise")
    record = train(group, trainer, [0])[0]
    assert model.head.weight.grad is not None
    return record, model.head.weight.grad[:4, 0].tolist()


@pytest.mark.slow
def test_g07_the_gradient_of_a_sum_grows_with_the_targets() -> None:
    """10 targets of class 0 and 100 of class 3: 110 times the mean's gradient, and exactly twice that for twice them.

    A hundred times as many do not overflow either; on two processes the bits are the same.
    """
    window = ((0,) * 10, (3,) * 100)
    found = {times: on_ranks(1, summed, (window * times,), 2 * times)[0] for times in (1, 2, 100)}
    for times, (record, gradient) in found.items():
        assert gradient == pytest.approx([times * value for value in (1, 22, 33, -56)], abs=110e-6 * times)
        assert record.grad_norm == pytest.approx(68.629440 * times, rel=1e-6)
        assert record.loss == pytest.approx(1.042317, abs=1e-6)
        assert not record.out_of_range
    assert found[2][1] == [2 * value for value in found[1][1]]
    for _, gradient in on_ranks(2, summed, (window * 100,), 200):
        assert gradient == found[100][1]


# Memory

PEAK = """
import sys
import torch
import ddp_train
from training.benchmark.peak_memory import peak_memory, reset_peak_memory

train, cpu = ddp_train.train, torch.device("cpu")

def measured(*arguments):
    reset_peak_memory(cpu)
    state = train(*arguments)
    print("peak", peak_memory(cpu))
    return state

ddp_train.train = measured
ddp_train.run_command(ddp_train.app)
"""
MEBIBYTE = 2**20


def peak_memory(workplace: Workplace, config: Path) -> int:
    """Peak memory of one process while it trains, in bytes: neither imports nor the report's charts count."""
    command = [sys.executable, "-c", PEAK, str(config), str(workplace.datasets)]
    command += ["--output", str(workplace.folder / "out"), "--overwrite"]
    # glibc raises this by itself, and then keeps what is freed: as much as a microbatch, however many follow.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "MALLOC_MMAP_THRESHOLD_": "65536"}
    environment["PYTHONPATH"] = str(REPOSITORY)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split("peak ")[1].split()[0])


@pytest.mark.slow
@pytest.mark.parametrize("reproducibility", ["rounding", "bitwise"])
def test_peak_memory_does_not_grow_with_accumulation(workplace: Workplace, reproducibility: str) -> None:
    """16 microbatches need what two need; twice the microbatch shows what holding on to another one would cost.

    The bound is a tenth of that: two runs of one kind were seen to differ by less than half a MiB.
    """
    model = {"context_length": 128, "emb_dim": 64, "n_heads": 4, "n_layers": 4}
    workplace.write_tokens(tokens=np.resize(golden_tokens(30_000).astype(np.uint16), 16 * 16 * 128 + 1))

    def peak(microbatch: int, accumulation: int) -> int:
        config = workplace.write_config(
            model=model,
            batch={"world_size": 1, "microbatch": microbatch, "accumulation": accumulation},
            data={"train_tokens": microbatch * accumulation * 128},
            evaluation={"every": None},
            reproducibility=reproducibility,
        )
        return peak_memory(workplace, config)

    two = peak(16, 2)  # not one: bitwise mode's 2 MiB to convert in are first written to by the second
    another = peak(32, 2) - two
    assert another > 20 * MEBIBYTE
    assert peak(16, 16) - two < another / 10
