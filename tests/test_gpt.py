"""The network against published figures: initial weights, losses and parameter counts."""

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from model.dropout import dropout_keys, mask_of
from model.gpt import GPT, GPTConfig, build_gpt, flops_per_token, parameter_count

TINY = GPTConfig(vocab_size=257, context_length=32, emb_dim=48, n_heads=4, n_layers=3, dropout=0.0)
MEDIUM = GPTConfig(context_length=512, emb_dim=512, n_heads=8, n_layers=8)
SMALL = GPTConfig()


def with_(config: GPTConfig, **changes: Any) -> GPTConfig:
    return dataclasses.replace(config, **changes)


def grid(config: GPTConfig) -> tuple[Tensor, Tensor]:
    """The inputs and targets of the published first losses: two rows of at most 64 tokens."""
    length = min(config.context_length, 64)
    inputs = (7919 * torch.arange(2 * length) + 13).remainder(config.vocab_size).view(2, length)
    return inputs, (inputs + 7919).remainder(config.vocab_size)


def cross_entropy(model: GPT, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


@pytest.mark.parametrize(
    ("config", "parameters", "token_embedding", "head", "loss"),
    [
        (TINY, 110_688, 9885.3227, -0.0893168002, 5.6788669),
        (with_(TINY, qkv_bias=True), 111_120, 9885.3227, -0.0425390042, 5.7891383),
        (with_(TINY, tie_weights=True), 98_352, 9885.3227, 1.9269152880, 31.0938339),
        pytest.param(MEDIUM, 76_933_120, 20529424.67, 0.0339900739, 10.9949436, marks=pytest.mark.slow),
        pytest.param(SMALL, 163_009_536, 30793736, 0.0269515719, 10.9798574, marks=pytest.mark.slow),
    ],
    ids=["tiny", "tiny-qkv-bias", "tiny-tied", "medium", "gpt2-small"],
)
def test_initial_weights_of_seed_42(
    config: GPTConfig, parameters: int, token_embedding: float, head: float, loss: float
) -> None:
    model = build_gpt(config, seed=42).eval()
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert parameter_count(config) == parameters
    weight = model.token_embedding.weight.detach()
    assert weight[0, 0].item() == pytest.approx(1.9269152880, abs=1e-9)
    assert weight.double().abs().sum().item() == pytest.approx(token_embedding, rel=1e-7)
    assert model.head.weight[0, 0].item() == pytest.approx(head, abs=1e-9)
    with torch.no_grad():
        assert cross_entropy(model, *grid(config)).item() == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (SMALL, 163_009_536),
        (with_(SMALL, qkv_bias=True), 163_037_184),
        (with_(SMALL, tie_weights=True), 124_412_160),
        (with_(SMALL, tie_weights=True, qkv_bias=True), 124_439_808),
        (MEDIUM, 76_933_120),
        (with_(SMALL, context_length=3072), 164_582_400),
        (with_(TINY, qkv_bias=True, tie_weights=True), 98_784),
    ],
)
def test_parameter_count_is_that_of_the_network(config: GPTConfig, expected: int) -> None:
    assert parameter_count(config) == expected
    with torch.device("meta"):  # shapes without memory
        model = GPT(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == expected


def test_matrices_and_vectors_of_the_original_gpt2() -> None:
    with torch.device("meta"):
        model = GPT(with_(SMALL, tie_weights=True, qkv_bias=True))
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    assert (len(matrices), sum(map(torch.numel, matrices))) == (74, 124_318_464)
    assert (len(vectors), sum(map(torch.numel, vectors))) == (122, 121_344)


def test_flops_per_token_by_hand() -> None:
    # The matrix products' weights, biases and norms: 123,625,728; attention: 12 x 12 x 768 x 1024.
    assert flops_per_token(SMALL) == 6 * 123_625_728 + 113_246_208
    # Tying takes parameters away, not work.
    assert flops_per_token(with_(SMALL, tie_weights=True)) == flops_per_token(SMALL)


def test_parameter_names() -> None:
    names = set(build_gpt(with_(TINY, n_layers=1, qkv_bias=True), seed=1).state_dict())
    block = {"attention_norm", "mlp_norm", "mlp.up", "mlp.down"}
    block |= {f"attention.{projection}" for projection in ("query", "key", "value", "output")}
    expected = {"token_embedding.weight", "position_embedding.weight", "head.weight"}
    expected |= {f"final_norm.{kind}" for kind in ("weight", "bias")}
    expected |= {f"blocks.0.{part}.{kind}" for part in block for kind in ("weight", "bias")}
    assert names == expected


def test_there_are_no_buffers() -> None:
    assert list(build_gpt(TINY, seed=1).buffers()) == []


def test_query_key_and_value_have_biases_only_if_asked() -> None:
    names = build_gpt(TINY, seed=1).state_dict().keys()
    assert "blocks.0.attention.output.bias" in names
    assert not any(f"attention.{part}.bias" in name for name in names for part in ("query", "key", "value"))


def test_build_gpt_leaves_the_global_random_state_alone() -> None:
    before = torch.get_rng_state()
    for init in ("pytorch", "gpt2"):
        build_gpt(with_(TINY, init=init), seed=42)
        assert torch.equal(torch.get_rng_state(), before), init


@pytest.mark.parametrize("init", ["pytorch", "gpt2"])
def test_weights_depend_on_the_seed_alone(init: str) -> None:
    config = with_(TINY, init=init)
    first = build_gpt(config, seed=1).state_dict()
    torch.rand(7)  # moves the global random state
    with torch.device("meta"):  # neither does a default device of the caller matter
        again = build_gpt(config, seed=1).state_dict()
    other = build_gpt(config, seed=2).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["token_embedding.weight"], other["token_embedding.weight"])


