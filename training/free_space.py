"""Is there room on the disk for a run's checkpoints? Asked before it begins."""

import shutil
from contextlib import suppress
from itertools import islice
from pathlib import Path

from model.gpt import parameter_count
from training.checkpoint import remove_dead_writes
from training.checkpoint_files import list_checkpoints
from training.config import RunConfig
from training.errors import UserError
from training.run_folder import Opening
from training.snapshot import TrainingState

BYTES_PER_PARAMETER = 12
"""Of a checkpoint: a weight and AdamW's two moments, in float32."""


def check_free_space(folder: Path, config: RunConfig, opening: Opening, state: TrainingState, stop: int) -> None:
    """Compares the free space with what the checkpoints of a run will need at most, up to a step.

    Args:
        folder: checkpoints/<run>, which is there.
        config: of the run.
        opening: how it is about to begin.
        state: the one that it begins from.
        stop: the step up to which it trains.

    Raises:
        UserError: it cannot be enough; both numbers are named.
    """
    remove_dead_writes(folder)
    there = sum(_bytes_in(path) for path in list_checkpoints(folder))
    disk = shutil.disk_usage(folder)
    free = disk.free
    if opening.checkpoint is None:  # what is there goes before the first is written, or stays for ever
        free, there = free + (0 if opening.keeps_others else there), 0
    needed = bytes_needed(config, state, stop, there)
    if needed > free and disk.total:  # some file systems in a network do not tell
        raise UserError(
            f"{folder}: {size_in_words(free)} are free, and the checkpoints of this run will need up to "
            f"{size_in_words(needed)} more, {size_in_words(_size_of_one(config))} each; make room, lower "
            "checkpoint.keep, or write elsewhere with --output"
        )


def bytes_needed(config: RunConfig, state: TrainingState, stop: int, there: int) -> int:
    """What a run's checkpoints will need at most beside those that it has: a new one is whole before an old one goes.

    Args:
        config: of the run.
        state: the one that it begins from.
        stop: the step up to which it trains.
        there: bytes of the checkpoints that it has.
    """
    most = _most(config, state.best_step is not None)
    intervals = (config.evaluation.every, config.checkpoint.every, config.hub.every)
    steps = range(min(state.step + 1, stop), stop + 1)
    saves = (step for step in steps if step == stop or any(every and step % every == 0 for every in intervals))
    new = sum(1 for _ in islice(saves, most))
    size = _size_of_one(config)
    return min(new * size, max(size, most * size - there))


def disk_line(config: RunConfig, total_steps: int | None) -> str:
    """The line of a plan about what the checkpoints of a run will take of the disk at most.

    Args:
        config: of the run.
        total_steps: of the run; None while the length of the data is not known.
    """
    size = _size_of_one(config)
    start = TrainingState(0, 0, 0.0, 0, None, None, None, "", {})
    together = _most(config, False) * size if total_steps is None else bytes_needed(config, start, total_steps, 0)
    number = together // size
    return f"disk: {size_in_words(size)} for a checkpoint, up to {number} at once: {size_in_words(together)}"


def _most(config: RunConfig, has_best: bool) -> int:
    """How many checkpoints there are at once, at most, in a run that saves often enough."""
    # One that is being uploaded and one that waits stay, though they are removed.
    return config.checkpoint.keep + (bool(config.evaluation.every) or has_best) + 1 + 2 * bool(config.hub.every)


def size_in_words(size: float) -> str:
    """A number of bytes for people."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.0f} MB"


def _size_of_one(config: RunConfig) -> int:
    return BYTES_PER_PARAMETER * parameter_count(config.model)


def _bytes_in(folder: Path) -> int:
    size = 0
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # it has just gone, as files of NFS and of editors do
            size += path.lstat().st_size  # an editor's lock is a link that leads nowhere
    return size
