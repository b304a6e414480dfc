"""A run followed while it is written: whole lines only, each once, and what they say together."""

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest
from recorded_runs import CONFIG, bad_row, begin, event, full_run, train_row, validation_row, write_run

from training import lock
from training.errors import UserError
from training.follow import Curve, FollowedRun, RunSoFar, Tail, event_line
from training.metrics_file import read_metrics, read_row

CONFIG_WITH_INTERVALS = {**CONFIG, "evaluation": {"every": 5}, "checkpoint": {"every": 10}}


def taken(rows: list[dict[str, Any]], config: dict[str, Any] = CONFIG) -> RunSoFar:
    run = RunSoFar(config)
    for row in rows:
        run.take(read_row(json.dumps(row).encode()))
    return run


def test_a_tail_gives_each_line_once_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    tail = Tail(path)
    assert tail.read() == (False, [])
    with path.open("ab", buffering=0) as file:
        file.write(b"one\ntw")
        assert tail.read() == (True, [b"one"])
        assert tail.read() == (False, [])
        file.write(b"o\nthree\n")
        assert tail.read() == (False, [b"two", b"three"])
        file.write(b"fo")
    beside = tmp_path / "beside"
    beside.write_bytes(b"one\nanother two, longer than all that was there before\n")
    os.replace(beside, path)
    assert tail.read() == (True, [b"one", b"another two, longer than all that was there before"])
    path.write_bytes(b"short\n")
    assert tail.read() == (True, [b"short"])


def test_a_curve_of_any_length() -> None:
    """200 bins hold 200 values; then neighbours become their mean, whatever is not finite left out."""
    curve = Curve()
    for value in range(200):
        curve.add(float(value))
    assert curve.means() == [float(value) for value in range(200)]
    curve.add(200.0)
    assert curve.means() == [value + 0.5 for value in range(0, 200, 2)] + [200.0]
    curve.add(math.nan)
    curve.add(math.nan)
    assert curve.means()[-2] == 200.0
    assert math.isnan(curve.means()[-1])
    long = Curve()
    for value in range(100_000):
        long.add(float(value))
    means = long.means()
    assert 100 <= len(means) <= 200
    assert means[0] == (512 - 1) / 2, "the width is a power of two"
    assert means == sorted(means)


def test_what_a_whole_run_says(tmp_path: Path) -> None:
    """The same as the report's reader finds; a resumption forgets the speed of the machine before."""
    folder = full_run(tmp_path / "run")
    followed = FollowedRun(folder)
    followed.look()
    run, metrics = followed.so_far, read_metrics(folder / "metrics.jsonl")
    best = metrics.best_validation()
    assert best is not None
    assert (run.step, run.total_steps, run.ending) == (20, 20, "finished")
    assert run.best == (best["step"], best["loss"])
    assert run.validation == (20, 4.2)
    assert run.last is not None
    assert run.last["tokens"] == 20480
    assert run.smoothed_loss == pytest.approx(sum(4 + 2 / step for step in range(1, 21) if step not in (1, 7)) / 18)
    assert (run.skipped, sum(row["clipped"] for row in run.recent), run.clip_norm) == (2, 3, 0.5)
    assert run.pace is not None
    assert run.pace.seconds_left(10) == pytest.approx(10 * 0.25 + 0.1), "and the last checkpoint took 0.1 s"
    assert run.events[-1] == "step 20: finished"
    assert len(run.events) == 6
    assert followed.sentence() == f"{folder}: finished at step 20 of 20"


def test_the_times_to_come() -> None:
    """Half a second a step, evaluations of 4 s after each 5 steps; checkpoints after each 10, of 20, stop training for
    half a second and take another 2 s to be written."""
    rows = [begin(0, "start", 1), *map(train_row, range(1, 6)), validation_row(5, 4.0, seconds=4.0)]
    run = taken(
        [*rows, event(5, "checkpoint", checkpoint="step_00000005", best=True, seconds=2.0, stall=0.5)],
        CONFIG_WITH_INTERVALS,
    )
    assert run.best == (5, 4.0)
    assert run.pace is not None
    assert run.pace.seconds_left(5) == 15 * 0.5 + 3 * 4 + 2 * 0.5 + 2
    assert run.pace.next_evaluation(5) == (10, 2.5)


def test_a_checkpoint_is_recorded_after_later_steps_and_evaluations() -> None:
    """It is when it is whole: the best is the validation of its own step, not the last one."""
    rows = [begin(0, "start", 1), *map(train_row, range(1, 6)), validation_row(5, 4.0), train_row(6)]
    rows += [validation_row(6, 4.5), train_row(7), event(5, "checkpoint", checkpoint="step_00000005", best=True)]
    run = taken(rows)
    assert (run.step, run.validation, run.best) == (7, (6, 4.5), (5, 4.0))
    assert run.events[-1] == "step 5: saved step_00000005, the best so far"


