"""The run config: typed and frozen. config_file.py reads it, config_check.py finds what is wrong with it.

The defaults are the forerunner's baseline.
"""

import re
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator, with_config

from model.gpt import GPTConfig

REPOSITORY = Path(__file__).resolve().parent.parent
STRICT = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
with_config(STRICT)(GPTConfig)

NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]*"
LICENCE_PATTERN = r"[a-z0-9][a-z0-9.+-]*"
REPOSITORY_PART = r"(?!.*(--|\.\.))[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?"
Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Interval = Annotated[int, Field(ge=0)] | None
Share = Annotated[float, Field(ge=0, le=1)]
Amp = Literal["off", "bf16", "fp16"]
Decay = Annotated[float, Field(ge=0, lt=1)]  # of a moving average


class Section(BaseModel):
    """A part of the run config: unknown keys and wrong types are errors, values never change."""

    model_config = STRICT


class Data(Section):
    """Which tokens are trained on and validated on. Lengths and starts are in tokens."""

    dataset: Annotated[str, Field(pattern=rf"^{NAME_PATTERN}(/{NAME_PATTERN})?$")]
    revision: Text | None = None
    train_tokens: int = -1
    train_start: Annotated[int, Field(ge=0)] = 0
    validation_start: Annotated[int, Field(ge=0)] = 0
    validation_tokens: int = -1
    epochs: Count = 1
    shuffle: bool = False
    tokenizer: Text | None = None

    @model_validator(mode="after")
    def _check(self) -> "Data":
        lengths = {"train_tokens": self.train_tokens, "validation_tokens": self.validation_tokens}
        problems = [
            f"{key}: must be positive, or -1 for all there is, got {tokens}"
            for key, tokens in lengths.items()
            if tokens < 1 and tokens != -1
        ]
        if problems:
            raise ValueError("; ".join(problems))
        return self


class Batch(Section):
    """The global batch: world_size x microbatch x accumulation sequences per step. No default: it is the run."""

    world_size: Count
    microbatch: Count
    accumulation: Count


class Precision(Section):
    """Autocast dtype, torch's precision of float32 matrix products, and what processes exchange gradients in."""

    amp: Amp = "fp16"
    matmul: Literal["highest", "high", "medium"] = "high"
    gradients: Literal["float32", "bf16"] = "float32"


class Optimizer(Section):
    """AdamW. `decay: all` decays every parameter, `matrices` only those with two dimensions."""

    name: Literal["adamw"] = "adamw"
    learning_rate: Annotated[float, Field(gt=0)] = 4e-4
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: Annotated[float, Field(ge=1e-38)] = 1e-8  # a smaller one is zero in float32
    decay: Literal["all", "matrices"] = "all"
    clip_norm: Annotated[float, Field(gt=0)] | None = None


class ConstantSchedule(Section):
    """The learning rate stays as it is."""

    name: Literal["constant"] = "constant"


class CosineSchedule(Section):
    """Linear warm-up over a share of all steps, then half a cosine down to a fraction of the peak."""

    name: Literal["cosine"]
    warmup_percent: Annotated[float, Field(ge=0, lt=100)] = 5
    final_fraction: Share = 0.1


class Loss(Section):
    """What the gradient of a step is the gradient of; see docs/loss.md. The logged loss is always per token."""

    reduction: Literal["token", "microbatch_mean", "sum"] = "token"


class Seeds(Section):
    """`weights`: the initial weights. `training`: shuffling and dropout."""

    weights: Seed = 42
    training: Seed = 42


class Evaluation(Section):
    """`every` in steps; 0 = only at the end, null = never. `tokens`: the first N in the loop, all at the end."""

    every: Interval = 617
    tokens: Count | None = None


class Checkpoint(Section):
    """`every` in steps; 0 or null = only at the end and at each new best. `keep`: the newest so many, plus best."""

    every: Interval = 617
    keep: Count = 3


class Tracking(Section):
    """Who else is shown a run's curves while it trains, under which project; `space`: a Space on the Hub for trackio's.

    Nothing is sent anywhere without `wandb` or a `space`.
    """

    trackers: tuple[Literal["tensorboard", "trackio", "wandb"], ...] = ()
    project: Annotated[str, Field(pattern=rf"^{NAME_PATTERN}$")] = "isobatch"
    space: Text | None = None

    @model_validator(mode="after")
    def _check(self) -> "Tracking":
        problems = []
        if len(set(self.trackers)) < len(self.trackers):
            problems.append(f"trackers: must name each once, got {', '.join(self.trackers)}")
        if self.space is not None and (problem := repository_problem(self.space)):
            problems.append(f"space: {problem}")
        elif self.space is not None and "trackio" not in self.trackers:
            problems.append("space: must be null without trackio among the trackers")
        if problems:
            raise ValueError("; ".join(problems))
        return self


