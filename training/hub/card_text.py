"""Text on a page of the Hub: what comes from files is escaped here, and a page is signed, so that edits are noticed."""

import hashlib
import re

from training.errors import one_line

SIGNATURE = "<!-- Written by isobatch, sha256 {}. Edited, the page is yours, and nothing replaces it unasked. -->"
SIGNED = re.compile(re.escape(SIGNATURE).replace(re.escape("{}"), "([0-9a-f]{64})") + "\n")
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
    front, rest = f"---\n{metadata}\n---\n", f"\n{text}\n"
    return f"{front}{SIGNATURE.format(_digest(front + rest))}\n{rest}"


def is_ours(content: bytes) -> bool:
    """Whether a page is one that `page` has made, and nobody has edited since."""
    text = content.decode("utf-8", errors="replace").replace("\r\n", "\n")
    match = SIGNED.search(text)
    return match is not None and match[1] == _digest(text[: match.start()] + text[match.end() :])


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
