"""The shipped configs: each loads, is the run that its table row and its head comment say."""

import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from model.gpt import parameter_count
from training.config import RunConfig, config_mapping
from training.config_file import load_run_config

REPOSITORY = Path(__file__).resolve().parent.parent
INTERVENTIONS = REPOSITORY / "configs" / "interventions.yaml"
# Those in git: a user's own lie in the same folder.
SHIPPED = subprocess.run(
    ["git", "ls-files", "configs/*.yaml"], cwd=REPOSITORY, capture_output=True, text=True, check=True
).stdout.split()
NAMES = sorted(
    path.stem for path in map(Path, SHIPPED) if path.parent.name == "configs" and path.name != INTERVENTIONS.name
)
BASELINE = "8xa100m40-baseline"

CLIPPING = {"optimizer.clip_norm": 3.5}
NO_DROPOUT = {"model.dropout": 0.0}
QKV_BIAS = {"model.qkv_bias": True}
LOW_DECAY = {"optimizer.weight_decay": 0.01}
COSINE = {
    "optimizer.learning_rate": 0.0014,
    "schedule.name": "cosine",
    "schedule.warmup_percent": 5,
    "schedule.final_fraction": 0.1,
}
STACK_1 = CLIPPING | LOW_DECAY | NO_DROPOUT | COSINE
STACK_1_NAMES = ("gradient-clipping", "weight-decay-gpt2", "no-dropout", "schedule-learning-rate")
ACCUMULATED = {"batch.world_size": 1, "batch.microbatch": 6, "batch.accumulation": 16}


@dataclass(frozen=True)
class Run:
    """A run of the forerunner. `changes`: every resolved value that is not that of 8xa100m40-baseline."""

    changes: Mapping[str, Any] = field(default_factory=dict)
    interventions: tuple[str, ...] = ()
    test_loss: str | None = None
    tokens_per_step: int = 98_304
    steps: int = 33_165
    tokens_seen: int = 3_260_252_160
    parameters: int = 163_009_536
    warmup_steps: int = 0


def _seeds(weights: int, training: int, test_loss: str) -> Run:
    """A baseline with other seeds; a seed of 42 is the baseline's own."""
    changes = {"seeds.weights": weights, "seeds.training": training}
    return Run({key: seed for key, seed in changes.items() if seed != 42}, test_loss=test_loss)


def _batch(microbatch: int, tokens_per_step: int, steps: int, tokens_seen: int, test_loss: str) -> Run:
    """A baseline with another microbatch on eight processes."""
    return Run(
        {"batch.microbatch": microbatch},
        test_loss=test_loss,
        tokens_per_step=tokens_per_step,
        steps=steps,
        tokens_seen=tokens_seen,
    )


