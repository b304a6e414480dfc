"""Uploads of the state during a run, by the real client in a process of its own: the newest wins."""

import json
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY
from fake_hub import TOKEN, FakeHub
from recorded_runs import event, full_run
from small_checkpoints import save
from small_configs import small_config

from training.checkpoint_files import find_checkpoint
from training.hub.background_upload import BRANCH, HELD
from training.metrics import RunLog
from training.metrics_file import read_metrics
from training.session import uploads_of

NAME = "tester/model"
ABANDON = -1
PROGRAM = """
import io, json, sys, time
from pathlib import Path
from impatient import hurry
hurry()
from training.hub import background_upload
from training.metrics import RunLog

sys.stderr = said = io.StringIO()
for line in sys.stdin:
    run, step, seconds = json.loads(line)
    folder = Path(run)
    began = time.perf_counter()
    if step is None:
        background_upload.SECONDS_TO_WAIT_AT_THE_END = seconds
        uploads.close()
    elif step < 0:
        uploads.abandon()
    else:
        if step == 1:
            log = RunLog(folder / "metrics.jsonl", True, 20, None)
            uploads = background_upload.BackgroundUploads(folder, "tester/model", True, log)
            said.truncate(0)
        uploads.take(folder / f"step_{step:08d}", step)
    print(json.dumps([time.perf_counter() - began, said.getvalue().strip("\\0")]), flush=True)
"""


class Uploader:
    """The process; each request is answered with the seconds it took and all that has been said."""

    def __init__(self, hub: FakeHub, home: Path) -> None:
        environment = hub.environment(home, HF_TOKEN=TOKEN, PYTHONPATH=f"{REPOSITORY}:{REPOSITORY / 'tests'}")
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, run: Path, step: int | None, seconds: float = 60) -> tuple[float, str]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([str(run), step, seconds]) + "\n")
        self.process.stdin.flush()
        took, said = json.loads(self.process.stdout.readline())
        return took, said

    def take(self, run: Path, step: int) -> None:
        """Gives it a checkpoint that is written now; that takes no time to speak of."""
        save(run, step)
        took, _ = self.ask(run, step)
        assert took < 0.5

    def close(self, run: Path, seconds: float = 60) -> list[str]:
        """What has been said by the end."""
        return self.ask(run, None, seconds)[1].splitlines()


@pytest.fixture(scope="module")
def uploader(module_hub: FakeHub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Uploader]:
    uploader = Uploader(module_hub, tmp_path_factory.mktemp("home"))
    yield uploader
    uploader.process.communicate(timeout=120)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return full_run(tmp_path / "run")


def events(run: Path) -> list[dict[str, Any]]:
    return read_metrics(run / "metrics.jsonl").events_named("uploaded", "upload_failed")


def wait_for(hub: FakeHub, requests: int) -> None:
    """Until so many commits have been asked for."""
    while hub.count("POST", "/commit/") < requests:
        time.sleep(0.01)


@pytest.mark.slow
def test_one_at_a_time_and_the_newest_wins(hub: FakeHub, uploader: Uploader, run: Path) -> None:
    """While the first is under way two more come; the checkpoints themselves may go at once."""
    hub.fail("/commit/", delay=1.0, times=1)
    uploader.take(run, 1)
    wait_for(hub, 1)
    for step in (2, 3):
        uploader.take(run, step)
        shutil.rmtree(run / f"step_{step:08d}")
    assert {path.name for path in (run / HELD).iterdir()} == {"step_00000001", "step_00000003"}
    said = uploader.close(run)
    assert hub.titles("model", NAME, BRANCH) == ["added", "State after step 1", "State after step 3"]
    assert hub.files("model", NAME) == [], "the model's own branch is for the result"
    assert [(one["event"], one["step"]) for one in events(run)] == [("uploaded", 1), ("uploaded", 3)]
    page = f"{hub.url}/{NAME}/tree/{BRANCH}"
    assert said == [
        f"waiting for the upload of the training state to {NAME}",
        f"step 1: state uploaded to {page}",
        f"step 3: state uploaded to {page}",
    ]
    assert not (run / HELD).exists()


