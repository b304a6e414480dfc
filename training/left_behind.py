"""Names of what is being written, one for each process, and the removal of what killed ones have left."""

import contextlib
import os
import re
import shutil
import socket
import time
from pathlib import Path

SECONDS_OF_SILENCE = 3600.0
"""After which nobody writes any more."""


def partial_path(output: Path) -> Path:
    """Where this process writes what is to become `output`; the same form as of dataset_files.staged_folder."""
    # The host is part of the name because a process id says nothing on another node of a shared disk.
    return output.with_name(f".{output.name}.partial-{socket.gethostname()}-{os.getpid()}")


def remove_left_behind(folder: Path) -> None:
    """Removes what processes of this machine that no longer run have left half written in a folder.

    Whatever it was to become: a whole model, which nobody else would ever remove.
    """
    ours = re.compile(rf"\..+\.partial-{re.escape(socket.gethostname())}-(\d+)")
    try:
        entries = list(folder.iterdir())
    except OSError:  # whoever writes there will be told
        return
    for path in entries:
        match = ours.fullmatch(path.name)
        if match is None or not is_left_behind(path, match[1]):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()


def is_left_behind(path: Path, process_id: str) -> bool:
    """Whether what a process of this machine was writing is not written any more.

    The process must be gone and have been silent for an hour: containers may share a host's name and a folder, but do
    not see each other's processes.
    """
    return not is_running(process_id) and time.time() - _last_written(path) > SECONDS_OF_SILENCE


def _last_written(path: Path) -> float:
    """When anything in it was, in seconds since 1970."""
    latest = 0.0
    for part in (path, *path.rglob("*")):
        with contextlib.suppress(FileNotFoundError):  # it has just been renamed
            latest = max(latest, part.lstat().st_mtime)
    return latest


def is_running(process_id: str | int) -> bool:
    """Whether a process of this machine is there; also where it cannot be known."""
    try:
        os.kill(int(process_id), 0)  # signal 0 only asks
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError, ValueError):  # another user's, or no process id
        return True
    return True
