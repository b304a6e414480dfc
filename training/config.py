"""The run config: typed, frozen, and checked as a whole before anything else happens.

Order of precedence, later wins: defaults < `base` (itself resolved first) < the file's own keys < the file's
`interventions`, in order < `--set KEY=VALUE`. The defaults are the forerunner's baseline.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields as dataclass_fields
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator, with_config

from model.gpt import GPTConfig
from training.errors import UserError
from training.yaml_reader import BareWord, parse_yaml, read_yaml

REPOSITORY = Path(__file__).resolve().parent.parent
CONFIGS = REPOSITORY / "configs"
INTERVENTIONS = CONFIGS / "interventions.yaml"

STRICT = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
with_config(STRICT)(GPTConfig)

NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]*"
Count = Annotated[int, Field(ge=1)]
CountOrAll = Annotated[int, Field(ge=-1)]  # -1 = all there is
Interval = Annotated[int, Field(ge=0)] | None
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]  # of a moving average


class ConfigError(UserError):
    """One or more problems of a run config, all in one message."""


class Section(BaseModel):
    """A part of the run config: unknown keys and wrong types are errors, values never change."""

    model_config = STRICT


class Data(Section):
    """Which tokens are trained on and validated on. Lengths and starts are in tokens."""

    dataset: Annotated[str, Field(pattern=rf"^{NAME_PATTERN}(/{NAME_PATTERN})?$")]
    revision: str | None = None
    train_tokens: CountOrAll = -1
    train_start: Annotated[int, Field(ge=0)] = 0
    validation_start: Annotated[int, Field(ge=0)] = 0
    validation_tokens: CountOrAll = -1
    epochs: Count = 1
    shuffle: bool = False
    tokenizer: str | None = None

    @model_validator(mode="after")
    def _check(self) -> "Data":
        _no_zero("train_tokens", self.train_tokens)
        _no_zero("validation_tokens", self.validation_tokens)
        return self


class Batch(Section):
    """The global batch: world_size x microbatch x accumulation sequences per step. No default: it is the run."""

    world_size: Count
    microbatch: Count
    accumulation: Count


class Precision(Section):
    """Autocast dtype, and torch's precision of float32 matrix products."""

    amp: Literal["off", "bf16", "fp16"] = "fp16"
    matmul: Literal["highest", "high", "medium"] = "high"


class Optimizer(Section):
    """AdamW. `decay: all` decays every parameter, `matrices` only those with two dimensions."""

    name: Literal["adamw"] = "adamw"
    learning_rate: Annotated[float, Field(gt=0)] = 4e-4
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    decay: Literal["all", "matrices"] = "all"
    clip_norm: Annotated[float, Field(gt=0)] | None = None


class ConstantSchedule(Section):
    """The learning rate stays as it is."""

    name: Literal["constant"] = "constant"


class CosineSchedule(Section):
    """Linear warm-up over a share of all steps, then half a cosine down to a fraction of the peak."""

    name: Literal["cosine"]
    warmup_percent: Annotated[float, Field(ge=0, lt=100)] = 5
    final_fraction: Fraction = 0.1


class Loss(Section):
    """What the gradient of a step is the gradient of; see docs/loss.md. The logged loss is always per token."""

    reduction: Literal["token", "microbatch_mean", "sum"] = "token"


class Seeds(Section):
    """`weights`: the initial weights. `training`: shuffling and dropout."""

    weights: Annotated[int, Field(ge=0, lt=2**63)] = 42
    training: Annotated[int, Field(ge=0, lt=2**63)] = 42


class Evaluation(Section):
    """`every` in steps; 0 = only at the end, null = never. `tokens`: the first N in the loop, all at the end."""

    every: Interval = 617
    tokens: Count | None = None


class Checkpoint(Section):
    """`every` in steps; 0 or null = only at the end and at each new best. `keep`: the newest so many, plus best."""

    every: Interval = 617
    keep: Count = 3


