"""Loads a checkpoint: its counters, its weights, its optimizer state. Every command does it with this file."""

from pathlib import Path

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from model.gpt import GPT, GPTConfig, build_gpt
from training.checkpoint_files import (
    FOR_THE_MODEL,
    MODEL,
    OPTIMIZER,
    STATE,
    checkpoint_name,
    is_checkpoint_name,
    number_of,
    problem_of,
)
from training.config_check import another_version
from training.distributed import Group
from training.errors import UserError
from training.foreign_file import instead
from training.snapshot import TrainingState, bare_module

# Which config key a saved shape contradicts, by parameter and axis.
KEY_OF_AXIS = {
    ("token_embedding.weight", 0): "model.vocab_size",
    ("token_embedding.weight", 1): "model.emb_dim",
    ("position_embedding.weight", 0): "model.context_length",
}


def read_state(folder: Path) -> TrainingState:
    """Reads state.json of a checkpoint.

    Raises:
        UserError: names the file and the first field that is wrong: also a step that is not that of the folder's name.
    """
    path = folder / STATE
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: is no regular file; take another checkpoint")
    try:
        state = TypeAdapter(TrainingState).validate_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); take another checkpoint") from error
    except ValidationError as error:
        first = error.errors()[0]
        unknown = [str(item["loc"][-1]) for item in error.errors() if item["type"] == "unexpected_keyword_argument"]
        if len(unknown) == error.error_count():
            raise UserError(another_version(str(path), unknown)) from error
        field = ".".join(str(part) for part in first["loc"]) or "content"
        raise UserError(
            f"{path}: is not a training state; {field}: {first['msg']}{instead(path)}; take another checkpoint"
        ) from error
    if is_checkpoint_name(folder.name) and number_of(folder) != state.step:
        raise UserError(
            f"{path}: is the state after step {state.step}, not that of the folder's name; "
            f"call the folder {checkpoint_name(state.step)}, or move it away"
        )
    return state


def _read_tensors(path: Path) -> dict[str, Tensor]:
    """Maps a safetensors file into memory: CPU tensors whose bytes are read as they are used."""
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path}: is not a readable safetensors file ({error}{instead(path)}); take another checkpoint"
        ) from error


def load_model(folder: Path) -> GPT:
    """Verifies a checkpoint's weights and builds its model, on the CPU and in evaluation mode.

    Raises:
        UserError: a file is missing, damaged or not what it should be.
    """
    problem = problem_of(folder, FOR_THE_MODEL)
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
    """Copies saved weights into the model's parameters, strictly by name, shape and type; a tied pair stays one.

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
        problem = problem or _type_problem(name, saved[name], parameter)
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


def _type_problem(name: str, saved: Tensor, wanted: Tensor) -> str | None:
    return None if saved.dtype == wanted.dtype else f"{name}: saved as {saved.dtype}, not as {wanted.dtype}"


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
            problem = _type_problem(f"{name}: {kind}", values[kind], parameter)
            if problem:
                raise UserError(f"{path}: {problem}; the checkpoint must be one that training wrote")
        # Copies, out of the mapped file. `step` belongs on the CPU; for fused kernels PyTorch moves it.
        state[index] = {
            kind: value.to("cpu" if kind == "step" else parameter.device, copy=True) for kind, value in values.items()
        }
    if saved:
        raise UserError(f"{path}: {min(saved)}: no parameter of this name is trained")
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def broadcast_optimizer(optimizer: torch.optim.AdamW, group: Group) -> None:
    """Hands rank 0's optimizer state to the others, which need no access to its disk. Every rank must call this."""
    parameters = [parameter for settings in optimizer.param_groups for parameter in settings["params"]]
    if not group.first("optimizer state", lambda: bool(optimizer.state)):
        return  # a checkpoint from before the first update
    for parameter in parameters:
        if not group.process.is_main:
            optimizer.state[parameter] = {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        group.broadcast(optimizer.state[parameter][kind] for kind in ("step", "exp_avg", "exp_avg_sq"))
