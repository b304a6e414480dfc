"""Uploads files to the Hugging Face Hub in one commit, and tells beforehand whether that will be allowed.

huggingface_hub is imported inside the functions, because importing it takes longer than `--help` should.
"""

import contextlib
import json
import logging
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from training.errors import RunError, UserError
from training.hub import ANSWER_SECONDS, check_token, client_errors, first_line

WAITS = (2.0, 8.0, 30.0, 60.0)
"""Seconds before each further attempt; the client itself has by then tried most requests six times in 23 seconds."""
LONGEST_WAIT = 330.0  # the Hub counts requests per five minutes
SILENCE_SECONDS = 120.0
READERS = ("read", "no_access")  # roles in an organisation
TOKEN_PAGE = "https://huggingface.co/settings/tokens"
LICENCE_PAGE = "https://huggingface.co/docs/hub/repositories-licenses"

Say = Callable[[str], None]


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


# Before


def check_access(repository: str, named: str, licence: str | None = None) -> None:
    """Checks, before any work is done, that there is a Hub, and a token that may write to `repository` there.

    Args:
        repository: `owner/name`.
        named: the key or option that names it, for the message.
        licence: that the page will name; the Hub decides which ones there are.

    Raises:
        UserError: there is no token, or it may not write there, the Hub cannot be reached, or knows no such licence.
    """
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    if get_token() is None:
        raise UserError(
            f"{named}: there is no token to upload to {repository} with; set HF_TOKEN to one that may write "
            f"({TOKEN_PAGE}), or log in with `hf auth login`"
        )
    check_token()
    try:
        answer = get_session().get(
            f"{constants.ENDPOINT}/api/whoami-v2", headers=build_hf_headers(), timeout=ANSWER_SECONDS
        )
        hf_raise_for_status(answer)
        problem = _problem_of_account(answer.json(), repository)
        if licence is not None and problem is None:
            problem = _problem_of_licence(licence)
    except client_errors() as error:
        unknown = isinstance(error, HfHubHTTPError) and error.response.status_code == 401
        problem = f"HF_TOKEN: {problem_of(error)}" if unknown else problem_of(error)
    if problem:
        raise UserError(f"{named}: {repository}: {problem}")


def _problem_of_account(account: dict[str, Any], repository: str) -> str | None:
    """Why the account behind a token may not write to a repository, as far as the Hub's answer tells."""
    owner, _, _ = repository.partition("/")
    token = (account.get("auth") or {}).get("accessToken") or {}
    remedy = f"make one that may at {TOKEN_PAGE} and set HF_TOKEN to it"
    if token.get("role") == "read":
        return f"the token in HF_TOKEN may only read; {remedy}"
    roles = {entry.get("name"): entry.get("roleInOrg") for entry in account.get("orgs") or []}
    if owner != account.get("name") and owner not in roles:
        writable = [name for name, role in roles.items() if role not in READERS]
        mine = ", ".join(sorted(map(str, [account.get("name"), *writable])))
        return f"the token in HF_TOKEN is {account.get('name')}'s, who may not write to {owner}, but to: {mine}"
    if roles.get(owner) in READERS:
        return (
            f"{account.get('name')} may only read in the organisation {owner}; ask its administrators, or use another"
        )
    scopes = (token.get("fineGrained") or {}).get("scoped")
    if token.get("role") == "fineGrained" and scopes is not None:
        granted = [
            permission
            for scope in scopes
            if (scope.get("entity") or {}).get("name") in (owner, repository)
            for permission in scope.get("permissions") or []
        ]
        if "repo.write" not in granted:
            return f"the fine-grained token in HF_TOKEN has no write permission for {owner}; {remedy}"
    return None


def _problem_of_licence(licence: str) -> str | None:
    """Asks the Hub about a page with this licence: an unknown one would only be refused with the upload."""
    from huggingface_hub import ModelCard

    try:
        ModelCard(f"---\nlicense: {licence}\n---\n").validate()
    except ValueError:
        return f"the Hub knows no licence {licence!r}; {LICENCE_PAGE} lists their names"
    return None


