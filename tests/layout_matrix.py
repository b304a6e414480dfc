"""The whole matrix of the promise: data x dropout x clipping x precision, on many layouts, through torchrun.

    python tests/layout_matrix.py docs/layout_matrix.md

Each layout is one launch, which trains every combination; the first is the whole batch at once on one process.
tests/test_layout_matrix.py keeps the layouts that fit a test's time.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY)]  # torchrun and python both start this file by its path

from model.gpt import build_gpt  # noqa: E402
from training.config_check import config_from_mapping  # noqa: E402
from training.data import open_training_data  # noqa: E402
from training.distributed import Group, Process  # noqa: E402
from training.gradients import AveragedGradients  # noqa: E402
from training.layout import plan_layout  # noqa: E402
from training.loss import SequenceLoss  # noqa: E402
from training.optimizer import build_optimizer  # noqa: E402
from training.step import Trainer  # noqa: E402
from training.step_records import StepReader  # noqa: E402

STEPS = 20
BATCH = {"world_size": 2, "microbatch": 7, "accumulation": 1}
LAYOUTS = [(1, 14), (1, 1), (1, 5), (2, 7), (2, 2), (3, 2), (3, 7), (4, 1), (4, 4), (5, 3)]
"""(processes, microbatch); 14 sequences divide by 3, 4 and 5 processes no more than by microbatches of 4 and 5."""
TOLERANCES = {"float32": (1e-6, 1e-5), "float64": (1e-12, 1e-12), "bf16": (5e-4, 2e-3)}
"""Largest relative difference of a loss, and absolute difference of a final weight."""


@dataclass(frozen=True)
class Combination:
    """One run of the matrix."""

    data: str
    dropout: float
    clip_norm: float | None
    precision: str

    @property
    def name(self) -> str:
        """The combination in words."""
        clipping = "no clipping" if self.clip_norm is None else f"clip {self.clip_norm:g}"
        return f"{self.data}, dropout {self.dropout:g}, {clipping}, {self.precision}"

    def config(self) -> dict[str, Any]:
        """The run's config."""
        return {
            "name": "matrix",
            "model": {"vocab_size": 97, "context_length": 32, "emb_dim": 48, "n_heads": 4, "n_layers": 3}
            | {"dropout": self.dropout, "qkv_bias": True},
            "data": {"dataset": self.data, "train_tokens": 10 * 14 * 32 if self.data == "packed" else -1}
            | {"epochs": 2 if self.data == "packed" else 4, "shuffle": True},
            "batch": BATCH,
            "precision": {"amp": "bf16" if self.precision == "bf16" else "off", "matmul": "highest"},
            "optimizer": {"learning_rate": 1e-3, "clip_norm": self.clip_norm},
            "schedule": {"name": "cosine", "warmup_percent": 20},
            "evaluation": {"every": None},
        }


def combinations(precisions: Sequence[str] = ("float32", "float64")) -> list[Combination]:
    """Every combination in some precisions; and in bf16, which a CPU may have to emulate, one."""
    every = [
        Combination(data, dropout, clip_norm, precision)
        for data in ("packed", "documents")
        for dropout in (0.0, 0.1)
        for clip_norm in (None, 0.3)
        for precision in precisions
    ]
    return [*every, Combination("documents", 0.1, 0.3, "bf16")]


