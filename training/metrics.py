"""What a run records: metrics.jsonl, and what is shown of it."""

import os
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from training import lock
from training.errors import RunError
from training.evaluation import Evaluated
from training.json_file import strict_json
from training.pace import Pace
from training.progress import Best, Progress
from training.step_records import StepRecord, what_was_not_finite


class RunLog:
    """metrics.jsonl and the progress shown, of the one process that writes; the same calls do nothing elsewhere.

    A line that cannot be written ends the run, but not here: nothing more is written, and `check` raises.
    """

    def __init__(
        self,
        path: Path,
        is_main: bool,
        total_steps: int,
        clip_norm: float | None,
        evaluate_every: int | None = None,
        save_every: int | None = None,
    ) -> None:
        self._path = path
        self._is_main = is_main
        self._clip_norm = clip_norm
        self._pace = Pace(total_steps, evaluate_every, save_every)
        self._progress = Progress(self._pace)
        self.seconds = 0.0
        """Training time since the run's beginning, over resumes."""
        self.all_reduces: int | None = None
        """Exchanges of gradients in the last step recorded; None in the first two, while DDP forms its buckets."""
        self._recorded = 0
        self._failure: str | None = None
        self._one_at_a_time = threading.Lock()
        self.tokens = 0
        """Input tokens since the run's beginning, over resumes."""

    def start(self, step: int, seconds: float, tokens: int, best: Best | None = None) -> None:
        """Begins at a step of the run, having trained for some seconds on some tokens; with the best so far."""
        self.seconds, self.tokens = seconds, tokens
        if self._is_main:
            self._progress.start(step, best)

    def steps(self, records: list[StepRecord], seconds: float) -> None:
        """Records steps that together took some seconds."""
        tokens_per_second = sum(record.input_tokens for record in records) / seconds if records else 0.0
        for record in records:
            self.seconds += seconds / len(records)
            self._recorded += 1
            self.all_reduces = record.all_reduces if self._recorded > 2 else None
            self.tokens += record.input_tokens
            self._write(self._train_line(record, tokens_per_second))
            if record.skipped and record.target_tokens:
                self._nonfinite(record)
        if records and self._is_main:
            self._pace.trained(len(records), seconds)
            self._progress.show(records[-1].step, records[-1].loss, tokens_per_second)

    def _nonfinite(self, record: StepRecord) -> None:
        self.event(
            record.step,
            "nonfinite",
            loss_scale=record.loss_scale,
            overflow=record.overflow,
            out_of_range=record.out_of_range,
            **({"bad_sequences": record.bad_sequences, "bad_spans": record.bad_spans} if record.bad_sequences else {}),
        )
        if record.bad_sequences or not record.overflow:
            self.say(f"step {record.step:,}: {what_was_not_finite(record)}; the update is skipped")

    def validation(self, step: int, evaluated: Evaluated, seconds: float, best: Best | None) -> None:
        """Records a validation loss, how long it took to measure, and says it and the best so far."""
        values = {"loss": evaluated.loss, "target_tokens": evaluated.target_tokens}
        measured = {"bits_per_byte": evaluated.bits_per_byte, "seconds": seconds}
        self._write({"kind": "validation", "step": step, **values, **measured})
        self._pace.evaluated(seconds)
        if self._is_main:
            self._progress.validation(step, evaluated.loss, evaluated.target_tokens, best)

    def event(self, step: int, event: str, **values: Any) -> None:
        """Records something that happened after `step` updates, and the time of day."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self._write({"kind": "event", "step": step, "event": event, "time": now, **values})

    def checkpoint(self, step: int, name: str, is_best: bool, seconds: float, stall: float) -> None:
        """Records a checkpoint, how long writing it took, and how long training waited."""
        self.event(step, "checkpoint", checkpoint=name, best=is_best, seconds=seconds, stall=stall)
        self._pace.saved(stall, seconds)

    def say(self, text: str) -> None:
        """Prints a line, once."""
        if self._is_main:
            self._progress.say(text)

    @property
    def failed(self) -> bool:
        """Whether a line could not be written."""
        return self._failure is not None

    def check(self) -> None:
        """Raises a RunError where a line could not be written."""
        if self._failure is not None:
            raise RunError(self._failure)

    def sync(self) -> None:
        """Flushes what has been written to the disk; a RunError where that is not everything."""
        self._look_at_the_folder()
        self.check()
        if self._is_main and self._path.exists():
            with self._path.open("rb") as file:
                os.fsync(file.fileno())

    def _look_at_the_folder(self) -> None:
        """Makes a failure of it where the folder is no longer this run's: another process may be training there."""
        if self._failure is None and lock.is_lost(self._path.with_name(lock.RUN_LOCK)):
            self._failure = (
                f"{self._path.parent}: was removed or replaced by another folder while this run trained; nothing more "
                "is written; bring back the folder and go on with --resume latest, or start again"
            )

    def close(self) -> None:
        """Ends what is shown of the progress."""
        self._progress.close()

    def _train_line(self, record: StepRecord, tokens_per_second: float) -> dict[str, Any]:
        clipped = self._clip_norm is not None and not record.skipped and record.grad_norm > self._clip_norm
        return {
            "kind": "train",
            "step": record.step,
            "tokens": self.tokens,
            "loss": record.loss,
            "loss_min": record.loss_min,
            "loss_max": record.loss_max,
            "learning_rate": record.learning_rate,
            "grad_norm": record.grad_norm,
            "clipped": clipped,
            "skipped": record.skipped,
            "target_tokens": record.target_tokens,
            "tokens_per_second": tokens_per_second,
            "seconds": self.seconds,
        }

    def _write(self, line: dict[str, Any]) -> None:
        with self._one_at_a_time:  # the loop, the checkpoints' thread and the uploads'
            self._look_at_the_folder()
            if not self._is_main or self.failed:  # behind half a line, another could not be read
                return
            try:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(strict_json(line) + "\n")
            except OSError as error:
                self._failure = (
                    f"{self._path}: step {line['step']} could not be recorded ({error}); the last checkpoint is as it "
                    "was: make room or mend the disk, then --resume latest"
                )
