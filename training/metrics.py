"""What a run records: metrics.jsonl, what is shown of it, and the steps whose results are still on the device."""

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from training.distributed import Group
from training.evaluation import Evaluated
from training.json_file import strict_json
from training.pace import Pace
from training.progress import Best, Progress
from training.step import StepResult

SECONDS_BETWEEN_READS = 1.0
MOST_NONFINITE_IN_A_ROW = 5


@dataclass(frozen=True)
class StepRecord:
    """What a step measured, over all processes, as numbers."""

    step: int
    """Number of the update, from 1."""
    loss: float | None
    """Mean over all targets of the step, in nats; None without targets."""
    loss_min: float | None
    loss_max: float | None
    grad_norm: float
    loss_scale: float
    """The GradScaler's; 1 without one."""
    target_tokens: int
    learning_rate: float
    input_tokens: int
    all_reduces: int = 0
    """Collectives in which the processes exchanged gradients."""
    out_of_range: bool = False
    """Whether a gradient was too large for bitwise mode's integers."""

    @property
    def skipped(self) -> bool:
        """Whether the update was left out: no targets, or a gradient that is not finite."""
        return self.target_tokens == 0 or not math.isfinite(self.grad_norm)

    @property
    def overflow(self) -> bool:
        """Whether a skipped update is only the GradScaler's search for a scale."""
        return self.target_tokens > 0 and self.skipped and self.loss_scale > 1 and not self.out_of_range


class StepReader:
    """Holds the results of steps on the device and reads them from time to time, all at once.

    How many steps lie between two reads follows the speed of rank 0, agreed over the processes in the read itself; and
    so does whether to stop.
    """

    def __init__(self, group: Group, wants_to_stop: Callable[[], bool] = lambda: False) -> None:
        """For a group; `wants_to_stop` says whether this process wishes to end the run."""
        self._group = group
        self._wants_to_stop = wants_to_stop
        self.must_stop = False
        """Whether any process wished to stop at the last read: the same on all."""
        self._waiting: list[tuple[int, StepResult]] = []
        self._steps_per_read = 1
        self._since = time.perf_counter()

    def restart_clock(self) -> None:
        """Leaves the time since the last read out of the training time."""
        self._since = time.perf_counter()

    def add(self, step: int, result: StepResult) -> bool:
        """Takes the result of update `step`, from 1; returns whether it is time to read."""
        self._waiting.append((step, result))
        return len(self._waiting) >= self._steps_per_read

    def read(self) -> tuple[list[StepRecord], float]:
        """The records of all steps since the last read, and the seconds they took. Every rank must call this."""
        waiting, self._waiting = self._waiting, []
        results = [result for _, result in waiting]
        if not results:
            return [], 0.0
        extremes = torch.stack([torch.stack([-result.loss_min, result.loss_max]) for result in results])
        common = torch.stack([_common(result) for result in results])
        extremes = self._group.maximum(extremes)
        sums = self._group.sum(torch.stack([result.loss_sum for result in results]))
        columns = zip(waiting, sums.tolist(), extremes.tolist(), common.tolist(), strict=True)
        records = [_record(step, result, total, *pair, *same) for (step, result), total, pair, same in columns]
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        self._agree_on_next_read(len(records) / seconds)
        return records, seconds

    def _agree_on_next_read(self, steps_per_second: float) -> None:
        wish = torch.zeros(2, dtype=torch.float64, device=self._group.process.device)
        if self._group.process.is_main:
            wish[0] += min(100, max(1, int(steps_per_second * SECONDS_BETWEEN_READS)))
        if self._wants_to_stop():
            wish[1] += 1
        steps, stop = self._group.maximum(wish).tolist()
        self._steps_per_read, self.must_stop = int(steps), bool(stop)


def nonfinite_in_a_row(records: list[StepRecord], before: int) -> int:
    """Non-finite steps in a row at the end of some records, or at the first place where they are too many."""
    count = before
    for record in records:
        if record.target_tokens and not record.overflow:
            count = count + 1 if record.skipped else 0
        if count >= MOST_NONFINITE_IN_A_ROW:
            break
    return count


def _common(result: StepResult) -> Tensor:
    """What is the same on every process."""
    out_of_range = torch.zeros_like(result.grad_norm) if result.out_of_range is None else result.out_of_range
    return torch.stack([result.grad_norm, result.loss_scale, out_of_range.to(result.grad_norm.dtype)])


def _record(
    step: int, result: StepResult, loss_sum: float, low: float, high: float, norm: float, scale: float, out: float
) -> StepRecord:
    targets = result.target_tokens
    return StepRecord(
        step,
        loss_sum / targets if targets else None,
        -low if targets else None,
        high if targets else None,
        norm,
        scale,
        targets,
        result.learning_rate,
        result.input_tokens,
        result.all_reduces,
        bool(out),
    )


class RunLog:
    """metrics.jsonl and the progress shown, of the one process that writes; the same calls do nothing elsewhere."""

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
                self.event(
                    record.step,
                    "nonfinite",
                    loss_scale=record.loss_scale,
                    overflow=record.overflow,
                    out_of_range=record.out_of_range,
                )
        if records and self._is_main:
            self._pace.trained(len(records), seconds)
            self._progress.show(records[-1].step, records[-1].loss, tokens_per_second)

    def validation(self, step: int, evaluated: Evaluated, seconds: float, best: Best | None) -> None:
        """Records a validation loss, how long it took to measure, and says it and the best so far."""
        values = {"loss": evaluated.loss, "target_tokens": evaluated.target_tokens}
        measured = {"bits_per_byte": evaluated.bits_per_byte, "seconds": seconds}
        self._write({"kind": "validation", "step": step, **values, **measured})
        self._pace.evaluated(seconds)
        if self._is_main:
            self._progress.validation(step, evaluated.loss, evaluated.target_tokens, best)

    def event(self, step: int, event: str, **values: Any) -> None:
        """Records something that happened after `step` updates."""
        self._write({"kind": "event", "step": step, "event": event, **values})

    def checkpoint(self, step: int, name: str, is_best: bool, seconds: float, stall: float) -> None:
        """Records a checkpoint, how long writing it took, and how long training waited."""
        self.event(step, "checkpoint", checkpoint=name, best=is_best, seconds=seconds, stall=stall)
        self._pace.saved(stall, seconds)

    def say(self, text: str) -> None:
        """Prints a line, once."""
        if self._is_main:
            self._progress.say(text)

    def sync(self) -> None:
        """Flushes what has been written to the disk."""
        if self._is_main and self._path.exists():
            with self._path.open("rb") as file:
                os.fsync(file.fileno())

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
        if self._is_main:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(strict_json(line) + "\n")
