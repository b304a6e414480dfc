"""Writes the files of a dataset, and gives its folder its name once all of them are there.

datasets/<name>/{train,validation}.safetensors, tokenizer.json, dataset.json
"""

import contextlib
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from training.errors import UserError


def write_split(
    folder: Path, split: str, counts: dict[str, int], ids: ArrayLike, vocab_size: int, **documents: NDArray[Any]
) -> dict[str, int | str]:
    """Writes one split's token file; returns its entry in dataset.json: the counts given, tokens and digest."""
    path = folder / f"{split}.safetensors"
    tokens = write_tokens(path, ids, vocab_size, **documents)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {**counts, "tokens": tokens, "sha256": digest}


def write_description(folder: Path, **values: Any) -> None:
    """Writes dataset.json, of a dataset whose tokenizer.json lies beside it."""
    description = {"format": 1, "tokenizer": "tokenizer.json", **values}
    (folder / "dataset.json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")


def write_tokens(path: Path, ids: ArrayLike, vocab_size: int, **documents: NDArray[Any]) -> int:
    """Writes token ids under the key `tokens` of a safetensors file: as uint16, for a larger vocabulary as uint32.

    Every id is checked before the cast, which would wrap 65536 round to 0 and -1 to 65535.

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

    dtype = np.uint16 if vocab_size <= 2**16 else np.uint32
    largest = int(np.iinfo(dtype).max)
    if not 0 < vocab_size <= largest + 1:
        raise UserError(
            f"{path.name}: a vocabulary of {vocab_size} tokens; {np.dtype(dtype)} holds ids up to {largest}; "
            "use a tokenizer with fewer tokens"
        )
    tokens = np.asarray(ids)
    if tokens.ndim != 1 or (tokens.size > 0 and tokens.dtype.kind not in "iu"):
        raise UserError(
            f"{path.name}: token ids of type {tokens.dtype} and shape {tokens.shape}; "
            "they must be a row of integers; correct the source of the ids"
        )
    outside = np.flatnonzero((tokens < 0) | (tokens >= vocab_size))
    if outside.size > 0:
        position = int(outside[0])
        raise UserError(
            f"{path.name}: token id {tokens[position]} at position {position}; the vocabulary of {vocab_size} "
            f"ends at {vocab_size - 1}, {np.dtype(dtype)} at {largest}; use the tokenizer of that vocabulary"
        )
    # save_file would make the file readable for its owner alone.
    path.write_bytes(save({"tokens": tokens.astype(dtype), **documents}))
    return len(tokens)


def fraction_of(text: str) -> float:
    """A number in [0, 1) that depends on the text alone, as if drawn at random: decides its place and its split."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6]) / 2**48


@contextlib.contextmanager
def staged_folder(destination: Path) -> Iterator[Path]:
    """Gives a hidden folder beside `destination` that takes its name once it is complete.

    So a dataset is there in whole or not at all. On an exception the hidden folder is removed; one left by a
    killed process goes when the next one starts. Where another process has published the same destination
    in the meantime, its folder stays and ours is dropped.

    Raises:
        UserError: `destination` holds something already, or its parent cannot be written.
    """
    dangling = destination.is_symlink() and not destination.exists()
    if dangling or destination.is_file() or (destination.is_dir() and any(destination.iterdir())):
        raise UserError(f"{destination}: exists already; a dataset is never overwritten; remove it first")
    # The host is part of the name because a process id says nothing on another node of a shared disk.
    prefix = f".{destination.name}.partial-{socket.gethostname()}-"
    folder = destination.with_name(f"{prefix}{os.getpid()}")
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        for other in destination.parent.iterdir():
            process_id = other.name.removeprefix(prefix)
            if process_id != other.name and (other == folder or not _is_running(process_id)):
                shutil.rmtree(other, ignore_errors=True)
        folder.mkdir()
    except OSError as error:
        raise UserError(f"{destination.parent}: cannot write there ({error}); choose another folder") from error
    try:
        yield folder
        try:
            folder.rename(destination)
        except OSError:
            if not destination.is_dir():
                raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _is_running(process_id: str) -> bool:
    try:
        os.kill(int(process_id), 0)  # signal 0 only asks
    except ProcessLookupError:
        return False
    except (PermissionError, ValueError):  # another user's, or not a name of ours
        return True
    return True
