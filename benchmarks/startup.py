"""How long it takes from the command to the first step.

    python benchmarks/startup.py --rounds 5

Starts `torchrun --standalone --nproc_per_node=2 ddp_train.py tiny datasets/ --stop-after 1` and waits for the first
line of a step in metrics.jsonl. Between the rounds it measures what no program that torchrun starts and that trains
with DDP can do without: torchrun's own imports, PyTorch's, and those of its compiler, which DDP asks whether it is in
use. The dataset is made first where it is not there yet, in datasets/ or where --datasets says.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from training.config import REPOSITORY, Data
from training.data import provide_dataset
from training.torchrun import training_command

IMPORTS = {
    "torchrun's imports": "import torch.distributed.run",
    "PyTorch's imports": "import torch",
    "PyTorch's imports with its compiler": "import torch, torch._dynamo",
}


def seconds_to_first_step(datasets: Path, processes: int) -> float:
    """From starting the command to the first step that is recorded, in seconds."""
    with tempfile.TemporaryDirectory(prefix="isobatch-startup-") as folder:
        command = training_command("tiny", datasets, processes, "--stop-after", "1", "--output", folder)
        metrics = Path(folder) / "tiny" / "metrics.jsonl"
        begun = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            while not (metrics.exists() and b'"kind": "train"' in metrics.read_bytes()):
                if process.poll() is not None:
                    raise SystemExit(
                        f"{' '.join(command)} ended with status {process.returncode} before its first step"
                    )
                time.sleep(0.01)
            seconds = time.perf_counter() - begun
            process.wait()
    return seconds


def seconds_of(code: str) -> float:
    """Of a Python process that runs some code, in seconds."""
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - begun


def main() -> None:
    """Prints a table of medians, in seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--datasets", type=Path, default=REPOSITORY / "datasets")
    arguments = parser.parse_args()
    provide_dataset(Data(dataset="python-library"), arguments.datasets)
    first_step = f"first step, {arguments.processes} processes"
    found: dict[str, list[float]] = {first_step: [], **{name: [] for name in IMPORTS}}
    for _ in range(arguments.rounds + 1):  # the first only warms the disk's cache
        found[first_step].append(seconds_to_first_step(arguments.datasets, arguments.processes))
        for name, code in IMPORTS.items():
            found[name].append(seconds_of(code))
    print("| | median, s | least | most |\n|---|---|---|---|")
    for name, (_, *seconds) in found.items():
        print(f"| {name} | {median(seconds):.2f} | {min(seconds):.2f} | {max(seconds):.2f} |")


if __name__ == "__main__":
    main()
