"""The memory that a step needs, measured beside the estimate of --dry-run.

    PYTHONPATH=. OMP_NUM_THREADS=1 python benchmarks/memory.py [--only tiny]

Each case is a process of its own that trains three steps of two microbatches. On a CPU its peak is the highest resident
set less that before the model is built, when a first small model has brought in the libraries' pages; on a GPU it is
what PyTorch's allocator has handed out at most. With MALLOC_MMAP_THRESHOLD_=65536 each tensor of a CPU has pages of its
own, so that what is measured is what the tensors take, without the gaps that the C library leaves between them.
"""

import argparse
import subprocess
import sys
from dataclasses import dataclass
from typing import Any, cast

import torch

from model.gpt import GPTConfig, build_gpt
from training.benchmark.peak_memory import peak_memory, reset_peak_memory
from training.config import RunConfig
from training.config_check import config_from_mapping
from training.data import TrainingData
from training.distributed import Group, Process
from training.gradients import gradient_sums
from training.layout import plan_layout
from training.loss import SequenceLoss
from training.microbatch_search import LongestSequences
from training.optimizer import build_optimizer
from training.plan import estimated_memory
from training.step import Trainer, build_scaler

TINY = {"vocab_size": 4096, "context_length": 128, "emb_dim": 128, "n_heads": 4, "n_layers": 4, "tie_weights": True}
W1 = {"vocab_size": 8192, "context_length": 256, "emb_dim": 384, "n_heads": 6, "n_layers": 6, "tie_weights": True}
GPT2 = {"tie_weights": True, "qkv_bias": True}
MIB = 2**20


@dataclass(frozen=True)
class Case:
    """A config, its microbatch, and whether activations are computed again."""

    model: dict[str, Any]
    microbatch: int
    dropout: float = 0.0
    amp: str = "off"
    bitwise: bool = False
    recomputing: bool = False

    @property
    def config(self) -> RunConfig:
        """Two microbatches a step on one process."""
        mapping = {
            "name": "case",
            "model": {**self.model, "dropout": self.dropout},
            "data": {"dataset": "none"},
            "batch": {"world_size": 1, "microbatch": self.microbatch, "accumulation": 2},
            "precision": {"amp": self.amp},
            "reproducibility": "bitwise" if self.bitwise else "rounding",
        }
        return config_from_mapping(mapping, "benchmarks/memory.py")


CASES = {
    "tiny, 8": Case(TINY, 8),
    "tiny, 8, dropout": Case(TINY, 8, dropout=0.1),
    "tiny, 64": Case(TINY, 64),
    "tiny, 64, bf16": Case(TINY, 64, amp="bf16"),
    "tiny, 64, dropout, bf16": Case(TINY, 64, dropout=0.1, amp="bf16"),
    "tiny, 64, recomputing": Case(TINY, 64, recomputing=True),
    "tiny, 64, bitwise": Case(TINY, 64, bitwise=True),
    "W1, 8": Case(W1, 8),
    "W1, 8, dropout": Case(W1, 8, dropout=0.1),
    "W1, 8, bf16": Case(W1, 8, amp="bf16"),
    "W1, 8, dropout, bf16": Case(W1, 8, dropout=0.1, amp="bf16"),
    "W1, 8, bitwise": Case(W1, 8, bitwise=True),
    "W1, 8, recomputing": Case(W1, 8, recomputing=True),
    "W1, 32, recomputing": Case(W1, 32, recomputing=True),
    "GPT-2 small, 1": Case(GPT2, 1),
    "GPT-2 small, 2": Case(GPT2, 2),
    "GPT-2 small, 2, dropout": Case(GPT2, 2, dropout=0.1),
    "GPT-2 small, 1, bf16": Case(GPT2, 1, amp="bf16"),
    "GPT-2 small, 2, recomputing": Case(GPT2, 2, recomputing=True),
    "GPT-2 small, 1, bitwise": Case(GPT2, 1, bitwise=True),
}


def measured_memory(case: Case) -> int:
    """Bytes that the steps of a case need at their peak, beyond what this process has before."""
    with Process.from_environment().group() as group:
        device = group.process.device
        train(group, Case({**TINY, "emb_dim": 8, "n_layers": 1}, 1, case.dropout, case.amp, case.bitwise))
        reset_peak_memory(device)
        before = peak_memory(device)
        train(group, case)
        return peak_memory(device) - before


def train(group: Group, case: Case) -> None:
    """Three steps of a model of its own."""
    config, process = case.config, group.process
    if config.bitwise:
        process.use_reproducible_kernels()
    model = build_gpt(GPTConfig(**{**case.model, "dropout": case.dropout}), seed=1).to(process.device)
    model.recompute_blocks = case.recomputing
    optimizer = build_optimizer(model, config.optimizer)
    gradients = gradient_sums(SequenceLoss(model), group, config)
    data = cast(TrainingData, LongestSequences(config.model, config.global_batch, total_steps=3))
    layout = plan_layout(config.batch, 1, bitwise=config.bitwise)
    trainer = Trainer(config, process, layout, data, gradients, optimizer, build_scaler(config.precision))
    for step in range(3):
        trainer.step(step)


def main() -> None:
    """Prints a table: estimate, measurement, and how much larger the estimate is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name begins with this")
    parser.add_argument("--case", choices=CASES, help="measure this one here and print its bytes")
    arguments = parser.parse_args()
    if arguments.case:
        print(measured_memory(CASES[arguments.case]))
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print("| case | estimate, MiB | measured, MiB | estimate / measured |\n|---|---|---|---|")
    for name, case in CASES.items():
        if not name.startswith(arguments.only):
            continue
        command = [sys.executable, __file__, "--case", name]
        measured = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        estimate = estimated_memory(case.config, case.microbatch, device, case.recomputing)
        print(f"| {name} | {estimate / MIB:.0f} | {measured / MIB:.0f} | {estimate / measured:.2f} |", flush=True)


if __name__ == "__main__":
    main()
