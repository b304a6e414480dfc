"""Signals to the processes of a run, in all its phases; R51 to R56.

The ranks come from a fork server, in seconds less than torchrun's; the last tests have the launcher too.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch.multiprocessing
from conftest import REPOSITORY, Finished, Workplace
from held_up import SLOW_DISK, SLOW_READING, hold_up
from ranks import started
from test_runs import running_workers, without_times

import ddp_train
from training.checkpoint_files import find_checkpoint
from training.command import run_command
from training.restore import read_state


def command_in_folder(folder: Path, *words: str) -> None:
    """What a worker does: the command, what it says in a file of its own."""
    os.chdir(folder)
    said = os.open(f"said by {os.environ['RANK']}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(said, stream)
    hold_up()
    sys.argv = ["ddp_train.py", *words]
    run_command(ddp_train.app)


@dataclass
class Run:
    """A run on some ranks, while it goes on."""

    workplace: Workplace
    ranks: torch.multiprocessing.ProcessContext
    finished: Finished

    def wait_until(self, what: Callable[[Finished], Any]) -> None:
        """Waits for something in the run's folder."""
        deadline = time.monotonic() + 60
        while not ((self.finished.folder / "metrics.jsonl").exists() and what(self.finished)):
            assert time.monotonic() < deadline
            assert all(process.is_alive() for process in self.ranks.processes), self.said()
            time.sleep(0.01)

    def signal(self, number: int, *ranks: int) -> None:
        for rank in ranks:
            os.kill(self.ranks.pids()[rank], number)

    def statuses(self, seconds: float) -> list[int | None]:
        """Waits for all to end; their exit statuses."""
        deadline = time.monotonic() + seconds
        for process in self.ranks.processes:
            process.join(deadline - time.monotonic())
        return [process.exitcode for process in self.ranks.processes]

    def said(self) -> list[str]:
        """By rank."""
        ranks = range(len(self.ranks.processes))
        return [(self.workplace.folder / f"said by {rank}").read_text() for rank in ranks]


@contextmanager
def running(workplace: Workplace, config: Path, *options: str, output: str = "checkpoints") -> Iterator[Run]:
    """A run on two ranks."""
    place = workplace.folder
    words = (str(config), str(workplace.datasets), "--output", str(place / output), *options)
    with started(2, command_in_folder, place, *words, folder=str(place)) as ranks:
        yield Run(workplace, ranks, Finished(0, "", "", place / output / config.stem))


def write_config(workplace: Workplace) -> Path:
    """Twenty steps, with evaluations of some seconds after the twelfth and the last, if reading is slow."""
    return workplace.write_config(
        data={"train_tokens": 20 * 512, "validation_tokens": 4096, "epochs": 1},
        evaluation={"every": 12, "tokens": 2560},
        checkpoint={"every": 5, "keep": 9},
        model={"emb_dim": 16, "n_heads": 2, "n_layers": 1, "dropout": 0.1},
    )


def steps_of(run: Finished) -> list[int]:
    return [line["step"] for line in run.of_kind("train")]


def assert_left_in_order(run: Run, by: tuple[str, int]) -> int:
    """All processes of a signalled run end, with status 1 and one sentence; returns the step after which they do.

    Args:
        run: that was signalled.
        by: the signal's name, and the rank that got it.
    """
    assert run.statuses(15) == [1, 1]
    step = steps_of(run.finished)[-1]
    first, second = run.said()
    assert first.endswith(f"interrupted after step {step}; go on with --resume latest\n")
    assert second == ""
    assert "Traceback" not in first
    assert "Warning" not in first
    last = [event for event in run.finished.of_kind("event") if event["step"] == step]
    assert [event["event"] for event in last[-2:]] == ["checkpoint", "interrupted"]
    assert (last[-1]["signal"], last[-1]["rank"]) == by
    assert find_checkpoint(run.finished.folder, "latest").path.name == f"step_{step:08d}"
    return step


