"""Digests that say whether two runs, or two machines, train and validate on the same: facts in place of hopes.

They depend on what is read alone: not on the layout, the machine, the names of files or where in a file a range lies.
"""

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from training.data import TrainingData
from training.document_rows import AnyRows

if TYPE_CHECKING:
    from hashlib import _Hash

WHOLE_TOKENS, WHOLE_SEQUENCES = 2**21, 2**13
"""A run of at most so much, over all epochs, is looked at as a whole."""
SAMPLES = 128
"""Sequences that are looked at of a longer one."""
READ_AT_ONCE = 64


def data_order_digest(data: TrainingData) -> str:
    """A sha256 of which tokens are trained on in which step: inputs, targets and the number of sequences of each step.

    Of a run longer than WHOLE_TOKENS or WHOLE_SEQUENCES it covers SAMPLES sequences, from the first to the last at even
    distances, in the order of training: another order, another dataset and tokens that have moved show, one changed
    token between two samples does not.
    """
    digest = hashlib.sha256(_step_sizes(data).encode())
    total = data.epochs * data.rows.count
    whole = total <= min(WHOLE_SEQUENCES, WHOLE_TOKENS // data.rows.context)
    sampled = total if whole else min(total, SAMPLES)
    places = np.arange(sampled) * (total - 1) // max(1, sampled - 1)
    _add(digest, data.rows, data.sequences_at(places))
    return digest.hexdigest()


def _step_sizes(data: TrainingData) -> str:
    """How many sequences each step has, in as many words for 500,000 steps as for one; equal only if all are."""
    period = data.steps_per_epoch
    last = data.rows.count - (period - 1) * data.global_batch
    first = data.global_batch if period > 1 else last
    return f"{data.total_steps} steps of {first}" + (f", each {period}th of {last}" if last != first else "")


def validation_digest(rows: AnyRows) -> str:
    """A sha256 of all inputs and targets of a validation range, sequence by sequence."""
    digest = hashlib.sha256()
    _add(digest, rows, np.arange(rows.count))
    return digest.hexdigest()


def _add(digest: "_Hash", rows: AnyRows, numbers: NDArray[np.int64]) -> None:
    """Adds sequences: their lengths, their inputs, their targets; padding is left out."""
    for start in range(0, len(numbers), READ_AT_ONCE):
        batch: Sequence[int] = numbers[start : start + READ_AT_ONCE].tolist()
        inputs, targets = rows.read(batch)
        lengths = rows.input_tokens(batch)
        real = torch.arange(inputs.shape[1]) < torch.from_numpy(lengths)[:, None]
        digest.update(lengths.astype("<i8").tobytes())
        for tokens in (inputs, targets):
            digest.update(tokens[real].numpy().astype("<i4").tobytes())
