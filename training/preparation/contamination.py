"""Finds documents that share n-grams of words with the validation split, which they would give away.

A word is a run of letters, digits and underscores, in lower case: punctuation, blanks and capitals make no
difference, and neither does the tokenizer. Of each n-gram a 64-bit hash is kept, sorted, in a file that is mapped into
memory; that a document is found by mistake is about as likely as its n-grams times those of the file over 2^64.
"""

import hashlib
import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]

WORD = re.compile(r"\w+")
WORDS_AT_ONCE = 2**16
BUCKETS = 64
FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so that no bit of a word's hash is lost


def ngram_hashes(text: str, length: int) -> Iterator[Hashes]:
    """Yields the hashes of all runs of `length` words of a text, in order, some at a time."""
    words = (match[0] for match in WORD.finditer(text.lower()))
    carried = np.zeros(0, dtype=np.uint64)
    while batch := list(islice(words, WORDS_AT_ONCE)):
        hashes = np.concatenate([carried, np.array([_word_hash(word) for word in batch], dtype=np.uint64)])
        count = max(len(hashes) - length + 1, 0)
        if count:
            combined = np.zeros(count, dtype=np.uint64)
            for position in range(length):
                combined = combined * FACTOR + hashes[position : position + count]
            yield combined
        carried = hashes[count:]


@lru_cache(maxsize=2**17)
def _word_hash(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest())


class NgramWriter:
    """Collects the n-grams of many texts into one sorted file, of which a part at a time is in memory."""

    def __init__(self, path: Path, length: int) -> None:
        """Collects runs of `length` words for the file `path`; parts of it lie beside it in the meantime."""
        self.path, self.length = path, length
        self._buckets = [path.with_name(f"{path.name}.{number:02}") for number in range(BUCKETS)]

    def __enter__(self) -> Self:
        self._files = [bucket.open("wb") for bucket in self._buckets]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for file in self._files:
            file.close()
        if kind is None:
            self._join()

    def add(self, text: str) -> None:
        """Adds the n-grams of a text."""
        for hashes in ngram_hashes(text, self.length):
            ordered = np.sort(hashes)
            bounds = np.searchsorted(ordered, np.arange(1, BUCKETS, dtype=np.uint64) << np.uint64(58))
            for file, part in zip(self._files, np.split(ordered, bounds), strict=True):
                file.write(part.tobytes())

    def _join(self) -> None:
        """A bucket holds the hashes of one range of values, so sorted buckets in a row are sorted."""
        with self.path.open("wb") as joined:
            for bucket in self._buckets:
                joined.write(np.unique(np.fromfile(bucket, dtype=np.uint64)).tobytes())
                bucket.unlink()


def open_ngrams(path: Path) -> Hashes:
    """The hashes of a file that NgramWriter has written."""
    if path.stat().st_size == 0:  # cannot be mapped
        return np.zeros(0, dtype=np.uint64)
    return np.memmap(path, dtype=np.uint64, mode="r")


def shares_ngram(text: str, length: int, known: Hashes) -> bool:
    """Whether a run of `length` words of a text is among the known ones, which are sorted."""
    if not len(known):
        return False
    for hashes in ngram_hashes(text, length):
        ordered = np.sort(hashes)  # neighbours look at the same part of the file
        places = np.minimum(np.searchsorted(known, ordered), len(known) - 1)
        if np.any(known[places] == ordered):
            return True
    return False
