"""A run followed while it is written: what is new in metrics.jsonl is read, and what it says so far is kept.

Nothing here grows with the run but the offset up to which the file has been read.
"""

import math
import os
import time
from collections import deque
from pathlib import Path
from typing import Any

from training import lock
from training.metrics_file import bad_line, read_row
from training.pace import Pace
from training.progress import Best
from training.yaml_reader import read_yaml

RECENT_STEPS = 100
RECENT_EVENTS = 6
MOST_BINS = 200
BYTES_AT_ONCE = 2**24
SECONDS_OF_SILENCE = 60.0
"""After which a run is over whose lock nobody holds: by then torchrun has started it again, if it does."""
ENDINGS = ("finished", "stopped", "interrupted")


class Tail:
    """The lines of a file that another process writes, each once it is whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._inode: int | None = None

    def read(self) -> tuple[bool, list[bytes]]:
        """Lines since the last call, some megabytes at most; whether they are the first of another file than then."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return False, []
        with file:
            status = os.fstat(file.fileno())
            is_another = status.st_ino != self._inode or status.st_size < self._offset
            if is_another:
                self._inode, self._offset = status.st_ino, 0
            file.seek(self._offset)
            whole, newline, _ = file.read(BYTES_AT_ONCE).rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        return is_another, whole.split(b"\n") if newline else []


class Curve:
    """A series of any length in at most 200 bins of neighbouring values: their means."""

    def __init__(self) -> None:
        self._bins: list[tuple[float, int, int]] = []  # sum, how many of them are finite, how many there are
        self._width = 1

    def add(self, value: float) -> None:
        """Takes the next value; one that is not finite counts for nothing."""
        if not self._bins or self._bins[-1][2] == self._width:
            if len(self._bins) == MOST_BINS:
                pairs = zip(self._bins[::2], self._bins[1::2], strict=True)
                self._bins = [(one[0] + two[0], one[1] + two[1], one[2] + two[2]) for one, two in pairs]
                self._width *= 2
            self._bins.append((0.0, 0, 0))
        total, finite, count = self._bins[-1]
        is_finite = math.isfinite(value)
        self._bins[-1] = (total + (value if is_finite else 0.0), finite + is_finite, count + 1)

    def means(self) -> list[float]:
        """The mean of each bin, in order; nan where nothing is finite."""
        return [total / finite if finite else math.nan for total, finite, _ in self._bins]


class RunSoFar:
    """What the records of a run say, row by row."""

    def __init__(self, config: dict[str, Any]) -> None:
        """For a run with this resolved config."""
        self.clip_norm = _number_in(config, "optimizer", "clip_norm")
        intervals = [_number_in(config, section, "every") for section in ("evaluation", "checkpoint")]
        self._intervals = [None if number is None else int(number) for number in intervals]
        self.step = 0
        self.total_steps: int | None = None
        self.pace: Pace | None = None
        self.last: dict[str, Any] | None = None
        """The newest train row."""
        self.recent: deque[dict[str, Any]] = deque(maxlen=RECENT_STEPS)
        """The newest train rows."""
        self.losses = Curve()
        self.skipped = 0
        self.validation: Best | None = None
        self._validations: deque[Best] = deque(maxlen=RECENT_EVENTS)
        self.best: Best | None = None
        self.events: deque[str] = deque(maxlen=RECENT_EVENTS)
        self.ending: str | None = None
        """One of ENDINGS, once the run says so."""

    @property
    def smoothed_loss(self) -> float:
        """The mean loss of the newest steps."""
        losses = [row["loss"] for row in self.recent if math.isfinite(row["loss"])]
        return sum(losses) / len(losses) if losses else math.nan

    def take(self, row: dict[str, Any]) -> None:
        """Takes the next row, as `read_row` gives it."""
        self.step = max(self.step, row["step"])
        if row["kind"] == "train":
            self._take_step(row)
        elif row["kind"] == "validation":
            self.validation = (row["step"], row["loss"])
            self._validations.append(self.validation)
            if self.pace is not None:
                self.pace.evaluated(_seconds(row, "seconds"))
        else:
            self._take_event(row)

    def _take_step(self, row: dict[str, Any]) -> None:
        if self.pace is not None:
            self.pace.trained(1, row["seconds"] - (self.last["seconds"] if self.last else 0.0))
        self.last = row
        self.recent.append(row)
        self.losses.add(row["loss"])
        self.skipped += row["skipped"]

    def _take_event(self, row: dict[str, Any]) -> None:
        name = row["event"]
        self.ending = name if name in ENDINGS else self.ending
        if name in ("start", "resume"):
            self.ending = None
            self.total_steps = row.get("total_steps")
            self.pace = None if self.total_steps is None else Pace(self.total_steps, *self._intervals)
        elif name == "checkpoint":
            if self.pace is not None:
                self.pace.saved(_seconds(row, "stall"), _seconds(row, "seconds"))
            if row.get("best"):  # it is recorded when it is written: steps, even evaluations, after its own
                self.best = next((best for best in self._validations if best[0] == row["step"]), self.best)
        self.events.append(event_line(row))


