"""YAML configs, configs of the smallest useful model, and token files whose tokens are their own positions."""

import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import ArrayLike
from safetensors.numpy import save_file

from training.config import RunConfig
from training.config_check import ConfigError, config_from_mapping
from training.config_file import load_run_config

LEAST = "data: {dataset: tokens, train_tokens: 5120}\nbatch: {world_size: 2, microbatch: 4, accumulation: 2}\n"
"""What a config cannot do without."""

SECTIONS: dict[str, dict[str, Any]] = {
    "model": {"vocab_size": 2048, "context_length": 8, "emb_dim": 32, "n_heads": 2, "n_layers": 2, "dropout": 0},
    "data": {"dataset": "data"},
    "batch": {"world_size": 2, "microbatch": 2, "accumulation": 2},
    "precision": {"amp": "off"},
}


class Configs:
    """A folder of YAML files; `run.yaml` is the one that is loaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, text: str, name: str = "run") -> Path:
        path = self.folder / f"{name}.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    def load(self, text: str = "", *overrides: str) -> RunConfig:
        """Loads what is needed with `text` added."""
        return load_run_config(str(self.write(LEAST + text)), overrides)

    def problems(self, text: str, *overrides: str) -> list[str]:
        """The problems that are told, each without the file that leads the message."""
        with pytest.raises(ConfigError) as caught:
            load_run_config(str(self.write(text)), overrides)
        where = str(self.folder / "run.yaml") + (" with --set" if overrides else "")
        one = re.fullmatch(rf"{re.escape(where)}: (.+)", str(caught.value))
        if one:
            return [one[1]]
        first, *rest = str(caught.value).split("\n  - ")
        assert first == f"{where} has {len(rest)} problems:"
        return rest


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


def write_sparse(path: Path, count: int, dtype: str = "U16", tokens: dict[int, bytes] | None = None) -> Path:
    """Writes a token file of zeros that takes no room on the disk, but for the tokens given by their offsets."""
    size = int(dtype[1:]) // 8
    header = json.dumps({"tokens": {"dtype": dtype, "shape": [count], "data_offsets": [0, count * size]}}).encode()
    header += b" " * (-len(header) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        start = file.tell()
        for offset, value in (tokens or {}).items():
            file.seek(start + offset * size)
            file.write(value)
        file.truncate(start + count * size)
    return path
