"""One optimizer step: accumulate, reduce, clip, update.

Its parts carry labels for a profiler, by which `isobatch bench` tells them apart; without one a label costs some ten
microseconds of a CPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.profiler import record_function

from model.dropout import dropout_keys
from training.config import Precision, RunConfig
from training.data import TrainingData
from training.distributed import Process
from training.gradients import AveragedGradients, ExactGradients
from training.layout import Layout
from training.loss import SequenceLoss, target_weights
from training.optimizer import learning_rate_at
from training.snapshot import bare_module

AMP_DTYPES = {"off": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class StepResult:
    """What a step measured. Tensors stay on the device, so that nothing waits for them.

    The three losses are of this process's sequences; everything else is the same on every process.
    """

    loss_sum: Tensor
    """Sum of the token losses, in nats; () float64."""
    loss_min: Tensor
    """Smallest mean loss of a sequence; () float64, infinity where the process had no target."""
    loss_max: Tensor
    """Largest mean loss of a sequence; () float64, minus infinity where the process had no target."""
    grad_norm: Tensor
    """L2 norm of the gradient of the whole global batch, before clipping; () float32."""
    loss_scale: Tensor
    """The GradScaler's scale in this step, 1 without one; () float32."""
    target_tokens: int
    """Targets of the whole global batch; with none, or with a norm that is not finite, the update is skipped."""
    learning_rate: float
    input_tokens: int
    """Input tokens of the whole global batch, without padding."""
    all_reduces: int = 0
    """Collectives in which the processes exchanged gradients."""
    out_of_range: Tensor | None = None
    """Whether a gradient was too large for bitwise mode's integers; () bool."""
    losses: Tensor | None = None
    """Sums of the token losses of this process's sequences, in nats; (B,)."""
    positions: Sequence[int] = ()
    """The places of these sequences in the global batch; (B,)."""
    sequences: int = 0
    """Sequences of the whole global batch."""


