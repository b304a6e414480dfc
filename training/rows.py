"""Token files, memory-mapped, and the ranges of them that are trained on or validated on.

A row of context_length tokens needs one more, the target of its last token; neighbouring rows share that token, so
each token of a range is an input once and a target once. Documents are rows too, but not of one length: see
document_rows.py.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from training.errors import OneRankError, UserError
from training.foreign_file import instead

Tokens = NDArray[np.int64]
Mask = NDArray[np.bool_]
Batch = tuple[Tensor, Tensor]

LIMITS = {"U16": 2**16 - 1, "U32": 2**32 - 1, "I32": 2**31 - 1, "I64": 2**63 - 1}
"""Largest id of each type that tokens may have, by its name in a safetensors file."""
FINGERPRINT_PIECES, FINGERPRINT_TOKENS = 64, 8192
CHECKED_AT_ONCE = 2**23
"""Tokens in one piece of a pass over a whole file."""
CHECKED_WHOLE = 2**27
"""Ranges of at most so many tokens are checked whole before training (256 MiB of uint16)."""
SAMPLES, SAMPLE_TOKENS = 64, 2**16
"""Of a longer one so many pieces of so many tokens; what lies between them is checked as it is read."""


class TokenFile:
    """The `tokens` of a safetensors file, read from the mapped file as they are asked for."""

    def __init__(self, path: Path) -> None:
        """Opens a file.

        Raises:
            UserError: it is no safetensors file, or its tokens are not a row of integers of a known type.
        """
        self.path = path
        try:
            file = safe_open(path, framework="numpy")
            names = list(file.keys())
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{path}: not a whole safetensors file ({error}{instead(path)}); download or prepare it again"
            ) from None
        if "tokens" not in names:
            raise UserError(f"{path}: has no `tokens`, only {', '.join(names) or 'nothing'}; is it a token file?")
        self._tokens = file.get_slice("tokens")
        dtype, shape = self._tokens.get_dtype(), self._tokens.get_shape()
        if dtype not in LIMITS or len(shape) != 1:
            raise UserError(
                f"{path}: `tokens` has type {dtype} and shape {shape}; "
                "it must be one row of uint16, uint32, int32 or int64"
            )
        self.limit = LIMITS[dtype]
        self.signed = dtype.startswith("I")
        self.length: int = shape[0]
        self.vocab_size: int | None = None
        """Number of ids that `read` may find; None = any."""
        self._ends = file.get_slice("document_ends") if "document_ends" in names else None
        self._mask = file.get_slice("loss_mask") if "loss_mask" in names else None
        self._check_documents()

    @property
    def has_documents(self) -> bool:
        """Whether the tokens are documents, each a sequence of its own."""
        return self._ends is not None

    @property
    def has_mask(self) -> bool:
        """Whether some tokens of the documents may be no targets."""
        return self._mask is not None

    def _check_documents(self) -> None:
        if self._ends is not None:
            dtype, shape = self._ends.get_dtype(), self._ends.get_shape()
            if dtype != "I64" or len(shape) != 1:
                raise UserError(
                    f"{self.path}: `document_ends` has type {dtype} and shape {shape}; it must be one row of int64; "
                    "prepare the dataset again"
                )
            if shape == [0]:
                raise UserError(f"{self.path}: `document_ends` is empty; a dataset needs a document; add some")
        if self._mask is not None:
            dtype, shape = self._mask.get_dtype(), self._mask.get_shape()
            if self._ends is None:
                raise UserError(
                    f"{self.path}: has a `loss_mask` without `document_ends`; only documents can be masked; "
                    "add the ends of the documents, or leave the mask out"
                )
            if dtype != "U8" or shape != [self.length]:
                raise UserError(
                    f"{self.path}: `loss_mask` has type {dtype} and shape {shape}; it must be one row of uint8 as long "
                    f"as `tokens`, {self.length:,}; prepare the dataset again"
                )

    def document_ends(self) -> Tokens:
        """Where each document ends, exclusive; (documents,).

        Raises:
            UserError: they do not cut the tokens into documents of at least one token.
        """
        assert self._ends is not None, "only of a file that has documents"
        ends: Tokens = self._ends[:]
        back = np.flatnonzero(ends <= np.concatenate([[0], ends[:-1]]))  # compared, as a difference could wrap round
        if len(back):
            number = int(back[0])
            before = int(ends[number - 1]) if number else 0
            raise UserError(
                f"{self.path}: `document_ends` has {ends[number]:,} at document {number:,}, after {before:,}; ends are "
                "exclusive and must increase from document to document; prepare the dataset again"
            )
        if ends[-1] != self.length:
            raise UserError(
                f"{self.path}: the last of `document_ends` is {ends[-1]:,}, but there are {self.length:,} tokens; the "
                "last document must end where the tokens do; prepare the dataset again"
            )
        return ends

    def mask(self, start: int, stop: int) -> Mask:
        """Which tokens of a part of the file may be targets: all, where there is no loss_mask.

        Raises:
            UserError: a value is neither 0 nor 1.
        """
        if self._mask is None or start == stop:
            return np.ones(stop - start, dtype=np.bool_)
        values = self._mask[start:stop]
        if values.max() > 1:
            offset = int(np.flatnonzero(values > 1)[0])
            raise UserError(
                f"{self.path}: `loss_mask` is {values[offset]} at offset {start + offset:,}; it must be 1 where a "
                "token is a target and 0 elsewhere; prepare the dataset again"
            )
        mask: Mask = values.astype(np.bool_)
        return mask

    def read(self, start: int, stop: int) -> Tokens:
        """The tokens of a part of the file, as int64.

        Raises:
            OneRankError: one of them is not below `vocab_size`; naming file, offset, id and vocabulary. Other ranks,
                which read other parts, know nothing of it.
        """
        tokens: Tokens = self._tokens[start:stop].astype(np.int64)
        if self.vocab_size is not None and (bad := self._first_outside(tokens, self.vocab_size)) is not None:
            raise OneRankError(
                f"{self.foreign_id(start + bad, self.vocab_size)}; it lies where a start does not look in so long a "
                "file (`isobatch prepare --check` looks everywhere), and the last checkpoint is as it was"
            )
        return tokens

    def fingerprint(self) -> str:
        """A sha256 over the length, the type and some of the tokens, spread evenly: cheap, and telling enough.

        Of documents also over their ends, and the mask of those tokens. It does not depend on which part of the file
        is used: a run may go on with more of it.
        """
        digest = hashlib.sha256(f"{self.length} {self.limit}".encode())
        if self._ends is not None:
            digest.update(self._ends[:].tobytes())
        size = min(FINGERPRINT_TOKENS, self.length)
        starts = np.linspace(0, self.length - size, FINGERPRINT_PIECES).astype(np.int64).tolist()
        for start in dict.fromkeys(starts):
            digest.update(self._tokens[start : start + size].astype(np.int64).tobytes())  # whatever they are
            if self._mask is not None:
                digest.update(self._mask[start : start + size].tobytes())
        return digest.hexdigest()

    def first_bad_token(self, start: int, stop: int, vocab_size: int) -> int | None:
        """Offset of the first id in [start, stop) that is not in [0, vocab_size)."""
        for begin in range(start, stop, CHECKED_AT_ONCE):
            bad = self._first_outside(self._tokens[begin : min(begin + CHECKED_AT_ONCE, stop)], vocab_size)
            if bad is not None:
                return begin + bad
        return None

    def _first_outside(self, tokens: NDArray[np.integer[Any]], vocab_size: int) -> int | None:
        if (not self.signed and self.limit < vocab_size) or not len(tokens):
            return None
        if int(tokens.max()) < vocab_size and (not self.signed or int(tokens.min()) >= 0):
            return None
        return int(np.flatnonzero((tokens >= vocab_size) | (tokens < 0))[0])

    def foreign_id(self, offset: int, vocab_size: int) -> str:
        """What is said of an id that the model does not have, with the size that the dataset's description states."""
        described = described_vocabulary(self.path.parent)
        remedy = (
            f": {described:,} ids; set model.vocab_size={described}" if described and described > vocab_size else ""
        )
        return (
            f"{self.path}: the id {self._tokens[offset : offset + 1][0]} at offset {offset:,} is not in the model's "
            f"vocabulary of {vocab_size:,} (model.vocab_size); the data belongs to another tokenizer{remedy}"
        )


