"""The validation loss: a mean over targets, the same however they are split, and without a trace in the training.

Names like G60 are those of public reports against other tools; the values are worked out on paper, see known_model.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import cast

import numpy as np
import pytest
import torch
from known_model import ONE_TO_FOUR, ONE_TO_FOUR_LOSS, SMALL, KnownRows, context_for, known_gpt
from numpy.typing import NDArray
from ranks import on_ranks
from torch import Tensor

from model.dropout import dropout_keys
from model.gpt import build_gpt
from training.config import Precision
from training.distributed import Group
from training.evaluation import BrokenOffError, Evaluated, evaluate
from training.loss import SequenceLoss
from training.rows import Rows

FLOAT32 = Precision(amp="off", matmul="highest")
ONE_OF_FIVE = ((0,), (3,), (3,), (3,), (3,))

Sequences = tuple[tuple[int, ...], ...]


def known_loss(
    group: Group, sequences: Sequences, microbatch: int, byte_lengths: NDArray[np.int64] | None = None
) -> Evaluated:
    """Evaluates the known model on sequences given by their targets."""
    config = context_for(sequences)
    rows = cast(Rows, KnownRows(sequences, config.context_length))
    module = SequenceLoss(known_gpt(config))
    return evaluate(module, rows, range(len(sequences)), microbatch, FLOAT32, group, byte_lengths)


@dataclass(frozen=True)
class Case:
    """Sequences, and what they must give for any microbatch and number of processes."""

    sequences: Sequences
    microbatches: Sequence[int]
    loss: float
    targets: int


CASES = {
    "G60": Case(((0,), (3,) * 9), (1, 2), 1.054920, 10),
    "G62": Case(ONE_TO_FOUR, (1, 2, 3, 4), ONE_TO_FOUR_LOSS, 10),
    "G63": Case(ONE_OF_FIVE, (1, 2, 3), 1.193550, 5),
    "G64": Case(((0,), (3,), (0,), (3,)), (1,), 1.609438, 4),
    "one sequence for all": Case(((3, 3),), (1, 8), 0.916291, 2),
    "a sequence without targets": Case(((), (3, 3)), (1, 2), 0.916291, 2),
}


def evaluate_cases(group: Group) -> dict[tuple[str, int], Evaluated]:
    """By case and microbatch."""
    return {
        (name, microbatch): known_loss(group, case.sequences, microbatch)
        for name, case in CASES.items()
        for microbatch in case.microbatches
    }


@cache
def evaluated(processes: int) -> list[dict[tuple[str, int], Evaluated]]:
    """By rank."""
    return on_ranks(processes, evaluate_cases)


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_the_loss_is_the_mean_over_all_targets(name: str, processes: int) -> None:
    """Every microbatch size, every number of processes, each sequence counted once; the same on every rank."""
    case = CASES[name]
    for microbatch in case.microbatches:
        by_rank = [found[name, microbatch] for found in evaluated(processes)]
        assert by_rank[0].loss == pytest.approx(case.loss, abs=1e-6)
        assert by_rank[0].target_tokens == case.targets
        assert set(by_rank) == {by_rank[0]}


def test_only_the_sequences_asked_for_are_evaluated() -> None:
    def part(group: Group) -> Evaluated:
        rows = cast(Rows, KnownRows(ONE_OF_FIVE, SMALL.context_length))
        return evaluate(SequenceLoss(known_gpt()), rows, range(1, 4), 2, FLOAT32, group)

    found = on_ranks(1, part)[0]
    assert found.target_tokens == 3
    assert found.loss == pytest.approx(0.916291, abs=1e-6)


def test_bits_per_byte_count_the_bytes_of_the_targets() -> None:
    """Ten targets of 1 to 4 bytes by class: 30 bytes; and two parts add up to the whole."""
    lengths = np.array([1, 2, 3, 4, 100, 100])
    whole, first, second = on_ranks(
        1,
        lambda group: [
            known_loss(group, sequences, 2, lengths) for sequences in (ONE_TO_FOUR, ONE_TO_FOUR[:3], ONE_TO_FOUR[3:])
        ],
    )[0]
    assert whole.target_bytes == 30
    assert whole.bits_per_byte == pytest.approx(10 * ONE_TO_FOUR_LOSS / math.log(2) / 30, abs=1e-6)
    both = first + second
    assert (both.target_tokens, both.target_bytes) == (10, 30)
    assert both.loss == pytest.approx(whole.loss, rel=1e-7)
    assert Evaluated(1.0, 1, None).bits_per_byte is None
    assert (first + Evaluated(1.0, 1, None)).target_bytes is None


# Broken off


def stopped(group: Group) -> bool:
    """Whether an evaluation is broken off, on this rank, that the last one wishes to stop."""
    module = SequenceLoss(known_gpt()).train()
    rows = cast(Rows, KnownRows(ONE_OF_FIVE, SMALL.context_length))
    wishes = [group.process.rank == group.process.world_size - 1] * 3
    try:
        evaluate(module, rows, range(5), 1, FLOAT32, group, wants_to_stop=wishes.pop)
    except BrokenOffError:
        return module.training
    return False


@pytest.mark.parametrize("processes", [1, 2])
def test_what_one_rank_breaks_off_all_do(processes: int) -> None:
    """Without a result, and in the mode they were in; the others have done their part."""
    assert on_ranks(processes, stopped) == [True] * processes


# Without a trace


class Unreadable(KnownRows):
    """Rows that are not there."""

    def read(self, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Raises."""
        raise OSError("the disk is gone")


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("readable", [True, False])
def test_g65_the_mode_is_restored(training: bool, readable: bool) -> None:
    """Also when the evaluation raises; while it lasts dropout is off, and it draws nothing (G67)."""
    module = SequenceLoss(build_gpt(replace(SMALL, dropout=0.5), seed=1)).train(training)
    rows = (KnownRows if readable else Unreadable)(ONE_TO_FOUR, SMALL.context_length)
    random_state = torch.get_rng_state()

    def twice(group: Group) -> list[float]:
        return [evaluate(module, cast(Rows, rows), range(4), 2, FLOAT32, group).loss for _ in range(2)]

    if readable:
        first, second = on_ranks(1, twice)[0]
        assert first == second
    else:
        with pytest.raises(OSError, match="the disk is gone"):
            on_ranks(1, twice)
    assert {part.training for part in module.modules()} == {training}
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(parameter.grad is None for parameter in module.parameters())
    inputs, targets = KnownRows(ONE_TO_FOUR, SMALL.context_length).read(range(4))
    one, other = (module(inputs, targets, dropout_keys(1, step, range(4), module.model.config))[1] for step in (0, 1))
    assert torch.equal(one, other) is not training


def test_g17_training_and_evaluation_agree() -> None:
    """The same sequences have the same loss, to 1e-6, in a step and in an evaluation."""
    module = SequenceLoss(build_gpt(SMALL, seed=1))
    rows = KnownRows(ONE_TO_FOUR, SMALL.context_length)
    found = on_ranks(1, lambda group: evaluate(module, cast(Rows, rows), range(4), 3, FLOAT32, group))[0]
    trained: Tensor = module(*rows.read(range(4)))[0] / 10
    assert found.loss == pytest.approx(trained.item(), abs=1e-6)
