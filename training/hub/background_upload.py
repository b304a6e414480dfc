"""Uploads the state of a run while it trains (`hub.every`), so that a machine that is lost takes only steps with it.

The branch `training-state` of the run's repository holds what a run's folder holds: config.yaml, metrics.jsonl and the
newest checkpoint that was due. Downloaded into checkpoints/<run>/, it can be resumed, evaluated, exported; the branch's
history has the earlier ones.
"""

import os
import shutil
import threading
import time
from pathlib import Path

from training.errors import RunError
from training.hub.hub_upload import Destination, files_of, upload_files
from training.metrics import RunLog
from training.run_folder import CONFIG, METRICS

BRANCH = "training-state"
HELD = ".training_state.partial"
SECONDS_TO_WAIT_AT_THE_END = 600.0


class BackgroundUploads:
    """Uploads what it is given in a thread of its own: one at a time, and of those that wait only the newest.

    A failure is a line and an event; training goes on.
    """

    def __init__(self, run: Path, repository: str, private: bool, log: RunLog) -> None:
        self._run, self._log = run, log
        self._to = Destination(repository, private=private, branch=BRANCH)
        self._wakes = threading.Condition()
        self._waiting: tuple[int, Path] | None = None
        self._busy = self._closing = False
        self._thread: threading.Thread | None = None

    def take(self, checkpoint: Path, step: int) -> None:
        """Queues a checkpoint, in place of one that still waits.

        Its files are linked, not copied: they stay while they are uploaded, even when the checkpoint is removed.
        """
        held = self._run / HELD / checkpoint.name
        try:
            if self._thread is None:
                shutil.rmtree(self._run / HELD, ignore_errors=True)  # of a run that was killed
            shutil.rmtree(held, ignore_errors=True)
            (held / checkpoint.name).mkdir(parents=True)
            for file in checkpoint.iterdir():
                os.link(file, held / checkpoint.name / file.name)
            for name in (CONFIG, METRICS):
                shutil.copyfile(self._run / name, held / name)
        except OSError as error:
            self._fail(step, f"its files cannot be kept for that ({error})")
            return
        with self._wakes:
            passed_over, self._waiting = self._waiting, (step, held)
            if passed_over is not None and passed_over[1] != held:
                shutil.rmtree(passed_over[1], ignore_errors=True)
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
            shutil.rmtree(self._run / HELD, ignore_errors=True)

    def _work(self) -> None:
        while True:
            with self._wakes:
                self._busy = False
                while self._waiting is None:
                    if self._closing:
                        return
                    self._wakes.wait()
                (step, held), self._waiting, self._busy = self._waiting, None, True
            self._upload(step, held)
            shutil.rmtree(held, ignore_errors=True)

    def _upload(self, step: int, held: Path) -> None:
        began = time.perf_counter()
        try:
            commit = upload_files(files_of(held), self._to, f"State after step {step:,}", say=None, stale=None)
        except RunError as error:
            self._fail(step, str(error))
            return
        self._log.event(
            step,
            "uploaded",
            repository=self._to.repository,
            branch=BRANCH,
            commit=commit,
            seconds=time.perf_counter() - began,
        )
        self._log.say(f"step {step:,}: state uploaded to {self._to.page}")

    def _fail(self, step: int, reason: str) -> None:
        self._log.event(step, "upload_failed", repository=self._to.repository, branch=BRANCH, reason=reason)
        self._log.say(f"step {step:,}: the state was not uploaded, training goes on: {reason}")
