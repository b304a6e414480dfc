"""Trackers beside a run: none can stop, slow or clutter it, and each goes on where it was.

The packages of most tests are stand-ins that fail in one way each; the real ones are in test_services.py.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY
from recorded_runs import event, train_row, validation_row, write_run
from small_configs import small_config

from training.config import Tracking
from training.errors import UserError
from training.metrics import RunLog
from training.tracking import trackers
from training.tracking.trackers import Trackers, check_installed

RECORDING = """
import json, os, time
class Settings:
    def __init__(self, **values): pass
class Run:
    url, offline = "https://example.invalid/run", False
    def __init__(self, **options):
        self.file = open(os.environ["RECORD"], "a", buffering=1)
        self.note("init", options["id"], options["project"], options["name"], options["config"]["seeds"]["weights"])
    def note(self, *what): self.file.write(json.dumps(what) + "\\n")
    def log(self, values, step): self.note("log", step, values)
    def finish(self, exit_code): self.note("finish", exit_code)
def init(**options): return Run(**options)
"""
FAILURES = {
    "import": ("raise ImportError('broken\\npackage')", "ImportError: broken package"),
    "exit": ("raise SystemExit('no login')", "SystemExit: no login"),
    "init": (RECORDING + "def init(**_): raise OSError(28, 'No space left on device')", "No space left on device"),
    "log": (RECORDING + "def log(*values, step): raise ConnectionError('reset')\nRun.log = log", "reset"),
    "text": ("raise OSError('na\\u00efve \\udcff \\033[31m')", "OSError: na\u00efve \\udcff \\x1b[31m"),
    "exit0": ("import os; os._exit(0)", "its process has ended with status 0; training goes on without it"),
    "death": ("import os; os._exit(3)", "its process has ended with status 3; training goes on without it"),
}


class Beside:
    """A run whose metrics are written here, with a stand-in for wandb beside it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.said = folder / "tiny", list[str]()
        write_run(self.folder, [event(0, "start")])
        self._packages = folder / "packages"
        self._packages.mkdir()
        self.record = folder / "record"
        monkeypatch.setenv("PYTHONPATH", str(self._packages))
        monkeypatch.setenv("RECORD", str(self.record))
        self.log = RunLog(self.folder / "metrics.jsonl", True, 20, None)
        monkeypatch.setattr(self.log, "say", self.said.append)

    def start(self, package: str, step: int = 0) -> Trackers:
        (self._packages / "wandb.py").write_text(package)
        config = small_config(name="tiny", tracking={"trackers": ["wandb"], "project": "ours"})
        following = Trackers(self.folder, config, self.log)
        following.start(step)
        return following

    def add(self, *rows: dict[str, Any]) -> None:
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))

    @property
    def noted(self) -> list[list[Any]]:
        return [json.loads(line) for line in self.record.read_text().splitlines()] if self.record.exists() else []


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Beside:
    return Beside(tmp_path, monkeypatch)


