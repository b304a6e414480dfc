"""The learning rate of each step, and what decays."""

from typing import Any

import pytest
import torch
from torch import nn

from model.gpt import GPTConfig, build_gpt
from training.config import Batch, CosineSchedule, Data, Optimizer, RunConfig
from training.optimizer import build_optimizer, learning_rate_at

PEAK = 0.0014
TABLE = {
    0: 1.4e-08,
    1: 8.5838238842e-07,
    10: 8.45782388420e-06,
    100: 8.44522388420e-05,
    617: 0.000520997933655,
    829: 0.000700007,
    1000: 0.00084439638842,
    1234: 0.00104198186731,
    1657: 0.00139915561761,
    1658: 0.0014,
    1659: 0.001399999996868,
    5000: 0.00136534335556,
    10000: 0.00119433949797,
    16582: 0.000822048052000,
    20000: 0.00060919523234,
    25000: 0.000337508718065,
    30000: 0.000171112592412,
    33164: 0.000140000003132,
}


def config(peak: float = PEAK, **schedule: Any) -> RunConfig:
    """A run with a cosine schedule, or with a constant rate."""
    sections: dict[str, Any] = {"schedule": CosineSchedule(name="cosine", **schedule)} if schedule else {}
    return RunConfig(
        name="test",
        data=Data(dataset="test", train_tokens=3_260_190_720),
        batch=Batch(world_size=8, microbatch=12, accumulation=1),
        optimizer=Optimizer(learning_rate=peak),
        **sections,
    )


SCHEDULED = config(warmup_percent=5, final_fraction=0.1)


@pytest.mark.parametrize("step", TABLE)
def test_the_published_schedule(step: int) -> None:
    assert SCHEDULED.total_steps == 33_165
    assert SCHEDULED.warmup_steps(33_165) == 1_658
    assert learning_rate_at(step, SCHEDULED, 33_165) == pytest.approx(TABLE[step], rel=1e-11)


def test_a_warm_up_that_rounds_to_0() -> None:
    rates = [learning_rate_at(step, SCHEDULED, 4) for step in range(4)]
    assert rates == pytest.approx([0.0014, 0.00121547727, 0.00077, 0.00032452273], abs=5e-12)


@pytest.mark.parametrize("total_steps", [1, 2, 4, 10, 33_165])
def test_past_the_end_the_rate_stays(total_steps: int) -> None:
    for step in (total_steps, total_steps + 1, total_steps + 5, 2 * total_steps, 10**9):
        assert learning_rate_at(step, SCHEDULED, total_steps) == pytest.approx(PEAK / 10, rel=1e-12)


def test_r16_no_warm_up_and_down_to_0() -> None:
    """R16: a rate is a function of the step's number, so a resumption can neither begin anew nor lag."""
    to_zero = config(peak=1.0, warmup_percent=0, final_fraction=0)
    rates = [learning_rate_at(step, to_zero, 10) for step in range(10)]
    expected = [1.0, 0.9755, 0.9045, 0.7939, 0.6545, 0.5, 0.3455, 0.2061, 0.0955, 0.0245]
    assert rates == pytest.approx(expected, abs=5e-5)
    assert learning_rate_at(5, to_zero, 100) == pytest.approx(0.9938, abs=5e-5), "R18: a longer run is another schedule"
    assert learning_rate_at(15, to_zero, 10) == 0.0


def test_g50_the_warm_up_counts_updates() -> None:
    """8 of 20 updates: the fifth update has half the peak; G52: the third of 10 has a fifth of it."""
    assert learning_rate_at(4, config(peak=1.0, warmup_percent=40), 20) == pytest.approx(0.500005, abs=1e-9)
    assert learning_rate_at(2, config(peak=1.0, warmup_percent=50), 20) == pytest.approx(0.200008, abs=1e-9)
    assert learning_rate_at(0, config(peak=1.0, warmup_percent=50), 20) == pytest.approx(1e-5), "G54: never 0"


@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 8), (2, 4), (4, 2)])
def test_g51_the_schedule_counts_updates_on_any_number_of_processes(world_size: int, accumulation: int) -> None:
    """A quarter of 100 updates, without a warm-up: (1 + cos 45 degrees) / 2 of the peak, whatever the split."""
    split = config(peak=1.0, warmup_percent=0, final_fraction=0).model_copy(
        update={
            "data": Data(dataset="test", train_tokens=100 * 96 * 1024),
            "batch": Batch(world_size=world_size, microbatch=12, accumulation=accumulation),
        }
    )
    assert split.total_steps == 100
    assert learning_rate_at(25, split, 100) == pytest.approx(0.8535533906)


def test_g54_the_first_update_is_not_wasted() -> None:
    """At peak 1.0 its rate is 1e-5, and AdamW moves every parameter by that much."""
    model = build_gpt(SMALL, seed=1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = build_optimizer(model, Optimizer(weight_decay=0))
    optimizer.param_groups[0]["lr"] = learning_rate_at(0, config(peak=1.0, warmup_percent=50), 20)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for old, parameter in zip(before, model.parameters(), strict=True):
        torch.testing.assert_close(parameter.detach(), old - 1e-5, rtol=0, atol=5e-7)


def test_a_constant_rate() -> None:
    assert {learning_rate_at(step, config(), 10) for step in (0, 1, 9, 10, 1000)} == {PEAK}


# What decays


def decayed_and_not(model: nn.Module, decay: str) -> tuple[int, int]:
    """Numbers of values in the two kinds of group."""
    optimizer = build_optimizer(model, Optimizer.model_validate({"decay": decay, "weight_decay": 0.1}))
    counts = {0.1: 0, 0.0: 0}
    for group in optimizer.param_groups:
        counts[group["weight_decay"]] += sum(p.numel() for p in group["params"])
    return counts[0.1], counts[0.0]


SMALL = GPTConfig(vocab_size=64, context_length=32, emb_dim=16, n_heads=2, n_layers=2, qkv_bias=True, tie_weights=True)
GPT2 = GPTConfig(qkv_bias=True, tie_weights=True)


@pytest.mark.parametrize(
    ("config", "decayed", "not_decayed"), [(GPT2, 124_318_464, 121_344), (SMALL, 7_680, 448)], ids=["GPT-2", "small"]
)
def test_g80_g81_matrices_decay_and_a_tied_one_counts_once(config: GPTConfig, decayed: int, not_decayed: int) -> None:
    model = build_gpt(config, seed=1)
    assert decayed_and_not(model, "matrices") == (decayed, not_decayed)
    assert decayed_and_not(model, "all") == (decayed + not_decayed, 0)
    wrapped = nn.Sequential(model)
    assert decayed_and_not(wrapped, "matrices") == (decayed, not_decayed), "the names do not matter"


def test_g80_one_update_without_gradient() -> None:
    model = build_gpt(SMALL, seed=1)
    optimizer = build_optimizer(model, Optimizer(learning_rate=1e-3, weight_decay=0.1, decay="matrices"))
    for parameter in model.parameters():
        nn.init.ones_(parameter)
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        expected = 0.9999 if parameter.dim() == 2 else 1.0
        assert parameter.eq(torch.tensor(expected)).all(), name


def test_settings_arrive() -> None:
    settings = Optimizer(learning_rate=6e-4, betas=(0.9, 0.95), eps=1e-7, weight_decay=0.3)
    group = build_optimizer(build_gpt(SMALL, seed=1), settings).param_groups[0]
    assert [group[key] for key in ("lr", "betas", "eps", "weight_decay", "fused")] == [
        6e-4,
        (0.9, 0.95),
        1e-7,
        0.3,
        True,
    ]
