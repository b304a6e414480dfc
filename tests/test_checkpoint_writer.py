"""Checkpoints written while training goes on: the right bytes, one at a time, failures kept and told."""

import dataclasses
import json
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_checkpoints import IDS, TINY, adamw, state_at, train

from model.gpt import build_gpt
from training import checkpoint_writer
from training.checkpoint import write_checkpoint
from training.checkpoint_files import find_checkpoint, list_checkpoints, problem_of
from training.checkpoint_writer import CheckpointWriter
from training.errors import RunError
from training.metrics import RunLog
from training.restore import load_model
from training.snapshot import memory_for, take_snapshot


def limit_files(size: int | None) -> None:
    """Makes writing a checkpoint fail, as on a full disk: no file may be larger; None takes that back."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard if size is None else size, hard))


class SpokenLog(RunLog):
    """Keeps what is said, and makes room on the disk then, if told to."""

    makes_room = False

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "metrics.jsonl", True, 100, None)
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)
        if self.makes_room:
            limit_files(None)


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SpokenLog]:
    monkeypatch.setattr(checkpoint_writer, "SECONDS_BEFORE_RETRY", 0.0)
    yield SpokenLog(tmp_path)
    limit_files(None)


@pytest.fixture
def writer(tmp_path: Path, log: SpokenLog) -> Iterator[CheckpointWriter]:
    writer = CheckpointWriter(tmp_path, 2, log, None)
    yield writer
    writer.close()


def events_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_what_is_written_is_the_state_that_was_taken(tmp_path: Path, writer: CheckpointWriter) -> None:
    """Training goes on at once; the memory of the copies is used again, from before the first update on."""
    model = build_gpt(TINY, seed=0)
    optimizer = adamw(model)
    logits, moments = {}, {}
    for step in (0, 2, 4):
        logits[step] = model(IDS).detach()
        moments[step] = {} if step == 0 else {"exp_avg": optimizer.state[model.head.weight]["exp_avg"].clone()}
        writer.take(model, optimizer, dataclasses.replace(state_at(step), best_step=0, best_loss=1.0), upload=False)
        train(model, optimizer)
    writer.wait()
    assert not writer.failed
    for step, folder in zip((0, 2, 4), list_checkpoints(tmp_path), strict=True):
        assert torch.equal(load_model(folder)(IDS), logits[step])
        for kind, moment in moments[step].items():
            assert torch.equal(load_file(folder / "optimizer.safetensors")[f"{kind}.head.weight"], moment)
    assert os.readlink(tmp_path / "latest") == "step_00000004"
    assert os.readlink(tmp_path / "best") == "step_00000000"
    saved = [(event["step"], event["checkpoint"], event["best"]) for event in events_in(tmp_path)]
    assert saved == [(0, "step_00000000", True), (2, "step_00000002", False), (4, "step_00000004", False)]
    assert all(event["seconds"] > 0 and event["stall"] > 0 for event in events_in(tmp_path))


def test_copies_use_the_same_memory_again() -> None:
    model = build_gpt(TINY, seed=0)
    optimizer = adamw(model)
    train(model, optimizer)
    prepared = memory_for(model, state_at(0))
    addresses = {name: value.data_ptr() for name, value in {**prepared.weights, **prepared.optimizer}.items()}
    first = take_snapshot(model, optimizer, state_at(1), prepared)
    counts = {name: value.data_ptr() for name, value in first.optimizer.items() if name.startswith("step.")}
    assert {name: value.data_ptr() for name, value in {**first.weights, **first.optimizer}.items()} == {
        **addresses,
        **counts,
    }
    addresses |= counts
    train(model, optimizer)
    second = take_snapshot(model, optimizer, state_at(2), first)
    assert {name: value.data_ptr() for name, value in {**second.weights, **second.optimizer}.items()} == addresses
    fresh = take_snapshot(model, optimizer, state_at(2))
    assert all(torch.equal(second.weights[name], value) for name, value in fresh.weights.items())
    assert all(torch.equal(second.optimizer[name], value) for name, value in fresh.optimizer.items())


def test_training_waits_for_the_copy_and_the_last_checkpoint_only(
    tmp_path: Path, writer: CheckpointWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that takes its time: the first `take` returns at once, the second waits, never two at once."""
    may_go_on, under_way, most = threading.Event(), [], []

    def slow(*arguments: Any) -> Path:
        under_way.append(1)
        most.append(len(under_way))
        assert may_go_on.wait(60)
        under_way.pop()
        return write_checkpoint(*arguments)

    monkeypatch.setattr("training.checkpoint.write_checkpoint", slow)
    model = build_gpt(TINY, seed=0)
    optimizer = adamw(model)
    writer.take(model, optimizer, state_at(1), upload=False)
    assert not list_checkpoints(tmp_path)
    threading.Timer(0.5, may_go_on.set).start()
    writer.take(model, optimizer, state_at(2), upload=False)
    assert [path.name for path in list_checkpoints(tmp_path)][:1] == ["step_00000001"]
    writer.wait()
    assert most == [1, 1]
    first, second = events_in(tmp_path)
    assert first["stall"] < 0.5 <= second["stall"] + 0.1, "the second says how long training waited for the first"
    assert first["seconds"] > 0.4


