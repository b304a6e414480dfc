"""The loss of a step: what each target weighs, and the sums of token losses that the weights multiply.

The gradient of a step is that of sum over targets of (weight of its sequence) x (its loss). DDP averages the
gradients of the processes, so each microbatch is multiplied by the world size before its backward, and by nothing
else. The weights depend only on the numbers of targets, which every process knows before the first forward.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (the field's name for it)
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from model.gpt import GPT
from model.half_products import product_type, sum_type, working_type

IGNORED = -100
"""Marks a position of the targets that is no target."""

CHUNK_ROWS = {"cpu": 1024, "cuda": 2048}
"""Positions whose logits are held at once (on a GPU this was not measured)."""

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
    """The module that is trained: a model, and the loss of each sequence of a microbatch."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, inputs: Tensor, targets: Tensor, keys: Tensor | None = None, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """What to call backward on, and the sums of the token losses.

        Args:
            inputs: (B, T) int64 token ids.
            targets: (B, T) int64 token ids, or IGNORED.
            keys: of the dropout masks; see GPT.hidden.
            weights: of the targets, by sequence, times the scale of the loss where there is one; (B,); None = 1.

        Returns:
            The sum over all targets of weight x loss, (), and, without a gradient, for each sequence the sum over its
            targets of the cross entropy in nats, (B,); both float32, or float64 of a model in float64.
        """
        hidden = self.model.hidden(inputs, keys).flatten(0, 1)  # (B*T, E)
        head, dtype = self.model.head.weight, working_type(hidden)
        if weights is None:
            weights = torch.ones(len(targets), device=targets.device)
        weights = weights.to(sum_type(dtype)).unsqueeze(1).expand(targets.shape).flatten()  # (B*T,)
        weighted, losses = head_loss(hidden, head, targets.flatten(), weights, dtype)
        return weighted, losses.view(targets.shape).sum(dim=1)


def head_loss(
    hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Applies the head to some positions at a time.

    Args:
        hidden: (N, E).
        head: (V, E).
        targets: (N,) int64, or IGNORED.
        weights: of the targets; (N,), in float32 at least.
        dtype: in which products are taken; what follows from the logits is float32 at least.

    Returns:
        The sum of the weighted losses, (), and the losses, (N,), 0 where a target is IGNORED and without a gradient.
    """
    if torch.is_grad_enabled():
        apply: Callable[..., tuple[Tensor, Tensor]] = _HeadLoss.apply  # typed in some versions of torch only
        return apply(hidden, head, targets, weights, dtype)
    losses = _losses(hidden, head, targets, dtype, None)
    return weights @ losses, losses


class _HeadLoss(torch.autograd.Function):
    """The same as a function of autograd's.

    What the losses weigh is known, so the gradient is formed in the forward, while a chunk's logits are there: they
    are computed once and never held all at once.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        gradients = _Gradients(weights, torch.empty_like(hidden), torch.zeros_like(head, dtype=sum_type(dtype)))
        losses = _losses(hidden, head, targets, dtype, gradients)
        ctx.save_for_backward(gradients.of_hidden, gradients.of_head)
        ctx.head_dtype = head.dtype
        ctx.mark_non_differentiable(losses)
        return weights @ losses, losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, of_head = ctx.saved_tensors
        return of_hidden * upstream, (of_head * upstream).to(ctx.head_dtype), None, None, None


@dataclass(frozen=True)
class _Gradients:
    """Of the sum of the weighted losses."""

    weights: Tensor
    """(N,)."""
    of_hidden: Tensor
    """(N, E), written chunk by chunk."""
    of_head: Tensor
    """(V, E), added up over the chunks; float32 also where the products are of a half type."""


def _losses(hidden: Tensor, head: Tensor, targets: Tensor, dtype: torch.dtype, gradients: _Gradients | None) -> Tensor:
    """The losses, and where it is wanted, their gradient: written to what is given for it."""
    losses, size = [], CHUNK_ROWS[hidden.device.type]
    with torch.autocast(hidden.device.type, enabled=False):
        exact = product_type(dtype, hidden.device.type)
        head = head.to(dtype).to(exact)
        for start in range(0, len(hidden), size):
            rows = slice(start, start + size)
            part, wanted = hidden[rows].to(dtype).to(exact), targets[rows]
            logits = (part @ head.t()).to(dtype)  # (rows, V)
            table = torch.softmax(logits, dim=-1, dtype=sum_type(dtype))
            # From the likeliest token: how far behind it the target is, and the ln of the likeliest one's probability.
            # log_softmax would give it too, but then the slopes need exp, which on CPUs takes many times as long as
            # softmax where its results are denormal.
            target = F.nll_loss(logits, wanted, ignore_index=IGNORED, reduction="none")  # its logit, negative
            behind = logits.amax(-1).to(table.dtype) + target.to(table.dtype)
            loss = behind - table.amax(-1).log()
            loss.masked_fill_(wanted == IGNORED, 0)
            losses.append(loss)
            if gradients is None:
                continue
            # p - 1 at the target, p elsewhere, times the weight.
            places = wanted.clamp(min=0).unsqueeze(1)
            table.scatter_(1, places, torch.expm1(-loss).unsqueeze(1))
            table.mul_(gradients.weights[rows].masked_fill(wanted == IGNORED, 0).unsqueeze(1))
            slopes = table.to(dtype).to(exact)
            gradients.of_hidden[rows] = slopes @ head
            if exact == gradients.of_head.dtype:
                gradients.of_head.addmm_(slopes.t(), part)
            else:
                gradients.of_head.add_(slopes.t() @ part)
    return torch.cat(losses)
