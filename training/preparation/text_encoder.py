"""Encodes texts to the bytes of a token file: each distinct word once, where the tokenizer allows it."""

import json
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from tokenizers import Tokenizer

from training.errors import UserError
from training.preparation.dataset_files import checked_tokens, token_type
from training.preparation.vocabulary import SMALLEST, byte_vocabulary

# Unicode's White_Space, which is what GPT-2's pattern means by \s; Python's \s has four control characters more.
BLANKS = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
LETTERS = r"[A-Za-z]++(?![^\x00-\x7f])"  # no other letter may go on behind them
OTHERS = r"[!-@\[-`{-~]++(?<!')(?=[A-Za-z])"  # digits and punctuation; 's is one match
WORD = re.compile(f"[{BLANKS}]*(?:{LETTERS}|{OTHERS}|[^{BLANKS}]+)|[{BLANKS}]+")
"""A word and the blanks before it, or the blanks at the end."""
BORDER = re.compile(f"(?<=[^{BLANKS}])(?=[{BLANKS}])")
PIECE = 2**16
"""Characters that are looked at together: what a tokenizer needs for them is some hundred times as much."""
KEPT = 2**21
"""Characters of words whose tokens are kept."""


class TextEncoder:
    """Encodes texts with a tokenizer, literal special tokens in them as the ordinary texts they are.

    No match of GPT-2's pattern goes on from a word over the blank behind it, nor from letters to punctuation, so a text
    may be cut there without changing its tokens: long documents take no memory, and words that come again no time.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_of_text: int) -> None:
        """Takes a tokenizer for itself, all of whose ids must be below `vocab_size`."""
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        self.reserved = reserved_ids(tokenizer, end_of_text)
        self.item_bytes = token_type("tokenizer.json", vocab_size).itemsize
        self.cuts_at_blanks = cuts_at_blanks(tokenizer)
        self.is_bytes = (
            vocab_size == SMALLEST
            and end_of_text == SMALLEST - 1
            and tokenizer.to_str() == byte_vocabulary().tokenizer.to_str()
        )
        self._known: dict[str, bytes] = {}
        self._room = KEPT

    def encode(self, text: str) -> bytes:
        """The ids of a text, as they lie in a token file.

        Raises:
            UserError: an id is not in the vocabulary, or see `encode_texts`.
        """
        if self.is_bytes:
            return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16).tobytes()
        if not self.cuts_at_blanks:
            return self._encoded([text])[0]
        return b"".join([b"".join(self._words(WORD.findall(piece))) for piece in pieces(text)])

    def _words(self, words: list[str]) -> Iterator[bytes]:
        new = [word for word in set(words) if word not in self._known]
        self._room -= sum(map(len, new))
        if self._room < 0:
            self._known, self._room, new = {}, KEPT, list(set(words))
        self._known.update(zip(new, self._encoded(new), strict=True))
        return map(self._known.__getitem__, words)

    def _encoded(self, texts: list[str]) -> list[bytes]:
        ids = encode_texts(self.tokenizer, texts, self.reserved)
        flat = [token for row in ids for token in row]
        content = checked_tokens("tokenizer.json", np.array(flat, dtype=np.int64), self.vocab_size).tobytes()
        ends = (np.cumsum([0, *map(len, ids)]) * self.item_bytes).tolist()
        return [content[start:end] for start, end in pairwise(ends)]


def reserved_ids(tokenizer: Tokenizer, end_of_text: int) -> frozenset[int]:
    """The ids that no text may give: the end of text and all other special tokens, but for the one of the unknown."""
    model = json.loads(tokenizer.to_str())["model"]
    unknown = (model.get("unk_id"), tokenizer.token_to_id(model.get("unk_token") or ""))
    special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    return frozenset(special.difference(unknown) | {end_of_text})


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str], reserved: frozenset[int]) -> list[list[int]]:
    """The ids of some texts, literal special tokens in them as the ordinary texts they are.

    A model that has such a token as a word would make the token of it, as would an end of text that is none but an
    ordinary token: that is refused rather than that a document ends in its middle.

    Raises:
        UserError: a text gives one of the ids `reserved`, or cannot be encoded.
    """
    tokenizer.encode_special_tokens = True
    try:
        ids = [encoding.ids for encoding in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]
    except Exception as error:  # the library raises bare Exception, as where a model has no unknown token
        raise UserError(
            f"tokenizer.json: cannot encode a text ({error}); each text must have tokens; use a tokenizer that has "
            "tokens for all characters, or one for the unknown"
        ) from error
    for text, row in zip(texts, ids, strict=True):
        if not reserved.isdisjoint(row):
            token = next(filter(reserved.__contains__, row))
            raise UserError(
                f"tokenizer.json: gives the token {token:,}, {tokenizer.id_to_token(token)!r}, within a text that "
                f"begins with {text[:40]!r}; no text may give the end of text or a special token; use a tokenizer that "
                "encodes it as ordinary text, another end_of_text, or leave the text out"
            )
    return ids


def pieces(text: str) -> Iterator[str]:
    """Cuts a long text before blanks that follow a word, a piece at a time."""
    start = 0
    while len(text) - start > PIECE:
        border = BORDER.search(text, start + PIECE)
        if border is None:
            break
        yield text[start : border.start()]
        start = border.start()
    yield text[start:]


def cuts_at_blanks(tokenizer: Tokenizer) -> bool:
    """Whether a tokenizer cuts texts by GPT-2's pattern, and by nothing else before or besides."""
    description = json.loads(tokenizer.to_str())
    before = description["pre_tokenizer"] or {}
    return (
        description["model"]["type"] == "BPE"
        and not description["model"].get("dropout")
        and description["normalizer"] is None
        and before.get("type") == "ByteLevel"
        and bool(before.get("use_regex", True))
        and not before.get("add_prefix_space")
        and all(token["special"] for token in description["added_tokens"])
    )
