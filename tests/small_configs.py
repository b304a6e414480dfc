"""Run configs of the smallest useful model, and token files in which a token's value is its own position."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from safetensors.numpy import save_file

from training.config import RunConfig
from training.config_check import config_from_mapping

SECTIONS: dict[str, dict[str, Any]] = {
    "model": {"vocab_size": 2048, "context_length": 8, "emb_dim": 32, "n_heads": 2, "n_layers": 2, "dropout": 0},
    "data": {"dataset": "data"},
    "batch": {"world_size": 2, "microbatch": 2, "accumulation": 2},
    "precision": {"amp": "off"},
}


def small_config(**sections: Any) -> RunConfig:
    """64 tokens a step, in sequences of 8, on all the data there is, but for the sections given."""
    mapping: dict[str, Any] = {"name": "run", **SECTIONS}
    for section, values in sections.items():
        mapping[section] = {**mapping.get(section, {}), **values} if isinstance(values, dict) else values
    return config_from_mapping(mapping, "small")


def write_tokens(path: Path, tokens: ArrayLike, dtype: Any = np.uint16, key: str = "tokens") -> Path:
    """Writes a token file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({key: np.asarray(tokens, dtype=dtype)}, path)
    return path


def write_positions(path: Path, count: int) -> Path:
    """Writes P(count): the first token of a row is its offset, so order, gaps and repeats can be read from batches."""
    return write_tokens(path, np.arange(count))
