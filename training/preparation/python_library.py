"""The dataset `python-library`, made from texts that every Python carries, without a network.

A document is a help topic of `pydoc` or the source of one module of the standard library.
"""

import contextlib
import importlib
import os
import platform
import sys
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from training.errors import UserError
from training.preparation.dataset_files import fraction_of, staged_folder, write_description, write_split
from training.tokenizer import END_OF_TEXT, encode_documents, train_tokenizer

PYTHON_LIBRARY = "python-library"
VOCAB_SIZE = 4096
VALIDATION_SHARE = 0.05
# Folders that are no part of the library proper, or (encodings, pydoc_data) hold tables and texts written by
# programs, whose repetitions would fill the vocabulary.
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "idlelib", "ensurepip"}
    | {"lib2to3", "turtledemo", "encodings", "pydoc_data", "msilib"}
)
SKIPPED_FILES = frozenset({"html/entities.py"})
SKIPPED_PREFIXES = ("config-", "_sysconfigdata")  # differ by machine


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
        staged_folder(output, keep_other=True) as folder,
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


def _is_skipped(name: str) -> bool:
    return name in SKIPPED_FOLDERS or name.startswith(SKIPPED_PREFIXES)