def test_gpt2_initial_weights() -> None:
    config = GPTConfig(
        vocab_size=500, context_length=256, emb_dim=128, n_heads=4, n_layers=8, qkv_bias=True, init="gpt2"
    )
    for name, parameter in build_gpt(config, seed=42).named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            # 2 x 8 branches: 0.02 / sqrt(16).
            ends_a_branch = name.endswith(("attention.output.weight", "mlp.down.weight"))
            std = 0.005 if ends_a_branch else 0.02
            # Within five standard errors.
            root = math.sqrt(parameter.numel())
            assert abs(parameter.mean().item()) < 5 * std / root, name
            assert abs(parameter.std().item() - std) < 5 * std / (root * math.sqrt(2)), name


@pytest.mark.parametrize("change", [{"qkv_bias": True}, {"tie_weights": True}])
def test_gpt2_matrices_do_not_depend_on_biases_and_tying(change: dict[str, bool]) -> None:
    plain = build_gpt(with_(TINY, init="gpt2"), seed=42).state_dict()
    changed = build_gpt(with_(TINY, init="gpt2", **change), seed=42).state_dict()
    for name in plain.keys() - {"head.weight"}:
        assert torch.equal(plain[name], changed[name]), name


def test_tied_head_is_one_storage_and_one_parameter() -> None:
    for init in ("pytorch", "gpt2"):
        model = build_gpt(with_(TINY, tie_weights=True, init=init), seed=42)
        assert model.head.weight is model.token_embedding.weight
        names = [name for name, _ in model.named_parameters()]
        assert "token_embedding.weight" in names
        assert "head.weight" not in names


def test_tied_gradient_is_the_sum_of_both_uses() -> None:
    tied = build_gpt(with_(TINY, tie_weights=True), seed=42)
    untied = GPT(TINY)
    untied.load_state_dict(tied.state_dict())
    for model in (tied, untied):
        torch.autograd.backward(cross_entropy(model, *grid(TINY)))
    embedding, head = untied.token_embedding.weight.grad, untied.head.weight.grad
    assert embedding is not None
    assert head is not None
    torch.testing.assert_close(tied.head.weight.grad, embedding + head, rtol=0, atol=1e-6)


def test_a_position_sees_only_those_before_it() -> None:
    model = build_gpt(TINY, seed=42).eval()
    inputs, _ = grid(TINY)
    changed = inputs.clone()
    changed[:, 20] = (changed[:, 20] + 1) % TINY.vocab_size
    with torch.no_grad():
        before, after = model(inputs), model(changed)
        shorter = model(inputs[:, :20])
    torch.testing.assert_close(after[:, :20], before[:, :20], rtol=0, atol=1e-6)
    torch.testing.assert_close(shorter, before[:, :20], rtol=0, atol=1e-5)
    assert ((after - before)[:, 20:].abs().amax(dim=-1) > 1e-4).all()


def test_positions_matter() -> None:
    model = build_gpt(TINY, seed=42).eval()
    with torch.no_grad():
        logits = model(torch.full((1, 8), 5))
    assert not torch.allclose(logits[0, 0], logits[0, 1], atol=1e-3)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_network_equals_one_written_out_from_the_formulas(dropout: float) -> None:
    """With dropout, the sites are in the order of dropout_keys: embedding, attention, MLP, heads."""
    config = with_(TINY, n_layers=1, qkv_bias=True, dropout=dropout)
    model = build_gpt(config, seed=42).double()
    keys = dropout_keys(1, 2, [3], config)
    weights: dict[str, Tensor] = model.state_dict()
    ids = grid(config)[0][:1]
    length, width, heads = ids.shape[1], config.emb_dim, config.n_heads

    def norm(x: Tensor, name: str) -> Tensor:
        variance = x.var(dim=-1, unbiased=False, keepdim=True)
        scaled = (x - x.mean(dim=-1, keepdim=True)) / torch.sqrt(variance + 1e-5)
        return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"blocks.0.{name}.weight"].T + weights[f"blocks.0.{name}.bias"]

    def dropped(x: Tensor, site: int) -> Tensor:
        mask = mask_of(keys[:, site], range(length), x.shape[1], x.shape[1], dropout, x.dtype)[0]
        return x * mask / (1 - round(65536 * dropout) / 65536)

    x = dropped(weights["token_embedding.weight"][ids[0]] + weights["position_embedding.weight"][:length], 0)
    normed = norm(x, "blocks.0.attention_norm")
    mixed = torch.zeros_like(x)
    for head in range(heads):
        columns = slice(head * width // heads, (head + 1) * width // heads)
        query, key, value = (linear(normed, f"attention.{part}")[:, columns] for part in ("query", "key", "value"))
        scores = query @ key.T / math.sqrt(width // heads)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        attention = scores.masked_fill(future, -math.inf).softmax(dim=-1)
        mixed[:, columns] = dropped(attention, 3 + head) @ value
    x = x + dropped(linear(mixed, "attention.output"), 1)
    inner = linear(norm(x, "blocks.0.mlp_norm"), "mlp.up")
    gelu = 0.5 * inner * (1 + torch.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)))
    x = norm(x + dropped(linear(gelu, "mlp.down"), 2), "final_norm")
    torch.testing.assert_close(model.hidden(ids, keys)[0], x, rtol=0, atol=1e-12)
    torch.testing.assert_close(model(ids, keys)[0], x @ weights["head.weight"].T, rtol=0, atol=1e-12)


