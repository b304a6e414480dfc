"""Imports a model that was trained elsewhere, as a run of ours that was stopped before its first step."""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from model.gpt import GPTConfig, parameter_count
from training.checkpoint import point, write_checkpoint
from training.config import NAME_PATTERN, REPOSITORY, RunConfig, config_mapping, repository_problem
from training.config_check import config_from_mapping
from training.config_file import load_run_config
from training.errors import RunError, UserError, one_line
from training.exchange.foreign_model import TOKENIZER, WEIGHTS, ForeignModel, read_foreign_model, read_foreign_tokenizer
from training.file_digest import file_digest
from training.hub.hub_client import download_model
from training.preparation.dataset_files import staged_folder
from training.run_folder import CONFIG, METRICS
from training.snapshot import Snapshot, TrainingState
from training.tokenizer import load_tokenizer
from training.yaml_reader import yaml_text

LIKE = "8xa100m40-baseline"
"""Its config is every default of a run config, spelled out. The fp16 of it is left out, which only a GPU has."""


def import_model(
    source: str,
    name: str,
    like: str | None,
    revision: str | None,
    heads: int | None,
    output: Path,
    datasets: Path,
) -> str:
    """Writes the run `output`/`name` with a foreign model's weights as its step 0.

    Args:
        source: a folder, or a model on the Hub (owner/name) where there is no such folder.
        name: of the run.
        like: a config (name or path) whose values the run gets, the model's apart; None = the defaults, without
            autocast, so that a CPU can evaluate the run.
        revision: of the Hub's repository: a branch, a tag or a commit.
        heads: attention heads, for the forerunner's weights without a config.
        output: folder of the runs.
        datasets: folder of the datasets.

    Returns:
        What was imported, in a sentence.

    Raises:
        UserError: there is no such model, it is not of our architecture, or an argument does not fit.
        RunError: the run cannot be written; nothing is left then.
    """
    run_folder = output / name
    if not re.fullmatch(NAME_PATTERN, name):
        raise UserError(
            f"--name {name!r}: must be a name of letters, digits, '.', '_' and '-' that stays in its folder"
        )
    if run_folder.is_symlink() or (run_folder.exists() and (run_folder.is_file() or any(run_folder.iterdir()))):
        raise UserError(f"{run_folder}: exists already; an import overwrites nothing: choose another --name")
    run = load_run_config(like) if like is not None else load_run_config(LIKE, ["precision.amp=off"])
    with source_folder(source, revision) as (folder, commit):
        model = read_foreign_model(folder, source, heads)
        tokenizer = read_foreign_tokenizer(folder)
        if tokenizer is not None:
            refuse_another_tokenizer(datasets / run.data.dataset / TOKENIZER, tokenizer, like or LIKE)
        config = imported_config(run, name, model.config, run_folder if tokenizer is not None else None)
        origin = {"source": source, "revision": commit, "format": model.format, "files": _digests(folder)}
        try:
            with staged_folder(run_folder) as staged:
                if tokenizer is not None:
                    _keep_tokenizer(folder, tokenizer, staged / TOKENIZER)
                _write_run(staged, config, model, origin)
        except (OSError, UnicodeEncodeError) as error:  # a path that is no UTF-8 has no place in a config
            raise RunError(
                f"{run_folder}: cannot be written ({error}); make room, or choose another --output"
            ) from error
    said = "" if tokenizer is not None else "; it has no tokenizer"
    return f"{run_folder}: {parameter_count(model.config):,} parameters, {model.format}, from {source}{said}"


@contextmanager
def source_folder(source: str, revision: str | None) -> Iterator[tuple[Path, str | None]]:
    """Gives the folder that a source is in, and the commit if it came from the Hub, into a temporary folder."""
    path = Path(source)
    if source and path.is_dir():
        if revision is not None:
            raise UserError(
                f"--revision {revision}: is for a model on the Hub, and {source} is a folder here; leave it out"
            )
        yield path, None
    elif source.startswith((".", os.sep)) or repository_problem(source):
        raise UserError(
            f"{source!r}: there is no such folder; give one that holds {WEIGHTS}, or a model on the Hub as owner/name, "
            "such as openai-community/gpt2"
        )
    else:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder), download_model(source, revision, Path(folder))


def refuse_another_tokenizer(own: Path, tokenizer: Tokenizer, like: str) -> None:
    """Refuses a dataset with a tokenizer of its own: the run would read its ids with the other one's meaning."""
    if own.is_file() and load_tokenizer(own).get_vocab() != tokenizer.get_vocab():
        raise UserError(
            f"--like {like}: its dataset has another tokenizer, {own}, than the model; choose a config whose data were "
            "made with the model's, or whose dataset has none"
        )


def imported_config(run: RunConfig, name: str, model: GPTConfig, keeps_tokenizer: Path | None) -> RunConfig:
    """The config of an imported run: that of another run, but for the model and the tokenizer that its folder keeps."""
    mapping = config_mapping(run)
    mapping |= {"name": name, "init_from": None, "interventions": [], "overrides": []}
    mapping["hub"] = {**mapping["hub"], "repo": None}
    mapping["model"] = {key: getattr(model, key) for key in mapping["model"]}
    if keeps_tokenizer is not None:
        path = keeps_tokenizer.resolve() / TOKENIZER
        within = path.is_relative_to(REPOSITORY)
        mapping["data"] = {**mapping["data"], "tokenizer": str(path.relative_to(REPOSITORY) if within else path)}
    return config_from_mapping(mapping, f"{name} (the model read, the rest from {run.name})")


def _digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.glob("*") if path.suffix in (".safetensors", ".json") and path.is_file())
    return {path.name: file_digest(path) for path in files}


def _keep_tokenizer(folder: Path, tokenizer: Tokenizer, destination: Path) -> None:
    if (folder / TOKENIZER).is_file():
        shutil.copyfile(folder / TOKENIZER, destination)
    else:
        tokenizer.save(str(destination))


def _write_run(folder: Path, config: RunConfig, model: ForeignModel, origin: dict[str, Any]) -> None:
    """Writes what a run has that was stopped before its first step; its first event says where it came from."""
    mapping = config_mapping(config)
    state = TrainingState(0, 0, 0.0, 0, None, None, None, "imported", mapping)
    written = write_checkpoint(folder, Snapshot(model.weights, {}, state))
    point(folder, "latest", written.name)
    comment = (
        f"# An imported model: {one_line(origin['source'])}. The other sections are those of a run that evaluates it.\n"
    )
    (folder / CONFIG).write_text(comment + yaml_text(mapping), encoding="utf-8")
    event = {"kind": "event", "step": 0, "event": "import", **origin, "parameters": parameter_count(config.model)}
    (folder / METRICS).write_text(json.dumps(event) + "\n", encoding="utf-8")
