"""The optimizer, and the learning rate of each step."""

import math

import torch
from torch import nn

from training.config import ConstantSchedule, Optimizer, RunConfig

FIRST_FRACTION = 1e-5
"""Where the warm-up starts, as a share of the peak."""


def build_optimizer(model: nn.Module, config: Optimizer) -> torch.optim.AdamW:
    """Fused AdamW over all parameters of a model.

    Weight decay applies to every parameter (`decay: all`, as the forerunner did) or only to those with two
    dimensions (`decay: matrices`: weights and embeddings, not biases and norms). A tied parameter counts once.
    """
    parameters = list(model.parameters())
    if config.decay == "all":
        groups = [{"params": parameters, "weight_decay": config.weight_decay}]
    else:
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True)


def learning_rate_at(step: int, config: RunConfig, total_steps: int) -> float:
    """The learning rate of an update: a pure function, so there is no state to save.

    Linear warm-up from FIRST_FRACTION of the peak, then half a cosine to `final_fraction` of it, where it stays.

    Args:
        step: number of the update, from 0.
        config: the run's config.
        total_steps: updates of the whole run.
    """
    peak = config.optimizer.learning_rate
    if isinstance(config.schedule, ConstantSchedule):
        return peak
    warmup = config.warmup_steps(total_steps)
    if step < warmup:
        return peak * (FIRST_FRACTION + (1 - FIRST_FRACTION) * step / warmup)
    final = peak * config.schedule.final_fraction
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    return final + (peak - final) * (1 + math.cos(math.pi * progress)) / 2
