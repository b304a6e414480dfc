"""Runs ddp_train.py on a slow machine: python tests/held_up.py RUN DATASETS ..."""

import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
SLOW_DISK = "slow disk"
"""While a file of this name is in the working folder, nothing gets to the disk."""
SLOW_READING = "slow reading"
"""While this one is there, a microbatch is read in a tenth of a second, in training and evaluations."""


def hold_up() -> None:
    """Makes this process depend on the two files."""
    from training.rows import Rows

    fsync, read = os.fsync, Rows.read

    def slow_fsync(descriptor: int) -> None:
        while Path(SLOW_DISK).exists():
            time.sleep(0.1)
        fsync(descriptor)

    def slow_read(rows: Rows, *arguments: Any) -> Any:
        if Path(SLOW_READING).exists():
            time.sleep(0.1)
        return read(rows, *arguments)

    os.fsync, Rows.read = slow_fsync, slow_read  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    sys.path.insert(0, str(REPOSITORY))
    hold_up()
    sys.argv[0] = str(REPOSITORY / "ddp_train.py")
    runpy.run_path(sys.argv[0], run_name="__main__")
