"""How the processes of a run find each other, and wait for another machine, at torchrun's store.

Nobody waits with a clock that ends the run while another one works. But torchrun tells no machine that another has
ended, so who waits must find out.
"""

import secrets
import threading
import time
from contextlib import suppress
from typing import Protocol

from training.errors import RunError

SECONDS_TO_START = 600.0
"""Within which all processes have come, once the launchers have found each other."""
SECONDS_OF_SILENCE = 120.0
"""After which another machine that is waited for is given up."""
SECONDS_BETWEEN_SIGNS = 5.0
"""In which each machine says that it is there."""
LONGEST_PAUSE = 0.2
"""Seconds between two looks at the store, which all processes look at."""


class Store(Protocol):
    """What is needed of a torch.distributed.Store."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def add(self, key: str, amount: int, /) -> int: ...


class LostError(RunError):
    """Another process of the run is gone, or does not answer; not all processes know of it."""


def agreed_name(store: Store, rank: int, world_size: int) -> str:
    """A name that the ranks running now agree on, and none of those before a restart has used.

    torchrun's agents keep their store when they start the workers again, so what an ended rank 0 has left there would
    answer for the new one. No variable tells the starts apart: agents count only the restarts that they began.
    Every rank must call this.

    Args:
        store: of the launcher.
        rank: this process's.
        world_size: ranks that must agree.

    Raises:
        RunError: not all of them have come in SECONDS_TO_START; torchrun tells nobody that another machine's ended.
    """
    own, deadline = secrets.token_hex(8), time.monotonic() + SECONDS_TO_START
    if rank > 0:
        store.set(f"asks/{rank}", own)
        while not store.check([f"name for {own}"]):  # only a rank 0 that has read `own` writes this
            _give_up_after(deadline, "rank 0")
        name = store.get(f"name for {own}").decode()
        store.set(f"{name}/has/{rank}", "")
        return name
    waiting = set(range(1, world_size))
    while waiting:
        for other in waiting:
            if store.check([f"asks/{other}"]):  # may be what an ended process has left: asked again until it is not
                store.set(f"name for {store.get(f'asks/{other}').decode()}", own)
        waiting = {other for other in waiting if not store.check([f"{own}/has/{other}"])}
        _give_up_after(deadline, f"rank {min(waiting, default=0)}")
    return own


def _give_up_after(deadline: float, who: str) -> None:
    if time.monotonic() > deadline:
        raise RunError(
            f"{who} has not started within {SECONDS_TO_START:.0f} seconds; what was said on its machine may tell why"
        )
    time.sleep(0.01)


def give_signs_of_life(store: Store, node: int) -> None:
    """Lets the other machines of a run know, from now on, that this one is there."""

    def give() -> None:
        with suppress(RuntimeError):  # the store is gone, and soon this process
            while True:
                store.add(f"signs of {node}", 1)
                time.sleep(SECONDS_BETWEEN_SIGNS)

    threading.Thread(target=give, name="signs-of-life", daemon=True).start()


def wait_for(store: Store, key: str, node: int) -> None:
    """Waits for a key that a node is to set: as long as it takes, while that gives signs of life.

    Raises:
        LostError: it has given none for SECONDS_OF_SILENCE.
    """
    signs, began = -1, time.monotonic()
    since = began
    while not store.check([key]):
        time.sleep(min(LONGEST_PAUSE, 0.01 + (time.monotonic() - began) / 20))
        if time.monotonic() - since > SECONDS_OF_SILENCE:
            now = store.add(f"signs of {node}", 0)
            if now == signs:
                raise LostError(
                    f"node {node} of the run has given no sign of life for {SECONDS_OF_SILENCE:.0f} seconds, and was "
                    "waited for; its own messages may say why; go on with --resume latest"
                )
            signs, since = now, time.monotonic()
