"""Models of two small blocks, and checkpoints of them."""

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from model.gpt import GPTConfig, build_gpt
from training.checkpoint import point, supersede, write_checkpoint
from training.snapshot import TrainingState, take_snapshot

TINY = GPTConfig(vocab_size=64, context_length=8, emb_dim=32, n_heads=2, n_layers=2, dropout=0.0)
TIED = dataclasses.replace(TINY, tie_weights=True)
IDS = torch.arange(16).view(2, 8)


def state_at(step: int, config: GPTConfig = TINY) -> TrainingState:
    return TrainingState(
        step=step,
        tokens=64 * step,
        seconds=0.1 + step,
        nonfinite_in_a_row=0,
        best_loss=None,
        best_step=None,
        scaler=None,
        data="of the golden tokens",
        config={"model": dataclasses.asdict(config)},
    )


def adamw(model: nn.Module, **settings: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **settings)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(IDS.to(next(model.parameters()).device)).logsumexp(-1).mean().backward()
        optimizer.step()


def save(run_folder: Path, step: int, model: nn.Module | None = None, config: GPTConfig = TINY) -> Path:
    """Saves `model`, or one new from seed 0, as step N, before its first update."""
    model = model or build_gpt(config, seed=0)
    return write_checkpoint(run_folder, take_snapshot(model, adamw(model), state_at(step, config)))


def set_final_norm(checkpoint: Path, value: float) -> bytes:
    """Changes weights of a checkpoint, and its manifest with them, as no crash could; returns the file's content."""
    path = checkpoint / "model.safetensors"
    weights = load_file(path)
    weights["final_norm.weight"][:] = value
    save_file(weights, path, metadata={"format": "pt"})
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    content = path.read_bytes()
    manifest["model.safetensors"] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    return content


def names_in(run_folder: Path) -> set[str]:
    """Everything in a folder."""
    return set(os.listdir(run_folder))


def resumed_from_an_older_one(run_folder: Path) -> None:
    """Steps 2, 4, 8 and 12, resumed from 4; best is of the past that was given up."""
    for step in (2, 4, 8, 12):
        save(run_folder, step)
    point(run_folder, "best", "step_00000008")
    supersede(run_folder, "step_00000004", ["step_00000008", "step_00000012"])
