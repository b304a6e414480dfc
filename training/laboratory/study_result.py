"""The result of a study so far: the comparison of its finished runs, and for batch sizes the best one."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from training.laboratory.batch_size import draw_fit, fit_batch_sizes, fit_sentences
from training.laboratory.comparability import equally_long
from training.laboratory.comparison import Run, compare_results
from training.laboratory.comparison_page import Appendix, write_comparison
from training.laboratory.comparison_table import write_tables
from training.laboratory.results import read_result
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
    best = best_batch_size(study.name, comparison.runs) if study.batch_sizes else None
    written = write_comparison(folder, comparison, results, best, study.name)
    text = [write_tables(comparison)["terminal"].rstrip(), ""]
    if best is not None:
        text += [*best.paragraphs, *(f"- {note}" for note in best.notes), ""]
    return "\n".join([*text, f"Result: {written[-1]}, with {', '.join(path.name for path in written[:-1])}"])


def best_batch_size(name: str, runs: Sequence[Run]) -> Appendix | None:
    """The curve through the batch sizes of a study of that name; None where too few of its runs have a result."""
    points, left_out = [], []
    compared = [run.result for run in runs if run.obstacle is None]
    shortest = min(compared, key=lambda result: result.train_tokens, default=None)
    for run in runs:
        compares = run.obstacle is None and shortest is not None and equally_long(run.result, shortest)
        if compares and run.value is not None and math.isfinite(run.value):
            points.append((run.result.config.global_batch, run.value))
        else:
            left_out.append(run.result.name)
    fit = fit_batch_sizes(points)
    if fit is None:
        return None
    why = "having no finite loss that compares, or another token count"
    notes = [f"Left out of the curve, {why}: {', '.join(left_out)}."] if left_out else []
    picture = draw_fit(fit, f"{name}: validation loss over batch size")
    return Appendix("The best batch size", fit_sentences(fit), [*notes, *fit.remarks], "batch_size.png", picture)
