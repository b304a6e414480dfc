"""A comparison as a table: for the terminal, as Markdown, as CSV, and as strict JSON."""

import csv
import html
import io
import json
import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Literal, get_args

from training.json_file import strict
from training.laboratory.comparability import UNITS
from training.laboratory.comparison import Comparison, Row, Run
from training.laboratory.comparison_summary import how_to_read
from training.laboratory.statistics import CONFIDENCE
from training.report_sections import duration, table

Form = Literal["terminal", "markdown", "csv", "json"]
FORMS: tuple[Form, ...] = get_args(Form)
TERMINAL_WIDTH = 100
LONGEST_NAME = 20
"""In the terminal; a longer one gets a line of its own."""
TITLES = (
    "Run",
    "Loss",
    "SD",
    "Difference",
    "Verdict",
    "95 % interval",
    "p",
    "p (Holm)",
    "Seeds",
    "Tokens/s",
    "Time",
    "Changes",
)
"""The verdict stands beside what it judges, where also a narrow window shows it."""


def write_tables(comparison: Comparison) -> dict[Form, str]:
    """The comparison in every form, each ending in a newline."""
    return {
        "terminal": _terminal(comparison),
        "markdown": _markdown(comparison),
        "csv": _csv(comparison),
        "json": json.dumps(comparison_values(comparison), allow_nan=False, indent=2) + "\n",
    }


