"""Whole runs through the real command line, in real processes."""

from typing import Any

import pytest
from conftest import Workplace
from safetensors.torch import load_file

GOLDEN_DATA = {"train_tokens": 20_480}
GOLDEN = {
    "S1": {
        "sections": {
            "data": GOLDEN_DATA,
            "batch": {"world_size": 1, "microbatch": 4, "accumulation": 4},
            "optimizer": {"learning_rate": 1.4e-3, "weight_decay": 0.01, "clip_norm": 0.5},
            "schedule": {"name": "cosine", "warmup_percent": 5, "final_fraction": 0.1},
        },
        "curve": {
            1: (5.7016244, 0.4703354),
            2: (5.7489058, 0.4484049),
            3: (5.6813740, 0.4596668),
            5: (5.6353805, 0.4579223),
            10: (5.3482007, 0.6245800),
            20: (4.7724754, 0.6319856),
            30: (4.5867405, 0.5491394),
            40: (4.5175242, 0.4910928),
        },
        "sums": (9877.25830, 887.57172),
    },
    "S2": {
        "sections": {
            "data": GOLDEN_DATA,
            "batch": {"world_size": 2, "microbatch": 4, "accumulation": 2},
            "optimizer": {"learning_rate": 4e-4, "weight_decay": 0.1},
        },
        "curve": {
            1: (5.7016244, 0.4703354),
            2: (5.7379602, 0.4474847),
            3: (5.6780030, 0.4599937),
            5: (5.6840163, 0.4424283),
            10: (5.6086031, 0.4873496),
            20: (5.4426850, 0.6070203),
            30: (5.1778367, 0.6753870),
            40: (4.9183887, 0.6392447),
        },
        "sums": (9866.43702, 880.26822),
    },
}


@pytest.mark.parametrize(
    ("curve", "processes", "options"),
    [
        ("S1", 1, []),
        ("S2", 1, []),
        pytest.param("S2", 2, [], marks=pytest.mark.slow),
        pytest.param("S2", 4, [], marks=pytest.mark.slow),
        pytest.param("S2", 3, ["--microbatch", "3"], marks=pytest.mark.slow),
    ],
)
def test_golden_curve(workplace: Workplace, curve: str, processes: int, options: list[str]) -> None:
    """The forerunner's own training code gave these losses and gradient norms; S2 on two processes."""
    golden: dict[str, Any] = GOLDEN[curve]
    config = workplace.write_config(evaluation={"every": None}, checkpoint={"every": None}, **golden["sections"])
    run = workplace.train(config, *options, processes=processes)
    assert run.status == 0, run.errors
    steps = {line["step"]: line for line in run.of_kind("train")}
    assert len(steps) == 40
    for step, (loss, norm) in golden["curve"].items():
        assert steps[step]["loss"] == pytest.approx(loss, rel=2e-5)
        assert steps[step]["grad_norm"] == pytest.approx(norm, rel=2e-5)
    weights = load_file(run.folder / "latest" / "model.safetensors")
    sums = [weights[name].double().abs().sum().item() for name in ("token_embedding.weight", "head.weight")]
    assert sums == pytest.approx(golden["sums"], rel=1e-6)
