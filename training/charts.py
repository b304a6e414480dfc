"""The charts of a run, drawn from its metrics."""

import io
import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from training.metrics_file import Metrics

# matplotlib takes most of a second to import, so only the functions that draw do it.
if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_POINTS = 2000
# Okabe and Ito's colours, which stay apart for every kind of colour blindness.
BLUE, VERMILION, GREEN, PURPLE, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#707070"

Column = NDArray[np.float64]


def draw_charts(metrics: Metrics, name: str, clip_norm: float | None) -> dict[str, bytes]:
    """Draws the charts of a run.

    Args:
        metrics: what the run recorded.
        name: the run's, for the titles.
        clip_norm: drawn as a line where it is set.

    Returns:
        The content of loss.png, grad_norm.png and learning_rate.png, by file name.
    """
    return {
        "loss.png": png(_loss_chart(metrics, name)),
        "grad_norm.png": png(_grad_norm_chart(metrics, name, clip_norm)),
        "learning_rate.png": png(_learning_rate_chart(metrics, name)),
    }


def png(figure: "Figure") -> bytes:
    """A figure as the content of a file."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()


def bin_curve(
    step: Column, mean: Column, low: Column, high: Column, *, most_points: int = MOST_POINTS
) -> tuple[Column, Column, Column, Column]:
    """Shortens a curve of n points to at most 2,000, so that long runs stay readable and quick to draw.

    Each bin of neighbouring steps becomes one point: the middle of its steps, the mean of `mean`, the minimum
    of `low` and the maximum of `high`, so no extreme is lost. nan is left out; a bin of nothing else is nan.
    """
    width = max(1, math.ceil(len(step) / most_points))
    starts = np.arange(0, len(step), width)
    if width == 1:
        return step, mean, low, high
    ends = np.append(starts[1:], len(step)) - 1
    finite = np.isfinite(mean)
    count = np.add.reduceat(finite.astype(np.float64), starts)
    total = np.add.reduceat(np.where(finite, mean, 0.0), starts)
    means = np.divide(total, count, out=np.full(len(starts), np.nan), where=count > 0)
    middle = (step[starts] + step[ends]) / 2
    return middle, means, np.fmin.reduceat(low, starts), np.fmax.reduceat(high, starts)


def empty_figure(size: tuple[float, float], panels: int = 1) -> tuple["Figure", list["Axes"]]:
    """A figure of so many inches, with panels above each other over one x axis. No pyplot: it keeps global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = list(figure.subplots(panels, sharex=True, squeeze=False)[:, 0])
    for axes in all_axes:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, all_axes