@pytest.mark.slow
def test_interrupted_twice_a_run_is_what_it_would_have_been(
    workplace: Workplace,
) -> None:
    """R52: by a signal to one rank both finish the same step, which is saved once; also in an evaluation."""
    config = write_config(workplace)
    with running(workplace, config, output="whole") as run:
        assert run.statuses(120) == [0, 0], run.said()
    whole = run.finished
    (workplace.folder / SLOW_READING).touch()
    with running(workplace, config) as run:
        run.wait_until(lambda run: steps_of(run)[2:])
        run.signal(signal.SIGTERM, 1)
        assert 3 <= assert_left_in_order(run, ("SIGTERM", 1)) < 12
    with running(workplace, config, "--resume", "latest") as run:
        run.wait_until(lambda run: steps_of(run)[-1:] == [12])
        time.sleep(0.3)
        run.signal(signal.SIGUSR1, 0)
        assert assert_left_in_order(run, ("SIGUSR1", 0)) == 12
    assert run.finished.of_kind("validation") == []
    assert read_state(run.finished.folder / "latest").evaluation_due
    (workplace.folder / SLOW_READING).unlink()
    with running(workplace, config, "--resume", "latest") as run:
        assert run.statuses(120) == [0, 0], run.said()
    assert without_times(run.finished) == without_times(whole)
    states = [read_state(found.folder / "latest") for found in (whole, run.finished)]
    assert replace(states[0], seconds=0) == replace(states[1], seconds=0)
    weights = [(found.folder / "latest" / "model.safetensors").read_bytes() for found in (whole, run.finished)]
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_a_second_signal_ends_a_run_at_once(workplace: Workplace) -> None:
    """In the midst of a save that does not end; one that comes with the first is the same once more."""
    config = write_config(workplace)
    (workplace.folder / SLOW_READING).touch()
    with running(workplace, config) as run:
        run.wait_until(lambda run: (run.folder / "latest").exists())
        (workplace.folder / SLOW_DISK).touch()
        run.signal(signal.SIGINT, 0, 1)
        run.signal(signal.SIGINT, 0, 1)
        assert run.statuses(2.5) == [None, None]
        run.signal(signal.SIGTERM, 0, 1)
        assert run.statuses(2) == [128 + signal.SIGTERM] * 2
    (workplace.folder / SLOW_DISK).unlink()
    assert find_checkpoint(run.finished.folder, "latest").path.name == "step_00000005"


def test_a_rank_whose_neighbour_has_died_does_not_wait_for_it(workplace: Workplace) -> None:
    """torchrun asks the others to end then, with the same signal: one waits for rank 0's save, which never comes.

    It says what has happened, as nobody else can.
    """
    config = write_config(workplace)
    (workplace.folder / SLOW_READING).touch()
    with running(workplace, config) as run:
        run.wait_until(steps_of)
        (workplace.folder / SLOW_DISK).touch()
        run.wait_until(lambda run: steps_of(run)[-1:] == [10])
        run.signal(signal.SIGKILL, 0)
        run.signal(signal.SIGTERM, 1)
        assert run.statuses(4) == [-signal.SIGKILL, 1]
    assert run.said()[1] == (
        "error: rank 0 is gone or does not answer; its own messages say why, or it was killed (out of memory: see "
        "dmesg); the last checkpoint is as it was: go on with --resume latest\n"
    )


def test_while_a_run_starts_it_ends_at_once(workplace: Workplace) -> None:
    """There is nothing to save: without a trace, also where it waits for the others in a library's code."""
    with socket.create_server(("127.0.0.1", 0)) as others:
        port = str(others.getsockname()[1])
        workplace.environment = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        config = write_config(workplace)
        with workplace.start(config) as importing, workplace.start(config) as joining:
            try:
                time.sleep(0.5)
                importing.send_signal(signal.SIGINT)
                assert importing.communicate(timeout=10) == ("", "")
                others.settimeout(60)
                with others.accept()[0]:
                    joining.send_signal(signal.SIGINT)
                    assert joining.communicate(timeout=10) == ("", "")
            finally:
                joining.kill()
    assert importing.returncode == joining.returncode == -signal.SIGINT


