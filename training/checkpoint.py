"""Checkpoints: what is saved, how it becomes visible only when whole, how it is found and verified.

    checkpoints/<run>/step_00000617/   the state after 617 updates
        model.safetensors              parameters by name; the bytes depend on the weights alone
        optimizer.safetensors          optimizer state by kind and parameter; empty before the first update
        state.json                     TrainingState: counters, loss scale, the run's config
        manifest.json                  size and sha256 of the other three
    checkpoints/<run>/{latest,best}    relative symbolic links

One process writes, one checkpoint at a time (training/checkpoint_writer.py says when). Nothing is ever pickled or
unpickled. training/restore.py loads them.
"""

import ctypes
import dataclasses
import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ConfigDict
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from training.errors import UserError
from training.file_digest import file_digest

MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
MANIFEST = "manifest.json"
SUPERSEDED = "superseded"
CONTENTS = (MODEL, OPTIMIZER, STATE)
FOR_THE_MODEL = (MODEL, STATE)
"""What is needed to use a model, not to train it further."""


@dataclass(frozen=True)
class TrainingState:
    """What of a run is neither a weight nor optimizer state: strict JSON."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    step: int  # updates done, skipped ones included
    tokens: int  # trained on since the run's beginning
    seconds: float  # of training since the run's beginning, over resumes
    nonfinite_in_a_row: int  # skipped updates directly before this checkpoint
    best_loss: float | None  # lowest validation loss so far, nats per token
    best_step: int | None
    scaler: dict[str, float | int] | None  # GradScaler.state_dict(), in fp16 runs
    data: str  # fingerprint of the training file
    config: dict[str, Any]  # the run's resolved config
    evaluation_due: bool = False  # whether a signal has kept this step from being evaluated


@dataclass(frozen=True)
class Snapshot:
    """A checkpoint in CPU memory, apart from the model: training may go on while it is written."""

    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: TrainingState


@dataclass(frozen=True)
class Found:
    """A verified checkpoint, and the (name, reason) of newer ones that were passed over."""

    path: Path
    passed_over: list[tuple[str, str]]


def bare_module(module: nn.Module) -> nn.Module:
    """Returns the module inside DistributedDataParallel and torch.compile wrappers, nested in any order."""
    while True:
        inner = getattr(module, "_orig_mod", None)  # torch.compile's; its class is private
        if isinstance(module, DistributedDataParallel):
            inner = module.module
        if inner is None:
            return module
        module = inner


def take_snapshot(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: TrainingState, kept: Snapshot | None = None
) -> Snapshot:
    """Copies parameters and optimizer state to the CPU: the only copy that saving makes.

    A tied pair is one parameter, under the name that was registered first. Buffers are not saved.

    Args:
        model: wrapped or not.
        optimizer: of the model.
        state: the counters that belong to it.
        kept: an earlier one, whose memory is used again and whose values are lost: fresh memory takes longer to get
            than to fill.
    """
    names: dict[Tensor, str] = {value: name for name, value in bare_module(model).named_parameters()}
    values: dict[str, Tensor] = {}
    for parameter, parameter_state in optimizer.state.items():
        for kind, value in parameter_state.items():
            assert isinstance(value, Tensor), f"optimizer state {kind} is a {type(value)}, not a tensor"
            values[f"{kind}.{names[parameter]}"] = value
    weights = {name: parameter.detach() for parameter, name in names.items()}
    snapshot = Snapshot(
        _copies(weights, kept.weights if kept else {}), _copies(values, kept.optimizer if kept else {}), state
    )
    if any(weight.device.type == "cuda" for weight in weights.values()):
        torch.cuda.synchronize()  # once, for all the copies under way
    return snapshot


def memory_for(model: nn.Module, state: TrainingState) -> Snapshot:
    """A snapshot to be `kept` for the first one of a model that AdamW trains: memory of the right size, filled once."""
    weights = {name: parameter.detach() for name, parameter in bare_module(model).named_parameters()}
    moments = {f"{kind}.{name}": weight for name, weight in weights.items() for kind in ("exp_avg", "exp_avg_sq")}
    return Snapshot(_copies(weights, {}), _copies(moments, {}), state)


def _copies(tensors: dict[str, Tensor], kept: dict[str, Tensor]) -> dict[str, Tensor]:
    copies = {}
    for name, tensor in tensors.items():
        from_gpu = tensor.device.type == "cuda"
        # Pinned memory is what a GPU copies into at full speed, and without being waited for.
        copy = kept[name] if name in kept else torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=from_gpu)
        copies[name] = copy.copy_(tensor, non_blocking=from_gpu)
    return copies


def weights_digest(model: nn.Module) -> str:
    """The sha256 of all weights, by name: shows whether two runs, or two machines, begin with the same bits."""
    digest = hashlib.sha256()
    for name, parameter in sorted(bare_module(model).named_parameters()):
        digest.update(name.encode())
        content = parameter.detach().cpu().contiguous()
        digest.update(content.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


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
        shutil.rmtree(partial, ignore_errors=True)  # on a full disk, others want the room
        raise
    replaced: Path | None = partial
    if not (folder.exists() and _exchanged(partial, folder)):
        replaced = _set_aside(folder) if folder.exists() else None
        partial.rename(folder)
    _sync(run_folder)
    if replaced:
        shutil.rmtree(replaced, ignore_errors=True)
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
            shutil.rmtree(path, ignore_errors=True)


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


def checkpoint_name(step: int) -> str:
    """The folder of the state after `step` updates."""
    return f"step_{step:08d}"


def list_checkpoints(run_folder: Path) -> list[Path]:
    """Returns the folders named step_<number>, complete or not, in the order of their numbers."""
    if not run_folder.is_dir():
        return []
    folders = [path for path in run_folder.iterdir() if re.fullmatch("step_[0-9]+", path.name)]
    return sorted((path for path in folders if path.is_dir()), key=lambda path: (number_of(path), path.name))


def number_of(folder: Path) -> int:
    """The step of a checkpoint's folder, by its name."""
    return int(folder.name.removeprefix("step_"))


def remove_newer(run_folder: Path, step: int) -> None:
    """Deletes the checkpoints after `step`, or of a past given up, and pointers to them; `latest` is none of them."""
    for folder in list_checkpoints(run_folder):
        if number_of(folder) > step or (folder / SUPERSEDED).exists():
            shutil.rmtree(_set_aside(folder), ignore_errors=True)
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
            shutil.rmtree(_set_aside(folder), ignore_errors=True)


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
    remedy = f"those there are: {', '.join(path.name for path in checkpoints) or 'none'}"
    folder = run_folder / which
    if which == "best" and folder.is_symlink():
        folder = run_folder / os.readlink(folder)
    elif which != "best" and folder not in checkpoints:  # which also keeps `which` inside run_folder
        raise UserError(f"{run_folder}: there is no checkpoint {which!r}; {remedy}")
    problem = problem_of(folder, names) if folder.is_dir() else "there is no such checkpoint"
    if problem:
        raise UserError(f"{folder}: {problem}; {remedy}")
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
    raise UserError(f"{run_folder}: there is no complete checkpoint{reasons}")
