"""The batch size with the lowest loss at equal tokens: a parabola in its logarithm, and how sure its minimum is."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from training.charts import BLUE, GREY, VERMILION, Column, empty_figure, png
from training.laboratory.statistics import CONFIDENCE, SIGNIFICANT, Interval

SAME_RATE = (
    "The learning rate is the same at all sizes. A larger batch usually bears, and needs, a larger one, so this is the "
    "best size at this rate, not the best size."
)


@dataclass(frozen=True)
class BatchSizeFit:
    """loss = a (ln b)^2 + b ln b + c, by least squares over all runs alike."""

    points: tuple[tuple[int, float], ...]
    """Sequences per step and validation loss (nats per token) of each run."""
    coefficients: tuple[float, float, float]
    optimum: float | None
    """Sequences per step at the curve's lowest point; None where it has none."""
    lowest_loss: float | None
    """The curve's, there."""
    interval: Interval | None
    """Fieller's 95 % interval of the optimum; None where there is no honest one, which the remarks explain."""
    remarks: tuple[str, ...]
    """What is to be known before it is believed, a sentence each."""

    @property
    def smallest(self) -> int:
        """The smallest size tried."""
        return min(size for size, _ in self.points)

    @property
    def largest(self) -> int:
        """The largest."""
        return max(size for size, _ in self.points)

    def losses_at(self, sizes: Column) -> Column:
        """The curve's losses at so many sequences per step."""
        return cast(Column, np.polyval(self.coefficients, np.log(sizes)))


def fit_batch_sizes(points: Sequence[tuple[int, float]]) -> BatchSizeFit | None:
    """Fits the curve, and says how far its lowest point can be believed.

    Args:
        points: sequences per step and final validation loss of each run, all over as many tokens.

    Returns:
        The fit; None with fewer than three sizes, as a parabola has three coefficients.
    """
    sizes = np.array([size for size, _ in points], dtype=np.float64)
    losses = np.array([loss for _, loss in points], dtype=np.float64)
    if len(np.unique(sizes)) < 3:
        return None
    middle = float(np.log(sizes).mean())
    design = np.vander(np.log(sizes) - middle, 3)  # about the middle, where the columns are least alike
    found = np.linalg.lstsq(design, losses, rcond=None)[0]
    residuals = losses - design @ found
    a, b, c = (float(value) for value in found)
    coefficients = (a, b - 2 * a * middle, c - b * middle + a * middle**2)
    optimum, interval = None, None
    if a > 0:
        optimum = math.exp(middle - b / (2 * a))
    if optimum is not None and sizes.min() <= optimum <= sizes.max() and len(points) > 3:
        inverse = cast(Column, np.linalg.inv(design.T @ design))
        variance = float(residuals @ residuals) / (len(points) - 3) * inverse
        within = fieller_interval(a, b, variance, len(points) - 3)
        interval = None if within is None else Interval(*(math.exp(middle + end) for end in within))
    fit = BatchSizeFit(
        points=tuple(points),
        coefficients=coefficients,
        optimum=optimum,
        lowest_loss=c - b**2 / (4 * a) if a > 0 else None,
        interval=interval,
        remarks=(),
    )
    remarks = (*_optimum_remarks(fit), *_shape_remarks(sizes, losses, residuals), SAME_RATE)
    return replace(fit, remarks=remarks)


def fieller_interval(a: float, b: float, variance: NDArray[np.float64], freedom: int) -> Interval | None:
    """Where a x^2 + b x + c may be lowest: every x at which the slope does not differ significantly from zero.

    The slope 2 a x + b has the variance 4 x^2 V_aa + 4 x V_ab + V_bb. That its square is at most t^2 times as much is
    a quadratic inequality in x (E. C. Fieller, Some problems in interval estimation, 1954). Unlike the delta method
    this keeps its level where the curvature is hardly known: then the x that remain have no bounds.

    Args:
        a: the quadratic coefficient, above zero.
        b: the linear one.
        variance: of (a, b, ...), estimated.
        freedom: degrees of freedom of that estimate.

    Returns:
        The bounds; None if there are none.
    """
    from scipy.special import stdtrit

    bound = float(stdtrit(freedom, (1 + CONFIDENCE) / 2)) ** 2
    second = 4 * (a * a - bound * variance[0, 0])
    first = 4 * (a * b - bound * variance[0, 1])
    constant = b * b - bound * variance[1, 1]
    if second <= 0:
        return None
    half_width = math.sqrt(max(0.0, first * first - 4 * second * constant))
    return Interval((-first - half_width) / (2 * second), (-first + half_width) / (2 * second))