def shown_table(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """The table for people: the heads of its columns, and its rows; a column without any content is left out."""
    name = f"{'Loss' if comparison.measure == 'loss' else 'Bits per byte'}, mean"
    heads = [name if title == "Loss" else title for title in TITLES]
    rows = [_cells(row, letters) for row, letters in zip(comparison.rows, marked(comparison)[0], strict=True)]
    filled = [place for place in range(len(heads)) if any(row[place] for row in rows)]
    return [heads[place] for place in filled], [[row[place] for place in filled] for row in rows]


def _cells(row: Row, letters: str) -> list[str]:
    """A row in the columns of TITLES; the letters lead to its marks."""
    return [
        row.group,
        number(row.mean),
        number(row.deviation),
        number(row.difference, "+.4f"),
        f"{row.verdict} ({letters})" if letters else row.verdict,
        f"{row.interval.low:+.4f} to {row.interval.high:+.4f}" if row.interval else "",
        probability(row.p_value),
        probability(row.adjusted_p_value),
        str(row.seeds),
        number(row.tokens_per_second, ",.0f"),
        "" if row.seconds is None else duration(row.seconds),
        "" if _is_in_the_name(row) else row.changes,
    ]


def _is_in_the_name(row: Row) -> bool:
    """Whether a group's name says already what it changes, as that of a study's row does."""
    return row.changes.replace(", ", "-") in row.group


def run_titles() -> list[str]:
    """The heads of the columns that `run_cells` fills."""
    return [
        "Run",
        "Of",
        "Seeds",
        "Loss",
        "Bits/byte",
        "Tokens",
        "Tokens/s",
        "Time",
        "Weights",
        "Data order",
        "Compared",
    ]


def run_cells(run: Run) -> list[str]:
    """A single run for people, in the columns of `run_titles`; digests shortened to eight digits."""
    result = run.result
    return [
        result.name,
        result.group,
        "" if result.imported else f"{result.seed_weights} / {result.seed_training}",
        number(result.loss, ".6f"),
        number(result.bits_per_byte),
        "" if result.imported else f"{result.train_tokens:,}",
        number(result.tokens_per_second, ",.0f"),
        "" if result.imported else duration(result.seconds),
        (result.digests.weights or "")[:8],
        (result.digests.data_order or "")[:8],
        run.obstacle or "yes",
    ]


def marked(comparison: Comparison) -> tuple[list[str], list[str]]:
    """The letters that refer each row to its marks, and the marks with their letters, each once."""
    marks = list(dict.fromkeys(mark for row in comparison.rows for mark in row.marks))
    letters = {mark: _letter(index) for index, mark in enumerate(marks)}
    return [" ".join(letters[mark] for mark in row.marks) for row in comparison.rows], [
        f"{letter}: {mark}" for mark, letter in letters.items()
    ]


def _letter(index: int) -> str:
    """a to z, then aa, ab, ..."""
    return (_letter(index // 26 - 1) if index >= 26 else "") + chr(ord("a") + index % 26)


def number(value: float | None, form: str = ".4f") -> str:
    """A number for people; nothing for None."""
    if value is None:
        return ""
    return format(value, form) if math.isfinite(value) else "not finite"


def probability(value: float | None) -> str:
    """A p value for people."""
    if value is None:
        return ""
    return "<0.0001" if value < 0.0001 else f"{value:.4f}"


def comparison_values(comparison: Comparison) -> dict[str, Any]:
    """The comparison as plain values in full precision, null for what is not there or not finite."""
    return {
        "baseline": comparison.baseline,
        "measure": comparison.measure,
        "unit": UNITS[comparison.measure],
        "confidence": CONFIDENCE,
        "rows": [{key: strict(value) for key, value in vars(row).items()} for row in comparison.rows],
        "runs": [_run_values(run) for run in comparison.runs],
        "remarks": list(comparison.remarks),
    }


def _run_values(run: Run) -> dict[str, Any]:
    result = run.result
    apart = ("config", "digests", "folder", "metrics")
    values = {key: strict(value) for key, value in vars(result).items() if key not in apart}
    return {**values, **{f"{key}_sha256": value for key, value in asdict(result.digests).items()}} | {
        "folder": str(result.folder),
        "obstacle": run.obstacle,
    }


def _csv(comparison: Comparison) -> str:
    """A line a row, full precision; an interval takes two columns, marks are joined with semicolons.

    A text that a spreadsheet would take for a formula is led by an apostrophe.
    """
    rows = []
    for row in comparison.rows:
        record: dict[str, Any] = {}
        for key, value in vars(row).items():
            if key in ("interval", "mean_interval", "deviation_interval"):
                low, high = value or ("", "")
                record |= {f"{key}_low": low, f"{key}_high": high}
            else:
                text = "; ".join(value) if key == "marks" else value
                record[key] = f"'{text}" if isinstance(text, str) and text.startswith(tuple("=+-@")) else text
        rows.append(record)
    file = io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def _markdown(comparison: Comparison) -> str:
    heads, rows = shown_table(comparison)
    notes = [f"- {escaped(note)}" for note in [*marked(comparison)[1], *comparison.remarks, *how_to_read(comparison)]]
    runs = table(run_titles(), (map(escaped, run_cells(run)) for run in comparison.runs))
    unit = UNITS[comparison.measure]
    lines = [f"Differences to {escaped(comparison.baseline)} in {unit}, negative is better.", ""]
    lines += [*table(heads, (map(escaped, row) for row in rows)), "", *notes, "", "Runs:", "", *runs]
    return "\n".join(lines) + "\n"


def escaped(text: str) -> str:
    """Text that Markdown takes for nothing else."""
    escaped = html.escape(text, quote=False)
    return "".join(f"\\{letter}" if letter in "*_`[]" else letter for letter in escaped)


def _terminal(comparison: Comparison) -> str:
    heads = ["run", "loss" if comparison.measure == "loss" else "bits/B", "SD", "difference", "p (Holm)", "n"]
    heads += ["tok/s", "time", "verdict"]
    letters, marks = marked(comparison)
    lines = [_terminal_cells(row, letter) for row, letter in zip(comparison.rows, letters, strict=True)]
    widths = [max(map(len, column)) for column in zip(heads, *lines, strict=True)]
    widths[0] = min(widths[0], LONGEST_NAME)
    text = [_terminal_line(heads, widths)]
    for row, line in zip(comparison.rows, lines, strict=True):
        if len(line[0]) > LONGEST_NAME:
            text.append(line[0])
            line = ["", *line[1:]]
        text.append(_terminal_line(line, widths))
        if not _is_in_the_name(row):
            text.append(
                f"    {row.changes}"[: TERMINAL_WIDTH - 1] + ("…" if len(row.changes) > TERMINAL_WIDTH - 5 else "")
            )
    unit = UNITS[comparison.measure]
    legend = f"difference to {comparison.baseline} in {unit}, with its 95 % interval; p (Holm) is corrected; n seeds"
    notes = [*textwrap.wrap(legend, TERMINAL_WIDTH), ""]
    for note in (*marks, *comparison.remarks):
        notes += textwrap.wrap(note, TERMINAL_WIDTH, subsequent_indent="   ")
    return "\n".join([*text, "", *notes]) + "\n"


def _terminal_line(line: Sequence[str], widths: Sequence[int]) -> str:
    first, *middle, last = line
    cells = [
        first.ljust(widths[0]),
        *(cell.rjust(width) for cell, width in zip(middle, widths[1:-1], strict=True)),
        last,
    ]
    return "  ".join(cells).rstrip()


def _terminal_cells(row: Row, letters: str) -> list[str]:
    half = "" if row.interval is None else f"±{(row.interval.high - row.interval.low) / 2:.4f}"
    return [
        row.group,
        number(row.mean),
        number(row.deviation),
        number(row.difference, "+.4f") + half,
        probability(row.adjusted_p_value).replace("0.", "."),
        str(row.seeds),
        "" if row.tokens_per_second is None else _thousands(row.tokens_per_second),
        "" if row.seconds is None else _short_duration(row.seconds),
        f"{row.verdict.partition(':')[0]} {letters}".strip(),
    ]


def _thousands(value: float) -> str:
    return f"{value:,.0f}" if value < 99_999.5 else f"{value / 1000:,.0f}k"


def _short_duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
