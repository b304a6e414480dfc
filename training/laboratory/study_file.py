"""configs/studies/NAME.yaml: a base config, what is changed in it, and the seeds; read into the runs to train."""

import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from training.config import NAME_PATTERN, Count, RunConfig, Section, Seed, Seeds, Text, config_mapping
from training.config_check import ConfigError, nearest, refusal, rule_of, written
from training.config_file import CONFIGS, INTERVENTIONS, run_config_within, shown
from training.laboratory.comparability import length_problems
from training.yaml_reader import read_yaml

STUDIES = CONFIGS / "studies"
BASELINE = "baseline"
"""The group of the runs that nothing is changed in."""
Name = Annotated[str, Field(pattern=rf"^{NAME_PATTERN}$", max_length=100)]


class StudySeeds(Section):
    """The seeds of a run, both given: 42 is no more obvious than any other."""

    weights: Seed
    training: Seed


class StudyFile(Section):
    """What a study's file may hold."""

    base: Text
    interventions: tuple[Text, ...] = ()
    stacks: dict[Name, Annotated[tuple[Text, ...], Field(min_length=2)]] = Field(default_factory=dict)
    batch_sizes: tuple[Count, ...] = ()
    seeds: Annotated[tuple[StudySeeds, ...], Field(min_length=1)]
    baseline_seeds: tuple[StudySeeds, ...] = ()
    set: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True)
class StudyRun:
    """One run of a study."""

    group: str
    """What the runs of a row of its table share: baseline, an intervention, a stack or batch-<sequences>."""
    config: RunConfig

    @property
    def name(self) -> str:
        """The run's, and that of its folder."""
        return self.config.name


@dataclass(frozen=True)
class Study:
    """A study, checked: all its runs can be trained."""

    name: str
    path: Path
    baseline: str
    """The group that the others are compared with."""
    runs: tuple[StudyRun, ...]
    """In the order in which they are trained: seed by seed, so that whatever is finished first can be compared."""
    batch_sizes: tuple[int, ...] = ()
    """Sequences per step, where these are what is compared."""


def load_study(study: str) -> Study:
    """Reads and checks a study.

    Args:
        study: a name (configs/studies/NAME.yaml), or the path of a YAML file; its stem is the study's name.

    Raises:
        ConfigError: with every problem of the file, or of the configs that it makes, in one message.
    """
    path = _study_path(study)
    if not re.fullmatch(NAME_PATTERN, path.stem):
        rule = rule_of("string_pattern_mismatch", "", {})
        raise ConfigError(f"{study}: the study's name, {path.stem!r}, {rule}; rename the file")
    raw = read_yaml(path)
    file = _checked(raw, path)
    rows = _rows(file, _common_keys(raw), path)
    baseline = next(iter(rows))
    runs = [
        StudyRun(group, _at_seeds(config, group, seeds))
        for seeds in file.baseline_seeds or file.seeds
        for group, config in rows.items()
        if seeds in file.seeds or group == baseline
    ]
    return Study(path.stem, path, baseline, tuple(runs), file.batch_sizes)


def _study_path(study: str) -> Path:
    if study.endswith((".yaml", ".yml")) or os.sep in study:
        path = Path(study)
        if not path.is_file():
            raise ConfigError(f"{study}: there is no such file; give a YAML file or the name of a study")
        return path
    path = STUDIES / f"{study}.yaml"
    if len(study) > 100 or not path.is_file():
        names = sorted(found.stem for found in STUDIES.glob("*.yaml"))
        remedy = nearest(study, names) or f" there are {', '.join(names)}"
        raise ConfigError(f"{study[:100]}: there is no such study in configs/studies/;{remedy}")
    return path


def _checked(raw: Mapping[str, Any], path: Path) -> StudyFile:
    """The file's keys and values.

    Raises:
        ConfigError: with every problem that they have, apart from the configs that come of them.
    """
    problems = []
    try:
        file = StudyFile.model_validate_json(json.dumps(raw))  # JSON: a list is a tuple
        problems = [*_kind_problems(file), *_seed_problems(file), *_name_problems(file), *_set_problems(file)]
    except ValidationError as error:
        # Pydantic counts only the items that are right, so that a list of wrong ones is too short as well.
        wrong = {item["loc"][0] for item in error.errors() if len(item["loc"]) > 1}
        problems = [
            _sentence(item["loc"], item["type"], item)
            for item in error.errors()
            if item["type"] != "too_short" or item["loc"][0] not in wrong or len(item["loc"]) > 1
        ]
        problems = _all_told(problems, raw)
    if problems:
        raise refusal(shown(path), problems)
    return file


