"""The files of a checkpoint on the disk: their names, and how a checkpoint is found and verified."""

import json
import os
import re
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from training.errors import UserError
from training.file_digest import file_digest

MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
MANIFEST = "manifest.json"
SUPERSEDED = "superseded"
CONTENTS = (MODEL, OPTIMIZER, STATE)
WORDS = ("latest", "best", "auto")
RESCUE = "copy a whole one there from elsewhere (another disk, the Hub), or train again with --overwrite"
FOR_THE_MODEL = (MODEL, STATE)
"""What is needed to use a model, not to train it further."""


@dataclass(frozen=True)
class Found:
    """A verified checkpoint, and the (name, reason) of newer ones that were passed over."""

    path: Path
    passed_over: list[tuple[str, str]]


def checkpoint_name(step: int) -> str:
    """The folder of the state after `step` updates."""
    return f"step_{step:08d}"


def is_checkpoint_name(name: str) -> bool:
    """Whether a folder of this name is one of a checkpoint."""
    return re.fullmatch("step_[0-9]+", name) is not None


def list_checkpoints(run_folder: Path) -> list[Path]:
    """Returns the folders named step_<number>, complete or not, in the order of their numbers."""
    if not run_folder.is_dir():
        return []
    folders = [path for path in run_folder.iterdir() if is_checkpoint_name(path.name)]
    return sorted((path for path in folders if path.is_dir()), key=lambda path: (number_of(path), path.name))


def number_of(folder: Path) -> int:
    """The step of a checkpoint's folder, by its name."""
    return int(folder.name.removeprefix("step_"))


def problem_of(folder: Path, names: tuple[str, ...] = CONTENTS) -> str | None:
    """Verifies files of a checkpoint by size and sha256: None, or which file is wrong and how."""
    try:
        missing = [name for name in (*names, MANIFEST) if not (folder / name).is_file()]
        if missing:
            return f"{', '.join(missing)} missing"
        manifest = json.loads((folder / MANIFEST).read_bytes())
        for name in names:
            size, written = (folder / name).stat().st_size, manifest[name]["size"]
            if size != written:
                return f"{name} has {size} bytes, {MANIFEST} says {written}"
            if file_digest(folder / name) != manifest[name]["sha256"]:
                return f"{name} is damaged: its sha256 is not the one in {MANIFEST}"
    except OSError as error:
        return f"cannot be read ({error})"
    except (ValueError, KeyError, TypeError, RecursionError):
        return f"{MANIFEST} is damaged: it does not give the size and sha256 of each file"
    return None


def find_checkpoint(run_folder: Path, which: str, names: tuple[str, ...] = CONTENTS) -> Found:
    """Finds a checkpoint whose files are there and unchanged.

    Args:
        run_folder: checkpoints/<run>.
        which: "latest" (the newest good one), "best" or a checkpoint's name.
        names: the files that are needed.

    Raises:
        UserError: there is none, or the one asked for is damaged.
    """
    checkpoints = list_checkpoints(run_folder)
    if which == "latest":
        return _newest_good(run_folder, checkpoints, names)
    folder = run_folder / which
    if which != "best" and folder not in checkpoints:  # which also keeps `which` inside run_folder
        names_there = [path.name for path in checkpoints]
        meant = get_close_matches(which, [*WORDS, *names_there], n=1, cutoff=0.7)
        remedy = f"did you mean {meant[0]}? " if meant else ""
        remedy += f"those there are: {', '.join(names_there) or 'none'}"
        raise UserError(f"{run_folder}: there is no checkpoint {which!r}; {remedy}")
    if which == "best" and folder.is_symlink():
        target = run_folder / os.readlink(folder)
        folder = run_folder / target.name
        if target.parent.resolve() != run_folder.resolve() or not is_checkpoint_name(target.name):
            there = ", ".join(path.name for path in checkpoints) or "none"
            raise UserError(
                f"{run_folder / which}: leads to {target}, which is no checkpoint of this run; those there are: {there}"
            )
    problem = problem_of(folder, names) if folder.is_dir() else "there is no such checkpoint"
    if problem:
        others = ", ".join(path.name for path in checkpoints if path.resolve() != folder.resolve())
        raise UserError(f"{folder}: {problem}; {f'the others there are: {others}' if others else RESCUE}")
    return Found(folder, [])


def _newest_good(run_folder: Path, checkpoints: list[Path], names: tuple[str, ...]) -> Found:
    passed_over: list[tuple[str, str]] = []
    for folder in reversed(checkpoints):
        superseded = "superseded: the run went on from an older checkpoint"
        problem = superseded if (folder / SUPERSEDED).exists() else problem_of(folder, names)
        if problem is None:
            return Found(folder, passed_over)
        passed_over.append((folder.name, problem))
    reasons = "".join(f"; {name}: {problem}" for name, problem in passed_over)
    raise UserError(f"{run_folder}: there is no complete checkpoint{reasons}{f'; {RESCUE}' if passed_over else ''}")
