"""Saves checkpoints while training goes on: the state is copied, and a thread writes the copy; one at a time.

Neither safetensors' writing nor hashing holds Python's lock, so that training waits for the copy alone.
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from training.checkpoint import publish
from training.errors import RunError
from training.hub.background_upload import BackgroundUploads
from training.metrics import RunLog
from training.snapshot import Snapshot, TrainingState, memory_for, take_snapshot

SECONDS_BEFORE_RETRY = 1.0


class CheckpointWriter:
    """Writes a run's checkpoints, each once the last one is there; of the one process that saves.

    A failure is kept, and raised by `take` and `wait`.
    """

    def __init__(self, run_folder: Path, keep: int, log: RunLog, uploads: BackgroundUploads | None) -> None:
        """For checkpoints/<run>, where the newest `keep` and the best stay; `uploads` takes those that are for it."""
        self._folder, self._keep, self._log, self._uploads = run_folder, keep, log, uploads
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint-writer")
        self._writing: Future[None] | None = None
        self._kept: Snapshot | None = None

    @property
    def failed(self) -> bool:
        """Whether a checkpoint could not be written, as far as that is known."""
        return self._writing is not None and self._writing.done() and self._writing.exception() is not None

    def prepare(self, model: nn.Module, state: TrainingState) -> None:
        """Gets the memory for the copies of a run that begins, in the thread: the first save need not wait for it."""

        def get_memory() -> None:
            with suppress(RuntimeError, MemoryError):  # the first save tries again, and fails where it must
                self._kept = memory_for(model, state)

        self._writing = self._thread.submit(get_memory)

    def take(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: TrainingState, upload: bool) -> None:
        """Waits until the last checkpoint is written, copies the state, and starts to write the copy.

        Args:
            model: wrapped or not.
            optimizer: of the model.
            state: the counters that belong to it.
            upload: whether this one is to be uploaded too.

        Raises:
            RunError: the last checkpoint could not be written.
        """
        began = time.perf_counter()
        self.wait()
        self._kept = take_snapshot(model, optimizer, state, self._kept)
        stall = time.perf_counter() - began
        self._writing = self._thread.submit(self._write, self._kept, stall, upload)

    def wait(self) -> None:
        """Waits until the last checkpoint is written.

        Raises:
            RunError: its weights are not finite, or the disk refuses; the checkpoint before is as it was.
        """
        if self._writing is not None:
            self._writing.result()

    def close(self) -> None:
        """Ends the thread once the last checkpoint is written, or has failed."""
        self._thread.shutdown()

    def _write(self, snapshot: Snapshot, stall: float, upload: bool) -> None:
        began, state = time.perf_counter(), snapshot.state
        if not _is_finite(snapshot):
            raise RunError(
                f"{self._folder}: weights are not finite after step {state.step}, so they are not saved; the last "
                "checkpoint is as it was: lower optimizer.learning_rate or set optimizer.clip_norm"
            )
        try:
            written = self._publish(snapshot)
            seconds = time.perf_counter() - began
            self._log.checkpoint(state.step, written.name, state.best_step == state.step, seconds, stall)
        except OSError as error:
            raise RunError(
                f"{self._folder}: step {state.step} could not be saved ({error}); the last checkpoint is as it was: "
                "make room or mend the disk, then --resume latest"
            ) from error
        if upload and self._uploads is not None:
            self._uploads.take(written, state.step)

    def _publish(self, snapshot: Snapshot) -> Path:
        """Publishes a checkpoint, at the second attempt if need be: file systems in a network stumble now and then."""
        try:
            return self._publish_once(snapshot)
        except OSError as error:
            self._log.say(f"{self._folder}: step {snapshot.state.step} could not be saved ({error}); trying once more")
        time.sleep(SECONDS_BEFORE_RETRY)
        return self._publish_once(snapshot)

    def _publish_once(self, snapshot: Snapshot) -> Path:
        self._log.sync()  # a checkpoint is never newer than its metrics
        return publish(self._folder, snapshot, self._keep)


def _is_finite(snapshot: Snapshot) -> bool:
    """Whether all weights are; their extremes tell, without a second array of the weights' size."""
    return all(bool(torch.isfinite(torch.stack(weight.aminmax())).all()) for weight in snapshot.weights.values())
