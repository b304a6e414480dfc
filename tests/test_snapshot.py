"""A copy of what a checkpoint holds."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from small_checkpoints import IDS, TINY, adamw, state_at, train

from model.gpt import build_gpt
from training.checkpoint import write_checkpoint
from training.restore import load_model
from training.snapshot import take_snapshot


def test_a_snapshot_does_not_follow_the_training(tmp_path: Path) -> None:
    model = build_gpt(TINY, seed=0)
    optimizer = adamw(model)
    train(model, optimizer)
    before = model(IDS)
    snapshot = take_snapshot(model, optimizer, state_at(2))
    moment = snapshot.optimizer["exp_avg.head.weight"].clone()
    train(model, optimizer)
    folder = write_checkpoint(tmp_path, snapshot)
    assert torch.equal(load_model(folder)(IDS), before)
    assert torch.equal(load_file(folder / "optimizer.safetensors")["exp_avg.head.weight"], moment)
