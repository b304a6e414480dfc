"""Dropout whose masks are a pure function of a place in the run: no random state, the same on any layout and device.

Each sequence of a step has a key for every site of the model: the embedding, and in each layer the two residual
branches and the attention weights of each head. A mask is a hash of the key and of the element's place in the
sequence. So it depends neither on the other sequences of the microbatch nor on the length it is padded to.

In shape comments: B sequences, T tokens of a sequence, E embedding width, H heads, D = E / H.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from model.hashing import hash32, hash64

if TYPE_CHECKING:
    from model.gpt import GPTConfig

QUERY_ROWS = {"cpu": 64, "cuda": 512}
"""Rows of the attention weights that are computed at once: few enough for a CPU's cache, and enough to keep a GPU busy
(on which this was not measured)."""


def dropout_keys(seed: int, step: int, positions: Sequence[int], config: "GPTConfig") -> Tensor:
    """The keys of a microbatch's masks.

    Args:
        seed: the run's seeds.training.
        step: the update, from 0.
        positions: where each sequence of the microbatch stands in the step's global batch, from 0; (B,).
        config: the model's shape.

    Returns:
        (B, sites, 2) int32 on the CPU: both halves of hash64(seed, step, position, site). The sites are the
        embedding, then for each layer the attention's residual branch, the MLP's, and the heads.
    """
    sequences = np.array(positions, dtype=np.uint64)[:, np.newaxis]
    sites = np.arange(site_count(config), dtype=np.uint64)
    hashes = hash64(seed, step, sequences, sites)  # (B, sites)
    return torch.from_numpy(hashes.astype("<u8").view("<i4").reshape(*hashes.shape, 2))


def site_count(config: "GPTConfig") -> int:
    """Number of places in the model where something is dropped."""
    return 1 + config.n_layers * (2 + config.n_heads)


def threshold_of(dropout: float) -> int:
    """How many of the 65,536 numbers of 16 bits mean that an element is dropped."""
    return min(round(dropout * 65536), 65535)


def scale_of(dropout: float) -> float:
    """What the surviving elements are multiplied by: one over the exact rate at which they survive."""
    return 65536 / (65536 - threshold_of(dropout))


def mask_of(keys: Tensor, rows: range, columns: int, stride: int, dropout: float, dtype: torch.dtype) -> Tensor:
    """Which elements survive: 1, else 0.

    Args:
        keys: of one site of each sequence; (N, 2) int32.
        rows: rows of the site's whole mask.
        columns: the first columns of it.
        stride: columns of the whole mask, on which the place of an element depends.
        dropout: probability of dropping an element.
        dtype: of the result.

    Returns:
        (N, rows, columns).
    """
    # One hash decides on two elements side by side.
    row = torch.arange(rows.start, rows.stop, dtype=torch.int32, device=keys.device) * -(-stride // 2)
    counters = row.unsqueeze(1) + torch.arange(-(-columns // 2), dtype=torch.int32, device=keys.device)
    numbers = hash32(counters, keys).view(torch.int16)[..., :columns]
    return numbers.ge_(threshold_of(dropout) - 32768).to(dtype)


def drop(x: Tensor, keys: Tensor, dropout: float) -> Tensor:
    """Dropout of each position's vector: (B, T, E) -> (B, T, E), with keys (B, 2)."""
    return x * _mask_like(x, keys, dropout) * scale_of(dropout)


def add_branch(x: Tensor, branch: Tensor, keys: Tensor | None, dropout: float) -> Tensor:
    """The residual stream and a branch's output, dropped where there are keys (B, 2): twice (B, T, E) -> (B, T, E)."""
    if keys is None:
        return x + branch
    # The scale goes into the sum, in the precision of the stream: in bf16, 1 / 0.9 would be 0.16 % too small.
    return torch.add(x, branch * _mask_like(branch, keys, dropout), alpha=scale_of(dropout))


def _mask_like(x: Tensor, keys: Tensor, dropout: float) -> Tensor:
    return mask_of(keys, range(x.shape[1]), x.shape[2], x.shape[2], dropout, x.dtype)


