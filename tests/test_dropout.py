"""Dropout masks: what they depend on, how even and independent they are, and what is computed with them.

Statistical bounds are in standard deviations. The masks are fixed, so a bound that holds once holds always.
"""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from model.dropout import add_branch, drop, dropout_keys, mask_of, scale_of, site_count, threshold_of
from model.gpt import GPTConfig, build_gpt
from model.hashing import hash64

CONFIG = GPTConfig(vocab_size=50, context_length=13, emb_dim=18, n_heads=3, n_layers=2, dropout=0.3)
"""Odd in places: a context of 13, heads of 6, blocks of 5 places."""


def ids_of(sequences: int, length: int) -> Tensor:
    return torch.arange(sequences * length).mul(7).remainder(CONFIG.vocab_size).view(sequences, length)


# Keys


def test_the_keys_are_the_halves_of_hash64() -> None:
    keys = dropout_keys(42, 3, [0, 5], CONFIG)
    assert (keys.dtype, keys.shape) == (torch.int32, (2, 1 + 2 * (2 + 3), 2))
    for row, position in enumerate((0, 5)):
        for site in range(11):
            low, high = (half % 2**32 for half in keys[row, site].tolist())
            assert high << 32 | low == hash64(42, 3, position, site)
    assert site_count(GPTConfig()) == 1 + 12 * 14


def test_no_two_keys_are_alike() -> None:
    found = [
        dropout_keys(seed, step, range(8), CONFIG).flatten(0, 1) for seed in (0, 1, 2**63) for step in (0, 1, 10**6)
    ]
    assert len(torch.cat(found).unique(dim=0)) == 9 * 8 * 11


@pytest.mark.parametrize("sizes", [(8,), (4, 4), (3, 3, 2), (1,) * 8])
def test_a_sequences_masks_are_the_same_in_any_microbatch(sizes: tuple[int, ...]) -> None:
    """8 = 1 x 8 = 2 x 4 = 3 + 3 + 2: keys bit for bit, and so what the network makes of them."""
    model = build_gpt(CONFIG, seed=1).double()
    whole = dropout_keys(42, 7, range(8), CONFIG)
    with torch.no_grad():
        expected = model.hidden(ids_of(8, 13), whole)
        start = 0
        for size in sizes:
            keys = dropout_keys(42, 7, range(start, start + size), CONFIG)
            assert torch.equal(keys, whole[start : start + size])
            found = model.hidden(ids_of(8, 13)[start : start + size], keys)
            torch.testing.assert_close(found, expected[start : start + size], rtol=0, atol=1e-13)
            start += size


# Masks


def test_masks_are_those_of_all_earlier_versions() -> None:
    """A change would change every run with dropout."""
    keys = dropout_keys(42, 1, [3], CONFIG)[:, 4]
    rows = ["".join(map(str, row)) for row in mask_of(keys, range(9, 13), 13, 13, 0.5, torch.int64)[0].tolist()]
    assert rows == ["0011110100001", "0111010111111", "0000010011001", "1001110111101"]
    assert dropout_keys(42, 1, [3], CONFIG)[0, [0, 4, 10]].tolist() == [
        [117988201, -962230166],
        [885358554, 97130767],
        [930308143, -458798387],
    ]


@pytest.mark.parametrize("stride", [12, 13])
def test_a_mask_does_not_depend_on_the_length_of_the_microbatch(stride: int) -> None:
    keys = dropout_keys(1, 0, range(2), CONFIG)[:, 3]
    whole = mask_of(keys, range(stride), stride, stride, 0.4, torch.float32)
    for rows in (range(1), range(2, 7), range(11, 12)):
        for columns in range(1, stride + 1):
            part = mask_of(keys, rows, columns, stride, 0.4, torch.float32)
            assert torch.equal(part, whole[:, rows.start : rows.stop, :columns])


