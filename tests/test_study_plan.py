"""The plan of a study: what its runs' folders say, and how long the rest takes."""

import json
from pathlib import Path
from typing import Any

import pytest
from recorded_runs import event
from small_study import SIZES, record_run, write_study

from training.errors import UserError
from training.laboratory.study_file import Study, load_study
from training.laboratory.study_plan import (
    START_UP,
    Estimate,
    Launch,
    RunState,
    estimate_from,
    in_words,
    operations,
    plan_lines,
    read_launches,
    read_run_state,
    record_launch,
    speed_of_products,
)


def states_of(study: Study, folder: Path) -> dict[str, RunState]:
    return {run.name: read_run_state(folder / run.name, run.config) for run in study.runs}


def estimate(study: Study, *launches: Launch, guess: float = 1e6) -> Estimate:
    return Estimate({run.name: run for run in study.runs}, launches, guess)


def test_what_a_folder_says(tmp_path: Path) -> None:
    """Done, at the step of the newest checkpoint, or missing; also where a run was killed before it had one."""
    study = write_study(tmp_path)
    first, second, third, fourth, *_ = study.runs
    record_run(tmp_path, first, 5.0)
    record_run(tmp_path, second, 5.0, steps=10)
    record_run(tmp_path, third, 5.0, steps=3)
    states = states_of(study, tmp_path)
    assert states[first.name] == RunState(20, 20, finished=True)
    assert states[second.name] == RunState(10, 20, finished=False)
    assert states[third.name] == RunState(0, 20, finished=False)
    assert states[fourth.name] == RunState(0, 20, finished=False)
    assert [states[run.name].share_left for run in study.runs[:4]] == [0, 0.5, 1, 1]
    assert [states[run.name].words for run in study.runs[:3]] == ["done", "at step 10 of 20", "missing"]


def test_the_last_step_without_an_ending_is_not_done(tmp_path: Path) -> None:
    """Killed between its last checkpoint and its validation: there is something left to do, if no step."""
    study = write_study(tmp_path)
    folder = record_run(tmp_path, study.runs[0], 5.0)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:-1]))
    state = read_run_state(folder, study.runs[0].config)
    assert (state.finished, state.step, state.share_left) == (False, 20, 0)


def test_an_ending_of_a_shorter_run_is_not_this_ones(tmp_path: Path) -> None:
    study = write_study(tmp_path)
    folder = record_run(tmp_path, study.runs[0], 5.0, steps=10)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(event(10, "finished")) + "\n")
    assert not read_run_state(folder, study.runs[0].config).finished


def test_a_run_of_another_config_is_to_be_trained_again(tmp_path: Path) -> None:
    """Whatever changes the result, also what a resumption would take; not what is only looked at or kept."""
    study = write_study(tmp_path)
    first, second, third, *_ = study.runs
    record_run(tmp_path, first, 5.0, optimizer={"learning_rate": 1e-3})
    record_run(tmp_path, second, 5.0, steps=10, model={"n_layers": 2})
    record_run(tmp_path, third, 5.0, checkpoint={"keep": 7}, evaluation={"every": 3, "tokens": 320})
    states = states_of(study, tmp_path)
    assert states[first.name].changed == ("optimizer.learning_rate 0.001 -> 0.0004",)
    assert states[second.name].changed == ("model.n_layers 2 -> 3",)
    assert not states[first.name].finished
    assert (states[second.name].step, states[second.name].share_left) == (0, 1)
    assert states[second.name].words == "again, as it was trained with model.n_layers 2 -> 3"
    assert states[third.name].finished


def test_another_split_of_the_same_batch_is_the_same_run(tmp_path: Path) -> None:
    study = write_study(tmp_path)
    record_run(tmp_path, study.runs[0], 5.0, batch={"world_size": 1, "accumulation": 4})
    assert read_run_state(tmp_path / study.runs[0].name, study.runs[0].config).finished


def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    study = write_study(tmp_path)
    folder = record_run(tmp_path, study.runs[0], 5.0)
    (folder / "metrics.jsonl").write_text("nonsense\n")
    with pytest.raises(UserError, match=r"metrics.jsonl, line 1"):
        read_run_state(folder, study.runs[0].config)


def test_what_runs_took_is_remembered(tmp_path: Path) -> None:
    """Also when the last line was cut off."""
    assert read_launches(tmp_path) == []
    launches = [Launch("a", 1.0, 50.5, 2), Launch("b", 0.25, 12.0, 1)]
    for launch in launches:
        record_launch(tmp_path, launch)
    with (tmp_path / "launches.jsonl").open("a") as file:
        file.write('{"run": "c", "sha')
    assert read_launches(tmp_path) == launches
    record_launch(tmp_path, launches[0])
    assert read_launches(tmp_path) == [*launches, launches[0]]


@pytest.mark.parametrize(
    "changes",
    [{"share": "x"}, {"share": 0}, {"seconds": None}, {"seconds": 0}, {"seconds": -1}, {"run": [1]}, {"more": 1}],
    ids=str,
)
def test_what_is_no_launch_is_left_out(tmp_path: Path, changes: dict[str, Any]) -> None:
    values = {"run": "a", "share": 1.0, "seconds": 2.0, "processes": 1}
    odd = [json.dumps(values | changes).encode(), b"\xff", b"[" * 100_000, b'"', json.dumps(values).encode(), b""]
    (tmp_path / "launches.jsonl").write_bytes(b"\n".join(odd))
    assert read_launches(tmp_path) == [Launch("a", 1.0, 2.0, 1)]


