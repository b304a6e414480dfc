"""Uploads the state of a run while it trains (`hub.every`), so that a machine that is lost takes only steps with it.

The branch `training-state` of the run's repository holds what a run's folder holds: config.yaml, metrics.jsonl and the
newest checkpoint that was due. Downloaded into checkpoints/<run>/, it can be resumed, evaluated, exported; the branch's
history has the earlier ones.
"""

import os
import shutil
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.checkpoint_files import CONTENTS, MANIFEST
from training.errors import RunError
from training.hub.hub_client import first_line
from training.hub.hub_upload import Destination, files_of, upload_files
from training.metrics import RunLog
from training.run_folder import CONFIG, METRICS

BRANCH = "training-state"
HELD = ".training_state.partial"
SECONDS_TO_WAIT_AT_THE_END = 600.0


def remove_held(run: Path) -> None:
    """Removes what a run keeps for its uploads, or what one that was killed has left: links hold whole checkpoints."""
    shutil.rmtree(run / HELD, ignore_errors=True)


@dataclass(frozen=True)
class Held:
    """A state that is kept for its upload."""

    step: int
    folder: Path
    files: dict[str, Path]
    """By their names in the repository."""


class BackgroundUploads:
    """Uploads what it is given in a thread of its own: one at a time, and of those that wait only the newest.

    A failure is a line and an event; training goes on.
    """

    def __init__(self, run: Path, repository: str, private: bool, log: RunLog) -> None:
        self._run, self._log = run, log
        self._to = Destination(repository, private=private, branch=BRANCH)
        self._wakes = threading.Condition()
        self._waiting: Held | None = None
        self._busy = self._closing = False
        self._thread: threading.Thread | None = None
        self._abandoned = False

    def take(self, checkpoint: Path, step: int) -> None:
        """Queues a checkpoint, in place of one that still waits.

        Its files are linked, not copied: they stay while they are uploaded, even when the checkpoint is removed.
        """
        held = self._run / HELD / checkpoint.name
        try:
            shutil.rmtree(held, ignore_errors=True)
            (held / checkpoint.name).mkdir(parents=True)
            for name in (*CONTENTS, MANIFEST):
                os.link(checkpoint / name, held / checkpoint.name / name)
            for name in (CONFIG, METRICS):
                shutil.copyfile(self._run / name, held / name)
            files = files_of(held)  # now: one that vanishes until the upload must not be taken for one to remove
        except OSError as error:
            self._fail(step, f"its files cannot be kept for that ({error})")
            return
        with self._wakes:
            passed_over, self._waiting = self._waiting, Held(step, held, files)
            if passed_over is not None and passed_over.folder != held:
                shutil.rmtree(passed_over.folder, ignore_errors=True)
            self._wakes.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="background-upload", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Waits until all is uploaded or has failed, but not for ever."""
        if self._thread is None:
            return
        with self._wakes:
            self._closing = True
            self._wakes.notify()
            if self._busy or self._waiting is not None:
                self._log.say(f"waiting for the upload of the training state to {self._to.repository}")
        self._thread.join(SECONDS_TO_WAIT_AT_THE_END)
        if self._thread.is_alive():
            self._log.say(
                f"{self._to.repository}: the training state is still being uploaded; not waited for any longer"
            )
        else:
            remove_held(self._run)

    def abandon(self) -> None:
        """Removes what is kept for uploads; for the end of the run, whatever ends it."""
        self._abandoned = True
        remove_held(self._run)

    def _work(self) -> None:
        while True:
            with self._wakes:
                self._busy = False
                while self._waiting is None:
                    if self._closing:
                        return
                    self._wakes.wait()
                held, self._waiting, self._busy = self._waiting, None, True
            self._upload(held)
            shutil.rmtree(held.folder, ignore_errors=True)

    def _upload(self, held: Held) -> None:
        step, began = held.step, time.perf_counter()
        try:
            commit = upload_files(held.files, self._to, f"State after step {step:,}", say=None, stale=None)
        except RunError as error:
            self._fail(step, str(error))
        except Exception as error:  # whatever it is: without its thread, the states to come would wait for nobody
            self._fail(step, first_line(error))
        else:
            self._record(step, "uploaded", commit=commit, seconds=time.perf_counter() - began)
            self._log.say(f"step {step:,}: state uploaded to {self._to.page}")

    def _record(self, step: int, event: str, **values: Any) -> None:
        self._log.event(step, event, repository=self._to.repository, branch=BRANCH, **values)

    def _fail(self, step: int, reason: str) -> None:
        if self._abandoned:
            return
        self._record(step, "upload_failed", reason=reason)
        self._log.say(f"step {step:,}: the state was not uploaded, training goes on: {reason}")
