"""What a CUDA machine makes of GPT-2 small, in under eight minutes, with one command.

    PYTHONPATH=. python benchmarks/gpu.py

Searches the largest microbatch; measures with `isobatch bench` bf16 and fp16, eager and compiled, with dropout, on one
GPU and on all; and sets transformers' Trainer beside ours where it is installed. The model is that of
configs/1xrtx3090-baseline.yaml, without dropout but where that is measured. Writes benchmarks/results/MACHINE-DATE.json
and a table beside it, .md. Parts that the time does not suffice for are left out, and the file says so, as it does of
parts that failed.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).with_name("results")
RUN = "1xrtx3090-baseline"
SEARCH = "largest microbatch"
MOST_SEQUENCES = 32
"""Of a microbatch to measure with: more would make no step faster, but each measurement longer."""
FALLBACK = 4
"""Sequences of a microbatch, where the search found none."""


@dataclass(frozen=True)
class Part:
    """Something to measure."""

    name: str
    command: list[str]
    least_seconds: float
    """With less time left, it is not begun."""


@dataclass(frozen=True)
class Outcome:
    """What became of a part."""

    name: str
    command: str
    status: str
    """done, left out, or failed, and why."""
    seconds: float
    output: str


def search() -> Part:
    """The part that comes first: the others measure with the microbatch that it finds."""
    options = ["--find-max-microbatch", "--set", "model.dropout=0", "--set", "precision.amp=bf16"]
    return Part(SEARCH, [sys.executable, str(REPOSITORY / "ddp_train.py"), RUN, str(RESULTS), *options], 20)


def parts(microbatch: int, gpus: int) -> list[Part]:
    """The other parts, what matters most first.

    Args:
        microbatch: sequences of a process at once.
        gpus: of the machine.
    """
    bench = [sys.executable, "-m", "training.cli", "bench", RUN, "--json", "--rounds", "3"]
    bench += ["--set", f"batch.microbatch={microbatch}"]
    trainer = [sys.executable, str(REPOSITORY / "benchmarks" / "trainer.py")]
    one = ["--processes", "1", "--accumulation", "4"]

    def measured(amp: str, dropout: float = 0.0) -> list[str]:
        return [*bench, "--set", f"precision.amp={amp}", "--set", f"model.dropout={dropout}"]

    return [
        Part("bf16", [*measured("bf16"), "--processes", "1"], 40),
        Part("bf16, compiled", [*measured("bf16"), *one, "--compile"], 60),
        *([Part(f"bf16, {gpus} GPUs", [*measured("bf16"), "--processes", str(gpus)], 50)] if gpus > 1 else []),
        Part("fp16", [*measured("fp16"), *one], 30),
        Part("fp16, compiled", [*measured("fp16"), *one, "--compile"], 60),
        Part("bf16, dropout 0.1", [*measured("bf16", 0.1), *one], 30),
        Part("bf16, activation checkpointing", [*measured("bf16"), *one, "--activation-checkpointing"], 30),
        Part(
            "transformers' Trainer",
            [*trainer, "--workload", "W2", "--amp", "bf16", "--rounds", "2", "--steps", "20"],
            60,
        ),
    ]


def carry_out(todo: Sequence[Part], end: float) -> Iterator[Outcome]:
    """Runs parts one after another; none runs beyond the end, a time of time.monotonic()."""
    for part in todo:
        begun = time.monotonic()
        left = end - begun
        print(f"{part.name}: {max(left, 0):.0f} s left", file=sys.stderr, flush=True)
        status, output = f"left out: needs {part.least_seconds:g} s", ""
        if left >= part.least_seconds:
            status, output = _run(part.command, left)
        yield Outcome(part.name, " ".join(part.command[1:]), status, time.monotonic() - begun, output)


def _run(command: list[str], seconds: float) -> tuple[str, str]:
    """The status of a command, and what it printed."""
    try:
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return f"left out: not done after {seconds:.0f} s", ""
    if done.returncode == 0:
        return "done", done.stdout
    lines = [line.strip(" │") for line in done.stderr.splitlines()]
    said = next((line for line in lines if "no such option" in line.lower() or line.startswith("error: ")), lines[-1:])
    return f"failed: {said if isinstance(said, str) else ''.join(said)}", ""


def microbatch_found(outcome: Outcome) -> int:
    """The microbatch to measure with: what the search found, if not too many sequences."""
    found = re.search(r"train with .*--microbatch (\d+)", outcome.output)
    return min(int(found[1]), MOST_SEQUENCES) if found else FALLBACK


def result_of(machine: dict[str, Any], microbatch: int, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The result file: JSON that a part printed is taken as values."""
    found = [asdict(outcome) for outcome in outcomes]
    for values in found:
        if values["output"].startswith("{"):
            values["output"] = json.loads(values["output"])
    return {"machine": machine, "run": RUN, "microbatch": microbatch, "parts": found}


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    machine = result["machine"]
    lines = [
        f"# {machine['name']}, {machine['date']}",
        "",
        f"`python benchmarks/gpu.py`, torch {machine['torch']}, CUDA {machine['cuda']}; {result['run']} without "
        "dropout but where it says so. R: the rate of large matrix products in the same type, in the same process.",
        "",
        "| | layout | tokens/s | TFLOP/s | R, TFLOP/s | % of R | peak memory, GiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for part in result["parts"]:
        values = part["output"]
        if not isinstance(values, dict):
            lines.append(f"| {part['name']} | {_last_line(part)} | | | | | |")
            continue
        for row in values["rows"]:
            ceiling = values["rates"][str(row["world_size"])]["median"]
            lines.append(
                f"| {part['name']} | {row['world_size']} x {row['microbatch']} x {row['accumulation']} "
                f"| {row['tokens_per_second']['median']:,.0f} | {row['flops_per_second']['median'] / 1e12:,.1f} "
                f"| {ceiling / 1e12:,.1f} | {100 * row['share']['median']:.1f} | {row['peak_memory'] / 2**30:.1f} |"
            )
    return "\n".join(lines) + "\n"


def _last_line(part: dict[str, Any]) -> str:
    lines = part["output"].strip().splitlines()
    return str(lines[-1] if lines else part["status"]).strip("| ").replace("|", ",")


def file_name(machine: dict[str, Any]) -> str:
    """The name of a machine's result, without an ending."""
    return re.sub(r"[^a-z0-9]+", "-", f"{machine['name']} {machine['date']}".lower()).strip("-")


def main() -> None:
    """Measures this machine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=7.5, help="for all of it; parts beyond are left out")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the result")
    arguments = parser.parse_args()
    end = time.monotonic() + 60 * arguments.minutes
    import torch

    if not torch.cuda.is_available():
        print("error: gpu.py: this machine has no CUDA device; isobatch bench measures a CPU", file=sys.stderr)
        sys.exit(2)
    gpus = torch.cuda.device_count()
    machine = {
        "name": f"{gpus}x {torch.cuda.get_device_name()}",
        "memory": torch.cuda.get_device_properties(0).total_memory,
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
    }
    first = next(carry_out([search()], end))
    microbatch = microbatch_found(first)
    outcomes = [first]
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / file_name(machine)
    for outcome in carry_out(parts(microbatch, gpus), end):
        outcomes.append(outcome)
        result = result_of(machine, microbatch, outcomes)  # written after each part, so that none is lost
        path.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
        path.with_suffix(".md").write_text(table(result))
    print(path.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
