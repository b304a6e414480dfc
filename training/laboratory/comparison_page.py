"""A comparison as files: tables, pictures, and one HTML page that needs nothing else, not even a network.

The charts of the page are plotly's own; plotly.js is part of the file, once.
"""

import os
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path

from training.errors import RunError
from training.laboratory.comparability import UNITS
from training.laboratory.comparison import Comparison
from training.laboratory.comparison_charts import draw_comparison
from training.laboratory.comparison_figures import curves_figure, differences_figure
from training.laboratory.comparison_summary import heading, how_to_read, summary
from training.laboratory.comparison_table import Form, escaped, marked, run_cells, run_titles, shown_table, write_tables
from training.laboratory.results import RunResult

FILES: dict[Form, str] = {"markdown": "comparison.md", "csv": "comparison.csv", "json": "comparison.json"}
PAGE = "comparison.html"
BUTTONS = ["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "autoScale2d", "resetScale2d"]
"""Of plotly's toolbar; by itself it has others, one of which sends the chart away."""
# Nothing is loaded from anywhere, whatever a name on the page holds.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
POLICY += "form-action 'none'; base-uri 'none'"
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 1.5rem auto; max-width: 90rem; padding: 0 1rem; color: #111; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.85rem; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid #ccc; padding: 0.3rem 0.45rem; text-align: left; vertical-align: top; }
td.number { text-align: right; }
td.number, td.verdict, td:first-child { white-space: nowrap; }
td.changes { min-width: 17rem; }
ul.summary { list-style: none; padding: 0; }
tr.baseline { background: #eee; }
tr.better td.verdict { color: #0072B2; font-weight: 600; }
tr.worse td.verdict { color: #B04A00; font-weight: 600; }
img { max-width: 100%; }
@media print {
  @page { size: A4 landscape; margin: 10mm; }
  body { margin: 0; max-width: none; padding: 0; font-size: 9pt; }
  .wide { overflow: visible; }
  table { font-size: 7pt; }
  th, td { padding: 1pt 3pt; }
  td.changes { min-width: 8rem; }
  tr { break-inside: avoid; }
  .modebar { display: none; }
}
"""


@dataclass(frozen=True)
class Appendix:
    """What a page ends with besides: text and a picture."""

    title: str
    paragraphs: Sequence[str]
    notes: Sequence[str]
    picture: str
    """Its file name."""
    content: bytes
    """The picture, as PNG."""

    def markdown(self) -> str:
        """The section of comparison.md."""
        notes = [f"- {note}" for note in self.notes]
        picture = f"![{self.title}]({self.picture})"
        return "\n".join([f"## {self.title}", "", *self.paragraphs, "", *notes, "", picture, ""])

    def html(self) -> str:
        """That of the page, with the picture in it."""
        paragraphs = "".join(f"<p>{escape(text)}</p>" for text in self.paragraphs)
        notes = "".join(f"<li>{escape(note)}</li>" for note in self.notes)
        image = f'<img alt="{escape(self.title)}" src="data:image/png;base64,{b64encode(self.content).decode()}">'
        return f"<h2>{escape(self.title)}</h2>\n{paragraphs}\n<ul>{notes}</ul>\n{image}\n"


def write_comparison(
    folder: Path,
    comparison: Comparison,
    results: Sequence[RunResult],
    appendix: Appendix | None = None,
    title: str | None = None,
) -> list[Path]:
    """Writes comparison.md, .csv and .json, the charts and comparison.html into a folder.

    Args:
        folder: is made if need be; files of these names in it are replaced.
        comparison: of the results.
        results: the runs.
        appendix: for the end of comparison.md and of the page.
        title: name of the study or of the folder that the runs are from.

    Returns:
        The paths of the files, the page last.

    Raises:
        RunError: the folder cannot be written.
    """
    with _told(folder):
        folder.mkdir(parents=True, exist_ok=True)  # before the work: it may not be allowed
    tables = write_tables(comparison)
    pictures = draw_comparison(comparison, results)
    links = "\n".join(f"![{name.partition('.')[0].replace('_', ' ')}]({name})\n" for name in pictures)
    contents: dict[str, bytes] = {FILES[form]: tables[form].encode() for form in FILES}
    about = "\n".join(f"- {escaped(line)}" for line in summary(comparison, results))
    head = f"# {escaped(heading(comparison, title))}\n\n{about}"
    contents[FILES["markdown"]] = f"{head}\n\n{tables['markdown']}\n{links}".encode()
    contents |= pictures
    if appendix is not None:
        contents[FILES["markdown"]] += f"\n{appendix.markdown()}".encode()
        contents[appendix.picture] = appendix.content
    contents[PAGE] = comparison_page(comparison, results, appendix, title).encode()
    with _told(folder):
        for name, content in contents.items():
            beside = folder / f".{name}.{os.getpid()}.new"  # another comparison may write here too
            beside.write_bytes(content)
            os.replace(beside, folder / name)  # who looks at it meanwhile, or after a kill, finds it whole
    return [folder / name for name in contents]


@contextmanager
def _told(folder: Path) -> Iterator[None]:
    """Says of a folder, in one sentence, that it cannot be written."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{folder}: cannot be written ({error}); make room, or choose another --output") from error


def comparison_page(
    comparison: Comparison, results: Sequence[RunResult], appendix: Appendix | None = None, title: str | None = None
) -> str:
    """The comparison as an HTML page."""
    from plotly.io import to_html

    config = {"displaylogo": False, "responsive": True, "modeBarButtons": [BUTTONS]}
    differences = to_html(
        differences_figure(comparison), config, full_html=False, include_plotlyjs=True, div_id="differences"
    )
    curves = to_html(
        curves_figure(comparison, results), config, full_html=False, include_plotlyjs=False, div_id="curves"
    )
    marks = marked(comparison)[1]
    notes = "\n".join(f"<li>{escape(note)}</li>" for note in [*how_to_read(comparison), *marks, *comparison.remarks])
    about = "\n".join(f"<li>{escape(line)}</li>" for line in summary(comparison, results))
    heads, cells = shown_table(comparison)
    rows = [(row.verdict, line) for row, line in zip(comparison.rows, cells, strict=True)]
    runs = [("", run_cells(run)) for run in comparison.runs]
    name = escape(heading(comparison, title))
    unit = UNITS[comparison.measure]
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width">
<title>{name}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{name}</h1>
<ul class="summary">
{about}
</ul>
<p>Differences to {escape(comparison.baseline)} in {unit}; negative is better.</p>
<div class="wide">{_table(heads, rows, "comparison")}</div>
<ul>
{notes}
</ul>
<h2>Differences</h2>
{differences}
<h2>Curves</h2>
<p>A click on a run in the legend hides or shows it, a double click shows it alone. Drag over a chart to zoom in,
double-click on it to see everything. The axis is switched above the charts.</p>
{curves}
<h2>Runs</h2>
<div class="wide">{_table(run_titles(), runs, "runs")}</div>
{appendix.html() if appendix is not None else ""}
</body>
</html>
"""


def _table(heads: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]], name: str) -> str:
    """A table of rows with their verdict; numbers stand at the right."""
    head = "".join(f"<th>{escape(title)}</th>" for title in heads)
    lines = []
    for verdict, row in rows:
        kinds = ["number" if cell[:1] in "+-0123456789<" and cell else "" for cell in row]
        kinds = ["verdict" if title == "Verdict" else kind for title, kind in zip(heads, kinds, strict=True)]
        kinds = ["changes" if title == "Changes" else kind for title, kind in zip(heads, kinds, strict=True)]
        kinds[0] = ""
        line = "".join(f'<td class="{kind}">{escape(cell)}</td>' for kind, cell in zip(kinds, row, strict=True))
        lines.append(f'<tr class="{escape(verdict)}">{line}</tr>')
    return f'<table id="{name}"><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table>'
