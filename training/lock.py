"""A lock file, which the system releases even if the process that holds it is killed."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

RUN_LOCK = ".lock"
"""Its name in the folder of a run, held by the process that trains it."""


_descriptors: dict[Path, int] = {}
"""Of the locks that this process holds."""


class BusyError(Exception):
    """Another process holds the lock."""


class RemovedError(Exception):
    """Another process held the lock and has removed its file: a third one could hold a new one."""


@contextmanager
def held(path: Path, seconds: float = 0.0) -> Iterator[None]:
    """Holds a lock file for this process; makes it if need be, and leaves it where it is.

    Args:
        path: the file.
        seconds: how long to wait for another process that holds it.

    Raises:
        BusyError: another process has it, also after the wait.
        RemovedError: another process had it, and removed the file.
        OSError: the file cannot be written, or its file system has no locks.
    """
    with path.open("a") as lock:
        deadline = time.monotonic() + seconds
        while not _taken(lock.fileno()):
            if time.monotonic() > deadline:
                raise BusyError
            time.sleep(0.1)
        try:
            same = os.path.samestat(os.fstat(lock.fileno()), path.stat())
        except OSError:
            same = False
        if not same:
            raise RemovedError
        _descriptors[path] = lock.fileno()
        try:
            yield
        finally:
            del _descriptors[path]


def is_lost(path: Path) -> bool:
    """Whether a lock that this process holds is no longer that of its file: the folder was removed, or another one.

    A process that does not hold it has not lost it.
    """
    descriptor = _descriptors.get(path)
    if descriptor is None:
        return False
    try:
        return not os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return True


def is_held(path: Path) -> bool:
    """Whether some process holds a lock file; False where there is none, or where it cannot be told."""
    try:
        with path.open("rb") as lock:
            return not _taken(lock.fileno(), fcntl.LOCK_SH)
    except OSError:
        return False


def _taken(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
