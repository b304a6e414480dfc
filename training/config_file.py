"""From config files and --set to a run config.

Order of precedence, later wins: defaults < `base` (itself resolved first) < the file's own keys < the file's
`interventions`, in order < `--set KEY=VALUE`.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from training.config import REPOSITORY, RunConfig
from training.config_check import ConfigError, config_from_mapping, nearest, written
from training.yaml_reader import parse_yaml, read_yaml

CONFIGS = REPOSITORY / "configs"
INTERVENTIONS = CONFIGS / "interventions.yaml"

LONGEST_NAME = 200

RECORD = ("name", "overrides", "resolved")
"""Keys that the tool writes into a run's config.yaml; no config that a person writes has them."""


def load_run_config(
    run: str, overrides: Sequence[str] = (), goes_on: bool = False, folder: Path | None = None
) -> RunConfig:
    """Reads and checks the config of a run.

    Args:
        run: a name (configs/RUN.yaml) or the path of a YAML file; its stem is the run's name.
        overrides: `KEY=VALUE` with dotted keys, VALUE as in YAML.
        goes_on: whether a run is to go on, which another config than its own, however alike its name, cannot.
        folder: of the run, which may hold the record of a config that is not here.

    Raises:
        ConfigError: with every problem found, each with its key and the rule, in one message.
    """
    path = CONFIGS / f"{run}.yaml"
    if not _is_path(run) and folder is not None and not path.is_file():
        _refuse_for_want_of_config(run, folder / "config.yaml", goes_on)
    path = _config_path(run)
    problems: list[str] = []
    raw = _resolve(path, [_split_override(override) for override in overrides], (), problems)
    where = f"{shown(path)} with --set" if overrides else shown(path)
    return config_from_mapping({**raw, "name": path.stem, "overrides": [*overrides]}, where, problems)


def run_config_within(path: Path, name: str, own: Mapping[str, Any]) -> RunConfig:
    """The config of a run that has no file of its own: `own` holds what such a file would.

    Args:
        path: of the file that the values come from; `base` is looked for beside it, or in configs/.
        name: the run's.
        own: keys as in a run config, `base` and `interventions` among them.

    Raises:
        ConfigError: with every problem found.
    """
    problems: list[str] = []
    raw = _resolve_values(dict(own), path, [], (), problems)
    return config_from_mapping({**raw, "name": name}, f"{shown(path)}: {name}", problems)


def run_name(run: str) -> str:
    """The name of a run: the stem of its YAML file."""
    return Path(run).stem if _is_path(run) else run


def _is_path(run: str) -> bool:
    return run.endswith((".yaml", ".yml")) or os.sep in run


def _config_path(run: str, key: str = "") -> Path:
    if run and not key and Path(run).is_dir() and not (CONFIGS / f"{run}.yaml").is_file():
        raise ConfigError(f"{run}: is a folder; the run comes first, then the folder of the datasets")
    if _is_path(run):
        path = Path(run)
        if not path.is_file():
            raise ConfigError(
                f"{key}{run}: there is no such file; give a YAML file or the name of a config in configs/"
            )
        return path
    if len(run) > LONGEST_NAME:
        raise ConfigError(f"{key}{run[:50]}...: is no name of a config; a name has at most {LONGEST_NAME} characters")
    path = CONFIGS / f"{run}.yaml"
    if not path.is_file():
        names = sorted(found.stem for found in CONFIGS.glob("*.yaml") if found != INTERVENTIONS)
        raise ConfigError(f"{key}{run}: there is no configs/{run}.yaml;{nearest(run, names) or ' see configs/'}")
    return path


def _refuse_for_want_of_config(run: str, record: Path, goes_on: bool) -> None:
    """Raises a ConfigError where a run has come here without its config, or is to go on and there is none."""
    missing = f"{run}: there is no configs/{run}.yaml"
    if record.is_file():
        raise ConfigError(
            f"{missing}, but the run is here, with a record of its config; to go on with it: "
            f"cp {shown(record)} {shown(CONFIGS / run)}.yaml"
        )
    if goes_on:
        raise ConfigError(f"{missing} and no {shown(record)}, so no such run to go on with; see configs/")


def _resolve(
    path: Path, overrides: list[tuple[str, Any]], seen: tuple[Path, ...], problems: list[str]
) -> dict[str, Any]:
    """The values of one file: its base, its own keys, its interventions and the overrides, merged in that order."""
    if path.resolve() in seen:
        raise ConfigError(f"{shown(path)}: base leads back to this file; a config cannot be its own base")
    return _resolve_values(read_yaml(path), path, overrides, seen, problems)


def _resolve_values(
    own: dict[str, Any],
    path: Path,
    overrides: list[tuple[str, Any]],
    seen: tuple[Path, ...],
    problems: list[str],
) -> dict[str, Any]:
    """The same for the values `own` of the file at `path`."""
    where = f"{shown(path)}: " if seen else ""
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
                f"--set {min(choices)}: {shown(path)} is the record of a run, with base and interventions in its "
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
        raise ConfigError(f"{shown(path)}: base: must be the name of another config, got {written(base)}")
    beside = path.parent / (base if base.endswith((".yaml", ".yml")) else f"{base}.yaml")
    return beside if beside.is_file() else _config_path(base, f"{shown(path)}: base: ")


def _interventions(names: Any, where: str, problems: list[str]) -> list[tuple[str, dict[str, Any]]]:
    """Names of interventions and what each sets, in order; those that do not exist are problems."""
    if names is None:
        return []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        problems.append(f"{where}interventions: must be a list of names, got {written(names)}")
        return []
    known = read_yaml(INTERVENTIONS)
    for name in [name for name in names if name not in known]:
        remedy = nearest(name, known) or f" there are {', '.join(known)}"
        problems.append(f"{where}interventions: {name} is not one;{remedy}")
    found = [(name, known[name]) for name in names if name in known]
    for name, intervention in found:
        if not isinstance(intervention, dict) or not isinstance(intervention.get("set"), dict):
            raise ConfigError(f"{shown(INTERVENTIONS)}: {name}: must have a section `set` with what it changes")
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


def shown(path: Path) -> str:
    """The path as a user would type it: relative to the repository where it lies in it."""
    absolute = path.resolve()
    return str(absolute.relative_to(REPOSITORY)) if absolute.is_relative_to(REPOSITORY) else str(path)