@pytest.mark.slow
def test_the_branch_is_a_run_that_can_go_on(hub: FakeHub, uploader: Uploader, run: Path, tmp_path: Path) -> None:
    uploader.take(run, 1)
    uploader.close(run)
    copy = tmp_path / "copy"
    for name in hub.files("model", NAME, BRANCH):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes(hub.read("model", NAME, name, BRANCH))
    assert sorted(path.name for path in copy.iterdir()) == ["config.yaml", "metrics.jsonl", "step_00000001"]
    assert find_checkpoint(copy, "latest").path.name == "step_00000001"
    assert (copy / "config.yaml").read_bytes() == (run / "config.yaml").read_bytes()


def test_a_failure_is_one_line_and_an_event(hub: FakeHub, uploader: Uploader, run: Path) -> None:
    hub.fail("/commit/", 403, times=1)
    uploader.take(run, 1)
    wait_for(hub, 1)
    while not events(run):
        time.sleep(0.01)
    uploader.take(run, 2)
    said = uploader.close(run)
    reason = f"{NAME}: the token may not write there (HTTP 403: injected); use one that may, or another repository"
    failed = event(1, "upload_failed", repository=NAME, branch=BRANCH, reason=reason)
    assert events(run)[0] == failed | {"time": events(run)[0]["time"]}
    assert events(run)[1]["event"] == "uploaded"
    assert f"step 1: the state was not uploaded, training goes on: {reason}" in said
    assert hub.titles("model", NAME, BRANCH) == ["added", "State after step 2"]


def test_whatever_fails_the_next_state_is_uploaded(hub: FakeHub, uploader: Uploader, run: Path) -> None:
    """Files that vanish, which must not be taken for files to remove; and a disk on which nothing can be recorded."""
    hub.fail("/commit/", delay=1.0, times=1)
    uploader.take(run, 1)
    wait_for(hub, 1)
    uploader.take(run, 2)
    shutil.rmtree(run / HELD / "step_00000002")
    while len(events(run)) < 2:
        time.sleep(0.01)
    assert "FileNotFoundError" in events(run)[1]["reason"]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.prlimit(uploader.process.pid, resource.RLIMIT_FSIZE, ((run / "metrics.jsonl").stat().st_size, hard))
    uploader.take(run, 3)
    while (run / HELD / "step_00000003").exists():
        time.sleep(0.01)
    resource.prlimit(uploader.process.pid, resource.RLIMIT_FSIZE, (soft, hard))
    uploader.take(run, 4)
    uploader.close(run)
    # Behind the record that failed none is written: the run is about to end.
    assert [(one["event"], one["step"]) for one in events(run)] == [("uploaded", 1), ("upload_failed", 2)]
    assert hub.titles("model", NAME, BRANCH)[1:] == [f"State after step {step}" for step in (1, 3, 4)]


def test_nothing_is_kept_of_a_run_that_was_stopped(hub: FakeHub, uploader: Uploader, run: Path, tmp_path: Path) -> None:
    """By Ctrl-C: at once, and without a word. By a kill: when the run is opened again, with `hub.every` or without."""
    hub.fail("/commit/", delay=1.0, times=1)
    uploader.take(run, 1)
    wait_for(hub, 1)
    uploader.take(run, 2)
    assert uploader.ask(run, ABANDON)[1] == ""
    assert not (run / HELD).exists()
    said = uploader.close(run)
    assert not any("not uploaded" in line for line in said)
    held = tmp_path / "other" / HELD / "step_00000009"
    held.mkdir(parents=True)
    config = small_config()
    assert uploads_of(config, tmp_path / "other", RunLog(tmp_path / "log", False, 1, None)) is None
    assert not held.parent.exists()


def test_the_end_does_not_wait_for_ever(hub: FakeHub, uploader: Uploader, run: Path) -> None:
    hub.fail("/commit/", delay=3.0, times=1)
    uploader.take(run, 1)
    wait_for(hub, 1)
    began = time.monotonic()
    said = uploader.close(run, seconds=0.2)
    assert time.monotonic() - began < 2
    assert said[-1] == f"{NAME}: the training state is still being uploaded; not waited for any longer"