def _optimum_remarks(fit: BatchSizeFit) -> list[str]:
    """Why there is no optimum or no interval, or what stands against the one there is."""
    if fit.optimum is None:
        return ["The curve does not open upwards, so it has no lowest point: these runs show no best batch size."]
    if not fit.smallest <= fit.optimum <= fit.largest:
        side, end = ("smaller", fit.smallest) if fit.optimum < fit.smallest else ("larger", fit.largest)
        return [
            f"The curve's lowest point, {fit.optimum:,.3g}, lies outside the sizes tried, where nothing was measured, "
            f"so it has no interval: what the runs show is that the loss still falls towards {end:,}. Try {side} ones."
        ]
    if len(fit.points) == 3:
        return ["Three runs determine the curve's three coefficients, and nothing is left to judge its error by."]
    if fit.interval is None:
        return [
            "The curvature cannot be told from none at this noise, so the optimum has no bounds: more seeds, or sizes "
            "further apart, would give some."
        ]
    if fit.interval[0] < fit.smallest or fit.interval[1] > fit.largest:
        return ["The interval reaches beyond the sizes tried, where it rests on the curve's shape alone."]
    return []


def _shape_remarks(sizes: Column, losses: Column, residuals: Column) -> list[str]:
    """Whether a parabola describes the sizes, by the scatter within a size; nothing where that cannot be told."""
    from scipy.special import fdtrc

    within = sum(float(((losses[sizes == size] - losses[sizes == size].mean()) ** 2).sum()) for size in set(sizes))
    of_shape, of_noise = len(set(sizes)) - 3, len(sizes) - len(set(sizes))
    if of_noise == 0:
        return ["One run at each size: noise of the seeds and a wrong shape of the curve cannot be told apart."]
    if of_shape == 0 or within == 0:
        return []
    ratio = (float(residuals @ residuals) - within) / of_shape / (within / of_noise)
    p_value = float(fdtrc(of_shape, of_noise, ratio))
    if p_value >= SIGNIFICANT:
        return []
    return [
        f"The sizes' means lie further off the curve than the seeds explain (lack of fit, p = {p_value:.2g}): it is "
        "not quite a parabola, and the interval, which takes it for one, is too narrow."
    ]


def fit_sentences(fit: BatchSizeFit) -> list[str]:
    """The fit in words; its remarks come besides."""
    a, b, c = fit.coefficients
    lines = [
        f"Fitted through {len(fit.points)} runs: loss = {a:.7f} (ln b)² {_signed(b)} ln b {_signed(c)}, with b the "
        "sequences per step."
    ]
    if fit.optimum is not None and fit.smallest <= fit.optimum <= fit.largest:
        certain = "no interval" if fit.interval is None else "95 % interval {:,.3g} to {:,.3g}".format(*fit.interval)
        lines.append(
            f"Lowest at {fit.optimum:,.1f} sequences per step ({certain}), where the curve's loss is "
            f"{fit.lowest_loss:.4f} nats per token."
        )
    return lines


def _signed(value: float) -> str:
    return f"{'-' if value < 0 else '+'} {abs(value):.7f}"


def draw_fit(fit: BatchSizeFit, title: str) -> bytes:
    """The runs, the curve, its lowest point and the interval, as PNG."""
    from matplotlib.ticker import NullLocator

    figure, (axes,) = empty_figure((9.0, 5.6))
    axes.set_title(f"{title}\nas many tokens and the same learning rate at all sizes", loc="left", parse_math=False)
    axes.set_xscale("log")
    sizes = sorted({size for size, _ in fit.points})
    axes.set_xticks(_ticks(sizes), [f"{size:,}" for size in _ticks(sizes)])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set(xlabel="global batch (sequences per step, logarithmic)", ylabel="validation loss (nats per token)")
    range_drawn = np.geomspace(0.85 * sizes[0], 1.18 * sizes[-1], 400)
    axes.set_xlim(range_drawn[0], range_drawn[-1])
    axes.plot(range_drawn, fit.losses_at(range_drawn), color=BLUE, lw=1.8, label="parabola in ln(batch)")
    axes.plot(*zip(*fit.points, strict=True), "o", color="black", mfc="none", ms=7, label="a run")
    if fit.optimum is not None and fit.smallest <= fit.optimum <= fit.largest:
        _mark_optimum(axes, fit)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    return png(figure)


def _mark_optimum(axes: Any, fit: BatchSizeFit) -> None:
    axes.axvline(fit.optimum, color=VERMILION, lw=1.5, ls="--", label=f"lowest at {fit.optimum:,.1f}")
    if fit.interval is not None:
        low, high = fit.interval
        label = f"95 % interval {low:,.3g} to {high:,.3g}"
        limits = axes.get_xlim()
        axes.axvspan(max(low, limits[0]), min(high, limits[1]), color=GREY, alpha=0.2, lw=0, label=label)


def _ticks(sizes: Sequence[int]) -> list[int]:
    """The sizes to name on the axis: of two that would overlap, the first."""
    shown: list[int] = []
    for size in sizes:
        if not shown or math.log(size / shown[-1]) > 0.035 * math.log(sizes[-1] / sizes[0]):
            shown.append(size)
    return shown
