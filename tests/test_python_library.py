import hashlib
import json
import platform
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from training.errors import UserError
from training.preparation import python_library as module
from training.preparation.python_library import prepare_python_library, python_library_documents
from training.tokenizer import END_OF_TEXT, load_tokenizer, token_byte_lengths


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


def test_existing_dataset_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="exists already"):
        prepare_python_library(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_python_without_sources_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "python_library_documents", lambda: iter([]))
    with pytest.raises(UserError, match="holds no Python sources"):
        prepare_python_library(tmp_path / "python-library")
