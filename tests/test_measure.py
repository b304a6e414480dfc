"""Measuring what has no validation loss."""

import json
from pathlib import Path

import pytest
from conftest import Workplace
from small_results import write_import, write_result

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
    assert measure_missing([result], workplace.datasets)
    measured = read_result(blind)
    expected = evaluate_checkpoint(blind / "latest", load_run_config(str(config)), workplace.datasets).evaluated
    assert measured.loss == pytest.approx(expected.loss, rel=1e-12)
    assert (measured.target_tokens, measured.finished) == (640, True)
    rows = open_validation(load_run_config(str(config)), workplace.datasets / "data")
    assert measured.digests.validation == validation_digest(rows)
    row = json.loads((blind / "metrics.jsonl").read_text().splitlines()[-1])
    assert (row["kind"], row["step"]) == ("validation", 2)
    assert not measure_missing([measured], workplace.datasets)


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
