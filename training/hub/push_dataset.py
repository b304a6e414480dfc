"""A dataset on its way to the Hub: its files as they are, if they are whole, and a page."""

import os
import shlex
from pathlib import Path

from training.errors import RunError, UserError, one_line
from training.hub.card_text import PAGE, is_ours, with_files
from training.hub.dataset_card import DescribedDataset, dataset_card
from training.hub.hub_client import DATASET_FILES
from training.hub.hub_retry import Say
from training.hub.hub_upload import Destination, upload_files
from training.hub.push import read_description
from training.preparation.check_dataset import check_dataset
from training.preparation.dataset_files import replace_content


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
    described = DescribedDataset(
        repository, folder.resolve().name, checked, read_description(folder / "dataset.json"), licence
    )
    files = {name: folder / name for name in DATASET_FILES if (folder / name).exists()}
    if own_page(folder) is None:
        others = {name: path for name, path in files.items() if name != PAGE}
        try:
            replace_content(folder / PAGE, with_files(dataset_card(described), others))
            files[PAGE] = folder / PAGE
        except OSError as error:
            raise RunError(f"{folder / PAGE}: cannot be written ({error}); make the folder writable") from error
    else:
        say(f"{folder / PAGE}: is your own, or was edited, and is uploaded as it is; remove it to get a new one")
    stale = set(DATASET_FILES) - files.keys()
    total = sum(found.tokens for found in checked.splits.values())
    to = Destination(repository, "dataset", private)
    try:
        return upload_files(files, to, one_line(f"{folder.resolve().name}: {total:,} tokens"), say, stale)
    except RunError as failure:
        words = ["isobatch", "push-dataset", str(folder), repository, *([] if private else ["--public"])]
        words += ["--licence", licence] if licence else []
        raise RunError(f"{failure}; nothing is lost; to try again: {shlex.join(words)}") from failure


def own_page(folder: Path) -> bytes | None:
    """The README.md that the user wrote or edited; None where there is none, or the one that was written here.

    Raises:
        UserError: it is no text, or none that the Hub takes.
    """
    path = folder / PAGE
    if not os.path.lexists(path):
        return None
    try:
        if path.exists() and not path.is_file():
            raise OSError("it is no file")
        content = path.read_bytes()
        content.decode("utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as UTF-8 text ({error}); save it so, or remove it") from None
    if not content.strip() or content.startswith(b"\xef\xbb\xbf"):
        how = "begins with a byte order mark" if content.strip() else "is empty"
        raise UserError(f"{path}: {how}, which the Hub does not take; write it without, or remove it to get a new one")
    return None if is_ours(content) else content
