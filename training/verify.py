"""Shows on this machine that a config gives the same run on any layout: some steps of it, in real processes."""

import json
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from training.checkpoint_files import MANIFEST, MODEL
from training.config import RunConfig
from training.errors import RunError, UserError
from training.layout import plan_layout
from training.metrics_file import read_metrics
from training.torchrun import started, training_command, what_it_said

TOLERANCES = {"float32": 1e-5, "tf32": 1e-3, "bf16": 2e-3, "fp16": 2e-3}
"""Largest relative difference of a loss that rounding explains over a few steps; of a gradient norm ten times that."""
OFF = ("evaluation.every=null", "checkpoint.every=null")
"""What a run of a few steps does without."""


@dataclass(frozen=True)
class Measured:
    """What some steps of a run gave on one layout."""

    layout: str
    losses: list[float]
    """Training loss of each step, in nats per token."""
    grad_norms: list[float]
    counts: list[tuple[int, bool]]
    """Target tokens of each step, and whether it was skipped."""
    digest: str
    """The sha256 of the final weights' file."""
    all_reduces: int | None
    """Exchanges of gradients in the last step, one for each of DDP's buckets; None if it is one of the first two."""
    seconds: float
    loss_difference: float = 0.0
    """Largest relative difference to the first layout's losses."""
    norm_difference: float = 0.0
    weight_difference: float = 0.0
    """Largest absolute difference to the first layout's final weights. Key biases are left out: they have no effect
    on the attention, so their gradient is rounding alone, which Adam scales up."""


def default_layouts(config: RunConfig, gpus: int) -> list[tuple[int, int | None]]:
    """(processes, microbatch) of the layouts to compare where the user names none.

    One to four processes, or as many as there are GPUs, also those that do not divide the batch; and where the
    microbatch may change, half of it.
    """
    most = gpus or 4
    layouts: list[tuple[int, int | None]] = [(count, None) for count in sorted({1, 2, 3, 4, 8, most}) if count <= most]
    half = config.batch.microbatch // 2
    if not config.bitwise and half:
        layouts.insert(1, (1, half))
    return layouts if len(layouts) > 1 else layouts * 2  # twice the same, then: from run to run


def parse_layout(text: str) -> tuple[int, int | None]:
    """Reads N or NxM.

    Raises:
        UserError: it is neither.
    """
    numbers = text.split("x")
    if len(numbers) > 2 or not all(re.fullmatch("[1-9][0-9]{0,5}", number) for number in numbers):
        raise UserError(
            f"--layout {text}: must be a number of processes, or processes x microbatch as in 2x4; give one of these"
        )
    return int(numbers[0]), int(numbers[1]) if len(numbers) == 2 else None


def refuse_impossible(layouts: Sequence[tuple[int, int | None]], config: RunConfig) -> None:
    """Refuses layouts that cannot be compared: fewer than two, or in bitwise mode with another microbatch."""
    if len(layouts) < 2:
        raise UserError("--layout: one layout has nothing to be compared with; give at least two")
    own = config.batch.microbatch
    for processes, microbatch in layouts if config.bitwise else []:
        if microbatch not in (None, own):
            raise UserError(
                f"--layout {processes}x{microbatch}: with reproducibility: bitwise the microbatch stays the config's, "
                f"{own}, as another size rounds otherwise; give --layout {processes}"
            )


def tolerance_of(config: RunConfig, gpus: int) -> float:
    """The relative difference of losses that rounding explains, by the precision of the products."""
    if config.precision.amp != "off":
        return TOLERANCES[config.precision.amp]
    if config.precision.gradients == "bf16":
        return TOLERANCES["bf16"]
    return TOLERANCES["tf32" if gpus and config.precision.matmul != "highest" else "float32"]


