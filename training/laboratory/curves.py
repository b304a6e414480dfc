"""The curves of runs that are compared: along steps, tokens or time, shortened to what a chart can show."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Literal, get_args

import numpy as np

from training.charts import Column, bin_curve
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
