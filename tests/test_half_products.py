"""Products of half-precision matrices, computed in float32: the same up to the rounding of float32's sums."""

import pytest
import torch
from torch import Tensor, nn

from model import half_products
from model.half_products import Linear, linear, product_type, sum_type, working_type

HALF = (torch.bfloat16, torch.float16)


@pytest.fixture(params=[(), HALF], ids=["with instructions", "without"])
def slow_types(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[torch.dtype, ...]:
    """Both kinds of machine, on either."""
    monkeypatch.setattr(half_products, "SLOW_ON_CPU", request.param)
    slow: tuple[torch.dtype, ...] = request.param
    return slow


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).float()


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).double()


def assert_rounded(found: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """As near to the exact result as rounding once brings it; beside a tie, float32's sums may fall to either side."""
    unit = torch.finfo(dtype).eps
    assert ((found.double() - exact).abs() <= 0.5 * unit * exact.abs() + 1e-5).all()
    assert (found.double() == rounded(exact, dtype)).double().mean() > 0.99


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_a_linear_layer_under_autocast_is_the_product_of_the_rounded_matrices(
    dtype: torch.dtype, biased: bool, slow_types: tuple[torch.dtype, ...]
) -> None:
    layer = Linear(48, 20, bias=biased)
    with torch.no_grad():
        layer.weight.copy_(drawn(20, 48) / 7)
    x, gradient = drawn(5, 9, 48).requires_grad_(), drawn(5, 9, 20).to(dtype)
    with torch.autocast("cpu", dtype):
        output = layer(x)
    assert output.dtype == dtype
    of_x, of_weight = torch.autograd.grad(output, (x, layer.weight), gradient)
    assert of_x.dtype == of_weight.dtype == torch.float32
    exact_x, weight = rounded(x.detach(), dtype), rounded(layer.weight.detach(), dtype)
    bias = rounded(layer.bias.detach(), dtype) if biased else torch.zeros(20).double()
    assert_rounded(output.detach(), exact_x @ weight.T + bias, dtype)
    assert_rounded(of_x, gradient.double() @ weight, dtype)
    assert_rounded(of_weight, gradient.double().flatten(0, 1).T @ exact_x.flatten(0, 1), dtype)


def test_it_is_torchs_layer_elsewhere(slow_types: tuple[torch.dtype, ...]) -> None:
    """In float32 and float64 to the last bit, and with the same names and initial weights."""
    torch.manual_seed(0)
    ours = Linear(8, 6)
    torch.manual_seed(0)
    torchs = nn.Linear(8, 6)
    assert all(map(torch.equal, ours.state_dict().values(), torchs.state_dict().values()))
    assert ours.state_dict().keys() == torchs.state_dict().keys()
    assert torch.equal(ours(drawn(3, 8)), torchs(drawn(3, 8)))
    assert torch.equal(ours.double()(drawn(3, 8).double()), torchs.double()(drawn(3, 8).double()))


def test_a_model_in_half_precision_without_autocast(slow_types: tuple[torch.dtype, ...]) -> None:
    x, weight = drawn(7, 32).bfloat16(), drawn(11, 32).bfloat16()
    output = linear(x, weight, None)
    assert output.dtype == torch.bfloat16
    assert_rounded(output, x.double() @ weight.double().T, torch.bfloat16)


def test_types() -> None:
    assert {product_type(dtype, "cuda") for dtype in HALF} == set(HALF)
    assert product_type(torch.float64, "cpu") == torch.float64
    assert {sum_type(dtype) for dtype in (*HALF, torch.float32)} == {torch.float32}
    assert working_type(drawn(1)) == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert working_type(drawn(1)) == torch.bfloat16
