"""Writes datasets, and makes `python-library` from texts that every Python carries, without a network.

    datasets/<name>/{train,validation}.safetensors, tokenizer.json, dataset.json

A document of python-library is a help topic of `pydoc` or the source of one module of the standard library.
"""

import contextlib
import hashlib
import importlib
import json
import os
import platform
import shutil
import socket
import sys
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tqdm import tqdm

from training.errors import UserError

PYTHON_LIBRARY = "python-library"
VOCAB_SIZE = 4096
END_OF_TEXT = "<|endoftext|>"
VALIDATION_SHARE = 0.05
# Folders that are no part of the library proper, or (encodings, pydoc_data) hold tables and texts written by
# programs, whose repetitions would fill the vocabulary.
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "idlelib", "ensurepip"}
    | {"lib2to3", "turtledemo", "encodings", "pydoc_data", "msilib"}
)
SKIPPED_FILES = frozenset({"html/entities.py"})
SKIPPED_PREFIXES = ("config-", "_sysconfigdata")  # differ by machine
DOCUMENTS_PER_BATCH = 32


def prepare_python_library(output: Path) -> None:
    """Writes the dataset `python-library` into the new folder `output`.

    The same Python version gives the same bytes. Documents are ordered by the sha256 of their names, which
    mixes prose and code and lets the first 5 % be the validation split. The tokenizer, a byte-level BPE of
    4096 tokens with `<|endoftext|>` as the last one, sees only training documents. The digests in
    dataset.json are those of the .safetensors files, its `bytes` the UTF-8 bytes of the documents' text.

    Raises:
        UserError: `output` exists, its parent cannot be written, or this Python comes without its sources.
    """
    documents = sorted(python_library_documents(), key=lambda document: fraction_of(document[0]))
    splits = {
        "train": [text for name, text in documents if fraction_of(name) >= VALIDATION_SHARE],
        "validation": [text for name, text in documents if fraction_of(name) < VALIDATION_SHARE],
    }
    if not all(splits.values()):
        library = sysconfig.get_path("stdlib")
        raise UserError(
            f"{library}: holds no Python sources to make {PYTHON_LIBRARY} from; "
            "use a Python installed with its standard library, or another dataset"
        )
    total = sum(len(text.encode()) for texts in splits.values() for text in texts)
    with (
        staged_folder(output) as folder,
        tqdm(total=total, desc=PYTHON_LIBRARY, unit="B", unit_scale=True, disable=None, leave=False) as bar,
    ):
        tokenizer = train_tokenizer(splits["train"], VOCAB_SIZE)
        tokenizer.save(str(folder / "tokenizer.json"))
        counts = {}
        for split, texts in splits.items():
            sizes = {"documents": len(texts), "bytes": sum(len(text.encode()) for text in texts)}
            ids = encode_documents(tokenizer, texts, bar)
            counts[split] = write_split(folder, split, sizes, ids, VOCAB_SIZE)
        write_description(
            folder,
            name=PYTHON_LIBRARY,
            kind="packed",
            vocab_size=VOCAB_SIZE,
            end_of_text=tokenizer.token_to_id(END_OF_TEXT),
            source="Python's standard library: the topics of pydoc_data and the sources of its modules",
            licence="PSF-2.0",
            python=platform.python_version(),
            splits=counts,
        )
    sizes_said = ", ".join(f"{split} {count['tokens']:,} tokens" for split, count in counts.items())
    print(f"{PYTHON_LIBRARY}: {sizes_said}, in {output}", file=sys.stderr)


def python_library_documents() -> Iterator[tuple[str, str]]:
    """Yields (name, text) of every document: `topics/<topic>` and `library/<path of the module>`."""
    # Not every build carries the topics.
    with contextlib.suppress(ImportError):
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
        yield from ((f"topics/{topic}", text) for topic, text in topics.items())
    library = Path(sysconfig.get_path("stdlib"))
    for folder, subfolders, files in os.walk(library):
        subfolders[:] = [name for name in subfolders if not _is_skipped(name)]
        for file in files:
            path = Path(folder, file)
            name = path.relative_to(library).as_posix()
            if path.suffix != ".py" or name in SKIPPED_FILES or _is_skipped(file):
                continue
            # tokenize.open reads as the compiler does: coding cookie, byte order mark, line ends. What it
            # cannot read is no text.
            with contextlib.suppress(SyntaxError, UnicodeDecodeError), tokenize.open(path) as source:
                yield f"library/{name}", source.read()


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains GPT-2's kind of byte-level BPE; `<|endoftext|>` gets the last id, as it has in GPT-2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def encode_documents(tokenizer: Tokenizer, texts: Sequence[str], bar: "tqdm[Any] | None" = None) -> NDArray[np.int64]:
    """Token ids of all documents in a row, 1-D, with one end-of-text token after each.

    A literal `<|endoftext|>` within a document is encoded as the ordinary text it is there.
    """
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    tokenizer.encode_special_tokens = True
    rows = []
    for start in range(0, len(texts), DOCUMENTS_PER_BATCH):
        batch = texts[start : start + DOCUMENTS_PER_BATCH]
        for encoding in tokenizer.encode_batch_fast(list(batch), add_special_tokens=False):
            rows.append(np.array([*encoding.ids, end_of_text], dtype=np.int64))
        if bar is not None:
            bar.update(sum(len(text.encode()) for text in batch))
    return np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64)


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


def _is_skipped(name: str) -> bool:
    return name in SKIPPED_FOLDERS or name.startswith(SKIPPED_PREFIXES)


def _is_running(process_id: str) -> bool:
    try:
        os.kill(int(process_id), 0)  # signal 0 only asks
    except ProcessLookupError:
        return False
    except (PermissionError, ValueError):  # another user's, or not a name of ours
        return True
    return True
