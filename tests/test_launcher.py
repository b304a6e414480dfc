"""A worker ends with its launcher, and at once where one before it was told of a mistake."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from training.launcher import is_news, leave_where_a_mistake_was_told, note_mistake

# Killed in the second in which the worker would import PyTorch.
LAUNCHER = """
import subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", '''
import training.launcher
import time
print("ready", flush=True)
time.sleep(1)
training.launcher.leave_with_launcher()
time.sleep(60)
'''])
time.sleep(60)
"""


def test_a_worker_ends_with_its_launcher() -> None:
    """Killed, so that it cannot end its workers itself; the pipe closes when the last process that holds it is gone."""
    with subprocess.Popen([sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "ready\n"
        launcher.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        assert launcher.stdout.read() == ""
        assert time.monotonic() - killed < 10


@pytest.fixture
def starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As a worker in the first of a torchrun's starts; its folder is that of torchrun."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "run" / "attempt_0" / "1" / "error.json"))
    (tmp_path / "run" / "attempt_0" / "1").mkdir(parents=True)
    return monkeypatch


def start_again(starts: pytest.MonkeyPatch, run: Path) -> None:
    """The second start, of which torchrun keeps nothing of the first but their common folder."""
    starts.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    starts.setenv("TORCHELASTIC_ERROR_FILE", str(run / "attempt_1" / "0" / "error.json"))


def test_after_a_mistake_what_is_started_again_ends_at_once(starts: pytest.MonkeyPatch, tmp_path: Path) -> None:
    leave_where_a_mistake_was_told()
    note_mistake()
    start_again(starts, tmp_path / "run")
    with pytest.raises(SystemExit) as left:
        leave_where_a_mistake_was_told()
    assert left.value.code == 2
    start_again(starts, tmp_path / "another")
    leave_where_a_mistake_was_told()


def test_a_restart_says_only_what_is_new(starts: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The same failure is told once; another one after a restart is told too."""
    assert is_news("error: the disk is full")
    start_again(starts, tmp_path / "run")
    assert not is_news("error: the disk is full")
    assert is_news("error: the disk is gone")
    starts.setenv("TORCHELASTIC_ERROR_FILE", "")  # torchrun has no folder: only the first start speaks
    assert not is_news("error: the disk has come back")
    starts.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert is_news("error: the disk is full")
    note_mistake()
    leave_where_a_mistake_was_told()
