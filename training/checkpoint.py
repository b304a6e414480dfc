"""Checkpoints: what is saved, how it becomes visible only when whole, how it is found and loaded again.

    checkpoints/<run>/step_00000617/   the state after 617 updates
        model.safetensors              parameters by name; the bytes depend on the weights alone
        optimizer.safetensors          optimizer state by kind and parameter; empty before the first update
        state.json                     TrainingState: counters, loss scale, the run's config
        manifest.json                  size and sha256 of the other three
    checkpoints/<run>/{latest,best}    relative symbolic links

One process writes, one checkpoint at a time. Nothing is ever pickled or unpickled.
"""

import dataclasses
import hashlib
import json
import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from model.gpt import GPT, GPTConfig, build_gpt
from training.errors import UserError

MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
MANIFEST = "manifest.json"
CONTENTS = (MODEL, OPTIMIZER, STATE)

# Which config key a saved shape contradicts, by parameter and axis.
KEY_OF_AXIS = {
    ("token_embedding.weight", 0): "model.vocab_size",
    ("token_embedding.weight", 1): "model.emb_dim",
    ("position_embedding.weight", 0): "model.context_length",
}


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
    config: dict[str, Any]  # the run's resolved config


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


def take_snapshot(model: nn.Module, optimizer: torch.optim.Optimizer, state: TrainingState) -> Snapshot:
    """Copies parameters and optimizer state to the CPU: the only copy that saving makes.

    A tied pair is one parameter, under the name that was registered first. Buffers are not saved.
    """
    names: dict[Tensor, str] = {value: name for name, value in bare_module(model).named_parameters()}
    values = {}
    for parameter, parameter_state in optimizer.state.items():
        for kind, value in parameter_state.items():
            assert isinstance(value, Tensor), f"optimizer state {kind} is a {type(value)}, not a tensor"
            values[f"{kind}.{names[parameter]}"] = _cpu_copy(value)
    return Snapshot({name: _cpu_copy(parameter) for parameter, name in names.items()}, values, state)


def _cpu_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def write_checkpoint(run_folder: Path, snapshot: Snapshot) -> Path:
    """Writes a checkpoint that gets its name, step_N, only once it is whole and on the disk.

    A folder of that name is replaced; what a killed write left behind is removed first.

    Returns:
        The checkpoint's folder.

    Raises:
        OSError: the file system refused. What was there before is as it was, and trying again is safe.
    """
    folder = run_folder / f"step_{snapshot.state.step:08d}"
    partial = run_folder / f".{folder.name}.partial"
    run_folder.mkdir(parents=True, exist_ok=True)
    for path in run_folder.iterdir():
        if re.fullmatch(r"\.step_[0-9]+\.(partial|old)", path.name):
            shutil.rmtree(path, ignore_errors=True)
    partial.mkdir()
    _write_json(partial / STATE, dataclasses.asdict(snapshot.state))
    _write_tensors(partial / MODEL, snapshot.weights)
    _write_tensors(partial / OPTIMIZER, snapshot.optimizer)
    files = [partial / name for name in CONTENTS]
    _write_json(
        partial / MANIFEST,
        {file.name: {"size": file.stat().st_size, "sha256": _sha256(file)} for file in files},
    )
    for path in (*files, partial / MANIFEST, partial):
        _sync(path)
    replaced = _set_aside(folder) if folder.exists() else None
    partial.rename(folder)
    _sync(run_folder)
    if replaced:
        shutil.rmtree(replaced, ignore_errors=True)
    return folder


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


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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


def list_checkpoints(run_folder: Path) -> list[Path]:
    """Returns the folders named step_<number>, complete or not, in the order of their numbers."""
    if not run_folder.is_dir():
        return []
    folders = [path for path in run_folder.iterdir() if re.fullmatch("step_[0-9]+", path.name)]
    return sorted((path for path in folders if path.is_dir()), key=lambda path: (_number(path), path.name))