def attend(query: Tensor, key: Tensor, value: Tensor, keys: Tensor, dropout: float, context_length: int) -> Tensor:
    """Causal attention with dropout of the attention weights.

    Keeps nothing of size T x T for the backward: weights and masks are made again there, some rows at a time.

    Args:
        query: (B, H, T, D).
        key: (B, H, T, D).
        value: (B, H, T, D).
        keys: (B, H, 2) int32.
        dropout: probability of dropping a weight.
        context_length: the model's; T is at most this.

    Returns:
        (B, H, T, D).
    """
    flat = (tensor.flatten(0, 1) for tensor in (query, key, value, keys))  # (B, H, ...) -> (B*H, ...)
    apply: Callable[..., Tensor] = _Attention.apply  # typed in some versions of torch only
    return apply(*flat, dropout, context_length).view(query.shape)


class _Attention(torch.autograd.Function):
    """The same with the heads of all sequences in one dimension: N = B*H.

    The backward is FlashAttention's (Dao et al., 2022, appendix B), but for the rows' normalisers: a block holds whole
    rows, so their softmax is taken again.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, keys: Tensor, dropout: float, context_length: int
    ) -> Tensor:
        output = torch.empty_like(query)  # (N, T, D)
        with torch.autocast(query.device.type, enabled=False):
            for rows in _blocks(query):
                weights = _weights(query, key, rows)
                weights.mul_(mask_of(keys, rows, rows.stop, context_length, dropout, weights.dtype))
                mixed = _product(weights.to(value.dtype), value[:, : rows.stop], scale_of(dropout))
                output[:, rows.start : rows.stop] = mixed
        ctx.save_for_backward(query, key, value, keys, output)
        ctx.dropout, ctx.context_length = dropout, context_length
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, keys, output = ctx.saved_tensors
        exact, scale = _exact(query.dtype), scale_of(ctx.dropout)
        score_scale = scale * query.shape[-1] ** -0.5
        # In the slopes below, P * (mask * dP - rest), the masks' scale is taken out, to be put into the products.
        rest = (gradient.to(exact) * output.to(exact)).sum(-1, keepdim=True) / scale  # (N, T, 1)
        of_query = torch.empty_like(query)
        of_key, of_value = (torch.zeros_like(tensor, dtype=exact) for tensor in (key, value))
        with torch.autocast(query.device.type, enabled=False):
            for rows in _blocks(query):
                mine, seen = slice(rows.start, rows.stop), slice(rows.stop)
                weights = _weights(query, key, rows)
                mask = mask_of(keys, rows, rows.stop, ctx.context_length, ctx.dropout, exact)
                slopes = torch.bmm(gradient[:, mine], value[:, seen].transpose(1, 2)).to(exact)
                slopes.mul_(mask).sub_(rest[:, mine]).mul_(weights)
                dropped, slopes = weights.mul_(mask).to(query.dtype), slopes.to(query.dtype)
                of_query[:, mine] = _product(slopes, key[:, seen], score_scale)
                of_key[:, seen].add_(torch.bmm(slopes.transpose(1, 2), query[:, mine]), alpha=score_scale)
                of_value[:, seen].add_(torch.bmm(dropped.transpose(1, 2), gradient[:, mine]), alpha=scale)
        return of_query, of_key.to(key.dtype), of_value.to(value.dtype), None, None, None


def _blocks(query: Tensor) -> Iterator[range]:
    """Rows of the attention weights, some at a time; query is (N, T, D)."""
    length, size = query.shape[1], QUERY_ROWS[query.device.type]
    return (range(start, min(start + size, length)) for start in range(0, length, size))


def _weights(query: Tensor, key: Tensor, rows: range) -> Tensor:
    """Attention weights of some rows over the columns that they see, before dropout: (N, rows, rows.stop)."""
    # As in a fused kernel, scores are not rounded to a half type before the softmax.
    mine, seen = (part.to(_exact(query.dtype)) for part in (query[:, rows.start : rows.stop], key[:, : rows.stop]))
    scores = _product(mine, seen.transpose(1, 2), query.shape[-1] ** -0.5)
    future = torch.full((len(rows), len(rows)), -torch.inf, dtype=scores.dtype, device=scores.device).triu_(1)
    scores[:, :, rows.start :].add_(future)
    return torch.softmax(scores, dim=-1)


def _product(one: Tensor, other: Tensor, scale: float) -> Tensor:
    """Products of matrices, times a number that is not rounded to their type."""
    return torch.baddbmm(one.new_empty(1), one, other, beta=0, alpha=scale)


def _exact(dtype: torch.dtype) -> torch.dtype:
    """Where sums are taken: float32 for the half types, else the type itself."""
    return torch.promote_types(dtype, torch.float32)
