"""What a dataset is made from: files on this machine or on the Hub, of text, JSON lines or Parquet."""

import fnmatch
import importlib.util
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from training.errors import UserError, one_line
from training.file_digest import file_digest

FORMATS = {
    **dict.fromkeys((".txt", ".text", ".md"), "text"),
    **dict.fromkeys((".jsonl", ".jsonlines", ".json-lines", ".ndjson", ".json"), "JSON lines"),
    ".parquet": "Parquet",
}
NOT_OF_A_FOLDER = ".json"
"""Read as JSON lines where it is named, but passed over in folders, where it is rather a description."""
COMPRESSIONS = (".gz", ".zst")
READABLE = ".txt, .text or .md, .jsonl, .jsonlines or .ndjson, .parquet; all but the last also with .gz or .zst behind"
PACKAGES = {"Parquet": "pyarrow", ".zst": "zstandard"}
"""That a format or a compression needs."""
POINTER = re.compile(rb"version https://git-lfs\.github\.com/spec/v1\r?\n[^\0]*oid sha256:[0-9a-f]{64}\s+size \d+\s*")
"""What git-lfs leaves in the place of a file (its docs/spec.md), in at most 1024 bytes."""


@dataclass(frozen=True)
class SourceFile:
    """A file to read documents from."""

    path: Path
    name: str
    """As it is recorded: relative to the folder or repository that was named."""

    @property
    def format(self) -> str:
        """A value of FORMATS; text where the suffix says nothing, of a file that a pattern has named by it."""
        return FORMATS.get(_suffixes(self.name)[0], "text")

    @property
    def compression(self) -> str:
        """One of COMPRESSIONS, or nothing."""
        return _suffixes(self.name)[1]

    @property
    def label(self) -> str:
        """Its path, as messages name it."""
        return one_line(self.path)

    @property
    def state(self) -> list[str | int]:
        """Path, size and time of the last change: whether it is still the same file."""
        status = self.path.stat()
        return [str(self.path.resolve()), status.st_size, status.st_mtime_ns]


@dataclass(frozen=True)
class Source:
    """What one SOURCE stands for."""

    files: tuple[SourceFile, ...]
    repository: str | None = None
    """owner/name of a dataset on the Hub."""
    revision: str | None = None
    """Its commit."""

    @property
    def state(self) -> list[Any]:
        """What tells whether it is still the same: a commit is, as long as it has that name."""
        if self.repository is None:
            return [file.state for file in self.files]
        return [self.repository, self.revision, [file.name for file in self.files]]

    @property
    def description(self) -> list[dict[str, Any]]:
        """Its entries in dataset.json."""
        if self.repository is None:
            return [
                {"file": file.name, "bytes": file.path.stat().st_size, "sha256": file_digest(file.path)}
                for file in self.files
            ]
        files = [file.name for file in self.files]
        return [{"repository": self.repository, "revision": self.revision, "files": files}]


def find_sources(sources: Sequence[str], revision: str | None, patterns: Sequence[str]) -> list[Source]:
    """Finds what the user named, and downloads what lies on the Hub.

    What exists on this machine is a path; of a folder, all files of known formats are taken, ordered by their path.
    Else `owner/name` is a dataset repository on the Hub.

    Args:
        sources: as the user named them.
        revision: a branch, a tag or a commit of the repositories among them.
        patterns: which files of folders and repositories to take, as `data/*.parquet`; none = all of known formats.

    Raises:
        UserError: naming the source, and what it should be.
    """
    found = [_find(source, revision, patterns) for source in sources]
    if patterns and all(os.path.isfile(source) for source in sources):
        raise UserError("--files: chooses in folders and repositories, but all sources are files here; leave it out")
    if revision is not None and all(source.repository is None for source in found):
        raise UserError("--revision: is one of a dataset on the Hub, but all sources are files here; leave it out")
    times = Counter(file.path.resolve() for source in found for file in source.files)
    for path in [path for path, count in times.items() if count > 1][:1]:
        print(f"{one_line(path)}: is read more than once, as it is named twice or linked to", file=sys.stderr)
    return found