@dataclass(frozen=True)
class Trainer:
    """All that the steps of a run need."""

    config: RunConfig
    process: Process
    layout: Layout
    data: TrainingData
    gradients: AveragedGradients | ExactGradients
    optimizer: torch.optim.AdamW
    scaler: torch.amp.GradScaler | None
    """Only for fp16."""

    @property
    def module(self) -> SequenceLoss:
        """The model with its loss, without DDP."""
        module = bare_module(self.gradients.module)
        assert isinstance(module, SequenceLoss), "what is trained is a SequenceLoss"
        return module

    def step(self, step: int) -> StepResult:
        """Computes and applies update number `step`, from 0. Every rank must call this.

        The gradient is that of the whole global batch, whatever the layout: what each target weighs is known before
        the first forward, and the processes exchange gradients once, in the last backward.
        """
        collectives = self.gradients.group.collectives
        counts = self.data.target_counts(step)
        learning_rate = learning_rate_at(step, self.config, self.data.total_steps)
        weights = target_weights(self.config.loss.reduction, counts, self.config.batch.microbatch)
        loss_scale = torch.ones((), device=self.process.device)
        if self.scaler is not None:
            loss_scale = self.scaler.scale(loss_scale)
        dealt = -(-len(counts) // self.config.batch.microbatch)
        self.gradients.begin(float((weights * counts).sum()), dealt, loss_scale)
        weights *= self.gradients.averaged_over
        microbatches = self.layout.microbatches(self.process.rank, len(counts))
        # A process without a sequence takes part in the exchange all the same, with one that weighs nothing.
        parts = microbatches or [range(1)]
        losses = [
            self._backward(step, positions, weights if microbatches else 0 * weights, loss_scale, number == len(parts))
            for number, positions in enumerate(parts, start=1)
        ]
        mine = [position for positions in microbatches for position in positions]
        with record_function("all-reduce"):  # in bitwise mode; DDP's is inside the last backward
            out_of_range = self.gradients.finish()
        with record_function("optimizer"):
            norm = self._update(learning_rate, has_targets=bool(counts.any()))
        own_losses = torch.cat(losses)[: len(mine)]
        return StepResult(
            *_statistics(own_losses, torch.as_tensor(counts[mine])),
            grad_norm=norm,
            loss_scale=loss_scale,
            target_tokens=int(counts.sum()),
            learning_rate=learning_rate,
            input_tokens=self.data.input_tokens(step),
            all_reduces=self.gradients.group.collectives - collectives,
            out_of_range=out_of_range,
            losses=own_losses,
            positions=mine,
            sequences=len(counts),
        )

    def _backward(
        self, step: int, positions: range, weights: NDArray[np.float64], loss_scale: Tensor, last: bool
    ) -> Tensor:
        """Adds a microbatch's share to the gradients; returns the loss sums of its sequences, (B,)."""
        device = self.process.device
        with record_function("data"):
            inputs, targets = (to_device(rows, device) for rows in self.data.read(step, positions))
            weight = to_device(torch.from_numpy(weights[positions.start : positions.stop]), device)
            keys = self._dropout_keys(step, positions)
        with self.gradients.microbatch(last):
            with record_function("forward"), autocast(self.config.precision, device):
                # The scale is in the weights already, so that it is there when the head's gradient is formed.
                found: tuple[Tensor, Tensor] = self.gradients.module(inputs, targets, keys, weight * loss_scale)
            loss, sums = found
            with record_function("backward"):
                loss.backward()
        return sums

    def _dropout_keys(self, step: int, positions: range) -> Tensor | None:
        """What a microbatch's dropout masks follow from: its sequences' places in the run, so no state to save."""
        model = self.config.model
        if not model.dropout:
            return None
        return to_device(dropout_keys(self.config.seeds.training, step, positions, model), self.process.device)

    def _update(self, learning_rate: float, has_targets: bool) -> Tensor:
        """Clips and applies the gradients; returns their norm before clipping.

        The decision to skip is taken on the device, from the exchanged gradients, so it is the same everywhere.
        """
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
        if self.config.optimizer.clip_norm is not None:
            clip_grads_with_norm_(parameters, self.config.optimizer.clip_norm, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        # Fused AdamW leaves everything as it is, its step count included, where found_inf is 1: this is how
        # GradScaler makes it skip, and it spares a wait for the device.
        skip = ~torch.isfinite(norm) if has_targets else torch.ones_like(norm, dtype=torch.bool)
        self.optimizer.grad_scale, self.optimizer.found_inf = None, skip.float()  # type: ignore[attr-defined]
        self.optimizer.step()
        if self.scaler is not None:
            self.scaler.update()
        return norm


def build_scaler(precision: Precision) -> torch.amp.GradScaler | None:
    """The loss scaler of fp16; no other precision needs one."""
    return torch.amp.GradScaler() if precision.amp == "fp16" else None


def autocast(precision: Precision, device: torch.device) -> torch.autocast:
    """The context of a forward in the config's precision."""
    return torch.autocast(device.type, AMP_DTYPES[precision.amp], enabled=precision.amp != "off")


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor to the device, on a GPU without waiting for it."""
    return tensor if device.type == "cpu" else tensor.contiguous().pin_memory().to(device, non_blocking=True)


def in_units(losses: Tensor) -> Tensor:
    """Rounds losses so that float64 adds them exactly, in any order: to multiples of 2**-24, up to a sum of 2**29."""
    return (losses.double() * 2**24).round() / 2**24


def _statistics(losses: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sum, and smallest and largest mean, of the losses of sequences; all () float64."""
    losses = in_units(losses)
    targets = to_device(counts, losses.device)
    means = losses / targets  # 0 / 0 where a sequence has no target
    infinity = losses.new_full((1,), torch.inf)
    low = torch.cat([torch.where(targets > 0, means, torch.inf), infinity]).min()
    high = torch.cat([torch.where(targets > 0, means, -torch.inf), -infinity]).max()
    return losses.sum(), low, high