class Hub(Section):
    """Where the result is uploaded at the end, and every so many steps (0 or null: never) the state to go on from."""

    repo: Text | None = None
    private: bool = True
    licence: Annotated[str, Field(pattern=f"^{LICENCE_PATTERN}$")] | None = None
    every: Interval = None

    @model_validator(mode="after")
    def _check(self) -> "Hub":
        problems = []
        if self.repo is not None and (problem := repository_problem(self.repo)):
            problems.append(f"repo: {problem}")
        if self.repo is None and self.every:
            problems.append("every: must be null without a repo to upload to")
        if problems:
            raise ValueError("; ".join(problems))
        return self


def repository_problem(name: str) -> str | None:
    """Why a name cannot be that of a repository on the Hub; None if it can. The rules are those of the Hub's client."""
    if (
        re.fullmatch(f"{REPOSITORY_PART}/{REPOSITORY_PART}", name)
        and len(name) <= 96
        and not name.endswith(".git")
        and name.partition("/")[0] not in ("datasets", "models", "spaces")
    ):
        return None
    return (
        "must be owner/name, as a repository on the Hub is called (letters, digits, '_', '-' and '.', no '--', '..' or "
        f"'.git', 96 characters at most), got {name[:100]!r}"
    )


class RunConfig(Section):
    """One run: everything that fixes what is computed. `name`, `interventions` and `overrides` are the record."""

    name: Annotated[str, Field(pattern=rf"^{NAME_PATTERN}$")]
    model: GPTConfig = GPTConfig()
    data: Data
    batch: Batch
    precision: Precision = Precision()
    optimizer: Optimizer = Optimizer()
    schedule: Annotated[ConstantSchedule | CosineSchedule, Field(discriminator="name")] = ConstantSchedule()
    loss: Loss = Loss()
    seeds: Seeds = Seeds()
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    tracking: Tracking = Tracking()
    hub: Hub = Hub()
    init_from: Text | None = None
    reproducibility: Literal["rounding", "bitwise"] = "rounding"
    """How closely other layouts agree: up to the rounding of sums, or to the last bit; see docs/layouts.md."""
    interventions: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> "RunConfig":
        context = self.model.context_length
        problems = []
        for key, tokens in (
            ("evaluation.tokens", self.evaluation.tokens),
            ("data.validation_tokens", self.data.validation_tokens),
        ):
            if self.evaluation.every is not None and tokens is not None and 0 < tokens < context:
                problems.append(f"{key}: must hold a sequence of model.context_length {context}, got {tokens}")
        if self.bitwise and self.precision.gradients == "bf16":
            problems.append("precision.gradients: must be float32 in bitwise mode, whose exchange is of integers")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def global_batch(self) -> int:
        """Sequences per step."""
        return self.batch.world_size * self.batch.microbatch * self.batch.accumulation

    @property
    def bitwise(self) -> bool:
        """Whether other layouts must agree to the last bit."""
        return self.reproducibility == "bitwise"

    @property
    def tokens_per_step(self) -> int:
        """Input tokens of a step."""
        return self.global_batch * self.model.context_length

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run; None while it depends on the length of the data (`train_tokens: -1`)."""
        if self.data.train_tokens == -1:
            return None
        return self.data.epochs * -(-self.data.train_tokens // self.tokens_per_step)

    def warmup_steps(self, total_steps: int) -> int:
        """Steps of linear warm-up: `total_steps` x `warmup_percent` // 100."""
        if isinstance(self.schedule, ConstantSchedule):
            return 0
        percent = Fraction(str(self.schedule.warmup_percent))  # 0.57 % of 10,000 is 57, but 56.99... in floats
        return int(total_steps * percent // 100)


def config_mapping(config: RunConfig) -> dict[str, Any]:
    """The resolved config as plain values, as written to config.yaml; `config_from_mapping` reads it back."""
    return {"resolved": True, **config.model_dump(mode="json", exclude={"name"})}