def described_vocabulary(folder: Path) -> int | None:
    """How many ids a dataset's tokenizer has, by its dataset.json; None where that does not say."""
    try:
        size = json.loads((folder / "dataset.json").read_bytes())["vocab_size"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return size if isinstance(size, int) else None


def checked_pieces(start: int, stop: int) -> list[range]:
    """What is looked at of [start, stop) before training: all of it, or where it is long a part, spread evenly.

    So that a file of any length costs a start no more than a second, and a foreign tokenizer is found all the same.
    """
    if stop - start <= CHECKED_WHOLE:
        return [range(begin, min(begin + CHECKED_AT_ONCE, stop)) for begin in range(start, stop, CHECKED_AT_ONCE)]
    begins = np.linspace(start, stop - SAMPLE_TOKENS, SAMPLES).astype(np.int64).tolist()
    return [range(begin, begin + SAMPLE_TOKENS) for begin in begins]


@dataclass(frozen=True)
class Rows:
    """A range of a packed token file, cut into sequences of one length."""

    file: TokenFile
    start: int
    count: int
    context: int

    @property
    def stop(self) -> int:
        """Offset behind the range, the last target included."""
        return self.start + self.count * self.context + 1

    @property
    def summary(self) -> None:
        """Nothing to say: each sequence is whole and full of targets."""
        return None

    def span(self, number: int) -> tuple[int, int]:
        """The tokens of the file that a sequence reads, its last target included: the first, and behind the last."""
        start = self.start + number * self.context
        return start, start + self.context + 1

    def within(self, tokens: int) -> int:
        """How many of the first sequences hold at most so many input tokens together; at least one."""
        return min(self.count, max(1, tokens // self.context))

    def target_counts(self, numbers: Sequence[int]) -> Tokens:
        """Targets of the sequences with these numbers; (B,)."""
        return np.full(len(numbers), self.context)

    def input_tokens(self, numbers: Sequence[int]) -> Tokens:
        """Input tokens of the sequences with these numbers; (B,)."""
        return np.full(len(numbers), self.context)

    def read(self, numbers: Sequence[int]) -> Batch:
        """Inputs and targets, each (B, T) int64, of the sequences with these numbers within the range."""
        starts = [self.start + number * self.context for number in numbers]
        rows = torch.from_numpy(np.stack([self.file.read(start, start + self.context + 1) for start in starts]))
        return rows[:, :-1], rows[:, 1:]
