"""What a command shows while it works may be lost: a terminal is closed, a `tee` ended, a log's disk is full.

Whoever trains for days must not end for it, least of all before it has saved.
"""

import os
import sys
from contextlib import suppress
from typing import Any, TextIO


class Shown:
    """A text stream that drops what cannot be written, from the first failure on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes a text, or drops it."""
        try:
            return self._stream.write(text)
        except (OSError, ValueError):  # ValueError: it is closed
            self._give_up()
            return len(text)

    def flush(self) -> None:
        """Brings out what was written, or drops it."""
        try:
            self._stream.flush()
        except (OSError, ValueError):
            self._give_up()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _give_up(self) -> None:
        nowhere = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (for the rest of the process)
        with suppress(OSError, ValueError):  # for what libraries write to the descriptor itself, and at Python's end
            os.dup2(nowhere.fileno(), self._stream.fileno())
        self._stream = nowhere


def let_nothing_shown_end_the_command() -> None:
    """Makes of standard error a stream that never fails, and of closed standard streams such as lead nowhere."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest that is free: else a file that is opened later gets it
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if not isinstance(sys.stderr, Shown):
        sys.stderr = Shown(sys.stderr)
