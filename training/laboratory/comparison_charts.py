"""The charts of a comparison, as pictures: groups of runs over each other, and their differences to the baseline."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from training.charts import BLUE, GREEN, GREY, PURPLE, VERMILION, empty_figure, png
from training.laboratory.comparability import UNITS
from training.laboratory.comparison import Comparison, Row
from training.laboratory.curves import (
    ALONG,
    Y_TITLES,
    Along,
    Curve,
    Curves,
    Quantity,
    axis_unit,
    curves_of,
    cut_losses,
    mean_curve,
)
from training.laboratory.results import RunResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_GROUPS = 10
"""Drawn in colours and named, besides the baseline; the others are grey."""
MOST_THIN_LINES = 20
POINTS = 250
"""Of a curve: what the eye can tell apart where several curves lie over each other."""
BLACK, ORANGE, SKY = "#000000", "#E69F00", "#56B4E9"
# Black, and Okabe and Ito's colours; with line styles and markers that tell them apart in grey as well.
COLOURS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)
LINES = ("-", "--", "-.", ":")
OTHERS = "#B0B0B0"
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")
NO_CLAIM = "no claim possible"
VERDICT_STYLES: dict[str, tuple[str, str, bool]] = {
    "better": (BLUE, "o", True),
    "worse": (VERMILION, "s", True),
    "inside the noise": (GREY, "o", False),
    NO_CLAIM: (GREY, "D", False),
}
"""Colour, marker, and whether it is filled."""

INTERVAL = "95 % interval of the row alone, not corrected; the verdict goes by p (Holm)"

Groups = dict[str, list[Curves]]


@dataclass(frozen=True)
class Style:
    """How a group is drawn everywhere."""

    colour: str
    line: str
    marker: str
    width: float
    named: bool = True


def group_styles(comparison: Comparison, most_groups: int = MOST_GROUPS) -> dict[str, Style]:
    """The baseline in black, so many in colours, the others in grey; in the order of the table.

    Colours go to the rows that differ from the baseline by more than the noise, and then to the best.
    """
    others = [row for row in comparison.rows if row.group != comparison.baseline]
    first = sorted(others, key=lambda row: row.verdict not in ("better", "worse"))
    named = {row.group for row in first[:most_groups]}
    styles = {}
    index = 0
    for row in comparison.rows:
        if row.group == comparison.baseline:
            styles[row.group] = Style(BLACK, "-", "o", 2.0)
        elif row.group in named:
            line, marker = LINES[index % len(LINES)], MARKERS[index % len(MARKERS)]
            # Twelve pairs of colour and line style, then, a colour further, twelve more.
            colour = COLOURS[(index + index // 12) % len(COLOURS)]
            styles[row.group] = Style(colour, line, marker, 1.4)
            index += 1
        else:
            styles[row.group] = Style(OTHERS, "-", "", 0.8, named=False)
    return styles


def draw_comparison(comparison: Comparison, results: Sequence[RunResult]) -> dict[str, bytes]:
    """Draws a comparison.

    Returns:
        The pictures by file name: loss over steps, tokens and time, gradient norm, learning rate, differences.
    """
    groups = drawn_groups(results, POINTS)
    styles = group_styles(comparison)
    losses: list[Quantity] = ["training loss", "validation loss"]
    pictures = {f"loss_{along}.png": png(_overlay(groups, styles, losses, along)) for along in ALONG}
    pictures["gradient_norm.png"] = png(_overlay(groups, styles, ["gradient norm"], "steps"))
    pictures["learning_rate.png"] = png(_overlay(groups, styles, ["learning rate"], "steps"))
    pictures["differences.png"] = png(_differences(comparison))
    return pictures


def drawn_groups(results: Sequence[RunResult], most_points: int) -> Groups:
    """The curves of each group's runs; imported models have none, and of unfinished runs only those without others."""
    groups: Groups = {}
    for group in dict.fromkeys(result.group for result in results):
        members = [result for result in results if result.group == group and not result.imported]
        members = [result for result in members if result.finished] or members
        groups[group] = [curves_of(result.metrics, most_points) for result in members]
    return groups


def _overlay(groups: Groups, styles: dict[str, Style], quantities: Sequence[Quantity], along: Along) -> "Figure":
    """The curves of all groups, a panel for each quantity."""
    figure, panels = empty_figure((10.5, 2.2 + 3.4 * len(quantities)), len(quantities))
    curves = [curve[quantity].along(along) for group in groups.values() for curve in group for quantity in quantities]
    divisor, title = axis_unit(along, max((x[-1] for x in curves if len(x)), default=1.0))
    thin = sum(map(len, groups.values())) <= MOST_THIN_LINES
    for axes, quantity in zip(panels, quantities, strict=True):
        axes.set_ylabel(Y_TITLES[quantity])
        # From the last to the first of the table, so that the best and the baseline lie on top.
        for group in reversed([*styles]):
            members = [curves for curves in groups.get(group, []) if len(curves[quantity].values)]
            _draw_group(axes, [curves[quantity] for curves in members], styles[group], along, divisor, thin)
        _limit(axes, quantity, {name: [curves[quantity] for curves in group] for name, group in groups.items()})
    panels[-1].set_xlabel(title)
    panels[-1].set_xlim(left=0)
    _legend(figure, styles, groups)
    return figure


