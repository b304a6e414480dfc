"""A study's result: the comparison of what is finished, and the best batch size."""

import json
from dataclasses import replace
from pathlib import Path

from small_study import SIZES, record_run, write_study

from training.laboratory.batch_size import SAME_RATE
from training.laboratory.comparison import Run
from training.laboratory.results import read_result
from training.laboratory.study_file import Study
from training.laboratory.study_plan import RunState, read_run_state
from training.laboratory.study_result import best_batch_size, write_result


def states_of(study: Study, folder: Path) -> dict[str, RunState]:
    return {run.name: read_run_state(folder / run.name, run.config) for run in study.runs}


def test_without_a_baseline_there_is_nothing_to_compare(tmp_path: Path) -> None:
    study = write_study(tmp_path)
    record_run(tmp_path, study.runs[1], 5.0)
    assert "no run of baseline is finished" in write_result(study, tmp_path, states_of(study, tmp_path))
    assert not (tmp_path / "comparison.json").exists()


def test_what_is_finished_is_compared_by_group(tmp_path: Path) -> None:
    """Groups are the interventions, whatever seeds; a run on its way is left out."""
    study = write_study(tmp_path)
    for run, loss in zip(study.runs, (5.0, 4.8, 5.3, 5.02, 4.81), strict=False):
        record_run(tmp_path, run, loss)
    record_run(tmp_path, study.runs[5], 0.0, steps=10)
    text = write_result(study, tmp_path, states_of(study, tmp_path))
    rows = json.loads((tmp_path / "comparison.json").read_text())["rows"]
    assert [(row["group"], row["runs"]) for row in rows] == [("no-dropout", 2), ("baseline", 2), ("weight-tying", 1)]
    assert "no-dropout" in text
    assert f"Result: {tmp_path / 'comparison.html'}, with comparison.md" in text
    assert not (tmp_path / "batch_size.png").exists()


def test_a_run_without_a_result_is_left_out_of_the_curve_and_named(tmp_path: Path) -> None:
    """One that diverged, and one that does not compare; a curve through them would be none."""
    study = write_study(tmp_path, SIZES)
    for number, run in enumerate(study.runs):
        record_run(tmp_path, run, None if number == 3 else 5.0 + abs(run.config.global_batch - 9) / 50)
    runs = [Run(result := read_result(tmp_path / run.name, run.group), result.loss, None) for run in study.runs]
    runs[4] = replace(runs[4], obstacle="other validation data")
    best = best_batch_size(study.name, runs)
    assert best is not None
    assert best.paragraphs[0].startswith("Fitted through 6 runs: loss = 0.")
    names = f"{study.runs[3].name}, {study.runs[4].name}"
    why = "having no finite loss that compares, or another token count"
    assert best.notes[0] == f"Left out of the curve, {why}: {names}."
    assert not any("nan" in text for text in (*best.paragraphs, *best.notes))


def test_batch_sizes_get_their_curve(tmp_path: Path) -> None:
    """From three finished sizes on."""
    study = write_study(tmp_path, SIZES)
    losses = {"batch-4": 5.2, "batch-8": 5.05, "batch-16": 5.0, "batch-32": 5.1}
    for number, run in enumerate(study.runs):
        record_run(tmp_path, run, losses[run.group] + 0.01 * (number % 3))
        if number < 2:
            result = read_result(tmp_path / run.name)
            assert best_batch_size(study.name, [Run(result, result.loss, None)]) is None
    text = write_result(study, tmp_path, states_of(study, tmp_path))
    assert "Fitted through 8 runs: loss = " in text
    assert f"- {SAME_RATE}" in text
    page = (tmp_path / "comparison.md").read_text()
    assert "\n## The best batch size\n\nFitted through 8 runs: loss = " in page
    assert "](batch_size.png)" in page
    assert (tmp_path / "batch_size.png").read_bytes().startswith(b"\x89PNG")
    assert '<img alt="The best batch size" src="data:image/png;base64,' in (tmp_path / "comparison.html").read_text()
