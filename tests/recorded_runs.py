"""Run folders as training leaves them, written from rows of metrics."""

import json
import math
from pathlib import Path
from typing import Any

import yaml

CONFIG = {
    "interventions": ["gradient-clipping", "no-dropout"],
    "overrides": ["optimizer.clip_norm=0.5"],
    "data": {"dataset": "gpjt/fineweb-gpt2-tokens"},
    "optimizer": {"name": "adamw", "clip_norm": 0.5},
}


def train_row(step: int, **changes: Any) -> dict[str, Any]:
    """The row of a step of 1,024 tokens that took half a second."""
    row: dict[str, Any] = {
        "kind": "train",
        "step": step,
        "tokens": 1024 * step,
        "loss": 4.0 + 2.0 / step,
        "loss_min": 3.5 + 2.0 / step,
        "loss_max": 4.5 + 2.0 / step,
        "learning_rate": 1e-3,
        "grad_norm": 0.4,
        "clipped": False,
        "skipped": False,
        "target_tokens": 1024,
        "tokens_per_second": 2048.0,
        "seconds": 0.5 * step,
    }
    return row | changes


def bad_row(step: int) -> dict[str, Any]:
    return train_row(step, loss=None, loss_min=None, loss_max=None, grad_norm=None, skipped=True)


def validation_row(step: int, loss: float | None, **changes: Any) -> dict[str, Any]:
    row = {"kind": "validation", "step": step, "loss": loss, "target_tokens": 4096, "bits_per_byte": None}
    return row | changes


def event(step: int, name: str, **values: Any) -> dict[str, Any]:
    return {"kind": "event", "step": step, "event": name, **values}


def begin(step: int, name: str, world_size: int, **values: Any) -> dict[str, Any]:
    layout = {"world_size": world_size, "microbatch": 2, "accumulation": 4 // world_size}
    sentence = f"global batch 8 = {world_size} x 2 x {4 // world_size}"
    return event(
        step,
        name,
        total_steps=20,
        parameters=163009536,
        tokens_per_step=1024,
        layout={**layout, "sentence": sentence},
        device="cpu",
        machine=f"box {world_size}",
        torch="2.13.0",
        dataset_revision="abc123",
        **values,
    )


def write_run(folder: Path, rows: list[dict[str, Any]], config: dict[str, Any] | None = None) -> Path:
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG if config is None else config))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))
    return folder


def full_run(folder: Path) -> Path:
    """20 steps, resumed after 10 on a machine twice as fast, with changes: one overflow, one non-finite, 3 clipped."""
    rows = [begin(0, "start", 1)]
    for step in range(1, 11):
        rows.append(bad_row(step) if step in (1, 7) else train_row(step))
        if step in (1, 7):
            rows.append(event(step, "nonfinite", loss_scale=65536.0, overflow=step == 1))
    rows += [
        validation_row(10, 4.25, bits_per_byte=1.31),
        event(10, "checkpoint", checkpoint="step_00000010", best=True, seconds=0.1),
        event(10, "sample", prompt="Every effort", text="an older text"),
        event(10, "stopped"),
        begin(10, "resume", 1, checkpoint="step_00000010", changed={"optimizer.eps": [1e-8, 1e-7]}),  # killed at once
        begin(10, "resume", 2, checkpoint="step_00000010", changed={"optimizer.betas": [[0.9, 0.95], [0.9, 0.999]]}),
    ]
    for step in range(11, 21):
        clipped = step in (12, 13, 14)
        norm = 2.5 if step == 13 else 0.6 if clipped else 0.4
        rows.append(train_row(step, seconds=5.0 + 0.25 * (step - 10), grad_norm=norm, clipped=clipped))
    rows += [
        validation_row(15, math.log(64), bits_per_byte=1.25),
        event(15, "checkpoint", checkpoint="step_00000015", best=True, seconds=0.1),
        validation_row(20, 4.2, bits_per_byte=1.27),
        event(20, "sample", prompt="Every effort", text=" ends in ```` and\n```python\n# code"),
        event(20, "finished", seconds=7.5, tokens=20480, best_step=15),
    ]
    return write_run(folder, rows)
