"""Dropout whose masks are a pure function of a place in the run: no random state, the same on any layout and device.

Each sequence of a step has a key for every site of the model: the embedding, and in each layer the two residual
branches and the attention weights of each head. A mask is a hash of the key and of the element's place in the
sequence. So it depends neither on the other sequences of the microbatch nor on the length it is padded to.

In shape comments: B sequences, T tokens of a sequence, E embedding width, H heads.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from model.hashing import hash32, hash64

if TYPE_CHECKING:
    from model.gpt import GPTConfig


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
