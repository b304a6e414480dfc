"""Precision of a step: the loss scale of fp16, and the float32 sums of the gradients.

Names like G40 are those of public reports against other tools.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from known_model import ONLY_3, SMALL, build_trainer, known_gpt, train
from ranks import on_ranks
from small_checkpoints import state_at

from model.gpt import build_gpt
from training.checkpoint import write_checkpoint
from training.config import Batch, CosineSchedule, Optimizer, Precision
from training.distributed import Group
from training.optimizer import learning_rate_at
from training.restore import load_optimizer, load_weights, read_state
from training.snapshot import take_snapshot
from training.step import Trainer
from training.step_records import StepRecord


def scaled(group: Group, spoilt: Sequence[int]) -> tuple[list[StepRecord], list[list[float]], list[float]]:
    """Five steps of four microbatches with a GradScaler; records, the known gradient and the head's weights."""
    model = known_gpt()
    step = 0
    model.head.weight.register_hook(lambda computed: computed * math.inf if step in spoilt else computed)
    optimizer = Optimizer(learning_rate=1e-3, clip_norm=1.0)
    batch = Batch(world_size=1, microbatch=1, accumulation=4)
    scaler = torch.amp.GradScaler("cpu")
    trainer = build_trainer(group, model, (((3,),) * 4,) * 3, batch, scaler=scaler, optimizer=optimizer)
    records, found, weights = [], [], []
    for step in range(3):
        records.extend(train(group, trainer, [step]))
        assert model.head.weight.grad is not None
        found.append(model.head.weight.grad[:4, 0].tolist())
        weights.append(model.head.weight[3, 0].item())
    return records, found, weights


def test_g40_g41_the_norm_and_the_clipping_are_of_the_unscaled_gradient() -> None:
    records, found, weights = on_ranks(1, scaled, [])[0]
    assert records[0].grad_norm == pytest.approx(0.707107, abs=1e-6)
    assert found[0] == pytest.approx(ONLY_3, abs=1e-6)
    assert [record.loss_scale for record in records] == [65536.0] * 3
    assert len(set(weights)) == 3, "each step updates"


def test_g48_overflows_lower_the_scale_and_are_not_taken_for_failures() -> None:
    records, _, weights = on_ranks(1, scaled, [0, 1])[0]
    assert [record.loss_scale for record in records] == [65536.0, 32768.0, 16384.0]
    assert [record.skipped for record in records] == [record.overflow for record in records] == [True, True, False]
    assert weights[0] == weights[1] == pytest.approx(math.log(4))
    assert weights[2] != weights[1]


BREAK, END = 13, 16


def build_scaled(group: Group, reproducibility: str, overflows: int) -> Trainer:
    """16 steps with a GradScaler, of which the first ones done overflow."""
    model = build_gpt(SMALL, seed=1)
    batch = Batch(world_size=1, microbatch=1, accumulation=2)
    trainer = build_trainer(
        group,
        model,
        (((3,), (0, 1)),) * END,
        batch,
        scaler=torch.amp.GradScaler("cpu"),
        optimizer=Optimizer(learning_rate=1e-2),
        schedule=CosineSchedule(name="cosine", warmup_percent=50),
        reproducibility=reproducibility,
    )
    overflowing = iter([math.inf] * 2 * overflows)
    model.head.weight.register_hook(lambda computed: computed * next(overflowing, 1.0))
    return trainer


def train_on(group: Group, trainer: Trainer) -> list[StepRecord]:
    """The last three steps, but for DDP's exchanges, of which a new one has more while it forms its buckets."""
    return [replace(record, all_reduces=0) for record in train(group, trainer, range(BREAK, END))]


def broken_off(group: Group, folder: Path, reproducibility: str) -> tuple[list[StepRecord], list[StepRecord], bool]:
    """The last three steps without a break; the same after one; and whether the weights are then the same bits."""
    trainer = build_scaled(group, reproducibility, overflows=8)
    train(group, trainer, range(BREAK))
    assert trainer.scaler is not None
    state = replace(state_at(BREAK, SMALL), scaler=trainer.scaler.state_dict())
    saved = write_checkpoint(folder, take_snapshot(trainer.module.model, trainer.optimizer, state))
    expected = train_on(group, trainer)
    rates = [learning_rate_at(step, trainer.config, END) for step in range(BREAK, END)]
    assert [record.learning_rate for record in expected] == rates

    again = build_scaled(group, reproducibility, overflows=0)
    load_weights(saved, again.module.model)
    load_optimizer(saved, again.module.model, again.optimizer)
    scaler = read_state(saved).scaler
    assert again.scaler is not None
    assert scaler is not None
    assert (scaler["scale"], scaler["_growth_tracker"]) == (256.0, 5)
    again.scaler.load_state_dict(scaler)
    found = train_on(group, again)
    pairs = zip(trainer.module.parameters(), again.module.parameters(), strict=True)
    return expected, found, all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("reproducibility", ["rounding", "bitwise"])
def test_g45_the_loss_scale_and_its_growth_counter_survive_a_resume(tmp_path: Path, reproducibility: str) -> None:
    """R14, R112: eight overflows, 65536 / 2**8 = 256, and five good steps; then none, and the losses of no break.

    The schedule counts skipped updates too: before and after the break a step's learning rate is that of its number.
    """
    expected, found, same_weights = on_ranks(1, broken_off, tmp_path, reproducibility)[0]
    assert found == expected
    assert same_weights
    assert [record.loss_scale for record in found] == [256.0] * 3
    assert not any(record.skipped for record in found)
    assert len({record.loss for record in found}) == len({record.learning_rate for record in found}) == 3


ONE_AND_SMALL = (1.0, *[2.0**-9] * 63)


@pytest.mark.parametrize(
    ("amp", "parts", "total"),
    [
        pytest.param("off", ONE_AND_SMALL, 1.123047, id="off, one and 63 small ones"),
        pytest.param("bf16", ONE_AND_SMALL, 1.123047, id="bf16, one and 63 small ones"),
        pytest.param("fp16", ONE_AND_SMALL, 1.123047, id="fp16, one and 63 small ones"),
        pytest.param(
            "bf16", (0.01,) * 512, 5.12, id="bf16, 512 alike", marks=pytest.mark.slow
        ),  # bf16 is emulated here
    ],
)
def test_g78_gradients_are_summed_in_float32(amp: str, parts: tuple[float, ...], total: float) -> None:
    model = build_gpt(SMALL, seed=1)
    each = iter(parts)
    model.position_embedding.weight.register_hook(lambda computed: torch.full_like(computed, next(each)))
    batch = Batch(world_size=1, microbatch=1, accumulation=len(parts))
    precision = Precision.model_validate({"amp": amp, "matmul": "highest"})

    def one_step(group: Group) -> None:
        build_trainer(group, model, (((1,),) * len(parts),), batch, precision=precision).step(0)

    on_ranks(1, one_step)
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    gradient = model.position_embedding.weight.grad
    assert gradient is not None
    assert gradient[0, 0].item() == pytest.approx(total, abs=1e-4)
