"""Which process this is, and what the processes of a run share."""

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from known_model import SMALL
from ranks import ALONE, on_ranks

from model.gpt import build_gpt
from training.config import REPOSITORY
from training.distributed import Group, Process, cores_here, use_all_cores
from training.errors import UserError
from training.loss import SequenceLoss

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment without torchrun, and without GPUs."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return monkeypatch


def test_without_a_launcher_there_is_one_process(no_launcher: pytest.MonkeyPatch) -> None:
    process = Process.from_environment()
    assert process == ALONE
    assert process.is_main


def test_the_launchers_variables(no_launcher: pytest.MonkeyPatch) -> None:
    for name, value in zip(VARIABLES, ("5", "1", "8", "4", "1", "2"), strict=True):
        no_launcher.setenv(name, value)
    process = Process.from_environment()
    assert process == Process(5, 1, 8, 4, 1, 2, torch.device("cpu"))
    assert not process.is_main


def test_more_processes_than_gpus_are_refused(no_launcher: pytest.MonkeyPatch) -> None:
    no_launcher.setattr(torch.cuda, "is_available", lambda: True)
    no_launcher.setattr(torch.cuda, "device_count", lambda: 2)
    no_launcher.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(UserError, match=r"3 processes .* 2 GPUs.* --nproc_per_node=2 .*global batch stays the same"):
        Process.from_environment()


def test_the_gpu_is_the_one_of_the_local_rank(no_launcher: pytest.MonkeyPatch) -> None:
    """R47: on whichever machine the process is."""
    no_launcher.setattr(torch.cuda, "is_available", lambda: True)
    no_launcher.setattr(torch.cuda, "device_count", lambda: 2)
    no_launcher.setenv("LOCAL_WORLD_SIZE", "2")
    no_launcher.setenv("LOCAL_RANK", "1")
    no_launcher.setenv("RANK", "5")
    assert Process.from_environment().device == torch.device("cuda", 1)


def test_the_group_is_left_whatever_happens() -> None:
    def fail(group: Group) -> None:
        assert dist.is_initialized()
        raise UserError("a mistake")

    for _ in range(2):
        with pytest.raises(UserError, match="a mistake"):
            on_ranks(1, fail)
        assert not dist.is_initialized()


def test_alone_nothing_is_shared_and_all_of_it_works() -> None:
    found = on_ranks(1, meet)[0]
    assert found["sum"] == [1.0, 10.0]
    assert found["maximum"] == [0.0, 0.0]
    assert found["broadcast"] == [0.0]
    assert found["first"] == {"from": 0, "note": None}
    assert found["mistake"] == "by rank 0"


def meet(group: Group) -> dict[str, Any]:
    """Every kind of meeting, once."""
    rank = float(group.process.rank)
    own = torch.tensor([rank])
    group.broadcast([own])
    return {
        "sum": group.sum(torch.tensor([1.0, 10.0])).tolist(),
        "maximum": group.maximum(torch.tensor([rank, -rank])).tolist(),
        "broadcast": own.tolist(),
        "first": group.first("first", lambda: {"from": group.process.rank, "note": None}),
        "mistake": mistake_of(lambda: group.first("mistake", lambda: blunder(f"by rank {group.process.rank}"))),
        "per node": group.first("per node", lambda: f"rank {group.process.rank}", per_node=True),
        "one node's mistake": mistake_of(
            lambda: group.first("one node", lambda: blunder("node 1") if group.process.node else None, per_node=True)
        ),
    }


def blunder(text: str) -> None:
    """Raises."""
    raise UserError(text)


def mistake_of(action: Callable[[], Any]) -> str | None:
    """What a user is told."""
    try:
        action()
    except UserError as mistake:
        return str(mistake)
    return None


@pytest.mark.slow
def test_four_processes_on_two_nodes_meet() -> None:
    """`first` acts once, or once a node; every rank has the result, or the mistake, wherever it was made."""
    for rank, found in enumerate(on_ranks(4, meet, nodes=2)):
        assert found == {
            "sum": [4.0, 40.0],
            "maximum": [3.0, 0.0],
            "broadcast": [0.0],
            "first": {"from": 0, "note": None},
            "mistake": "by rank 0",
            "per node": f"rank {rank // 2 * 2}",
            "one node's mistake": "node 1",
        }


