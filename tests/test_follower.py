"""The process that follows a run: what it reads of metrics.jsonl, and what it keeps for the next time."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY
from recorded_runs import bad_row, event, train_row, validation_row

from training.tracking import follower
from training.tracking.follower import Rows, Shown
from training.tracking.services import Point


def encoded(*rows: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def test_rows_become_points_and_half_a_row_waits() -> None:
    """A validation has the time of the step before it; an event and a null are no points."""
    file = io.BytesIO(encoded(event(0, "start"), train_row(1), bad_row(2), validation_row(2, 4.25)))
    rows = Rows(file)
    first, second, third = rows.next()
    values = {"train/loss": 6.0, "train/grad_norm": 0.4, "train/learning_rate": 1e-3, "train/tokens_per_second": 2048}
    assert first == Point("train", 1, 0.5, values)
    assert second == Point("train", 2, 1.0, {"train/learning_rate": 1e-3, "train/tokens_per_second": 2048})
    assert third == Point("validation", 2, 1.0, {"validation/loss": 4.25})
    assert rows.next() == []
    more = encoded(train_row(3))
    for part in (more[:20], more[20:-1]):
        place = file.tell()
        file.seek(0, os.SEEK_END)
        file.write(part)
        file.seek(place)
        assert rows.next() == []
    file.seek(0, os.SEEK_END)
    file.write(b"\n")
    file.seek(place)
    assert [point.step for point in rows.next()] == [3]


def test_a_long_past_is_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "MOST_AT_ONCE", 4)
    rows = Rows(io.BytesIO(encoded(*(train_row(step) for step in range(1, 10)))))
    assert [[point.step for point in rows.next()] for _ in range(4)] == [[1, 2, 3, 4], [5, 6, 7, 8], [9], []]


def test_an_id_is_kept(tmp_path: Path) -> None:
    """Another run of the same name has another one."""
    shown = Shown.read(tmp_path / "wandb.json", "tiny")
    assert shown.run_id.startswith("tiny-")
    assert shown.run_id != Shown.read(tmp_path / "wandb.json", "tiny").run_id
    shown.add([Point("train", 7, 1.0, {})])
    assert Shown.read(tmp_path / "wandb.json", "other") == shown
    assert [path.name for path in tmp_path.iterdir()] == ["wandb.json"]


def test_a_validation_is_not_taken_for_sent_because_its_step_was(tmp_path: Path) -> None:
    """A run that is killed in an evaluation has sent the steps up to it; resumed from before, it evaluates there."""
    Shown.read(tmp_path / "trackio.json", "tiny").add([Point("train", step, 1.0, {}) for step in (1, 2, 3)])
    shown = Shown.read(tmp_path / "trackio.json", "tiny")
    points = [Point("train", 3, 1.0, {}), Point("validation", 3, 1.0, {}), Point("train", 4, 1.0, {})]
    assert [shown.has(point) for point in points] == [True, False, False]
    shown.add(points[1:])
    assert Shown.read(tmp_path / "trackio.json", "tiny").last_steps == {"train": 4, "validation": 3}


def test_it_needs_no_pytorch() -> None:
    """It starts in a moment, beside the training."""
    program = "import sys, training.tracking.follower; print(sorted(sys.modules.keys() & {'torch', 'pydantic'}))"
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
