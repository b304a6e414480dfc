"""A run config checked as a whole: every problem in one message, each with its key, the rule and the remedy."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields as dataclass_fields
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

from model.gpt import GPTConfig
from training.config import CosineSchedule, Precision, RunConfig, Section
from training.errors import UserError
from training.yaml_reader import BareWord

STAND_INS: dict[str, Any] = {
    "name": "x",
    "data": {"dataset": "x"},
    "batch": {"world_size": 1, "microbatch": 1, "accumulation": 1},
    "schedule": {"name": "cosine"},
}
"""What stands for a missing or bad value that has no default, while the other values are checked."""


class ConfigError(UserError):
    """One or more problems of a config, all in one message."""

    def __init__(self, text: str, *more: str, problems: Sequence[str] = ()) -> None:
        super().__init__(text, *more)
        self.problems = list(problems) or [text]
        """Each problem, without the file that leads the message."""


def refusal(where: str, problems: Sequence[str]) -> ConfigError:
    """The one message for all the problems of a config, of which there is at least one."""
    if len(problems) == 1:
        return ConfigError(f"{where}: {problems[0]}", problems=problems)
    lines = [f"  - {problem}" for problem in problems]
    return ConfigError(f"{where} has {len(problems)} problems:", *lines, problems=problems)


def refuse_fp16_without_gpu(precision: Precision, has_gpu: bool, remedy: str, where: str = "") -> None:
    """Raises a UserError, led by `where` and ended by `remedy`, if fp16 is to be computed by a CPU."""
    if precision.amp == "fp16" and not has_gpu:
        raise UserError(
            f"{where}precision.amp: fp16 needs a GPU, on a CPU it is hundreds of times slower than bf16; {remedy}"
        )


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
        raise refusal(where, problems)
    return config


def config_of_record(mapping: Mapping[str, Any], where: str) -> RunConfig:
    """The same for what a run has recorded of its config: keys that are not known are another version's.

    Raises:
        ConfigError: naming `where`.
    """
    try:
        return config_from_mapping(mapping, where)
    except ConfigError as error:
        unknown = [problem.partition(":")[0] for problem in error.problems if ": unknown key;" in problem]
        if len(unknown) < len(error.problems):  # it is no record of ours
            raise
        raise ConfigError(another_version(where, unknown)) from None


def another_version(where: str, unknown: Sequence[str]) -> str:
    """What is said of a record with keys that this version does not know."""
    return (
        f"{where}: was written by another version of Isobatch: {', '.join(unknown)} "
        f"{'is' if len(unknown) == 1 else 'are'} not known here; update this one, or use the one that wrote it"
    )


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
                first, *others = [(*location, *word.split(".")) for word in _words(text)]
                found.append((first, "" if _is_about(sentence, mended) else sentence))
                found += [(other, "") for other in others]  # of two keys that do not fit, either may be a default
        else:
            rule = rule_of(kind, item["msg"], item.get("ctx", {}))
            found.append((location, f"{key}: {rule}, got {written(value)}"))
    return found


def rule_of(kind: str, message: str, context: dict[str, Any]) -> str:
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
    return rules.get(kind, message.replace("Input should be ", "must be "))


def written(value: Any) -> str:
    """A value as a config has it (null, true, 'text'), for a message: cut after 100 characters."""
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
    return nearest(leaf, sections) or f" the keys here are {', '.join(siblings if location[1:] else sections)}"


def nearest(name: str, names: Iterable[str], alike: float = 0.5) -> str:
    """The end of a message about an unknown name: the one that was probably meant; empty if none is alike."""
    match = get_close_matches(name, list(names), n=1, cutoff=alike)
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
    return any(
        word == key or word.startswith(f"{key}.") or key.endswith(f".{word}") for word in _words(text) for key in keys
    )


def _words(text: str) -> list[str]:
    return re.split(r"[ :;,()]+", text)


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _copy(item) for key, item in value.items()}
    return value