def test_a_run_that_says_little() -> None:
    nothing = taken([])
    assert (nothing.last, nothing.pace, nothing.best, nothing.ending) == (None, None, None, None)
    assert math.isnan(nothing.smoothed_loss)
    assert math.isnan(taken([bad_row(1)]).smoothed_loss)
    imported = taken([event(0, "import", source="gpt2")])
    assert (imported.pace, imported.total_steps) == (None, None)
    resumed = taken([begin(0, "start", 1), event(3, "stopped"), begin(3, "resume", 1)])
    assert resumed.ending is None


@pytest.mark.parametrize(
    ("row", "line"),
    [
        (event(7, "nonfinite", overflow=True), "step 7: the loss scale overflowed"),
        (event(7, "nonfinite", overflow=False), "step 7: the gradient was not finite"),
        (event(7, "nonfinite", bad_sequences=1), "step 7: the loss of 1 sequence was not finite"),
        (event(7, "nonfinite", overflow=True, bad_sequences=2), "step 7: the loss of 2 sequences was not finite"),
        (event(1234, "checkpoint", checkpoint="step_00001234"), "step 1,234: saved step_00001234"),
        (event(7, "checkpoint", checkpoint="step_7", best=True), "step 7: saved step_7, the best so far"),
        (
            event(7, "resume", checkpoint="a", changed={"b": [1, 2], "c": [1, 2]}),
            "step 7: resumed from a, changed: b, c",
        ),
        (event(7, "upload_failed", reason="no network"), "step 7: upload failed: no network"),
        (event(7, "something new"), "step 7: something new"),
    ],
)
def test_an_event_in_words(row: dict[str, Any], line: str) -> None:
    assert event_line(row) == line


def test_a_run_that_grows_and_is_cut_back(tmp_path: Path) -> None:
    """Looked at in the middle of a line; and, when it goes on from an earlier step, what was given up is forgotten."""
    folder = write_run(tmp_path / "run", [begin(0, "start", 1), train_row(1)])
    path, followed = folder / "metrics.jsonl", FollowedRun(folder)
    followed.look()
    assert followed.so_far.step == 1
    whole = json.dumps(train_row(2)) + "\n"
    for piece, step in ((whole[:40], 1), (whole[40:], 2), (whole.replace('"step": 2', '"step": 3'), 3)):
        with path.open("a") as file:
            file.write(piece)
        followed.look()
        assert followed.so_far.step == step
    beside = path.with_name("beside")
    beside.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    os.replace(beside, path)
    followed.look()
    assert followed.so_far.step == 1
    with path.open("a") as file:
        file.write("garbage\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 3: Expecting value"):
        followed.look()


def test_whether_a_run_is_over(tmp_path: Path) -> None:
    """Never while a process holds it; then when it says so, or after a minute of silence."""
    folder = write_run(tmp_path / "run", [begin(0, "start", 1), train_row(1)])
    path, followed = folder / "metrics.jsonl", FollowedRun(folder)
    followed.look()
    assert not followed.is_over()
    os.utime(path, (time.time() - 61,) * 2)
    assert followed.is_over()
    assert followed.sentence() == f"{folder}: no process is training it now; it has reached step 1 of 20"
    with lock.held(folder / lock.RUN_LOCK):
        assert not followed.is_over()
        with path.open("a") as file:
            file.write(json.dumps(event(1, "stopped")) + "\n")
        followed.look()
        assert not followed.is_over(), "it may still be uploading its result"
    assert followed.is_over()
    assert followed.sentence() == f"{folder}: stopped at step 1 of 20"


def test_a_run_that_has_recorded_nothing_yet(tmp_path: Path) -> None:
    followed = FollowedRun(tmp_path)
    with lock.held(tmp_path / lock.RUN_LOCK):
        followed.look()
        assert not followed.is_over()
    assert followed.is_over(), "it gave up"
    assert followed.so_far.step == 0


@pytest.mark.parametrize("optimizer", [[1], "adamw", {"clip_norm": "high"}, {"clip_norm": -1}, {"clip_norm": True}])
@pytest.mark.parametrize("evaluation", [5, {"every": "often"}, {"every": float("nan")}, {"every": -2}])
def test_a_config_that_somebody_has_edited_stops_no_view(optimizer: Any, evaluation: Any) -> None:
    """What it says is then not known."""
    run = taken([begin(0, "start", 1), train_row(1)], {"optimizer": optimizer, "evaluation": evaluation})
    assert run.clip_norm is None
    assert run.pace is not None
    assert run.pace.next_evaluation(1) is None
