"""One optimizer step: the gradient of the whole global batch for any layout, and when it is not applied.

Names like G01 are those of public reports against other tools; the values are worked out on paper, see known_model.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from known_model import (
    LOSS_3,
    ONE_TO_FOUR,
    ONE_TO_FOUR_LOSS,
    ONLY_0,
    ONLY_3,
    SMALL,
    STILL,
    ZERO,
    KnownSequences,
    Steps,
    build_trainer,
    context_for,
    gradients,
    known_gpt,
    train,
)
from ranks import on_ranks
from safetensors.numpy import save_file
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from model.gpt import GPT, GPTConfig, build_gpt, parameter_count
from training.config import Batch, Data, Loss, Optimizer, Precision, RunConfig
from training.data import open_training_data
from training.distributed import Group
from training.errors import UserError
from training.layout import plan_layout
from training.step import Trainer
from training.step_records import StepRecord

RANDOM = GPTConfig(vocab_size=50, context_length=12, emb_dim=16, n_heads=2, n_layers=2, dropout=0.0)


# What the gradient of a step is


@dataclass(frozen=True)
class Case:
    """A window of targets, a config's batch, and the loss and gradient that each step must have."""

    steps: Steps
    accumulation: int
    microbatch: int
    loss: float
    gradient: tuple[float, float, float, float]
    world_size: int = 1
    processes: int | None = None
    """Processes that compute it, where they are not those of the config."""


def balanced(world_size: int, accumulation: int, microbatch: int, processes: int | None = None) -> Case:
    """Four sequences whose gradients cancel if, and only if, every target weighs the same."""
    return Case((ONE_TO_FOUR,), accumulation, microbatch, ONE_TO_FOUR_LOSS, ZERO, world_size, processes)


