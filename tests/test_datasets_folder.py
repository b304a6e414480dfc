"""A folder of datasets that is not there: misspelt, or to be filled."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY

from training.config import Data
from training.datasets_folder import known_datasets, missing_dataset, unused_tokenizer
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


def test_a_misspelt_dataset_is_not_there_either(tmp_path: Path) -> None:
    (tmp_path / "my-texts").mkdir()
    for name, meant in (("python-libary", "python-library"), ("my_texts", "my-texts")):
        assert missing_dataset(name, tmp_path) == [f"dataset: {tmp_path / name} is not there; did you mean {meant}?"]


@pytest.mark.parametrize(
    ("own", "named", "told"),
    [("{}", "{1}", True), ("{}", None, True), ("{}", "{}", False), (None, "{1}", False)],
    ids=["another", "not downloaded", "the same", "none of its own"],
)
def test_a_tokenizer_that_is_not_used_is_told(tmp_path: Path, own: str | None, named: str | None, told: bool) -> None:
    """The dataset's own comes first; that is no news where data.tokenizer names the same."""
    (tmp_path / "data").mkdir()
    downloaded = tmp_path / ".tokenizers" / "owner" / "name" / "tokenizer.json"
    downloaded.parent.mkdir(parents=True)
    for path, text in ((tmp_path / "data" / "tokenizer.json", own), (downloaded, named)):
        if text is not None:
            path.write_text(text)
    lines = unused_tokenizer(Data(dataset="data", tokenizer="owner/name"), tmp_path)
    its_own = f"{tmp_path}/data/tokenizer.json"
    line = f"data.tokenizer owner/name: is not used, as the dataset has a tokenizer of its own, {its_own}"
    assert lines == ([line] if told else [])
    assert unused_tokenizer(Data(dataset="data"), tmp_path) == []


def test_commands_ask_before_they_make_anything(tmp_path: Path) -> None:
    (tmp_path / "datasets").mkdir()
    command = [sys.executable, "-m", "training.cli", "evaluate", "tiny", str(tmp_path / "dataset")]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(
        f"error: {tmp_path}/dataset: there is no such folder; did you mean {tmp_path}/datasets?"
    )
    assert done.stderr.count("\n") == 1