def test_a_failure_of_a_moment_is_a_warning(tmp_path: Path, writer: CheckpointWriter, log: SpokenLog) -> None:
    """R06: the second attempt succeeds, and the run goes on."""
    model = build_gpt(TINY, seed=0)
    log.makes_room = True
    limit_files(20_000)
    writer.take(model, adamw(model), state_at(4), upload=False)
    writer.wait()
    (warning,) = log.said
    assert warning.startswith(f"{tmp_path}: step 4 could not be saved (")
    assert warning.endswith("; trying once more")
    assert problem_of(tmp_path / "step_00000004") is None
    assert not writer.failed


def test_a_failure_that_stays_is_told_by_the_next_save_and_at_the_end(
    tmp_path: Path, writer: CheckpointWriter, log: SpokenLog
) -> None:
    """R06: the previous checkpoint is intact, and nothing half-written is left."""
    model = build_gpt(TINY, seed=0)
    optimizer = adamw(model)
    writer.take(model, optimizer, state_at(4), upload=False)
    writer.wait()
    limit_files(20_000)
    writer.take(model, optimizer, state_at(8), upload=False)
    said = rf"^{tmp_path}: step 8 could not be saved \(.*step_00000008.*\); the last .* as it was: make room .*--resume"
    with pytest.raises(RunError, match=said):
        writer.take(model, optimizer, state_at(12), upload=False)
    with pytest.raises(RunError, match=said):
        writer.wait()
    assert writer.failed
    assert len(log.said) == 1, "one warning, before the second attempt"
    found = find_checkpoint(tmp_path, "latest")
    assert (found.path.name, found.passed_over) == ("step_00000004", [])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_not_written(tmp_path: Path, writer: CheckpointWriter, value: float) -> None:
    """R09: whichever value it is, and if it is only one."""
    model = build_gpt(TINY, seed=0)
    with torch.no_grad():
        model.head.weight[5, 7] = value
    writer.take(model, adamw(model), state_at(6), upload=False)
    with pytest.raises(RunError, match=f"{tmp_path}: weights are not finite after step 6, so they are not saved"):
        writer.wait()
    assert not list_checkpoints(tmp_path)
    assert not (tmp_path / "latest").exists()


def test_closing_waits_for_what_is_being_written(tmp_path: Path, log: SpokenLog) -> None:
    """Whatever ends a run: a checkpoint under way is completed, a failure is not raised a second time."""
    model = build_gpt(TINY, seed=0)
    writer = CheckpointWriter(tmp_path, 2, log, None)
    writer.take(model, adamw(model), state_at(4), upload=False)
    writer.close()
    assert problem_of(tmp_path / "latest") is None
    writer = CheckpointWriter(tmp_path, 2, log, None)
    limit_files(20_000)
    writer.take(model, adamw(model), state_at(8), upload=False)
    writer.close()
    assert writer.failed


def memory(field: str) -> int:
    """Of this process, in MiB: VmRSS now, VmHWM at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{field}:")]
    return int(line.split()[1]) // 1024


@pytest.mark.slow
def test_saving_takes_the_copy_and_no_more(tmp_path: Path, writer: CheckpointWriter) -> None:
    """R13: a state of 200 MiB needs at most 250 MiB more while it is saved, and nothing more the next time."""
    model = torch.nn.ParameterList([torch.ones(50 * 2**18) for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters())
    for step, most in ((1, 250), (2, 50)):
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
        before = memory("VmRSS")
        writer.take(model, optimizer, state_at(step), upload=False)
        writer.wait()
        assert memory("VmHWM") - before <= most
