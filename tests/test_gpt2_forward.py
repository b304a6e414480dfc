"""The built-in forward of a folder's two files, against our own model."""

import dataclasses

import pytest
import torch
from small_exports import SHAPE, VARIANTS, noisy_model

from training.exchange.gpt2_format import config_to_gpt2, to_gpt2
from training.exchange.gpt2_forward import gpt2_logits

IDS = torch.arange(64).view(2, 32) % 41


@pytest.mark.parametrize("name", VARIANTS)
def test_it_computes_what_our_model_computes(name: str) -> None:
    model = noisy_model(VARIANTS[name]).double().eval()
    tensors = to_gpt2(dict(model.named_parameters()), model.config)
    with torch.no_grad():
        logits = gpt2_logits(config_to_gpt2(model.config, "float32", None), tensors, IDS)
        assert logits.shape == (2, 32, 281)
        assert (logits - model(IDS)).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("key", "value"),
    [("n_head", 8), ("layer_norm_epsilon", 1e-6), ("activation_function", "gelu"), ("tie_word_embeddings", True)],
)
def test_it_follows_config_json(key: str, value: object) -> None:
    """So that a wrong one shows."""
    model = noisy_model(dataclasses.replace(SHAPE, tie_weights=False)).double().eval()
    tensors = to_gpt2(dict(model.named_parameters()), model.config)
    with torch.no_grad():
        logits = gpt2_logits({**config_to_gpt2(model.config, "float32", None), key: value}, tensors, IDS)
        assert (logits - model(IDS)).abs().max() > 1e-6
