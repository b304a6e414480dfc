"""A dataset on its way to the Hub: its files as they are, if they are whole, and a page."""

import os
import shlex
from pathlib import Path

from training.errors import RunError, UserError
from training.hub.dataset_card import MARK, DescribedDataset, dataset_card
from training.hub.hub_client import DATASET_FILES
from training.hub.hub_upload import Destination, Say, upload_files
from training.hub.push import read_description
from training.preparation.check_dataset import check_dataset

CARD = "README.md"


def push_dataset(folder: Path, repository: str, private: bool, licence: str | None, say: Say) -> str:
    """Uploads a dataset with its page; a README.md that is the user's own is uploaded as it is.

    Args:
        folder: of the dataset.
        repository: `owner/name`.
        private: of a repository that is made.
        licence: as the Hub calls it; None = that in dataset.json.
        say: shows a line to the user.

    Returns:
        The sha of the commit, which a run's data.revision can name.

    Raises:
        UserError: the dataset is not whole.
        RunError: the upload has failed for good; the message says how to repeat it.
    """
    checked = check_dataset(folder)
    if checked.problems:
        more = f" (and {len(checked.problems) - 1} more problems)" if len(checked.problems) > 1 else ""
        raise UserError(f"{checked.problems[0]}{more}")
    say(checked.summary)
    card = folder / CARD
    if not card.exists() or MARK in card.read_text(encoding="utf-8"):
        described = DescribedDataset(
            repository, folder.resolve().name, checked, read_description(folder / "dataset.json"), licence
        )
        _replace(card, dataset_card(described))
    files = {name: folder / name for name in DATASET_FILES if (folder / name).exists()}
    stale = set(DATASET_FILES) - files.keys()
    total = sum(found.tokens for found in checked.splits.values())
    to = Destination(repository, "dataset", private)
    try:
        return upload_files(files, to, f"{folder.resolve().name}: {total:,} tokens", say, stale)
    except RunError as failure:
        words = ["isobatch", "push-dataset", str(folder), repository, *([] if private else ["--public"])]
        words += ["--licence", licence] if licence else []
        raise RunError(f"{failure}; nothing is lost; to try again: {shlex.join(words)}") from failure


def _replace(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)