def test_a_longer_microbatch_changes_nothing_for_a_sequence() -> None:
    """Padded to 13 tokens, a sequence of 6 has the same hidden states and gradients."""
    keys = dropout_keys(42, 0, range(2), CONFIG)
    found = []
    for length in (6, 9, 13):
        model = build_gpt(CONFIG, seed=1).double()
        ids = ids_of(2, 13)[:, :length]
        hidden = model.hidden(ids, keys)[:, :6]
        hidden.square().sum().backward()
        found.append([hidden] + [p.grad for p in model.parameters() if p.grad is not None])
    for padded in found[1:]:
        for one, other in zip(found[0], padded, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-11, atol=1e-11)


def many_masks(dropout: float, size: int = 256) -> Tensor:
    """Masks of size x size by seed, step, sequence, layer and kind of site (two branches, two heads), as int16."""
    config = GPTConfig(context_length=size, emb_dim=size, n_heads=2, n_layers=4)
    keys = torch.stack(
        [
            torch.stack([dropout_keys(seed, step, range(4), config)[:, 1:].unflatten(1, (4, 4)) for step in (0, 1)])
            for seed in (42, 43)
        ]
    )  # (2, 2, 4, 4, 4, 2)
    masks = mask_of(keys.view(-1, 2), range(size), size, size, dropout, torch.int16)
    return masks.view(*keys.shape[:-1], size, size)


@pytest.mark.parametrize("dropout", [0.01, 0.1, 0.5])
def test_the_rate(dropout: float) -> None:
    """Over 16.8 M decisions: the exact rate within 4.5 deviations, and so within 0.1 % of what is asked for."""
    masks = many_masks(dropout)
    kept = 1 / scale_of(dropout)
    assert kept == pytest.approx(1 - dropout, abs=1e-5)
    deviation = math.sqrt(kept * (1 - kept) / masks.numel())
    assert masks.numel() == 2**24
    assert abs(masks.sum(dtype=torch.int64).item() / masks.numel() - kept) < 4.5 * deviation < 1e-3


def test_rates_near_0_and_1() -> None:
    assert (threshold_of(1e-9), scale_of(1e-9)) == (0, 1.0)
    assert (threshold_of(0.999999), scale_of(0.999999)) == (65535, 65536.0)
    keys = dropout_keys(1, 0, range(2), CONFIG)[:, 0]
    assert mask_of(keys, range(13), 13, 13, 1e-9, torch.float32).min() == 1
    assert mask_of(keys, range(13), 13, 13, 0.999999, torch.float32).max() == 0


def z(one: Tensor, other: Tensor, kept: float) -> float:
    """How far two sets of masks are from independent, in deviations."""
    both = (one & other).sum(dtype=torch.int64).item() / one.numel()
    single = (one.sum(dtype=torch.int64) + other.sum(dtype=torch.int64)).item() / one.numel()
    covariance = both - kept * single + kept**2
    return covariance / (kept * (1 - kept)) * math.sqrt(one.numel())


@pytest.mark.parametrize("dropout", [0.1, 0.5])
def test_masks_are_independent(dropout: float) -> None:
    """Neighbours, and the same place in another seed, step, sequence, layer, site: 27 values within 4 deviations."""
    masks, kept = many_masks(dropout, size=128), 1 / scale_of(dropout)
    found = {}
    for distance in (1, 2, 64):
        found[f"column + {distance}"] = z(masks[..., distance:], masks[..., :-distance], kept)
        found[f"row + {distance}"] = z(masks[..., distance:, :], masks[..., :-distance, :], kept)
    found["the halves of a hash"] = z(masks[..., 0::2], masks[..., 1::2], kept)
    for dimension, name in enumerate(("seed", "step", "sequence", "layer", "site")):
        count = masks.shape[dimension]
        for first in range(count):
            for second in range(first + 1, count):
                pair = (masks.select(dimension, first), masks.select(dimension, second))
                found[f"{name} {first} and {second}"] = z(*pair, kept)
    assert len(found) == 7 + 1 + 1 + 3 * 6
    assert masks.numel() == 2**22
    assert {name: value for name, value in found.items() if abs(value) > 4} == {}