def _find(source: str, revision: str | None, patterns: Sequence[str]) -> Source:
    path, said = Path(source), one_line(source)
    # Not pathlib's questions, which a name too long for any file would end.
    if os.path.isdir(source):
        chosen = choose_files(source, list(_files_of(path)), patterns)
        return Source(_checked(SourceFile(path / name, name) for name in chosen))
    if os.path.exists(source):
        if not _suffixes(path.name)[0]:
            raise UserError(f"{said}: is of no format that is known here; read are {READABLE}; convert or rename it")
        _check_packages([source])
        return Source(_checked([SourceFile(path, path.name)]))
    from training.config import repository_problem  # imports torch

    if not repository_problem(source) and not _suffixes(source)[0]:
        from training.hub.hub_client import download_source_files

        commit, files = download_source_files(source, revision, lambda names: choose_files(source, names, patterns))
        return Source(_checked(SourceFile(file, name) for name, file in files), source, commit)
    raise UserError(
        f"{said or 'SOURCE'}: there is no such file or folder, and it is no name of a dataset on the Hub, which "
        "would be owner/name; correct it"
    )


def _files_of(folder: Path) -> Iterator[str]:
    """Paths in a folder of all that may be a file, but for hidden folders; refuses what would be left out silently."""

    def refuse(error: OSError) -> None:
        raise UserError(
            f"{one_line(error.filename)}: cannot be looked into ({error.strerror}); its files would be left out; "
            "allow it, or name as sources what to read beside it"
        )

    for place, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        links = [name for name in folders if os.path.islink(os.path.join(place, name))]
        if links:
            raise UserError(
                f"{one_line(os.path.join(place, links[0]))}: is a link to a folder, which is not followed; its "
                "files would be left out; name that folder as a source of its own, and those beside the link"
            )
        yield from (Path(place, name).relative_to(folder).as_posix() for name in files)


def _checked(files: Iterable[SourceFile]) -> tuple[SourceFile, ...]:
    """Refuses what is no file with documents, before hours go into the files before it."""
    found = tuple(files)
    for file in found:
        if not os.path.isfile(file.path):
            raise UserError(
                f"{file.label}: is no file that can be read, but a pipe, a device, a link that leads nowhere or "
                "something hidden from you; it must be a file, as it may be read twice; put one there, or choose others"
            )
        if is_pointer(file.path):
            raise UserError(
                f"{file.label}: is not the file itself but git-lfs's pointer to it; fetch the file with git lfs pull, "
                "or choose others with --files"
            )
    return found


def is_pointer(path: Path) -> bool:
    """Whether a file is what git-lfs leaves in the place of another one."""
    try:
        return path.stat().st_size <= 1024 and POINTER.fullmatch(path.read_bytes()) is not None
    except OSError:  # said where it is read
        return False


def choose_files(source: str, names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Those of a folder's or repository's files that can be read and match a pattern, ordered.

    Raises:
        UserError: there is none, and it names some that there are; or a package is missing that one needs.
    """
    visible = [name for name in names if not any(part.startswith(".") for part in name.split("/"))]
    readable = [name for name in visible if _suffixes(name)[0] not in ("", NOT_OF_A_FOLDER)]
    # A repository's card is not what it is about.
    readable = [name for name in readable if PurePosixPath(name).name.lower() != "readme.md"]
    chosen = readable
    if patterns:
        chosen = [name for name in visible if any(_is_chosen(name, pattern) for pattern in patterns)]
    if not chosen:
        which = f"no file that matches {' or '.join(patterns)} and can be read" if patterns else "no file to read"
        some = ", ".join(map(one_line, sorted(visible)[:5])) or "nothing"
        raise UserError(
            f"{one_line(source)}: has {which}, only {some}; read are {READABLE}; name other files with --files"
        )
    _check_packages(chosen)
    return sorted(chosen)


def _is_chosen(name: str, pattern: str) -> bool:
    """Whether a pattern means a file: of a known format, or of one that it names, as `*.py`, which then is text."""
    suffix = PurePosixPath(name).suffix
    known = _suffixes(name)[0] or (suffix not in ("", *COMPRESSIONS) and PurePosixPath(pattern).suffix == suffix)
    return bool(known) and fnmatch.fnmatchcase(name, pattern)


def _check_packages(names: Sequence[str]) -> None:
    """Refuses a file that needs a package which is missing, before hours go into the files before it."""
    for name in names:
        suffix, compression = _suffixes(name)
        package = PACKAGES.get(compression or FORMATS.get(suffix, "text"))
        if package and importlib.util.find_spec(package) is None:
            raise UserError(f"{one_line(name)}: needs the package {package}; install it with: pip install -e '.[data]'")


def _suffixes(name: str) -> tuple[str, str]:
    """Format and compression of a file's name; both empty where the format is not known."""
    suffixes = [suffix.lower() for suffix in PurePosixPath(name).suffixes]
    compression = suffixes.pop() if suffixes and suffixes[-1] in COMPRESSIONS else ""
    suffix = suffixes[-1] if suffixes else ""
    if suffix not in FORMATS or (compression and FORMATS[suffix] == "Parquet"):
        return "", ""
    return suffix, compression
