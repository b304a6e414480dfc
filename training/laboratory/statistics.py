"""Means of a few runs, what their seeds make uncertain, and whether two of them differ. Pure.

The formulas are those of any textbook on few, normally distributed values; each function names its source. What they
mean for a reader, and what three runs can show, is in docs/comparing.md.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

SIGNIFICANT = 0.05
CONFIDENCE = 1 - SIGNIFICANT
NEGLIGIBLE = 1e-12
"""Differences of losses, relative to their size, that are the rounding of floats and no noise."""

LARGEST = 1e75
"""A loss beyond it counts as not finite: it is no cross-entropy, and its fourth power, of a test, is no float."""

Seeds = tuple[int, int]
"""Of the weights and of the training."""
Method = Literal["paired", "Welch", "one run", "none"]
PAIRED: Method = "paired"


class Interval(NamedTuple):
    """A 95 % interval."""

    low: float
    high: float


@dataclass(frozen=True)
class Difference:
    """How far the mean of some runs lies from the baseline's."""

    estimate: float
    """Mean minus the baseline's; with `paired` over the shared seeds alone. nan where a loss is not finite."""
    interval: Interval | None
    """None where no noise can be measured."""
    p_value: float | None
    """Two-sided: how often seeds alone would give a difference at least as large."""
    method: Method
    shared: int
    """Seeds that both have."""


def mean_of(values: Sequence[float]) -> float:
    """The mean; nan where a value is not finite."""
    return math.fsum(values) / len(values) if all(abs(value) <= LARGEST for value in values) else math.nan


def deviation_of(values: Sequence[float]) -> float | None:
    """The sample standard deviation, with n - 1 in the denominator; None for a single value.

    It is nan where a value is not finite, and exactly 0 where all are the same up to rounding.
    """
    if len(values) < 2:
        return None
    mean = mean_of(values)
    if not math.isfinite(mean):
        return math.nan
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
    return 0.0 if deviation <= NEGLIGIBLE * max(map(abs, values)) else deviation


def mean_interval(values: Sequence[float]) -> Interval | None:
    """Where the mean over all seeds lies: mean +- t s / sqrt(n), with n - 1 degrees of freedom (Student 1908)."""
    noise = _noise(deviation_of(values))
    return _around(mean_of(values), noise / math.sqrt(len(values)), len(values) - 1) if noise else None


def deviation_interval(deviation: float | None, count: int) -> Interval | None:
    """Where the standard deviation of all seeds lies, as (n - 1) s^2 / sigma^2 is distributed as chi-square with n - 1.

    Args:
        deviation: sample standard deviation.
        count: of the values that it was taken over.
    """
    from scipy.special import chdtri

    noise, freedom, tail = _noise(deviation), count - 1, (1 - CONFIDENCE) / 2
    if not noise:
        return None
    low, high = (noise * math.sqrt(freedom / float(chdtri(freedom, share))) for share in (tail, 1 - tail))
    return Interval(low, high)


def compare_means(baseline: Mapping[Seeds, float], other: Mapping[Seeds, float]) -> Difference:
    """Compares losses by seeds with a baseline's; the test follows from the seeds alone, never from the losses.

    - `paired`, where three seeds are shared, or two that are all of a side: Student's test of the differences there.
    - `Welch`, else, where both have at least two: unequal variances (Welch 1947), degrees of freedom by Satterthwaite.
    - `one run`, where only one of the two has several: is the single run another draw of what these vary by?
      t = d / (s sqrt(1 + 1/n)) with n - 1 degrees of freedom, the limits of prediction of one new value, which is
      Student's test of two samples when one of them has one value.
    - `none`: a run each, or no noise at all; the difference is given without a claim.

    Args:
        baseline: loss by seeds, at least one.
        other: the same of an intervention.
    """
    shared = sorted(baseline.keys() & other.keys())
    first, second = list(baseline.values()), list(other.values())
    estimate = mean_of(second) - mean_of(first)
    if not math.isfinite(estimate):
        return Difference(math.nan, None, None, "none", len(shared))
    # Two pairs have one degree of freedom: worse than no pairing, where both sides have more to show.
    if len(shared) >= (2 if len(shared) in (len(first), len(second)) else 3):
        differences = [other[seeds] - baseline[seeds] for seeds in shared]
        estimate = mean_of(differences)
        error = _deviation(differences, first + second) / math.sqrt(len(shared))
        freedom, method = len(shared) - 1.0, PAIRED
    else:
        error, freedom, method = _unpaired(first, second)
    if error == 0 or method == "none":
        return Difference(estimate, None, None, "none", len(shared))
    return Difference(
        estimate, _around(estimate, error, freedom), _p_value(estimate / error, freedom), method, len(shared)
    )


def adjust_by_holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down adjustment (Holm 1979): below 0.05, a claim holds among all the claims with 95 %.

    The k-th smallest of m is multiplied by m - k + 1, and none comes out smaller than one before it. None stays None
    and does not count.
    """
    order = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, index) in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p))
        adjusted[index] = largest
    return adjusted


def _unpaired(first: Sequence[float], second: Sequence[float]) -> tuple[float, float, Method]:
    """Standard error of the difference of two means, its degrees of freedom, and the method."""
    parts = [(_deviation(values, values), len(values)) for values in (first, second) if len(values) > 1]
    if len(parts) == 2:
        squares = [(deviation**2 / count, count - 1) for deviation, count in parts]
        variance = math.fsum(square for square, _ in squares)
        freedom = variance**2 / math.fsum(square**2 / df for square, df in squares) if variance else 1.0
        return math.sqrt(variance), freedom, "Welch"
    if len(parts) == 1:
        deviation, count = parts[0]
        return deviation * math.sqrt(1 + 1 / count), count - 1.0, "one run"
    return 0.0, 1.0, "none"


def _deviation(values: Sequence[float], losses: Sequence[float]) -> float:
    """Of at least two values; 0 where it is no more than the rounding of the losses behind them."""
    deviation = deviation_of(values)
    assert deviation is not None, "a deviation takes two values"
    return 0.0 if deviation <= NEGLIGIBLE * max(map(abs, losses)) else deviation


def _noise(deviation: float | None) -> float:
    """A deviation that can be reckoned with; 0 where there is none."""
    return deviation if deviation is not None and math.isfinite(deviation) else 0.0


def _around(centre: float, error: float, freedom: float) -> Interval:
    from scipy.special import stdtrit

    half = float(stdtrit(freedom, (1 + CONFIDENCE) / 2)) * error
    return Interval(centre - half, centre + half)


def _p_value(t: float, freedom: float) -> float:
    from scipy.special import stdtr

    return 2 * float(stdtr(freedom, -abs(t)))
