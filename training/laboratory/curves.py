"""The curves of runs that are compared: along steps, tokens or time, shortened to what a chart can show."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Literal, get_args

import numpy as np

from training.charts import Column, bin_curve, loss_limits
from training.metrics_file import Metrics

Along = Literal["steps", "tokens", "time"]
Quantity = Literal["training loss", "validation loss", "gradient norm", "learning rate"]
ALONG: tuple[Along, ...] = get_args(Along)
QUANTITIES: tuple[Quantity, ...] = get_args(Quantity)
Y_TITLES: dict[Quantity, str] = {
    "training loss": "training loss\n(nats per token)",
    "validation loss": "validation loss\n(nats per token)",
    "gradient norm": "gradient norm\nbefore clipping (L2)",
    "learning rate": "learning rate",
}
SHOWN = 0.85
"""Share of the loss curves that the y axis shows at least: their beginning is high and says little."""
MOST_NAMES = 3


@dataclass(frozen=True)
class Curve:
    """Values over the run, nan where one was not finite; all columns have the same length."""

    steps: Column
    tokens: Column
    time: Column
    """Training time in seconds."""
    values: Column

    def along(self, axis: Along) -> Column:
        """Where the values lie on an x axis."""
        return {"steps": self.steps, "tokens": self.tokens, "time": self.time}[axis]


Curves = dict[Quantity, Curve]


def curves_of(metrics: Metrics, most_points: int) -> Curves:
    """The curves in a run's metrics; one of more points is shortened to the means of neighbouring ones."""
    train = metrics.train
    return {
        "training loss": _curve(metrics, train["step"], train["loss"], most_points),
        "validation loss": _curve(metrics, *metrics.validation_curve(), most_points),
        "gradient norm": _curve(metrics, train["step"], train["grad_norm"], most_points),
        "learning rate": _curve(metrics, train["step"], train["learning_rate"], most_points),
    }


def _curve(metrics: Metrics, steps: Column, values: Column, most_points: int) -> Curve:
    step, mean, _, _ = bin_curve(steps.astype(np.float64), values, values, values, most_points=most_points)
    trained = np.concatenate([[0], metrics.train["step"]])
    tokens = np.interp(step, trained, np.concatenate([[0], metrics.train["tokens"]]))
    time = np.interp(step, trained, np.concatenate([[0.0], metrics.train["seconds"]]))
    return Curve(step, tokens, time, mean)


@dataclass(frozen=True)
class Cut:
    """Where a y axis is cut, and what lies outside."""

    bottom: float
    top: float
    note: str
    """For the reader of the chart."""


def cut_losses(curves: Mapping[str, Sequence[Curve]]) -> Cut | None:
    """Where to cut the y axis of losses so that their beginnings do not press the rest flat; None if nowhere.

    The last value of each curve lies on the axis, however high it is: no run is out of sight.

    Args:
        curves: of one quantity, by the name that the chart has for them.
    """
    finite = [(name, curve.values[np.isfinite(curve.values)]) for name, own in curves.items() for curve in own]
    finite = [(name, values) for name, values in finite if len(values)]
    everything = np.concatenate([np.zeros(0), *(values for _, values in finite)])
    limits = loss_limits(everything, everything, everything, SHOWN, np.array([values[-1] for _, values in finite]))
    if limits is None or limits[1] >= limits[2]:
        return None
    bottom, top, largest = limits
    outside = {name for name, values in finite if values.max() > top}
    mostly = {name for name, values in finite if np.mean(values > top) > 0.5}
    all_of_them = outside == {name for name, _ in finite}
    parts = (
        [] if outside == mostly else [f"parts of {'all curves' if all_of_them else _some(outside - mostly, curves)}"]
    )
    parts += [f"most of {_some(mostly, curves)}"] if mostly else []
    return Cut(bottom, top, f"axis cut at {top:.3g}; above it, up to {largest:,.2f}: {', '.join(parts)}")


def _some(names: set[str], order: Iterable[str]) -> str:
    """The first few of some names."""
    ordered = [name for name in order if name in names]
    more = f" and {len(ordered) - MOST_NAMES} more" if ordered[MOST_NAMES:] else ""
    return ", ".join(ordered[:MOST_NAMES]) + more


def mean_curve(curves: Sequence[Curve], axis: Along) -> tuple[Column, Column, Column, Column]:
    """The mean of several curves at the same steps, with their lowest and highest value, over what all of them cover.

    A step at which none of them has a value stays one without: a gap of all is no line of their mean.

    Returns:
        x (the mean too: runs reach a step at different times), mean, lowest and highest; empty without a common step.
    """
    finite = [(curve, np.isfinite(curve.values)) for curve in curves]
    columns = [(curve.steps[good], curve.along(axis)[good], curve.values[good]) for curve, good in finite if good.any()]
    nothing = np.zeros(0)
    if not columns:
        return nothing, nothing, nothing, nothing
    steps = columns[0][0]
    first, last = max(column[0][0] for column in columns), min(column[0][-1] for column in columns)
    steps = steps[(steps >= first) & (steps <= last)]
    gaps = reduce(np.intersect1d, [curve.steps[~good] for curve, good in finite])
    steps = np.union1d(steps, gaps[(gaps >= first) & (gaps <= last)])
    x = np.array([np.interp(steps, where, place) for where, place, _ in columns])
    values = np.array([np.interp(steps, where, value) for where, _, value in columns])
    values[:, np.isin(steps, gaps)] = np.nan
    return x.mean(axis=0), values.mean(axis=0), values.min(axis=0), values.max(axis=0)


def axis_unit(axis: Along, largest: float) -> tuple[float, str]:
    """By what to divide an x axis, and what to write under it."""
    units: dict[Along, list[tuple[float, str]]] = {
        "steps": [],
        "tokens": [(1e9, "billion tokens"), (1e6, "million tokens")],
        "time": [(3600.0, "training time (hours)"), (60.0, "training time (minutes)")],
    }
    plain = {"steps": "step", "tokens": "tokens", "time": "training time (seconds)"}[axis]
    return next((unit for unit in units[axis] if math.isfinite(largest) and largest >= 2 * unit[0]), (1.0, plain))