def _draw_group(
    axes: "Axes", curves: Sequence[Curve], style: Style, along: Along, divisor: float, with_each_run: bool
) -> None:
    """A group's mean with the band from its lowest to its highest run, and each run thinly."""
    if not curves:
        return
    x, mean, low, high = mean_curve(curves, along)
    order = 3 if style.width > 1.5 else 2 if style.named else 1
    few = style.marker if len(x) <= 60 else ""
    if len(curves) > 1:
        axes.fill_between(x / divisor, low, high, color=style.colour, alpha=0.15, lw=0, zorder=order)
        for curve in curves if with_each_run else []:
            axes.plot(curve.along(along) / divisor, curve.values, color=style.colour, lw=0.6, alpha=0.5, zorder=order)
    axes.plot(x / divisor, mean, color=style.colour, ls=style.line, lw=style.width, marker=few, ms=4, zorder=order)


def _limit(axes: "Axes", quantity: Quantity, curves: dict[str, list[Curve]]) -> None:
    """A y axis on which the part of the curves can be read that matters."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    everything = np.concatenate([np.zeros(0), *(curve.values for group in curves.values() for curve in group)])
    if quantity == "learning rate":
        axes.set_ylim(bottom=0)
    elif quantity == "gradient norm":
        positive = everything[everything > 0]
        if len(positive) and positive.max() > 8 * positive.min():
            axes.set_yscale("log")
            decades = np.log10(positive.max() / positive.min())
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades <= 3 else (1,)))
            axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axes.yaxis.set_minor_formatter(NullFormatter())
    elif (cut := cut_losses(curves)) is not None:
        axes.set_ylim(cut.bottom, cut.top)
        note = textwrap.fill(cut.note, 110)
        axes.set_title(note, loc="right", fontsize=9, color=GREY, parse_math=False)


def _legend(figure: "Figure", styles: dict[str, Style], groups: Groups) -> None:
    """The groups drawn, outside the panels."""
    from matplotlib.lines import Line2D

    handles = []
    for group, style in styles.items():
        runs = len(groups.get(group, []))
        if style.named and runs:
            label = f"{group} (mean of {runs})" if runs > 1 else group
            colour, line, marker = style.colour, style.line, style.marker
            handles.append(Line2D([], [], color=colour, ls=line, lw=style.width, marker=marker, ms=4, label=label))
    others = sum(not style.named for style in styles.values())
    if others:
        handles.append(Line2D([], [], color=OTHERS, lw=0.8, label=f"{others} others"))
    several = any(len(members) > 1 for members in groups.values())
    legend = figure.legend(
        handles=handles,
        loc="outside right upper",
        frameon=False,
        fontsize=8,
        handlelength=3.5,
        title="lines: mean of the seeds\nbands: lowest to highest" if several else None,
        title_fontsize=8,
        alignment="left",
    )
    # A name is not mathematics, whatever dollar signs it has.
    for text in legend.get_texts():
        text.set_parse_math(False)


def _differences(comparison: Comparison) -> "Figure":
    """Each group's difference to the baseline with its interval, from the best to the worst."""
    rows = [(row, row.difference) for row in comparison.rows if row.difference is not None]
    figure, (axes,) = empty_figure((9.5, 1.8 + 0.32 * max(1, len(rows))))
    baseline = next(row for row in comparison.rows if row.group == comparison.baseline)
    if baseline.deviation:
        label = band_label(comparison)
        axes.axvspan(-baseline.deviation, baseline.deviation, color="#E4E4E4", lw=0, label=label, zorder=0)
    if any(row.interval for row, _ in rows):
        axes.plot([], [], color=GREY, lw=1.6, marker="|", ms=7, label=INTERVAL)
    axes.axvline(0, color=BLACK, lw=1, zorder=1)
    for place, (row, difference) in enumerate(rows):
        colour, marker, filled = verdict_style(row)
        if row.interval is not None:
            axes.plot(row.interval, [place, place], color=colour, lw=1.6, marker="|", ms=7, zorder=2)
        face = colour if filled else "white"
        axes.plot([difference], [place], marker, color=colour, markerfacecolor=face, ms=7, zorder=3)
    axes.set_yticks(range(len(rows)), [f"{row.group} ({row.seeds})" for row, _ in rows], parse_math=False)
    axes.set_ylim(max(1, len(rows)) - 0.4, -0.6)
    unit = UNITS[comparison.measure]
    axes.set_xlabel(f"difference to {comparison.baseline} in {unit}: left of 0 is better", parse_math=False)
    if not rows:
        axes.text(0.5, 0.5, "nothing to compare", transform=axes.transAxes, ha="center", color=GREY)
    for verdict in verdicts_of(comparison):
        colour, marker, filled = VERDICT_STYLES[verdict]
        face = colour if filled else "white"
        axes.plot([], [], marker, color=colour, markerfacecolor=face, ms=7, label=verdict)
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return figure


def verdicts_of(comparison: Comparison) -> list[str]:
    """Those of VERDICT_STYLES that occur among the differences."""
    occurring = {verdict_style(row) for row in comparison.rows if row.difference is not None}
    return [verdict for verdict, style in VERDICT_STYLES.items() if style in occurring]


def band_label(comparison: Comparison) -> str:
    """What the band around 0 is; empty where there is none."""
    baseline = next(row for row in comparison.rows if row.group == comparison.baseline)
    return f"± one standard deviation of the baseline's {baseline.seeds} seeds" if baseline.deviation else ""


def verdict_style(row: Row) -> tuple[str, str, bool]:
    """Colour and marker of a row's dot, and whether it is filled."""
    return VERDICT_STYLES.get(row.verdict, VERDICT_STYLES[NO_CLAIM])
