"""Runs a function on several processes, joined by gloo as torchrun's workers would be."""

import multiprocessing
import os
import pickle
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing

from training.distributed import Process

Result = TypeVar("Result")

ALONE = Process(rank=0, local_rank=0, world_size=1, local_world_size=1, node=0, nodes=1, device=torch.device("cpu"))

# One process imports torch, and what DDP imports late, once; the ranks are forks of it.
PRELOADED = ["torch._dynamo", "torch._inductor", "matplotlib.backends.backend_agg", "pydantic", "safetensors", "pytest"]
multiprocessing.set_forkserver_preload(PRELOADED)


def on_ranks(
    world_size: int, function: Callable[..., Result], *arguments: Any, nodes: int = 1, timeout: float = 180
) -> list[Result]:
    """Calls function(group, *arguments) on every rank, in a group of them all; see as_workers.

    A single process is this one.
    """
    if world_size == 1:
        with ALONE.group() as group:
            return [function(group, *arguments)]
    return as_workers(world_size, _in_group, function, *arguments, nodes=nodes, timeout=timeout)


def _in_group(function: Callable[..., Result], *arguments: Any) -> Result:
    with Process.from_environment().group() as group:
        return function(group, *arguments)


def as_workers(
    world_size: int, function: Callable[..., Result], *arguments: Any, nodes: int = 1, timeout: float = 180
) -> list[Result]:
    """Calls function(*arguments) in processes that find what torchrun's workers do; the results, by rank.

    The processes are real ones: function, arguments and results must be picklable.

    Args:
        world_size: processes.
        function: of a module that the processes can import.
        arguments: handed on.
        nodes: machines over which the processes believe to be spread evenly.
        timeout: in seconds; a hang is a failure.
    """
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as folder:
        with started(world_size, function, *arguments, nodes=nodes, folder=folder) as ranks:
            while not ranks.join(deadline - time.monotonic()):  # raises what a rank raised
                assert time.monotonic() < deadline, f"{function.__name__} on {world_size} ranks: {timeout} s are over"
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(world_size)]


@contextmanager
def started(
    world_size: int, function: Callable[..., Any], *arguments: Any, folder: str, nodes: int = 1
) -> Iterator[torch.multiprocessing.ProcessContext]:
    """The same processes while they run; those that are left at the end of the block are killed.

    Args:
        world_size, function, arguments, nodes: as for as_workers.
        folder: where the results are left.
    """
    # Like torchrun's agent, this process holds the store, so that no port has to be guessed.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = torch.multiprocessing.start_processes(
        _rank,
        (function, arguments, world_size, nodes, store.port, folder),
        nprocs=world_size,
        join=False,
        start_method="forkserver",
    )
    assert ranks is not None, "not joined yet"
    try:
        yield ranks
    finally:
        for process in ranks.processes:
            process.kill()


def _rank(
    rank: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    world_size: int,
    nodes: int,
    port: int,
    folder: str,
) -> None:
    warnings.simplefilter("error")
    per_node = world_size // nodes
    environment = {
        "RANK": rank,
        "LOCAL_RANK": rank % per_node,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": per_node,
        "GROUP_RANK": rank // per_node,
        "GROUP_WORLD_SIZE": nodes,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "CUDA_VISIBLE_DEVICES": "",
    }
    os.environ.update({key: str(value) for key, value in environment.items()})
    result = function(*arguments)
    (Path(folder) / str(rank)).write_bytes(pickle.dumps(result))
