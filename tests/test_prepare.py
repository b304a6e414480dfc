import hashlib
import json
import os
import platform
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from training import prepare
from training.errors import UserError
from training.prepare import (
    END_OF_TEXT,
    encode_documents,
    prepare_python_library,
    python_library_documents,
    staged_folder,
    train_tokenizer,
    write_tokens,
)
from training.tokenizer import load_tokenizer, token_byte_lengths


def read(folder: Path, split: str) -> NDArray[np.uint16]:
    return load_file(folder / f"{split}.safetensors")["tokens"]


@pytest.mark.slow
def test_python_library_is_described_by_its_dataset_json(python_library: Path) -> None:
    description: dict[str, Any] = json.loads((python_library / "dataset.json").read_text())
    assert description["format"] == 1
    assert description["name"] == "python-library"
    assert description["tokenizer"] == "tokenizer.json"
    assert description["vocab_size"] == 4096
    assert description["end_of_text"] == 4095
    assert description["licence"] == "PSF-2.0"
    assert description["python"] == platform.python_version()
    tokenizer = load_tokenizer(python_library / "tokenizer.json")
    assert tokenizer.get_vocab_size() == 4096
    assert tokenizer.token_to_id(END_OF_TEXT) == 4095
    lengths = token_byte_lengths(tokenizer, 4096)
    assert lengths is not None
    for split, counts in description["splits"].items():
        tokens = read(python_library, split)
        assert tokens.dtype == np.uint16
        assert len(tokens) == counts["tokens"]
        assert int(np.sum(tokens == 4095)) == counts["documents"]
        assert tokens[-1] == 4095
        assert int(lengths[tokens].sum()) == counts["bytes"]
        assert counts["sha256"] == hashlib.sha256((python_library / f"{split}.safetensors").read_bytes()).hexdigest()
    train, validation = description["splits"]["train"], description["splits"]["validation"]
    assert train["tokens"] > 1_000_000
    assert 0.01 < validation["tokens"] / train["tokens"] < 0.1
    assert train["bytes"] / train["tokens"] > 3


@pytest.mark.slow
def test_python_library_decodes_to_its_documents(python_library: Path) -> None:
    decode = load_tokenizer(python_library / "tokenizer.json").decode
    splits = [read(python_library, split).tolist() for split in ("train", "validation")]
    decoded = [document for ids in splits for document in decode(ids, skip_special_tokens=False).split(END_OF_TEXT)]
    texts = [text for _, text in python_library_documents()]
    assert sorted(decoded) == sorted([*texts, "", ""])  # what follows the last end of text of each split


@pytest.mark.slow
def test_python_library_is_complete_readable_and_announced_in_one_line(
    prepared_python_library: tuple[Path, str],
) -> None:
    folder, printed = prepared_python_library
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["dataset.json", "tokenizer.json", "train.safetensors", "validation.safetensors"]
    assert [path.name for path in folder.parent.iterdir()] == ["python-library"]
    assert len({stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}) == 1
    (line,) = printed.splitlines()
    assert line.startswith(f"python-library: train {len(read(folder, 'train')):,} tokens, validation ")


def test_documents_are_the_topics_and_the_modules_of_the_library_proper() -> None:
    documents = dict(python_library_documents())
    names = list(documents)
    assert {"library/json/decoder.py", "library/typing.py"} <= set(names)
    assert any(name.startswith("topics/") for name in names)
    parts = {part for name in names for part in name.split("/")}
    assert not parts & {"test", "tests", "site-packages", "encodings", "pydoc_data", "__pycache__"}
    assert documents["library/typing.py"].startswith('"""')


def test_tokenizer_and_tokens_are_the_same_each_time() -> None:
    texts = [text for _, text in sorted(python_library_documents())[:8]]
    first, second = train_tokenizer(texts, 512), train_tokenizer(iter(texts), 512)
    assert first.to_str() == second.to_str()
    np.testing.assert_array_equal(encode_documents(first, texts), encode_documents(second, texts))


def test_literal_end_of_text_in_a_document_does_not_end_it() -> None:
    texts = ["before <|endoftext|> after", "<|endoftext|>", ""]
    tokenizer = train_tokenizer(texts, 300)

    ids = encode_documents(tokenizer, texts)

    (ends,) = np.nonzero(ids == tokenizer.token_to_id(END_OF_TEXT))
    assert len(ends) == 3
    assert tokenizer.decode(ids[: ends[0]].tolist()) == texts[0]
    assert tokenizer.decode(ids[ends[0] + 1 : ends[1]].tolist()) == texts[1]
    assert ends[2] == ends[1] + 1


