"""Bitwise mode's sums: the same bits in any order and on any number of processes, and never wrapped round."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from ranks import on_ranks
from torch import Tensor, nn

from training.distributed import Group
from training.gradients import CHUNK, FRACTION_BITS, AveragedGradients, ExactGradients

ONE = torch.ones(())
SIZE = 5000


def known_gradients(count: int = 16, size: int = SIZE) -> list[Tensor]:
    """Gradients of microbatches whose numbers lie between 1e-13 and 0.1, so that float sums depend on their order."""
    generator = np.random.default_rng(7)
    magnitudes = 10.0 ** generator.uniform(-13, -1, (count, size))
    return list(torch.from_numpy(magnitudes * generator.choice([-1, 1], (count, size))).float())


class Weights(nn.Module):
    """Parameters whose gradient is whatever multiplies them."""

    def __init__(self, size: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(2, size // 2 - 1, dtype=dtype))
        self.vector = nn.Parameter(torch.zeros(2, dtype=dtype))

    def forward(self, gradient: Tensor) -> Tensor:
        return (torch.cat([self.matrix.flatten(), self.vector]) * gradient).sum()


def summed(
    group: Group,
    parts: Sequence[Tensor],
    weight_sum: float = 1.0,
    exact: bool = True,
    in_bf16: bool = False,
    loss_scale: Tensor = ONE,
    microbatches: int = 16,
) -> tuple[Tensor, bool | None]:
    """The gradient of a step whose microbatches are dealt to the processes in turn, and whether it was out of range."""
    weights = Weights(len(parts[0]), parts[0].dtype)
    gradients = ExactGradients(weights, group) if exact else AveragedGradients(weights, group, in_bf16)
    for _ in range(2):  # the second step must know nothing of the first
        gradients.begin(weight_sum, microbatches, loss_scale)
        mine = parts[group.process.rank :: group.process.world_size]
        for number, part in enumerate(mine, start=1):
            with gradients.microbatch(last=number == len(mine)):
                (gradients.module(part) * gradients.averaged_over).backward()
        out_of_range = gradients.finish()
    assert weights.matrix.grad is not None
    assert weights.vector.grad is not None
    result = torch.cat([weights.matrix.grad.flatten(), weights.vector.grad])
    return result, None if out_of_range is None else bool(out_of_range)


def alone(parts: Sequence[Tensor], **how: Any) -> tuple[Tensor, bool | None]:
    """The same on one process."""
    return on_ranks(1, partial(summed, **how), parts)[0]


def same_bits(first: Tensor, second: Tensor) -> bool:
    return torch.equal(first.view(torch.int32), second.view(torch.int32))


def test_any_order_gives_the_same_bits_where_floats_do_not() -> None:
    parts = known_gradients()
    orders = [parts, parts[::-1], [*parts[1::2], *parts[::2]]]
    exact = [alone(order)[0] for order in orders]
    floats = [alone(order, exact=False)[0] for order in orders]
    assert same_bits(exact[0], exact[1])
    assert same_bits(exact[0], exact[2])
    assert not same_bits(floats[0], floats[1])  # else the numbers would show nothing


@pytest.mark.parametrize("processes", [2, 3])
def test_any_number_of_processes_gives_the_same_bits(processes: int) -> None:
    parts = known_gradients()
    one = alone(parts)[0]
    for result, out_of_range in on_ranks(processes, summed, parts):
        assert same_bits(result, one)
        assert out_of_range is False


def test_a_sum_is_off_by_half_a_unit_for_each_microbatch_at_most() -> None:
    """Against float64, for one chunk and for several."""
    for size in (SIZE, CHUNK["cpu"] + 6):
        parts = known_gradients(4, size)
        right = torch.stack([part.double() for part in parts]).sum(dim=0)
        error = (alone(parts)[0].double() - right).abs()
        rounding = right.abs() * 2.0**-24  # to float32, at the end
        assert bool((error <= rounding + 4 * 2.0 ** -(FRACTION_BITS + 1)).all())


def test_both_ways_agree_but_for_rounding() -> None:
    parts = known_gradients()
    torch.testing.assert_close(alone(parts)[0], alone(parts, exact=False)[0], rtol=0, atol=1e-7)


def test_in_bf16_the_sum_of_each_process_is_rounded_before_they_are_added() -> None:
    """By one process too, so that it is the same run; DDP averages, and the loss is as many times as large."""
    parts = known_gradients(4)
    assert same_bits(alone(parts, exact=False, in_bf16=True)[0], torch.stack(parts).sum(dim=0).bfloat16().float())
    sums = [parts[0] + parts[2], parts[1] + parts[3]]
    right = (sums[0].bfloat16() + sums[1].bfloat16()).float()  # halved and doubled again, which is exact
    for result, _ in on_ranks(2, partial(summed, exact=False, in_bf16=True), parts):
        assert same_bits(result, right)


def test_a_power_of_two_as_loss_scale_changes_nothing() -> None:
    """fp16's gradients stay scaled until GradScaler unscales them."""
    parts = known_gradients()
    scale = torch.tensor(65536.0)
    scaled, _ = alone([part * scale for part in parts], loss_scale=scale)
    assert same_bits(scaled / scale, alone(parts)[0])


