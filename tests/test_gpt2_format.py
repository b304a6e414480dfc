"""Our weights and config as transformers' GPT-2 has them, and back."""

import dataclasses
from typing import Any

import pytest
import torch
from small_exports import SHAPE, VARIANTS, noisy_model
from torch import Tensor

from model.gpt import GPTConfig
from training.exchange.gpt2_format import (
    config_from_gpt2,
    config_to_gpt2,
    from_gpt2,
    has_qkv_bias,
    to_gpt2,
    weight_shapes,
    with_prefix,
)


def weights_of(config: GPTConfig) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in noisy_model(config).named_parameters()}


@pytest.mark.parametrize("name", VARIANTS)
def test_shapes_are_known_without_a_model(name: str) -> None:
    shapes = {name: tuple(weight.shape) for name, weight in weights_of(VARIANTS[name]).items()}
    assert dict(weight_shapes(VARIANTS[name])) == shapes


@pytest.mark.parametrize("name", VARIANTS)
def test_there_and_back_is_the_same(name: str) -> None:
    config = VARIANTS[name]
    weights = weights_of(config)
    tensors = to_gpt2(weights, config)
    back = from_gpt2(tensors, config)
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[key], weights[key]) for key in weights)
    assert all(tensor.is_contiguous() for tensor in (*tensors.values(), *back.values()))
    assert has_qkv_bias(tensors) is config.qkv_bias
    values = config_to_gpt2(config, "float32", None)
    assert config_from_gpt2(values, config.qkv_bias) == config


def test_the_fused_matrix_has_query_key_and_value_side_by_side() -> None:
    config = VARIANTS["untied-bias"]
    weights = weights_of(config)
    tensors = to_gpt2(weights, config)
    fused, bias = (tensors[f"transformer.h.1.attn.c_attn.{kind}"] for kind in ("weight", "bias"))
    assert fused.shape == (32, 96)  # inputs, outputs
    for number, part in enumerate(("query", "key", "value")):
        columns = slice(32 * number, 32 * (number + 1))
        assert torch.equal(fused[:, columns], weights[f"blocks.1.attention.{part}.weight"].T)
        assert torch.equal(bias[columns], weights[f"blocks.1.attention.{part}.bias"])


def test_names_of_old_files() -> None:
    """The first GPT-2 on the Hub has no prefix, and causal masks among its weights."""
    tensors = to_gpt2(weights_of(SHAPE), SHAPE)
    old = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    old["h.0.attn.bias"] = torch.ones(1, 1, 32, 32).tril()
    old["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    assert with_prefix(old).keys() == tensors.keys() == with_prefix(tensors).keys()
    assert "transformer.h.0.attn.c_attn.bias" in with_prefix(old), "a real bias is no mask"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"lm_head.weight": None}, "lm_head.weight is missing"),
        ({"score.weight": torch.zeros(2, 32)}, "score.weight is unknown"),
        (
            {"transformer.wpe.weight": torch.zeros(31, 32)},
            r"transformer.wpe.weight has shape \[31, 32\], wanted \[32, 32\]",
        ),
        ({"transformer.h.0.mlp.c_fc.weight": torch.zeros(128, 32)}, r"shape \[128, 32\], wanted \[32, 128\]"),
    ],
)
def test_weights_that_do_not_fit_are_named(change: dict[str, Tensor | None], said: str) -> None:
    tensors = {**to_gpt2(weights_of(SHAPE), SHAPE), **change}
    with pytest.raises(ValueError, match=said):
        from_gpt2({name: tensor for name, tensor in tensors.items() if tensor is not None}, SHAPE)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "gpt_neox"),
        ("model_type", None),
        ("activation_function", "gelu"),
        ("activation_function", "relu"),
        ("layer_norm_epsilon", 1e-6),
        ("n_inner", 64),
        ("scale_attn_weights", False),
        ("scale_attn_by_inverse_layer_idx", True),
        ("add_cross_attention", True),
        ("quantization_config", {"bits": 4}),
        ("resid_pdrop", 0.2),
        ("n_head", 5),
        ("n_embd", "32"),
        ("tie_word_embeddings", "yes"),
    ],
)
def test_another_network_is_refused_by_its_key(key: str, value: Any) -> None:
    ours = {"n_head": "n_heads", "tie_word_embeddings": "tie_weights"}.get(key, key)
    with pytest.raises(ValueError, match=ours):
        config_from_gpt2({**config_to_gpt2(SHAPE, "float32", None), key: value}, qkv_bias=False)


def test_the_original_gpt2s_config_is_gpt2_small() -> None:
    """As on the Hub, where most keys are left to their defaults or do not matter."""
    original = {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1,
        "bos_token_id": 50256,
        "embd_pdrop": 0.1,
        "eos_token_id": 50256,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2",
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "resid_pdrop": 0.1,
        "summary_type": "cls_index",
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "vocab_size": 50257,
    }
    assert config_from_gpt2(original, qkv_bias=True) == GPTConfig(qkv_bias=True, tie_weights=True)
    assert config_from_gpt2({"model_type": "gpt2"}, qkv_bias=True) == GPTConfig(qkv_bias=True, tie_weights=True)


def test_a_whole_number_is_written_as_a_float() -> None:
    """transformers' configs are strict about it."""
    values = config_to_gpt2(dataclasses.replace(SHAPE, dropout=0), "float32", 7)
    assert [type(values[key]) for key in ("resid_pdrop", "embd_pdrop", "attn_pdrop", "layer_norm_epsilon")] == [
        float
    ] * 4
