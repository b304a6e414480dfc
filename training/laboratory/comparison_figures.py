"""The charts of a comparison's page, as plotly's figures: curves along steps, tokens or time, and the differences."""

import math
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from training.charts import GREY, Column
from training.laboratory.comparability import UNITS
from training.laboratory.comparison import Comparison, Row
from training.laboratory.comparison_charts import (
    INTERVAL,
    VERDICT_STYLES,
    Style,
    band_label,
    group_styles,
    verdict_style,
    verdicts_of,
)
from training.laboratory.comparison_table import probability
from training.laboratory.curves import ALONG, QUANTITIES, Y_TITLES, Curve, Quantity, axis_unit, curves_of, cut_losses
from training.laboratory.results import RunResult

if TYPE_CHECKING:
    from plotly.graph_objects import Figure, Scatter

POINTS_OF_ALL_CURVES = 12_000
"""Of one quantity: some megabytes on the page, as much as plotly.js."""
MOST_POINTS = 400
DASHES = {"-": "solid", "--": "dash", "-.": "dashdot", ":": "dot"}
SYMBOLS = {"o": "circle", "s": "square", "^": "triangle-up", "D": "diamond", "v": "triangle-down", "P": "cross"}
SYMBOLS |= {"X": "x", "<": "triangle-left", ">": "triangle-right", "*": "star"}