@pytest.mark.parametrize("token", [65536, 70000, -1, 2**40])
def test_r71_id_outside_uint16_is_refused_before_the_cast(tmp_path: Path, token: int) -> None:
    with pytest.raises(UserError, match=rf"token id {token} at position 2.* 65535"):
        write_tokens(tmp_path / "train.safetensors", [0, 65535, token, token], 65536)
    assert list(tmp_path.iterdir()) == []


def test_r71_id_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="token id 4096 at position 1; the vocabulary of 4096 ends at 4095"):
        write_tokens(tmp_path / "train.safetensors", [4095, 4096], 4096)


def test_r71_vocabulary_too_large_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a vocabulary of 4294967297 tokens; uint32 holds ids up to 4294967295"):
        write_tokens(tmp_path / "train.safetensors", [1], 2**32 + 1)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65536, np.uint16), (65537, np.uint32), (2**32, np.uint32)])
def test_the_vocabulary_decides_the_type(tmp_path: Path, vocab_size: int, dtype: type[np.integer[Any]]) -> None:
    path = tmp_path / "train.safetensors"
    assert write_tokens(path, np.array([0, vocab_size - 1]), vocab_size, document_ends=np.array([2])) == 2
    content = load_file(path)
    assert content["tokens"].dtype == dtype
    assert content["tokens"].tolist() == [0, vocab_size - 1]
    assert content["document_ends"].tolist() == [2]
    with pytest.raises(
        UserError, match=rf"token id {vocab_size} at position 0; .* ends at {vocab_size - 1}, {dtype.__name__}"
    ):
        write_tokens(path, [vocab_size], vocab_size)


@pytest.mark.parametrize("ids", [[0.5], [[1]], [2**70]])
def test_r71_ids_that_are_no_row_of_integers_are_refused(tmp_path: Path, ids: list[Any]) -> None:
    with pytest.raises(UserError, match="must be a row of integers"):
        write_tokens(tmp_path / "train.safetensors", ids, 10)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64, np.uint64])
def test_extreme_ids_survive(tmp_path: Path, dtype: type[np.integer[Any]]) -> None:
    path = tmp_path / "train.safetensors"
    write_tokens(path, np.array([0, 1, 65535], dtype=dtype), 65536)
    tokens = load_file(path)["tokens"]
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == [0, 1, 65535]


def test_folder_appears_only_when_complete(tmp_path: Path) -> None:
    destination = tmp_path / "datasets" / "mine"
    with staged_folder(destination) as folder:
        (folder / "file").write_text("x")
        assert not destination.exists()
    assert (destination / "file").read_text() == "x"
    assert list(destination.parent.iterdir()) == [destination]


def test_failed_preparation_leaves_nothing(tmp_path: Path) -> None:
    def fail_halfway() -> None:
        with staged_folder(tmp_path / "mine") as folder:
            (folder / "file").write_text("x")
            raise RuntimeError("disk")

    with pytest.raises(RuntimeError, match="disk"):
        fail_halfway()
    assert list(tmp_path.iterdir()) == []


def test_leftover_of_a_dead_process_goes_and_that_of_a_live_one_stays(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    host = socket.gethostname()
    kept = [f".mine.partial-{host}-{os.getppid()}", f".mine.partial-elsewhere-{child.pid}", ".mine.partial-2"]
    gone = [f".mine.partial-{host}-{child.pid}", f".mine.partial-{host}-{os.getpid()}"]
    for name in kept + gone:
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.safetensors").write_text("half")

    with staged_folder(tmp_path / "mine") as folder:
        assert list(folder.iterdir()) == []

    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, "mine"])


def test_r102_of_two_processes_the_first_to_finish_publishes(tmp_path: Path) -> None:
    destination = tmp_path / "mine"
    with staged_folder(destination) as folder:
        (folder / "file").write_text("second")
        destination.mkdir()
        (destination / "file").write_text("first")
    assert (destination / "file").read_text() == "first"
    assert list(tmp_path.iterdir()) == [destination]


def test_existing_dataset_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="exists already"):
        prepare_python_library(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "datasets").write_text("a file")
    with (
        pytest.raises(UserError, match="datasets: cannot write there"),
        staged_folder(tmp_path / "datasets" / "mine"),
    ):
        pass


def test_python_without_sources_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "python_library_documents", lambda: iter([]))
    with pytest.raises(UserError, match="holds no Python sources"):
        prepare_python_library(tmp_path / "python-library")