RUNS = {
    BASELINE: Run(test_loss="3.691526"),
    "8xa100m40-baseline-3": _seeds(22, 22, "3.673453"),
    "8xa100m40-baseline-4": _seeds(67, 67, "3.653593"),
    "8xa100m40-baseline-5": _seeds(42, 23, "3.681356"),
    "8xa100m40-baseline-6": _seeds(42, 67, "3.680505"),
    "8xa100m40-baseline-7": _seeds(23, 23, "3.673943"),
    "8xa100m40-baseline-8": _seeds(67, 23, "3.664345"),
    "8xa100m40": _batch(13, 106_496, 30_614, 3_260_268_544, "3.673623"),
    "8xh100m80": _batch(27, 221_184, 14_740, 3_260_252_160, "3.724507"),
    "8xa100m80": _batch(28, 229_376, 14_214, 3_260_350_464, "3.729900"),
    "8xb200m160": _batch(64, 524_288, 6_219, 3_260_547_072, "3.771478"),
    "8xa100m40-gradient-clipping": Run(CLIPPING, ("gradient-clipping",), "3.678317"),
    "8xa100m40-qkv-bias": Run(QKV_BIAS, ("qkv-bias",), "3.669385", parameters=163_037_184),
    "8xa100m40-weight-decay-gpt2": Run(LOW_DECAY, ("weight-decay-gpt2",), "3.642940"),
    "8xa100m40-weight-decay-cerebras": Run({"optimizer.weight_decay": 0.33724}, ("weight-decay-cerebras",), "3.814"),
    "8xa100m40-remove-dropout": Run(NO_DROPOUT, ("no-dropout",), "3.641282"),
    "8xa100m40-schedule-learning-rate": Run(COSINE, ("schedule-learning-rate",), "3.601917", warmup_steps=1_658),
    "8xa100m40-weight-tying": Run({"model.tie_weights": True}, ("weight-tying",), "3.874", parameters=124_412_160),
    "8xa100m80-no-amp": Run({"precision.amp": "off", "precision.matmul": "highest"}, ("no-amp",), "3.679"),
    "8xa100m40-stacked-interventions-1": Run(STACK_1, STACK_1_NAMES, "3.577761", warmup_steps=1_658),
    "8xa100m40-stacked-interventions-2": Run(
        STACK_1 | QKV_BIAS,
        (*STACK_1_NAMES, "qkv-bias"),
        "3.604342",
        parameters=163_037_184,
        warmup_steps=1_658,
    ),
    "8xa100m40-stacked-interventions-3": Run(
        CLIPPING | NO_DROPOUT | COSINE | QKV_BIAS,
        ("gradient-clipping", "no-dropout", "schedule-learning-rate", "qkv-bias"),
        "3.590266",
        parameters=163_037_184,
        warmup_steps=1_658,
    ),
    "original": Run(
        {
            "batch.world_size": 1,
            "batch.microbatch": 6,
            "evaluation.every": 5_922,
            "checkpoint.every": 5_922,
        },
        test_loss="3.943522",
        tokens_per_step=6_144,
        steps=530_630,
        tokens_seen=3_260_190_720,
    ),
    "1xrtx3090-baseline": Run(ACCUMULATED, test_loss="3.683835"),
    "1xrtx3090-stacked-interventions": Run(ACCUMULATED | STACK_1, STACK_1_NAMES, "3.538161", warmup_steps=1_658),
    "1xrtx3090-context-extension": Run(
        STACK_1
        | {"batch.world_size": 1, "batch.microbatch": 1, "batch.accumulation": 96}
        | {"model.context_length": 3_072, "data.train_tokens": 3_291_648_000},
        STACK_1_NAMES,
        tokens_per_step=294_912,
        steps=11_162,
        tokens_seen=3_291_807_744,
        parameters=164_582_400,
        warmup_steps=558,
    ),
    "1xgtx1660-stacked-interventions": Run(
        STACK_1
        | {"batch.world_size": 1, "batch.microbatch": 4, "batch.accumulation": 16}
        | {"model.context_length": 512, "model.emb_dim": 512, "model.n_heads": 8, "model.n_layers": 8}
        | {"data.train_tokens": 1_538_662_400, "evaluation.every": 360, "checkpoint.every": 360},
        STACK_1_NAMES,
        tokens_per_step=32_768,
        steps=46_957,
        tokens_seen=1_538_686_976,
        parameters=76_933_120,
        warmup_steps=2_347,
    ),
    "test": Run(
        ACCUMULATED
        | CLIPPING
        | COSINE
        | {"data.train_tokens": 326_010, "data.validation_tokens": 12_288}
        | {"evaluation.every": 10, "checkpoint.every": 10},
        ("gradient-clipping", "schedule-learning-rate"),
        steps=4,
        tokens_seen=393_216,
    ),
}

COMMAND = re.compile(r"torchrun --standalone --nproc_per_node=(\d+) ddp_train\.py (\S+) datasets/")
FIGURES = re.compile(
    r"([\d,]+) tokens per step, ([\d,]+) steps(?: \(([\d,]+) of warm-up\))?, "
    r"([\d,]+) tokens seen, ([\d,]+) parameters\."
)
RESULT = re.compile(r"Known result: (?:none\.|test loss (\d\.\d{6})[,.])")
DIFFERENCE = re.compile(r"(0\.\d{6}) (below|above) ([\w-]+)")
SPEED = re.compile(r"([\d,]+) s, ([\d,]+) tokens/s")