def test_the_time_left_follows_what_was_measured(tmp_path: Path) -> None:
    """First the guess; then all that was measured, by operations; then what the run's own group took."""
    study = write_study(tmp_path, SIZES)
    small, large = study.runs[1], study.runs[4]
    assert (small.group, large.group) == ("batch-4", "batch-16")
    work = operations(small.config)
    assert estimate(study, guess=work / 7).seconds(small, 0.5) == pytest.approx(3.5 + START_UP)
    half = estimate(study, Launch("batch-16-w1-t1", 0.5, 30.0, 1))
    assert half.seconds(small, 1.0) == pytest.approx(60 * work / operations(large.config))
    both = half.with_launch(Launch("batch-4-w1-t1", 1.0, 90.0, 1))
    assert both.seconds(small, 1.0) == pytest.approx(90)
    assert both.seconds(large, 1.0) == pytest.approx(60)
    states = {run.name: RunState(0, 20, finished=True) for run in study.runs}
    states["batch-4-w2-t2"] = RunState(5, 20, finished=False)
    states["batch-16-w2-t2"] = RunState(0, 20, finished=False)
    assert both.total(states) == pytest.approx(0.75 * 90 + 60)


def test_only_launches_with_as_many_processes_count(tmp_path: Path) -> None:
    study = write_study(tmp_path)
    name = study.runs[0].name
    launches = [Launch(name, 1, 10, 1), Launch(name, 1, 40, 8), Launch("of another study", 1, 99, 8)]
    assert estimate_from(study, launches, 8).launches == (Launch(name, 1, 40, 8),)
    guessed = estimate_from(study, launches, 4)
    assert guessed.launches == ()
    assert 1e6 < guessed.guess < 1e15
    assert speed_of_products("cpu", "float32", 64) > 1e6


def test_the_plan_shows_every_run(tmp_path: Path) -> None:
    study = write_study(tmp_path)
    record_run(tmp_path, study.runs[0], 5.0)
    record_run(tmp_path, study.runs[1], 5.0, steps=10)
    states = states_of(study, tmp_path)
    lines = plan_lines(study, states, estimate(study, Launch(study.runs[0].name, 1.0, 60.0, 1)))
    assert lines[0] == "study mine: baseline and 2 others, 6 runs of 10,240 tokens: 1 done, 1 begun, 4 to start"
    assert lines[1] == "  baseline-w1-t1      done"
    assert lines[2] == "  no-dropout-w1-t1    at step 10 of 20, about 30 s"
    assert lines[3].startswith("  weight-tying-w1-t1  missing, about ")
    assert lines[7].startswith("time: about 4 min for 5 runs, by what 1 took on as many processes")
    # 110,688 parameters, and 98,352 tied: 12 bytes each.
    assert lines[8] == (
        "disk: checkpoints of 1 MB; of each run 1 stay, at most 8 MB in all, and one more while a run trains"
    )
    assert lines[9].startswith("seeds: With two seeds only an effect of more than nine standard deviations")
    assert len(lines) == 10


def test_the_plan_says_that_it_guesses_and_when_nothing_is_left(tmp_path: Path) -> None:
    study = write_study(tmp_path)
    guessed = plan_lines(study, states_of(study, tmp_path), estimate(study, guess=1e15))
    assert "a guess, easily wrong by a factor of three" in guessed[-3]
    assert guessed[1].endswith("missing, perhaps 25 s")
    for run in study.runs:
        record_run(tmp_path, run, 5.0)
    assert plan_lines(study, states_of(study, tmp_path), estimate(study))[-3] == "time: nothing left to train"


def test_the_plan_warns_of_few_seeds(tmp_path: Path) -> None:
    """Not of one seed a row, where the baseline has several: a prediction interval says something then."""
    one, three = (
        "[{weights: 1, training: 1}]",
        "[{weights: 1, training: 1}, {weights: 2, training: 2}, {weights: 3, training: 3}]",
    )
    head = "base: base\ninterventions: [no-dropout]\n"
    last = [
        plan_lines(study, states_of(study, tmp_path), estimate(study))[-1]
        for seeds in (f"seeds: {one}\n", f"seeds: {three}\n", f"seeds: {one}\nbaseline_seeds: {three}\n")
        for study in [write_study(tmp_path, head + seeds)]
    ]
    assert last[0] == "seeds: one of each row, so that no claim will be possible; give at least three"
    assert last[1].startswith("disk: ")
    assert last[2].startswith("disk: ")


def test_the_disk_of_the_series() -> None:
    """18 runs of GPT-2 small: 2 GB a checkpoint (oracles), the last and the best of each."""
    study = load_study("forerunner")
    states = {run.name: RunState(0, 33_165, finished=False) for run in study.runs}
    line = plan_lines(study, states, estimate(study))[-1]
    assert line.startswith("disk: checkpoints of 2.0 GB; of each run 1 and the best stay, at most 69.5 GB in all")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "1 s"), (89, "89 s"), (91, "2 min"), (5_000, "83 min"), (12_276, "3.4 h"), (221_000, "2.6 days")],
)
def test_times_for_people(seconds: float, words: str) -> None:
    assert in_words(seconds) == words
