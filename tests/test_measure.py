"""Measuring what has no validation loss."""

import json
from pathlib import Path

import pytest
from conftest import Workplace
from recorded_runs import event, train_row, validation_row, write_run
from small_checkpoints import save
from small_results import CONFIG, write_import, write_result

from training.checkpoint_evaluation import evaluate_checkpoint
from training.config_file import load_run_config
from training.data import open_validation
from training.digests import validation_digest
from training.errors import UserError
from training.laboratory.measure import measure_missing
from training.laboratory.results import read_result


@pytest.mark.slow
def test_run_trained_without_evaluation_is_measured_once(workplace: Workplace) -> None:
    config = workplace.write_config("blind", data={"train_tokens": 1024}, evaluation={"every": None})
    blind = workplace.train_here(config).folder
    result = read_result(blind)
    assert (result.loss, result.digests.validation) == (None, None)
    with (blind / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "event", "step": 2, "ev')  # a crash
    assert measure_missing([result], workplace.datasets)
    measured = read_result(blind)
    expected = evaluate_checkpoint(blind / "latest", load_run_config(str(config)), workplace.datasets).evaluated
    assert measured.loss == pytest.approx(expected.loss, rel=1e-12)
    assert (measured.target_tokens, measured.finished) == (640, True)
    rows = open_validation(load_run_config(str(config)), workplace.datasets / "data")
    assert measured.digests.validation == validation_digest(rows)
    lines = (blind / "metrics.jsonl").read_text().splitlines()
    row = json.loads(lines[-1])
    assert (row["kind"], row["step"]) == ("validation", 2)
    assert not measure_missing([measured], workplace.datasets)
    assert measure_missing([result], workplace.datasets), "as a second command that had read the run before"
    assert (blind / "metrics.jsonl").read_text().splitlines() == lines


def test_nothing_is_measured_that_goes_on_or_has_a_loss(tmp_path: Path) -> None:
    results = [
        read_result(write_result(tmp_path / "a", 4.0)),
        read_result(write_result(tmp_path / "b", None)),
        read_result(write_import(tmp_path / "c", 3.5)),
    ]
    assert not measure_missing(results, tmp_path)


def test_import_without_its_checkpoint_is_refused(tmp_path: Path) -> None:
    result = read_result(write_import(tmp_path / "gpt2", None))
    with pytest.raises(UserError, match="gpt2"):
        measure_missing([result], tmp_path)


def blind_run(folder: Path) -> Path:
    """Of two steps, finished without a validation."""
    return write_run(folder, [train_row(1), train_row(2), event(2, "finished")], CONFIG)


def test_loss_of_an_older_checkpoint_is_not_that_of_the_last_step(tmp_path: Path) -> None:
    """Which is damaged, or not there."""
    blind = blind_run(tmp_path / "blind")
    before = (blind / "metrics.jsonl").read_bytes()
    save(blind, 1)
    with pytest.raises(UserError, match="there is no checkpoint 'step_00000002'"):
        measure_missing([read_result(blind)], tmp_path)
    model = save(blind, 2) / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-10])
    with pytest.raises(UserError, match=r"step_00000002: model\.safetensors has "):
        measure_missing([read_result(blind)], tmp_path)
    assert (blind / "metrics.jsonl").read_bytes() == before


def test_what_another_process_has_measured_meanwhile_is_taken(tmp_path: Path) -> None:
    blind = blind_run(tmp_path / "blind")
    result = read_result(blind)
    with (blind / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(validation_row(2, 4.0)) + "\n")
    before = (blind / "metrics.jsonl").read_bytes()
    assert measure_missing([result], tmp_path)
    assert (blind / "metrics.jsonl").read_bytes() == before
    assert read_result(blind).loss == 4.0
