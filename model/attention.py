"""Causal attention: torch's kernels, and our own for dropout, whose masks follow from keys, and on some CPUs.

In shape comments: B sequences, T tokens of a sequence, H heads, D their width.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (the field's name for it)
from torch import Tensor
from torch.autograd.function import once_differentiable

from model.dropout import mask_of, scale_of
from model.half_products import product_type, sum_type

QUERY_ROWS = {"cpu": 64, "cuda": 512}
"""Rows of the attention weights that are computed at once: few enough for a CPU's cache, and enough to keep a GPU busy
(on which this was not measured)."""


BLOCKS_ARE_FASTER = {"cpu": torch.backends.cpu.get_cpu_capability().startswith("AVX512")}
"""Where our own products take less time than torch's kernel, which makes little of a CPU's wider vectors: on two cores
of a Zen 4 a layer of 8 x 6 x 256 tokens took 17 ms so and 24 ms by torch in float32, 10 and 24 ms in bf16."""


def attend(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor | None = None, dropout: float = 0, context_length: int = 0
) -> Tensor:
    """Causal attention, with dropout of the attention weights where there are keys.

    Keeps nothing of size T x T for the backward: weights and masks are made again there, some rows at a time.

    Args:
        query: (B, H, T, D).
        key: (B, H, T, D).
        value: (B, H, T, D).
        keys: (B, H, 2) int32; with them the other two matter.
        dropout: probability of dropping a weight.
        context_length: the model's; T is at most this.

    Returns:
        (B, H, T, D).
    """
    if keys is None and not BLOCKS_ARE_FASTER.get(query.device.type):
        return _by_torch(query, key, value)
    flat = (tensor.flatten(0, 1) for tensor in (query, key, value))  # (B, H, ...) -> (B*H, ...)
    apply: Callable[..., Tensor] = _Attention.apply  # typed in some versions of torch only
    return apply(*flat, None if keys is None else keys.flatten(0, 1), dropout, context_length).view(query.shape)


def _by_torch(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    dtype, device = query.dtype, query.device.type
    exact = product_type(dtype, device)
    # is_causal instead of a mask: nothing to store, to broadcast, or to fit to the context length.
    if exact == dtype:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)
    with torch.autocast(device, enabled=False):
        return F.scaled_dot_product_attention(query.to(exact), key.to(exact), value.to(exact), is_causal=True).to(dtype)


class _Attention(torch.autograd.Function):
    """The same with the heads of all sequences in one dimension: N = B*H.

    The backward is FlashAttention's (Dao et al., 2022, appendix B), but for the rows' normalisers: a block holds whole
    rows, so their softmax is taken again.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, keys: Tensor | None, dropout: float, context_length: int
    ) -> Tensor:
        output = torch.empty_like(query)  # (N, T, D)
        with torch.autocast(query.device.type, enabled=False):
            for rows in _blocks(query):
                weights = _weights(query, key, rows)
                if keys is not None:
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
        exact, scale = sum_type(query.dtype), scale_of(ctx.dropout)
        score_scale = scale * query.shape[-1] ** -0.5
        # In the slopes below, P * (mask * dP - rest), the masks' scale is taken out, to be put into the products.
        rest = (gradient.to(exact) * output.to(exact)).sum(-1, keepdim=True) / scale  # (N, T, 1)
        of_query = torch.empty_like(query)
        of_key, of_value = (torch.zeros_like(tensor, dtype=exact) for tensor in (key, value))
        with torch.autocast(query.device.type, enabled=False):
            for rows in _blocks(query):
                mine, seen = slice(rows.start, rows.stop), slice(rows.stop)
                weights = _weights(query, key, rows)
                slopes = _product(gradient[:, mine], value[:, seen].transpose(1, 2)).to(exact)
                mask = None
                if keys is not None:
                    mask = mask_of(keys, rows, rows.stop, ctx.context_length, ctx.dropout, exact)
                    slopes.mul_(mask)
                slopes.sub_(rest[:, mine]).mul_(weights)
                if mask is not None:
                    weights.mul_(mask)
                dropped, slopes = weights.to(query.dtype), slopes.to(query.dtype)
                of_query[:, mine] = _product(slopes, key[:, seen], score_scale)
                of_key[:, seen].add_(_product(slopes.transpose(1, 2), query[:, mine]), alpha=score_scale)
                of_value[:, seen].add_(_product(dropped.transpose(1, 2), gradient[:, mine]), alpha=scale)
        return of_query, of_key.to(key.dtype), of_value.to(value.dtype), None, None, None


def _blocks(query: Tensor) -> Iterator[range]:
    """Rows of the attention weights, some at a time; query is (N, T, D)."""
    length, size = query.shape[1], QUERY_ROWS[query.device.type]
    return (range(start, min(start + size, length)) for start in range(0, length, size))


def _weights(query: Tensor, key: Tensor, rows: range) -> Tensor:
    """Attention weights of some rows over the columns that they see, before dropout: (N, rows, rows.stop)."""
    # As in a fused kernel, scores are not rounded to a half type before the softmax.
    mine, seen = (part.to(sum_type(query.dtype)) for part in (query[:, rows.start : rows.stop], key[:, : rows.stop]))
    scores = _product(mine, seen.transpose(1, 2), query.shape[-1] ** -0.5)
    future = torch.full((len(rows), len(rows)), -torch.inf, dtype=scores.dtype, device=scores.device).triu_(1)
    scores[:, :, rows.start :].add_(future)
    return torch.softmax(scores, dim=-1)


def _product(one: Tensor, other: Tensor, scale: float = 1.0) -> Tensor:
    """Products of matrices, times a number that is not rounded to their type."""
    dtype, exact = one.dtype, product_type(one.dtype, one.device.type)
    return torch.baddbmm(one.new_empty(1, dtype=exact), one.to(exact), other.to(exact), beta=0, alpha=scale).to(dtype)
