"""Uploads files to the Hugging Face Hub in one commit.

huggingface_hub is imported inside the functions, because importing it takes longer than `--help` should.
"""

import contextlib
import json
import logging
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from training.errors import RunError
from training.hub.hub_client import ANSWER_SECONDS, first_line
from training.hub.hub_retry import Say, cause_of, client_errors, is_wrong_form, patiently, status_of

SILENCE_SECONDS = 120.0


@dataclass(frozen=True)
class Destination:
    """Where files are uploaded to."""

    repository: str
    """`owner/name`."""
    kind: Literal["model", "dataset"] = "model"
    private: bool = True
    """Of a repository that is made; one that exists stays as it is."""
    branch: str = "main"

    @property
    def page(self) -> str:
        """Its address for people."""
        from huggingface_hub import constants

        page = f"{constants.ENDPOINT}/{'datasets/' if self.kind == 'dataset' else ''}{self.repository}"
        return page if self.branch == "main" else f"{page}/tree/{self.branch}"


def files_of(folder: Path) -> dict[str, Path]:
    """A folder's files by their names in a repository; hidden ones are left out."""
    return {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    }


def matches(name: str, patterns: Collection[str]) -> bool:
    """Whether a name is one of the patterns', whose * stands for a part of a name in a folder."""
    return any(fnmatchcase(name, pattern) and name.count("/") == pattern.count("/") for pattern in patterns)


def upload_files(
    files: Mapping[str, Path], to: Destination, title: str, say: Say | None, stale: Collection[str] | None = ()
) -> str:
    """Uploads files in one commit; what the Hub has already is not sent again.

    The repository is made if need be. What can pass (too many requests, a fault of the Hub or of the network) is tried
    again after a while; a commit whose answer was lost is found to be there, and not made twice.

    Args:
        files: by their names in the repository.
        to: where to.
        title: of the commit.
        say: shows a line to the user; None = in silence, without progress bars.
        stale: names, with * for a part, of others that are removed in the same commit, where they are there; None =
            all others.

    Returns:
        The sha of the commit; of the last one where nothing had to be changed.

    Raises:
        RunError: it failed for good.
    """
    tell: Say = say or (lambda _line: None)
    size = sum(path.stat().st_size for path in files.values())
    tell(f"uploading {len(files)} files ({size / 1e6:,.1f} MB) to {to.page}")

    def attempt() -> str:
        with _progress_bars(shown=say is not None and sys.stderr.isatty()):
            return _upload(files, to, title, tell, stale)

    try:
        return patiently(attempt, lambda error: f"{to.repository}: {problem_of(error)}", tell)
    except client_errors() as error:
        raise RunError(f"{to.repository}: {problem_of(error)}") from error


@contextlib.contextmanager
def _progress_bars(shown: bool) -> Iterator[None]:
    """Lets the client show its bars, or not: in a log they would be lines upon lines."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if shown or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _upload(files: Mapping[str, Path], to: Destination, title: str, say: Say, stale: Collection[str] | None) -> str:
    """One attempt. A repetition starts from what is there by then: that is what makes it safe."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
    from huggingface_hub.utils import get_session

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it would warn of a commit without changes
    get_session().timeout = SILENCE_SECONDS  # the client would wait for ever
    sha, present = _open_repository(to, say)
    gone = [name for name in present if stale is None or matches(name, stale)]
    removed = set(gone) - files.keys() - {".gitattributes"}
    operations: list[CommitOperationAdd | CommitOperationDelete] = [
        CommitOperationAdd(name, path) for name, path in files.items()
    ]
    operations += [CommitOperationDelete(name, is_folder=False) for name in sorted(removed)]
    # Unlike the client's upload_folder, this is one commit with Xet as well.
    commit = HfApi().create_commit(
        to.repository,
        operations,
        commit_message=title,
        repo_type=to.kind,
        revision=to.branch,
        parent_commit=sha,
    )
    same = commit.oid == sha
    say(f"{to.page}: {'had all of it already' if same else 'uploaded'}, commit {commit.oid}")
    return str(commit.oid)


def _open_repository(to: Destination, say: Say) -> tuple[str, set[str]]:
    """Makes the repository and the branch if need be; returns the last commit and its files."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    api = HfApi()

    def look(branch: str | None) -> Any:
        return api.repo_info(to.repository, repo_type=to.kind, revision=branch, timeout=ANSWER_SECONDS)

    try:
        info = look(None)
        if info.private != to.private:
            say(f"{to.page}: exists already and stays {'private' if info.private else 'public'}")
    except RepositoryNotFoundError:
        api.create_repo(to.repository, private=to.private, repo_type=to.kind, exist_ok=True)
        info = look(None)
    if to.branch != "main":
        try:
            info = look(to.branch)
        except RevisionNotFoundError:
            api.create_branch(to.repository, branch=to.branch, repo_type=to.kind, exist_ok=True)
            info = look(to.branch)
    return str(info.sha), {sibling.rfilename for sibling in info.siblings or []}


# Failures


def problem_of(error: BaseException) -> str:
    """What went wrong with an upload, and what to do; without the token, which no message of the client holds."""
    from huggingface_hub import constants
    from huggingface_hub.errors import OfflineModeIsEnabled

    cause = cause_of(error)
    file = re.search(r"Error while uploading '(.+?)'", str(error))
    which = f"{file[1]} could not be sent: " if file else ""
    status = status_of(cause)
    if status is not None:
        said = " ".join(str(getattr(cause, "server_message", None) or "").split())
        return which + _refusal(status, f"HTTP {status}" + (f": {said}" if said else ""))
    if isinstance(cause, OfflineModeIsEnabled):
        return f"{which}HF_HUB_OFFLINE forbids to reach the Hub; unset HF_HUB_OFFLINE"
    if is_wrong_form(error):
        return f"{which}the Hub's answer has not the form of one ({first_line(cause)}); try again later"
    if isinstance(cause, ValueError) and not isinstance(cause, json.JSONDecodeError):
        return f"{which}{' '.join(str(cause).split())}"
    return f"{which}the upload to {constants.ENDPOINT} failed ({first_line(cause)}); check the network"


def _refusal(status: int, answer: str) -> str:
    if status == 401:
        return f"the Hub does not know the token ({answer}); correct HF_TOKEN"
    if status == 403:
        return f"the token may not write there ({answer}); use one that may, or another repository"
    if status == 404:
        return f"the Hub has no such repository, or hides it from this token ({answer}); check the name and HF_TOKEN"
    if status in (409, 412):
        return f"somebody else changed the repository at the same time ({answer}); look at it, then upload again"
    if status == 413:
        return f"it is more than the Hub takes at once ({answer})"
    if status == 429:
        return f"the Hub gets too many requests from here ({answer}); wait some minutes"
    if status >= 500:
        return f"the Hub is in trouble ({answer}); try again later"
    return f"the Hub refuses it ({answer})"
