"""What may change when a run goes on: its config in a checkpoint, compared with the one given now.

Refused is what would have made the steps already done other steps. The rest is taken from the next step on, and is
recorded.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from training.config import RunConfig, config_mapping
from training.config_check import written
from training.errors import UserError

TAKEN = (
    "data.validation_start",
    "data.validation_tokens",
    "data.tokenizer",
    "precision",
    "optimizer",
    "schedule",
    "loss",
    "evaluation",
    "checkpoint",
    "tracking",
    "hub",
    "reproducibility",
)
"""Keys and sections that only steps to come depend on. A key that is not named in this file is refused."""
NEVER_TAKEN = ("optimizer.name",)
LENGTH = ("data.train_tokens", "data.epochs")
"""Taken where the steps already done read the same sequences in the same order."""
RECORD = ("resolved", "interventions", "overrides")
"""How the values came about, not what they are."""
VALIDATION = ("evaluation.tokens", "data.validation_start", "data.validation_tokens")
"""What a validation loss is measured on: losses before and after a change of these do not compare."""

Changed = dict[str, list[Any]]
"""[old, new] by dotted key; null also where a key is absent (the schedules have different ones)."""


class Passes(NamedTuple):
    """How long a run is, and where its epochs begin."""

    steps_per_epoch: int
    epochs: int


@dataclass(frozen=True)
class Changes:
    """The keys in which two configs differ."""

    refused: list[str]
    """What cannot be taken: keys with old and new value, and the reason where it is not the key itself."""
    taken: Changed


def compare_configs(
    saved: RunConfig, now: RunConfig, done: int, passes: tuple[Passes, Passes] | None = None
) -> Changes:
    """Sorts what differs between a checkpoint's config and the one to go on with. Pure.

    Args:
        saved: the checkpoint's.
        now: the one to go on with.
        done: steps that the checkpoint has behind it.
        passes: of the two, once the data are open; before that a length of -1 (all there is) is not judged.
    """
    before, after = flat_values(config_mapping(saved)), flat_values(config_mapping(now))
    changed = {
        key: [before.get(key), after.get(key)]
        for key in sorted(before.keys() | after.keys())
        if key not in RECORD and before.get(key) != after.get(key)
    }
    batch = [key for key in changed if key.startswith("batch.")]
    length = [key for key in LENGTH if key in changed]
    length_problem = _length_problem(passes or _passes(saved, now), saved.data.shuffle, done)
    together = [(batch, _batch_problem(saved, now)), (length, length_problem)]
    groups = [([key], "") for key in changed if key not in (*batch, *length) and not _may_change(key)]
    groups += [(keys, problem) for keys, problem in together if keys and problem]
    refused = [
        ", ".join(shown(key, changed[key], " ") for key in keys) + (f" ({problem})" if problem else "")
        for keys, problem in groups
    ]
    taken = {key: values for key, values in changed.items() if not any(key in keys for keys, _ in groups)}
    return Changes(refused, taken)


def refuse_changes(changes: Changes, folder: Path, done: int) -> None:
    """Raises a UserError that names everything that is refused, if there is anything."""
    if changes.refused:
        raise UserError(
            f"{folder}: after {done:,} steps these changes would make it another run: {', '.join(changes.refused)}; "
            "a run keeps its model, seeds, global batch and the order of its data: undo them, or start another run "
            "(another name, or --overwrite)"
        )


def change_lines(changed: Changed, done: int) -> list[str]:
    """What the user is told of the changes that are taken, a line each."""
    lines = [f"{shown(key, values, ': ')} from step {done + 1:,} on" for key, values in changed.items()]
    if changes_validation(changed):
        lines.append(
            f"validation losses up to step {done:,} do not compare with those to come: the best is looked for anew, "
            "and the link `best` stays as it is until the next validation"
        )
    return lines


def changes_validation(changed: Changed) -> bool:
    """Whether validation losses before and after do not compare."""
    return any(key in changed for key in VALIDATION)


def _may_change(key: str) -> bool:
    return key not in NEVER_TAKEN and (key in TAKEN or key.split(".")[0] in TAKEN)


def _batch_problem(saved: RunConfig, now: RunConfig) -> str:
    if saved.global_batch != now.global_batch:
        return f"the global batch {saved.global_batch:,} -> {now.global_batch:,}"
    if saved.batch.microbatch != now.batch.microbatch:
        if saved.loss.reduction == now.loss.reduction == "microbatch_mean":
            return "on which loss.reduction microbatch_mean depends"
        if saved.bitwise and now.bitwise:
            return "on which the last bits depend, that reproducibility: bitwise keeps"
    return ""


def _passes(saved: RunConfig, now: RunConfig) -> tuple[Passes, Passes] | None:
    """As far as the configs alone tell."""
    if saved.total_steps is None or now.total_steps is None:
        return None
    return (
        Passes(saved.total_steps // saved.data.epochs, saved.data.epochs),
        Passes(now.total_steps // now.data.epochs, now.data.epochs),
    )


def _length_problem(passes: tuple[Passes, Passes] | None, shuffled: bool, done: int) -> str:
    """Why a run of another length would not have done the same steps so far; nothing if it would."""
    if passes is None:
        return ""
    before, after = passes
    totals = [length.steps_per_epoch * length.epochs for length in passes]
    if totals[0] != totals[1] and totals[1] <= done:
        return f"{totals[1]:,} steps in all instead of {totals[0]:,}, and {done:,} are done"
    if before.steps_per_epoch == after.steps_per_epoch or done == 0:
        return ""
    if shuffled:
        return "data.shuffle orders another number of sequences otherwise; data.epochs may grow"
    first = min(before.steps_per_epoch, after.steps_per_epoch)
    if done > first:
        return f"the steps from {first + 1:,} on would have been in another epoch"
    return ""


def shown(key: str, values: list[Any], between: str) -> str:
    """A changed value in words."""
    old, new = (value if isinstance(value, str) else written(value) for value in values)
    return f"{key}{between}{old} -> {new}"


def flat_values(mapping: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a config by dotted key."""
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        flat |= flat_values(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
