"""A comparison as files: tables, charts, and one HTML page that needs nothing else."""

from collections.abc import Sequence
from pathlib import Path

from training.laboratory.comparison import Comparison
from training.laboratory.comparison_table import write_tables
from training.laboratory.results import RunResult

FILES = {"markdown": "comparison.md", "csv": "comparison.csv", "json": "comparison.json"}


def write_comparison(folder: Path, comparison: Comparison, results: Sequence[RunResult]) -> list[Path]:
    """Writes comparison.md, .csv and .json, the charts and comparison.html into a folder; returns their paths.

    Raises:
        UserError: a run's metrics.jsonl cannot be read.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tables = write_tables(comparison)
    written = []
    for form, text in tables.items():
        if form in FILES:
            path = folder / FILES[form]
            path.write_text(text, encoding="utf-8")
            written.append(path)
    return written
