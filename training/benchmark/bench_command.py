"""The command of `isobatch` that measures how fast steps of a run are on this machine."""

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from training.errors import RunError, UserError
from training.json_file import strict_json

if TYPE_CHECKING:  # which imports PyTorch
    from training.benchmark.bench_process import Launched, Plan

ACCUMULATIONS = [1, 4, 16]


def bench(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A config: its name, or the path of a YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a config value; repeatable.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Every layout is measured once in each.")] = 5,
    accumulation: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Microbatches of a process in a step; repeatable.  [default: 1, 4, 16]"),
    ] = None,
    processes: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Processes; repeatable.  [default: 1, and one for each GPU, without GPUs 2]"),
    ] = None,
    activation_checkpointing: Annotated[
        bool, typer.Option("--activation-checkpointing", help="As ddp_train.py takes it.")
    ] = False,
    compile_model: Annotated[bool, typer.Option("--compile", help="As ddp_train.py takes it.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure the steps of a run on this machine, beside what it can do; on random tokens, nothing is kept."""
    import torch

    from training.benchmark.bench_process import Plan
    from training.benchmark.bench_report import build_report, report_lines
    from training.compilation import refuse_to_compile
    from training.config import config_mapping
    from training.config_check import refuse_fp16_without_gpu
    from training.config_file import load_run_config

    config = load_run_config(run, overrides or [])
    gpus = torch.cuda.device_count()
    refuse_fp16_without_gpu(config.precision, gpus > 0, "measure another precision with --set precision.amp=bf16")
    if compile_model:
        refuse_to_compile(config)
    counts = sorted(set(processes or [1, gpus or 2]))
    if gpus and counts[-1] > gpus:
        raise UserError(
            f"--processes {counts[-1]}: this machine has {gpus} GPUs, and each process needs one of its own"
        )
    accumulations = sorted(set(accumulation or ACCUMULATIONS))
    with tempfile.TemporaryDirectory(prefix="isobatch-bench-") as folder:
        threads, asked = torch.get_num_threads(), config_mapping(config)
        ways = (activation_checkpointing, compile_model)
        plan = Plan(config.name, asked, accumulations, rounds, threads, folder, *ways)
        sequences = config.batch.microbatch * accumulations[-1] * counts[-1]
        write_random_tokens(Path(folder), config.model.vocab_size, 2 * sequences * config.model.context_length + 1)
        launches = [launch(plan, count) for count in counts]
    report = build_report(config, launches)
    print(strict_json(report.values()) if as_json else "\n".join(report_lines(report)))


def write_random_tokens(folder: Path, vocab_size: int, tokens: int) -> None:
    """Writes a token file to train on, the same each time."""
    import numpy as np
    from safetensors.numpy import save_file

    dtype = np.uint16 if vocab_size <= 2**16 else np.uint32
    random = np.random.default_rng(0).integers(vocab_size, size=tokens, dtype=dtype)
    save_file({"tokens": random}, folder / "train.safetensors")


def launch(plan: "Plan", processes: int) -> "Launched":
    """Measures on so many processes; shows how far they are.

    Raises:
        RunError: they failed; with what they said.
    """
    import json
    import subprocess
    from dataclasses import asdict

    from training.benchmark.bench_process import PROGRESS, RESULT, Launched, Measured
    from training.torchrun import started, what_it_said

    file = Path(plan.folder) / f"{processes}.json"
    file.write_text(strict_json(asdict(plan)))
    launcher = ["torch.distributed.run", "--standalone", f"--nproc_per_node={processes}", "-m"] if processes > 1 else []
    command = [sys.executable, "-m", *launcher, "training.benchmark.bench_process", str(file)]
    said = []
    with started(command, subprocess.PIPE) as process:
        assert process.stderr is not None, "it was asked for"
        for line in process.stderr:
            if line.startswith(PROGRESS):
                print(line.removeprefix(PROGRESS), end="", file=sys.stderr, flush=True)
            else:
                said.append(line)
        status = process.wait()
    if status:
        raise RunError(f"{processes} processes: measuring ended with status {status}; {what_it_said(''.join(said))}")
    values = json.loads(file.with_suffix(RESULT).read_text())
    return Launched(**{**values, "measured": [Measured(**measured) for measured in values["measured"]]})
