"""From what a user calls a run or a checkpoint to its folder, its config and its tokenizer."""

import os
import sys
from collections.abc import Iterable
from pathlib import Path

from training import lock
from training.checkpoint_files import FOR_THE_MODEL, MODEL, STATE, Found, find_checkpoint, list_checkpoints
from training.config import REPOSITORY, RunConfig
from training.config_check import config_of_record
from training.data import tokenizer_file
from training.errors import UserError
from training.hub.hub_client import download_tokenizer
from training.restore import read_state


def find_run(name: str, checkpoints: Path) -> Path:
    """Finds the folder of a run.

    Args:
        name: the run's name in `checkpoints`, or the path of its folder; a name comes first, ./NAME is a path.
        checkpoints: the folder of the runs.

    Raises:
        UserError: there is no such run.
    """
    for folder in _places(name, checkpoints):
        if _is_run(folder):
            return folder
    raise UserError(f"{name!r}: there is no such run; {_remedy(checkpoints)}")


def find_runs(names: Iterable[str], checkpoints: Path) -> list[Path]:
    """Finds the folders of several runs, each once, in the order of their names.

    Args:
        names: as for `find_run`; a folder that is no run but holds some stands for all of them, in alphabetical order.
        checkpoints: the folder of the runs.

    Raises:
        UserError: there is no such run.
    """
    found: dict[Path, Path] = {}
    for name in names:
        group = next((place for place in _places(name, checkpoints) if _is_run(place) or _runs_in(place)), None)
        folders = [find_run(name, checkpoints)] if group is None or _is_run(group) else _runs_in(group)
        for folder in folders:
            found.setdefault(folder.resolve(), folder)
    return list(found.values())


def find_run_or_beginning(name: str, checkpoints: Path) -> Path:
    """The same, and the folder of a run that has recorded nothing yet, if a process holds it."""
    beginning = [folder for folder in _places(name, checkpoints) if lock.is_held(folder / lock.RUN_LOCK)]
    return beginning[0] if beginning else find_run(name, checkpoints)


def find_model(name: str, checkpoints: Path) -> Found:
    """Finds the checkpoint whose model is wanted, with or without a state to train it further.

    Args:
        name: RUN (its newest good checkpoint), RUN/best or RUN/step_00000617, with RUN as in `find_run`; or the path
            of the folder of a checkpoint that lies in no run, which is not verified here (`load_model` does).
        checkpoints: the folder of the runs.

    Raises:
        UserError: there is no such checkpoint, or it is damaged.
    """
    for path in _places(name, checkpoints):
        if _is_run(path):
            return find_checkpoint(path, "latest", FOR_THE_MODEL)
        if _is_run(path.parent):
            return find_checkpoint(path.parent, path.name, FOR_THE_MODEL)
        if (path / MODEL).is_file():
            return Found(path, [])
    raise UserError(f"{name!r}: there is no such run or checkpoint; {_remedy(checkpoints)}")


def find_checkpoint_and_config(name: str) -> tuple[Path, RunConfig]:
    """The folder of the checkpoint that the user names, and the config of its run."""
    found = find_model(name, REPOSITORY / "checkpoints")
    for passed_over, reason in found.passed_over:
        print(f"passed over {passed_over}: {reason}", file=sys.stderr)
    # A checkpoint does not know its run's name, and nothing here asks for it.
    config = config_of_record({"name": "checkpoint", **read_state(found.path).config}, str(found.path / STATE))
    return found.path, config


def find_tokenizer(config: RunConfig, datasets: Path) -> Path:
    """The tokenizer of a run's data: the dataset's own, or the one that data.tokenizer names, fetched if need be."""
    path = find_tokenizer_if_any(config, datasets)
    if path is None:
        raise UserError(no_tokenizer(config, datasets))
    return path


def no_tokenizer(config: RunConfig, datasets: Path) -> str:
    """Why a run has no tokenizer here, and what helps."""
    own = datasets / config.data.dataset / "tokenizer.json"
    return (
        f"{own}: there is no such file, and the run has no data.tokenizer; "
        "give a tokenizer.json with --tokenizer, or the folder of the run's datasets with --datasets"
    )


def find_tokenizer_if_any(config: RunConfig, datasets: Path) -> Path | None:
    """The same; None where the run has none."""
    path = tokenizer_file(config.data, datasets)
    if path is not None and not path.exists():
        download_tokenizer(str(config.data.tokenizer), path)
    return path


def _places(name: str, checkpoints: Path) -> list[Path]:
    path = Path(name)
    return [path] if name.startswith((".", os.sep)) else [checkpoints / name, path]


def _runs_in(folder: Path) -> list[Path]:
    """The runs that lie in a folder."""
    try:
        return sorted(run for run in folder.iterdir() if run.is_dir() and _is_run(run))
    except OSError:
        return []


def _is_run(folder: Path) -> bool:
    try:
        return (folder / "metrics.jsonl").is_file() or bool(list_checkpoints(folder))
    except OSError:  # a name too long for the file system
        return False


def _remedy(checkpoints: Path) -> str:
    runs = ", ".join(run.name for run in _runs_in(checkpoints)) or "none"
    return f"give the path of a folder, or one of the runs in {checkpoints}: {runs}"
