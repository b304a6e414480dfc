"""Training a study's runs: what is refused first, and how far a run is. test_study_commands.py trains some."""

import io
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from small_study import record_run, write_study

from training.errors import UserError
from training.laboratory.study_plan import Estimate, RunState, read_run_state
from training.laboratory.study_runner import (
    Machine,
    Progress,
    check_machine,
    held,
    last_step,
    open_data,
    recorded_total,
    refresh_result,
    refuse_changed,
    train_missing,
)
from training.lookup import find_run_or_beginning


def test_two_studies_cannot_have_one_folder(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "mine"
    with held(folder), pytest.raises(UserError, match="another process runs this study"), held(folder):
        pass
    with held(folder):
        pass


def test_a_studys_folder_is_not_that_of_a_beginning_run(tmp_path: Path) -> None:
    """Which report --watch would wait for."""
    with held(tmp_path / "mine"), pytest.raises(UserError, match="'mine': there is no such run"):
        find_run_or_beginning("mine", tmp_path)


def test_a_result_that_cannot_be_drawn_is_no_reason_to_stop_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever matplotlib, plotly or the fit may raise."""

    def fails(*_: object) -> str:
        raise ZeroDivisionError("no axis")

    monkeypatch.setattr("training.laboratory.study_runner.write_result", fails)
    refresh_result(write_study(tmp_path), tmp_path, {}, Progress())
    assert "the result could not be written: no axis" in capsys.readouterr().err


def test_a_file_of_the_study_that_cannot_be_written_fails_its_run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first run's config and the second's log are folders, and so is the record of what runs took."""
    study = write_study(tmp_path)
    study = replace(study, runs=study.runs[:3])
    first, second, third = (run.name for run in study.runs)
    for folder in (f"configs/{first}.yaml", f"logs/{second}.log", "launches.jsonl"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.setattr("training.laboratory.study_runner.training_command", lambda *_: ["true"])
    record_run(tmp_path, study.runs[2], 5.0)
    states = {run.name: RunState(0, 20, finished=False) for run in study.runs}
    estimate = Estimate({run.name: run for run in study.runs}, (), 1e6)
    assert train_missing(study, states, estimate, Machine(tmp_path, tmp_path, 1, None)) == [first, second]
    assert states[third].finished
    said = re.sub(r" after \d+ s: ", ": ", capsys.readouterr().err)
    assert f"run 1 of 3, {first}: failed: [Errno 21] Is a directory: '{tmp_path}/configs/{first}.yaml'" in said
    assert f"run 2 of 3, {second}: failed: [Errno 21] Is a directory: '{tmp_path}/logs/{second}.log'" in said
    assert "what the run took could not be recorded: [Errno 21] Is a directory" in said


def test_a_run_that_was_killed_is_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its last line is no fault."""
    study = write_study(tmp_path)
    study = replace(study, runs=study.runs[:1])
    end = ["sh", "-c", "echo step 20: validation loss 8.5 >&2; kill -9 $$"]
    monkeypatch.setattr("training.laboratory.study_runner.training_command", lambda *_: end)
    states = {run.name: RunState(0, 20, finished=False) for run in study.runs}
    estimate = Estimate({run.name: run for run in study.runs}, (), 1e6)
    assert train_missing(study, states, estimate, Machine(tmp_path, tmp_path, 1, None)) == [study.runs[0].name]
    assert re.search(r": failed after \d+ s: it was ended by signal 9 \(Killed\)\n", capsys.readouterr().err)


def test_a_runs_folder_is_no_studys(tmp_path: Path) -> None:
    study = write_study(tmp_path)
    folder = record_run(tmp_path, study.runs[0], 5.0)
    with pytest.raises(UserError, match="is the folder of a run"), held(folder):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"), held(tmp_path / "file" / "mine"):
        pass


def test_a_machine_that_no_run_could_be_trained_on_is_refused(tmp_path: Path) -> None:
    study = write_study(tmp_path)
    check_machine(study, processes=3, microbatch=1, gpus=0)
    with pytest.raises(UserError, match="--nproc 3: this machine has 2 GPUs, and each process needs one"):
        check_machine(study, processes=3, microbatch=None, gpus=2)
    half = write_study(tmp_path, base=(tmp_path / "base.yaml").read_text().replace("amp: off", "amp: fp16"))
    with pytest.raises(UserError, match=r"mine.yaml: baseline-w1-t1: precision.amp: fp16 needs a GPU"):
        check_machine(half, processes=1, microbatch=None, gpus=0)
    check_machine(half, processes=1, microbatch=None, gpus=1)
    bitwise = write_study(tmp_path, base=(tmp_path / "base.yaml").read_text() + "reproducibility: bitwise\n")
    with pytest.raises(UserError, match="--microbatch 2"):
        check_machine(bitwise, processes=1, microbatch=2, gpus=0)


def test_data_that_do_not_hold_a_run_are_refused_before_any(tmp_path: Path) -> None:
    study = write_study(tmp_path)
    with pytest.raises(UserError, match="there is no such dataset"):
        open_data(study, tmp_path / "datasets")


def test_runs_of_another_config_are_named(tmp_path: Path) -> None:
    """Those with the same change together, and in what they differ."""
    study = write_study(tmp_path)
    for run in study.runs[:2]:
        record_run(tmp_path, run, 5.0, optimizer={"learning_rate": 1e-3})
    states = {run.name: read_run_state(tmp_path / run.name, run.config) for run in study.runs}
    which = r"baseline-w1-t1, no-dropout-w1-t1 \(optimizer.learning_rate 0.001 -> 0.0004\); undo the change"
    with pytest.raises(UserError, match=rf"mine.yaml is no longer what these runs were trained with: {which}"):
        refuse_changed(study, tmp_path, states)
    same = {name: replace(state, changed=()) for name, state in states.items()}
    refuse_changed(study, tmp_path, same)


def test_the_steps_of_a_run_are_those_that_it_recorded(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert recorded_total(path) is None
    for text, total in (("", None), ('{"event": "start"', None), ('{"total_steps": 34}\n{}\n', 34), ("[]\n", None)):
        path.write_text(text)
        assert recorded_total(path) == total


def test_the_last_step_is_read_from_the_end(tmp_path: Path) -> None:
    """Whatever is long before it, and a line in writing not yet."""
    path = tmp_path / "metrics.jsonl"
    assert last_step(path) == 0
    path.write_text("")
    assert last_step(path) == 0
    lines = [json.dumps({"kind": "train", "step": step, "text": "x" * 500}) for step in range(1, 101)]
    path.write_text("\n".join(lines) + "\n" + '{"kind": "train", "step": 101')
    assert last_step(path) == 100
    path.write_text("y" * 20_000)
    assert last_step(path) == 0


def test_progress_in_a_file_and_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a file a line now and then; on a terminal one that changes in place, no longer than a row."""
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    clock = iter(range(0, 1000, 25))
    monkeypatch.setattr("training.laboratory.study_runner.time.monotonic", lambda: next(clock))
    progress = Progress()
    for number in range(5):
        progress.show(f"step {number}")
    progress.say("done")
    assert shown.getvalue().splitlines() == ["step 2", "done"]

    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    progress = Progress()
    progress.show("step 1")
    progress.show("step 2 " + "x" * 1000)
    progress.say("done")
    changing, stays = terminal.getvalue().split("done\n")
    assert "\n" not in changing
    assert "\rstep 1" in changing
    assert max(map(len, changing.split("\r"))) == 100
    assert "step" not in stays
