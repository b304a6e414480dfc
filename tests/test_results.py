"""What a run came to, as its folder says."""

import math
from pathlib import Path

import pytest
from recorded_runs import begin, event, train_row, validation_row, write_run
from small_results import CONFIG, write_import, write_result

from training.errors import UserError
from training.laboratory.results import Digests, read_result, read_results


def test_result_of_a_finished_run(tmp_path: Path) -> None:
    folder = write_result(tmp_path / "run", 4.2, (22, 23), bits_per_byte=1.27, speed=2.0)
    result = read_result(folder)
    assert (result.name, result.group, result.folder) == ("run", "run", folder)
    assert (result.loss, result.bits_per_byte, result.target_tokens) == (4.2, 1.27, 4096)
    assert result.seeds == (22, 23)
    assert (result.train_tokens, result.tokens_per_step, result.seconds) == (20480, 1024, 5.0)
    assert result.tokens_per_second == 4096.0
    assert (result.step, result.total_steps, result.finished, result.imported) == (20, 20, True, False)
    assert result.digests == Digests("aa" * 32, "bb" * 32, "cc" * 32, "dd" * 32)


def test_group_can_be_given(tmp_path: Path) -> None:
    assert read_result(write_result(tmp_path / "run", 4.2), "no-dropout").group == "no-dropout"


@pytest.mark.parametrize("end", [None, "stopped", "interrupted"])
def test_run_that_has_not_finished_says_so(tmp_path: Path, end: str | None) -> None:
    result = read_result(write_result(tmp_path / "run", 4.2, steps=10, end=end))
    assert not result.finished
    assert (result.step, result.total_steps, result.train_tokens) == (10, 20, 10240)


def test_finished_run_that_goes_on_again_is_not_finished(tmp_path: Path) -> None:
    rows = [begin(0, "start", 1), train_row(1), event(1, "finished"), begin(1, "resume", 1), train_row(2)]
    assert not read_result(write_run(tmp_path / "run", rows, CONFIG)).finished


def test_what_a_resumption_says_again_counts(tmp_path: Path) -> None:
    rows = [
        event(0, "start", weights_sha256="first", validation_sha256="old", total_steps=20),
        event(5, "resume", weights_sha256=None, validation_sha256="new", total_steps=30),
        train_row(6),
    ]
    result = read_result(write_run(tmp_path / "run", rows, CONFIG))
    assert (result.digests.weights, result.digests.validation) == ("first", "new")
    assert result.total_steps == 30


def test_run_of_before_the_digests(tmp_path: Path) -> None:
    result = read_result(write_result(tmp_path / "run", 4.2, begin={"tokenizer_sha256": None}))
    assert result.digests == Digests()


def test_loss_that_is_not_finite_is_no_missing_one(tmp_path: Path) -> None:
    diverged = read_result(write_result(tmp_path / "run", None))
    assert diverged.loss is not None
    assert math.isnan(diverged.loss)
    assert diverged.bits_per_byte is not None
    assert math.isnan(diverged.bits_per_byte)
    assert read_result(write_result(tmp_path / "without-bytes", 4.2)).bits_per_byte is None
    unmeasured = read_result(write_run(tmp_path / "other", [train_row(1), event(1, "finished")], CONFIG))
    assert unmeasured.loss is None
    assert (unmeasured.bits_per_byte, unmeasured.target_tokens) == (None, None)


def test_imported_model(tmp_path: Path) -> None:
    result = read_result(write_import(tmp_path / "gpt2", 3.499677))
    assert (result.imported, result.finished, result.loss) == (True, False, 3.499677)
    assert (result.train_tokens, result.tokens_per_second) == (0, None)


def test_runs_that_differ_in_seeds_alone_are_one_group(tmp_path: Path) -> None:
    folders = [
        write_result(tmp_path / "first", 4.2, (1, 1), interventions=["old-name"]),
        write_result(tmp_path / "other", 4.1, (1, 1), optimizer={"clip_norm": 0.5}),
        write_result(tmp_path / "second", 4.3, (2, 1), checkpoint={"keep": 9}, evaluation={"every": 7}),
    ]
    results = read_results(folders)
    assert [result.group for result in results] == ["first", "other", "first"]
    assert [result.name for result in results] == ["first", "other", "second"]


def test_names_can_be_shown(tmp_path: Path) -> None:
    """On one line, without what a terminal would obey, also where the folder's folder is named with it."""
    odd = "a\n\x1b[31m\u202e"
    folders = [write_result(tmp_path / "first" / odd, 4.2), write_result(tmp_path / odd / odd, 4.1, (1, 1))]
    shown = r"a\n\x1b[31m\u202e"
    assert read_result(folders[0]).name == shown
    assert [result.name for result in read_results(folders)] == [f"first/{shown}", f"{shown}/{shown}"]


def test_key_that_is_left_out_is_its_default(tmp_path: Path) -> None:
    folders = [
        write_result(tmp_path / "first", 4.2),
        write_result(tmp_path / "second", 4.3, (1, 1), loss={"reduction": "token"}),
    ]
    assert {result.group for result in read_results(folders)} == {"first"}


@pytest.mark.parametrize("missing", ["config.yaml", "metrics.jsonl"])
def test_missing_file_is_named(tmp_path: Path, missing: str) -> None:
    folder = write_result(tmp_path / "run", 4.2)
    (folder / missing).unlink()
    with pytest.raises(UserError, match=f"{missing}: there is no such file"):
        read_result(folder)


def test_config_of_another_tool_is_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [train_row(1)], {"optimizer": {"lr": 1}})
    with pytest.raises(UserError, match=r"config\.yaml.*problems"):
        read_result(folder)


def test_the_validation_of_the_last_step_counts_and_no_other(tmp_path: Path) -> None:
    """One on the way is the last of a run that was resumed without evaluation."""
    rows = [train_row(1), validation_row(1, 5.0), train_row(2)]
    end = event(2, "finished")
    assert read_result(write_run(tmp_path / "run", [*rows, validation_row(2, 4.0), end], CONFIG)).loss == 4.0
    result = read_result(write_run(tmp_path / "blind", [*rows, end], CONFIG))
    assert (result.loss, result.bits_per_byte, result.target_tokens) == (None, None, None)
