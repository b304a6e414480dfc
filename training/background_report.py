"""Keeps report.md and the charts up to date while a run trains, in a process of its own: drawing takes a second or two.

This file is also the program of that process:  python -m training.background_report RUN_FOLDER
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import training.launcher
from training.report import write_report

SECONDS_BETWEEN = 30.0
"""At least, from one report to the next, and from the run's start to the first."""
SECONDS_TO_END = 5.0
MOST_SAID = 4000
"""Bytes of a failed process's last words that are looked at."""
HOME = Path(__file__).resolve().parent.parent
"""Where the program is found. training.config knows it too, but with PyTorch, which drawing does without."""


class BackgroundReport:
    """Writes a run's report again when it is asked to, one at a time and not too often; never stops training."""

    def __init__(self, run_folder: Path, say: Callable[[str], None]) -> None:
        """For the run in a folder; `say` prints a line."""
        self._folder, self._say = run_folder, say
        self._began = time.monotonic()
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        """What the process writes to: a file, as nobody reads a pipe while it runs, and a full one would stop it."""
        self._has_failed = False

    def refresh(self) -> None:
        """Starts to write the report, unless that goes on or has just been done."""
        if self._process is not None and self._process.poll() is None:
            return
        self._collect()
        if time.monotonic() - self._began < SECONDS_BETWEEN:
            return
        self._began = time.monotonic()
        try:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (_collect closes it)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "training.background_report", self._folder.resolve()],
                cwd=HOME,
                process_group=0,  # Ctrl-C is for training, which ends it
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
            )
        except OSError as error:
            self._collect()
            self._fail(str(error))

    def close(self) -> None:
        """Ends what is being written: at the end of a run a whole report follows."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        self._collect()

    def _collect(self) -> None:
        """Says what has gone wrong in a process that has ended, if it has not been ended from here."""
        process, self._process = self._process, None
        errors, self._errors = self._errors, None
        if errors is None:
            return
        with errors:
            if process is None or process.wait() == 0:
                return
            errors.seek(max(0, errors.seek(0, os.SEEK_END) - MOST_SAID))
            said = errors.read().decode(errors="replace").strip()
            self._fail(said.rpartition("\n")[2] or f"exit status {process.returncode}")

    def _fail(self, reason: str) -> None:
        if not self._has_failed:
            self._say(f"{self._folder}: report.md could not be written again, training goes on: {reason}")
        self._has_failed = True


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no half-written file stays
    training.launcher.leave_with_launcher()
    os.nice(10)
    write_report(Path(sys.argv[1]))
