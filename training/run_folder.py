"""checkpoints/<run>/: who may write there, whether a run starts or goes on, and with which config."""

import fcntl
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.checkpoint import find_checkpoint, list_checkpoints, problem_of
from training.config import RunConfig, config_mapping
from training.config_check import config_from_mapping
from training.errors import UserError
from training.restore import read_state
from training.yaml_reader import read_yaml, yaml_text

CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
LOCK = ".lock"
SECONDS_TO_WAIT_FOR_LOCK = 5.0
MAY_CHANGE = ("evaluation", "checkpoint", "hub", "overrides")
"""Sections that a resumed run may have otherwise: they say what is recorded, not what is computed."""


@dataclass(frozen=True)
class Opening:
    """How a run begins in its folder; plain values, to be handed to all processes."""

    checkpoint: str | None
    """Folder name of the checkpoint to go on from; None = start."""
    config: dict[str, Any]
    """The run's config, as `config_mapping` makes it."""
    remarks: list[str]
    """What the user should know, a sentence each."""


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Holds a run's folder for this process, by a lock that the system releases even if the process is killed.

    Raises:
        UserError: another process holds it, also after a short wait, or the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("a")
    except OSError as error:
        raise UserError(
            f"{folder}: cannot be written ({error.strerror}); choose another folder with --output"
        ) from None
    with lock:
        deadline = time.monotonic() + SECONDS_TO_WAIT_FOR_LOCK
        while not _locked(lock.fileno()):
            if time.monotonic() > deadline:
                raise UserError(f"{folder}: another process is training this run; wait for it or stop it first")
            time.sleep(0.1)
        if not (folder / LOCK).exists():  # removed by the one that held it, below
            raise UserError(f"{folder}: the process that had this run has just given up; start again")
        try:
            yield
        finally:
            if [path.name for path in folder.iterdir()] == [LOCK]:  # nothing came of it: leave no empty folder
                (folder / LOCK).unlink()
                folder.rmdir()


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def saved_overrides(folder: Path, fresh: Sequence[str]) -> list[str]:
    """The --set of a run's start and of its resumption: they stay part of the run; the later of a key counts."""
    saved = read_yaml(folder / CONFIG).get("overrides", []) if list_checkpoints(folder) else []
    by_key = {override.partition("=")[0].strip(): override for override in [*saved, *fresh]}
    return list(by_key.values())


def open_run(folder: Path, config: RunConfig, resume: str | None, overwrite: bool) -> Opening:
    """Decides how a run begins, without changing anything yet.

    Args:
        folder: checkpoints/<run>.
        config: as the YAML file and --set give it now; for a resumption with the --set of the run's start.
        resume: latest, best, auto or a checkpoint's name; None = start.
        overwrite: start although the folder holds a run.

    Raises:
        UserError: it can neither start nor go on as asked.
    """
    checkpoints = list_checkpoints(folder)
    holds_run = bool(checkpoints) or (folder / CONFIG).exists()
    if resume == "auto":
        whole = any(problem_of(checkpoint) is None for checkpoint in reversed(checkpoints))
        resume, overwrite = ("latest", False) if whole else (None, holds_run)
    if resume is None:
        if not overwrite and any(folder.glob("[!.]*")):
            what = "a run already; go on with --resume latest" if holds_run else "other files; choose another --output"
            raise UserError(f"{folder}: holds {what}, or start again with --overwrite (which deletes all of it)")
        return Opening(None, config_mapping(config), [])
    found = find_checkpoint(folder, resume)
    remarks = [f"passed over {name}: {reason}" for name, reason in found.passed_over]
    step = read_state(found.path).step
    newer = [path.name for path in checkpoints if int(path.name.removeprefix("step_")) > step]
    newer = [name for name in newer if name not in dict(found.passed_over)]
    if newer:
        remarks.append(f"newer checkpoints will be removed once the next one is complete: {', '.join(newer)}")
    saved = config_from_mapping({"name": config.name, **read_yaml(folder / CONFIG)}, str(folder / CONFIG))
    refuse_changes(saved, config, folder)
    return Opening(found.path.name, config_mapping(config), remarks)


def refuse_changes(saved: RunConfig, now: RunConfig, folder: Path) -> None:
    """Makes sure that what a run computes stays as it was when it started.

    The split of the global batch may change, unless the loss depends on it.

    Raises:
        UserError: naming the first key that differs, with both values.
    """
    before, after = _flat(config_mapping(saved)), _flat(config_mapping(now))
    for key in sorted(before.keys() | after.keys()):
        if key.split(".")[0] in MAY_CHANGE or before.get(key) == after.get(key):
            continue
        same_batch = saved.global_batch == now.global_batch and now.loss.reduction != "microbatch_mean"
        if key.startswith("batch.") and same_batch:
            continue
        raise UserError(
            f"{folder}: the run was started with {key} {before.get(key)}, now it is {after.get(key)}; a run's config "
            "stays as it was: undo the change, or start another run (another name, or --overwrite)"
        )


def begin(folder: Path, opening: Opening) -> None:
    """Makes the folder ready: emptied for a start, with the resolved config in any case."""
    if opening.checkpoint is None:
        for path in folder.iterdir():
            if path.name == LOCK:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    beside = folder / f".{CONFIG}.new"
    comment = "# The resolved config of this run: base, interventions and overrides are in the values already.\n"
    beside.write_text(comment + yaml_text(opening.config), encoding="utf-8")
    os.replace(beside, folder / CONFIG)


def _flat(mapping: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