def test_until_a_step_is_trained_there_is_nothing_to_save(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal does what it did before while the folder is made ready, which a damaged disk may hold up."""
    seen = {}
    for name in ("begin", "note_launch", "announce", "train"):
        part = getattr(ddp_train, name)

        def look(*given: Any, name: str = name, part: Callable[..., Any] = part) -> Any:
            seen[name] = signal.getsignal(signal.SIGTERM)
            return part(*given)

        monkeypatch.setattr(ddp_train, name, look)
    before = signal.getsignal(signal.SIGTERM)
    workplace.train_here(write_config(workplace), stop_after=1)
    assert [seen.pop(name) for name in ("begin", "note_launch", "announce")] == [before] * 3
    assert seen["train"] != before
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.slow
def test_ctrl_c_under_torchrun(workplace: Workplace) -> None:
    """R51, R56: Ctrl-C for all processes, and from torchrun once more for its workers; within seconds none is left."""
    (workplace.folder / SLOW_READING).touch()
    with launched(workplace, write_config(workplace)) as process:
        signalled = time.monotonic()
        for process_id in (process.pid, *running_workers(workplace.folder)):
            os.kill(process_id, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert time.monotonic() - signalled < 15
    assert process.returncode == 1
    assert running_workers(workplace.folder) == []
    run = Finished(1, "", errors, workplace.checkpoints / "run")
    assert errors.count(f"interrupted after step {steps_of(run)[-1]}; go on with --resume latest\n") == 1
    assert "destroy_process_group" not in errors
    assert 'ddp_train.py", line' not in errors, "torchrun alone shows a trace, its own"
    assert find_checkpoint(run.folder, "latest").path.name == f"step_{steps_of(run)[-1]:08d}"


@pytest.mark.slow
def test_a_save_that_takes_longer_than_torchruns_patience(workplace: Workplace) -> None:
    """R54: it kills its workers, after three seconds instead of thirty here; the checkpoint before is the latest."""
    workplace.environment = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "3"}  # read by torch 2.13; others wait longer
    (workplace.folder / SLOW_READING).touch()
    with launched(workplace, write_config(workplace)) as process:
        (workplace.folder / SLOW_DISK).touch()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 1
    assert running_workers(workplace.folder) == []
    assert find_checkpoint(workplace.checkpoints / "run", "latest").path.name == "step_00000005"


@pytest.mark.slow
def test_a_process_alone(workplace: Workplace) -> None:
    """With nohup it goes on when its terminal closes; SIGTERM is as under torchrun."""
    (workplace.folder / SLOW_READING).touch()
    with launched(workplace, write_config(workplace), ["nohup", sys.executable]) as process:
        process.send_signal(signal.SIGHUP)
        time.sleep(1.5)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    last = steps_of(Finished(1, "", errors, workplace.checkpoints / "run"))[-1]
    assert last > 6, "the steps of a second and more"
    assert process.returncode == 1
    assert errors.endswith(f"interrupted after step {last}; go on with --resume latest\n")
    assert find_checkpoint(workplace.checkpoints / "run", "latest").path.name == f"step_{last:08d}"


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


@contextmanager
def launched(
    workplace: Workplace, config: Path, launcher: Sequence[str] = TORCHRUN
) -> Iterator["subprocess.Popen[str]"]:
    """A run, on two ranks unless another launcher is given, that has saved its fifth step and goes on."""
    command = [*launcher, str(REPOSITORY / "tests" / "held_up.py"), str(config), str(workplace.datasets)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **workplace.environment}
    with subprocess.Popen(
        [*command, "--output", str(workplace.checkpoints)],
        cwd=workplace.folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            deadline = time.monotonic() + 120
            while not (workplace.checkpoints / "run" / "latest").exists():
                assert process.poll() is None, process.communicate()[1]
                assert time.monotonic() < deadline
                time.sleep(0.05)
            yield process
        finally:
            process.kill()
