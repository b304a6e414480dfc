"""n-grams that documents share, against a plain search for them."""

import random
import re
from pathlib import Path

import numpy as np
import pytest

from training.preparation import contamination
from training.preparation.contamination import NgramWriter, ngram_hashes, open_ngrams, shares_ngram


def plain_ngrams(text: str, length: int) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[start : start + length]) for start in range(len(words) - length + 1)}


def write(path: Path, texts: list[str], length: int) -> np.ndarray:
    with NgramWriter(path, length) as writer:
        for text in texts:
            writer.add(text)
    return open_ngrams(path)


@pytest.mark.parametrize("at_once", [1, 3, 7, 2**16])
def test_what_is_found_is_what_a_plain_search_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """However many words are looked at together; and the file is sorted, with each n-gram once."""
    monkeypatch.setattr(contamination, "WORDS_AT_ONCE", at_once)
    draw = random.Random(at_once)
    texts = [" ".join(draw.choices(["a", "b", "Ä", "c.", "d,", "E\n"], k=draw.randint(0, 25))) for _ in range(60)]
    for length in (1, 2, 4, 6):
        known = write(tmp_path / "ngrams", texts[:6], length)
        plain = set[tuple[str, ...]]().union(*(plain_ngrams(text, length) for text in texts[:6]))
        assert len(known) == len(plain)
        assert np.all(known[:-1] < known[1:])
        found = [shares_ngram(text, length, known) for text in texts]
        assert found == [bool(plain_ngrams(text, length) & plain) for text in texts]
        assert length == 1 or len(set(found)) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["ngrams"]


def test_thirteen_words_in_a_row_are_shared_and_twelve_are_not(tmp_path: Path) -> None:
    """Capitals, punctuation and blanks make no difference; order does."""
    words = [f"word{number}" for number in range(20)]
    known = write(tmp_path / "ngrams", [" ".join(words)], 13)
    assert len(known) == 8
    assert shares_ngram("Before; " + ", ".join(words[3:16]).upper() + "!\n", 13, known)
    assert not shares_ngram("before " + " ".join(words[3:15]) + " after " * 20, 13, known)
    assert not shares_ngram(" ".join(words[::-1]), 13, known)
    assert not shares_ngram("", 13, known)


def test_nothing_is_shared_with_nothing(tmp_path: Path) -> None:
    known = write(tmp_path / "ngrams", ["too short", ""], 13)
    assert len(known) == 0
    assert not shares_ngram("a " * 50, 13, known)


def test_hashes_are_the_same_everywhere() -> None:
    """A file of them may be used by another process."""
    [hashes] = ngram_hashes("To be, or not to be", 5)
    assert hashes.dtype == np.uint64
    assert hashes.tolist() == [9308117951546932043, 10938004885142633631]
