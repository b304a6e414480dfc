"""Signals that ask a run to stop: all ranks finish the step they are at, save, and leave together.

Python's own handlers run in the main thread, between two lines of Python: late, where that waits in a collective or for
rank 0 to save. So the system's handler writes the signal's number into a socket, and a thread reads it there.
"""

import os
import signal
import socket
import threading
import time
from types import TracebackType
from typing import Any, Self

from training.distributed import Group
from training.errors import InterruptionError
from training.left_behind import is_running

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
SECONDS_OF_THE_SAME = 2.0
"""A signal so soon after the first is the same once more: Ctrl-C may reach a worker directly, and through torchrun."""
SECONDS_BETWEEN_QUESTIONS = 1.0
SECONDS_BETWEEN_LOOKS = 0.2


class Interruption:
    """What signals ask of this process within a `with` block, in which a run trains. Every rank must enter.

    The first signal is a wish, `requested`, for the ranks to agree on. A further one ends this process at once; and so
    does a rank of this node that has ended before they agreed: the signal was torchrun's, which ends the others then.
    After the block signals do what they did before, unless an InterruptionError leaves it: the process is about to end.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self.requested = False
        """Whether this process was asked to stop."""
        self._number = 0
        self._is_saving = False
        self._heard = False
        self._asked = -SECONDS_BETWEEN_QUESTIONS
        self._siblings: list[int] = []
        self._before: dict[int, Any] = {}
        self._signals: socket.socket | None = None

    def __enter__(self) -> Self:
        self._siblings = self._group.process_ids()
        if threading.current_thread() is not threading.main_thread():
            return self  # Python gives signals to the main thread alone
        numbers, self._signals = socket.socketpair()
        self._signals.setblocking(False)
        signal.set_wakeup_fd(self._signals.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(numbers,), name="signal-watch", daemon=True).start()
        for number in SIGNALS:
            # What nohup ignores stays so. torchrun handles it all the same, sends it on, and waits for an answer.
            if signal.getsignal(number) is not signal.SIG_IGN or self._group.process.is_launched:
                self._before[number] = signal.signal(number, lambda *_: None)
                signal.siginterrupt(number, False)
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if not isinstance(error, InterruptionError):
            self.end()
        if self.requested and error is None:
            signal.raise_signal(self._number)  # it came after the last time that the ranks asked each other

    def end(self) -> None:
        """Lets signals do again what they did before."""
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before.clear()
        if self._signals is not None:
            signal.set_wakeup_fd(-1)
            self._signals.close()

    def agreed(self) -> None:
        """Says that all ranks know of the wish: what is left to rank 0, to save, needs none of the others."""
        self._is_saving = self._group.process.is_main

    def heard(self) -> bool:
        """Whether this process or another was asked to stop, which is heard within a second; for long evaluations."""
        if self.requested and not self._heard:
            self._group.store.set("interrupted", "")
            self._heard = True
        elif not self._heard and time.monotonic() - self._asked >= SECONDS_BETWEEN_QUESTIONS:
            self._heard = self._group.store.check(["interrupted"])
            self._asked = time.monotonic()
        return self._heard

    def _watch(self, numbers: socket.socket) -> None:
        first = 0.0
        with numbers:
            while True:
                try:
                    received = numbers.recv(1)
                    if not received:
                        return
                    if received[0] not in SIGNALS:  # one that a library or a debugger handles
                        continue
                    self._number = received[0]
                    if not self.requested:
                        first = time.monotonic()
                        numbers.settimeout(SECONDS_BETWEEN_LOOKS)
                        self.requested = True
                    elif time.monotonic() - first >= SECONDS_OF_THE_SAME:
                        os._exit(128 + self._number)
                except TimeoutError:
                    pass
                if not self._is_saving and not all(map(is_running, self._siblings)):
                    os._exit(1)
