"""Downloads datasets, tokenizers and models from the Hugging Face Hub, and says what its client's exceptions mean.

huggingface_hub is imported inside the functions, because importing it takes longer than `--help` should.
"""

import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from training.errors import RunError, UserError
from training.hub.hub_retry import (
    Result,
    cause_of,
    client_errors,
    failure_kind,
    is_unreachable,
    is_wrong_form,
    may_pass,
    patiently,
    to_stderr,
)
from training.json_file import parse_json
from training.preparation.dataset_files import staged_folder
from training.tokenizer import load_tokenizer

# The largest comes last: what else may go wrong has then gone wrong already.
DATASET_FILES = ("README.md", "dataset.json", "tokenizer.json", "validation.safetensors", "train.safetensors")
MODEL_FILES = ("config.json", "model.safetensors.index.json", "tokenizer.json", "vocab.json", "merges.txt")
# The client tries each address of the host this long. Four of them stay below the half minute that a run may
# take to say that the Hub cannot be reached.
ANSWER_SECONDS = 5.0


def download_dataset(name: str, revision: str | None, destination: Path) -> str:
    """Downloads the dataset repository `name` into the new folder `destination`.

    The revision is resolved first and every file taken from that one commit, so a push in the meantime cannot
    mix two versions. The folder appears when it is complete, with a download.json that records the commit.

    Args:
        name: The repository, `owner/name`.
        revision: A branch, a tag or a commit; None is the default branch.
        destination: The folder to make.

    Returns:
        The sha of the commit that lies in `destination`.

    Raises:
        UserError: naming the repository, what failed, and what to do.
    """
    what = f"dataset {name}"
    with staged_folder(destination, keep_other=True) as folder, hub_errors(what, revision):
        from huggingface_hub import HfApi, hf_hub_download

        check_token()
        info = _again(what, lambda: HfApi().dataset_info(name, revision=revision, timeout=ANSWER_SECONDS), first=True)
        commit = _commit_of(info, what)
        present = {sibling.rfilename for sibling in info.siblings or []}
        if "train.safetensors" not in present:
            raise UserError(
                f"dataset {name}: the repository has no train.safetensors, only "
                f"{', '.join(sorted(present)) or 'nothing'}; the token files must lie at its top; "
                "check data.dataset"
            )
        for file in filter(present.__contains__, DATASET_FILES):
            options = {"repo_type": "dataset", "revision": commit, "local_dir": str(folder)}
            _again(what, partial(hf_hub_download, name, file, **options))
        shutil.rmtree(folder / ".cache", ignore_errors=True)  # the client's notes
        record = {"repository": name, "revision": commit, "requested": revision}
        (folder / "download.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    # Not always ours: another process may have published first.
    return recorded_revision(destination) or commit


def download_tokenizer(repository: str, destination_file: Path) -> None:
    """Downloads the tokenizer.json of the model repository `repository` and puts it at `destination_file`.

    Raises:
        UserError: naming the repository, what failed, and what to do.
    """
    what = f"tokenizer {repository}"
    with hub_errors(what):
        from huggingface_hub import HfApi, hf_hub_download

        check_token()
        info = _again(what, lambda: HfApi().model_info(repository, timeout=ANSWER_SECONDS), first=True)
        if not any(sibling.rfilename == "tokenizer.json" for sibling in info.siblings or []):
            raise UserError(
                f"tokenizer {repository}: the repository has no tokenizer.json; no other format is read; "
                "set data.tokenizer to a repository that has one"
            )
        destination_file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=destination_file.parent, prefix=".tokenizer.partial-") as folder:
            path = _again(what, partial(hf_hub_download, repository, "tokenizer.json", local_dir=folder))
            try:
                load_tokenizer(Path(path))
            except UserError as error:
                raise UserError(
                    f"tokenizer {repository}: its tokenizer.json is none that tokenizers can read ({error.__cause__}); "
                    "it was not kept; choose another repository, or start again when it has been mended there"
                ) from error
            os.replace(path, destination_file)


