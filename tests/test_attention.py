"""Attention with dropout in blocks, and without it: against the formula, in any precision."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from model import attention as attention_module
from model.attention import attend
from model.dropout import dropout_keys, mask_of, scale_of
from model.gpt import GPTConfig

CONFIG = GPTConfig(vocab_size=50, context_length=13, emb_dim=18, n_heads=3, n_layers=2, dropout=0.3)
"""Odd in places: a context of 13, heads of 6."""


def plain_attention(query: Tensor, key: Tensor, value: Tensor, keys: Tensor | None, context: int) -> Tensor:
    """The formula, with all weights and the whole mask at once."""
    length, width = query.shape[-2:]
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    weights = (query @ key.transpose(-1, -2) / math.sqrt(width)).masked_fill(future, -math.inf).softmax(-1)
    if keys is None:
        return weights @ value
    mask = mask_of(keys.flatten(0, 1), range(context), context, context, 0.3, query.dtype)[:, :length, :length]
    return weights * mask.view(weights.shape) * scale_of(0.3) @ value


def heads(length: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Query, key and value of 2 sequences and 3 heads of width 6, and a gradient of the output."""
    generator = torch.Generator().manual_seed(length)
    drawn = [torch.randn(2, 3, length, 6, generator=generator, dtype=torch.float64).to(dtype) for _ in range(4)]
    return [*(tensor.requires_grad_() for tensor in drawn[:3]), drawn[3]]


def output_and_gradients(function: Any, inputs: list[Tensor], *arguments: Any) -> list[Tensor]:
    output = function(*inputs[:3], *arguments)
    return [output, *torch.autograd.grad(output, inputs[:3], inputs[3])]


HEAD_KEYS = dropout_keys(42, 0, range(2), CONFIG)[:, 3:6]
ROWS = attention_module.QUERY_ROWS["cpu"]


@pytest.mark.parametrize("length", [1, 2, 77, ROWS, 2 * ROWS + 3])
def test_attention_in_blocks_is_the_formula(length: int) -> None:
    inputs = heads(length)
    found = output_and_gradients(attend, inputs, HEAD_KEYS, 0.3, 600)
    for one, other in zip(found, output_and_gradients(plain_attention, inputs, HEAD_KEYS, 600), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("length", [1, 2, 4, 7])
def test_the_gradient_of_attention_by_differences(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(attention_module.QUERY_ROWS, "cpu", 3)
    inputs, exhaustive = heads(length)[:3], length < 4
    assert torch.autograd.gradcheck(
        lambda query, key, value: attend(query, key, value, HEAD_KEYS, 0.3, 13),
        inputs,
        fast_mode=not exhaustive,
        atol=1e-7,
    )


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 8e-3)], ids=str
)
def test_attention_in_less_precision(dtype: torch.dtype, bound: float) -> None:
    """Errors of the size of the type's own rounding; autocast around it changes no bit."""
    inputs = heads(200, dtype)
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = output_and_gradients(plain_attention, exact, HEAD_KEYS, 200)
    found = output_and_gradients(attend, inputs, HEAD_KEYS, 0.3, 200)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        assert ((one.double() - other).norm() / other.norm()).item() < bound
    with torch.autocast("cpu", torch.bfloat16):
        again = output_and_gradients(attend, inputs, HEAD_KEYS, 0.3, 200)
    assert all(map(torch.equal, found, again))


def test_attention_keeps_nothing_of_the_size_of_its_weights() -> None:
    """Query, key, value, output and keys: for 300 tokens 10,800 numbers each, where the weights would be 540,000."""
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        query, key, value, _ = heads(300)
        attend(query, key, value, HEAD_KEYS, 0.3, 300)
    assert sum(tensor.numel() for tensor in kept) == 4 * 10_800 + HEAD_KEYS.numel()


@pytest.mark.parametrize("in_blocks", [True, False])
@pytest.mark.parametrize("length", [1, 2, 77])
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 8e-3)], ids=str
)
def test_attention_without_dropout_is_the_formula(
    monkeypatch: pytest.MonkeyPatch, length: int, dtype: torch.dtype, bound: float, in_blocks: bool
) -> None:
    """On any CPU; also of sequences shorter than the context, each of which stands alone."""
    monkeypatch.setitem(attention_module.BLOCKS_ARE_FASTER, "cpu", in_blocks)
    inputs = heads(length, dtype)
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    found = output_and_gradients(attend, inputs)
    for one, other in zip(found, output_and_gradients(plain_attention, exact, None, 0), strict=True):
        assert one.dtype == dtype
        assert (one.double() - other).norm().item() <= bound * max(1.0, other.norm().item())  # of one token, 0
    query, key, value = (tensor[1:] for tensor in inputs[:3])
    alone = attend(query, key, value).double()
    assert (found[0][1:].double() - alone).norm().item() <= bound * alone.norm().item()
