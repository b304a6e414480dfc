"""Products of bf16 and fp16 matrices on a CPU that has no instructions for them.

There torch multiplies number by number, at a few percent of float32's speed. The product of two such numbers is exact
in float32, and their sums are float32's on any hardware; so a product in float32, of the rounded matrices and rounded
once, is the same product.
"""

import torch
import torch.nn.functional as F  # noqa: N812  (the field's name for it)
from torch import Tensor, nn


def _slow_types() -> tuple[torch.dtype, ...]:
    # There are no public names. A torch without these computes in float32, which is right everywhere.
    names = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    return tuple(dtype for dtype, name in names.items() if not getattr(torch.ops.mkldnn, name, bool)())


SLOW_ON_CPU = _slow_types()
"""Types without instructions for products on this machine's CPU."""


class Linear(nn.Linear):
    """nn.Linear, by linear()."""

    def forward(self, input: Tensor) -> Tensor:
        """Transforms the last dimension: (..., inputs) -> (..., outputs)."""
        return linear(input, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear, under autocast or not: the same up to rounding, gradients included, and fast on any CPU.

    Args:
        x: (..., inputs).
        weight: (outputs, inputs).
        bias: (outputs,) or None.

    Returns:
        (..., outputs).
    """
    device = x.device.type
    dtype = working_type(x)
    exact = product_type(dtype, device)
    if exact == dtype:
        return F.linear(x, weight, bias)
    with torch.autocast(device, enabled=False):
        x, weight = x.to(dtype).to(exact), weight.to(dtype).to(exact)
        return F.linear(x, weight, None if bias is None else bias.to(dtype).to(exact)).to(dtype)


def working_type(x: Tensor) -> torch.dtype:
    """In which type a product with x is taken: autocast's, where that is on, else its own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def product_type(dtype: torch.dtype, device: str) -> torch.dtype:
    """In which type this machine computes products of matrices of a type: float32 where it cannot do better."""
    return torch.float32 if device == "cpu" and dtype in SLOW_ON_CPU else dtype


def sum_type(dtype: torch.dtype) -> torch.dtype:
    """In which type sums are taken: float32 for the half types, else the type itself."""
    return torch.promote_types(dtype, torch.float32)
