"""`isobatch prepare --check`: whether the files of a dataset are whole, and say the same as its description."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from training.errors import UserError, one_line
from training.file_digest import file_digest
from training.json_file import read_json_object
from training.preparation.dataset_files import SPLITS, fingerprint
from training.rows import CHECKED_AT_ONCE, TokenFile
from training.tokenizer import end_of_text_id, load_tokenizer

AGAIN = "download or prepare the dataset again"


@dataclass
class CheckedSplit:
    """What a token file was found to hold."""

    tokens: int
    sha256: str
    largest_id: int = -1
    ends_of_text: int | None = None
    """How often the end of text occurs; None if nothing says what it is."""
    documents: int | None = None
    """Of a document dataset."""
    targets: int | None = None
    """Tokens that the mask of a document dataset lets be targets; None without a mask."""


@dataclass
class CheckedDataset:
    """A dataset's folder, and all that is wrong with it."""

    folder: str
    problems: list[str] = field(default_factory=list)
    vocab_size: int | None = None
    end_of_text: int | None = None
    described: bool = False
    """Whether there is a dataset.json to compare the files with."""
    splits: dict[str, CheckedSplit] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """What was found, where nothing is wrong, in a line."""
        said = [f"{split} {found.tokens:,} tokens" for split, found in self.splits.items()]
        largest = max(found.largest_id for found in self.splits.values())
        vocabulary = f"of {self.vocab_size:,}" if self.vocab_size else "of unknown size"
        said.append(f"ids up to {largest:,} in a vocabulary {vocabulary}")
        without = "" if self.described else "; there is no dataset.json to compare with"
        return f"{self.folder}: is whole: {', '.join(said)}{without}"

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Adds the mistake that ends a part of the check to the problems."""
        try:
            yield
        except UserError as mistake:
            self.problems.append(str(mistake))


def check_dataset(folder: Path) -> CheckedDataset:
    """Reads all files of a dataset, and compares them with each other.

    train.safetensors alone is a dataset; whatever else there is must agree with it.

    Raises:
        UserError: there is no such folder.
    """
    if not os.path.isdir(folder):
        raise UserError(f"{one_line(folder)}: there is no such folder; it must be that of a dataset; correct the path")
    checked = CheckedDataset(str(folder))
    description: dict[str, Any] = {}
    with checked.collecting():
        description = _read_description(folder / "dataset.json")
        checked.described = bool(description)
    with checked.collecting():
        _check_vocabulary(folder, description, checked)
    entries = description.get("splits", {})
    for split in SPLITS:
        path = folder / f"{split}.safetensors"
        if path.exists():
            with checked.collecting():
                checked.splits[split] = _check_tokens(TokenFile(path), checked)
                checked.problems += _differences(path, entries.get(split), checked.splits[split], description)
        elif split == "train" or split in entries:
            checked.problems.append(f"{path}: there is no such file; {AGAIN}")
    _check_fingerprint(folder, description, checked)
    return checked


def _read_description(path: Path) -> dict[str, Any]:
    """A dataset.json; empty, where there is none."""
    if not path.exists():
        return {}
    description = read_json_object(path, AGAIN)
    numbers = [description.get(key) for key in ("vocab_size", "end_of_text")]
    numbers_are_right = all(number is None or type(number) is int for number in numbers)  # not isinstance: no bool
    splits = description.get("splits", {})
    splits_are_right = isinstance(splits, dict) and all(isinstance(entry, dict) for entry in splits.values())
    if not numbers_are_right or not splits_are_right:
        raise UserError(f"{path}: its vocab_size, end_of_text or splits are not those of a description; {AGAIN}")
    if "fingerprint" in description and description.get("end_of_text") is None:
        raise UserError(f"{path}: has a fingerprint but no end_of_text, over which it would be; {AGAIN}")
    return description


def _check_vocabulary(folder: Path, description: dict[str, Any], checked: CheckedDataset) -> None:
    """Finds the size of the vocabulary and the end of text, and whether the tokenizer fits them."""
    checked.vocab_size, checked.end_of_text = description.get("vocab_size"), description.get("end_of_text")
    path = folder / "tokenizer.json"
    if path.exists():
        tokenizer = load_tokenizer(path)
        ids = max(tokenizer.get_vocab().values(), default=-1) + 1
        if checked.vocab_size is not None and ids > checked.vocab_size:
            raise UserError(
                f"{path}: has ids up to {ids - 1:,}, but vocab_size in dataset.json is {checked.vocab_size:,}; it is "
                f"not the tokenizer of these tokens; {AGAIN}"
            )
        checked.vocab_size = checked.vocab_size or ids
        checked.end_of_text = end_of_text_id(tokenizer, folder / "dataset.json")
    elif "tokenizer" in description:
        raise UserError(f"{path}: there is no such file, but dataset.json names it; {AGAIN}")
    end, size = checked.end_of_text, checked.vocab_size
    if end is not None and size is not None and not 0 <= end < size:
        raise UserError(f"{folder}: the end of text {end:,} is not in the vocabulary of {size:,}; {AGAIN}")


def _check_tokens(file: TokenFile, checked: CheckedDataset) -> CheckedSplit:
    """Reads a token file from end to end.

    Raises:
        UserError: naming the first token, end or mask that is wrong.
    """
    found = CheckedSplit(file.length, file_digest(file.path))
    if not file.length:
        raise UserError(f"{file.path}: has no tokens; {AGAIN}")
    size = checked.vocab_size or 2**63 - 1
    bad = file.first_bad_token(0, file.length, size)
    if bad is not None:
        raise UserError(
            f"{file.path}: the id {file.read(bad, bad + 1)[0]} at offset {bad:,} is not in the vocabulary of {size:,}; "
            f"the tokens belong to another tokenizer; {AGAIN}"
        )
    ends = file.document_ends() if file.has_documents else None
    found.documents = None if ends is None else len(ends)
    end_of_text, counted, targets = checked.end_of_text, 0, 0
    for begin in range(0, file.length, CHECKED_AT_ONCE):
        stop = min(begin + CHECKED_AT_ONCE, file.length)
        tokens = file.read(begin, stop)
        found.largest_id = max(found.largest_id, int(tokens.max()))
        counted += int(np.sum(tokens == end_of_text))
        targets += int(file.mask(begin, stop).sum())
        if ends is not None and end_of_text is not None:
            lasts = ends[(ends > begin) & (ends <= stop)] - 1
            unended = lasts[tokens[lasts - begin] != end_of_text]
            if len(unended):
                raise UserError(
                    f"{file.path}: the document that ends at offset {unended[0]:,} does not end with the end of text, "
                    f"{end_of_text:,}; {AGAIN}"
                )
    found.ends_of_text = counted if end_of_text is not None else None
    found.targets = targets if file.has_mask else None
    return found


def _differences(
    path: Path, entry: dict[str, Any] | None, found: CheckedSplit, description: dict[str, Any]
) -> Iterator[str]:
    """In what a token file is not what dataset.json says of it."""
    if entry is None:
        if description:
            yield f"{path}: is not in the splits of dataset.json; {AGAIN}"
        return
    # In a packed dataset nothing but the ends of text tells how many documents there are.
    documents = found.ends_of_text if found.documents is None else found.documents
    actual = {"tokens": found.tokens, "documents": documents, "targets": found.targets, "sha256": found.sha256}
    for key, value in actual.items():
        if value is not None and key in entry and entry[key] != value:
            yield f"{path}: its {key} are {value}, but dataset.json says {entry[key]}; {AGAIN}"


def _check_fingerprint(folder: Path, description: dict[str, Any], checked: CheckedDataset) -> None:
    tokenizer = folder / "tokenizer.json"
    if "fingerprint" not in description or not tokenizer.exists() or checked.problems:
        return
    digests = {split: {"sha256": found.sha256} for split, found in checked.splits.items()}
    if fingerprint(file_digest(tokenizer), description["end_of_text"], digests) != description["fingerprint"]:
        checked.problems.append(
            f"{folder}: the fingerprint in dataset.json is not that of its files, so tokenizer.json is not the one "
            f"that was used; {AGAIN}"
        )