def _figure(metrics: Metrics, title: str, y_title: str) -> tuple["Figure", "Axes"]:
    """An empty chart over the run's steps, with the tokens on top."""
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    figure, (axes,) = empty_figure((9.0, 5.6))
    # A run's name is not mathematics, whatever dollar signs it has.
    axes.set_title(title, loc="left", parse_math=False)
    axes.set_xlabel("step")
    axes.set_ylabel(y_title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    if not len(metrics.train):
        axes.set_xlim(0, 1)
        axes.text(0.5, 0.6, "no step has been trained yet", transform=axes.transAxes, ha="center", color=GREY)
        return figure, axes
    last = metrics.train[-1]
    axes.set_xlim(0, 1.01 * max(1, int(last["step"])))
    size, unit = next(
        (pair for pair in ((1e9, "billion tokens"), (1e6, "million tokens")) if last["tokens"] >= pair[0]),
        (1.0, "tokens"),
    )
    per_step = max(1, int(last["tokens"])) / max(1, int(last["step"])) / size
    top = axes.secondary_xaxis(
        "top", functions=(lambda step: np.multiply(step, per_step), lambda token: np.divide(token, per_step))
    )
    top.set_xlabel(unit)
    top.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    return figure, axes


def _marker(points: int) -> str:
    """Few points are marked, so that one between two gaps can be seen."""
    return "o" if points <= 60 else ""


def _loss_chart(metrics: Metrics, name: str) -> "Figure":
    figure, axes = _figure(metrics, f"{name}: loss", "loss (nats per token)")
    train, validation = metrics.train, metrics.validation
    step, loss, low, high = bin_curve(train["step"], train["loss"], train["loss_min"], train["loss_max"])
    if len(step):
        axes.fill_between(step, low, high, color=BLUE, alpha=0.18, lw=0, label="lowest and highest sequence")
        axes.plot(step, loss, color=BLUE, lw=1.2, marker=_marker(len(step)), ms=4, label="training")
    best = metrics.best_validation()
    if best is not None:
        steps, losses = metrics.validation_curve()
        where, value, _, _ = bin_curve(steps, losses, losses, losses)
        label = f"validation (best {best['loss']:.4f} at step {best['step']:,})"
        size = 4 if len(where) <= 100 else 2
        axes.plot(where, value, color=VERMILION, lw=1.5, marker="s", ms=size, label=label)
    for style, label, with_changes in ((":", "resumed", False), ("--", "resumed with changes", True)):
        for resume in metrics.events_named("resume"):
            if bool(resume.get("changed")) == with_changes:
                axes.axvline(resume["step"], color=GREY, lw=1, ls=style, label=label)
                label = ""
    limit_losses(axes, low, high, np.concatenate([train["loss"], validation["loss"]]))
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure


def limit_losses(axes: "Axes", low: Column, high: Column, losses: Column) -> None:
    """Cuts the y axis as `loss_limits` says, and says so."""
    limits = loss_limits(low, high, losses)
    if limits is not None:
        bottom, top, largest = limits
        axes.set_ylim(bottom, top)
        axes.set_title(f"axis cut, the highest value is {largest:,.2f}", loc="right", fontsize=9, color=GREY)


def loss_limits(
    low: Column, high: Column, losses: Column, share: float = 0.95, whole: Column | None = None
) -> tuple[float, float, float] | None:
    """Where to cut a y axis so that the first losses, or rare spikes, do not press the rest of the curve flat.

    Args:
        low: lowest values of the curve.
        high: highest values.
        losses: values in between, none of which lies below the axis.
        share: of the values that the axis shows at least.
        whole: values that lie on the axis in any case.

    Returns:
        Bottom and top of the axis, and the highest value; None where nothing needs to be cut.
    """
    low, high, losses = (values[np.isfinite(values)] for values in (low, high, losses))
    if not len(losses):
        return None
    # Without training rows there is no band.
    bottom = min(losses.min(), np.quantile(low, 0.05) if len(low) else math.inf)
    usual = max(np.quantile(values, share) for values in (losses, high) if len(values))
    if whole is not None and np.isfinite(whole).any():
        usual = max(usual, whole[np.isfinite(whole)].max())
    largest = max(values.max() for values in (losses, high) if len(values))
    if largest - bottom <= 2 * (usual - bottom) or usual == bottom:
        return None
    margin = 0.05 * (usual - bottom)
    return float(bottom - margin), float(usual + margin), float(largest)


def _grad_norm_chart(metrics: Metrics, name: str, clip_norm: float | None) -> "Figure":
    figure, axes = _figure(metrics, f"{name}: gradient norm before clipping", "L2 norm")
    norms = metrics.train["grad_norm"]
    positive = norms[norms > 0]
    if len(positive) and positive.max() > 30 * positive.min():
        axes.set_yscale("log")
        norms = np.where(norms > 0, norms, np.nan)
    step, mean, low, high = bin_curve(metrics.train["step"], norms, norms, norms)
    if len(step) < len(norms):
        axes.fill_between(step, low, high, color=BLUE, alpha=0.3, lw=0.6, label="lowest and highest step")
    axes.plot(step, mean, color=BLUE, lw=1.2, marker=_marker(len(step)), ms=4, label="gradient norm")
    if clip_norm is not None:
        axes.axhline(clip_norm, color=VERMILION, lw=1.5, ls="--", label=f"clipped to {clip_norm:g}")
    overflows, nonfinite = metrics.bad_steps()
    for steps, style, colour, label in (
        (nonfinite, "X", PURPLE, f"not finite ({len(nonfinite):,})"),
        (overflows, "v", GREEN, f"loss scale overflowed ({len(overflows):,})"),
    ):
        if steps:
            # At the bottom edge, because there is no norm to draw.
            edge: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "clip_on": False}
            axes.plot(steps, [0.02] * len(steps), style, color=colour, ms=8, label=label, **edge)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure


def _learning_rate_chart(metrics: Metrics, name: str) -> "Figure":
    from matplotlib.ticker import StrMethodFormatter

    figure, axes = _figure(metrics, f"{name}: learning rate", "learning rate")
    rate = metrics.train["learning_rate"]
    step, mean, _, _ = bin_curve(metrics.train["step"], rate, rate, rate)
    axes.plot(step, mean, color=BLUE, lw=1.5, marker=_marker(len(step)), ms=4)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:.4g}"))
    axes.set_ylim(bottom=0)
    return figure
