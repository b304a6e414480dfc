"""--find-max-microbatch: the largest microbatch that fits into the GPUs' memory, found by trying; trains nothing."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from model.gpt import GPTConfig, build_gpt
from training.config import Batch, RunConfig
from training.data import TrainingData
from training.distributed import Group, Process
from training.errors import OneRankError, RunError, UserError
from training.gradients import AveragedGradients
from training.layout import Layout, describe, plan_layout
from training.loss import SequenceLoss
from training.memory import is_out_of_memory
from training.optimizer import build_optimizer
from training.rows import Batch as Rows
from training.step import Trainer, build_scaler

MARGIN = 0.05
"""Share of a GPU's memory that is held while trying: the allocations of a long run lie less closely than a step's."""


def refuse_to_search(config: RunConfig, device: torch.device, beside: Sequence[str]) -> None:
    """Refuses a search that has nothing to find, cannot be made, or stands beside options that it would not heed.

    Raises:
        UserError: saying which.
    """
    option = "--find-max-microbatch"
    if beside:
        raise UserError(f"{option}: excludes {', '.join(beside)}: it trains nothing and searches with eager kernels")
    if config.bitwise:
        raise UserError(
            f"{option}: the config's microbatch, {config.batch.microbatch}, stays with reproducibility: bitwise, as "
            "another size rounds otherwise; leave the option out, or train with reproducibility: rounding"
        )
    if device.type == "cpu":
        raise UserError(
            f"{option}: needs a GPU, as on a CPU the system kills a process that takes too much memory, which cannot "
            "be caught; choose with --microbatch M --dry-run, which estimates the memory for M sequences"
        )


def microbatch_sizes(batch: Batch, world_size: int) -> list[int]:
    """The sizes worth trying, increasing: for each possible accumulation the smallest that leads to it."""
    ones = plan_layout(batch, world_size, 1)
    return sorted({replace(ones, accumulation=parts).microbatch for parts in range(1, ones.accumulation + 1)})


def largest_that_fits(sizes: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """The last of some increasing sizes that fits, where all before it do; None if there is none. Tries few of them."""
    too_large = bisect_left(sizes, True, key=lambda size: not fits(size))
    return sizes[too_large - 1] if too_large else None


def search_max_microbatch(config: RunConfig, group: Group, activation_checkpointing: bool) -> list[str]:
    """Searches, and says what was found and what to do with it. Every rank must call this.

    Raises:
        RunError: not even one sequence at a time fits.
    """
    world_size = group.process.world_size
    sizes = microbatch_sizes(config.batch, world_size)
    remedy = "use a device with more memory, or a smaller model"
    if not activation_checkpointing:
        remedy = f"add --activation-checkpointing, which needs less; else {remedy}"
    nothing_fits = f"--find-max-microbatch: not even one sequence at a time fits on every GPU; {remedy}"
    found = None
    try:
        trial = Trial(config, group, activation_checkpointing)
        if trial.fits(sizes[0]):
            trial.exchange(sizes[0])
            found = largest_that_fits(sizes, trial.fits)
    except RuntimeError as error:  # outside of `fits`: the model itself, or DDP's memory
        if not is_out_of_memory(error):
            raise
        raise OneRankError(nothing_fits) from None
    if found is None:
        raise RunError(nothing_fits)
    options = ["--activation-checkpointing"] * activation_checkpointing + [f"--microbatch {found}"]
    return [
        f"the largest microbatch that fits, with {100 * MARGIN:g} % of the memory kept free, is {found} of {sizes[-1]}",
        f"layout: {describe(plan_layout(config.batch, world_size, found), config.batch)}",
        f"train with {' '.join(options)}",
    ]


class Trial:
    """A model, its optimizer and its gradients, which steps of any microbatch are tried on; it is thrown away."""

    def __init__(self, config: RunConfig, group: Group, activation_checkpointing: bool) -> None:
        """Allocates all that does not depend on the microbatch. Every rank must call this."""
        process = group.process
        self._held = _margin(process)
        self._config, self._group = config, group
        torch.set_float32_matmul_precision(config.precision.matmul)
        model = build_gpt(config.model, config.seeds.weights).to(process.device)
        model.recompute_blocks = activation_checkpointing
        self._optimizer = build_optimizer(model, config.optimizer)
        self._gradients = UnsharedGradients(SequenceLoss(model), group, config.precision.gradients == "bf16")

    def fits(self, microbatch: int) -> bool:
        """Whether a step of such microbatches fits into the memory of every rank. Every rank must call this."""
        try:
            self._step(microbatch)
            full = 0
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            full = 1
        # Not in the handler: what the error refers to keeps the memory.
        if self._group.process.device.type == "cuda":
            torch.cuda.empty_cache()
        return not self._group.maximum(torch.tensor(full, device=self._group.process.device)).item()

    def exchange(self, microbatch: int) -> None:
        """Does a step with its exchange, with which DDP's memory becomes that of a run. Every rank must call this."""
        self._gradients.shared = True
        self._step(microbatch)
        self._gradients.shared = False

    def _step(self, microbatch: int) -> None:
        """A step of two microbatches on each rank: the second one finds the gradients of the first."""
        config, process = self._config, self._group.process
        layout = Layout(process.world_size, accumulation=2, global_batch=2 * process.world_size * microbatch)
        data = cast(TrainingData, LongestSequences(config.model, layout.global_batch))
        scaler = build_scaler(config.precision)  # a new one, as a step that was broken off leaves it unfit for another
        Trainer(config, process, layout, data, self._gradients, self._optimizer, scaler).step(0)
        if process.device.type == "cuda":
            torch.cuda.synchronize()


class UnsharedGradients(AveragedGradients):
    """DDP's without the exchange, which a rank whose memory is full could not take part in."""

    shared = False

    def microbatch(self, last: bool) -> AbstractContextManager[None]:
        """The context of a microbatch's forward and backward."""
        return super().microbatch(last and self.shared)


@dataclass(frozen=True)
class LongestSequences:
    """What a Trainer asks of its data: here steps of sequences as long as the model takes, of any tokens."""

    model: GPTConfig
    sequences: int
    total_steps: int = 1

    def target_counts(self, step: int) -> NDArray[np.int64]:
        """Targets of each sequence of a step."""
        return np.full(self.sequences, self.model.context_length)

    def input_tokens(self, step: int) -> int:
        """Input tokens of a step."""
        return self.sequences * self.model.context_length

    def read(self, step: int, positions: range) -> Rows:
        """Inputs and targets, each (B, T) int64."""
        tokens = torch.arange(len(positions) * (self.model.context_length + 1)).remainder(self.model.vocab_size)
        rows = tokens.view(len(positions), -1)
        return rows[:, :-1], rows[:, 1:]


def _margin(process: Process) -> torch.Tensor | None:
    if process.device.type != "cuda":
        return None
    total = torch.cuda.mem_get_info(process.device)[1]
    return torch.empty(int(MARGIN * total), dtype=torch.uint8, device=process.device)