def wait_for_the_first(group: Group) -> float:
    """Seconds this rank waited for rank 0 to be done."""
    group.sum(torch.zeros(1))
    started = time.monotonic()
    group.first("slow", lambda: time.sleep(1.0))
    return time.monotonic() - started


def wrap(group: Group) -> tuple[bool, float, bool, bool]:
    """Of a model that starts from other weights on each rank: what DDP makes of it."""
    model = build_gpt(SMALL, seed=group.process.rank)
    parallel = group.parallel(SequenceLoss(model))
    parallel(torch.zeros(1, 8, dtype=torch.long), torch.full((1, 8), group.process.rank))[0].backward()
    grads = [parameter.grad for parameter in model.parameters()]
    return (
        parallel.find_unused_parameters,
        model.head.weight.sum().item(),
        any(True for _ in parallel.buffers()),
        all(grad is not None for grad in grads),
    )


def several(group: Group) -> tuple[float, tuple[bool, float, bool, bool]]:
    """Both, in one group."""
    return wait_for_the_first(group), wrap(group)


def test_two_processes_wait_and_start_from_the_weights_of_rank_0() -> None:
    """G35: every parameter is used in every microbatch, so DDP need not search; and there is no buffer to send."""
    expected = build_gpt(SMALL, seed=0).head.weight.sum().item()
    for seconds, wrapped in on_ranks(2, several):
        assert seconds > 0.9
        assert wrapped == (False, expected, False, True)


def test_a_mistake_on_one_rank_ends_all() -> None:
    with pytest.raises(Exception, match=r"rank 1 stumbles|closed|reset"):
        on_ranks(2, stumble, timeout=60)


def stumble(group: Group) -> None:
    """Rank 1 fails where the other waits for it."""
    if group.process.rank == 1:
        raise RuntimeError("rank 1 stumbles")
    group.sum(torch.zeros(1))


@pytest.mark.parametrize(
    ("setting", "local_world_size", "shared"), [("1", 2, True), ("1", 1, False), ("3", 2, False), (None, 2, False)]
)
def test_cores_are_shared_where_the_launcher_would_leave_them_idle(
    setting: str | None, local_world_size: int, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if setting is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", setting)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(6), raising=False)
    before = torch.get_num_threads()
    try:
        use_all_cores(local_world_size)
        assert torch.get_num_threads() == (3 if shared else before)
    finally:
        torch.set_num_threads(before)


RESTARTED = """
import os, signal, time
from training.distributed import Process
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
process = Process.from_environment()
with process.group() as group:
    def answer():
        time.sleep(1)  # the other rank asks before there is a new answer
        return attempt
    got = group.first("answer", answer)
    os.write(1, f"attempt {attempt} rank {process.rank} got {got}\\n".encode())  # at once: two write here
    group.first("both have printed", lambda: time.sleep(1))
    if attempt == 0 and process.is_main:
        os.kill(os.getpid(), signal.SIGKILL)
    if attempt == 0:
        time.sleep(60)
"""


@pytest.mark.slow
def test_after_a_restart_nobody_gets_what_was_said_before(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(RESTARTED)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=1"]
    done = subprocess.run(
        [*command, str(program)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    expected = [f"attempt {attempt} rank {rank} got {attempt}" for attempt in (0, 1) for rank in (0, 1)]
    assert sorted(done.stdout.splitlines()) == expected


def test_more_processes_than_cores_are_told() -> None:
    cores = cores_here()
    crowded = dataclasses.replace(ALONE, world_size=cores + 1, local_world_size=cores + 1)
    (told,) = crowded.remarks()
    assert told.startswith(f"{cores + 1} processes were started on a machine with {cores} CPU core")
    assert dataclasses.replace(crowded, local_world_size=cores).remarks() == []
    assert dataclasses.replace(crowded, device=torch.device("cuda", 0)).remarks() == [], "each has its own GPU"