CASES = {
    "G01 two microbatches of 10 and 100 targets": Case(
        (((0,) * 10, (3,) * 100),), 2, 1, 1.042317, (0.009091, 0.2, 0.3, -0.509091)
    ),
    "G01 in one microbatch": Case((((0,) * 10, (3,) * 100),), 1, 2, 1.042317, (0.009091, 0.2, 0.3, -0.509091)),
    "G02 one microbatch": balanced(1, 1, 4),
    "G02 two microbatches": balanced(1, 2, 2),
    "G02 four microbatches": balanced(1, 4, 1),
    "G07 every sequence twice": Case((((0,) * 10, (3,) * 100) * 2,), 4, 1, 1.042317, (0.009091, 0.2, 0.3, -0.509091)),
    "G09 G10 two ranks of 1 and 9 targets": Case(
        (((0,), (3,) * 9),), 1, 1, 1.054920, (0.0, 0.2, 0.3, -0.5), world_size=2
    ),
    "G12 counts start anew in each window": Case(
        (((3,) * 4, (3,) * 6), ((3,) * 7, (3,) * 3)), 1, 1, LOSS_3, ONLY_3, world_size=2
    ),
    "G15 two ranks, two microbatches": balanced(2, 2, 1),
    "two ranks, one microbatch": balanced(2, 1, 2),
    "four ranks": balanced(4, 1, 1),
    "four ranks compute a config of one": balanced(1, 4, 1, processes=4),
    "two ranks compute a config of four": balanced(4, 1, 1, processes=2),
    "one rank computes a config of four": balanced(4, 1, 1, processes=1),
    "four ranks, two of them without a sequence": Case(
        (((0,), (3,) * 9),), 2, 1, 1.054920, (0.0, 0.2, 0.3, -0.5), processes=4
    ),
    "G16 five microbatches": Case((((3,),) * 5,), 5, 1, LOSS_3, ONLY_3),
    "G18 8 x 1": Case((((3,),) * 8,), 1, 8, LOSS_3, ONLY_3),
    "G18 4 x 2": Case((((3,),) * 8,), 2, 4, LOSS_3, ONLY_3),
    "G18 2 x 4": Case((((3,),) * 8,), 4, 2, LOSS_3, ONLY_3),
    "G18 1 x 8": Case((((3,),) * 8,), 8, 1, LOSS_3, ONLY_3),
    "G23 a short last window": Case((((3,),) * 4, ((3,),) * 4, ((3,),) * 2), 4, 1, LOSS_3, ONLY_3),
    "G23 a short last window on two ranks": Case(
        (((3,),) * 4, ((3,),) * 4, ((3,),) * 3), 2, 1, LOSS_3, ONLY_3, world_size=2
    ),
    "G29 every microbatch counts": Case((((0,), (0,), (0,), (3,)),), 4, 1, 1.956012, (-0.65, 0.2, 0.3, 0.15)),
    "G32 two ranks agree": Case((((0,), (3,), (0,), (3,)),), 2, 1, 1.609438, (-0.4, 0.2, 0.3, -0.1), world_size=2),
    "G37 a rank without targets": Case((((3,) * 4, ()),), 1, 1, LOSS_3, ONLY_3, world_size=2),
    "G37 a last microbatch without targets": Case((((3,) * 2, (3,) * 2, (), ()),), 2, 1, LOSS_3, ONLY_3, world_size=2),
    "G43 clipped as a whole": Case((((0,), (3,)),), 2, 1, 1.609438, (-0.4, 0.2, 0.3, -0.1)),
    "G68 no targets at first": Case((((), (3,) * 4),), 2, 1, LOSS_3, ONLY_3),
    "G68 no targets at last": Case((((3,) * 4, ()),), 2, 1, LOSS_3, ONLY_3),
    "an odd target": Case((((0,),),), 1, 1, 2.302585, ONLY_0),
    **{
        f"balanced, also in the short last step, on {processes} in microbatches of {microbatch}": Case(
            (ONE_TO_FOUR * 2, ONE_TO_FOUR), -(-8 // microbatch), microbatch, ONE_TO_FOUR_LOSS, ZERO, 1, processes
        )
        for processes in (1, 2, 3, 4)
        for microbatch in (1, 2, 3, 4)
    },
}
CLIP = 0.5


@dataclass(frozen=True)
class Outcome:
    """What a rank had after a step."""

    record: StepRecord
    gradient: list[float]
    clipped: list[float]


def run_cases(group: Group, names: Sequence[str], reproducibility: str) -> dict[str, list[Outcome]]:
    """Each step of some cases, without and with clipping."""
    return {
        name: [run_step(group, CASES[name], step, reproducibility) for step in range(len(CASES[name].steps))]
        for name in names
    }


def run_step(group: Group, case: Case, step: int, reproducibility: str) -> Outcome:
    """One step of a case, on a model of its own for each clipping, after the steps before it."""
    batch = Batch(world_size=case.world_size, microbatch=case.microbatch, accumulation=case.accumulation)
    found = []
    for clip_norm in (None, CLIP):
        model = known_gpt(context_for(case.steps[step]))
        optimizer = STILL.model_copy(update={"clip_norm": clip_norm})
        trainer = build_trainer(group, model, case.steps, batch, optimizer=optimizer, reproducibility=reproducibility)
        record = train(group, trainer, range(step + 1))[-1]
        assert model.head.weight.grad is not None
        found.append(model.head.weight.grad[:4, 0].tolist())
    return Outcome(record, *found)


@cache
def outcomes(processes: int, reproducibility: str = "rounding") -> list[dict[str, list[Outcome]]]:
    """By rank, the outcomes of all cases that are computed on so many processes."""
    names = [name for name, case in CASES.items() if (case.processes or case.world_size) == processes]
    return on_ranks(processes, run_cases, names, reproducibility)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("reproducibility", ["rounding", "bitwise"])
def test_the_gradient_is_that_of_the_mean_over_all_targets_of_the_step(name: str, reproducibility: str) -> None:
    """And the recorded loss that mean: G55 not divided by the accumulation, G56 not one rank's or microbatch's."""
    case = CASES[name]
    norm = math.hypot(*case.gradient)
    clipped = [value * min(1, CLIP / (norm + 1e-6)) for value in case.gradient]
    ranks = [by_name[name] for by_name in outcomes(case.processes or case.world_size, reproducibility)]
    for step, targets in enumerate(case.steps):
        for outcome in (steps[step] for steps in ranks):
            assert outcome.record.loss == pytest.approx(case.loss, abs=1e-6)
            assert outcome.gradient == pytest.approx(case.gradient, abs=1e-6)
            assert outcome.record.grad_norm == pytest.approx(norm, abs=1e-6)
            assert outcome.clipped == pytest.approx(clipped, abs=1e-6)
            assert outcome.record.target_tokens == sum(map(len, targets))
            assert outcome == ranks[0][step], "the same on every rank, to the last bit"


@pytest.mark.parametrize(
    ("name", "processes"),
    [("G15 two ranks, two microbatches", 2), ("four ranks, two of them without a sequence", 4)],
)
def test_the_extremes_are_those_of_the_sequences_of_all_ranks(name: str, processes: int) -> None:
    for by_name in outcomes(processes):
        record = by_name[name][0].record
        assert (record.loss_min, record.loss_max) == pytest.approx((LOSS_3, 2.302585), abs=1e-6)


def test_g04_a_target_weighs_the_same_whatever_its_neighbours() -> None:
    def losses_and_gradients(group: Group) -> Iterator[tuple[float | None, float]]:
        batch = Batch(world_size=1, microbatch=1, accumulation=4)
        for order in permutations(ONE_TO_FOUR):
            model = known_gpt()
            record = train(group, build_trainer(group, model, (order,), batch), [0])[0]
            yield record.loss, gradients(model).abs().max().item()

    found = on_ranks(1, lambda group: list(losses_and_gradients(group)))[0]
    assert len(found) == 24
    for loss, gradient in found:
        assert loss == pytest.approx(ONE_TO_FOUR_LOSS, abs=1e-6)
        assert gradient < 1e-6


@pytest.mark.parametrize("tied", [False, True])
def test_g05_the_first_token_of_a_sequence_is_no_target(tmp_path: Path, tied: bool) -> None:
    """Two sequences of 5 tokens have 8 targets, not 10; on the real data, and for a tied head too."""
    save_file({"tokens": np.full(9, 3, dtype=np.uint16)}, tmp_path / "train.safetensors")
    model = known_gpt(replace(SMALL, context_length=4, tie_weights=tied))
    batch = Batch(world_size=1, microbatch=1, accumulation=2)

    def one_step(group: Group) -> StepRecord:
        trainer = build_trainer(group, model, (), batch)
        return train(group, replace(trainer, data=open_training_data(trainer.config, tmp_path)), [0])[0]

    record = on_ranks(1, one_step)[0]
    assert record.target_tokens == 8
    assert (record.loss, record.grad_norm) == pytest.approx((LOSS_3, 0.707107), abs=1e-6)


# The reductions, on random weights, against plain autograd


def random_steps() -> Steps:
    """A whole step of 12 sequences and a short one of 7; the second microbatch of 3 holds no target at all."""
    lengths = [5, 1, 12, 0, 0, 0, 7, 0, 2, 9, 3, 12], [4, 11, 0, 0, 0, 0, 6]
    generator = torch.Generator().manual_seed(5)
    return tuple(
        tuple(tuple(torch.randint(RANDOM.vocab_size, (length,), generator=generator).tolist()) for length in step)
        for step in lengths
    )


def reduced(group: Group, microbatches: Sequence[int | None]) -> list[list[Tensor]]:
    """By layout, then by reduction and step: all gradients."""
    batch = Batch(world_size=2, microbatch=3, accumulation=2)
    found: list[list[Tensor]] = []
    for microbatch in microbatches:
        found.append([])
        for reduction in ("token", "microbatch_mean", "sum"):
            model = build_gpt(RANDOM, seed=3)
            trainer = build_trainer(
                group, model, random_steps(), batch, microbatch, loss=Loss.model_validate({"reduction": reduction})
            )
            for step in range(2):
                trainer.step(step)
                found[-1].append(gradients(model).clone())
    return found


def reference() -> list[Tensor]:
    """The same from the definitions: autograd of one expression over the whole step."""

    def sums(model: GPT, step: int) -> list[Tensor]:
        data = KnownSequences(random_steps(), RANDOM.context_length)
        inputs, targets = data.read(step, range(len(data.steps[step])))
        log_probabilities = model(inputs).log_softmax(-1)
        return [
            -sum((log_probabilities[i, j, t] for j, t in enumerate(row) if t >= 0), start=torch.zeros(()))
            for i, row in enumerate(targets.tolist())
        ]

    def microbatch_mean(losses: list[Tensor], counts: list[int]) -> Tensor:
        means = [
            torch.stack(losses[i : i + 3]).sum() / sum(counts[i : i + 3])
            for i in range(0, len(losses), 3)
            if sum(counts[i : i + 3])
        ]
        return torch.stack(means).mean()

    reductions: list[Callable[[list[Tensor], list[int]], Tensor]] = [
        lambda losses, counts: torch.stack(losses).sum() / sum(counts),
        microbatch_mean,
        lambda losses, counts: torch.stack(losses).sum(),
    ]
    found = []
    for reduction in reductions:
        for step, sequences in enumerate(random_steps()):
            model = build_gpt(RANDOM, seed=3)
            reduction(sums(model, step), [len(targets) for targets in sequences]).backward()
            found.append(gradients(model))
    return found


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_a_reduction_is_the_same_for_every_layout(processes: int) -> None:
    """token, microbatch_mean and sum, on whole and short steps; microbatches are always those of the config."""
    expected = reference()
    for layouts in on_ranks(processes, reduced, [None, 5, 1]):
        for found in layouts:
            for gradient, wanted in zip(found, expected, strict=True):
                scale = max(1.0, wanted.abs().max().item())  # a sum's gradients are not of the order of 1
                assert (gradient - wanted).abs().max() < 1e-6 * scale


# How many steps there are, and how long the last is


def test_g23_g24_the_training_range_is_rounded_up_to_whole_steps(tmp_path: Path) -> None:
    """10 microbatches at accumulation 4, 3 epochs: 3 updates an epoch, 9 in all, none of them short."""
    config = tokens_config(train_tokens=10 * 2 * 8, epochs=3)
    save_file({"tokens": np.zeros(12 * 2 * 8 + 1, dtype=np.uint16)}, tmp_path / "train.safetensors")
    data = open_training_data(config, tmp_path)
    assert (config.total_steps, data.total_steps, data.steps_per_epoch) == (9, 9, 3)
    layout = plan_layout(config.batch, 1)
    for epoch in range(3):
        steps = range(3 * epoch, 3 * epoch + 3)
        microbatches = [
            (step, part) for step in steps for part in layout.microbatches(0, len(data.target_counts(step)))
        ]
        assert len(microbatches) == 12
        assert sorted(number for step, part in microbatches for number in data.sequences(step, part)) == list(range(24))


def test_g26_less_data_than_a_step_is_one_step_an_epoch_or_an_error(tmp_path: Path) -> None:
    """3 microbatches an epoch at accumulation 4, 5 epochs: 5 updates; without the data for one, none is pretended."""
    path = tmp_path / "train.safetensors"
    config = tokens_config(train_tokens=3 * 2 * 8, epochs=5)
    save_file({"tokens": np.zeros(4 * 2 * 8 + 1, dtype=np.uint16)}, path)
    assert config.total_steps == open_training_data(config, tmp_path).total_steps == 5
    save_file({"tokens": np.zeros(4 * 2 * 8, dtype=np.uint16)}, path)
    for train_tokens in (3 * 2 * 8, -1):
        with pytest.raises(UserError, match=r"needs at least 65 tokens .* has 64"):
            open_training_data(tokens_config(train_tokens=train_tokens, epochs=5), tmp_path)


@pytest.mark.parametrize("accumulation", [0, -1])
def test_g24_accumulation_below_one_is_refused(accumulation: int) -> None:
    with pytest.raises(ValueError, match="accumulation"):
        Batch(world_size=1, microbatch=2, accumulation=accumulation)


def tokens_config(train_tokens: int, epochs: int) -> RunConfig:
    """Microbatches of 2 sequences of 8 tokens, accumulation 4."""
    data = Data(dataset="test", train_tokens=train_tokens, epochs=epochs)
    return RunConfig(name="test", model=SMALL, data=data, batch=Batch(world_size=1, microbatch=2, accumulation=4))


# What the processes exchange


def alternating(steps: int, sequences: int) -> Steps:
    """Steps of one-target sequences of changing class."""
    return tuple(tuple(((step + i) % 4,) for i in range(sequences)) for step in range(steps))


Exchanged = tuple[list[int], Counter[str], int]
"""Indices of DDP's buckets, and all collectives by name, with their bytes."""


class Collectives(TorchDispatchMode):
    """Counts every collective that is started, also by DDP, by name, and the bytes handed to it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        """Notes a call, and makes it."""
        if function.namespace == "c10d":
            self.counts[function.__name__] += 1
            self.bytes += sum(tensor.nbytes for tensor in arguments[0])
        return function(*arguments, **(keywords or {}))


def count_exchanges(group: Group, accumulation: int, bucket_cap_mb: float | None) -> Exchanged:
    """What two steps exchanged, and reading them."""
    buckets: list[int] = []

    def exchange(processes: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        buckets.append(bucket.index())
        return allreduce_hook(processes, bucket)

    def trainer() -> Trainer:
        batch = Batch(world_size=2, microbatch=1, accumulation=accumulation)
        made = build_trainer(group, build_gpt(RANDOM, seed=3), alternating(4, 2 * accumulation), batch)
        if bucket_cap_mb is None:
            return made
        ddp = made.gradients.module
        assert isinstance(ddp, DistributedDataParallel)
        made.gradients.module = DistributedDataParallel(
            ddp.module, bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=True
        )
        return made

    hooked, plain = trainer(), trainer()
    ddp = hooked.gradients.module
    assert isinstance(ddp, DistributedDataParallel)
    ddp.register_comm_hook(ddp.process_group, exchange)
    # The first step shows DDP the order of the gradients; the second already has the final buckets.
    train(group, hooked, [0, 1])
    train(group, plain, [0, 1])
    buckets.clear()
    train(group, hooked, [2, 3])
    with Collectives() as collectives:
        train(group, plain, [2, 3])
    return buckets, collectives.counts, collectives.bytes


def count_all_exchanges(group: Group) -> dict[tuple[int, float | None], Exchanged]:
    """By accumulation and size of DDP's buckets, None for ours."""
    return {(a, cap): count_exchanges(group, a, cap) for a in (1, 2, 8) for cap in (None, 0.005)}


def test_g33_each_bucket_is_exchanged_once_a_step() -> None:
    """Whatever the accumulation; reading two steps' results takes three collectives more, and nothing else does.

    So what is sent is the gradients, once a step, and for the reading 24 float64 numbers or fewer.
    """
    gradients_of_two_steps = 2 * 4 * parameter_count(RANDOM)
    for counts in on_ranks(2, count_all_exchanges):
        for (_, cap), (buckets, collectives, sent) in counts.items():
            number = max(counts[1, cap][0]) + 1
            assert number == 1 if cap is None else number > 1
            assert sorted(buckets[:number]) == sorted(buckets[number:]) == list(range(number))
            assert collectives == {"allreduce_.default": 2 * number + 3}
            assert sent == counts[1, cap][2], "whatever the accumulation"
            assert 0 < sent - gradients_of_two_steps <= 24 * 8


def digests(group: Group) -> list[str]:
    """Digest of the weights before the training, after 1 update and after 50."""
    batch = Batch(world_size=2, microbatch=1, accumulation=2)
    # A rank that starts elsewhere gets the weights of rank 0.
    model = build_gpt(RANDOM, seed=group.process.rank)
    trainer = build_trainer(group, model, alternating(50, 4), batch, optimizer=Optimizer())
    found = []
    for steps in (range(0), range(1), range(1, 50)):
        train(group, trainer, steps) if steps else None
        weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        found.append(hashlib.sha256(weights).hexdigest())
    return found


def test_g32_the_ranks_keep_the_same_weights() -> None:
    first, second = on_ranks(2, digests)
    assert first == second
    assert len(set(first)) == 3, "the weights move"


def dropped(group: Group) -> list[tuple[list[float], str]]:
    """Twice: this rank's losses in two steps on the same sequences and weights; and a digest of the last gradients."""
    found = []
    for _ in range(2):
        model = build_gpt(replace(RANDOM, dropout=0.5), seed=3)
        steps: Steps = (((1, 2, 3, 4), (1, 2, 3, 4)),) * 2
        trainer = build_trainer(group, model, steps, Batch(world_size=2, microbatch=1, accumulation=1))
        losses = [trainer.step(step).loss_sum.item() for step in range(2)]
        found.append((losses, hashlib.sha256(gradients(model).numpy().tobytes()).hexdigest()))
    return found


def test_g84_dropout_differs_between_ranks_and_steps_and_repeats() -> None:
    (first, first_again), (second, second_again) = on_ranks(2, dropped)
    assert (first, second) == (first_again, second_again)
    assert len({*first[0], *second[0]}) == 4
    assert first[1] == second[1], "the exchanged gradients"


def with_dropout(group: Group, microbatch: int, steps: Sequence[int]) -> tuple[list[float], Tensor]:
    """The losses of some steps of six uneven sequences, with dropout, in float64; and the last step's gradient."""
    model = build_gpt(replace(RANDOM, dropout=0.3), seed=3).double()
    window = tuple(tuple(range(1, 1 + length)) for length in (12, 1, 7, 12, 3, 5))
    batch = Batch(world_size=1, microbatch=6, accumulation=1)
    trainer = build_trainer(group, model, (window,) * 4, batch, microbatch)
    losses = [group.sum(trainer.step(step).loss_sum).item() for step in steps]
    return losses, gradients(model)


@pytest.mark.parametrize(("processes", "microbatch"), [(1, 1), (1, 4), (2, 3), (2, 2)])
def test_dropout_does_not_know_the_layout(processes: int, microbatch: int) -> None:
    """Six sequences at once, one by one, 3 + 3, and on two processes; to float32's rounding of the weights 1 / N."""
    losses, gradient = on_ranks(1, with_dropout, 6, range(2))[0]
    assert abs(losses[0] - losses[1]) > 0.01, "another step has other masks"
    for found_losses, found_gradient in on_ranks(processes, with_dropout, microbatch, range(2)):
        assert found_losses == pytest.approx(losses, rel=1e-12)
        torch.testing.assert_close(found_gradient, gradient, rtol=1e-6, atol=1e-9)


def test_g85_masks_after_a_resume_are_those_of_the_step() -> None:
    """Begun at step 2, as a resumed run does, on one process or two: what the uninterrupted run had there."""
    losses, gradient = on_ranks(1, with_dropout, 3, range(4))[0]
    for processes in (1, 2):
        for resumed, resumed_gradient in on_ranks(processes, with_dropout, 3, (2, 3)):
            assert resumed == pytest.approx(losses[2:], rel=1e-12)
            torch.testing.assert_close(resumed_gradient, gradient, rtol=1e-6, atol=1e-9)


# When an update is left out

BAD = {
    "one inf": lambda ones: ones.index_fill(0, torch.tensor(0), math.inf),
    "one nan": lambda ones: ones.index_fill(0, torch.tensor(0), math.nan),
    "squares beyond float32": lambda ones: 1e20 * ones,
    "out of bitwise mode's range": lambda ones: 1e6 * ones,
}
OUT_OF_RANGE = [*BAD][2:]
"""Finite, but too large for bitwise mode's integers; the last one for nothing else."""


@dataclass(frozen=True)
class Skipped:
    """A good update, a bad one, another good one: what each changed."""

    weight: list[float]
    """One of the weights, 1 at first, after each update."""
    unchanged: list[bool]
    """Whether weights and optimizer state are, to the last bit, what they were before each update."""
    updates: list[float]
    """The optimizer's own count after each."""
    moment: list[float]
    records: list[StepRecord]


def skip(group: Group, spoil: str | None, clip_norm: float | None, amp: str, reproducibility: str) -> Skipped:
    """Every gradient of the position embedding is 1; in the second step the last rank's is spoilt.

    With nothing to spoil, the second step has no targets instead.
    """
    model = build_gpt(SMALL, seed=1)
    watched = model.position_embedding.weight
    watched.data.fill_(1.0)
    step = 0
    last = group.process.rank == group.process.world_size - 1

    def gradient(computed: Tensor) -> Tensor:
        ones = torch.full((computed.numel(),), trainer.gradients.averaged_over / group.process.world_size)
        return (BAD[spoil](ones) if spoil and step == 1 and last else ones).view_as(computed)

    watched.register_hook(gradient)
    steps: Steps = (((1,), (2,)), ((1,), (2,)) if spoil else ((), ()), ((1,), (2,)))
    batch = Batch(world_size=1, microbatch=2 // group.process.world_size, accumulation=group.process.world_size)
    optimizer = Optimizer(learning_rate=1e-3, weight_decay=0.1, betas=(0.9, 0.95), clip_norm=clip_norm)
    precision = Precision.model_validate({"amp": amp, "matmul": "highest"})
    trainer = build_trainer(
        group, model, steps, batch, optimizer=optimizer, precision=precision, reproducibility=reproducibility
    )

    def everything() -> list[Tensor]:
        state = [value.clone() for values in trainer.optimizer.state.values() for value in values.values()]
        return [p.detach().clone() for p in model.parameters()] + state

    result = Skipped([], [], [], [], [])
    for step in range(3):
        before = everything()
        result.records.extend(train(group, trainer, [step]))
        after = everything()
        result.unchanged.append(len(before) == len(after) and all(map(torch.equal, before, after)))
        state = trainer.optimizer.state[watched]
        result.weight.append(watched[-1, -1].item())
        result.updates.append(state["step"].item())
        result.moment.append(state["exp_avg"][-1, -1].item())
    return result


def skip_all(group: Group, reproducibility: str) -> dict[tuple[str | None, float | None, str], Skipped]:
    """All ways to spoil a step, with and without clipping and autocast."""
    return {
        (spoil, clip, amp): skip(group, spoil, clip, amp, reproducibility)
        for spoil in (*(BAD if reproducibility == "bitwise" else [*BAD][:-1]), None)
        for clip in (None, 100.0)
        for amp in ("off", "bf16")
    }


@pytest.mark.parametrize("reproducibility", ["rounding", "bitwise"])
@pytest.mark.parametrize("processes", [1, 2])
def test_g44_g47_g69_a_bad_update_changes_nothing_on_any_rank(processes: int, reproducibility: str) -> None:
    """A gradient that is not finite, or out of range, on one rank, or a step without targets.

    The weight is worked out on paper.
    """
    for by_way in on_ranks(processes, skip_all, reproducibility):
        for (spoil, _, _), found in by_way.items():
            assert found.unchanged == [False, True, False]
            assert found.weight[:2] == pytest.approx([0.998900, 0.998900], abs=1e-6)
            assert found.updates == [1, 1, 2]
            assert found.moment[:2] == pytest.approx([0.1, 0.1], abs=1e-6)
            assert [record.skipped for record in found.records] == [False, True, False]
            bad = found.records[1]
            assert not bad.overflow
            assert bad.out_of_range == (reproducibility == "bitwise" and spoil in OUT_OF_RANGE)
            if spoil is None:
                assert (bad.loss, bad.loss_min, bad.loss_max, bad.target_tokens) == (None, None, None, 0)
            else:
                assert not math.isfinite(bad.grad_norm)
                assert bad.loss is not None, "the loss itself was finite, and is recorded"