# The upload


def files_of(folder: Path) -> dict[str, Path]:
    """A folder's files by their names in a repository; hidden ones are left out."""
    return {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    }


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
        stale: others that are removed in the same commit, where they are there; None = all others.

    Returns:
        The sha of the commit; of the last one where nothing had to be changed.

    Raises:
        RunError: it failed for good.
    """
    tell: Say = say or (lambda _line: None)
    size = sum(path.stat().st_size for path in files.values())
    tell(f"uploading {len(files)} files ({size / 1e6:,.1f} MB) to {to.page}")
    for wait in (*WAITS, None):
        try:
            with _progress_bars(shown=say is not None):
                return _upload(files, to, title, tell, stale)
        except client_errors() as error:
            problem = f"{to.repository}: {problem_of(error)}"
            if wait is None or not may_pass(error):
                raise RunError(problem) from error
            pause = max(wait, min(_asked_to_wait(error), LONGEST_WAIT))
            tell(f"{problem}; trying again in {pause:.0f} s")
            time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


@contextlib.contextmanager
def _progress_bars(shown: bool) -> Iterator[None]:
    """Lets the client show its bars, which it does on a terminal, or not."""
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
    removed = (present if stale is None else present & set(stale)) - files.keys() - {".gitattributes"}
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


def may_pass(error: BaseException) -> bool:
    """Whether the same request may succeed a little later."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    cause = _cause(error)
    status = _status(cause)
    if status is not None:
        return status in (408, 429) or status >= 500
    if isinstance(cause, OfflineModeIsEnabled):
        return False
    network = (HfHubHTTPError.__bases__[0], ConnectionError, TimeoutError)
    # A page of HTML where the client expects JSON comes from a proxy, or from a Hub in trouble; a RuntimeError of
    # unknown cause is Xet's.
    return isinstance(cause, (*network, json.JSONDecodeError, RuntimeError))


def problem_of(error: BaseException) -> str:
    """What went wrong with an upload, and what to do; without the token, which no message of the client holds."""
    from huggingface_hub import constants
    from huggingface_hub.errors import OfflineModeIsEnabled

    cause = _cause(error)
    file = re.search(r"Error while uploading '(.+?)'", str(error))
    which = f"{file[1]} could not be sent: " if file else ""
    status = _status(cause)
    if status is not None:
        said = " ".join(str(getattr(cause, "server_message", None) or "").split())
        return which + _refusal(status, f"HTTP {status}" + (f": {said}" if said else ""))
    if isinstance(cause, OfflineModeIsEnabled):
        return f"{which}HF_HUB_OFFLINE forbids to reach the Hub; unset HF_HUB_OFFLINE"
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


def _cause(error: BaseException) -> BaseException:
    """The client wraps the failure of a large file in a RuntimeError."""
    return error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error


def _status(error: BaseException) -> int | None:
    """The HTTP status behind an exception, if the Hub has answered."""
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, HfHubHTTPError):
        return int(error.response.status_code)
    in_text = re.search(r"HTTP status (?:client|server) error \((\d{3})", str(error))  # of Xet's own client
    return int(in_text[1]) if in_text else None


def _asked_to_wait(error: BaseException) -> float:
    """Seconds that the Hub asks for: `Retry-After: 7`, or `RateLimit: "api";r=0;t=55`."""
    from huggingface_hub.errors import HfHubHTTPError

    cause = _cause(error)
    if not isinstance(cause, HfHubHTTPError):
        return 0.0
    asked = re.search(r"t=(\d+)", cause.response.headers.get("RateLimit", ""))
    seconds = cause.response.headers.get("Retry-After", "") or (asked[1] if asked else "0")
    return float(seconds) if seconds.isdecimal() else 0.0
