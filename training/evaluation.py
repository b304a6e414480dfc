"""Validation loss, token-weighted, shared by the processes: the same value for any layout."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from training.config import Precision
from training.distributed import Group
from training.document_rows import AnyRows
from training.loss import IGNORED, SequenceLoss
from training.step import autocast, in_units, to_device

BAR = "{desc}: {percentage:3.0f}%|{bar:10}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]"


class BrokenOffError(Exception):
    """Somebody wishes to stop, so that there is no result; raised on every rank."""


@dataclass(frozen=True)
class Evaluated:
    """Sums over a range; those of two ranges add up."""

    loss_sum: float
    """Sum of the token losses, in nats."""
    target_tokens: int
    target_bytes: int | None
    """UTF-8 bytes the targets stand for; None where the tokenizer does not tell."""

    @property
    def loss(self) -> float:
        """Mean loss in nats per token."""
        return self.loss_sum / self.target_tokens

    @property
    def bits_per_byte(self) -> float | None:
        """Loss in bits per byte of text, which compares across tokenizers."""
        return self.loss_sum / math.log(2) / self.target_bytes if self.target_bytes else None

    def __add__(self, other: "Evaluated") -> "Evaluated":
        both = self.target_bytes is not None and other.target_bytes is not None
        return Evaluated(
            self.loss_sum + other.loss_sum,
            self.target_tokens + other.target_tokens,
            self.target_bytes + other.target_bytes if both else None,  # type: ignore[operator]
        )


def evaluate(
    module: SequenceLoss,
    rows: AnyRows,
    numbers: range,
    microbatch: int,
    precision: Precision,
    group: Group,
    byte_lengths: NDArray[np.int64] | None = None,
    wants_to_stop: Callable[[], bool] = lambda: False,
) -> Evaluated:
    """Evaluates sequences of a range, dropout off. Every rank must call this.

    Args:
        module: the model with its loss, not wrapped in DDP.
        rows: the validation range.
        numbers: its sequences to evaluate.
        microbatch: sequences in one forward.
        precision: the config's.
        group: each process takes every world-size-th microbatch.
        byte_lengths: UTF-8 bytes of each id, for bits per byte; (V,).
        wants_to_stop: asked before each microbatch; what one process wishes, all must, at their next one.

    Raises:
        BrokenOffError: on every rank, if one stopped.
    """
    process = group.process
    parts = [numbers[start : start + microbatch] for start in range(0, len(numbers), microbatch)]
    # Loss sum, targets, bytes and who has stopped: float64 holds the counts exactly up to 2**53.
    totals = torch.zeros(4, dtype=torch.float64, device=process.device)
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad(), autocast(precision, process.device):
            for part in _with_progress(parts[process.rank :: process.world_size], process.is_main):
                if wants_to_stop():
                    totals[3] += 1
                    break
                inputs, targets = rows.read(part)
                _, sums = module(to_device(inputs, process.device), to_device(targets, process.device))
                totals[0] += in_units(sums).sum()
                counted = targets[targets != IGNORED]
                totals[1] += counted.numel()
                if byte_lengths is not None:
                    totals[2] += int(byte_lengths[counted.numpy()].sum())
    finally:
        module.train(was_training)
    loss_sum, target_tokens, target_bytes, stopped = group.sum(totals).tolist()
    if stopped:
        raise BrokenOffError
    return Evaluated(loss_sum, int(target_tokens), None if byte_lengths is None else int(target_bytes))


def _with_progress(parts: list[range], shown: bool) -> Iterable[range]:
    return tqdm(parts, "evaluating", leave=False, delay=2, disable=None if shown else True, bar_format=BAR)
