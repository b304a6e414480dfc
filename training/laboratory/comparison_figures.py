"""The charts of a comparison's page, as plotly's figures: curves along steps, tokens or time, and the differences."""

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from training.charts import Column, loss_limits
from training.laboratory.comparability import UNITS
from training.laboratory.comparison import Comparison
from training.laboratory.comparison_charts import SHOWN, Style, group_styles, verdict_style
from training.laboratory.comparison_table import probability
from training.laboratory.curves import ALONG, QUANTITIES, Y_TITLES, Curve, Quantity, axis_unit, curves_of
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
    for run, result in enumerate(runs):
        for panel, (quantity, curve) in enumerate(curves_of(result.metrics, most_points).items(), start=1):
            trace = _trace(result, curve, quantity, styles[result.group])
            # A legend entry stands for the run's curves in all panels, by its place: names need not differ.
            trace.update(legendgroup=str(run), showlegend=panel == 1)
            figure.add_trace(trace, row=panel, col=1)
            drawn[quantity].append(curve)
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
    for panel, (quantity, curves) in enumerate(drawn.items(), start=1):
        title = Y_TITLES[quantity].replace("\n", "<br>")
        figure.update_yaxes(title_text=title, showgrid=True, row=panel, **_y_axis(quantity, curves))
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
        hovertemplate=f"<b>{name}</b><br>{quantity} %{{y:.5g}}<br>step %{{customdata[0]:,.0f}}, "
        "%{customdata[1]:,.0f} tokens, %{customdata[2]:,.0f} s<extra></extra>",
    )


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


def _y_axis(quantity: Quantity, curves: Sequence[Curve]) -> dict[str, Any]:
    """What part of the curves is shown before somebody zooms."""
    values = np.concatenate([np.zeros(0), *(curve.values for curve in curves)])
    if quantity == "learning rate":
        return {"rangemode": "tozero", "tickformat": ".2~g"}
    if quantity == "gradient norm":
        positive = values[values > 0]
        return {"type": "log"} if len(positive) and positive.max() > 8 * positive.min() else {}
    limits = loss_limits(values, values, values, SHOWN)
    return {"range": list(limits[:2])} if limits else {}


def differences_figure(comparison: Comparison) -> "Figure":
    """Each group's difference with its interval, from the best to the worst."""
    from plotly.graph_objects import Figure, Scatter

    figure = Figure()
    rows = [(row, row.difference) for row in comparison.rows if row.difference is not None]
    for row, difference in rows:
        colour, mark, filled = verdict_style(row)
        half = 0.0 if row.interval is None else (row.interval.high - row.interval.low) / 2
        about = f"{difference:+.4f} ± {half:.4f}, p {probability(row.adjusted_p_value)}" if half else "no interval"
        marker = {"symbol": SYMBOLS[mark] + ("" if filled else "-open"), "size": 10, "color": colour}
        figure.add_trace(
            Scatter(
                x=[difference],
                y=[escape(row.group)],
                error_x={"type": "data", "array": [half], "color": colour, "visible": half > 0},
                mode="markers",
                marker=marker,
                name=escape(row.group),
                hovertemplate=f"{escape(row.group)}: {row.verdict}<br>%{{x:+.4f}}<br>{about}<extra></extra>",
            )
        )
    baseline = next(row for row in comparison.rows if row.group == comparison.baseline)
    if baseline.deviation:
        figure.add_vrect(-baseline.deviation, baseline.deviation, fillcolor="#808080", opacity=0.2, line_width=0)
    figure.add_vline(0, line_width=1.5, line_color="black", opacity=1)
    figure.update_layout(
        template="simple_white",
        showlegend=False,
        height=140 + 32 * max(1, len(rows)),
        margin={"t": 20, "l": 20, "r": 20},
        xaxis={"title": f"difference to {escape(comparison.baseline)} ({UNITS[comparison.measure]}); left is better"},
        yaxis={"autorange": "reversed", "automargin": True, "type": "category"},
    )
    return figure
