"""What steps measured, good and bad."""

import dataclasses
import math

from training.step_records import StepRecord

GOOD = StepRecord(
    step=1,
    loss=2.0,
    loss_min=1.5,
    loss_max=2.5,
    grad_norm=0.5,
    loss_scale=1.0,
    target_tokens=64,
    learning_rate=4e-4,
    input_tokens=64,
)
NAN = dataclasses.replace(GOOD, grad_norm=math.nan)
INFINITE = dataclasses.replace(GOOD, grad_norm=math.inf)
OVERFLOW = dataclasses.replace(INFINITE, loss_scale=65536.0)
NOT_FINITE_AT_LAST = dataclasses.replace(INFINITE, loss_scale=1.0)
WITHOUT_TARGETS = dataclasses.replace(GOOD, loss=None, loss_min=None, loss_max=None, grad_norm=0.0, target_tokens=0)
