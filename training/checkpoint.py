"""Checkpoints: how they are written, become visible only when whole, and are removed.

    checkpoints/<run>/step_00000617/   the state after 617 updates
        model.safetensors              parameters by name; the bytes depend on the weights alone
        optimizer.safetensors          optimizer state by kind and parameter; empty before the first update
        state.json                     TrainingState: counters, loss scale, the run's config
        manifest.json                  size and sha256 of the other three
    checkpoints/<run>/{latest,best}    relative symbolic links

One process writes, one checkpoint at a time (training/checkpoint_writer.py says when). Nothing is ever pickled or
unpickled. training/checkpoint_files.py finds them, training/restore.py loads them.
"""

import ctypes
import dataclasses
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from training.checkpoint_files import (
    CONTENTS,
    MANIFEST,
    MODEL,
    OPTIMIZER,
    STATE,
    SUPERSEDED,
    checkpoint_name,
    list_checkpoints,
    number_of,
)
from training.file_digest import file_digest
from training.snapshot import Snapshot


def write_checkpoint(run_folder: Path, snapshot: Snapshot) -> Path:
    """Writes a checkpoint that gets its name, step_N, only once it is whole and on the disk.

    A folder of that name is replaced; what a killed write left behind is removed first.

    Returns:
        The checkpoint's folder.

    Raises:
        OSError: the file system refused. What was there before is as it was, and trying again is safe.
    """
    folder = run_folder / checkpoint_name(snapshot.state.step)
    partial = run_folder / f".{folder.name}.partial"
    run_folder.mkdir(parents=True, exist_ok=True)
    remove_dead_writes(run_folder)
    partial.mkdir()
    try:
        _write_files(partial, snapshot)
    except OSError:
        _remove(partial)  # on a full disk, others want the room
        raise
    replaced: Path | None = partial
    if not (folder.exists() and _exchanged(partial, folder)):
        replaced = _set_aside(folder) if folder.exists() else None
        partial.rename(folder)
    _sync(run_folder)
    if replaced:
        _remove(replaced)
    return folder


def _exchanged(one: Path, other: Path) -> bool:
    """Exchanges two names in one go, so that a kill leaves no moment without either; False where that cannot be done.

    Linux can, and most of its file systems.
    """
    rename = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform == "linux" else None
    here, exchange = -100, 2  # AT_FDCWD and RENAME_EXCHANGE, of renameat2(2)
    return rename is not None and rename(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0


def remove_dead_writes(run_folder: Path) -> None:
    """Removes what killed processes have left half written, or half deleted."""
    for path in run_folder.iterdir():
        if re.fullmatch(r"\.step_[0-9]+\.(partial|old)", path.name):
            _remove(path)


def _remove(path: Path) -> None:
    """Removes a checkpoint's folder, or what has its name: of a link, the link alone. As far as that can be done."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def _write_files(folder: Path, snapshot: Snapshot) -> None:
    _write_json(folder / STATE, dataclasses.asdict(snapshot.state))
    _write_tensors(folder / MODEL, snapshot.weights)
    _write_tensors(folder / OPTIMIZER, snapshot.optimizer)
    files = [folder / name for name in CONTENTS]
    _write_json(
        folder / MANIFEST,
        {file.name: {"size": file.stat().st_size, "sha256": file_digest(file)} for file in files},
    )
    for path in (*files, folder / MANIFEST, folder):
        _sync(path)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, allow_nan=False, ensure_ascii=False, indent=2)
    path.write_text(text + "\n", encoding="utf-8")


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # how the library reports a full disk
        raise OSError(f"{path}: {error}") from error
    # The library's files can be read by their owner alone, whatever the umask.
    shutil.copymode(path.with_name(STATE), path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _set_aside(folder: Path) -> Path:
    """Takes a checkpoint's name away, so that a kill while it is deleted leaves no half one to be found."""
    return folder.rename(folder.with_name(f".{folder.name}.old"))


def point(run_folder: Path, pointer: Literal["latest", "best"], name: str) -> None:
    """Makes `latest` or `best` a relative link to the checkpoint `name`, with no moment without a link."""
    assert (run_folder / name).is_dir(), f"{pointer} must not point to {name}, which is not there"
    link = run_folder / pointer
    if link.is_dir() and not link.is_symlink():
        # scp -r and object stores turn links into folders; only step folders are ours to delete.
        link.rename(run_folder / f"{pointer}_copy_{time.time_ns()}")
    new_link = run_folder / f".{pointer}.new"
    new_link.unlink(missing_ok=True)
    new_link.symlink_to(name)
    new_link.replace(link)
    _sync(run_folder)


def publish(run_folder: Path, snapshot: Snapshot, keep: int) -> Path:
    """Writes a checkpoint, moves the pointers to it, and removes what is no longer kept; in this order.

    Args:
        run_folder: checkpoints/<run>.
        snapshot: what to write; its state names the best step.
        keep: the newest so many checkpoints stay, plus best.
    """
    written = write_checkpoint(run_folder, snapshot)
    point(run_folder, "latest", written.name)
    best = snapshot.state.best_step
    if best is not None and (run_folder / checkpoint_name(best)).is_dir():
        point(run_folder, "best", checkpoint_name(best))
    remove_newer(run_folder, snapshot.state.step)
    retain(run_folder, keep)
    return written


def supersede(run_folder: Path, resumed: str, newer: Collection[str]) -> None:
    """Marks the checkpoints after the resumed one, so that `latest` does not find them should this run be killed."""
    for name in newer:
        (run_folder / name / SUPERSEDED).touch()
    for folder in list_checkpoints(run_folder):
        if number_of(folder) <= int(resumed.removeprefix("step_")):
            (folder / SUPERSEDED).unlink(missing_ok=True)
    point(run_folder, "latest", resumed)
    best = run_folder / "best"
    if best.is_symlink() and os.readlink(best) in newer:
        best.unlink()


def remove_newer(run_folder: Path, step: int) -> None:
    """Deletes the checkpoints after `step`, or of a past given up, and pointers to them; `latest` is none of them."""
    for folder in list_checkpoints(run_folder):
        if number_of(folder) > step or (folder / SUPERSEDED).exists():
            _remove(_set_aside(folder))
    for link in (run_folder / "latest", run_folder / "best"):
        if link.is_symlink() and not link.exists():
            link.unlink()


def retain(run_folder: Path, keep: int) -> None:
    """Deletes all checkpoints but the newest `keep` and those that `latest` and `best` point to."""
    assert keep >= 1, f"at least one checkpoint must be kept, not {keep}"
    links = (run_folder / "latest", run_folder / "best")
    kept = {Path(os.readlink(link)).name for link in links if link.is_symlink()}
    for folder in list_checkpoints(run_folder)[:-keep]:
        if folder.name not in kept:
            _remove(_set_aside(folder))