def measure(
    run: str, config: RunConfig, datasets: Path, layouts: Sequence[tuple[int, int | None]], steps: int
) -> Iterator[Measured]:
    """Trains the first steps of a run on each layout, and compares with the first one.

    Args:
        run: the config, as the user named it.
        config: the same, read; with its overrides.
        datasets: folder of the datasets.
        layouts: (processes, microbatch or None for the config's) of each launch.
        steps: to train.

    Raises:
        RunError: a launch failed; with what it said.
    """
    first: Measured | None = None
    weights: dict[str, Tensor] = {}
    for processes, microbatch in layouts:
        with tempfile.TemporaryDirectory(prefix="isobatch-verify-") as folder:
            seconds = _launch(run, config, datasets, (processes, microbatch), steps, Path(folder))
            measured = _read(Path(folder) / config.name, config, (processes, microbatch), seconds)
            found = load_file(Path(folder) / config.name / "latest" / MODEL)
        first, weights = first or measured, weights or found
        yield replace(
            measured,
            loss_difference=_relative(first.losses, measured.losses),
            norm_difference=_relative(first.grad_norms, measured.grad_norms),
            weight_difference=max(
                float((found[name] - weight).abs().max())
                for name, weight in weights.items()
                if not name.endswith("key.bias")
            ),
        )


def agrees(measured: Measured, first: Measured, bitwise: bool, tolerance: float) -> bool:
    """Whether a layout gave the first one's run: to the last bit, or up to rounding."""
    if bitwise:
        return (measured.digest, measured.loss_difference) == (first.digest, 0.0)
    close = measured.loss_difference <= tolerance and measured.norm_difference <= 10 * tolerance
    return measured.counts == first.counts and close


def table(results: Sequence[Measured]) -> list[str]:
    """Lines that show the layouts side by side."""
    steps = [f"loss {step}" for step in range(1, len(results[0].losses) + 1)]
    rows = [["layout", *steps, "largest difference", "grad norm", "weights", "sha256", "all-reduces", "seconds"]]
    for measured in results:
        differences = (measured.loss_difference, measured.norm_difference, measured.weight_difference)
        rows.append(
            [
                measured.layout,
                *(f"{loss:.7f}" for loss in measured.losses),
                *(f"{difference:.1e}" for difference in differences),
                measured.digest[:12],
                "-" if measured.all_reduces is None else str(measured.all_reduces),
                f"{measured.seconds:.0f}",
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def describe_result(same: bool, config: RunConfig, tolerance: float) -> str:
    """What the table shows, in a sentence."""
    if config.bitwise:
        return "the same run to the last bit" if same else "not the same bits"
    bounds = f"losses within {tolerance:g}, gradient norms within {10 * tolerance:g}, relative to the first layout"
    return f"the same run up to rounding: {bounds}" if same else f"not the same run: expected {bounds}"


def _launch(
    run: str, config: RunConfig, datasets: Path, layout: tuple[int, int | None], steps: int, output: Path
) -> float:
    """Trains in `output`; returns the seconds that took."""
    processes, microbatch = layout
    options = ["--output", str(output), "--stop-after", str(steps)]
    options += [word for override in (*config.overrides, *OFF) for word in ("--set", override)]
    options += ["--microbatch", str(microbatch)] if microbatch is not None else []
    begun = time.monotonic()
    with started(training_command(run, datasets, processes, *options), subprocess.PIPE) as launcher:
        _, errors = launcher.communicate()
    if launcher.returncode:
        said = what_it_said(errors)
        raise RunError(f"{processes} processes: training ended with status {launcher.returncode}; {said}")
    return time.monotonic() - begun


def _read(folder: Path, config: RunConfig, layout: tuple[int, int | None], seconds: float) -> Measured:
    planned = plan_layout(config.batch, *layout, bitwise=config.bitwise)
    metrics = read_metrics(folder / "metrics.jsonl")
    manifest = json.loads((folder / "latest" / MANIFEST).read_text())
    return Measured(
        layout=f"{planned.world_size} x {planned.microbatch} x {planned.accumulation}",
        losses=[float(loss) for loss in metrics.train["loss"]],
        grad_norms=[float(norm) for norm in metrics.train["grad_norm"]],
        counts=[(int(line["target_tokens"]), bool(line["skipped"])) for line in metrics.train],
        digest=manifest[MODEL]["sha256"],
        all_reduces=metrics.events[-1]["all_reduces_per_step"],
        seconds=seconds,
    )


def _relative(expected: Sequence[float], found: Sequence[float]) -> float:
    one, other = torch.tensor(expected, dtype=torch.float64), torch.tensor(found, dtype=torch.float64)
    differences = (other - one).abs() / one.abs()
    differences[(one == other) | (one.isnan() & other.isnan())] = 0  # a step without targets has no loss in any layout
    return float(differences.max())
