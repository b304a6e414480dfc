"""Writes the files of a dataset, and gives its folder its name once all of them are there.

datasets/<name>/{train,validation}.safetensors, tokenizer.json, dataset.json
"""

import contextlib
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from training.errors import RunError, UserError, one_line
from training.file_digest import file_digest
from training.left_behind import is_left_behind

Tokens = NDArray[np.unsignedinteger[Any]]
TokenType = np.dtype[np.unsignedinteger[Any]]
SPLITS = ("train", "validation")
HEADER_BYTES = 128
"""Of a token file that is written piece by piece: enough for 10^19 tokens."""


def write_split(
    folder: Path, split: str, counts: dict[str, int], ids: ArrayLike, vocab_size: int, **documents: NDArray[Any]
) -> dict[str, int | str]:
    """Writes one split's token file; returns its entry in dataset.json: the counts given, tokens and digest."""
    path = folder / f"{split}.safetensors"
    tokens = write_tokens(path, ids, vocab_size, **documents)
    return {**counts, "tokens": tokens, "sha256": file_digest(path)}


def write_description(folder: Path, **values: Any) -> None:
    """Writes dataset.json, of a dataset whose tokenizer.json lies beside it."""
    description = {"format": 1, "tokenizer": "tokenizer.json", **values}
    # At once, because a preparation that goes on after a kill reads the one that was there before.
    replace_content(folder / "dataset.json", json.dumps(description, indent=2) + "\n")


def write_tokens(path: Path, ids: ArrayLike, vocab_size: int, **documents: NDArray[Any]) -> int:
    """Writes token ids under the key `tokens` of a safetensors file: as uint16, for a larger vocabulary as uint32.

    Args:
        path: The file to write.
        ids: 1-D integers.
        vocab_size: All ids must be below it.
        documents: What else the file gets: `document_ends` and `loss_mask` of a document dataset.

    Returns:
        The number of tokens.

    Raises:
        UserError: naming the first id that does not fit and the largest that does.
    """
    from safetensors.numpy import save

    tokens = checked_tokens(path.name, ids, vocab_size)
    # save_file would make the file readable for its owner alone.
    path.write_bytes(save({"tokens": tokens, **documents}))
    return len(tokens)


def checked_tokens(name: str, ids: ArrayLike, vocab_size: int) -> Tokens:
    """Token ids in the type of a token file.

    Every id is checked before the cast, which would wrap 65536 round to 0 and -1 to 65535.

    Raises:
        UserError: naming the file `name`, the first id that does not fit and the largest that does.
    """
    dtype = token_type(name, vocab_size)
    tokens = np.asarray(ids)
    if tokens.ndim != 1 or (tokens.size > 0 and tokens.dtype.kind not in "iu"):
        raise UserError(
            f"{name}: token ids of type {tokens.dtype} and shape {tokens.shape}; "
            "they must be a row of integers; correct the source of the ids"
        )
    outside = np.flatnonzero((tokens < 0) | (tokens >= vocab_size))
    if outside.size > 0:
        position = int(outside[0])
        raise UserError(
            f"{name}: token id {tokens[position]} at position {position}; the vocabulary of {vocab_size} "
            f"ends at {vocab_size - 1}, {dtype} at {np.iinfo(dtype).max}; use the tokenizer of that vocabulary"
        )
    return tokens.astype(dtype)


def token_type(name: str, vocab_size: int) -> TokenType:
    """uint16 for a vocabulary of up to 65,536 tokens, else uint32.

    Raises:
        UserError: naming the file `name`; not even that holds them.
    """
    if not 0 < vocab_size <= 2**32:
        raise UserError(
            f"{name}: a vocabulary of {vocab_size} tokens; uint32 holds ids up to {2**32 - 1}; "
            "use a tokenizer with fewer tokens"
        )
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


