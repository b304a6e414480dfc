"""The folder of the datasets as a user gives it to a command: perhaps misspelt, perhaps not filled yet."""

from difflib import get_close_matches
from pathlib import Path

from training.errors import UserError

ALIKE = 0.8


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


def missing_dataset(name: str, datasets: Path) -> list[str]:
    """The line of a plan about a dataset that is not there yet; none where it is."""
    from training.preparation.python_library import PYTHON_LIBRARY

    folder = datasets / name
    if folder.is_dir():
        return []
    if name != PYTHON_LIBRARY and "/" not in name:
        return [f"dataset: {folder} is not there; make it before training (isobatch prepare)"]
    return [f"dataset: {folder} is not there; it will be {'downloaded' if '/' in name else 'prepared'} into it"]