def _all_told(problems: Sequence[str], raw: Mapping[str, Any]) -> list[str]:
    """With misspelt interventions, and without the keys that are missing only because they are misspelt."""
    meant = [problem.partition(" did you mean ")[2].rstrip("?") for problem in problems]
    known, names = read_yaml(INTERVENTIONS), raw.get("interventions")
    return [problem for problem in problems if problem not in {f"{key}: is needed" for key in meant}] + [
        f"interventions: {name} is no intervention;{nearest(name, known) or ' there are ' + ', '.join(known)}"
        for name in (names if isinstance(names, list) else [])
        if isinstance(name, str) and name not in known
    ]


def _sentence(location: Sequence[int | str], kind: str, item: Mapping[str, Any]) -> str:
    """One of pydantic's problems in our words."""
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")
    if kind == "extra_forbidden":
        return f"{key}: unknown key;{_nearest_key(location)}"
    if kind == "missing":
        return f"{key}: is needed"
    if kind == "too_short":
        return f"{key}: must have at least {item['ctx']['min_length']} items, got {written(item['input'])}"
    return f"{key}: {rule_of(kind, item['msg'], item.get('ctx', {}))}, got {written(item['input'])}"


def _nearest_key(location: Sequence[int | str]) -> str:
    """The key that was probably meant."""
    name = str(location[-1]).replace("-", "_")
    if len(location) == 1 and name in RunConfig.model_fields:
        return f" a run's own keys stand in `set`: write set: {{{name}: ...}}"
    keys = StudyFile.model_fields if len(location) == 1 else StudySeeds.model_fields
    return nearest(name, keys) or f" the keys here are {', '.join(keys)}"


def _kind_problems(file: StudyFile) -> list[str]:
    """Whether it is clear what is compared, and that nothing stands there twice."""
    problems = []
    if bool(file.interventions or file.stacks) == bool(file.batch_sizes):
        problems.append(
            "a study compares either interventions (with or without stacks) or batch_sizes; give one of the two"
        )
    if len(set(file.batch_sizes)) == 1:
        problems.append("batch_sizes: one size has nothing to be compared with; give at least two")
    lists = ("interventions", "batch_sizes", "seeds", "baseline_seeds")
    values = {key: getattr(file, key) for key in lists} | _stacks(file)
    return problems + [
        f"{key}: {_shown(value)} stands there twice; keep one"
        for key, items in values.items()
        for value, count in Counter(items).items()
        if count > 1
    ]


def _stacks(file: StudyFile) -> dict[str, tuple[str, ...]]:
    return {f"stacks.{name}": interventions for name, interventions in file.stacks.items()}


def _seed_problems(file: StudyFile) -> list[str]:
    """Whether each run of an intervention has one of the baseline at the same seeds."""
    if file.batch_sizes and file.baseline_seeds:
        return ["baseline_seeds: with batch_sizes every size has the same seeds; put them into `seeds`"]
    return [
        f"baseline_seeds: lacks {_shown(seeds)}; the baseline needs a run at each of `seeds` to be compared with"
        for seeds in file.seeds
        if file.baseline_seeds and seeds not in file.baseline_seeds
    ]


def _name_problems(file: StudyFile) -> list[str]:
    """Whether all interventions exist, and no stack has a name that is taken."""
    known = read_yaml(INTERVENTIONS)
    named = {"interventions": file.interventions} | _stacks(file)
    problems = [
        f"{key}: {name} is no intervention;{nearest(name, known) or ' there are ' + ', '.join(known)}"
        for key, names in named.items()
        for name in names
        if name not in known
    ]
    return problems + [
        f"stacks.{name}: is the name of {'the baseline' if name == BASELINE else 'an intervention'}; choose another"
        for name in file.stacks
        if name == BASELINE or name in known
    ]


