"""What isobatch bench measures with: the ceiling, and steps with no process group to exchange gradients with."""

from pathlib import Path

import pytest
import torch
from ranks import on_ranks
from small_configs import small_config

from training.benchmark.bench_command import write_random_tokens
from training.benchmark.bench_process import LocalGradients, Plan, build_bench, product_dtype
from training.config import config_mapping
from training.distributed import Group

CPU = torch.device("cpu")


def test_the_ceiling_is_that_of_the_type_used() -> None:
    """Where there are no instructions for bf16, products are computed in float32."""
    bf16 = small_config(precision={"amp": "bf16"})
    has_bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert product_dtype(bf16, CPU) == (torch.bfloat16 if has_bf16 else torch.float32)
    assert product_dtype(bf16, torch.device("cuda")) == torch.bfloat16
    assert product_dtype(small_config(precision={"amp": "fp16"}), torch.device("cuda")) == torch.float16
    assert product_dtype(small_config(), CPU) == torch.float32


def norms(group: Group, folder: Path) -> list[float]:
    """The gradient's norm of the same step of the same weights, twice with a process group and twice without one."""
    config = small_config(optimizer={"learning_rate": 1e-30, "weight_decay": 0.0})
    bench = build_bench(Plan("run", config_mapping(config), [1, 3], 1, 1, str(folder)), config, group)
    assert [isinstance(trainer.gradients, LocalGradients) for trainer in bench.trainers] == [False, False, True]
    return [float(trainer.step(0).grad_norm) for trainer in bench.trainers[1:] for _ in range(2)]


def test_without_a_process_group_a_step_is_the_same(tmp_path: Path) -> None:
    """On one process. Both add up in the same places, and begin at zero."""
    write_random_tokens(tmp_path, 2048, 2000)
    first, *others = on_ranks(1, norms, tmp_path)[0]
    assert first > 0.1
    assert others == pytest.approx([first] * 3, rel=1e-6)
