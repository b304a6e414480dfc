"""metrics.jsonl read back: its fields, and what is refused. training/metrics.py writes it."""

import io
import math
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from training.errors import UserError
from training.json_file import parse_json

TRAIN_FIELDS: dict[str, type] = {
    "step": int,
    "tokens": int,
    "loss": float,
    "loss_min": float,
    "loss_max": float,
    "learning_rate": float,
    "grad_norm": float,
    "clipped": bool,
    "skipped": bool,
    "target_tokens": int,
    "tokens_per_second": float,
    "seconds": float,
}
VALIDATION_FIELDS: dict[str, type] = {
    "step": int,
    "loss": float,
    "target_tokens": int,
    "bits_per_byte": float,
}
EVENT_FIELDS: dict[str, type] = {
    "total_steps": int,
    "parameters": int,
    "tokens_per_step": int,
    "bad_sequences": int,
    "tokens": int,
    "seconds": float,
    "best_step": int,
    "best_loss": float,
    "had_reached": int,
    "starts": int,
    "layout": dict,
    "documents": dict,
    "changed": dict,
    "checkpoint": str,
    "dataset_revision": str,
    "weights_sha256": str,
    "data_order_sha256": str,
    "validation_sha256": str,
    "tokenizer_sha256": str,
}
"""What is read again of events; each may be missing or null."""
MOST_GAPS = 5
FIELDS = {"train": TRAIN_FIELDS, "validation": VALIDATION_FIELDS}
# What a field takes from JSON, and up to which size: a float may lack its point; 1e999 is read as infinity.
ACCEPTED = {int: ((int,), 2**53), float: ((int, float), sys.float_info.max), bool: ((bool,), 1)}

Event = dict[str, Any]