def _set_problems(file: StudyFile) -> list[str]:
    """Whether `set` leaves to the study's own keys what they say."""
    taken = ["base", "interventions", "seeds", *(["batch"] if file.batch_sizes else [])]
    return [f"set.{key}: is for the study's own keys to say; leave it out" for key in file.set if key in taken]


def _shown(value: Any) -> str:
    if isinstance(value, StudySeeds):
        return f"{{weights: {value.weights}, training: {value.training}}}"
    return str(value)


def _common_keys(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a run config that all runs share; unlike the checked file's, with bare words as YAML has them."""
    return {**raw.get("set", {}), "base": raw["base"]}


def _rows(file: StudyFile, common: dict[str, Any], path: Path) -> dict[str, RunConfig]:
    """The rows of the study's table: the config at the first seeds by the name of the group, the baseline first.

    Raises:
        ConfigError: no config can be made of some, or two are the same.
    """
    try:
        base = _config(path, common, BASELINE, file.seeds[0])
    except ConfigError as error:  # every other run has this problem too
        raise refusal(shown(path), [text.removeprefix(f"{shown(path)}: ") for text in error.problems]) from None
    keys = {BASELINE: common}
    if file.batch_sizes:
        sizes = sorted(file.batch_sizes, key=lambda size: size != base.global_batch)  # the base's own first, if given
        keys = {f"batch-{size}": {**common, **_at_batch_size(base, size)} for size in sizes}
    changes = {**{name: (name,) for name in file.interventions}, **file.stacks}
    keys |= {group: {**common, "interventions": list(names)} for group, names in changes.items()}
    problems: list[str] = []
    computed: dict[str, str] = {}
    rows: dict[str, RunConfig] = {}
    for group, own in keys.items():
        try:
            rows[group] = _config(path, own, group, file.seeds[0])
        except ConfigError as error:
            problems += [f"{group}: {problem}" for problem in error.problems]
            continue
        same = computed.setdefault(_what_is_computed(rows[group]), group)
        if same != group:
            problems.append(f"{group}: trains the same as {same}; leave one of them out")
    problems += length_problems(rows) if file.batch_sizes else []
    if problems:
        raise refusal(shown(path), problems)
    return rows


def _at_batch_size(base: RunConfig, size: int) -> dict[str, Any]:
    """The keys of a run with `size` sequences per step and as many tokens: what is every so many steps moves too."""
    world_size = base.batch.world_size if size % base.batch.world_size == 0 else 1
    keys: dict[str, Any] = {"batch": {"world_size": world_size, "microbatch": size // world_size, "accumulation": 1}}
    for key in ("evaluation", "checkpoint"):
        section = getattr(base, key).model_dump(mode="json")
        if section["every"]:
            keys[key] = {**section, "every": max(1, round(section["every"] * base.global_batch / size))}
    return keys


def _config(path: Path, own: Mapping[str, Any], group: str, seeds: StudySeeds) -> RunConfig:
    """The config of a group at some seeds, by its keys.

    Raises:
        ConfigError: with every problem of it.
    """
    config = run_config_within(path, group, {**own, "seeds": seeds.model_dump()})
    problems = []
    if config.seeds.model_dump() != seeds.model_dump():
        problems.append("an intervention sets the seeds, which are the study's to choose")
    if config.evaluation.every is None:
        problems.append("evaluation.every: must not be null: a study compares validation losses (0 = only at the end)")
    if config.hub.repo is not None:
        problems.append(
            "hub.repo: must be null in a study, whose runs would replace each other there; push one by hand"
        )
    if problems:
        raise refusal(f"{shown(path)}: {group}", problems)
    return config


def _at_seeds(config: RunConfig, group: str, seeds: StudySeeds) -> RunConfig:
    """A group's config as that of its run at some seeds."""
    name = f"{group}-w{seeds.weights}-t{seeds.training}"
    return config.model_copy(update={"name": name, "seeds": Seeds(**seeds.model_dump())})


def _what_is_computed(config: RunConfig) -> str:
    """A config without the record of how it came about, as text to compare."""
    mapping = config_mapping(config)
    return json.dumps({key: mapping[key] for key in sorted(mapping) if key not in ("interventions", "overrides")})