def test_masks_of_any_two_keys_are_independent() -> None:
    """128,271 pairs of masks: the correlations, in deviations, are spread and as seldom large as those of chance."""
    keys = dropout_keys(7, 0, range(3), GPTConfig()).flatten(0, 1)
    signs = 2 * mask_of(keys, range(64), 256, 256, 0.5, torch.float32).flatten(1) - 1
    values = (signs @ signs.T / math.sqrt(signs.shape[1]))[torch.ones(len(keys), len(keys)).triu(1).bool()]
    assert len(values) == 128_271
    assert abs(values.mean().item()) < 4.5 / math.sqrt(len(values))
    assert abs(values.std().item() - 1) < 4.5 / math.sqrt(2 * len(values))
    by_chance = len(values) * math.erfc(4 / math.sqrt(2))  # 8
    assert (values.abs() > 4).sum().item() < by_chance + 4.5 * math.sqrt(by_chance)
    assert values.abs().max() < 6


# What is computed with them


def test_the_scale_is_exact_where_the_branch_is_not() -> None:
    """In bf16, 1 / 0.9 would be 1.109375: the residual stream is float32 under autocast, so is what is added to it."""
    keys = dropout_keys(1, 0, range(4), CONFIG)[:, 0]
    added = add_branch(torch.zeros(4, 13, 18), torch.ones(4, 13, 18, dtype=torch.bfloat16), keys, 0.1)
    assert added.dtype == torch.float32
    kept = 1 - 6554 / 65536
    assert added.unique().tolist() == pytest.approx([0, 1 / kept], rel=1e-7)
    embedded = drop(torch.ones(4, 13, 18, dtype=torch.float64), keys, 0.1)
    assert embedded.unique().tolist() == pytest.approx([0, 1 / kept], rel=1e-15)
    torch.testing.assert_close(embedded.float(), added, rtol=1e-7, atol=0)


# In the network


def test_keys_are_needed_in_training_with_dropout_and_only_there() -> None:
    model, ids = build_gpt(CONFIG, seed=1), ids_of(2, 13)
    with pytest.raises(ValueError, match=r"needs keys of shape \(2, 11, 2\), got none: hand over dropout_keys"):
        model(ids)
    one = dropout_keys(42, 0, [0], CONFIG)
    with pytest.raises(ValueError, match=r"got keys of shape \(1, 11, 2\)"):
        model.hidden(ids, one)  # would be the same masks for both
    plain = build_gpt(replace(CONFIG, dropout=0.0), seed=1)
    with torch.no_grad():
        expected = plain(ids)
        assert torch.equal(plain(ids, one), expected)
        assert torch.equal(model.eval()(ids), expected)
        assert torch.equal(model(ids, one), expected)


def test_masks_need_no_random_state_and_leave_it_alone() -> None:
    model, keys = build_gpt(CONFIG, seed=1), dropout_keys(42, 0, range(2), CONFIG)
    before = torch.get_rng_state()
    first = model(ids_of(2, 13), keys)
    first.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(7)
    assert torch.equal(model(ids_of(2, 13), keys), first)


def test_the_scale_makes_up_for_what_is_dropped() -> None:
    """Over 500 steps the mean of a vector is the vector."""
    x = torch.ones(1, 13, 18, dtype=torch.float64)
    steps = [drop(x, dropout_keys(42, step, [0], CONFIG)[:, 0], 0.3) for step in range(500)]
    mean = torch.cat(steps).mean(0)
    deviation = math.sqrt(0.3 / 0.7 / 500)
    assert (mean - 1).abs().max().item() <= 4.5 * deviation


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_has_the_same_masks() -> None:
    keys = dropout_keys(42, 3, range(4), CONFIG).flatten(0, 1)
    here = mask_of(keys, range(64), 63, 63, 0.1, torch.float32)
    assert torch.equal(mask_of(keys.cuda(), range(64), 63, 63, 0.1, torch.float32).cpu(), here)
