"""The folder of the datasets as a user gives it to a command: perhaps misspelt, perhaps not filled yet."""

from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from training.errors import UserError
from training.file_digest import file_digest

if TYPE_CHECKING:  # which imports PyTorch
    from training.config import Data

ALIKE = 0.8
TOKENIZER = "tokenizer.json"


def known_datasets(folder: Path | None) -> Path | None:
    """Refuses a folder that is not there while one beside it has nearly its name; any other will be made.

    For typer, as the callback of an argument or option.

    Raises:
        UserError: naming the folder that was probably meant.
    """
    if folder is None or folder.exists():
        return folder
    try:
        beside = [other.name for other in folder.absolute().parent.iterdir() if other.is_dir()]
    except OSError:
        return folder
    match = get_close_matches(folder.absolute().name, beside, n=1, cutoff=ALIKE)
    if match:
        raise UserError(
            f"{folder}: there is no such folder; did you mean {folder.parent / match[0]}? Else make the folder first"
        )
    return folder


def unused_tokenizer(data: "Data", datasets: Path) -> list[str]:
    """The line about a data.tokenizer that is not used, as the dataset has another one of its own; else none."""
    from training.data import named_tokenizer_file

    own, named = datasets / data.dataset / TOKENIZER, named_tokenizer_file(data, datasets)
    if named is None or not own.is_file() or (named.is_file() and file_digest(named) == file_digest(own)):
        return []
    return [f"data.tokenizer {data.tokenizer}: is not used, as the dataset has a tokenizer of its own, {own}"]


def missing_dataset(name: str, datasets: Path) -> list[str]:
    """The line of a plan about a dataset that is not there yet; none where it is."""
    folder = datasets / name
    if folder.is_dir():
        return []
    if not can_be_made(name):
        meant = nearest_dataset(name, datasets)
        return [f"dataset: {folder} is not there;{meant or ' make it before training (isobatch prepare)'}"]
    return [f"dataset: {folder} is not there; it will be {'downloaded' if '/' in name else 'prepared'} into it"]


def can_be_made(name: str) -> bool:
    """Whether a dataset that is not there is downloaded or prepared by name."""
    from training.preparation.python_library import PYTHON_LIBRARY

    return name == PYTHON_LIBRARY or "/" in name


def nearest_dataset(name: str, datasets: Path) -> str:
    """The end of a message about a dataset that is not there: the one probably meant; empty if none is alike."""
    from training.config_check import nearest
    from training.preparation.python_library import PYTHON_LIBRARY

    there = [path.name for path in datasets.iterdir() if path.is_dir()] if datasets.is_dir() else []
    return nearest(name, [*there, PYTHON_LIBRARY], ALIKE)