@dataclass(frozen=True)
class Metrics:
    """What a metrics.jsonl holds.

    `train` and `validation` are structured arrays with an element per row and a field per key of the file:
    `train["loss"]` is a column, `train[-1]["loss"]` one value. A null is nan. Losses are in nats per token.
    Events are the file's own objects, in its order.
    """

    train: NDArray[np.void]
    validation: NDArray[np.void]
    events: list[Event]

    def events_named(self, *names: str) -> list[Event]:
        """The events of these names, in the order of the file."""
        return [event for event in self.events if event["event"] in names]

    @property
    def ending(self) -> str:
        """finished, stopped or interrupted; start or resume for a run that goes on or was killed."""
        events = self.events_named("start", "resume", "finished", "stopped", "interrupted")
        return str(events[-1]["event"]) if events else "start"

    @property
    def reached(self) -> int:
        """The step that the run has come to, also where the rows before it were lost."""
        told = [event["step"] for event in self.events_named("start", "resume", "finished", "stopped", "interrupted")]
        return max([*told, *self.train["step"][-1:].tolist()], default=0)

    def tokens_and_seconds(self) -> tuple[int, float] | None:
        """Input tokens and training time since the run's beginning; None where the record does not say."""
        if self.reached in self.train["step"][-1:]:
            return int(self.train[-1]["tokens"]), float(self.train[-1]["seconds"])
        told = [event for event in self.events if event["step"] == self.reached and event.get("tokens") is not None]
        return (int(told[-1]["tokens"]), float(told[-1].get("seconds") or 0.0)) if told else None

    def lacking(self, last: int = 0) -> str | None:
        """Which steps have no row, up to the one that the run has reached or a later `last`; None where all have."""
        return _gaps(self.train["step"], max(self.reached, last))

    def lacking_up_to(self, step: int) -> str | None:
        """Which of the first `step` steps have no row."""
        return _gaps(self.train["step"][self.train["step"] <= step], step)

    def best_validation(self) -> np.void | None:
        """The validation row that the link `best` stands for; None without one.

        A new best is saved at once, so it is that of the last checkpoint saved as best: the run knows which losses
        compare, while the numbers recorded are over all there is at the end, over `evaluation.tokens` before, and
        over something else again after a resumption that changes what is validated on. Where no checkpoint says, it
        is the lowest (the earliest, if several share it) of those over as many targets as the first. A row that was
        lost is what a later beginning or end of the run says of it, over 0 targets.
        """
        rows = self.validation[np.isfinite(self.validation["loss"])]
        saved = [event["step"] for event in self.events_named("checkpoint") if event.get("best")]
        candidates = rows[np.isin(rows["step"], saved)][-1:]
        if not len(candidates):
            candidates = rows[rows["target_tokens"] == self.validation["target_tokens"][:1]]
        best: np.void | None = candidates[np.argmin(candidates["loss"])] if len(candidates) else None
        told = [event for event in self.events if event.get("best_step") and event.get("best_loss") is not None]
        best_step = told[-1]["best_step"] if told else 0
        if best_step > max(saved, default=0) and best_step not in self.validation["step"]:
            lost = (told[-1]["best_step"], told[-1]["best_loss"], 0, math.nan)
            best = np.array([lost], dtype=self.validation.dtype)[0]
        return best

    def validation_curve(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The validation losses by step, as a chart should draw them: no line joins losses over other tokens.

        The last one is over the whole range, those before it over `evaluation.tokens`: a line between them would show
        a change that is not one of the model. Between the two lies a point whose loss is nan.
        """
        step, loss = (self.validation[name].astype(np.float64) for name in ("step", "loss"))
        changes = np.flatnonzero(np.diff(self.validation["target_tokens"])) + 1
        between = (step[changes - 1] + step[changes]) / 2
        return np.insert(step, changes, between), np.insert(loss, changes, np.nan)

    def bad_steps(self) -> tuple[list[int], list[int]]:
        """The steps of loss-scale overflows, and those whose loss or gradient was really not finite."""
        events = self.events_named("nonfinite")
        overflows = {int(event["step"]) for event in events if event.get("overflow")}
        nonfinite = {int(event["step"]) for event in events} - overflows
        return sorted(overflows), sorted(nonfinite)


def read_metrics(path: Path) -> Metrics:
    """Reads a metrics.jsonl.

    A last line without its newline was cut by a crash and is left out if it cannot be read.

    Raises:
        UserError: there is no such file, or a line is not a row of the format (strict JSON, a known kind,
            all keys, steps of a kind strictly increasing); the message names the file and the line.
    """
    require_file(path)
    with path.open("rb") as lines:
        return _metrics_of(path, lines)


def _metrics_of(path: Path, lines: Iterable[bytes]) -> Metrics:
    rows: dict[str, list[Any]] = {"train": [], "validation": [], "event": []}
    for number, line in enumerate(lines, start=1):
        try:
            row = read_row(line)
            kind = row["kind"]
            refuse_order(row, rows[kind][-1][0] if kind in FIELDS and rows[kind] else None)
        except ValueError as problem:
            if not line.endswith(b"\n"):
                break
            raise bad_line(path, number, problem) from problem
        rows[kind].append(tuple(row[name] for name in FIELDS[kind]) if kind in FIELDS else row)
    return Metrics(
        train=np.array(rows["train"], dtype=list(TRAIN_FIELDS.items())),
        validation=np.array(rows["validation"], dtype=list(VALIDATION_FIELDS.items())),
        events=rows["event"],
    )


def bad_line(path: Path, number: int, problem: ValueError) -> UserError:
    """What is raised where `read_row` finds a problem in a line, counted from 1."""
    return UserError(
        f"{path}, line {number}: {problem}; each line is one JSON object as training writes it; "
        "remove or repair the line"
    )


def require_file(path: Path) -> None:
    """Refuses a file of a run that is not there."""
    if not path.is_file():
        raise UserError(f"{path}: there is no such file; training writes it; name the folder of a run that has begun")


def read_row(line: bytes) -> dict[str, Any]:
    """The object of a line, its fields as they must be; a null is nan in a train or validation row.

    Raises:
        ValueError: it is not a row of the format.
    """
    row = parse_json(line, _refuse_constant)
    kind = row.get("kind") if isinstance(row, dict) else None
    if kind == "event" and isinstance(row.get("event"), str) and "step" in row:
        _check_event(row)
        return dict(row)
    if isinstance(kind, str) and kind in FIELDS:
        _value({"seconds": 0.0, **row}, "seconds", float)  # older validations lack it
        return {**row, **{name: _value(row, name, wanted) for name, wanted in FIELDS[kind].items()}}
    raise ValueError("it is no train, validation or event row")


def refuse_order(row: dict[str, Any], before: int | None) -> None:
    """Raises a ValueError if a train or validation row is not behind the step of the one of its kind before."""
    if row["kind"] in FIELDS and before is not None and row["step"] <= before:
        raise ValueError(f"step {row['step']} comes after step {before}")


def _check_event(row: dict[str, Any]) -> None:
    """Raises a ValueError if a field is not what its readers take it for."""
    _value(row, "step", int)
    for name, wanted in EVENT_FIELDS.items():
        value = row.get(name)
        if value is None:
            continue
        if wanted in ACCEPTED:
            _value(row, name, wanted)
        elif type(value) is not wanted or (isinstance(value, str) and not value.isprintable()):
            raise ValueError(f"{name} must be {'printable text' if wanted is str else 'an object'}, got {value!r}")
    if row.get("documents") is not None:
        _value(row["documents"], "documents", int)
    for key, values in (row.get("changed") or {}).items():
        if type(values) is not list or len(values) != 2:
            raise ValueError(f"changed.{key} must be the old and the new value, got {values!r}")


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _value(row: dict[str, Any], name: str, wanted: type) -> Any:
    value: Any = row.get(name, "nothing")
    types, largest = ACCEPTED[wanted]
    if value is None and wanted is float:
        return math.nan
    if type(value) not in types or abs(value) > largest:
        raise ValueError(f"{name} must be a finite {wanted.__name__}, got {value!r}")
    return value


def kept_lines(path: Path, step: int, evaluation_due: bool = False) -> list[bytes]:
    """The lines of a metrics.jsonl that stay when a run goes on behind a step; none if there is no such file.

    Args:
        path: the metrics.jsonl.
        step: the last to keep.
        evaluation_due: its validation comes again, and goes.

    Raises:
        UserError: naming the file and a line that is no record, or that `read_metrics` would refuse at the end.
    """
    kept = []
    last: dict[str, int] = {}
    lines = path.read_bytes() if path.exists() else b""
    for number, line in enumerate(io.BytesIO(lines), start=1):
        if not line.endswith(b"\n"):  # cut off in writing
            continue
        try:
            row = parse_json(line, _refuse_constant)
            if isinstance(row, dict) and _value(row, "step", int) > step:
                continue
            row = read_row(line)
            if evaluation_due and row["step"] == step and row["kind"] == "validation":
                continue
            refuse_order(row, last.get(row["kind"]))
        except ValueError as problem:
            raise UserError(
                f"{path}, line {number}: {problem}; remove or repair the line, or move the file away: the run goes on "
                "from its checkpoint alone, and only charts and report will lack what the file does"
            ) from problem
        last[row["kind"]] = row["step"]
        kept.append(line)
    return kept


def cut_back(path: Path, step: int, evaluation_due: bool = False) -> None:
    """Leaves the `kept_lines` in a metrics.jsonl, atomically; makes it where there is none.

    Raises:
        UserError: as `kept_lines` does.
    """
    kept = kept_lines(path, step, evaluation_due)
    beside = path.with_name(f".{path.name}.new")
    with beside.open("wb") as file:
        file.write(b"".join(kept))
        file.flush()
        os.fsync(file.fileno())  # before the old one is gone: it holds the run's whole past
    os.replace(beside, path)


def first_value(path: Path, key: str) -> str | None:
    """The text that the first event to have it gives under a key; None if none does, or there is no such file.

    Events of a run's beginning stand at the top, so this reads a line or two of a long file.
    """
    try:
        with path.open("rb") as lines:
            for line in lines:
                if key.encode() in line and isinstance(value := parse_json(line).get(key), str):
                    return value
    except (OSError, ValueError, AttributeError):
        return None
    return None


def read_if_any(path: Path) -> Metrics:
    """The same as `read_metrics`, without a row where the file is not there or not readable."""
    try:
        return read_metrics(path)
    except UserError:
        return _metrics_of(path, [])


def read_to_go_on(path: Path, step: int) -> Metrics:
    """The record of a run that goes on behind a step: of one that cannot be read to its end, the `kept_lines`.

    Raises:
        UserError: as `kept_lines` does.
    """
    kept = kept_lines(path, step)
    try:
        return read_metrics(path)
    except UserError:
        return _metrics_of(path, kept)


def _gaps(steps: NDArray[np.int64], last: int) -> str | None:
    """Which steps up to `last` are none of `steps`, ascending, in words; None where none is missing."""
    edges = np.concatenate([[0], steps, [last + 1]])
    gaps = [(int(edges[gap]) + 1, int(edges[gap + 1]) - 1) for gap in np.flatnonzero(np.diff(edges) > 1)]
    if not gaps:
        return None
    shown = [f"{first:,}" if first == end else f"{first:,} to {end:,}" for first, end in gaps[:MOST_GAPS]]
    word = "step" if gaps[0][0] == gaps[-1][1] else "steps"
    return f"{word} {', '.join(shown)}{', ...' if len(gaps) > MOST_GAPS else ''}"
