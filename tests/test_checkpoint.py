"""Checkpoints: whole or not there, whatever is killed; pointers and what is kept."""

import dataclasses
import itertools
import multiprocessing
import os
import random
import resource
import shutil
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Workplace
from safetensors.torch import load_file
from small_checkpoints import IDS, TINY, adamw, names_in, resumed_from_an_older_one, save, state_at, train

from model.gpt import build_gpt
from training import checkpoint
from training.checkpoint import point, publish, remove_newer, retain, write_checkpoint
from training.checkpoint_files import (
    checkpoint_name,
    find_checkpoint,
    list_checkpoints,
    number_of,
    problem_of,
)
from training.evaluation import Evaluated
from training.restore import load_model
from training.snapshot import Snapshot, take_snapshot

# The folder: whole or not there


def test_a_checkpoint_is_four_files_and_verifies(tmp_path: Path) -> None:
    folder = save(tmp_path / "run", 617)
    assert folder == tmp_path / "run" / "step_00000617"
    files = {"model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"}
    assert names_in(folder) == files
    assert names_in(folder.parent) == {folder.name}
    assert problem_of(folder) is None
    assert load_file(folder / "optimizer.safetensors") == {}, "no update yet, no optimizer state"
    modes = {stat.S_IMODE((folder / name).stat().st_mode) for name in files}
    assert len(modes) == 1, "all files follow the umask"


def test_bytes_depend_on_the_weights_alone(tmp_path: Path) -> None:
    model = build_gpt(TINY, seed=3)
    first = save(tmp_path / "a", 1, model)
    second = save(tmp_path / "b", 999, build_gpt(TINY, seed=3))
    data = (first / "model.safetensors").read_bytes()
    assert data == (second / "model.safetensors").read_bytes()
    assert set(load_file(first / "model.safetensors")) == {name for name, _ in model.named_parameters()}
    train(model, adamw(model), steps=1)
    assert data != (save(tmp_path / "a", 2, model) / "model.safetensors").read_bytes()


def test_saving_again_replaces_the_folder_and_clears_dead_writes(tmp_path: Path) -> None:
    """R111: names come from steps, so two saves within a second are two of the same name or of two."""
    save(tmp_path, 4)
    for leftover in (".step_00000004.partial", ".step_00000004.old", ".step_00000012.partial"):
        shutil.copytree(tmp_path / "step_00000004", tmp_path / leftover)
    (tmp_path / ".step_notes.partial").mkdir()
    model = build_gpt(TINY, seed=5)
    folder = save(tmp_path, 4, model)
    assert names_in(tmp_path) == {"step_00000004", ".step_notes.partial"}
    assert torch.equal(load_model(folder)(IDS), model(IDS))


@pytest.mark.parametrize("make", [Path.touch, os.mkfifo, lambda path: path.symlink_to("nowhere"), Path.mkdir])
def test_whatever_has_the_name_of_a_dead_write_goes(tmp_path: Path, make: Callable[[Path], None]) -> None:
    tmp_path.joinpath("step_00000006").write_text("a file, no checkpoint")
    for name in (".step_00000005.partial", ".step_00000006.partial", ".step_00000005.old"):
        make(tmp_path / name)
    assert problem_of(save(tmp_path, 5)) is None
    assert problem_of(save(tmp_path, 6)) is None
    assert names_in(tmp_path) == {"step_00000005", "step_00000006"}


def test_a_checkpoint_that_was_moved_elsewhere_is_removed_as_a_link(tmp_path: Path) -> None:
    """Replaced or no longer kept, it is gone from the run, and what it leads to stays."""
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    elsewhere.mkdir()
    for step in (4, 5, 6):
        save(run, step).rename(elsewhere / f"moved {step}")
        (run / checkpoint_name(step)).symlink_to(elsewhere / f"moved {step}")
    save(run, 6)
    retain(run, keep=2)
    remove_newer(run, 5)
    assert names_in(run) == {"step_00000005"}
    assert {problem_of(path) for path in elsewhere.iterdir()} == {None}
    assert names_in(elsewhere) == {"moved 4", "moved 5", "moved 6"}


def test_a_checkpoint_that_is_saved_again_is_there_at_every_moment(tmp_path: Path) -> None:
    """A signal's checkpoint is saved again after the evaluation that it broke off: a kill then must not lose it."""
    folder, done, gaps = save(tmp_path, 4), threading.Event(), []

    def look() -> None:
        while not done.is_set():
            gaps.append(not (folder / "manifest.json").exists())

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        for _ in range(50):
            save(tmp_path, 4)
    finally:
        done.set()
        watcher.join()
    assert len(gaps) > 50
    assert not any(gaps)


