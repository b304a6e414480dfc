"""Where a dataset is made: what is left after each way to end, and what goes on with it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from training.errors import RunError, UserError
from training.lock import held
from training.preparation import staging as module
from training.preparation.staging import Staging, staging
from training.preparation.tokenizing import Block, Counts, Part

COMMAND: dict[str, Any] = {"sources": [["a", 1]], "tokenizer": "x", "settings": {"separator": None}}
UINT16 = np.dtype(np.uint16)


def block(*train: int, validation: Sequence[int] = ()) -> Block:
    """A block of a document for each split, with these tokens."""
    parts = {}
    for split, tokens in (("train", train), ("validation", validation)):
        content = np.array(tokens, dtype=np.uint16).tobytes()
        parts[split] = Part(Counts(len(tokens) and 1, 10, len(tokens)), [content])
    return Block(2, parts, empty=1, dropped=Counts(1, 5, 0))


@pytest.fixture(autouse=True)
def _record_each_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SECONDS_BETWEEN_RECORDS", 0.0)


def interrupt(output: Path, *blocks: Block) -> None:
    """Writes some blocks, and is interrupted in the middle of the next."""

    def until() -> Any:
        yield from blocks
        raise KeyboardInterrupt

    def write() -> None:
        with staging(output, COMMAND) as place:
            place.progress.surveyed = True
            place.write(until(), UINT16)

    with pytest.raises(RunError, match=f"{output}: interrupted; the same command goes on where this one ended"):
        write()


def finish(output: Path, *blocks: Block, command: dict[str, Any] = COMMAND) -> int:
    """Writes the rest and publishes; returns how many documents there were before."""
    with staging(output, command) as place:
        before = place.progress.documents
        place.progress.surveyed = True
        place.write(iter(blocks), UINT16)
    return before


def tokens(output: Path, split: str = "train") -> list[int]:
    found: list[int] = load_file(output / f"{split}.safetensors")["tokens"].tolist()
    return found


def test_the_same_command_goes_on_where_it_was_interrupted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the same files as without the interruption."""
    whole, parts = tmp_path / "whole", tmp_path / "a" / "parts"
    blocks = [block(1, 2, validation=[3]), block(4), block(5, 6, 7, validation=[8])]
    finish(whole, *blocks)
    interrupt(parts, blocks[0])
    assert not parts.exists()
    interrupt(parts, blocks[1])
    capsys.readouterr()
    assert finish(parts, blocks[2]) == 4
    assert capsys.readouterr().err == "going on after 4 documents\n"
    assert (tokens(parts), tokens(parts, "validation")) == ([1, 2, 4, 5, 6, 7], [3, 8])
    for split in ("train", "validation"):
        assert (parts / f"{split}.safetensors").read_bytes() == (whole / f"{split}.safetensors").read_bytes()
    assert [path.name for path in parts.parent.iterdir()] == ["parts"]


def test_what_was_written_but_not_recorded_is_cut_off(tmp_path: Path) -> None:
    interrupt(tmp_path / "set", block(1, 2))
    file = tmp_path / ".set.preparing" / "dataset" / "train.safetensors"
    with file.open("ab") as half:
        half.write(b"\x09\x00\x09")
    finish(tmp_path / "set", block(3))
    assert tokens(tmp_path / "set") == [1, 2, 3]


def test_the_progress_says_all_that_has_been_counted(tmp_path: Path) -> None:
    interrupt(tmp_path / "set", block(1, 2), block(3, validation=[4]))
    record = json.loads((tmp_path / ".set.preparing" / "progress.json").read_text())
    assert record["command"] == COMMAND
    assert record["progress"] == {
        "surveyed": True,
        "documents": 4,
        "empty": 2,
        "splits": {
            "train": {"documents": 2, "bytes": 20, "tokens": 3},
            "validation": {"documents": 1, "bytes": 20, "tokens": 1},
        },
        "dropped": {"documents": 2, "bytes": 10, "tokens": 0},
        "files": {"dataset/train.safetensors": 128 + 6, "dataset/validation.safetensors": 128 + 2},
    }


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"sources": [["a", 2]]}, "sources"),
        ({"tokenizer": "y", "settings": {"separator": "x"}}, "tokenizer and settings"),
    ],
)
def test_another_command_starts_afresh_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], other: dict[str, Any], what: str
) -> None:
    interrupt(tmp_path / "set", block(1, 2, validation=[9]))
    capsys.readouterr()
    assert finish(tmp_path / "set", block(3), command=COMMAND | other) == 0
    assert f".set.preparing: was begun with other {what}; starting afresh\n" in capsys.readouterr().err
    assert (tokens(tmp_path / "set"), tokens(tmp_path / "set", "validation")) == ([3], [])


