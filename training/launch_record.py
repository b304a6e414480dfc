"""Which torchruns have begun a run: recorded in its folder, so that one that starts its workers again is known."""

import os
from pathlib import Path

from training.launcher import note_begun

LAUNCH = ".launch"
"""The record's name in the folder of a run."""


def launch() -> str:
    """Names the torchrun that has started this process, if one has: the same for all its restarts, no other's.

    Its run id alone may be the next one's too (--rdzv-id), and so may its process id, in a container.
    """
    agent = os.getppid()
    return f"{os.environ.get('TORCHELASTIC_RUN_ID')} {agent} {_started(agent)}"


def begin_record(folder: Path) -> None:
    """Begins the record anew, with the torchrun of this process."""
    (folder / LAUNCH).write_text(launch() + "\n")


def begun_by_this_launch(folder: Path) -> bool:
    """Whether the torchrun that has started this process had begun the run itself, and so has restarted it.

    Its count of restarts does not tell where there are several nodes: each counts only those that it caused, and rank
    0's may have caused none. It has to help out only where the system does not tell one torchrun from the next.

    True on the nodes that see the run's folder: if one is lost, rank 0 is on another.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or not (folder / LAUNCH).is_file():
        return False
    tells = bool(_started(os.getppid())) or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    return tells and launch() in (folder / LAUNCH).read_text().splitlines()


def note_launch(folder: Path) -> None:
    """Adds the torchrun of this node to those that have begun the run; one process of each node does this."""
    note_begun()
    if (folder / LAUNCH).is_file() and not begun_by_this_launch(folder):
        with (folder / LAUNCH).open("a") as file:
            file.write(launch() + "\n")


def _started(process_id: int) -> str:
    """When a process has started: the system's current boot, and clock ticks since; empty but on Linux."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # The program's name, in parentheses, may hold blanks; the start is the 22nd word, of proc(5).
        return f"{boot} {Path(f'/proc/{process_id}/stat').read_text().rpartition(')')[2].split()[19]}"
    except OSError:
        return ""
