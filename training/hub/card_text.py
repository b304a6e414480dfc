"""Text on a page of the Hub: what comes from files is escaped here, and a page is signed, so that edits are noticed."""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path

from training.errors import one_line
from training.file_digest import file_digest

PAGE = "README.md"

SIGNATURE = "<!-- Written by isobatch, sha256 {}. Edited, the page is yours, and nothing replaces it unasked. -->"
SIGNED = re.compile(re.escape(SIGNATURE).replace(re.escape("{}"), "([0-9a-f]{64})") + "\n")
LIST = "<!-- The files that were uploaded with it, git's oid and sha256: {} -->"
LISTED = re.compile(re.escape(LIST).replace(re.escape("{}"), "({.*})"))
LARGEST_OF_GIT = 2**24  # bytes; above, the Hub knows a file by its sha256 alone
REPOSITORY_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)


def escaped(text: object) -> str:
    """A foreign text as Markdown that shows it as it is, in one line; tables escape their own separator."""
    return re.sub(r"([\\`*_\[\]<>&#~$])", r"\\\1", one_line(text))


def code(text: object) -> str:
    """A foreign text as code in a line."""
    line = one_line(text)
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", line)), default=0))
    blank = " " if len(fence) > 1 else ""
    return f"{fence}{blank}{line}{blank}{fence}"


def linked(repository: object, folder: str = "") -> str:
    """A link to a repository on the Hub; what is no name of one is code."""
    if not REPOSITORY_ID.fullmatch(str(repository)):
        return code(repository)
    return f"[{escaped(repository)}](https://huggingface.co/{folder}{repository})"


def page(metadata: str, text: str) -> str:
    """A page of metadata in YAML and text in Markdown, signed."""
    return _signed(f"---\n{metadata}\n---\n", f"\n{text}\n")


def with_files(page: str, files: Mapping[str, Path]) -> str:
    """A signed page that lists in a comment what is uploaded with it, by the names in the repository, signed anew."""
    match = SIGNED.search(page)
    assert match is not None, "it was signed"
    listed = json.dumps({name: digests(path) for name, path in sorted(files.items())})
    return _signed(page[: match.start()], f"{page[match.end() :]}\n{LIST.format(listed)}\n")


def listed_files(page: bytes) -> dict[str, list[str]] | None:
    """What came with a page of ours: digests by name; None, where it was written before there were lists."""
    found = LISTED.findall(page.decode("utf-8", errors="replace"))
    return json.loads(found[-1]) if found else None


def digests(path: Path) -> list[str]:
    """By what the Hub knows a file: git's oid, or "" of a large one, and sha256."""
    content = path.read_bytes() if path.stat().st_size <= LARGEST_OF_GIT else None
    oid = "" if content is None else hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    return [oid, file_digest(path)]


def is_ours(content: bytes) -> bool:
    """Whether a page is one that `page` has made, and nobody has edited since."""
    text = content.decode("utf-8", errors="replace").replace("\r\n", "\n")
    match = SIGNED.search(text)
    return match is not None and match[1] == _digest(text[: match.start()] + text[match.end() :])


def _signed(front: str, rest: str) -> str:
    return f"{front}{SIGNATURE.format(_digest(front + rest))}\n{rest}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
