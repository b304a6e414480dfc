"""Checkpoints whose every weight shows, a tokenizer for them, and their exports."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from small_checkpoints import save
from small_corpora import GPT2

from model.gpt import GPT, GPTConfig, build_gpt
from training.config import RunConfig
from training.config_check import config_from_mapping
from training.exchange.foreign_model import read_foreign_tokenizer
from training.tokenizer import train_tokenizer

TEXT = "Every effort moves you, every effort.\nWe'll say: naïve café; 3.14 – “quoted” 東京\n"
TOKENS = 281
SHAPE = GPTConfig(vocab_size=TOKENS, context_length=32, emb_dim=32, n_heads=4, n_layers=2, dropout=0.1)
VARIANTS = {
    f"{'tied' if tied else 'untied'}-{'bias' if bias else 'no-bias'}": dataclasses.replace(
        SHAPE, tie_weights=tied, qkv_bias=bias
    )
    for tied in (False, True)
    for bias in (False, True)
}
PADDED = dataclasses.replace(SHAPE, vocab_size=TOKENS + 31)
"""With rows that stand for no token, as 50304 rows have for 50257 tokens."""


def noisy_model(config: GPTConfig) -> GPT:
    """A model whose biases are far from zero and whose norms are far from one, so that a fault in each shows."""
    model = build_gpt(config, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return model


def write_tokenizer(dataset: Path) -> Path:
    """Writes a byte-level BPE of 281 tokens into a dataset's folder."""
    dataset.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer([TEXT] * 3, TOKENS)
    assert tokenizer.get_vocab_size() == TOKENS
    tokenizer.save(str(dataset / "tokenizer.json"))
    return dataset / "tokenizer.json"


def write_gpt2_tokenizer(folder: Path) -> Path:
    """Writes GPT-2's own tokenizer into a folder, from its published vocabulary and merges."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_bytes((GPT2 / "encoder.json").read_bytes())
    (folder / "merges.txt").write_bytes((GPT2 / "vocab.bpe").read_bytes())
    tokenizer = read_foreign_tokenizer(folder)
    assert tokenizer is not None
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def save_noisy(run_folder: Path, config: GPTConfig) -> Path:
    """Saves a noisy model as step 3 of a run; returns the checkpoint."""
    return save(run_folder, 3, noisy_model(config), config)


def run_config(model: GPTConfig, **sections: Any) -> RunConfig:
    """The config of a run of a model."""
    mapping: dict[str, Any] = {
        "name": "run",
        "model": dataclasses.asdict(model),
        "batch": {"world_size": 1, "microbatch": 2, "accumulation": 1},
        "data": {"dataset": "data"},
        "precision": {"amp": "off"},
        **sections,
    }
    return config_from_mapping(mapping, "test")


def without_transformers(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Makes the check's own process unable to import transformers, which takes it ten seconds."""
    package = folder / "blocked" / "transformers"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text("raise ImportError('blocked here')")
    patch.setenv("PYTHONPATH", str(package.parent))
