"""The tokenizer of a new dataset: one that exists, one trained on its documents, or bytes."""

import hashlib
import heapq
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, models

from training.errors import UserError
from training.tokenizer import (
    END_OF_TEXT,
    TOKENIZER,
    byte_level,
    end_of_text_id,
    load_tokenizer,
    read_published,
    train_tokenizer,
)

SAMPLE_BYTES = 64 * 2**20
SMALLEST = 257


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer and what a dataset needs to know of it."""

    tokenizer: Tokenizer
    end_of_text: int
    """The id that follows each document."""
    content: bytes
    """Of its tokenizer.json."""

    @property
    def size(self) -> int:
        """All its ids are below."""
        return max(self.tokenizer.get_vocab().values()) + 1

    @property
    def digest(self) -> str:
        """sha256 of its tokenizer.json."""
        return hashlib.sha256(self.content).hexdigest()


def read_vocabulary(path: Path) -> Vocabulary:
    """Reads a tokenizer.json, or a folder with one or with the two files of a byte-level BPE.

    The end of text is the one that a dataset.json beside it names, or else `<|endoftext|>`.

    Raises:
        UserError: there is none, it cannot be read, or it lacks the end of text.
    """
    file = path / TOKENIZER if os.path.isdir(path) else path
    published = None if os.path.isfile(file) else read_published(path)
    if published is not None:
        tokenizer = published
        tokenizer.add_special_tokens([END_OF_TEXT])  # gets the next id, unless it has one
        content = tokenizer.to_str(pretty=True).encode()
    else:
        tokenizer = load_tokenizer(file)
        content = file.read_bytes()
    end_of_text = end_of_text_id(tokenizer, file.with_name("dataset.json"))
    if end_of_text is None:
        raise UserError(
            f"{file}: has no <|endoftext|>, and no dataset.json beside it names another token; a document must end "
            "with a token that says so; use a tokenizer that has one"
        )
    if tokenizer.id_to_token(end_of_text) is None:
        raise UserError(
            f"{file}: has no token {end_of_text:,}, which the dataset.json beside it names as its end of text; correct "
            "end_of_text there, or use the tokenizer that it is of"
        )
    return Vocabulary(tokenizer, end_of_text, content)


def byte_vocabulary() -> Vocabulary:
    """256 bytes, whose ids are their values, and the end of text behind them."""
    # OpenAI's bytes_to_unicode (gpt-2/src/encoder.py): printable characters stand for themselves, the other bytes, in
    # order, for the characters from 256 on.
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    tokenizer = byte_level(models.BPE(vocab={character: byte for byte, character in characters.items()}, merges=[]))
    tokenizer.add_special_tokens([END_OF_TEXT])
    return _made(tokenizer)


def trained_vocabulary(texts: Iterable[str], size: int) -> Vocabulary:
    """A byte-level BPE of GPT-2's kind, trained on some texts.

    Raises:
        UserError: the texts have too few different parts for so many tokens.
    """
    vocabulary = _made(train_tokenizer(texts, size))
    if vocabulary.size < size:
        raise UserError(
            f"--train-bpe: is {size:,}, but the training documents give no more than {vocabulary.size:,} tokens; "
            f"lower it to {vocabulary.size}, or give more documents"
        )
    return vocabulary


def _made(tokenizer: Tokenizer) -> Vocabulary:
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    assert end_of_text is not None, "it was added"
    return Vocabulary(tokenizer, end_of_text, tokenizer.to_str(pretty=True).encode())


class Sample:
    """Documents for a tokenizer to be trained on: those with the lowest numbers, up to so many bytes in all.

    The numbers being hashes of the documents, it is a random sample that their order does not change.
    """

    def __init__(self, size: int = SAMPLE_BYTES) -> None:
        """Makes an empty sample of at most `size` bytes."""
        self._room = size
        self._ceiling = math.inf  # from there on, none is taken: who comes late must not fill gaps
        self._documents: list[tuple[float, bytes]] = []  # a heap, the highest number on top

    def add(self, number: float, text: str) -> None:
        """Takes a document, and lets go of those with the highest numbers that have no room any more."""
        if number >= self._ceiling:
            return
        content = text.encode()
        heapq.heappush(self._documents, (-number, content))
        self._room -= len(content)
        while self._room < 0 and len(self._documents) > 1:
            highest, dropped = heapq.heappop(self._documents)
            self._room += len(dropped)
            self._ceiling = -highest

    def texts(self) -> Iterator[str]:
        """The documents, by their numbers."""
        return (content.decode() for _, content in sorted(self._documents, reverse=True))