def download_source_files(
    name: str, revision: str | None, choose: Callable[[list[str]], list[str]]
) -> tuple[str, list[tuple[str, Path]]]:
    """Downloads files of the dataset repository `name` into the client's cache, all of one commit.

    Offline, the commit and the files are those of the cache.

    Args:
        name: The repository, `owner/name`.
        revision: A branch, a tag or a commit; None is the default branch.
        choose: Picks from the names of all its files those to download.

    Returns:
        The sha of the commit; name and place of each file, in the order chosen.

    Raises:
        UserError: naming the repository, what failed, and what to do.
    """
    what = f"dataset {name}"
    with hub_errors(what, revision):
        from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download

        check_token()
        if constants.HF_HUB_OFFLINE:
            try:
                snapshot = Path(snapshot_download(name, repo_type="dataset", revision=revision, local_files_only=True))
            except FileNotFoundError as error:
                raise UserError(
                    f"dataset {name}: not on this machine, and HF_HUB_OFFLINE forbids to download it; unset "
                    "HF_HUB_OFFLINE"
                ) from error
            names = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file()]
            print(f"dataset {name}: HF_HUB_OFFLINE is set, using what is here of {snapshot.name}", file=sys.stderr)
            return snapshot.name, [(file, snapshot / file) for file in choose(names)]
        info = _again(what, lambda: HfApi().dataset_info(name, revision=revision, timeout=ANSWER_SECONDS), first=True)
        commit = _commit_of(info, what)
        chosen = choose([sibling.rfilename for sibling in info.siblings or []])
        options = {"repo_type": "dataset", "revision": commit}
        paths = [_again(what, partial(hf_hub_download, name, file, **options)) for file in chosen]
        if revision != commit:  # so that the cache knows, offline, which commit the branch or tag stands for
            _again(what, partial(hf_hub_download, name, chosen[0], repo_type="dataset", revision=revision))
        return commit, [(file, Path(path)) for file, path in zip(chosen, paths, strict=True)]


def download_model(repository: str, revision: str | None, destination: Path) -> str:
    """Downloads weights, config and tokenizer of the model repository `repository` into the folder `destination`.

    Args:
        repository: `owner/name`.
        revision: a branch, a tag or a commit; None is the default branch.
        destination: an existing folder.

    Returns:
        The sha of the commit that all files are from.

    Raises:
        UserError: naming the repository, what failed, and what to do; also where its only weights are pickled.
    """
    what = f"model {repository}"
    with hub_errors(what, revision):
        from huggingface_hub import HfApi, hf_hub_download

        check_token()
        info = _again(
            what, lambda: HfApi().model_info(repository, revision=revision, timeout=ANSWER_SECONDS), first=True
        )
        commit = _commit_of(info, what)
        present = sorted(sibling.rfilename for sibling in info.siblings or [])
        weights = [file for file in present if "/" not in file and file.endswith(".safetensors")]
        if "model.safetensors" in weights:
            weights = ["model.safetensors"]
        if not weights:
            raise UserError(
                f"model {repository}: the repository has no model.safetensors, only {', '.join(present) or 'nothing'}; "
                "pickled weights (.bin, .pt) are never read, as they may run code; choose a repository or a --revision "
                "with safetensors"
            )
        for file in (*filter(present.__contains__, MODEL_FILES), *weights):
            _again(what, partial(hf_hub_download, repository, file, revision=commit, local_dir=destination))
    return commit


