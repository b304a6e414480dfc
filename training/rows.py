"""Token files, memory-mapped, and the ranges of them that are trained on or validated on.

A row of context_length tokens needs one more, the target of its last token; neighbouring rows share that token, so
each token of a range is an input once and a target once.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from training.errors import UserError

Tokens = NDArray[np.int64]
Batch = tuple[Tensor, Tensor]

LIMITS = {"U16": 2**16 - 1, "U32": 2**32 - 1, "I32": 2**31 - 1, "I64": 2**63 - 1}
"""Largest id of each type that tokens may have, by its name in a safetensors file."""
FINGERPRINT_PIECES, FINGERPRINT_TOKENS = 64, 8192
CHECKED_AT_ONCE = 2**23
"""Tokens in one piece of the check against the vocabulary."""


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
            raise UserError(f"{path}: not a whole safetensors file ({error}); download or prepare it again") from None
        if "tokens" not in names:
            raise UserError(f"{path}: has no `tokens`, only {', '.join(names) or 'nothing'}; is it a token file?")
        if "document_ends" in names:
            raise UserError(f"{path}: document datasets are not available in this version; use a plain token file")
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

    def read(self, start: int, stop: int) -> Tokens:
        """The tokens of a part of the file, as int64."""
        tokens: Tokens = self._tokens[start:stop].astype(np.int64)
        return tokens

    def fingerprint(self) -> str:
        """A sha256 over the length, the type and some of the tokens, spread evenly: cheap, and telling enough.

        It does not depend on which part of the file is used: a run may go on with more of it.
        """
        digest = hashlib.sha256(f"{self.length} {self.limit}".encode())
        size = min(FINGERPRINT_TOKENS, self.length)
        for start in np.unique(np.linspace(0, self.length - size, FINGERPRINT_PIECES).astype(np.int64)).tolist():
            digest.update(self.read(start, start + size).tobytes())
        return digest.hexdigest()

    def first_bad_token(self, start: int, stop: int, vocab_size: int) -> int | None:
        """Offset of the first id in [start, stop) that is not in [0, vocab_size)."""
        if not self.signed and self.limit < vocab_size:
            return None
        for begin in range(start, stop, CHECKED_AT_ONCE):
            piece = self._tokens[begin : min(begin + CHECKED_AT_ONCE, stop)]
            if int(piece.max()) >= vocab_size or (self.signed and int(piece.min()) < 0):
                return begin + int(np.flatnonzero((piece >= vocab_size) | (piece < 0))[0])
        return None


@dataclass(frozen=True)
class Rows:
    """A range of a token file, cut into sequences."""

    file: TokenFile
    start: int
    count: int
    context: int

    @property
    def stop(self) -> int:
        """Offset behind the range, the last target included."""
        return self.start + self.count * self.context + 1

    def fingerprint(self) -> str:
        """That of the file: by it a run recognises its data."""
        return self.file.fingerprint()

    def read(self, numbers: Sequence[int]) -> Batch:
        """Inputs and targets, each (B, T) int64, of the sequences with these numbers within the range."""
        starts = [self.start + number * self.context for number in numbers]
        rows = torch.from_numpy(np.stack([self.file.read(start, start + self.context + 1) for start in starts]))
        return rows[:, :-1], rows[:, 1:]
