"""Training in processes of its own, started from here, which end with this one.

This is the side of whoever starts torchrun; launcher.py is that of the workers, which torchrun has started.
"""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from training.config import REPOSITORY
from training.errors import one_line

SET_SIGNAL_AT_PARENTS_END = 1
"""PR_SET_PDEATHSIG of Linux's prctl()."""


def training_command(run: str, datasets: Path, processes: int, *options: str) -> list[str]:
    """The command that trains a run, as a user would type it, with this Python; one process needs no torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes > 1 else []
    return [sys.executable, *launcher, str(REPOSITORY / "ddp_train.py"), run, str(datasets), *options]


@contextmanager
def started(command: Sequence[str], errors: int | IO[str]) -> Iterator["subprocess.Popen[str]"]:
    """A command that runs beside the block. The block must wait for it; if the block raises, it is ended.

    Args:
        command: as `training_command` makes it. Its output is dropped.
        errors: where its standard error goes, as for Popen.
    """
    quiet = subprocess.DEVNULL
    with subprocess.Popen(
        command, stdin=quiet, stdout=quiet, stderr=errors, text=True, preexec_fn=_end_with_parent()
    ) as process:
        try:
            yield process
        except BaseException:
            process.terminate()  # killed, torchrun could not end its workers; leaving `with` waits for it
            raise


def what_it_said(errors: str) -> str:
    """Of what a failed run wrote, the sentence that it ended with, or else the last line; empty if it wrote nothing."""
    lines = [line.strip() for line in reversed(errors.splitlines()) if line.strip()]
    return one_line(next((line for line in lines if line.startswith("error: ")), lines[0] if lines else ""))


def _end_with_parent() -> Callable[[], None] | None:
    """What a new process does first: if this one is killed, it is asked to end. Only Linux can; elsewhere nothing."""
    if sys.platform != "linux":
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def ask() -> None:
        prctl(SET_SIGNAL_AT_PARENTS_END, signal.SIGTERM)
        if os.getppid() != parent:  # it was killed before it could be asked about
            os._exit(1)

    return ask