def recorded_revision(folder: Path, wanted: str | None = None) -> str | None:
    """The commit that download_dataset got `folder` from; None if it was not downloaded.

    Args:
        folder: the dataset's.
        wanted: the commit it must be, or the branch or tag that must have been asked for.

    Raises:
        UserError: it is of another revision than the wanted one, or its download.json is damaged.
    """
    path = folder / "download.json"
    if not path.exists():
        return None
    try:
        record = parse_json(path.read_text(encoding="utf-8"))
        commit, asked_for = str(record["revision"]), record.get("requested")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path}: not a record of a download; it must hold a revision; remove {folder} to download it again"
        ) from error
    if wanted not in (None, commit, asked_for):
        raise UserError(
            f"{folder}: holds revision {commit}, but data.revision says {wanted}; "
            "remove the folder to download that one"
        )
    return commit


def check_token() -> None:
    """Refuses a token that no HTTP header can hold; the client's own message would print the token.

    Blanks and line ends around it do no harm: the client strips them, and ignores an empty token.
    """
    from huggingface_hub import get_token

    token = get_token()
    if token is not None and not (token.isascii() and token.isprintable() and " " not in token):
        raise UserError(
            "HF_TOKEN: the token holds a character that cannot be sent; a token is letters, digits and _; "
            "set it again, or unset it for a public repository"
        )


@contextlib.contextmanager
def hub_errors(what: str, revision: str | None = None) -> Iterator[None]:
    """Turns whatever the client raises into one sentence about `what`, which was to be downloaded.

    A RunError where the Hub or the network is in trouble, else a UserError.
    """
    try:
        yield
    except client_errors() as error:
        raise failure_kind(error)(f"{what}: {_problem(error, revision)}") from error


def _again(what: str, attempt: Callable[[], Result], first: bool = False) -> Result:
    """Tries part of a download until it works, or has failed for good.

    A Hub that cannot be reached at all at `first` is told at once: most often there is no network.
    """

    def passes(error: BaseException) -> bool:
        return may_pass(error) and not (first and is_unreachable(error))

    return patiently(attempt, lambda error: f"{what}: {_problem(error, None)}", to_stderr, passes)


def _commit_of(info: Any, what: str) -> str:
    """The sha of what the Hub tells about; an answer may lack it."""
    if not isinstance(info.sha, str):
        raise RunError(f"{what}: the Hub's answer names no commit; try again later")
    return info.sha


def _problem(error: Exception, revision: str | None) -> str:
    """What went wrong with a download, and what to do."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    cause = cause_of(error)
    if isinstance(cause, OfflineModeIsEnabled):
        return "not on this machine, and HF_HUB_OFFLINE forbids to download it; unset HF_HUB_OFFLINE"
    if isinstance(cause, GatedRepoError):
        return "the Hub lets in only those who accepted its terms; accept them on its page and set HF_TOKEN"
    if isinstance(cause, RepositoryNotFoundError):
        return "the Hub has no such repository, or it is private; check the name, or set HF_TOKEN"
    if isinstance(cause, RevisionNotFoundError):
        return f"the repository has no revision {revision!r}; check the revision"
    if isinstance(cause, EntryNotFoundError):
        return "the Hub lists a file that it does not have; tell the repository's owner"
    if is_wrong_form(error):
        return f"the Hub's answer has not the form of one ({first_line(cause)}); try again later"
    if isinstance(cause, HfHubHTTPError):
        return _refusal(cause.response.status_code)
    return (
        f"the download from {constants.ENDPOINT} failed ({first_line(cause)}); "
        "check the network and the disk, then start again"
    )


def _refusal(status: int) -> str:
    """What an HTTP status from the Hub means for the user."""
    if status in (401, 403):
        return f"the Hub refuses the token (HTTP {status}); correct HF_TOKEN, or unset it if all is public"
    if status == 429:
        return "the Hub gets too many requests from here (HTTP 429); wait some minutes, or set HF_TOKEN"
    if status == 404:
        return "the Hub has no such repository or revision (HTTP 404); check the name and the revision"
    if status >= 500:
        return f"the Hub answers with HTTP {status}; try again later"
    return f"the Hub refuses it (HTTP {status})"


def first_line(error: BaseException) -> str:
    """An exception's kind and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
