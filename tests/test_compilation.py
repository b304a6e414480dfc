"""--compile: the same run on compiled kernels, or without them where there is no compiler."""

import sys
from collections.abc import Iterator

import pytest
import torch
from ranks import on_ranks
from torch import Tensor

from model.dropout import dropout_keys
from model.gpt import GPTConfig, build_gpt
from training.compilation import compile_blocks, refuse_to_compile
from training.config import Batch, Data, Precision, RunConfig
from training.distributed import Group
from training.errors import UserError
from training.loss import SequenceLoss

MODEL = GPTConfig(vocab_size=50, context_length=24, emb_dim=32, n_heads=2, n_layers=2, dropout=0.1)
KEYS = dropout_keys(1, 2, range(1), MODEL)

pytestmark = pytest.mark.filterwarnings("ignore")  # PyTorch's compiler warns of PyTorch's own parts


@pytest.fixture(autouse=True)
def _recursion_limit() -> Iterator[None]:
    """PyTorch's compiler raises it for the whole process, and other tests rely on it."""
    limit = sys.getrecursionlimit()
    yield
    sys.setrecursionlimit(limit)


def config_of(amp: str) -> RunConfig:
    precision = Precision.model_validate({"amp": amp, "matmul": "highest"})
    batch = Batch(world_size=1, microbatch=4, accumulation=1)
    return RunConfig(name="test", model=MODEL, data=Data(dataset="test"), batch=batch, precision=precision)


def losses_and_gradients(group: Group, compiled: bool) -> tuple[str, Tensor, list[Tensor]]:
    model = build_gpt(MODEL, seed=3)
    said = compile_blocks(model, config_of("off"), 4, group) if compiled else ""
    ids = torch.arange(4 * 25).remainder(MODEL.vocab_size).view(4, 25)
    keys = dropout_keys(1, 2, range(4), MODEL)
    loss, sums = SequenceLoss(model)(ids[:, :-1], ids[:, 1:], keys)
    loss.backward()
    return said, sums, [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.slow
def test_a_compiled_model_drops_the_same_and_differs_by_rounding() -> None:
    """The masks are integers' arithmetic that wraps round: a compiler that took it for undefined would drop others."""
    said, sums, gradients = on_ranks(1, losses_and_gradients, True)[0]
    assert said.startswith("compiled in ")
    _, right_sums, right_gradients = on_ranks(1, losses_and_gradients, False)[0]
    torch.testing.assert_close(sums, right_sums, rtol=1e-5, atol=1e-6)
    for gradient, right in zip(gradients, right_gradients, strict=True):
        torch.testing.assert_close(gradient, right, rtol=1e-3, atol=1e-5 * float(right.abs().max()))


def with_and_without(group: Group) -> tuple[str, Tensor]:
    model = build_gpt(MODEL, seed=3)
    said = compile_blocks(model, config_of("off"), 4, group)
    return said, model(torch.zeros(1, 4, dtype=torch.int64), KEYS)


def test_without_a_compiler_it_goes_on_without(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.config

    torch._dynamo.reset()
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", ("no-such-compiler",))
    monkeypatch.setattr(torch._inductor.config, "force_disable_caches", True)
    said, output = on_ranks(1, with_and_without)[0]
    assert said.startswith("--compile: is not possible here (")
    assert said.endswith("); going on without, which is the same run")
    torch.testing.assert_close(output, build_gpt(MODEL, seed=3)(torch.zeros(1, 4, dtype=torch.int64), KEYS))


def test_bitwise_mode_refuses() -> None:
    bitwise = config_of("off").model_copy(update={"reproducibility": "bitwise"})
    with pytest.raises(UserError, match="--compile: with reproducibility: bitwise"):
        refuse_to_compile(bitwise)
    refuse_to_compile(config_of("off"))
