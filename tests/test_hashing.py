"""The integer hashes."""

import numpy as np
import torch

from model.hashing import hash32, hash64

MANY = torch.tensor([[42, -7], [0, 0], [-(2**31), 2**31 - 1]], dtype=torch.int32)


def test_hash64_is_the_one_of_all_earlier_versions() -> None:
    """A change would change the data order and the dropout of every run."""
    assert [hash64(), hash64(0), hash64(42, 1, 7)] == [0, 16294208416658607535, 15381302289769439799]


def test_hash64_of_arrays_is_that_of_their_elements() -> None:
    """Broadcast, with numbers of 64 bits before, between and after them."""
    rows, columns = np.array([[0], [2**64 - 1]], dtype=np.uint64), np.array([0, 5, 2**63], dtype=np.uint64)
    found = hash64(2**64 - 1, rows, 7, columns, 2**63)
    assert found.dtype == np.uint64
    assert found.tolist() == [
        [hash64(2**64 - 1, int(row), 7, int(column), 2**63) for column in columns] for row in rows[:, 0]
    ]


def triple32(counter: int, first: int, second: int) -> int:
    """Wellons's triple32 with a key, in plain unsigned arithmetic."""
    bits = (counter ^ counter >> 17 ^ first) * 0xED5AD4BB % 2**32
    bits = ((bits ^ bits >> 11) + second) * 0xAC4C1B51 % 2**32
    bits = (bits ^ bits >> 15) * 0x31848BAB % 2**32
    return bits ^ bits >> 14


def test_hash32_in_plain_arithmetic() -> None:
    """Also where numbers have the sign bit, which int32 shifts in; without a key it is the published function."""
    counters = torch.tensor([[0, 1, 2, 2**19 + 77], [2**31 - 1, -1, -(2**31), 2**20]], dtype=torch.int32)
    found = hash32(counters, MANY)
    assert (found.dtype, found.shape) == (torch.int32, (3, 2, 4))
    for values, key in zip(found.flatten(1).tolist(), MANY.tolist(), strict=True):
        for value, counter in zip(values, counters.flatten().tolist(), strict=True):
            assert value % 2**32 == triple32(counter % 2**32, key[0] % 2**32, key[1] % 2**32)


def test_hash32_is_the_one_of_all_earlier_versions() -> None:
    """A change would change the dropout of every run."""
    assert hash32(torch.tensor([[0, 1, 12345]], dtype=torch.int32), MANY).flatten().tolist() == [
        -393092049,
        -78002302,
        -877498670,
        0,
        69681622,
        -117118105,
        1369456445,
        -1645440173,
        2130709998,
    ]


def test_every_bit_of_hash32_is_set_half_of_the_time() -> None:
    """The sign bit is what a shift that repeats it would clear: of 786,432 hashes, each bit within 4.5 deviations."""
    counters = torch.arange(2**18, dtype=torch.int32).view(2**9, 2**9)
    numbers = hash32(counters, MANY)
    for bit in range(32):
        share = (numbers >> bit & 1).sum(dtype=torch.int64).item() / numbers.numel()
        assert abs(share - 0.5) < 4.5 * 0.5 / numbers.numel() ** 0.5, bit
