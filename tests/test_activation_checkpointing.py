"""--activation-checkpointing: less is kept for the backward, and every loss and gradient has the same bits."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from conftest import Workplace
from torch import Tensor

from model.dropout import dropout_keys
from model.gpt import GPTConfig, build_gpt
from training.loss import SequenceLoss

CONFIG = GPTConfig(vocab_size=50, context_length=16, emb_dim=24, n_heads=3, n_layers=3, dropout=0.3)


def losses_and_gradients(config: GPTConfig, dtype: torch.dtype, recompute: bool) -> tuple[Tensor, Tensor, int]:
    """Of one microbatch; and how many bytes were kept for the backward outside of what is computed again."""
    module = SequenceLoss(build_gpt(config, seed=1))
    module.model.recompute_blocks = recompute
    rows = torch.arange(4 * 17).mul(7).remainder(config.vocab_size).view(4, 17)
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.nbytes)
        return tensor

    autocast = torch.autocast("cpu", dtype, enabled=dtype != torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), autocast:
        weighted, losses = module(rows[:, :-1], rows[:, 1:], dropout_keys(42, 3, range(4), config))
    weighted.backward()
    gradients = torch.cat([parameter.grad.flatten() for parameter in module.parameters() if parameter.grad is not None])
    return losses, gradients, sum(kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_the_same_losses_and_gradients_to_the_last_bit(dropout: float, dtype: torch.dtype) -> None:
    config = replace(CONFIG, dropout=dropout)
    losses, gradients, kept = losses_and_gradients(config, dtype, recompute=False)
    again, gradients_again, kept_then = losses_and_gradients(config, dtype, recompute=True)
    assert torch.equal(again, losses)
    assert torch.equal(gradients_again, gradients)
    assert float(gradients.abs().max()) > 0
    in_one_block = math.prod((4, 16, 4 * 24)) * dtype.itemsize  # what the MLP keeps of a block is more than this
    assert kept - kept_then > 3 * in_one_block


@pytest.mark.parametrize(
    ("reproducibility", "processes"), [("bitwise", 1), pytest.param("rounding", 2, marks=pytest.mark.slow)]
)
def test_the_same_run(workplace: Workplace, reproducibility: str, processes: int) -> None:
    """With dropout, through bitwise mode's sums and through DDP's; it is no part of the config."""
    config = workplace.write_config(model={"dropout": 0.1}, reproducibility=reproducibility)
    train = workplace.train_here if processes == 1 else partial(workplace.train_on_ranks, processes=processes)

    def run(output: str, **options: Any) -> tuple[list[dict[str, Any]], bytes, str]:
        done = train(config, output=output, stop_after=4, **options)
        lines = [
            {key: value for key, value in line.items() if key not in ("seconds", "tokens_per_second")}
            for line in done.of_kind("train") + done.of_kind("validation")
        ]
        return lines, (done.folder / "latest/model.safetensors").read_bytes(), (done.folder / "config.yaml").read_text()

    assert run("again", activation_checkpointing=True) == run("kept")
