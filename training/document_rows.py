"""Documents as sequences, each of its own length: its first token is never a target, none follows from another's."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from training.errors import UserError
from training.loss import IGNORED
from training.rows import CHECKED_AT_ONCE, Batch, Rows, TokenFile, Tokens

PADDING = 0
"""Any id would do: nothing looks at what stands behind a document's end."""


@dataclass(frozen=True)
class DocumentSummary:
    """What becomes of the documents of a file, in numbers."""

    documents: int
    tokens: int
    """Input tokens of one pass."""
    targets: int
    truncated: int
    """Documents longer than context_length + 1."""
    left_out_tokens: int
    """Tokens behind that, which are neither inputs nor targets."""
    without_targets: int

    def sentence(self, context: int) -> str:
        """The line that is said before training."""
        parts = [f"{self.documents:,} documents with {self.targets:,} targets"]
        if self.truncated:
            parts.append(f"{self.truncated:,} truncated to {context + 1:,} tokens ({self.left_out_tokens:,} left out)")
        if self.without_targets:
            parts.append(f"{self.without_targets:,} without a target")
        return ", ".join(parts)


class DocumentRows:
    """All documents of a token file, each a sequence: what `Rows` is for a packed file.

    Beside the mapped file it holds two numbers per document.
    """

    start = 0

    def __init__(self, file: TokenFile, context: int) -> None:
        """Counts the targets of every document, in one pass over the file.

        Args:
            file: one that has documents.
            context: the model's context_length; of a longer document only the first context + 1 tokens are used.

        Raises:
            UserError: the ends or the mask are malformed, or there is no target at all.
        """
        self.file = file
        self.context = context
        self._bounds: Tokens = np.concatenate([[0], file.document_ends()])
        self._targets = self._count_targets()
        self.summary = self._summarise()
        if not self.summary.targets:
            raise UserError(
                f"{file.path}: none of its {self.count:,} documents has a target within the first {context + 1:,} "
                "tokens (model.context_length + 1); there is nothing to learn or to measure: raise "
                "model.context_length, or correct `loss_mask`"
            )

    @property
    def count(self) -> int:
        """Documents."""
        return len(self._bounds) - 1

    @property
    def stop(self) -> int:
        """Offset behind the last document."""
        return self.file.length

    def span(self, number: int) -> tuple[int, int]:
        """The tokens of the file that a document reads: the first, and the one behind the last."""
        start = int(self._bounds[number])
        return start, min(int(self._bounds[number + 1]), start + self.context + 1)

    def within(self, tokens: int) -> int:
        """How many of the first documents hold at most so many input tokens together; at least one."""
        return max(1, int(np.searchsorted(np.cumsum(self._inputs(np.diff(self._bounds))), tokens, side="right")))

    def target_counts(self, numbers: Sequence[int]) -> Tokens:
        """Targets of the documents with these numbers; (B,)."""
        return self._targets[numbers]

    def input_tokens(self, numbers: Sequence[int]) -> Tokens:
        """Input tokens of the documents with these numbers, without padding; (B,)."""
        places = np.asarray(numbers)
        return self._inputs(self._bounds[places + 1] - self._bounds[places])

    def read(self, numbers: Sequence[int]) -> Batch:
        """Inputs and targets, each (B, T) int64, of the documents with these numbers; T is that of the longest.

        Shorter ones are padded to the right. Attention is causal, so no position of a document can look at what
        stands behind it, and the padding itself has no target: attention needs no mask. Padding is known by its
        position, never by its id, so an end of text stays a target whatever id pads.
        """
        lengths = self.input_tokens(numbers)
        inputs = torch.full((len(lengths), max(1, int(lengths.max()))), PADDING)
        targets = torch.full_like(inputs, IGNORED)
        for row, (start, length) in enumerate(zip(self._bounds[np.asarray(numbers)], lengths, strict=True)):
            tokens = self.file.read(int(start), int(start + length) + 1)
            wanted = np.where(self.file.mask(int(start) + 1, int(start + length) + 1), tokens[1:], IGNORED)
            inputs[row, :length] = torch.from_numpy(tokens[:-1])
            targets[row, :length] = torch.from_numpy(wanted)
        return inputs, targets

    def _inputs(self, lengths: Tokens) -> Tokens:
        inputs: Tokens = np.minimum(lengths - 1, self.context)
        return inputs

    def _count_targets(self) -> Tokens:
        """Targets of each document: those that the mask allows up to its cut, less those up to its first token."""
        if not self.file.has_mask:
            return self._inputs(np.diff(self._bounds))
        firsts = self._bounds[:-1] + 1
        stops = firsts + self._inputs(np.diff(self._bounds))
        targets: Tokens = np.zeros(self.count, dtype=np.int64)
        before = 0
        for begin in range(0, self.file.length + 1, CHECKED_AT_ONCE):
            mask = self.file.mask(begin, min(begin + CHECKED_AT_ONCE, self.file.length))
            sums = np.full(len(mask) + 1, before)
            sums[1:] += np.cumsum(mask)
            for places, sign in ((firsts, -1), (stops, 1)):
                here = slice(*np.searchsorted(places, (begin, begin + CHECKED_AT_ONCE)))
                targets[here] += sign * sums[places[here] - begin]
            before = int(sums[-1])
        return targets

    def _summarise(self) -> DocumentSummary:
        lengths = np.diff(self._bounds)
        inputs = self._inputs(lengths)
        left_out = lengths - 1 - inputs
        return DocumentSummary(
            documents=self.count,
            tokens=int(inputs.sum()),
            targets=int(self._targets.sum()),
            truncated=int(np.count_nonzero(left_out)),
            left_out_tokens=int(left_out.sum()),
            without_targets=int(np.count_nonzero(self._targets == 0)),
        )


AnyRows = Rows | DocumentRows