def test_a_full_disk_is_an_os_error_and_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    """R06 with a real failure: a file-size limit stops the write in mid-file; the second attempt succeeds."""
    save(tmp_path, 4)
    snapshot = take_snapshot(build_gpt(TINY, seed=1), adamw(build_gpt(TINY, seed=1)), state_at(8))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(OSError, match=r"model\.safetensors"):
            write_checkpoint(tmp_path, snapshot)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert find_checkpoint(tmp_path, "latest").path.name == "step_00000004"
    assert problem_of(write_checkpoint(tmp_path, snapshot)) is None


def test_latest_always_names_a_whole_checkpoint(tmp_path: Path) -> None:
    """R03, R111: `latest` is polled in a tight loop during 50 saves."""
    model = build_gpt(TINY, seed=0)
    snapshot = take_snapshot(model, adamw(model), state_at(0))
    point(tmp_path, "latest", write_checkpoint(tmp_path, snapshot).name)
    problems: list[str | None] = []
    done = threading.Event()

    def poll() -> None:
        while not done.is_set():
            problems.append(problem_of((tmp_path / "latest").resolve()))

    poller = threading.Thread(target=poll)
    poller.start()
    for step in range(1, 51):
        state = dataclasses.replace(snapshot.state, step=step)
        folder = write_checkpoint(tmp_path, dataclasses.replace(snapshot, state=state))
        point(tmp_path, "latest", folder.name)
        retain(tmp_path, keep=20)
    done.set()
    poller.join()
    assert len(problems) > 50
    assert set(problems) == {None}
    assert os.readlink(tmp_path / "latest") == "step_00000050"
    assert len(list_checkpoints(tmp_path)) == 20


def publish_for_ever(run_folder: Path) -> None:
    """What the process that is killed does: a checkpoint after the other; `reported` says which is published."""
    model = build_gpt(TINY, seed=0)
    snapshot = take_snapshot(model, adamw(model), state_at(0))
    there = list_checkpoints(run_folder)
    for step in itertools.count(number_of(there[-1]) + 1 if there else 1):
        publish(run_folder, dataclasses.replace(snapshot, state=dataclasses.replace(snapshot.state, step=step)), keep=2)
        (run_folder / "reported").write_text(str(step))


@pytest.mark.slow
def test_kills_at_random_moments_of_saves(tmp_path: Path) -> None:
    """R01: `latest` is never half there, nor older than the last one published; the next process goes on from it."""
    moments = random.Random(1)
    context = multiprocessing.get_context("forkserver")
    steps = [0]
    for _ in range(20):
        process = context.Process(target=publish_for_ever, args=(tmp_path,))
        process.start()
        while not (tmp_path / "latest").exists() or number_of((tmp_path / "latest").resolve()) <= steps[-1]:
            time.sleep(0.001)
        time.sleep(moments.random() * 0.03)
        process.kill()
        process.join()
        found = find_checkpoint(tmp_path, "latest")
        assert problem_of(tmp_path / "latest") is None
        assert found.passed_over == []
        steps.append(number_of(found.path))
        assert steps[-1] >= int((tmp_path / "reported").read_text() or 0)
    assert steps == sorted(set(steps)), "each process has published something"


def test_point_survives_a_dead_write_and_a_copied_folder(tmp_path: Path) -> None:
    folder = save(tmp_path, 4)
    (tmp_path / ".best.new").symlink_to("step_00000003")
    shutil.copytree(folder, tmp_path / "best")  # what scp -r makes of a link
    assert find_checkpoint(tmp_path, "best").path == tmp_path / "best"
    point(tmp_path, "best", folder.name)
    assert os.readlink(tmp_path / "best") == folder.name
    (copy,) = tmp_path.glob("best_copy_*")
    assert problem_of(copy) is None, "nothing but a step folder is deleted"
    with pytest.raises(AssertionError, match="step_00000005"):
        point(tmp_path, "best", "step_00000005")


# Publishing


def snapshot_at(step: int, best_step: int | None = None) -> Snapshot:
    model = build_gpt(TINY, seed=0)
    return take_snapshot(model, adamw(model), dataclasses.replace(state_at(step), best_step=best_step))