def peak(value: float, size: int = 10) -> Tensor:
    gradient = torch.full((size,), 0.25)
    gradient[3] = value
    return gradient


@pytest.mark.parametrize(("value", "fits"), [(1000.0, True), (-1023.9, True), (1024.0, False), (-1e9, False)])
def test_a_gradient_out_of_range_is_told_and_never_wraps(value: float, fits: bool) -> None:
    """Four microbatches may have 2**62 / 4 units each, so that no sum of them overflows: 1,024 at 2**-50."""
    result, out_of_range = alone([peak(value)] * 4, microbatches=4)
    assert out_of_range is not fits
    if fits:
        assert result.tolist() == [4 * number for number in peak(value).tolist()]
    else:
        assert bool(result.isnan().all())


def test_one_process_out_of_range_is_told_by_all() -> None:
    for result, out_of_range in on_ranks(2, summed, [peak(0.5), peak(1e6)]):
        assert out_of_range is True
        assert bool(result.isnan().all())


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_gradient_that_is_not_finite_stays_so_and_is_not_called_out_of_range(value: float) -> None:
    result, out_of_range = alone([peak(0.5), peak(value)])
    assert out_of_range is False
    assert bool(result.isnan().all())


def test_a_loss_that_is_a_sum_has_room_for_as_many_targets() -> None:
    """98,304 targets: the unit is 2**17 times as large, and so is what fits."""
    parts = [peak(90_000.0), peak(-65_536.0)]
    assert alone(parts, microbatches=2)[1] is True
    result, out_of_range = alone(parts, weight_sum=98_304.0, microbatches=2)
    assert out_of_range is False
    assert result[3] == 24_464.0


def test_float64_has_the_same_units() -> None:
    parts = [part.double() for part in known_gradients()]
    right = torch.stack(parts).sum(dim=0)
    assert float((alone(parts)[0] - right).abs().max()) <= 16 * 2.0 ** -(FRACTION_BITS + 1) * 1.001


def memory(group: Group) -> tuple[int, int]:
    weights = Weights(SIZE)
    gradients = ExactGradients(weights, group)
    numbers = sum(parameter.numel() for parameter in weights.parameters())
    assert weights.matrix.grad is not None
    assert weights.matrix.grad.untyped_storage().data_ptr() == gradients._gradient.untyped_storage().data_ptr()
    return numbers, gradients._sums.nbytes


def test_the_sums_take_eight_bytes_a_parameter() -> None:
    numbers, size = on_ranks(1, memory)[0]
    assert size == 8 * (numbers + 2)