def wait_for(condition: Callable[[], Any], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def test_a_run_is_shown_as_it_goes_and_goes_on_under_its_id(beside: Beside) -> None:
    """Two starts: the second, from step 1, does not send again what has been sent, and says so."""
    following = beside.start(RECORDING)
    beside.add(train_row(1), train_row(2), validation_row(2, 4.25))
    wait_for(lambda: len(beside.noted) == 4)
    beside.add(train_row(3))
    following.close()
    init, *logs, finish = beside.noted
    run_id = init[1]
    assert run_id.startswith("tiny-")
    assert init == ["init", run_id, "ours", "tiny", 42]
    assert [(log[1], sorted(log[2])) for log in logs][2:] == [
        (2, ["validation/loss"]),
        (3, ["train/grad_norm", "train/learning_rate", "train/loss", "train/tokens_per_second"]),
    ]
    assert [log[1] for log in logs] == [1, 2, 2, 3]
    assert finish == ["finish", 0]
    assert beside.said == [f"wandb: run {run_id}: https://example.invalid/run"]
    before = len(beside.noted)
    beside.record.write_text("")
    (beside.folder / "metrics.jsonl").write_text(json.dumps(train_row(1)) + "\n")
    following = beside.start(RECORDING, step=1)
    beside.add(*(train_row(step) for step in range(2, 6)))
    following.close()
    assert before == 6
    assert [note[:2] for note in beside.noted] == [["init", run_id], ["log", 4], ["log", 5], ["finish", 0]]
    assert beside.said[-1] == "wandb: keeps steps 2 to 3 as they were before; it goes on behind them"


@pytest.mark.parametrize("failure", FAILURES)
def test_a_tracker_that_fails_is_said_once_and_switched_off(beside: Beside, failure: str) -> None:
    package, reason = FAILURES[failure]
    following = beside.start("print('hello'); import sys; print('there', file=sys.stderr)\n" + package)
    beside.add(train_row(1))
    wait_for(lambda: any(reason in line for line in beside.said))
    beside.add(train_row(2))
    following.close()
    *_, last = beside.said
    assert last.startswith(
        "wandb: switched off, training goes on: " if failure not in ("death", "exit0") else "wandb: "
    )
    assert len([line for line in beside.said if reason in line]) == 1
    if failure not in ("death", "exit0"):
        assert (beside.folder / "tracking" / "wandb.log").read_text() == "hello\nthere\n"


@pytest.mark.parametrize("where", ["init", "log", "finish", "atexit", "stopped"])
def test_a_tracker_that_hangs_is_not_waited_for_long(
    beside: Beside, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Nothing is noticed of it until training ends; `stopped` takes no signal but the last one."""
    monkeypatch.setattr(trackers, "SECONDS_TO_FINISH", 1.5)
    monkeypatch.setattr(trackers, "SECONDS_TO_LEAVE", 1.0)
    hang = "def hang(*_, **__): time.sleep(1000)\n"
    hang += {
        "init": "init = hang",
        "log": "Run.log = hang",
        "finish": "Run.finish = hang",
        "atexit": "import atexit; atexit.register(hang)",
        "stopped": "import signal; os.kill(os.getpid(), signal.SIGSTOP)",
    }[where]
    following = beside.start(RECORDING + hang)
    beside.add(train_row(1))
    wait_for(lambda: beside.said or where in ("init", "stopped"))
    began = time.monotonic()
    following.close()
    assert 1 < time.monotonic() - began < 10
    assert beside.said[-2:] == [
        "waiting for wandb, at most 1.5 seconds",
        "wandb: has not taken all within 1.5 seconds; not waited for any longer",
    ]


PARENT = """
import sys
from pathlib import Path
from small_configs import small_config
from training.metrics import RunLog
from training.tracking.trackers import Trackers
folder = Path(sys.argv[1])
log = RunLog(folder / "metrics.jsonl", True, 20, None)
following = Trackers(folder, small_config(name="tiny", tracking={"trackers": ["wandb"]}), log)
following.start(0)
sys.stdin.read()
"""


def test_a_killed_training_leaves_no_tracker_behind(beside: Beside) -> None:
    """It sends what has been recorded, says that the run has failed, and goes; Ctrl-C is not for it."""
    beside.start(RECORDING).close()
    beside.record.write_text("")
    environment = {**os.environ, "PYTHONPATH": f"{os.environ['PYTHONPATH']}:{REPOSITORY}:{REPOSITORY / 'tests'}"}
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(beside.folder)],
        env=environment,
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    wait_for(lambda: beside.noted)
    beside.add(train_row(1))
    os.killpg(parent.pid, signal.SIGINT)
    parent.kill()
    parent.communicate()
    wait_for(lambda: beside.noted[-1][0] == "finish")
    assert [note[:2] for note in beside.noted[1:]] == [["log", 1], ["finish", 1]]


def test_a_package_that_is_missing_is_told_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "PACKAGES", ("wandb-of-nobody",))
    tracking = Tracking.model_construct(trackers=("tensorboard", "wandb-of-nobody"))
    with pytest.raises(UserError, match=r"^tracking.trackers: the package wandb-of-nobody is not installed; "):
        check_installed(tracking)
    check_installed(Tracking(trackers=("tensorboard",)))
