"""The search for the largest microbatch: what is tried, what all ranks agree on, what is refused."""

import re
from typing import Any

import pytest
import torch
from conftest import Workplace
from ranks import ALONE, on_ranks
from small_configs import small_config

from training.config import Batch
from training.distributed import Group, Process
from training.errors import RunError, UserError
from training.layout import plan_layout
from training.microbatch_search import (
    Trial,
    largest_that_fits,
    microbatch_sizes,
    refuse_to_search,
    search_max_microbatch,
)
from training.step import StepResult, Trainer

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("batch", "world_size", "sizes"),
    [
        ((1, 12, 1), 1, [1, 2, 3, 4, 6, 12]),
        ((2, 3, 2), 1, [1, 2, 3, 4, 6, 12]),  # what counts is the global batch
        ((1, 12, 1), 2, [1, 2, 3, 6]),
        ((1, 7, 1), 1, [1, 2, 3, 4, 7]),  # 2 leads to an accumulation of 4, 3 to one of 3, 4 to one of 2
        ((1, 3, 1), 8, [1]),
        ((8, 12, 1), 8, [1, 2, 3, 4, 6, 12]),
    ],
)
def test_one_size_for_each_accumulation(batch: tuple[int, int, int], world_size: int, sizes: list[int]) -> None:
    config = Batch(world_size=batch[0], microbatch=batch[1], accumulation=batch[2])
    assert microbatch_sizes(config, world_size) == sizes
    layouts = [plan_layout(config, world_size, size) for size in range(1, sizes[-1] + 1)]
    assert {layout.microbatch for layout in layouts} == set(sizes), "--microbatch can lead to no other"


@pytest.mark.parametrize("most", range(14))
def test_the_largest_that_fits(most: int) -> None:
    """And few are tried: for 12 sizes four at most."""
    sizes, tried = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13], list[int]()

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= most

    expected = [size for size in sizes if size <= most]
    assert largest_that_fits(sizes, fits) == (expected[-1] if expected else None)
    assert len(tried) == len(set(tried)) <= 4


def test_a_trial_is_a_step_of_the_longest_sequences() -> None:
    """With two microbatches of the size asked for, an update, and dropout's keys; and its exchange where asked for."""
    config = small_config(model={"dropout": 0.1}, optimizer={"clip_norm": 1.0})
    steps: list[StepResult] = []
    take = Trainer.step

    def step(trainer: Trainer, number: int) -> StepResult:
        steps.append(take(trainer, number))
        return steps[-1]

    with ALONE.group() as group, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "step", step)
        trial = Trial(config, group, activation_checkpointing=True)
        assert trial.fits(3)
        trial.exchange(2)
    assert [result.input_tokens for result in steps] == [2 * 3 * 8, 2 * 2 * 8]
    assert [result.all_reduces > 0 for result in steps] == [False, True]
    assert float(steps[1].loss_sum) / 32 < float(steps[0].loss_sum) / 48, "the first one has updated the weights"


def search_with_limits(group: Group, limits: list[int]) -> list[str] | str:
    """The search for 24 sequences a step, on a rank whose memory is full above a number of sequences at once."""
    config = small_config(batch={"world_size": 4, "microbatch": 6, "accumulation": 1})
    take, limit = Trainer.step, limits[group.process.rank]

    def step(trainer: Trainer, number: int) -> StepResult:
        if trainer.layout.microbatch > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")
        return take(trainer, number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "step", step)
        try:
            return search_max_microbatch(config, group, activation_checkpointing=False)
        except RunError as error:
            return str(error)


def test_all_ranks_agree_on_what_fits_on_each() -> None:
    first, second = on_ranks(2, search_with_limits, [9, 5])
    assert first == second
    assert first == [
        "the largest microbatch that fits, with 5 % of the memory kept free, is 4 of 12",
        "layout: 24 sequences per step = 2 processes x microbatch 4 x accumulation 3 "
        "(the config says 4 x 6 x 1: the same run)",
        "train with --microbatch 4",
    ]


def test_what_does_not_fit_at_all_is_told() -> None:
    with ALONE.group() as group:
        told = search_with_limits(group, [0])
    assert told == (
        "--find-max-microbatch: not even one sequence at a time fits on every GPU; add --activation-checkpointing, "
        "which needs less; else use a device with more memory, or a smaller model"
    )


@pytest.mark.parametrize(
    ("device", "beside", "sections", "told"),
    [
        (
            CPU,
            [],
            {},
            "needs a GPU, as on a CPU the system kills .* cannot be caught; choose with --microbatch M",
        ),
        (GPU, ["--microbatch 3", "--dry-run"], {}, "excludes --microbatch 3, --dry-run: it trains nothing"),
        (GPU, [], {"reproducibility": "bitwise"}, "the config's microbatch, 2, stays .*; leave the option out"),
    ],
)
def test_what_is_refused(device: torch.device, beside: list[str], sections: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=f"^--find-max-microbatch: {told}"):
        refuse_to_search(small_config(**sections), device, beside)


def test_the_command_refuses_on_a_cpu(workplace: Workplace) -> None:
    """In one sentence; it needs no dataset and writes nothing."""
    (workplace.datasets / "data" / "train.safetensors").unlink()
    done = workplace.train(workplace.write_config(), "--find-max-microbatch")
    assert done.status == 2
    assert re.fullmatch(r"error: --find-max-microbatch: needs a GPU, [^\n]*\n", done.errors)
    assert not done.folder.exists()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_is_found_fits_and_the_next_size_does_not() -> None:
    """GPT-2 small on a real device, which takes some, but not all, of 4,096 sequences at once."""
    shape = {"vocab_size": 50257, "context_length": 1024, "emb_dim": 768, "n_heads": 12, "n_layers": 12}
    config = small_config(
        model=shape, batch={"world_size": 1, "microbatch": 4096, "accumulation": 1}, precision={"amp": "bf16"}
    )
    with Process.from_environment().group() as group:
        lines = search_max_microbatch(config, group, activation_checkpointing=False)
        found = int(lines[-1].split()[-1])
        sizes = microbatch_sizes(config.batch, 1)
        trial = Trial(config, group, activation_checkpointing=False)
        assert 1 < found < 4096
        assert trial.fits(found)
        assert not trial.fits(sizes[sizes.index(found) + 1])
