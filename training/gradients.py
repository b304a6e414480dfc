"""How the gradients of all microbatches on all processes become the one gradient of a step.

Two ways: DDP's, whose float sums depend on their order in the last bits, and sums of integers, which do not.
"""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from training.config import RunConfig
from training.distributed import Group

FRACTION_BITS = 50
"""A gradient of 2**-FRACTION_BITS is the unit of the integer sums: half of it is the most that is rounded away."""
SUM_BITS = 62
"""The largest sum allowed is 2**SUM_BITS units: 4,096 for a loss that is a mean."""
CHUNK = {"cpu": 2**18, "cuda": 2**24}
"""Numbers converted at once: few enough for a CPU's cache, and enough to keep a GPU busy."""


def gradient_sums(module: nn.Module, group: Group, config: RunConfig) -> "AveragedGradients | ExactGradients":
    """The way of a run; the module's weights become those of rank 0. Every rank must call this."""
    if config.bitwise:
        return ExactGradients(module, group)
    return AveragedGradients(module, group, in_bf16=config.precision.gradients == "bf16")


class AveragedGradients:
    """DDP's way: summed in the parameters' precision, averaged over the processes by one exchange per bucket."""

    def __init__(self, module: nn.Module, group: Group, in_bf16: bool = False) -> None:
        """Wraps a module; its weights become those of rank 0. Every rank must call this."""
        self.module = group.parallel(module, in_bf16)
        self.group = group
        self.averaged_over = group.process.world_size
        """What the loss must be multiplied by for the gradient to come out as a sum over the processes."""

    def begin(self, weight_sum: float, microbatches: int, loss_scale: Tensor) -> None:
        """Begins a step; the arguments matter to ExactGradients."""
        gradients = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
        if gradients:  # not set to None: they stay in DDP's buckets
            torch._foreach_zero_(gradients)

    def microbatch(self, last: bool) -> AbstractContextManager[None]:
        """The context of a microbatch's forward and backward; processes exchange gradients in the last of a step."""
        # DDP decides in the forward whether this backward exchanges gradients, so no_sync spans both.
        return nullcontext() if last else self.module.no_sync()

    def finish(self) -> None:
        """Ends a step: the gradients are exchanged already."""


class ExactGradients:
    """Bitwise mode: each microbatch's gradient becomes integers, whose sums do not depend on their order.

    The gradient of a microbatch is rounded to a multiple of a power of two and added to int64 sums; the processes add
    theirs in one exchange at the end of the step, and the result is turned back into floats once. So whichever
    process computed a microbatch, and when, the step's gradient has the same bits. It costs 8 bytes per parameter.
    """

    averaged_over = 1

    def __init__(self, module: nn.Module, group: Group) -> None:
        """Takes over the gradients of a module; its weights become those of rank 0. Every rank must call this."""
        self.module = module
        self.group = group
        parameters = list(module.parameters())
        group.broadcast(parameter.detach() for parameter in parameters)
        device, dtype = parameters[0].device, parameters[0].dtype
        total = sum(parameter.numel() for parameter in parameters)
        self._gradient = torch.zeros(total, dtype=dtype, device=device)
        offset = 0
        for parameter in parameters:
            parameter.grad = self._gradient[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()
        # Two more than there are gradients: microbatches with a value that is not finite, or out of range.
        self._sums = torch.zeros(total + 2, dtype=torch.int64, device=device)
        size = min(total, CHUNK[device.type])
        self._floats = torch.empty(size, dtype=dtype, device=device)
        self._integers = torch.empty(size, dtype=torch.int64, device=device)
        self._units = self._limit = torch.ones((), device=device)
        self._is_first = True

    def begin(self, weight_sum: float, microbatches: int, loss_scale: Tensor) -> None:
        """Begins a step.

        Args:
            weight_sum: of all targets of the step: 1 for a mean, so that a sum loss has a unit as much larger.
            microbatches: of the step, over all processes; as many may not overflow together.
            loss_scale: what the GradScaler multiplies the loss by, a power of two; () on the device.
        """
        exponent = math.ceil(math.log2(max(weight_sum, 1)) - 1e-9)  # a mean's weights add up to 1 but for rounding
        self._units = 2.0 ** (FRACTION_BITS - exponent) / loss_scale
        self._limit = torch.full_like(self._units, 2.0**SUM_BITS / max(microbatches, 1))
        self._gradient.zero_()
        self._sums[-2:] = 0
        self._is_first = True

    @contextmanager
    def microbatch(self, last: bool) -> Iterator[None]:
        """The context of a microbatch's forward and backward; on leaving it, its gradient is added to the sums."""
        yield
        largest = torch.zeros_like(self._units)
        for gradient, sums in self._chunks():
            floats, integers = self._floats[: len(gradient)], self._integers[: len(gradient)]
            torch.mul(gradient, self._units, out=floats)  # exact, but for what is far below a unit
            floats.round_()
            low, high = torch.aminmax(floats)
            largest = torch.maximum(largest, torch.maximum(-low, high))  # hands a NaN on
            if self._is_first:
                sums.copy_(floats)
            else:
                sums.add_(integers.copy_(floats))
            gradient.zero_()
        self._is_first = False
        finite = torch.isfinite(largest)
        self._sums[-2:] += torch.stack([~finite, finite & (largest >= self._limit)])

    def finish(self) -> Tensor:
        """Adds up over the processes and hands out the gradient; returns whether one was out of range: () bool.

        A gradient that is not finite or out of range makes the whole of it NaN: nothing ever wraps round. Every rank
        must call this.
        """
        self.group.sum(self._sums)
        bad, out_of_range = (self._sums[-2:] > 0).unbind()
        unit = torch.where(bad | out_of_range, torch.nan, 1 / self._units.double())
        doubles = self._integers.view(torch.float64)
        for gradient, sums in self._chunks():
            gradient.copy_(doubles[: len(sums)].copy_(sums).mul_(unit))
        return out_of_range

    def _chunks(self) -> Iterator[tuple[Tensor, Tensor]]:
        size = len(self._floats)
        return zip(self._gradient.split(size), self._sums[:-2].split(size), strict=True)
