"""Curves of runs along steps, tokens and time, and their mean."""

from pathlib import Path

import numpy as np
import pytest
from recorded_runs import bad_row, train_row, validation_row, write_run
from small_results import write_result

from training.laboratory.curves import ALONG, QUANTITIES, Curve, axis_unit, curves_of, cut_losses, mean_curve
from training.metrics_file import read_metrics


def curve(steps: list[float], values: list[float]) -> Curve:
    columns = np.array(steps)
    return Curve(columns, 100 * columns, columns / 2, np.array(values))


def test_curves_of_a_run(tmp_path: Path) -> None:
    folder = write_result(tmp_path / "run", 4.2, speed=2.0)
    curves = curves_of(read_metrics(folder / "metrics.jsonl"), 1000)
    assert tuple(curves) == QUANTITIES
    training, validation = curves["training loss"], curves["validation loss"]
    assert training.steps.tolist() == list(range(1, 21))
    assert (training.tokens[-1], training.time[-1]) == (20480, 5.0)
    assert validation.steps.tolist() == [5, 10, 15, 20]
    assert validation.tokens.tolist() == [5120, 10240, 15360, 20480]
    assert validation.time.tolist() == [1.25, 2.5, 3.75, 5.0]
    assert validation.values[-1] == 4.2
    assert [training.along(axis)[-1] for axis in ALONG] == [20, 20480, 5.0]


def test_long_curves_are_shortened_to_means(tmp_path: Path) -> None:
    rows = [train_row(step, loss=float(step % 2)) for step in range(1, 1001)]
    metrics = read_metrics(write_run(tmp_path / "run", rows) / "metrics.jsonl")
    training = curves_of(metrics, 100)["training loss"]
    assert len(training.values) == 100
    assert np.allclose(training.values, 0.5)
    assert (training.steps[0], training.tokens[0]) == (5.5, 1024 * 5.5)


def test_run_without_steps_and_one_whose_loss_was_never_finite(tmp_path: Path) -> None:
    nothing = curves_of(read_metrics(write_run(tmp_path / "a", []) / "metrics.jsonl"), 10)
    assert [len(nothing[quantity].values) for quantity in QUANTITIES] == [0, 0, 0, 0]
    rows = [validation_row(0, 5.0), bad_row(1)]
    bad = curves_of(read_metrics(write_run(tmp_path / "b", rows) / "metrics.jsonl"), 10)
    assert np.isnan(bad["training loss"].values).all()
    assert (bad["validation loss"].tokens[0], bad["validation loss"].time[0]) == (0, 0)
    for curves in (nothing, bad):
        assert [len(column) for column in mean_curve([curves["training loss"]], "steps")] == [0, 0, 0, 0]


def test_an_axis_is_never_cut_below_a_last_value_and_says_what_lies_outside() -> None:
    steps = [float(step) for step in range(1, 41)]
    flat = [curve(steps, [40.0, 9.0, *[4.0 - step / 100 for step in steps[2:]]]) for _ in range(8)]
    cut = cut_losses({"plain": flat})
    assert cut is not None
    assert cut.top < 9
    assert cut.note == f"axis cut at {cut.top:.3g}; above it, up to 40.00: parts of all curves"
    high = curve(steps, [50.0, *[20.0 - step / 10 for step in steps[1:]]])
    cut = cut_losses({"plain": flat, "worse": [high]})
    assert cut is not None
    assert cut.bottom < 3.6 < 16.0 < cut.top < 40
    assert cut.note.endswith(", up to 50.00: parts of all curves, most of worse")
    others = {name: [curve(steps, [3.7] * 40)] for name in ("calm", "calmer")}
    cut = cut_losses({**others, "plain": flat})
    assert cut is not None
    assert cut.note.endswith(": parts of plain")
    assert cut_losses(others) is None
    assert cut_losses({"plain": [curve(steps, [float("nan")] * 40)]}) is None


def test_mean_of_curves_with_its_band() -> None:
    first, second = curve([1, 2, 3], [4.0, 3.0, 2.0]), curve([1, 2, 3], [5.0, 4.0, 1.0])
    x, mean, low, high = mean_curve([first, second], "tokens")
    assert x.tolist() == [100, 200, 300]
    assert (mean.tolist(), low.tolist(), high.tolist()) == ([4.5, 3.5, 1.5], [4, 3, 1], [5, 4, 2])


def test_runs_of_different_speed_are_averaged_step_by_step() -> None:
    """So that the mean ends with the mean of the final losses, at the mean of the times."""
    first = curve([1, 2], [4.0, 2.0])
    slower = Curve(first.steps, first.tokens, 3 * first.time, np.array([5.0, 3.0]))
    x, mean, _, _ = mean_curve([first, slower], "time")
    assert (x.tolist(), mean.tolist()) == ([1.0, 2.0], [4.5, 2.5])


def test_mean_covers_what_all_cover_and_passes_over_gaps() -> None:
    first, second = curve([1, 2, 3, 4], [4.0, np.nan, 2.0, 1.0]), curve([2, 3], [4.0, 4.0])
    x, mean, _, _ = mean_curve([first, second], "steps")
    assert (x.tolist(), mean.tolist()) == ([3], [3.0])


def test_no_line_joins_validation_losses_over_other_tokens(tmp_path: Path) -> None:
    rows = [train_row(step) for step in range(1, 31)]
    rows += [validation_row(step, 5.0 - step / 10, target_tokens=4096 if step < 30 else 65536) for step in (10, 20, 30)]
    metrics = read_metrics(write_run(tmp_path / "run", rows) / "metrics.jsonl")
    drawn = curves_of(metrics, 100)["validation loss"]
    assert drawn.steps.tolist() == [10, 20, 25, 30]
    np.testing.assert_equal(drawn.values, [4.0, 3.0, np.nan, 2.0])
    x, mean, low, high = mean_curve([drawn, drawn], "tokens")
    assert x.tolist() == [10240, 20480, 25600, 30720]
    for values in (mean, low, high):
        np.testing.assert_equal(values, [4.0, 3.0, np.nan, 2.0])


@pytest.mark.parametrize(
    ("axis", "largest", "unit"),
    [
        ("steps", 33165, (1, "step")),
        ("tokens", 3_260_252_160, (1e9, "billion tokens")),
        ("tokens", 655_360, (1, "tokens")),
        ("tokens", 20_000_000, (1e6, "million tokens")),
        ("time", 108, (1, "training time (seconds)")),
        ("time", 1200, (60, "training time (minutes)")),
        ("time", 146_300, (3600, "training time (hours)")),
    ],
)
def test_axis_has_a_unit_in_which_numbers_are_short(axis: str, largest: float, unit: tuple[float, str]) -> None:
    assert axis_unit(next(along for along in ALONG if along == axis), largest) == unit
