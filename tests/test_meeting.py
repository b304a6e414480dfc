"""How processes find each other and wait for another machine."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from ranks import as_workers

from training import meeting
from training.distributed import Process
from training.errors import RunError
from training.meeting import agreed_name


def test_ranks_agree_on_a_name_that_no_ended_start_has_used() -> None:
    """torchrun's store outlives its workers: an answer of the rank 0 before is one to a rank that is no more."""
    store = dist.HashStore()
    names = []
    for _ in range(3):
        with ThreadPoolExecutor(3) as pool:
            given = [pool.submit(agreed_name, store, rank, 3) for rank in (1, 2, 0)]
        (name,) = {future.result() for future in given}
        names.append(name)
    assert len(set(names)) == 3


def test_a_node_that_never_comes_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its worker may have ended with a mistake of that machine's before it joined."""
    monkeypatch.setattr(meeting, "SECONDS_TO_START", 0.1)
    for rank, missing in ((0, 1), (1, 0)):
        with pytest.raises(RunError, match=f"rank {missing} has not started within 0 seconds"):
            agreed_name(dist.HashStore(), rank, 2)


def wait_for_a_node_that_hangs() -> None:
    """As a worker: node 0 waits first longer than the silence allowed, for what node 1 then does, and then for ever."""
    meeting.SECONDS_OF_SILENCE, meeting.SECONDS_BETWEEN_SIGNS = 2, 0.1
    with Process.from_environment().group() as group:
        assert group.first("late", lambda: time.sleep(5 * group.process.node), per_node=True) is None
        if group.process.node == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        group.first("never", lambda: None, per_node=True)


@pytest.mark.slow
def test_a_node_that_is_gone_is_not_waited_for_for_ever() -> None:
    """But one that is slow and alive is."""
    with pytest.raises(Exception, match=r"LostError: node 1 of the run has given no sign of life for 2 seconds"):
        as_workers(2, wait_for_a_node_that_hangs, nodes=2, timeout=60)
