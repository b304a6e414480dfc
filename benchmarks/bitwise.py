"""What bitwise mode costs: the share of a step of GPT-2 small that goes into its sums of integers.

    python benchmarks/bitwise.py

On one thread, as bitwise mode has it. Timed within each step, so that a busy machine slows both alike; what DDP's own
sums would take is not taken off.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from torch import Tensor

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

from model.gpt import build_gpt, parameter_count  # noqa: E402
from training.config_check import config_from_mapping  # noqa: E402
from training.data import open_training_data  # noqa: E402
from training.distributed import Group, Process  # noqa: E402
from training.gradients import ExactGradients  # noqa: E402
from training.layout import plan_layout  # noqa: E402
from training.loss import SequenceLoss  # noqa: E402
from training.optimizer import build_optimizer  # noqa: E402
from training.step import Trainer  # noqa: E402

STEPS = 3


class TimedGradients(ExactGradients):
    """The same, with the seconds that it took itself."""

    seconds = 0.0

    def begin(self, weight_sum: float, microbatches: int, loss_scale: Tensor) -> None:
        """See ExactGradients."""
        started = time.perf_counter()
        super().begin(weight_sum, microbatches, loss_scale)
        self.seconds += time.perf_counter() - started

    @contextmanager
    def microbatch(self, last: bool) -> Iterator[None]:
        """See ExactGradients."""
        with super().microbatch(last):
            yield
            started = time.perf_counter()
        self.seconds += time.perf_counter() - started

    def finish(self) -> Tensor:
        """See ExactGradients."""
        started = time.perf_counter()
        out_of_range = super().finish()
        self.seconds += time.perf_counter() - started
        return out_of_range


def build(group: Group, folder: Path) -> tuple[Trainer, TimedGradients]:
    """A trainer of GPT-2 small, two microbatches of one sequence of 1,024 tokens a step."""
    mapping = {
        "name": "bitwise",
        "model": {"dropout": 0.0, "tie_weights": True},
        "data": {"dataset": "random"},
        "batch": {"world_size": 1, "microbatch": 1, "accumulation": 2},
        "precision": {"amp": "off", "matmul": "highest"},
        "reproducibility": "bitwise",
    }
    config = config_from_mapping(mapping, "benchmark")
    model = build_gpt(config.model, config.seeds.weights)
    gradients = TimedGradients(SequenceLoss(model), group)
    trainer = Trainer(
        config=config,
        process=group.process,
        layout=plan_layout(config.batch, 1, bitwise=True),
        data=open_training_data(config, folder),
        gradients=gradients,
        optimizer=build_optimizer(model, config.optimizer),
        scaler=None,
    )
    return trainer, gradients


def main() -> None:
    """Prints the share of each step, and the memory."""
    with tempfile.TemporaryDirectory() as name, Process.from_environment().group() as group:
        group.process.use_reproducible_kernels()
        tokens = np.random.default_rng(1).integers(0, 50257, 2 * 1024 * (STEPS + 1) + 1).astype(np.uint16)
        save_file({"tokens": tokens}, Path(name) / "train.safetensors")
        trainer, gradients = build(group, Path(name))
        trainer.step(0)  # the first one allocates
        parts, wholes = [], []
        for step in range(1, STEPS + 1):
            gradients.seconds, started = 0.0, time.perf_counter()
            trainer.step(step)
            wholes.append(time.perf_counter() - started)
            parts.append(gradients.seconds)
    parameters = parameter_count(trainer.config.model)
    shares = [100 * part / whole for part, whole in zip(parts, wholes, strict=True)]
    print(f"{parameters:,} parameters, 2 microbatches of 1,024 tokens, torch {torch.__version__}, one thread")
    print(f"a step: {statistics.median(wholes):.1f} s, of which the integers: {statistics.median(parts):.2f} s")
    print(f"share: {statistics.median(shares):.1f} % (from {min(shares):.1f} to {max(shares):.1f})")
    print(
        f"memory: 8 bytes a parameter, {8 * parameters / 2**20:,.0f} MiB; as much is sent by each process, twice DDP's"
    )


if __name__ == "__main__":
    main()