def curves_figure(comparison: Comparison, results: Sequence[RunResult]) -> "Figure":
    """All runs over each other, a panel a quantity, with buttons for the x axis and a legend that toggles runs."""
    from plotly.subplots import make_subplots

    ranks = {row.group: rank for rank, row in enumerate(comparison.rows)}
    runs = sorted((result for result in results if not result.imported), key=lambda result: ranks[result.group])
    most_points = min(MOST_POINTS, max(100, POINTS_OF_ALL_CURVES // max(1, len(runs))))
    styles = group_styles(comparison, len(ranks))
    figure = make_subplots(rows=len(QUANTITIES), shared_xaxes=True, vertical_spacing=0.04)
    drawn: dict[Quantity, list[Curve]] = {quantity: [] for quantity in QUANTITIES}
    groups: dict[Quantity, dict[str, list[Curve]]] = {quantity: {} for quantity in QUANTITIES}
    for run, result in enumerate(runs):
        for panel, (quantity, curve) in enumerate(curves_of(result.metrics, most_points).items(), start=1):
            trace = _trace(result, curve, quantity, styles[result.group])
            # A legend entry stands for the run's curves in all panels, by its place: names need not differ.
            trace.update(legendgroup=str(run), showlegend=panel == 1)
            figure.add_trace(trace, row=panel, col=1)
            drawn[quantity].append(curve)
            groups[quantity].setdefault(escape(result.group), []).append(curve)
    buttons = _axis_buttons([curve for curves in zip(*drawn.values(), strict=True) for curve in curves])
    figure.update_layout(
        template="simple_white",
        height=1400,
        margin={"t": 70, "l": 90, "r": 20},
        hovermode="closest",
        legend={"itemsizing": "constant", "font": {"size": 11}},
        updatemenus=[
            {"type": "buttons", "direction": "right", "x": 0, "xanchor": "left", "y": 1.04, "buttons": buttons}
        ],
    )
    figure.update_xaxes(showgrid=True, rangemode="tozero")
    figure.update_xaxes(title_text=buttons[0]["args"][1][f"xaxis{len(QUANTITIES)}.title.text"], row=len(QUANTITIES))
    for panel, (quantity, curves) in enumerate(groups.items(), start=1):
        axis, note = _y_axis(quantity, curves)
        title = Y_TITLES[quantity].replace("\n", "<br>")
        figure.update_yaxes(title_text=title, showgrid=True, row=panel, **axis)
        place = {"xref": "x domain", "yref": "y domain", "x": 1, "y": 1, "xanchor": "right", "yanchor": "bottom"}
        figure.add_annotation(
            text=note, showarrow=False, font={"color": GREY, "size": 11}, row=panel, col=1, visible=bool(note), **place
        )
    return figure


def _trace(result: RunResult, curve: Curve, quantity: Quantity, style: Style) -> "Scatter":
    """A run's curve; what it shows under the pointer does not depend on the x axis chosen."""
    from plotly.graph_objects import Scatter

    few = len(curve.values) <= 60
    where = np.column_stack([curve.steps, curve.tokens, curve.time])
    name = escape(result.name)
    return Scatter(
        x=_rounded(curve.steps),
        y=_rounded(curve.values),
        customdata=[_rounded(place) for place in where],
        mode="lines+markers" if few else "lines",
        name=name,
        line={"color": style.colour, "dash": DASHES[style.line], "width": style.width},
        marker={"symbol": SYMBOLS[style.marker], "size": 6},
        hovertemplate=f"<b>{name}</b>{_seeds(result)}<br>{quantity} %{{y:.5g}}<br>step %{{customdata[0]:,.0f}}, "
        "%{customdata[1]:,.0f} tokens, %{customdata[2]:,.0f} s<extra></extra>",
    )


def _seeds(result: RunResult) -> str:
    """What tells the runs of a row apart, for the pointer."""
    return f"<br>seeds: weights {result.seed_weights}, training {result.seed_training}"


def _rounded(values: Column) -> list[float | None]:
    """Seven digits, which no chart shows, in few characters; None for what is not finite."""
    return [float(f"{value:.7g}") if np.isfinite(value) else None for value in values]


def _axis_buttons(curves: Sequence[Curve]) -> list[dict[str, Any]]:
    """A button for each x axis, which puts every curve on it; the curves are in the order of the traces."""
    buttons = []
    for along in ALONG:
        largest = max((curve.along(along)[-1] for curve in curves if len(curve.values)), default=1.0)
        divisor, title = axis_unit(along, largest)
        x = [_rounded(curve.along(along) / divisor) for curve in curves]
        everything = {f"xaxis{panel or ''}.autorange": True for panel in (0, *range(2, len(QUANTITIES) + 1))}
        layout = {f"xaxis{len(QUANTITIES)}.title.text": title, **everything}
        buttons.append({"label": along, "method": "update", "args": [{"x": x}, layout]})
    return buttons


def _y_axis(quantity: Quantity, curves: dict[str, list[Curve]]) -> tuple[dict[str, Any], str]:
    """What part of the curves is shown before somebody zooms, and what is to be said of it."""
    values = np.concatenate([np.zeros(0), *(curve.values for group in curves.values() for curve in group)])
    if quantity == "learning rate":
        return {"rangemode": "tozero", "tickformat": ".2~g"}, ""
    if quantity == "gradient norm":
        positive = values[values > 0]
        logarithmic = len(positive) and positive.max() > 8 * positive.min()
        return ({"type": "log", **_log_ticks(positive.min(), positive.max())} if logarithmic else {}), ""
    cut = cut_losses(curves)
    return ({"range": [cut.bottom, cut.top]}, cut.note) if cut else ({}, "")


def _log_ticks(low: float, high: float) -> dict[str, Any]:
    """Ticks at 1, 2 and 5 times powers of ten, each written out; plotly writes 2 for 0.2 as for 20."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if len(powers) <= 4 else (1,)
    ticks = [float(f"{step}e{power}") for power in powers for step in steps]
    return {"tickmode": "array", "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}


def differences_figure(comparison: Comparison) -> "Figure":
    """Each group's difference with its interval, from the best to the worst."""
    from plotly.graph_objects import Figure

    figure = Figure()
    rows = [(row, row.difference) for row in comparison.rows if row.difference is not None]
    for row, difference in rows:
        figure.add_trace(_difference(row, difference))
    figure.add_traces(_legend_entries(comparison))
    baseline = next(row for row in comparison.rows if row.group == comparison.baseline)
    if baseline.deviation:
        figure.add_vrect(-baseline.deviation, baseline.deviation, fillcolor="#808080", opacity=0.2, line_width=0)
    figure.add_vline(0, line_width=1.5, line_color="black", opacity=1)
    names = [escape(row.group) for row, _ in rows]
    figure.update_layout(
        template="simple_white",
        legend={
            **{"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom", "itemclick": False, "itemdoubleclick": False},
            **{"font": {"size": 12}},
        },
        height=220 + 32 * max(1, len(rows)),
        margin={"t": 60, "l": 20, "r": 20},
        xaxis={"title": f"difference to {escape(comparison.baseline)} ({UNITS[comparison.measure]}); left is better"},
        # The range by hand: half a row of room above the first and below the last.
        yaxis={
            **{"range": [max(1, len(rows)) - 0.4, -0.6], "automargin": True},
            **{"type": "category", "categoryorder": "array", "categoryarray": names},
        },
    )
    return figure


def _difference(row: Row, difference: float) -> "Scatter":
    """A row's dot and whisker."""
    from plotly.graph_objects import Scatter

    colour, mark, filled = verdict_style(row)
    half = 0.0 if row.interval is None else (row.interval.high - row.interval.low) / 2
    about = f"{difference:+.4f} ± {half:.4f}, p (Holm) {probability(row.adjusted_p_value)}" if half else "no interval"
    return Scatter(
        x=[difference],
        y=[escape(row.group)],
        error_x={"type": "data", "array": [half], "color": colour, "visible": half > 0},
        mode="markers",
        marker={"symbol": SYMBOLS[mark] + ("" if filled else "-open"), "size": 10, "color": colour},
        name=escape(row.group),
        showlegend=False,
        hovertemplate=f"{escape(row.group)}: {row.verdict}<br>%{{x:+.4f}}<br>{about}<extra></extra>",
    )


def _legend_entries(comparison: Comparison) -> list["Scatter"]:
    """What colours, markers, whiskers and the band mean: entries without data."""
    from plotly.graph_objects import Scatter

    nothing: dict[str, Any] = {"x": [None], "y": [None], "mode": "markers"}
    entries = []
    for verdict in verdicts_of(comparison):
        colour, mark, filled = VERDICT_STYLES[verdict]
        marker = {"symbol": SYMBOLS[mark] + ("" if filled else "-open"), "size": 10, "color": colour}
        entries.append(Scatter(**nothing, name=verdict, marker=marker))
    if any(row.interval for row in comparison.rows):
        marker = {"symbol": "line-ew-open", "size": 16, "color": GREY, "line": {"width": 2}}
        entries.append(Scatter(**nothing, name=INTERVAL, marker=marker))
    if label := band_label(comparison):
        marker = {"symbol": "square", "size": 14, "color": "#D9D9D9"}
        entries.append(Scatter(**nothing, name=escape(label), marker=marker))
    return entries
