"""What saving costs training: how long it waits, how long writing takes, how much steps slow down meanwhile.

    PYTHONPATH=. OMP_NUM_THREADS=2 python benchmarks/checkpoints.py --folder FOLDER

FOLDER lies on the disk that is measured. Prints a row for the model of configs/tiny.yaml and one for GPT-2 small,
untied (163 million parameters). The share is of a run that saves every 20 steps of a second each: training waits for
the copy, and for the checkpoint before where that is not written within the 20 seconds. Needs 4.1 GB of disk space and
7 GB of memory; --only tiny needs next to none.
"""

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from model.gpt import GPTConfig, build_gpt, parameter_count
from training.checkpoint_writer import CheckpointWriter
from training.config import Optimizer
from training.config_file import load_run_config
from training.loss import SequenceLoss
from training.metrics import RunLog
from training.optimizer import build_optimizer
from training.snapshot import TrainingState

SECONDS_BETWEEN_SAVES = 20.0
LEAST_STEPS = 5
LEAST_SECONDS = 3.0
MICROBATCH = 1
TOKENS = 128


class Record(RunLog):
    """The log of a run, which keeps what is told of checkpoints: (seconds of writing, seconds waited)."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "metrics.jsonl", True, 0, None)
        self.saved: list[tuple[float, float]] = []

    def checkpoint(self, step: int, name: str, is_best: bool, seconds: float, stall: float) -> None:
        """See RunLog.checkpoint."""
        super().checkpoint(step, name, is_best, seconds, stall)
        self.saved.append((seconds, stall))


class Training:
    """Steps of a model on random tokens."""

    def __init__(self, config: GPTConfig) -> None:
        self.module = SequenceLoss(build_gpt(config, seed=42))
        self.optimizer = build_optimizer(self.module, Optimizer())
        self.one_step()  # makes the optimizer's state

    def one_step(self) -> float:
        """Trains a step; its seconds."""
        began = time.perf_counter()
        ids = torch.randint(self.module.model.config.vocab_size, (MICROBATCH, TOKENS + 1))
        self.optimizer.zero_grad()
        self.module(ids[:, :-1], ids[:, 1:])[0].backward()
        self.optimizer.step()
        return time.perf_counter() - began

    def steps(self) -> list[float]:
        """The seconds of some steps with nothing else going on."""
        times: list[float] = []
        while len(times) < LEAST_STEPS or sum(times) < LEAST_SECONDS:
            times.append(self.one_step())
        return times


def measure(name: str, config: GPTConfig, folder: Path, saves: int) -> str:
    """A row of the table: a first save, which counts apart, and some more."""
    training, record = Training(config), Record(folder)
    writer = CheckpointWriter(folder, 1, record, None)
    writer.prepare(training.module.model, TrainingState(0, 0, 0.0, 0, None, None, None, "", {}))
    alone, meanwhile = [], []
    for step in range(1, saves + 2):
        alone += training.steps()
        state = TrainingState(step, 0, 0.0, 0, None, None, None, "", {})
        writer.take(training.module.model, training.optimizer, state, upload=False)
        times = []
        while len(record.saved) < step and not writer.failed:
            times.append(training.one_step())
        writer.wait()
        meanwhile += times[:-1]  # during the last of them writing ended
    writer.close()
    first, *others = record.saved
    writing, stall = (median(column) for column in zip(*others, strict=True))
    share = (stall + max(0.0, writing - SECONDS_BETWEEN_SAVES)) / SECONDS_BETWEEN_SAVES
    size = sum(path.stat().st_size for path in (folder / "latest").iterdir())
    slower = f"{median(meanwhile) / median(alone):.2f} times" if meanwhile else "too short for a step"
    return (
        f"| {name}, {parameter_count(config):,} | {size / 1e6:,.0f} MB | {stall * 1e3:,.1f} ms "
        f"(first {first[1] * 1e3:,.1f}, longest {max(stall for _, stall in others) * 1e3:,.1f}) | {share:.2%} "
        f"| {writing:.2f} s | {slower} |"
    )


def main() -> None:
    """Measures what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="on the disk that is measured")
    parser.add_argument("--saves", type=int, default=5, help="after the first")
    parser.add_argument("--only", choices=["tiny", "small"], help="one of the two models")
    arguments = parser.parse_args()
    models = {"tiny": load_run_config("tiny", []).model, "small": GPTConfig(dropout=0.0)}
    print("| model, parameters | checkpoint | training waits | of 20 s | writing | steps meanwhile take |")
    print("|---|---|---|---|---|---|")
    for name in [arguments.only] if arguments.only else list(models):
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            print(measure(name, models[name], Path(folder), arguments.saves), flush=True)


if __name__ == "__main__":
    main()
