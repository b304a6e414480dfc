"""A real GPT whose loss and gradient are known on paper, sequences with any targets for it, and its trainer.

With final_norm.weight = 0 and final_norm.bias = e1, the logits are the first column of the head, whatever the input.
That column is (0, ln 2, ln 3, ln 4) for the ids 0 to 3 and -1e4 for every other, so the model gives these four
classes 0.1, 0.2, 0.3 and 0.4, everywhere. The gradient of a mean over targets is, on the first column's four entries,
these probabilities minus the share of each class among the targets. Nothing flows back into the trunk.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.gpt import GPT, GPTConfig, build_gpt
from training.config import Batch, Data, Optimizer, Precision, RunConfig
from training.data import TrainingData
from training.distributed import Group
from training.gradients import AveragedGradients, ExactGradients
from training.layout import plan_layout
from training.loss import IGNORED, SequenceLoss
from training.optimizer import build_optimizer
from training.step import Trainer
from training.step_records import StepReader, StepRecord

Steps = tuple[tuple[tuple[int, ...], ...], ...]

STILL = Optimizer(learning_rate=1e-30, weight_decay=0.0)
"""Leaves the weights as they are, so that every step has the gradient worked out for the first."""

SMALL = GPTConfig(vocab_size=6, context_length=8, emb_dim=4, n_heads=1, n_layers=1, dropout=0.0)

ONE_TO_FOUR = ((0,), (1, 1), (2, 2, 2), (3, 3, 3, 3))
"""Four sequences that hold the classes in the model's own shares: loss 1.279854, and no gradient at all."""
ONE_TO_FOUR_LOSS = 1.279854
LOSS_3 = 0.916291
"""The loss of one to four, and of targets of class 3 alone."""
ZERO = (0.0, 0.0, 0.0, 0.0)
ONLY_0 = (-0.9, 0.2, 0.3, 0.4)
ONLY_3 = (0.1, 0.2, 0.3, -0.6)
"""Gradients on the four numbers: of one to four, and of targets of one class alone."""


def known_gpt(config: GPTConfig = SMALL) -> GPT:
    """The model. Its final norm is not trained, so that the gradient's norm is that of the four numbers."""
    model = build_gpt(config, seed=1)
    with torch.no_grad():
        model.final_norm.weight.zero_()
        model.final_norm.bias.zero_()[0] = 1.0
        model.head.weight[:, 0] = -1e4
        model.head.weight[:4, 0] = torch.log(torch.arange(1.0, 5.0))
    model.final_norm.requires_grad_(False)
    return model


def context_for(sequences: Sequence[Sequence[int]]) -> GPTConfig:
    """The small model's config, with room for the longest of some sequences of targets."""
    return replace(SMALL, context_length=max(SMALL.context_length, *map(len, sequences)))


@dataclass(frozen=True)
class KnownSequences:
    """Training data whose steps are given as the targets of their sequences; what follows them is ignored."""

    steps: tuple[tuple[tuple[int, ...], ...], ...]
    context: int

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        return len(self.steps)

    def target_counts(self, step: int) -> NDArray[np.int64]:
        """Targets of each sequence of a step."""
        return np.array([len(targets) for targets in self.steps[step]])

    def input_tokens(self, step: int) -> int:
        """Input tokens of a step."""
        return sum(map(len, self.steps[step]))

    def read(self, step: int, positions: range) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the sequences at some positions of a step."""
        return rows([self.steps[step][position] for position in positions], self.context)


@dataclass(frozen=True)
class KnownRows:
    """A validation range, given likewise."""

    sequences: tuple[tuple[int, ...], ...]
    context: int

    def read(self, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the sequences with these numbers."""
        return rows([self.sequences[number] for number in numbers], self.context)


def rows(sequences: Sequence[Sequence[int]], context: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, each (B, T), of sequences given by their targets, padded with IGNORED.

    The inputs are the targets one place on; any would do for the known model, but not for a random one.
    """
    targets = torch.full((len(sequences), context), IGNORED)
    for row, sequence in zip(targets, sequences, strict=True):
        row[: len(sequence)] = torch.tensor(sequence)
    return targets.roll(1, dims=1).clamp(min=0), targets


def build_trainer(
    group: Group,
    model: GPT,
    steps: Steps,
    batch: Batch,
    microbatch: int | None = None,
    scaler: torch.amp.GradScaler | None = None,
    **sections: Any,
) -> Trainer:
    """The real trainer of a model, on steps given as the targets of their sequences."""
    settings = {"optimizer": STILL, "precision": Precision(amp="off", matmul="highest"), **sections}
    config = RunConfig(name="test", model=model.config, data=Data(dataset="test"), batch=batch, **settings)
    layout = plan_layout(batch, group.process.world_size, microbatch, config.bitwise)
    data = cast(TrainingData, KnownSequences(steps, model.config.context_length))
    optimizer = build_optimizer(model, config.optimizer)
    way = ExactGradients if config.bitwise else AveragedGradients
    return Trainer(config, group.process, layout, data, way(SequenceLoss(model), group), optimizer, scaler)


def train(group: Group, trainer: Trainer, steps: Sequence[int]) -> list[StepRecord]:
    """Does some steps; what the run would record of them."""
    reader = StepReader(group)
    for step in steps:
        reader.add(step + 1, trainer.step(step))
    return reader.read()[0]


def gradients(model: GPT) -> Tensor:
    """All gradients, in one row."""
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
