"""The trackers of a run, as training knows them: processes that follow its metrics.jsonl, each on its own.

Training starts them and, at its end, waits for them a little. Between the two it has nothing to do with them: it writes
metrics.jsonl anyway. So no tracker can stop, slow or clutter a run: not by an exception, a network that hangs, a
missing login, a full disk, what it prints or what it does when a process ends.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from training.config import REPOSITORY, RunConfig, Tracking, config_mapping
from training.errors import UserError, one_line
from training.metrics import RunLog
from training.tracking.follower import END, TOLD, given_up
from training.tracking.services import About

PACKAGES = ("trackio", "wandb")
"""Trackers that are packages; TensorBoard's files are our own writing."""
SECONDS_TO_FINISH = 60.0
"""What a tracker may take at the end of training for what it has not taken by then."""
SECONDS_TO_LEAVE = 5.0


def check_installed(tracking: Tracking) -> None:
    """Raises a UserError if a tracker's package is not there."""
    for name in [name for name in tracking.trackers if name in PACKAGES]:
        try:
            distribution(name)
        except PackageNotFoundError:
            raise UserError(
                f"tracking.trackers: the package {name} is not installed; {name} needs it: "
                f"pip install -e '.[tracking]', or leave {name} out"
            ) from None


class Trackers:
    """The processes that show a run elsewhere."""

    def __init__(self, folder: Path, config: RunConfig, log: RunLog) -> None:
        self._folder, self._config, self._log = folder, config, log
        self._following: dict[str, subprocess.Popen[str]] = {}
        self._listening: list[threading.Thread] = []
        self._closing = False

    def start(self, step: int) -> None:
        """Starts them at a step of the run; metrics.jsonl is cut back to it."""
        for name in self._config.tracking.trackers:
            try:
                process = self._start(name, step)
            except OSError as error:
                self._log.say(f"{name}: cannot be started ({error}); training goes on without it")
                continue
            self._following[name] = process
            thread = threading.Thread(target=self._listen, args=(name, process), name=f"tracker-{name}", daemon=True)
            thread.start()
            self._listening.append(thread)

    def close(self) -> None:
        """Tells them that the run has come to its end, and waits until they have taken all, but not for ever."""
        self._closing = True
        for process in self._following.values():
            with suppress(OSError):
                assert process.stdin is not None, "it was started with one"
                process.stdin.write(END)
                process.stdin.close()
        deadline = time.monotonic() + SECONDS_TO_FINISH + SECONDS_TO_LEAVE
        for name, process in self._following.items():
            with suppress(subprocess.TimeoutExpired):
                process.wait(1)
            if process.poll() is None:
                self._log.say(f"waiting for {name}, at most {SECONDS_TO_FINISH:g} seconds")
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._log.say(given_up(name, SECONDS_TO_FINISH))
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for thread in self._listening:
            thread.join(1)

    def _start(self, name: str, step: int) -> "subprocess.Popen[str]":
        tracking = self._config.tracking
        about = About(
            tracker=name,
            folder=str(self._folder.resolve()),
            run=self._config.name,
            project=tracking.project,
            space=tracking.space,
            step=step,
            seconds=self._log.seconds,
            patience=SECONDS_TO_FINISH,
            config=config_mapping(self._config),
        )
        path = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "training.tracking.follower"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *path])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",  # as the follower's, whatever the locale
            errors="replace",
            start_new_session=True,  # Ctrl-C is for training, which then ends, and that is how a tracker hears of it
        )
        assert process.stdin is not None, "it was asked for"
        with suppress(OSError):  # it has ended already: _listen says so
            process.stdin.write(json.dumps(asdict(about)) + "\n")
            process.stdin.flush()
        return process

    def _listen(self, name: str, process: "subprocess.Popen[str]") -> None:
        """Says what a tracker has to say, and that it has ended if it does not do so itself."""
        assert process.stdout is not None, "it was asked for"
        with process.stdout as sentences:
            for line in sentences:
                self._log.say(one_line(line.rstrip("\n")))
        status = process.wait()
        if status not in (TOLD, -signal.SIGKILL if self._closing else TOLD):
            self._log.say(f"{name}: its process has ended with status {status}; training goes on without it")
