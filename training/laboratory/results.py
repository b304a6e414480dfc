"""What a run came to, read from its folder: config.yaml and metrics.jsonl alone."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from training.config import RunConfig, config_mapping
from training.config_check import config_of_record
from training.errors import one_line
from training.laboratory.statistics import Seeds
from training.metrics_file import Metrics, read_metrics, require_file
from training.run_folder import CONFIG, METRICS
from training.yaml_reader import read_yaml

OUTSIDE = ("seeds", "evaluation", "checkpoint", "hub", "tracking", "resolved", "interventions", "overrides")
"""Keys of config.yaml in which repetitions of one run may differ: seeds, what is looked at and kept, the record."""


@dataclass(frozen=True)
class Digests:
    """What says that two runs had the same beginning and the same measure; None = not recorded."""

    weights: str | None = None
    """Of the initial weights."""
    data_order: str | None = None
    validation: str | None = None
    """Of the tokens and targets validated on."""
    tokenizer: str | None = None


@dataclass(frozen=True)
class RunResult:
    """One run, as far as it is compared."""

    name: str
    folder: Path
    group: str
    """Runs of one group are repetitions that differ in their seeds."""
    seed_weights: int
    seed_training: int
    loss: float | None
    """Validation loss of its last step, nats per token; nan where it was not finite, None without one."""
    bits_per_byte: float | None
    """nan where the loss was not finite, None where the bytes are not known."""
    target_tokens: int | None
    """Targets that the final validation covered."""
    train_tokens: int
    """Input tokens trained on so far."""
    tokens_per_step: int
    seconds: float
    """Training time."""
    tokens_per_second: float | None
    step: int
    total_steps: int | None
    finished: bool
    imported: bool
    """Trained elsewhere and imported."""
    digests: Digests
    dataset_revision: str | None
    config: RunConfig = field(repr=False)
    metrics: Metrics = field(repr=False, compare=False)

    @property
    def seeds(self) -> Seeds:
        """Of the weights and of the training."""
        return self.seed_weights, self.seed_training


def read_result(run_folder: Path, group: str | None = None) -> RunResult:
    """Reads what a run came to, also one that is not finished.

    Args:
        run_folder: checkpoints/<run>.
        group: its group; None = one of its own, named as the run.

    Raises:
        UserError: config.yaml or metrics.jsonl is missing or cannot be read.
    """
    require_file(run_folder / CONFIG)
    name = one_line(run_folder.resolve().name)  # in tables, pages and on terminals
    values = read_yaml(run_folder / CONFIG)
    config = config_of_record({**values, "name": "run"}, str(run_folder / CONFIG))
    metrics = read_metrics(run_folder / METRICS)
    begin = (metrics.events_named("start", "resume", "import") or [{}])[-1]
    tokens, seconds = metrics.tokens_and_seconds() or (0, 0.0)
    step = metrics.reached
    # One on the way is no result, though it may be the last one: of a run resumed without evaluation, say.
    final = metrics.validation[-1] if step in metrics.validation["step"][-1:] else None
    return RunResult(
        name=name,
        folder=run_folder,
        group=name if group is None else group,
        seed_weights=config.seeds.weights,
        seed_training=config.seeds.training,
        loss=None if final is None else float(final["loss"]),
        bits_per_byte=None if final is None else _bits_per_byte(final),
        target_tokens=None if final is None else int(final["target_tokens"]),
        train_tokens=tokens,
        tokens_per_step=config.tokens_per_step,
        seconds=seconds,
        tokens_per_second=tokens / seconds if seconds > 0 else None,
        step=step,
        total_steps=begin.get("total_steps"),
        finished=metrics.ending == "finished",
        imported=begin.get("event") == "import",
        digests=_digests(metrics),
        dataset_revision=begin.get("dataset_revision") or config.data.revision,
        config=config,
        metrics=metrics,
    )


def _bits_per_byte(validation: np.void) -> float | None:
    """Of a validation; nan is null in the file, as is a number that is not known."""
    bits = float(validation["bits_per_byte"])
    return None if math.isnan(bits) and math.isfinite(validation["loss"]) else bits


def read_results(run_folders: Sequence[Path]) -> list[RunResult]:
    """Reads several runs, those that differ in nothing but seeds as one group, named as its first run.

    Raises:
        UserError: as `read_result`.
    """
    results = [read_result(folder) for folder in run_folders]
    twice = [name for name, count in Counter(result.name for result in results).items() if count > 1]
    results = [_with_its_folder(result) if result.name in twice else result for result in results]
    names: list[tuple[dict[str, Any], str]] = []
    grouped = []
    for result in results:
        if result.imported:  # its config is that of its evaluation
            grouped.append(result)
            continue
        what = identity(result.config)
        known = next((name for config, name in names if config == what), None)
        if known is None:
            names.append((what, result.name))
        grouped.append(replace(result, group=known or result.name))
    return grouped


def _with_its_folder(result: RunResult) -> RunResult:
    """With a name that tells it from a run of the same name elsewhere."""
    name = f"{one_line(result.folder.resolve().parent.name)}/{result.name}"
    return replace(result, name=name, group=name)


def identity(config: RunConfig) -> dict[str, Any]:
    """The values of a config that repetitions of one run share."""
    return {key: value for key, value in config_mapping(config).items() if key not in OUTSIDE}


def _digests(metrics: Metrics) -> Digests:
    """As last recorded; a resumption says again what it goes on with, and with which weights the run began."""

    def last(key: str) -> str | None:
        found = [event[key] for event in metrics.events if event.get(key)]
        return found[-1] if found else None

    keys = [f"{field.name}_sha256" for field in fields(Digests)]
    return Digests(*map(last, keys))