class TokenWriter:
    """Writes a token file piece by piece; goes on with one that has been left."""

    def __init__(self, path: Path, dtype: TokenType, tokens: int = 0) -> None:
        """Opens the file, and cuts off what it has behind its first `tokens` tokens.

        Raises:
            UserError: it has fewer.
        """
        self.path, self.dtype, self.tokens = path, dtype, tokens
        # Cutting would lengthen it, with tokens 0.
        if tokens and path.stat().st_size < self.size:
            raise UserError(f"{path}: has fewer than the {tokens:,} tokens that were written; start again without it")
        self._file = path.open("r+b" if tokens else "wb")
        self._file.truncate(self.size)
        self._file.seek(0, os.SEEK_END)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return HEADER_BYTES + self.tokens * self.dtype.itemsize

    def append(self, tokens: bytes) -> None:
        """Adds tokens, as they are to lie in the file."""
        self._file.write(tokens)
        self.tokens += len(tokens) // self.dtype.itemsize

    def flush(self) -> None:
        """Returns when all is on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def finish(self) -> None:
        """Writes the header, which makes it a safetensors file: room was left for any number of tokens."""
        self._file.seek(0)
        kind = "U16" if self.dtype.itemsize == 2 else "U32"
        offsets = [0, self.tokens * self.dtype.itemsize]
        header = json.dumps({"tokens": {"dtype": kind, "shape": [self.tokens], "data_offsets": offsets}})
        size = HEADER_BYTES - 8
        self._file.write(size.to_bytes(8, "little") + header.encode().ljust(size))
        self.flush()

    def close(self) -> None:
        """Leaves the file as it is."""
        self._file.close()


def replace_content(path: Path, text: str) -> None:
    """Gives a file a new content: whoever reads it, also after a power loss, finds the old or the new one whole."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(text, encoding="utf-8")
    bring_to_disk(new)
    new.replace(path)
    bring_to_disk(path.parent)


def bring_to_disk(path: Path) -> None:
    """Returns when the content of a file, or the names in a folder, would survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(folder: Path, destination: Path) -> None:
    """Gives a folder its name, where there is nothing or an empty folder, once all in it is on the disk."""
    for path in (*folder.rglob("*"), folder):
        bring_to_disk(path)
    folder.rename(destination)
    bring_to_disk(destination.parent)


def fingerprint(tokenizer: str, end_of_text: int, splits: Mapping[str, Mapping[str, Any]]) -> str:
    """A sha256 over what fixes all that a run sees of a dataset.

    Args:
        tokenizer: the sha256 of its tokenizer.json.
        end_of_text: its id.
        splits: their entries in dataset.json, of which the sha256 of the token file counts.
    """
    digests = {split: entry["sha256"] for split, entry in splits.items()}
    return hashlib.sha256(json.dumps([tokenizer, end_of_text, digests], sort_keys=True).encode()).hexdigest()


def fraction_of(text: str) -> float:
    """A number in [0, 1) that depends on the text alone, as if drawn at random: decides its place and its split."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6]) / 2**48


def refuse_existing(destination: Path) -> None:
    """Raises a UserError where a new dataset would take the place of something, or has no name to take.

    The place of an empty folder it can take; but not that of a link to one, nor of a disk's.
    """
    if destination.name in ("", "..") or not destination.name.isprintable():
        raise UserError(
            f"{one_line(destination)}: is not the name of a new folder; give one that is, such as datasets/mine"
        )
    if not os.path.lexists(destination):
        return
    try:
        free = not (destination.is_symlink() or destination.is_mount() or os.listdir(destination))
    except OSError:  # no folder, or somebody else's
        free = False
    if not free:
        raise UserError(f"{destination}: exists already; a dataset is never overwritten; remove it first")


@contextlib.contextmanager
def staged_folder(destination: Path, keep_other: bool = False) -> Iterator[Path]:
    """Gives a hidden folder beside `destination` that takes its name once it is complete.

    So a dataset is there in whole or not at all. On an exception the hidden folder is removed; one left by a
    killed process goes when the next one starts, an hour later or more.

    Args:
        destination: the new folder.
        keep_other: where another process has published the same destination in the meantime, its folder is as good as
            ours, which is dropped; else that is a mistake.

    Raises:
        UserError: `destination` holds something already, or its parent cannot be written.
        RunError: a file could not be written.
    """
    refuse_existing(destination)
    # The host is part of the name because a process id says nothing on another node of a shared disk.
    prefix = f".{destination.name}.partial-{socket.gethostname()}-"
    folder = destination.with_name(f"{prefix}{os.getpid()}")
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        for other in destination.parent.iterdir():
            process_id = other.name.removeprefix(prefix)
            if process_id != other.name and (other == folder or is_left_behind(other, process_id)):
                shutil.rmtree(other, ignore_errors=True)
        folder.mkdir()
    except OSError as error:
        raise UserError(f"{destination.parent}: cannot write there ({error}); choose another folder") from error
    try:
        yield folder
        try:
            publish(folder, destination)
        except OSError:
            if not destination.is_dir():
                raise
            if not keep_other:
                raise UserError(
                    f"{destination}: was made by another process in the meantime, and stays as it is; nothing is "
                    "overwritten; choose another name"
                ) from None
    except OSError as error:
        raise RunError(f"{destination}: cannot be written ({error}); make room, or choose another folder") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
