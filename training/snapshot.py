"""What a checkpoint holds: weights, optimizer state and counters, copied apart from the model."""

import hashlib
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import ConfigDict, Field
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

Count = Annotated[int, Field(ge=0, le=2**53)]
"""What JSON's readers take for a whole number, of steps or tokens."""


@dataclass(frozen=True)
class TrainingState:
    """What of a run is neither a weight nor optimizer state: strict JSON."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    step: Count  # updates done, skipped ones included
    tokens: Count  # trained on since the run's beginning
    seconds: Annotated[float, Field(ge=0)]  # of training since the run's beginning, over resumes
    nonfinite_in_a_row: Count  # skipped updates directly before this checkpoint
    best_loss: float | None  # lowest validation loss so far, nats per token
    best_step: Count | None
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
