"""A folder of datasets that is not there: misspelt, or to be filled."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY

from training.datasets_folder import known_datasets, missing_dataset
from training.errors import UserError


def test_a_misspelt_folder_is_refused_and_another_one_will_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "datasets").mkdir()
    monkeypatch.chdir(tmp_path)
    for folder in (Path("datasets"), Path("datasets/"), Path("data/sets"), Path("elsewhere"), None):
        assert known_datasets(folder) == folder
    for folder, meant in ((Path("dataset"), "datasets"), (tmp_path / "datsets", f"{tmp_path}/datasets")):
        with pytest.raises(UserError) as caught:
            known_datasets(folder)
        assert str(caught.value) == (
            f"{folder}: there is no such folder; did you mean {meant}? Else make the folder first"
        )
    assert [path.name for path in tmp_path.iterdir()] == ["datasets"]


def test_the_plan_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    assert missing_dataset("there", tmp_path) == []
    for name, what in (
        ("python-library", "it will be prepared into it"),
        ("owner/name", "it will be downloaded into it"),
        ("mine", "make it before training (isobatch prepare)"),
    ):
        assert missing_dataset(name, tmp_path) == [f"dataset: {tmp_path / name} is not there; {what}"]


def test_commands_ask_before_they_make_anything(tmp_path: Path) -> None:
    (tmp_path / "datasets").mkdir()
    command = [sys.executable, "-m", "training.cli", "evaluate", "tiny", str(tmp_path / "dataset")]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(
        f"error: {tmp_path}/dataset: there is no such folder; did you mean {tmp_path}/datasets?"
    )
    assert done.stderr.count("\n") == 1