class Hub(Section):
    """Where the result is uploaded."""

    repo: str | None = None
    private: bool = True


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
    hub: Hub = Hub()
    init_from: str | None = None
    reproducibility: Literal["rounding", "bitwise"] = "rounding"
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
        if self.reproducibility == "bitwise":
            problems.append("reproducibility: bitwise is not available in this version; write rounding")
        if self.hub.repo is not None:
            problems.append("hub.repo: uploading is not available in this version; write null")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def global_batch(self) -> int:
        """Sequences per step."""
        return self.batch.world_size * self.batch.microbatch * self.batch.accumulation

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
        return int(total_steps * self.schedule.warmup_percent // 100)


def load_run_config(run: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads and checks the config of a run.

    Args:
        run: a name (configs/RUN.yaml) or the path of a YAML file; its stem is the run's name.
        overrides: `KEY=VALUE` with dotted keys, VALUE as in YAML.

    Raises:
        ConfigError: with every problem found, each with its key and the rule, in one message.
    """
    path = _config_path(run, CONFIGS)
    raw = _resolve(path, [_split_override(override) for override in overrides], seen=())
    previous = raw.get("overrides", [])
    raw["overrides"] = [*(previous if isinstance(previous, list) else []), *overrides]
    return config_from_mapping({"name": path.stem, **raw}, where=_shown(path))


def run_name(run: str) -> str:
    """The name of a run: the stem of its YAML file."""
    return Path(run).stem if _is_path(run) else run


def config_from_mapping(mapping: Mapping[str, Any], where: str) -> RunConfig:
    """Checks a mapping as `config_mapping` makes it.

    Raises:
        ConfigError: naming `where`, with all problems at once.
    """
    remaining = _copy(mapping)
    remaining.pop("resolved", None)
    _read_bare_words(remaining)
    problems: list[str] = []
    dropped: set[str] = set()
    while True:
        try:
            config = RunConfig.model_validate_json(json.dumps(remaining))  # JSON: a list is a tuple
        except ValidationError as error:
            fresh = [item for item in _problems(error) if item[1] not in problems]
            # Checks over several keys run only once each key is valid: leave the bad ones out and look again,
            # without believing what such a check then says about a key that was left out.
            problems += [text for _, text in fresh if not dropped.intersection(re.split(r"[ :;,]+", text))]
            removed = [_drop(remaining, location) for location, _ in fresh]
            dropped.update(filter(None, removed))
            if not any(removed):
                break
        else:
            break
    if problems:
        listing = problems[0] if len(problems) == 1 else "".join(f"\n  - {problem}" for problem in problems)
        raise ConfigError(
            f"{where}: {listing}" if len(problems) == 1 else f"{where} has {len(problems)} problems:{listing}"
        )
    return config


def config_mapping(config: RunConfig) -> dict[str, Any]:
    """The resolved config as plain values, as written to config.yaml; `config_from_mapping` reads it back."""
    mapping = TypeAdapter(RunConfig).dump_python(config, mode="json", exclude={"name"})
    return {"resolved": True, **mapping}


def _is_path(run: str) -> bool:
    return run.endswith((".yaml", ".yml")) or os.sep in run


def _config_path(run: str, folder: Path) -> Path:
    if _is_path(run):
        path = Path(run)
        if not path.is_file():
            raise ConfigError(f"{run}: there is no such file; give a YAML file or the name of a config in configs/")
        return path
    path = folder / f"{run}.yaml"
    if not path.is_file():
        names = sorted(found.stem for found in folder.glob("*.yaml") if found != INTERVENTIONS)
        raise ConfigError(f"{run}: there is no configs/{run}.yaml;{_nearest(run, names) or ' see configs/'}")
    return path


def _resolve(path: Path, overrides: list[tuple[str, Any]], seen: tuple[Path, ...]) -> dict[str, Any]:
    """The values of one file: its base, its own keys, its interventions and the overrides, merged in that order."""
    if path.resolve() in seen:
        raise ConfigError(f"{_shown(path)}: base leads back to this file; a config cannot be its own base")
    own = read_yaml(path)
    if own.get("resolved") is True:  # a run folder's config.yaml: base and interventions are in the values already
        return _merge(own, _nested(overrides))
    for key in ("name", "overrides", "resolved"):
        if key in own:
            raise ConfigError(f"{_shown(path)}: {key}: unknown key; the run's name is that of its file")
    for key, value in overrides:
        if key in ("base", "interventions"):
            own[key] = value
    merged: dict[str, Any] = {}
    base = own.pop("base", None)
    if base is not None:
        if not isinstance(base, str):
            raise ConfigError(f"{_shown(path)}: base: must be the name of another config, got {base!r}")
        beside = path.parent / f"{base}.yaml"
        base_path = beside if beside.is_file() else _config_path(base, CONFIGS)
        merged = _resolve(base_path, [], (*seen, path.resolve()))
    names = own.pop("interventions", None) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{_shown(path)}: interventions: must be a list of names, got {names!r}")
    merged = _merge(merged, own)
    known = read_yaml(INTERVENTIONS) if names else {}
    for name in names:
        if name not in known:
            raise ConfigError(f"{_shown(path)}: interventions: {name} is not one;{_nearest(name, known)}")
        merged = _merge(merged, known[name]["set"])
    merged["interventions"] = list(dict.fromkeys([*merged.get("interventions", []), *names]))
    return _merge(merged, _nested([item for item in overrides if item[0] not in ("base", "interventions")]))


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` over `below`, key by key; a section whose `name` changes (schedule) starts anew."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = value
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            same_name = value.get("name", old.get("name")) == old.get("name")
            merged[key] = _merge(old, value) if same_name else value
    return merged


def _split_override(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {text}: must be KEY=VALUE, as in --set optimizer.learning_rate=1e-3")
    return key.strip(), parse_yaml(value, f"--set {text}")


def _nested(overrides: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in overrides:
        for part in reversed(key.split(".")):
            value = {part: value}
        result = _merge(result, value)
    return result


def _valid_keys() -> dict[str, Any]:
    """Every dotted key of a run config file, with its annotation."""
    keys: dict[str, Any] = {"base": str, "interventions": list}
    for name, field in RunConfig.model_fields.items():
        if name == "model":
            keys |= {f"model.{item.name}": item.type for item in dataclass_fields(GPTConfig)}
        elif name == "schedule":
            keys |= {f"schedule.{key}": item.annotation for key, item in CosineSchedule.model_fields.items()}
        elif isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            keys |= {f"{name}.{key}": item.annotation for key, item in field.annotation.model_fields.items()}
        elif name not in ("name", "overrides"):
            keys[name] = field.annotation
    return keys


def _read_bare_words(raw: dict[str, Any]) -> None:
    """A bare yes, no, on or off is a boolean where one is expected, and text everywhere else."""
    for key, annotation in _valid_keys().items():
        section, _, name = key.partition(".")
        values = raw.get(section) if name else None
        if annotation is bool and isinstance(values, dict) and isinstance(values.get(name), BareWord):
            values[name] = values[name].lower() in ("yes", "on")


def _problems(error: ValidationError) -> list[tuple[tuple[str, ...], str]]:
    """(location, sentence) for each problem that pydantic found."""
    found = []
    for item in error.errors():
        location = tuple(str(part) for part in item["loc"])
        if location[:1] == ("schedule",) and location[1:2] in (("cosine",), ("constant",)):
            location = (location[0], *location[2:])  # pydantic puts the discriminator into the path
        key = ".".join(location)
        if item["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            found.append((location, f"{key}: unknown key;{_nearest_key(location)}"))
        elif item["type"] in ("missing", "missing_argument"):
            found.append((location, f"{key}: is needed"))
        elif item["type"] == "value_error":
            for text in str(item["ctx"]["error"]).split("; "):
                found.append(
                    ((*location, text.partition(":")[0]) if location else (), f"{'.'.join((*location, text))}")
                )
        else:
            found.append(
                (location, f"{key}: {_rule(item['type'], item['msg'], item.get('ctx', {}))}, got {item['input']!r}")
            )
    return found


def _rule(kind: str, message: str, context: dict[str, Any]) -> str:
    """Pydantic's rule in the words of the other messages."""
    sections = ("model_type", "dataclass_type", "model_attributes_type", "union_tag_not_found")
    if kind in sections:
        return "must be a section with keys"
    if kind == "bool_type":
        return "must be true or false"
    if kind == "string_type":
        return "must be text (quote a number that is meant as text)"
    if kind == "string_pattern_mismatch":
        return "must be a name of letters, digits, '.', '_' and '-' that stays in its folder"
    if kind == "union_tag_invalid":
        return f"name must be one of {context.get('expected_tags')}"
    return message.replace("Input should be ", "must be ")


def _nearest_key(location: tuple[str, ...]) -> str:
    """The valid key that was probably meant: in the same section, of that name elsewhere, or alike anywhere."""
    keys = list(_valid_keys())
    leaf = location[-1].replace("-", "_")
    siblings = [key for key in keys if key.split(".")[:-1] == list(location[:-1])]
    for candidates in (siblings, keys):
        leaves = {key.split(".")[-1]: key for key in candidates}
        match = get_close_matches(leaf, leaves, n=1, cutoff=0.75)
        if match:
            return f" did you mean {leaves[match[0]]}?"
    sections = sorted({key.split(".")[0] for key in keys})
    return _nearest(leaf, sections) or f" the keys here are {', '.join(siblings or sections)}"


def _nearest(name: str, names: Any) -> str:
    match = get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f" did you mean {match[0]}?" if match else ""


def _drop(raw: dict[str, Any], location: tuple[str, ...]) -> str:
    """Removes a bad value, so that what is left can be checked; returns its key, or nothing if it is not there."""
    values = raw
    for section in location[:-1]:
        if not isinstance(values.get(section), dict):  # a bad item of a list: the list goes
            return section if values.pop(section, None) is not None else ""
        values = values[section]
    if not location or location[-1] not in values:
        return ""
    del values[location[-1]]
    return ".".join(location)


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _copy(item) for key, item in value.items()}
    return value


def _no_zero(key: str, tokens: int) -> None:
    if tokens == 0:
        raise ValueError(f"{key}: must be positive, or -1 for all there is, got 0")


def _shown(path: Path) -> str:
    """The path as a user would type it: relative to the repository where it lies in it."""
    absolute = path.resolve()
    return str(absolute.relative_to(REPOSITORY)) if absolute.is_relative_to(REPOSITORY) else str(path)