def write_datasets(folder: Path) -> None:
    """Writes `packed`, and `documents`: 1 to 60 tokens, of which a mask leaves some targets, or none."""
    generator = np.random.default_rng(3)
    tokens = torch.from_numpy(generator.integers(0, 97, 10 * 14 * 32 + 1).astype(np.uint16))
    ends = np.cumsum(generator.integers(1, 61, 80))  # six steps an epoch, the last one of 10 documents
    documents = torch.from_numpy(generator.integers(0, 97, ends[-1]).astype(np.uint16))
    mask = torch.from_numpy((generator.random(ends[-1]) < 0.4).astype(np.uint8))
    for name in ("packed", "documents"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    save_file({"tokens": tokens}, folder / "packed" / "train.safetensors")
    tensors = {"tokens": documents, "document_ends": torch.from_numpy(ends), "loss_mask": mask}
    save_file(tensors, folder / "documents" / "train.safetensors")


def train(
    group: Group, combination: Combination, datasets: Path, microbatch: int
) -> tuple[list[float], torch.nn.Module]:
    """Trains a combination; returns the losses, and the model."""
    config = config_from_mapping(combination.config(), combination.name)
    model = build_gpt(config.model, config.seeds.weights)
    if combination.precision == "float64":
        model = model.double()
    data = open_training_data(config, datasets / config.data.dataset)
    trainer = Trainer(
        config=config,
        process=group.process,
        layout=plan_layout(config.batch, group.process.world_size, microbatch),
        data=data,
        gradients=AveragedGradients(SequenceLoss(model), group),
        optimizer=build_optimizer(model, config.optimizer),
        scaler=None,
    )
    reader = StepReader(group)
    for step in range(STEPS):
        reader.add(step + 1, trainer.step(step))
    return [float(record.loss) for record in reader.read()[0] if record.loss is not None], model


def work(datasets: Path, output: Path, microbatch: int, precisions: Sequence[str]) -> None:
    """What each process of a launch does; rank 0 writes what it found."""
    process = Process.from_environment()
    with process.group() as group:
        losses = {}
        for combination in combinations(precisions):
            losses[combination.name], model = train(group, combination, datasets, microbatch)
            if process.is_main:
                save_file(dict(model.named_parameters()), output / f"{combination.name}.safetensors")
        if process.is_main:
            (output / "losses.json").write_text(json.dumps(losses))


def launch(datasets: Path, output: Path, processes: int, microbatch: int, precisions: Sequence[str]) -> None:
    """Starts a layout's processes with torchrun, and waits for them."""
    output.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command += [__file__, "--work", str(datasets), str(output), str(microbatch), *precisions]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@dataclass(frozen=True)
class Difference:
    """How far a layout is from the first one, in a combination."""

    combination: Combination
    layout: str
    loss: float
    weight: float

    @property
    def is_rounding(self) -> bool:
        """Whether it is within what the precision allows."""
        loss, weight = TOLERANCES[self.combination.precision]
        return self.loss <= loss and self.weight <= weight


def compare(
    layouts: Sequence[tuple[int, int]] = LAYOUTS, precisions: Sequence[str] = ("float32", "float64")
) -> Iterator[Difference]:
    """Trains everything on each layout and compares with the first one."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_datasets(folder)
        for number, (processes, microbatch) in enumerate(layouts):
            launch(folder, folder / str(number), processes, microbatch, precisions)
            for combination in combinations(precisions) if number else []:
                loss, weight = _differences(folder / "0", folder / str(number), combination.name)
                yield Difference(combination, f"{processes} x {microbatch}", loss, weight)


def _differences(first: Path, other: Path, name: str) -> tuple[float, float]:
    one, two = (np.array(json.loads((folder / "losses.json").read_text())[name]) for folder in (first, other))
    assert len(one) == len(two) == STEPS, "every step has targets"
    weights, found = (load_file(folder / f"{name}.safetensors") for folder in (first, other))
    # Key biases have no effect on the attention: their gradient is rounding alone, and Adam scales that up.
    apart = [float((found[key] - weights[key]).abs().max()) for key in weights if not key.endswith("key.bias")]
    return float(np.max(np.abs(two - one) / np.abs(one))), max(apart)


def markdown(differences: Sequence[Difference]) -> str:
    """The result as a document."""
    layouts = list(dict.fromkeys(difference.layout for difference in differences))
    lines = [
        "# The same run on every layout",
        "",
        f"Written by `python tests/layout_matrix.py docs/layout_matrix.md` with torch {torch.__version__} on a CPU.",
        f"{STEPS} steps of 14 sequences; the largest relative difference of a loss, and the largest difference of a",
        "final weight (key biases apart: their gradient is exactly zero), to the same run on one process with the",
        "whole batch at once. Columns are processes x microbatch. Losses are kept in units of 2^-24 nats a sequence,",
        "so that a difference of 0 can be one below that. Allowed: "
        + "; ".join(f"{name} {loss:g} and {weight:g}" for name, (loss, weight) in TOLERANCES.items())
        + ".",
        "",
        "| run | " + " | ".join(layouts) + " |",
        "|---" * (len(layouts) + 1) + "|",
    ]
    for combination in dict.fromkeys(difference.combination for difference in differences):
        cells = [
            f"{difference.loss:.0e}, {difference.weight:.0e}" + ("" if difference.is_rounding else " **too much**")
            for difference in differences
            if difference.combination == combination
        ]
        lines.append(f"| {combination.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Writes the document; 1 where a difference is more than rounding."""
    if sys.argv[1] == "--work":
        work(Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])
        return 0
    differences = list(compare())
    Path(sys.argv[1]).write_text(markdown(differences))
    return 0 if all(difference.is_rounding for difference in differences) else 1


if __name__ == "__main__":
    sys.exit(main())
