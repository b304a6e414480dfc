"""Names of what is being written, one for each process, and the removal of what killed ones have left."""

import contextlib
import os
import re
import shutil
import socket
from pathlib import Path


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
        if match is None or _is_running(int(match[1])):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()


def _is_running(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)  # signal 0 only asks
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):  # another user's, or no process id
        return True
    return True
