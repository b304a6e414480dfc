"""The result of a study so far: the comparison of its finished runs, and for batch sizes the best one."""

import os
from collections.abc import Mapping
from pathlib import Path

from training.laboratory.batch_size import draw_fit, fit_batch_sizes, fit_lines
from training.laboratory.comparison import compare_results
from training.laboratory.comparison_page import write_comparison
from training.laboratory.comparison_table import write_tables
from training.laboratory.results import RunResult, read_result
from training.laboratory.study_file import Study
from training.laboratory.study_plan import RunState


def write_result(study: Study, folder: Path, states: Mapping[str, RunState]) -> str:
    """Writes the comparison of a study's finished runs into its folder.

    Returns:
        The same for a terminal; a sentence as long as there is no baseline to compare with.
    """
    results = [read_result(folder / run.name, run.group) for run in study.runs if states[run.name].finished]
    if not any(result.group == study.baseline for result in results):
        return f"{folder}: no run of {study.baseline} is finished, so there is nothing to compare with yet"
    comparison = compare_results(results, study.baseline)
    written = write_comparison(folder, comparison, results)
    text = [write_tables(comparison)["terminal"].rstrip(), ""]
    if study.batch_sizes:
        text += _write_batch_sizes(study, folder, results)
    return "\n".join([*text, f"Result: {', '.join(str(path) for path in written)}"])


def _write_batch_sizes(study: Study, folder: Path, results: list[RunResult]) -> list[str]:
    """Writes batch_size.md and batch_size.png, where a curve can be fitted; returns what they say."""
    points = [(result.config.global_batch, result.loss) for result in results if result.loss is not None]
    fit = fit_batch_sizes(points)
    if fit is None:
        return ["Fewer than three sizes are finished, through which no curve can be fitted.", ""]
    lines = fit_lines(fit)
    picture = "![Validation loss over batch size, with the fitted curve](batch_size.png)"
    page = "\n".join([f"# {study.name}: the best batch size", "", *lines, "", picture, ""])
    for name, content in (("batch_size.md", page.encode()), ("batch_size.png", draw_fit(fit, study.name))):
        partial = folder / f".{name}.partial"
        partial.write_bytes(content)
        os.replace(partial, folder / name)
    return [*lines, ""]
