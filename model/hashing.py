"""Integer hashes: numbers that look random, yet are the same on every machine and for every library version."""

from typing import Any, overload

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@overload
def hash64(*values: int) -> int: ...  # type: ignore[overload-overlap]


@overload
def hash64(*values: int | NDArray[np.uint64]) -> NDArray[np.uint64]: ...


def hash64(*values: Any) -> Any:
    """A 64-bit hash of integers: the finaliser of SplitMix64 (Steele, Lea and Flood, 2014) after each.

    Arrays among the values, uint64 and of at least one dimension, are broadcast; the hashes are the same.
    """
    state = 0
    for value in values:
        state = (state + value + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ state >> 27) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state


def hash32(counters: Tensor, keys: Tensor) -> Tensor:
    """32 bits for each counter and key, the same on every device: nothing but wrapping integer arithmetic.

    The hash is Wellons's triple32 (github.com/skeeto/hash-prospector, 2018-2020: three rounds found by search, whose
    bias is close to that of random permutations). The first half of the key enters before its first multiplication,
    the second half before its second.

    Args:
        counters: (rows, columns) int32.
        keys: (N, 2) int32.

    Returns:
        (N, rows, columns) int32.
    """
    first, second = keys.view(-1, 1, 1, 2).unbind(-1)
    # A shift of the counter alone, before the key: the same bits as after it, for another key, and one pass fewer.
    bits = (counters ^ _shifted(counters, 17)) ^ first
    bits.mul_(_signed(0xED5AD4BB))
    bits.bitwise_xor_(_shifted(bits, 11)).add_(second).mul_(_signed(0xAC4C1B51))
    bits.bitwise_xor_(_shifted(bits, 15)).mul_(_signed(0x31848BAB))
    return bits.bitwise_xor_(_shifted(bits, 14))


def _shifted(bits: Tensor, places: int) -> Tensor:
    """Shifted right with zeros coming in: for int32 `>>` alone repeats the sign, and `x ^ x >> n` then clears it."""
    return (bits >> places).bitwise_and_((1 << 32 - places) - 1)


def _signed(bits: int) -> int:
    """The int32 with the bits of an unsigned number."""
    return bits - (bits >> 31 << 32)
