"""What was not written here: in a repository that an upload would change, and in the folder that a push writes anew.

A page of ours lists what was uploaded with it (card_text.py); what is not as listed is its owner's.
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from training.errors import RunError, UserError, one_line
from training.hub.card_text import PAGE, digests, is_ours, listed_files
from training.hub.hub_client import ANSWER_SECONDS, DATASET_FILES
from training.hub.hub_retry import Say, client_errors, patiently
from training.hub.hub_upload import Destination, matches, problem_of

WRITTEN = (
    *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
    *("loss.png", "grad_norm.png", "learning_rate.png", "config.yaml", "metrics.jsonl"),
)
"""What a push of a model writes, besides its page and runs/."""
STALE = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "pytorch_model*", "model-*-of-*.safetensors", "model.safetensors.index.json"),
    *("adapter_config.json", "adapter_model.*", "tf_model.h5", "flax_model.msgpack"),
    *("loss.png", "grad_norm.png", "learning_rate.png", "metrics.jsonl"),
)
"""What an earlier upload, or another model, may have left in a repository and would mislead who loads this one."""
EVENTS = "runs/*/events.out.tfevents.*.isobatch"
STATE = ("config.yaml", "metrics.jsonl", "step_[0-9]*/*")
"""What the state of a run is made of."""
MOST_NAMES = 5


def foreign_content(to: Destination, say: Say, own_page: bytes | None = None) -> str | None:
    """What an upload would replace or remove though it was not uploaded from here, in words.

    Args:
        to: where to.
        say: shows a line to the user.
        own_page: a README.md of the user's that will be uploaded as it is.

    Raises:
        RunError: the Hub does not tell, for good.
    """
    return _look(to, say, lambda: _foreign_content(to, own_page))


def foreign_state(to: Destination, say: Say) -> str | None:
    """What the branch of a run's state holds besides such a state, in words; all of it would be removed.

    Raises:
        RunError: the Hub does not tell, for good.
    """

    def look() -> str | None:
        info = _information(to)
        others = [name for name in _names(info) if not matches(name, STATE)]
        # A branch that was made for a state, and got none, is as main is.
        if not others or info.sha == _information(Destination(to.repository, to.kind)).sha:
            return None
        return f"its branch {to.branch} holds files of no run's state ({_told(others)}), which an upload would remove"

    return _look(to, say, look)


def refuse_what_was_added(folder: Path, way_on: str) -> None:
    """Refuses a folder in which the user has added or changed a file since a push wrote it.

    Args:
        folder: what a push writes anew.
        way_on: what replaces it all the same.

    Raises:
        UserError: names such files.
    """
    page = folder / PAGE
    content = page.read_bytes() if page.is_file() else b""
    if content and not is_ours(content):
        raise UserError(
            f"{page}: was edited since it was written, and a push writes it anew; move it away, or go on with: {way_on}"
        )
    listed = listed_files(content)
    others = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path == page or (path.is_dir() and not path.is_symlink()):
            continue
        if listed is None:
            known = matches(name, (*WRITTEN, EVENTS))
        else:
            known = os.path.isfile(path) and name in listed and digests(path) == listed[name]
        others += [] if known else [name]
    if others:
        raise UserError(
            f"{folder}: holds what was added or changed since a push wrote it ({_told(others)}), and the next one "
            f"writes it anew; move it away, or go on with: {way_on}"
        )


def _look(to: Destination, say: Say, look: Callable[[], str | None]) -> str | None:
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        return patiently(look, lambda error: f"{to.repository}: {problem_of(error)}", say)
    except (RepositoryNotFoundError, RevisionNotFoundError):
        return None
    except client_errors() as error:
        raise RunError(f"{to.repository}: {problem_of(error)}") from error


def _foreign_content(to: Destination, own_page: bytes | None) -> str | None:
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.hf_api import RepoFile

    info = _information(to)
    names = _names(info)
    if not names:
        return None
    if PAGE not in names:
        return f"holds files that were not uploaded from here ({_told(names)}), which an upload may replace"
    with tempfile.TemporaryDirectory() as folder:
        page = hf_hub_download(to.repository, PAGE, repo_type=to.kind, revision=info.sha, local_dir=folder)
        content = Path(page).read_bytes()
    if content == own_page:
        return None
    if not is_ours(content):
        return f"its {PAGE} was not written from here, or was edited since, and an upload would replace it"
    written, removed = (WRITTEN, STALE) if to.kind == "model" else (DATASET_FILES, ())
    listed = listed_files(content)
    entries = HfApi().list_repo_tree(to.repository, recursive=True, revision=info.sha, repo_type=to.kind)
    others = []
    for entry in entries:
        if not isinstance(entry, RepoFile) or entry.path == PAGE or not matches(entry.path, (*written, *removed)):
            continue
        if listed is None:
            known = matches(entry.path, written)
        else:
            oid, sha256 = listed.get(entry.path, (None, None))
            known = entry.lfs.sha256 == sha256 if entry.lfs else entry.blob_id == oid
        others += [] if known else [entry.path]
    if not others:
        return None
    found = f"holds files that were not uploaded from here, or were changed since ({_told(others)})"
    return f"{found}, which an upload would replace or remove"


def _information(to: Destination) -> Any:
    from huggingface_hub import HfApi

    return HfApi().repo_info(to.repository, repo_type=to.kind, revision=to.branch, timeout=ANSWER_SECONDS)


def _names(info: Any) -> list[str]:
    return sorted({sibling.rfilename for sibling in info.siblings or []} - {".gitattributes"})


def _told(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMES:,} more" if len(names) > MOST_NAMES else ""
    return ", ".join(map(one_line, names[:MOST_NAMES])) + more