@pytest.mark.parametrize("damage", ["record", "no record", "file", "short file", "a token short"])
def test_a_damaged_folder_starts_afresh(tmp_path: Path, damage: str) -> None:
    interrupt(tmp_path / "set", block(1, 2))
    folder = tmp_path / ".set.preparing"
    if damage == "record":
        (folder / "progress.json").write_text('{"command": {}, "progress": {"splits": []}}')
    elif damage == "no record":
        (folder / "progress.json").unlink()
    elif damage == "file":
        (folder / "dataset" / "train.safetensors").unlink()
    elif damage == "short file":
        (folder / "dataset" / "train.safetensors").write_bytes(b"12")
    else:
        with (folder / "dataset" / "train.safetensors").open("r+b") as file:
            file.truncate(128 + 2)
    assert finish(tmp_path / "set", block(3)) == 0
    assert tokens(tmp_path / "set") == [3]


def test_a_mistake_of_the_user_s_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="line 7"), staging(tmp_path / "set", COMMAND):
        raise UserError("line 7")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_said_and_gone_on_from(tmp_path: Path) -> None:
    interrupt(tmp_path / "set", block(1))
    sentence = r"set: cannot be written \(\[Errno 28\] No space left on device\); then the same command goes on"
    with pytest.raises(RunError, match=sentence), staging(tmp_path / "set", COMMAND):
        raise OSError(28, "No space left on device")
    assert finish(tmp_path / "set", block(2)) == 2
    assert tokens(tmp_path / "set") == [1, 2]


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".set.preparing").mkdir()
    with (
        held(tmp_path / ".set.preparing" / "lock"),
        pytest.raises(UserError, match="set: another process is preparing it; wait for it or stop it first"),
        staging(tmp_path / "set", COMMAND),
    ):
        pass


def test_what_exists_is_not_overwritten(tmp_path: Path) -> None:
    """But an empty folder is no dataset."""
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "file").write_text("mine")
    with pytest.raises(UserError, match="set: exists already"), staging(tmp_path / "set", COMMAND):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["set"]
    (tmp_path / "set" / "file").unlink()
    finish(tmp_path / "set", block(1))
    assert tokens(tmp_path / "set") == [1]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "datasets").write_text("a file")
    with (
        pytest.raises(UserError, match="datasets: cannot write there"),
        staging(tmp_path / "datasets" / "set", COMMAND),
    ):
        pass


@pytest.mark.parametrize("name", ["ngrams", "dataset/tokenizer.json", "dataset/dataset.json"])
def test_a_survey_that_lost_a_file_s_content_starts_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """An empty file of n-grams would mean that nothing is to be dropped."""
    place = Staging(tmp_path, COMMAND)
    for file in (place.ngrams, place.dataset / "tokenizer.json", place.dataset / "dataset.json"):
        file.write_bytes(b"12345678")
    place.finish_survey()
    assert Staging(tmp_path, COMMAND).progress.surveyed
    (tmp_path / name).write_bytes(b"")
    assert not Staging(tmp_path, COMMAND).progress.surveyed
    assert capsys.readouterr().err.endswith(": lacks files that its progress.json counts; starting afresh\n")


def test_what_is_recorded_or_published_is_on_the_disk_before(tmp_path: Path, synced: list[Path]) -> None:
    """Files and the folders that name them; the progress itself, and the name of the finished dataset."""
    with staging(tmp_path / "set", COMMAND) as place:
        place.ngrams.write_bytes(b"12345678")
        (place.dataset / "tokenizer.json").write_text("{}")
        place.finish_survey()
        names = [".progress.json.new", "dataset", "dataset/tokenizer.json", "ngrams", "."]
        assert {str(path.relative_to(place.folder)) for path in synced} == set(names)
        assert synced.index(place.folder / ".progress.json.new") > synced.index(place.ngrams)
        place.write(iter([block(1)]), UINT16)
        synced.clear()
        (place.dataset / "dataset.json").write_text("{}")
    files = ("dataset.json", "tokenizer.json", "train.safetensors", "validation.safetensors")
    assert set(synced[:-1]) == {place.dataset, *(place.dataset / file for file in files)}
    assert synced[-2:] == [place.dataset, tmp_path]


def test_what_a_command_has_surveyed_stays(tmp_path: Path) -> None:
    """And what it had not surveyed to the end goes."""
    folder = tmp_path / "folder"
    folder.mkdir()
    place = Staging(folder, COMMAND)
    (place.dataset / "tokenizer.json").write_text("half")
    place = Staging(folder, COMMAND)
    assert list(place.dataset.iterdir()) == []
    (place.dataset / "tokenizer.json").write_text("whole")
    place.progress.surveyed = True
    place.record()
    assert [path.name for path in Staging(folder, COMMAND).dataset.iterdir()] == ["tokenizer.json"]