def test_logits_known_on_paper() -> None:
    """A final norm that gives e1 whatever the input: the first column of the head is the logits."""
    model = build_gpt(with_(TINY, tie_weights=True), seed=42)
    with torch.no_grad():
        nn.init.zeros_(model.final_norm.weight)
        nn.init.zeros_(model.final_norm.bias)[0] = 1
        model.head.weight[:, 0] = -1e4
        model.head.weight[:4, 0] = torch.tensor([1.0, 2.0, 3.0, 4.0]).log()
    inputs = torch.tensor([[0, 1, 2]])
    logits = model(inputs)
    losses = F.cross_entropy(logits[0, 0].expand(4, -1), torch.arange(4), reduction="none")
    assert losses.tolist() == pytest.approx([2.302585, 1.609438, 1.203973, 0.916291], abs=1e-6)
    torch.autograd.backward(cross_entropy(model, inputs, torch.tensor([[3, 3, 3]])))
    gradient = model.head.weight.grad
    assert gradient is not None
    assert gradient[:4, 0].tolist() == pytest.approx([0.1, 0.2, 0.3, -0.6], abs=1e-6)


def test_dropout_acts_in_training_only() -> None:
    inputs, _ = grid(TINY)
    config = with_(TINY, dropout=0.5)
    model, plain = build_gpt(config, seed=42), build_gpt(TINY, seed=42)
    one, other = (dropout_keys(1, step, range(2), config) for step in (0, 1))
    with torch.no_grad():
        assert not torch.equal(model(inputs, one), model(inputs, other))
        assert torch.equal(model(inputs, one), model(inputs, one))
        model.eval()
        assert torch.equal(model(inputs), plain(inputs))


def test_sequence_longer_than_the_context_is_refused() -> None:
    model = build_gpt(TINY, seed=42)
    assert model(torch.zeros(1, 32, dtype=torch.int64)).shape == (1, 32, 257)
    with pytest.raises(ValueError, match=r"33 tokens .* context_length 32"):
        model(torch.zeros(1, 33, dtype=torch.int64))


def test_compiles_without_a_graph_break() -> None:
    model = build_gpt(TINY, seed=42)
    inputs, _ = grid(TINY)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(inputs), model(inputs))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "vocab_size: must be a positive integer, got 0"),
        ({"context_length": -8}, "context_length: must be a positive integer, got -8"),
        ({"n_layers": 2.0}, "n_layers: must be a positive integer, got 2.0"),
        ({"n_heads": True}, "n_heads: must be a positive integer, got True"),
        ({"emb_dim": "768"}, "emb_dim: must be a positive integer, got '768'"),
        ({"emb_dim": 50}, "emb_dim: must be divisible by n_heads (4), got 50"),
        ({"dropout": 1.0}, "dropout: must be a number from 0 to below 1, got 1.0"),
        ({"dropout": -0.1}, "dropout: must be a number from 0 to below 1, got -0.1"),
        ({"dropout": math.nan}, "dropout: must be a number from 0 to below 1, got nan"),
        ({"dropout": "0.1"}, "dropout: must be a number from 0 to below 1, got '0.1'"),
        ({"qkv_bias": 1}, "qkv_bias: must be true or false, got 1"),
        ({"tie_weights": "no"}, "tie_weights: must be true or false, got 'no'"),
        ({"init": "xavier"}, "init: must be one of pytorch, gpt2, got 'xavier'"),
    ],
)
def test_wrong_value_is_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match="must be") as error:
        with_(TINY, **changes)
    assert str(error.value) == message


def test_all_wrong_values_are_listed_at_once() -> None:
    with pytest.raises(ValueError, match="must be") as error:
        with_(TINY, vocab_size=0, emb_dim=50, dropout=2, init="zeros")
    fields = [problem.split(":")[0] for problem in str(error.value).split("; ")]
    assert fields == ["vocab_size", "emb_dim", "dropout", "init"]


def test_whole_number_dropout_is_accepted() -> None:
    assert with_(TINY, dropout=0).dropout == 0
