"""What a file is that cannot be read as what it should be: the usual ways in which another one takes its place."""

from pathlib import Path

BEGINNINGS = {
    b"version https://git-lfs.github.com/spec/": "it is a Git LFS pointer; `git lfs pull` fetches the file itself",
    b"<": "it is an HTML or XML page, as a failed download leaves one",
    b"\x80": "it is a pickle, which is never opened",
    b"PK\x03\x04": "it is a zip archive, as torch.save writes one; it is never opened",
}


def instead(path: Path) -> str:
    """What is there instead, in a few words with a semicolon before them; empty where that cannot be told."""
    try:
        if path.is_dir():
            return "; it is a folder"
        with path.open("rb") as file:
            beginning = file.read(64)
    except OSError:
        return ""
    if not beginning:
        return "; it is empty"
    found = [words for start, words in BEGINNINGS.items() if beginning.lstrip().startswith(start)]
    return f"; {found[0]}" if found else ""
