"""From what a user calls a run or a checkpoint to its folder."""

import os
from pathlib import Path

from training.checkpoint import FOR_THE_MODEL, MODEL, Found, find_checkpoint, list_checkpoints
from training.errors import UserError


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


def _places(name: str, checkpoints: Path) -> list[Path]:
    path = Path(name)
    return [path] if name.startswith((".", os.sep)) else [checkpoints / name, path]


def _is_run(folder: Path) -> bool:
    try:
        return (folder / "metrics.jsonl").is_file() or bool(list_checkpoints(folder))
    except OSError:  # a name too long for the file system
        return False


def _remedy(checkpoints: Path) -> str:
    runs = sorted(folder.name for folder in checkpoints.iterdir() if _is_run(folder)) if checkpoints.is_dir() else []
    return f"give the path of a folder, or one of the runs in {checkpoints}: {', '.join(runs) or 'none'}"