def _number_in(config: dict[str, Any], section: str, key: str) -> float | None:
    """A number of a config that nobody has checked; None where there is none that could be meant."""
    values = config.get(section)
    value = values.get(key) if isinstance(values, dict) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        return None
    return value


def _seconds(row: dict[str, Any], key: str) -> float:
    return float(row.get(key) or 0.0)


def event_line(row: dict[str, Any]) -> str:
    """An event in a few words."""
    name = row["event"]
    text = {
        "start": "started",
        "resume": f"resumed from {row.get('checkpoint')}",
        "checkpoint": f"saved {row.get('checkpoint')}{', the best so far' if row.get('best') else ''}",
        "nonfinite": _not_finite(row),
        "uploaded": "state uploaded",
        "upload_failed": f"upload failed: {row.get('reason')}",
    }.get(name, name)
    if name == "resume" and row.get("changed"):
        text += f", changed: {', '.join(row['changed'])}"
    return f"step {row['step']:,}: {text}"


def _not_finite(row: dict[str, Any]) -> str:
    if bad := row.get("bad_sequences"):
        return f"the loss of {bad:,} sequence{'s' * (bad > 1)} was not finite"
    return "the loss scale overflowed" if row.get("overflow") else "the gradient was not finite"


class FollowedRun:
    """A run's folder that is looked at again and again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / "metrics.jsonl"
        self._tail = Tail(self._path)
        self._lines = 0
        self.so_far = RunSoFar({})

    def look(self) -> None:
        """Takes what has been written since the last look.

        Raises:
            UserError: config.yaml or a line of metrics.jsonl cannot be read.
        """
        lines = [b""]
        while lines:
            is_another, lines = self._tail.read()
            if is_another:
                self._lines, self.so_far = 0, RunSoFar(read_yaml(self.folder / "config.yaml"))
            for line in lines:
                self._lines += 1
                self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            self.so_far.take(read_row(line))
        except ValueError as problem:
            raise bad_line(self._path, self._lines, problem) from problem

    @property
    def silence(self) -> float:
        """Seconds since the run last wrote."""
        try:
            return max(0.0, time.time() - self._path.stat().st_mtime)
        except FileNotFoundError:
            return 0.0

    def is_over(self) -> bool:
        """Whether no process trains it any more."""
        if lock.is_held(self.folder / lock.RUN_LOCK):
            return False
        return self.so_far.ending is not None or self.silence > SECONDS_OF_SILENCE or not self._path.exists()

    def sentence(self) -> str:
        """How the run has ended."""
        run = self.so_far
        how_far = f"step {run.step:,}" + ("" if run.total_steps is None else f" of {run.total_steps:,}")
        if run.ending is not None:
            return f"{self.folder}: {run.ending} at {how_far}"
        return f"{self.folder}: no process is training it now; it has reached {how_far}"