@cache
def _load(name: str) -> RunConfig:
    return load_run_config(name)


def _head(name: str) -> str:
    """The comment at the top of a config, as one line."""
    lines = (REPOSITORY / "configs" / f"{name}.yaml").read_text().splitlines()
    length = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    return " ".join(line.removeprefix("#").strip() for line in lines[:length])


def _match(pattern: re.Pattern[str], name: str) -> re.Match[str]:
    found = pattern.search(_head(name))
    assert found is not None, f"configs/{name}.yaml: no «{pattern.pattern}» in the head comment"
    return found


def _known_loss(name: str) -> float | None:
    loss: str | None = _match(RESULT, name)[1]
    return None if loss is None else float(loss)


def _number(text: str | None) -> int:
    return int((text or "0").replace(",", ""))


def _flat(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys and values."""
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def _values(config: RunConfig) -> dict[str, Any]:
    """What is computed: the resolved values without the record of how they came about."""
    flat = _flat(config_mapping(config))
    return {key: value for key, value in flat.items() if key not in ("interventions", "overrides")}


def _total_steps(config: RunConfig) -> int:
    assert config.total_steps is not None, "every run of the forerunner has a known length"
    return config.total_steps


@pytest.mark.parametrize("name", NAMES)
def test_every_shipped_config_loads(name: str) -> None:
    assert _load(name).name == name


def test_every_run_of_the_forerunner_is_shipped() -> None:
    assert set(RUNS) <= set(NAMES)


def test_the_baseline_spells_out_the_published_settings() -> None:
    spelled_out = _flat(yaml.safe_load((REPOSITORY / "configs" / f"{BASELINE}.yaml").read_text()))
    resolved = _values(_load(BASELINE))
    resolved.pop("resolved")
    assert spelled_out.keys() == resolved.keys()
    assert resolved == {
        "model.vocab_size": 50_257,
        "model.context_length": 1_024,
        "model.emb_dim": 768,
        "model.n_heads": 12,
        "model.n_layers": 12,
        "model.dropout": 0.1,
        "model.qkv_bias": False,
        "model.tie_weights": False,
        "model.init": "pytorch",
        "data.dataset": "gpjt/fineweb-gpt2-tokens",
        "data.revision": None,
        "data.train_tokens": 3_260_190_720,
        "data.train_start": 0,
        "data.validation_start": 50_000_000,
        "data.validation_tokens": 3_200 * 6 * 1_024,
        "data.epochs": 1,
        "data.shuffle": False,
        "data.tokenizer": None,
        "batch.world_size": 8,
        "batch.microbatch": 12,
        "batch.accumulation": 1,
        "precision.amp": "fp16",
        "precision.matmul": "high",
        "precision.gradients": "float32",
        "optimizer.name": "adamw",
        "optimizer.learning_rate": 4e-4,
        "optimizer.weight_decay": 0.1,
        "optimizer.betas": [0.9, 0.999],
        "optimizer.eps": 1e-8,
        "optimizer.decay": "all",
        "optimizer.clip_norm": None,
        "schedule.name": "constant",
        "loss.reduction": "token",
        "seeds.weights": 42,
        "seeds.training": 42,
        "evaluation.every": 617,
        "evaluation.tokens": None,
        "checkpoint.every": 617,
        "checkpoint.keep": 3,
        "tracking.trackers": [],
        "tracking.project": "isobatch",
        "tracking.space": None,
        "hub.repo": None,
        "hub.private": True,
        "hub.licence": None,
        "hub.every": None,
        "init_from": None,
        "reproducibility": "rounding",
    }


@pytest.mark.parametrize("name", RUNS)
def test_a_run_differs_from_the_baseline_in_what_was_published_and_nothing_else(name: str) -> None:
    config = _load(name)
    baseline = _values(_load(BASELINE))
    changes = {key: value for key, value in _values(config).items() if baseline.get(key, "absent") != value}
    assert changes == dict(RUNS[name].changes)
    assert config.interventions == RUNS[name].interventions


@pytest.mark.parametrize("name", RUNS)
def test_a_run_has_the_published_steps_and_tokens(name: str) -> None:
    config, expected = _load(name), RUNS[name]
    steps = _total_steps(config)
    assert config.tokens_per_step == expected.tokens_per_step
    assert steps == expected.steps
    assert steps * config.tokens_per_step == expected.tokens_seen
    assert config.warmup_steps(steps) == expected.warmup_steps
    assert parameter_count(config.model) == expected.parameters


@pytest.mark.parametrize("name", RUNS)
def test_the_head_comment_says_what_the_config_is(name: str) -> None:
    config = _load(name)
    steps = _total_steps(config)
    command = _match(COMMAND, name)
    assert command.start() == 0
    assert (int(command[1]), command[2]) == (config.batch.world_size, name)
    assert [_number(figure) for figure in _match(FIGURES, name).groups()] == [
        config.tokens_per_step,
        steps,
        config.warmup_steps(steps),
        steps * config.tokens_per_step,
        parameter_count(config.model),
    ]
    for seconds, tokens_per_second in SPEED.findall(_head(name)):
        speed = steps * config.tokens_per_step / _number(seconds)
        assert speed == pytest.approx(_number(tokens_per_second), rel=1e-4)


@pytest.mark.parametrize("name", RUNS)
def test_the_head_comment_gives_the_published_result(name: str) -> None:
    loss, published = _known_loss(name), RUNS[name].test_loss
    if loss is None or published is None:
        assert (loss, published) == (None, None)
        return
    decimals = len(published.partition(".")[2])
    assert f"{loss:.{decimals}f}" == published
    for size, direction, other in DIFFERENCE.findall(_head(name)):
        other_loss = _known_loss(other)
        assert other_loss is not None
        signed = float(size) if direction == "above" else -float(size)
        assert signed == pytest.approx(loss - other_loss, abs=5e-7)


def _interventions() -> dict[str, dict[str, Any]]:
    return dict(yaml.safe_load(INTERVENTIONS.read_text()))


def test_every_intervention_of_the_forerunner_is_used_by_its_configs() -> None:
    tried = {name for name, intervention in _interventions().items() if "result" in intervention}
    assert {name for run in RUNS.values() for name in run.interventions} == tried


def test_every_intervention_that_may_help_the_loss_is_in_a_study() -> None:
    files = [yaml.safe_load(path.read_text()) for path in (REPOSITORY / "configs" / "studies").glob("*.yaml")]
    tried = {name for file in files for name in file.get("interventions", ())}
    assert tried == set(_interventions()) - {"gradients-bf16"}, "which is for machines that wait for the exchange"


@pytest.mark.parametrize("name", _interventions())
def test_every_intervention_is_described_with_the_result_of_its_own_run_if_it_has_one(name: str) -> None:
    intervention = _interventions()[name]
    assert intervention.keys() - {"result"} == {"description", "set"}
    assert re.fullmatch(r"[A-Z][^\n]+\.", intervention["description"])
    if "result" not in intervention:  # the forerunner never tried it
        return
    result = intervention["result"]
    run = RUNS[result["run"]]
    assert run.interventions == (name,)
    assert run.changes == _flat(intervention["set"])
    assert result["test_loss"] == _known_loss(result["run"])
    assert result["difference"] == pytest.approx(result["test_loss"] - 3.691526, abs=5e-7)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1xrtx3090-stacked-interventions", "1xgtx1660-stacked-interventions"])
def test_a_dry_run_prints_the_figures_without_a_dataset(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "ddp_train.py"), name, str(tmp_path), "--dry-run"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    printed = done.stdout + done.stderr
    run = RUNS[name]
    for figure in (run.tokens_per_step, run.steps, run.tokens_seen, run.parameters, run.warmup_steps):
        assert f"{figure:,}" in printed
