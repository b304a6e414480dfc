"""The tokenizer of a new dataset: one that exists, one trained on its documents, or bytes."""

import hashlib
import heapq
import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

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
PROBE = "Az 09 .,; ß ж ש 字 가 🙂"
"""Of what texts are made; no tokenizer may leave a part of it out."""


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


def read_vocabulary(path: Path, for_texts: bool = False) -> Vocabulary:
    """Reads a tokenizer.json, or a folder with one or with the two files of a byte-level BPE.

    The end of text is the one that a dataset.json beside it names, or else `<|endoftext|>`.

    Args:
        path: of the file or the folder.
        for_texts: whether texts will be encoded with it for the first time, so that it must lose nothing of them.

    Raises:
        UserError: there is none, it cannot be read, lacks the end of text, or would lose parts of texts.
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
        if json.loads(content)["model"].get("dropout"):  # who encodes with the dataset's copy gets the same tokens
            content = tokenizer.to_str(pretty=True).encode()
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
    if for_texts:
        refuse_what_loses_text(tokenizer, path)
    return Vocabulary(tokenizer, end_of_text, content)


def refuse_what_loses_text(tokenizer: Tokenizer, path: Path) -> None:
    """Refuses a tokenizer that leaves out, without a word, what it has no token for.

    A BPE does so that has neither a token for the unknown nor all the bytes; so does a normalizer that deletes. Models
    of other kinds without a token for the unknown fail where they would need it.

    Args:
        tokenizer: any.
        path: how the user knows it.

    Raises:
        UserError: says what would be lost.
    """
    ids = tokenizer.get_vocab()
    if max(ids.values(), default=0) > 2 * len(ids) + 2**20:  # to write it down, the library counts through all of them
        raise UserError(
            f"{path}: has {len(ids):,} tokens, but ids up to {max(ids.values()):,}; number them without large gaps"
        )
    description = json.loads(tokenizer.to_str())
    model = description["model"]
    if model["type"] == "BPE" and model.get("unk_token") not in ids:
        before = json.dumps([description["pre_tokenizer"], description["normalizer"]])
        needed = {f"<0x{byte:02X}>" for byte in range(256)} if model.get("byte_fallback") else set()
        if '"type": "ByteLevel"' in before:
            needed = set(pre_tokenizers.ByteLevel.alphabet())
        if not needed or needed - ids.keys():
            what = f"lacks {len(needed - ids.keys())} of the 256 bytes" if needed else "does not know all characters"
            raise UserError(
                f"{path}: is a BPE that {what} and has no token for the unknown, so that parts of the texts would "
                "disappear; use one that has all bytes (train it with an initial_alphabet), or an unk_token"
            )
    try:
        offsets = tokenizer.encode(PROBE, add_special_tokens=False).offsets
    except Exception:  # the library's, of models without a token for the unknown: told of the text that needs it
        return
    kept = {place for start, end in offsets for place in range(start, end)}
    lost = [char for place, char in enumerate(PROBE) if place not in kept and not char.isspace()]
    if lost:
        raise UserError(
            f"{path}: leaves {' '.join(lost)} out of a text, by its normalizer or pre_tokenizer; texts must be kept "
            "whole: use a tokenizer that has tokens for all of them"
        )


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