def _number(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def remove_newer(run_folder: Path, step: int) -> None:
    """Deletes the checkpoints after `step` and a pointer to one of them; call it once `latest` is older."""
    for folder in list_checkpoints(run_folder):
        if _number(folder) > step:
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
            if _sha256(folder / name) != manifest[name]["sha256"]:
                return f"{name} is damaged: its sha256 is not the one in {MANIFEST}"
    except OSError as error:
        return f"cannot be read ({error})"
    except (ValueError, KeyError, TypeError):
        return f"{MANIFEST} is damaged: it does not give the size and sha256 of each file"
    return None


def find_checkpoint(run_folder: Path, which: str) -> Found:
    """Finds a checkpoint whose files are all there and unchanged.

    Args:
        run_folder: checkpoints/<run>.
        which: "latest" (the newest good one), "best" or a checkpoint's name.

    Raises:
        UserError: there is none, or the one asked for is damaged.
    """
    checkpoints = list_checkpoints(run_folder)
    if which == "latest":
        return _newest_good(run_folder, checkpoints)
    remedy = f"those there are: {', '.join(path.name for path in checkpoints) or 'none'}"
    folder = run_folder / which
    if which == "best" and folder.is_symlink():
        folder = run_folder / os.readlink(folder)
    elif which != "best" and folder not in checkpoints:  # which also keeps `which` inside run_folder
        raise UserError(f"{run_folder}: there is no checkpoint {which!r}; {remedy}")
    problem = problem_of(folder) if folder.is_dir() else "there is no such checkpoint"
    if problem:
        raise UserError(f"{folder}: {problem}; {remedy}")
    return Found(folder, [])


def _newest_good(run_folder: Path, checkpoints: list[Path]) -> Found:
    passed_over: list[tuple[str, str]] = []
    for folder in reversed(checkpoints):
        problem = problem_of(folder)
        if problem is None:
            return Found(folder, passed_over)
        passed_over.append((folder.name, problem))
    reasons = "".join(f"; {name}: {problem}" for name, problem in passed_over)
    raise UserError(f"{run_folder}: there is no complete checkpoint{reasons}")


def read_state(folder: Path) -> TrainingState:
    """Reads state.json of a checkpoint; UserError names the file and the first field that is wrong."""
    path = folder / STATE
    try:
        return TypeAdapter(TrainingState).validate_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "content"
        raise UserError(f"{path}: is not a training state; {field}: {first['msg']}") from error


def _read_tensors(path: Path) -> dict[str, Tensor]:
    """Maps a safetensors file into memory: CPU tensors whose bytes are read as they are used."""
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: is not a readable safetensors file ({error})") from error


def load_model(folder: Path) -> GPT:
    """Verifies a checkpoint's weights and builds its model, on the CPU and in evaluation mode.

    Raises:
        UserError: a file is missing, damaged or not what it should be.
    """
    problem = problem_of(folder, (MODEL, STATE))
    if problem:
        raise UserError(f"{folder}: {problem}; choose another checkpoint")
    try:
        config = GPTConfig(**read_state(folder).config["model"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{folder / STATE}: config.model does not describe a model ({error})") from error
    model = build_gpt(config, seed=0)
    load_weights(folder, model)
    return model.eval()


def load_weights(folder: Path, model: nn.Module) -> None:
    """Copies saved weights into the model's parameters, strictly by name and shape; a tied pair stays one.

    Verifies no digest (problem_of does). Nothing is copied unless everything fits.

    Args:
        folder: the checkpoint.
        model: on any device, wrapped or not.

    Raises:
        UserError: names the first parameter that does not fit and, where it can, the config key.
    """
    saved = _read_tensors(folder / MODEL)
    bare = bare_module(model)
    parameters = dict(bare.named_parameters())
    problem = _names_problem(saved.keys() - parameters.keys(), parameters.keys() - saved.keys())
    for name, parameter in parameters.items():
        problem = problem or _shape_problem(name, saved[name].shape, parameter.shape)
    if problem is None and isinstance(bare, GPT):  # the number of heads shows in no shape
        heads = read_state(folder).config.get("model", {}).get("n_heads")
        if heads != bare.config.n_heads:
            problem = f"saved with model.n_heads {heads}, configured {bare.config.n_heads}"
    if problem:
        raise UserError(f"{folder / MODEL}: {problem}; the model must be the saved one")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(saved[name])


def _names_problem(unknown: set[str], missing: set[str]) -> str | None:
    if missing == {"head.weight"} and not unknown:
        return "head.weight is missing: saved with model.tie_weights true, configured false"
    if unknown == {"head.weight"} and not missing:
        return "head.weight is not needed: saved with model.tie_weights false, configured true"
    problems = [f"{min(missing)} is missing"] if missing else []
    problems += [f"{min(unknown)} is unknown"] if unknown else []
    return " and ".join(problems) or None


def _shape_problem(name: str, saved: torch.Size, configured: torch.Size) -> str | None:
    if saved == configured:
        return None
    for axis, (saved_size, configured_size) in enumerate(zip(saved, configured, strict=False)):
        key = KEY_OF_AXIS.get((name, axis))
        if key and saved_size != configured_size:
            return f"{name}: saved with {key} {saved_size}, configured {configured_size}"
    return f"{name}: saved with shape {list(saved)}, configured {list(configured)}"


def load_optimizer(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Gives each parameter its own saved optimizer state, by name, however the optimizer groups them.

    The groups and their settings (learning rate, weight decay) stay. Verifies no digest (problem_of does).

    Raises:
        UserError: names the first parameter whose state is missing, of another shape, or not wanted.
    """
    path = folder / OPTIMIZER
    saved: dict[str, dict[str, Tensor]] = {}  # by parameter, then kind
    for key, tensor in _read_tensors(path).items():
        kind, _, name = key.partition(".")
        saved.setdefault(name, {})[kind] = tensor
    kinds = {kind for values in saved.values() for kind in values}
    names: dict[Tensor, str] = {value: name for name, value in bare_module(model).named_parameters()}
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]] if saved else []
    state = {}
    for index, parameter in enumerate(trained):
        name = names[parameter]
        values = saved.pop(name, {})
        for kind in sorted(kinds):
            shape = [] if kind == "step" else list(parameter.shape)
            if kind not in values or list(values[kind].shape) != shape:
                found = list(values[kind].shape) if kind in values else "missing"
                raise UserError(f"{path}: {name}: {kind} of shape {shape} wanted, found {found}")
        # Copies, out of the mapped file. `step` belongs on the CPU; for fused kernels PyTorch moves it.
        state[index] = {
            kind: value.to("cpu" if kind == "step" else parameter.device, copy=True) for kind, value in values.items()
        }
    if saved:
        raise UserError(f"{path}: {min(saved)}: no parameter of this name is trained")
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
