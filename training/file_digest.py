"""The digest by which a file is known: in manifests, descriptions of datasets and records of runs."""

import hashlib
from pathlib import Path


def file_digest(path: Path) -> str:
    """The sha256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
