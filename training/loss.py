"""The loss of a step: what each target weighs, and the sums of token losses that the weights multiply.

The gradient of a step is that of sum over targets of (weight of its sequence) x (its loss). DDP averages the
gradients of the processes, so each microbatch is multiplied by the world size before its backward, and by nothing
else. The weights depend only on the numbers of targets, which every process knows before the first forward.
"""

from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (the field's name for it)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model.gpt import GPT

IGNORED = -100
"""Marks a position of the targets that is no target."""

CHUNK_LOGITS = 2**25
"""Most logits held at once, in numbers (128 MiB in float32)."""

Reduction = Literal["token", "microbatch_mean", "sum"]


def target_weights(reduction: Reduction, targets: np.ndarray, microbatch: int) -> np.ndarray:
    """The weight of each target of a step, by sequence.

    token: 1 / N, with N the targets of the whole step. microbatch_mean: 1 / (M m), with m the targets of the
    config's microbatch that the sequence lies in and M the config's microbatches that hold targets: the mean of
    their means. sum: 1.

    Args:
        reduction: the config's loss.reduction.
        targets: number of targets of each sequence of the step, in order, whatever the layout; (sequences,).
        microbatch: the config's microbatch, in sequences.

    Returns:
        (sequences,) float64, finite also for sequences and steps without a target, which have no loss to weigh.
    """
    if reduction == "sum":
        return np.ones(len(targets))
    if reduction == "token":
        return np.full(len(targets), 1 / max(targets.sum(), 1))
    starts = np.arange(0, len(targets), microbatch)
    per_microbatch = np.add.reduceat(targets, starts)
    means = max(np.count_nonzero(per_microbatch), 1)
    weights = 1 / (means * np.maximum(per_microbatch, 1))
    return np.repeat(weights, microbatch)[: len(targets)]


class SequenceLoss(nn.Module):
    """The module that is trained: a model, and the loss of each sequence of a microbatch.

    Where the logits would be large (GPT-2's vocabulary), the head is applied to some positions at a time, and again
    in the backward, so that they are never held all at once.
    """

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor, keys: Tensor | None = None) -> Tensor:
        """Sums of the token losses.

        Args:
            inputs: (B, T) int64 token ids.
            targets: (B, T) int64 token ids, or IGNORED.
            keys: of the dropout masks; see GPT.hidden.

        Returns:
            (B,) float32, or float64 of a model in float64: for each sequence the sum over its targets of the cross
            entropy, in nats.
        """
        hidden = self.model.hidden(inputs, keys).flatten(0, 1)  # (B*T, E)
        rows = max(1, CHUNK_LOGITS // self.model.config.vocab_size)
        if len(hidden) <= rows:
            losses = self._token_losses(hidden, targets.flatten())
        else:
            pairs = zip(hidden.split(rows), targets.flatten().split(rows), strict=True)
            losses = torch.cat(
                [
                    checkpoint(self._token_losses, part, wanted, use_reentrant=False, preserve_rng_state=False)
                    for part, wanted in pairs
                ]
            )
        return losses.view(targets.shape).sum(dim=1)

    def _token_losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        # A view, so that each chunk has its own half-precision copy: autocast would share one copy among all of them,
        # and the head's gradient would be summed over the chunks in half precision.
        head = self.model.head.weight
        logits = F.linear(hidden, head.view_as(head))  # (rows, V)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
