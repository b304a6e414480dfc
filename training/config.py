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
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator, with_config

from model.gpt import GPTConfig
from training.errors import UserError
from training.yaml_reader import BareWord, parse_yaml, read_yaml

REPOSITORY = Path(__file__).resolve().parent.parent
CONFIGS = REPOSITORY / "configs"
INTERVENTIONS = CONFIGS / "interventions.yaml"

RECORD = ("name", "overrides", "resolved")
"""Keys that the tool writes into a run's config.yaml; no config that a person writes has them."""
STAND_INS: dict[str, Any] = {
    "name": "x",
    "data": {"dataset": "x"},
    "batch": {"world_size": 1, "microbatch": 1, "accumulation": 1},
    "schedule": {"name": "cosine"},
}
"""What stands for a missing or bad value that has no default, while the other values are checked."""

STRICT = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
with_config(STRICT)(GPTConfig)

NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]*"
COMMIT_PATTERN = r"^[0-9a-f]{40}$"
Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]
Interval = Annotated[int, Field(ge=0)] | None
Share = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]  # of a moving average


class ConfigError(UserError):
    """One or more problems of a run config, all in one message."""


class Section(BaseModel):
    """A part of the run config: unknown keys and wrong types are errors, values never change."""

    model_config = STRICT


class Data(Section):
    """Which tokens are trained on and validated on. Lengths and starts are in tokens."""

    dataset: Annotated[str, Field(pattern=rf"^{NAME_PATTERN}(/{NAME_PATTERN})?$")]
    revision: Annotated[str, Field(pattern=COMMIT_PATTERN)] | None = None
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
    """Autocast dtype, and torch's precision of float32 matrix products."""

    amp: Literal["off", "bf16", "fp16"] = "fp16"
    matmul: Literal["highest", "high", "medium"] = "high"


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

    repo: Text | None = None
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
    init_from: Text | None = None
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
            problems.append("reproducibility: bitwise is not available in this version, write rounding")
        if self.hub.repo is not None:
            problems.append("hub.repo: uploading is not available in this version, write null")
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
        percent = Fraction(str(self.schedule.warmup_percent))  # 0.57 % of 10,000 is 57, but 56.99... in floats
        return int(total_steps * percent // 100)


def load_run_config(run: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads and checks the config of a run.

    Args:
        run: a name (configs/RUN.yaml) or the path of a YAML file; its stem is the run's name.
        overrides: `KEY=VALUE` with dotted keys, VALUE as in YAML.

    Raises:
        ConfigError: with every problem found, each with its key and the rule, in one message.
    """
    path = _config_path(run)
    problems: list[str] = []
    raw = _resolve(path, [_split_override(override) for override in overrides], (), problems)
    return config_from_mapping({**raw, "name": path.stem, "overrides": [*overrides]}, _shown(path), problems)


def run_name(run: str) -> str:
    """The name of a run: the stem of its YAML file."""
    return Path(run).stem if _is_path(run) else run


def config_from_mapping(mapping: Mapping[str, Any], where: str, known_problems: Sequence[str] = ()) -> RunConfig:
    """Checks a mapping as `config_mapping` makes it.

    Raises:
        ConfigError: naming `where`, with all problems at once, the known ones first.
    """
    remaining = _copy(mapping)
    remaining.pop("resolved", None)
    _read_bare_words(remaining)
    problems = list(known_problems)
    mended: set[str] = set()
    while True:
        try:
            config = RunConfig.model_validate_json(json.dumps(remaining))  # JSON: a list is a tuple
            break
        except ValidationError as error:
            # Checks over several keys run only once each key is valid: replace the bad ones and look again,
            # without believing what such a check then says about a key that was replaced.
            fresh = [item for item in _problems(error, mended) if item[1] not in problems]
            problems += [text for _, text in fresh if text]
            newly_mended = {_mend(remaining, location) for location, _ in fresh} - {""}
            mended |= newly_mended
            if not newly_mended:
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


def _config_path(run: str, key: str = "") -> Path:
    if _is_path(run):
        path = Path(run)
        if not path.is_file():
            raise ConfigError(
                f"{key}{run}: there is no such file; give a YAML file or the name of a config in configs/"
            )
        return path
    path = CONFIGS / f"{run}.yaml"
    if not path.is_file():
        names = sorted(found.stem for found in CONFIGS.glob("*.yaml") if found != INTERVENTIONS)
        raise ConfigError(f"{key}{run}: there is no configs/{run}.yaml;{_nearest(run, names) or ' see configs/'}")
    return path


def _resolve(
    path: Path, overrides: list[tuple[str, Any]], seen: tuple[Path, ...], problems: list[str]
) -> dict[str, Any]:
    """The values of one file: its base, its own keys, its interventions and the overrides, merged in that order."""
    if path.resolve() in seen:
        raise ConfigError(f"{_shown(path)}: base leads back to this file; a config cannot be its own base")
    own = read_yaml(path)
    where = f"{_shown(path)}: " if seen else ""
    is_record = own.get("resolved") is True  # a run's config.yaml: base and interventions are in the values already
    for key in RECORD:
        if key in own and (key == "name" or not is_record):
            problems.append(f"{where}{key}: unknown key; the run's name is that of its file")
        own.pop(key, None)
    choices = {key: value for key, value in overrides if key in ("base", "interventions")}
    values = _nested([item for item in overrides if item[0] not in choices])
    if is_record:
        if choices:
            raise ConfigError(
                f"--set {min(choices)}: {_shown(path)} is the record of a run, with base and interventions in its "
                "values; start from the config that the run was started from"
            )
        return _merge(own, values)
    own |= choices
    merged: dict[str, Any] = {}
    base, names = own.pop("base", None), own.pop("interventions", None)
    if base is not None:
        merged = _resolve(_base_path(base, path), [], (*seen, path.resolve()), problems)
    merged = _merge(merged, own)
    for name, changes in _interventions(names, where, problems):
        merged = _merge(merged, changes)
        merged["interventions"] = list(dict.fromkeys([*merged.get("interventions", []), name]))
    return _merge(merged, values)


def _base_path(base: Any, path: Path) -> Path:
    """The file that the base of the config at `path` is in: beside it, or in configs/."""
    if not isinstance(base, str):
        raise ConfigError(f"{_shown(path)}: base: must be the name of another config, got {_written(base)}")
    beside = path.parent / (base if base.endswith((".yaml", ".yml")) else f"{base}.yaml")
    return beside if beside.is_file() else _config_path(base, f"{_shown(path)}: base: ")


def _interventions(names: Any, where: str, problems: list[str]) -> list[tuple[str, dict[str, Any]]]:
    """Names of interventions and what each sets, in order; those that do not exist are problems."""
    if names is None:
        return []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        problems.append(f"{where}interventions: must be a list of names, got {_written(names)}")
        return []
    known = read_yaml(INTERVENTIONS)
    for name in [name for name in names if name not in known]:
        remedy = _nearest(name, known) or f" there are {', '.join(known)}"
        problems.append(f"{where}interventions: {name} is not one;{remedy}")
    found = [(name, known[name]) for name in names if name in known]
    for name, intervention in found:
        if not isinstance(intervention, dict) or not isinstance(intervention.get("set"), dict):
            raise ConfigError(f"{_shown(INTERVENTIONS)}: {name}: must have a section `set` with what it changes")
    return [(name, intervention["set"]) for name, intervention in found]


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` over `below`, key by key; a section whose `name` changes (schedule) starts anew."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = value
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            renamed = "name" in old and value.get("name", old["name"]) != old["name"]
            merged[key] = value if renamed else _merge(old, value)
    return merged


def _split_override(text: str) -> tuple[str, Any]:
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not all(key.split(".")):
        raise ConfigError(f"--set {text}: must be KEY=VALUE, as in --set optimizer.learning_rate=1e-3")
    if key in RECORD:
        raise ConfigError(f"--set {text}: {key}: unknown key; the run's name is that of its file")
    return key, parse_yaml(value, f"--set {text}")


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


def _problems(error: ValidationError, mended: set[str]) -> list[tuple[tuple[str, ...], str]]:
    """(location, sentence) for each problem that pydantic found; no sentence if it may come from a mended key."""
    found = []
    for item in error.errors():
        location = tuple(str(part) for part in item["loc"])
        if location[:1] == ("schedule",) and location[1:2] in (("cosine",), ("constant",)):
            location = (location[0], *location[2:])  # pydantic puts the discriminator into the path
        kind, value = item["type"], item["input"]
        if kind in ("union_tag_not_found", "union_tag_invalid"):
            location, value = (*location, "name"), value.get("name")
        key = ".".join(location)
        if kind in ("extra_forbidden", "unexpected_keyword_argument"):
            found.append((location, f"{key}: unknown key;{_nearest_key(location)}"))
        elif kind in ("missing", "missing_argument", "union_tag_not_found"):
            found.append((location, f"{key}: is needed"))
        elif kind == "value_error":
            for text in str(item["ctx"]["error"]).split("; "):
                sentence = ".".join((*location, text))
                place = (*location, *text.partition(":")[0].split("."))
                found.append((place, "" if _is_about(sentence, mended) else sentence))
        else:
            rule = _rule(kind, item["msg"], item.get("ctx", {}))
            found.append((location, f"{key}: {rule}, got {_written(value)}"))
    return found


def _rule(kind: str, message: str, context: dict[str, Any]) -> str:
    """Pydantic's rule in the words of the other messages."""
    rules = {
        "model_type": "must be a section with keys",
        "dataclass_type": "must be a section with keys",
        "dict_type": "must be a section with keys",
        "tuple_type": "must be a list",
        "too_long": f"must have no more than {context.get('max_length')} items",
        "bool_type": "must be true or false",
        "string_type": "must be text (quote a number that is meant as text)",
        "string_too_short": "must not be empty (write null for none)",
        "string_pattern_mismatch": "must be a name of letters, digits, '.', '_' and '-' that stays in its folder",
        "union_tag_invalid": f"must be one of {context.get('expected_tags')}",
    }
    if context.get("pattern") == COMMIT_PATTERN:
        return "must be a commit of 40 hexadecimal digits, as a branch or tag can move"
    return rules.get(kind, message.replace("Input should be ", "must be "))


def _written(value: Any) -> str:
    """A value as its config has it, cut short."""
    text = repr(str(value)) if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def _nearest_key(location: tuple[str, ...]) -> str:
    """The valid key that was probably meant: in the same section, of that name elsewhere, or alike anywhere."""
    keys = list(_valid_keys())
    if ".".join(location) in keys:
        return " it belongs to schedule.name cosine" if location[0] == "schedule" else " the values are resolved here"
    leaf = location[-1].replace("-", "_")
    siblings = [key for key in keys if key.split(".")[:-1] == list(location[:-1])]
    for candidates in (siblings, keys):
        leaves = {key.split(".")[-1]: key for key in candidates}
        match = get_close_matches(leaf, leaves, n=1, cutoff=0.75)
        if match:
            return f" did you mean {leaves[match[0]]}?"
    sections = sorted({key.split(".")[0] for key in keys})
    return _nearest(leaf, sections) or f" the keys here are {', '.join(siblings if location[1:] else sections)}"


def _nearest(name: str, names: Any) -> str:
    match = get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f" did you mean {match[0]}?" if match else ""


def _mend(raw: dict[str, Any], location: tuple[str, ...]) -> str:
    """Puts a valid value where one is bad or missing; returns the key, or nothing where there is nothing to mend."""
    values: dict[str, Any] = raw
    stand_ins = STAND_INS
    for number, section in enumerate(location[:-1], start=1):
        if not isinstance(values.get(section), dict):  # a bad item of a list: the list goes
            return ".".join(location[:number]) if values.pop(section, None) is not None else ""
        values, stand_ins = values[section], stand_ins.get(section, {})
    for key in location[-1:]:
        if key in stand_ins:
            values[key] = _copy(stand_ins[key])
        elif key in values:
            del values[key]
        else:
            break
        return ".".join(location)
    return ""


def _is_about(text: str, keys: set[str]) -> bool:
    """Whether a sentence mentions one of some keys, or a key of one of some sections."""
    words = re.split(r"[ :;,()]+", text)
    return any(word == key or word.startswith(f"{key}.") or key.endswith(f".{word}") for word in words for key in keys)


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _copy(item) for key, item in value.items()}
    return value


def _shown(path: Path) -> str:
    """The path as a user would type it: relative to the repository where it lies in it."""
    absolute = path.resolve()
    return str(absolute.relative_to(REPOSITORY)) if absolute.is_relative_to(REPOSITORY) else str(path)
