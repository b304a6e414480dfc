"""What each step measured: kept on the device, and read from time to time over all processes, all at once."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from training.distributed import Group
from training.step import StepResult

SECONDS_BETWEEN_READS = 1.0
MOST_NONFINITE_IN_A_ROW = 5
MOST_SEQUENCES_NAMED = 8

Span = tuple[int, int]
"""Tokens of the training file: the first, and the one behind the last."""


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
    sequences: int = 0
    """Sequences of the step."""
    bad_sequences: int = 0
    """How many of them had a loss that is not finite."""
    bad_spans: tuple[Span, ...] = ()
    """Where the first of these lie."""

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

    def __init__(
        self,
        group: Group,
        wants_to_stop: Callable[[], bool] = lambda: False,
        spans: Callable[[int, Sequence[int]], list[Span]] = lambda step, positions: [],
    ) -> None:
        """For the processes of a run.

        Args:
            group: the processes.
            wants_to_stop: says whether this one wishes to end the run.
            spans: says where the sequences at some positions of a step, from 0, lie in the training file.
        """
        self._group = group
        self._wants_to_stop = wants_to_stop
        self._spans = spans
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
        records = [
            self._with_bad_sequences(_record(step, result, total, *pair, *same), result)
            for (step, result), total, pair, same in columns
        ]
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        self._agree_on_next_read(len(records) / seconds)
        return records, seconds

    def _with_bad_sequences(self, record: StepRecord, result: StepResult) -> StepRecord:
        """The record with the sequences whose loss is not finite; all ranks know from the sum whether to ask."""
        if record.loss is None or math.isfinite(record.loss) or result.losses is None:
            return record
        bad = torch.zeros(result.sequences, device=result.losses.device)
        bad[list(result.positions)] = (~torch.isfinite(result.losses)).to(bad.dtype)
        positions = self._group.maximum(bad).nonzero().flatten().tolist()
        spans = self._spans(record.step - 1, positions[:MOST_SEQUENCES_NAMED])
        return replace(record, sequences=result.sequences, bad_sequences=len(positions), bad_spans=tuple(spans))

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


def what_was_not_finite(record: StepRecord) -> str:
    """Why a step was skipped, and which sequences are to blame."""
    if record.out_of_range:
        return "the gradient was out of bitwise mode's range"
    if not record.bad_sequences:
        return "the gradient was not finite, though each loss was"
    spans = ", ".join(f"[{start:,}, {stop:,})" for start, stop in record.bad_spans)
    more = ", ..." if record.bad_sequences > len(record.bad_spans) else ""
    of_all = f"of {record.bad_sequences:,} of {record.sequences:,} sequences"
    return f"the loss {of_all} was not finite: tokens {spans}{more} of the training file"


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
