"""Validation loss, token-weighted, shared by the processes: the same value for any layout."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from training.config import Precision, RunConfig
from training.data import check_vocabulary, open_validation, provide_dataset, tokenizer_file
from training.distributed import Group, Process
from training.document_rows import AnyRows
from training.errors import UserError
from training.loss import IGNORED, SequenceLoss
from training.restore import load_model
from training.step import autocast, in_units, to_device
from training.tokenizer import load_tokenizer, token_byte_lengths


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
    """
    process = group.process
    parts = [numbers[start : start + microbatch] for start in range(0, len(numbers), microbatch)]
    # Loss sum, targets and bytes: float64 holds the counts exactly up to 2**53.
    totals = torch.zeros(3, dtype=torch.float64, device=process.device)
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad(), autocast(precision, process.device):
            for part in _with_progress(parts[process.rank :: process.world_size], process.is_main):
                inputs, targets = rows.read(part)
                sums = module(to_device(inputs, process.device), to_device(targets, process.device))
                totals[0] += in_units(sums).sum()
                counted = targets[targets != IGNORED]
                totals[1] += counted.numel()
                if byte_lengths is not None:
                    totals[2] += int(byte_lengths[counted.numpy()].sum())
    finally:
        module.train(was_training)
    loss_sum, target_tokens, target_bytes = group.sum(totals).tolist()
    return Evaluated(loss_sum, int(target_tokens), None if byte_lengths is None else int(target_bytes))


def evaluate_checkpoint(folder: Path, config: RunConfig, datasets: Path) -> Evaluated:
    """Evaluates a checkpoint as its run's last validation does: everything, in the run's precision.

    Raises:
        UserError: the checkpoint or the data are not whole, or this machine lacks the precision.
    """
    process, precision = Process.from_environment(), config.precision
    if precision.amp == "fp16" and process.device.type == "cpu":
        raise UserError(
            f"{folder}: its run has precision.amp fp16, which needs a GPU; evaluate it on a machine with one"
        )
    torch.set_float32_matmul_precision(precision.matmul)
    module = SequenceLoss(load_model(folder).to(process.device))
    provide_dataset(config.data, datasets)
    rows = open_validation(config, datasets / config.data.dataset)
    tokenizer = tokenizer_file(config.data, datasets)
    lengths = token_byte_lengths(load_tokenizer(tokenizer), config.model.vocab_size) if tokenizer else None
    with process.group() as group:
        check_vocabulary(rows, config.model.vocab_size, group)
        return evaluate(module, rows, range(rows.count), config.batch.microbatch, precision, group, lengths)


def _with_progress(parts: list[range], shown: bool) -> Iterable[range]:
    return tqdm(parts, "evaluating", leave=False, delay=2, disable=None if shown else True)
