"""What bitwise mode costs: a step of GPT-2 small with sums of integers against one with DDP's sums of floats.

    python benchmarks/bitwise.py

Both in one process, in turn, on one thread, as bitwise mode has it; the ratio of the medians counts.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

from model.gpt import build_gpt, parameter_count  # noqa: E402
from training.config_check import config_from_mapping  # noqa: E402
from training.data import open_training_data  # noqa: E402
from training.distributed import Group, Process  # noqa: E402
from training.gradients import AveragedGradients, ExactGradients  # noqa: E402
from training.layout import plan_layout  # noqa: E402
from training.loss import SequenceLoss  # noqa: E402
from training.optimizer import build_optimizer  # noqa: E402
from training.step import Trainer  # noqa: E402

ROUNDS = 3


def build(group: Group, folder: Path, reproducibility: str) -> Trainer:
    """A trainer of GPT-2 small, two microbatches of one sequence of 1,024 tokens a step."""
    mapping = {
        "name": "bitwise",
        "model": {"dropout": 0.0, "tie_weights": True},
        "data": {"dataset": "random"},
        "batch": {"world_size": 1, "microbatch": 1, "accumulation": 2},
        "precision": {"amp": "off", "matmul": "highest"},
        "reproducibility": reproducibility,
    }
    config = config_from_mapping(mapping, "benchmark")
    model = build_gpt(config.model, config.seeds.weights)
    way = ExactGradients if config.bitwise else AveragedGradients
    return Trainer(
        config=config,
        process=group.process,
        layout=plan_layout(config.batch, 1, bitwise=config.bitwise),
        data=open_training_data(config, folder),
        gradients=way(SequenceLoss(model), group),
        optimizer=build_optimizer(model, config.optimizer),
        scaler=None,
    )


def main() -> None:
    """Prints a line for each way, and the ratio."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name, Process.from_environment().group() as group:
        tokens = np.random.default_rng(1).integers(0, 50257, 2 * 1024 * (ROUNDS + 1) + 1).astype(np.uint16)
        save_file({"tokens": tokens}, Path(name) / "train.safetensors")
        trainers = {way: build(group, Path(name), way) for way in ("rounding", "bitwise")}
        seconds: dict[str, list[float]] = {way: [] for way in trainers}
        for step in range(ROUNDS + 1):
            for way, trainer in trainers.items():
                started = time.perf_counter()
                trainer.step(step)
                if step:  # the first one allocates
                    seconds[way].append(time.perf_counter() - started)
    medians = {way: statistics.median(values) for way, values in seconds.items()}
    parameters = parameter_count(trainers["bitwise"].config.model)
    print(f"{parameters:,} parameters, torch {torch.__version__}, {ROUNDS} rounds, one thread")
    for way, values in seconds.items():
        print(f"{way:9} {medians[way]:7.2f} s a step (from {min(values):.2f} to {max(values):.2f})")
    print(f"bitwise mode takes {100 * (medians['bitwise'] / medians['rounding'] - 1):.1f} % longer")
    print(f"memory: 8 bytes a parameter more, {8 * parameters / 2**20:,.0f} MiB; each process sends 8 bytes for 4")


if __name__ == "__main__":
    main()
