"""Signals that ask a run to stop: all ranks finish the step they are at, save, and leave together.

Python's own handlers run in the main thread, between two lines of Python: late, where that waits in a collective or for
rank 0 to save. So the system's handler writes the signal's number into a socket, and a thread reads it there.
"""

import os
import signal
import socket
import sys
import threading
import time
from types import TracebackType
from typing import Any, Never, Self

import torch

from training.distributed import Group, is_loss, lost_text
from training.errors import InterruptionError
from training.launcher import is_news
from training.left_behind import is_running

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
SECONDS_OF_THE_SAME = 2.0
"""A signal so soon after the first is the same once more: Ctrl-C may reach a worker directly, and through torchrun."""
SECONDS_BETWEEN_QUESTIONS = 1.0
SECONDS_BETWEEN_LOOKS = 0.2
HIGHEST_SIGNAL = 128
SECONDS_TO_GO = 1.0


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
        self._is_saving = self._agreed = False
        self._heard = False
        self._asked = -SECONDS_BETWEEN_QUESTIONS
        self._siblings: list[int] = []
        self._telling = threading.Lock()
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
        if error is not None and is_loss(error) and self._siblings_go():
            self._leave_the_others()
        if not isinstance(error, InterruptionError):
            self.end()
        if self.requested and error is None:
            signal.raise_signal(self._number)  # it came after the last time that the ranks asked each other

    def _siblings_go(self) -> bool:
        """Whether a rank of this node has ended or does so within a second: its connections are closed before it is."""
        deadline = time.monotonic() + SECONDS_TO_GO
        while not self._lost():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

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
        self._agreed, self._is_saving = True, self._group.process.is_main

    def first_signal(self) -> dict[str, Any]:
        """The name of the signal and the lowest rank that got one, for the record. Every rank must call this."""
        process = self._group.process
        own = (process.world_size - process.rank) * HIGHEST_SIGNAL + self._number if self.requested else 0
        from_end, number = divmod(int(self._group.maximum(torch.tensor(own, device=process.device))), HIGHEST_SIGNAL)
        return {"signal": signal.Signals(number).name, "rank": process.world_size - from_end} if number else {}

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
                if not self._is_saving and self._lost():
                    self._leave_the_others()

    def _lost(self) -> list[int]:
        """The local ranks of this node that have ended."""
        return [rank for rank, process_id in enumerate(self._siblings) if not is_running(process_id)]

    def _leave_the_others(self) -> Never:
        """Ends this process, as another has ended; the first that is left says so, unless the run was about to end."""
        process, lost = self._group.process, self._lost()
        own = process.local_rank == min(set(range(len(self._siblings))) - set(lost), default=0)
        with self._telling:
            if own and not self._agreed and is_news(f"lost at start {os.environ.get('TORCHELASTIC_RESTART_COUNT')}"):
                who = f"rank {process.rank - process.local_rank + lost[0]}"
                print(f"error: {lost_text(who)}", file=sys.stderr, flush=True)
            os._exit(1)