def test_publish_moves_the_pointers_and_removes_what_is_no_longer_kept(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        written = publish(tmp_path, snapshot_at(step, best_step=2), keep=2)
        assert written == tmp_path / checkpoint_name(step)
        assert os.readlink(tmp_path / "latest") == written.name
        assert os.readlink(tmp_path / "best") == "step_00000002"
    publish(tmp_path, snapshot_at(8, best_step=2), keep=2)
    assert names_in(tmp_path) == {"step_00000002", "step_00000006", "step_00000008", "latest", "best"}
    publish(tmp_path, snapshot_at(10, best_step=10), keep=1)
    assert names_in(tmp_path) == {"step_00000010", "latest", "best"}
    assert os.readlink(tmp_path / "best") == "step_00000010"


def test_publish_without_a_best_step_makes_no_pointer(tmp_path: Path) -> None:
    publish(tmp_path, snapshot_at(4), keep=1)
    assert names_in(tmp_path) == {"step_00000004", "latest"}
    publish(tmp_path, snapshot_at(8, best_step=6), keep=1)  # its folder is gone
    assert names_in(tmp_path) == {"step_00000008", "latest"}


def test_a_superseded_checkpoint_that_is_written_again_counts(tmp_path: Path) -> None:
    resumed_from_an_older_one(tmp_path)
    publish(tmp_path, snapshot_at(8, best_step=8), keep=9)
    assert names_in(tmp_path) == {"step_00000002", "step_00000004", "step_00000008", "latest", "best"}
    found = find_checkpoint(tmp_path, "latest")
    assert (found.path.name, found.passed_over) == ("step_00000008", [])


def test_checkpoints_of_a_past_given_up_go_with_the_next_save(tmp_path: Path) -> None:
    """Also those before it: they would be taken for this run's at its next resumption."""
    resumed_from_an_older_one(tmp_path)
    publish(tmp_path, snapshot_at(10, best_step=10), keep=9)
    assert names_in(tmp_path) == {"step_00000002", "step_00000004", "step_00000010", "latest", "best"}


@pytest.mark.parametrize("killed_in", ["write_checkpoint", "point", "remove_newer", "retain"])
def test_a_kill_while_publishing_leaves_the_way_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_in: str
) -> None:
    """Wherever it strikes, `latest` is of the run's own past, nothing is lost, and the next save completes the rest."""
    resumed_from_an_older_one(tmp_path)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    snapshot = snapshot_at(6, best_step=6)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, killed_in, die)
        with pytest.raises(KeyboardInterrupt):
            publish(tmp_path, snapshot, keep=1)
    written = killed_in != "write_checkpoint"
    assert find_checkpoint(tmp_path, "latest").path.name == ("step_00000006" if written else "step_00000004")
    linked = killed_in in ("remove_newer", "retain")
    assert os.readlink(tmp_path / "latest") == ("step_00000006" if linked else "step_00000004")
    assert problem_of(tmp_path / "latest") is None
    assert (tmp_path / "best").exists() == linked  # the one of the past that was given up is no longer best
    assert (tmp_path / "step_00000012").exists() == (killed_in != "retain")
    assert (tmp_path / "step_00000002").exists()
    publish(tmp_path, snapshot_at(7, best_step=7), keep=1)
    assert names_in(tmp_path) == {"step_00000007", "latest", "best"}


@pytest.mark.slow
def test_one_latest_for_all_processes(workplace: Workplace) -> None:
    """R04: saved by two processes, then by one, then by two: all of them go on where the run is."""
    config = workplace.write_config(evaluation={"every": None}, checkpoint={"every": None})
    workplace.train_on_ranks(config, 2, stop_after=3)
    workplace.train_here(config, resume="latest", stop_after=6)
    run = workplace.train_on_ranks(config, 2, resume="latest", stop_after=8)
    assert [event["step"] for event in run.of_kind("event") if event["event"] == "resume"] == [3, 6]
    assert [line["step"] for line in run.of_kind("train")] == list(range(1, 9))
    assert list(workplace.checkpoints.rglob("*latest*")) == [run.folder / "latest"]
    assert os.readlink(run.folder / "latest") == "step_00000008"


def test_a_loss_that_is_not_finite_is_never_the_best(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    """R09: of validation losses 5, NaN and 4 the third is best, though every comparison with NaN is false."""
    losses = iter([5.0, float("nan"), 4.0])
    monkeypatch.setattr("training.loop.evaluate", lambda *_: Evaluated(2048 * next(losses), 2048, None))
    run = workplace.train_here(
        workplace.write_config(data={"train_tokens": 3 * 512}, evaluation={"every": 1}, checkpoint={"every": 1})
    )
    assert [line["loss"] for line in run.of_kind("validation")] == [5.0, None, 4.0]
    saved = [event["best"] for event in run.of_kind("event") if event["event"] == "checkpoint"]
    assert saved == [True, False, True]
    assert os.readlink(run.folder / "best") == "step_00000003"


# Keeping


def test_retention_keeps_latest_and_best(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        save(tmp_path, step)
    (tmp_path / "metrics.jsonl").touch()
    point(tmp_path, "best", "step_00000001")
    point(tmp_path, "latest", "step_00000003")
    retain(tmp_path, keep=1)
    steps = {"step_00000001", "step_00000003", "step_00000005"}
    assert names_in(tmp_path) == steps | {"latest", "best", "metrics.jsonl"}
    with pytest.raises(AssertionError, match="not 0"):
        retain(tmp_path, keep=0)


def test_remove_newer_takes_their_pointers_along(tmp_path: Path) -> None:
    for step in (4, 8, 12, 16):
        save(tmp_path, step)
    point(tmp_path, "best", "step_00000012")
    point(tmp_path, "latest", "step_00000008")
    remove_newer(tmp_path, step=8)
    assert names_in(tmp_path) == {"step_00000004", "step_00000008", "latest"}
