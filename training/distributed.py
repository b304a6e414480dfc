"""The one place that talks to torch.distributed: which process this is, its device, and what the processes share.

There is always a process group, also for one process, so that there is one code path. Two kinds of meeting exist:
collectives, which every process must reach in step, and `first`, where one process works for as long as it takes
(a download, a report) while the others wait without a collective whose clock runs.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from training.errors import InterruptionError, OneRankError, RunError, UserError
from training.launcher import leave_with_launcher
from training.meeting import LostError, agreed_name, give_signs_of_life, wait_for

Result = TypeVar("Result")

_AS_LONG_AS_IT_TAKES = timedelta(days=365)


@dataclass(frozen=True)
class Process:
    """One of the processes of a run, as torchrun's environment describes it; alone without torchrun."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node: int
    nodes: int
    device: torch.device

    @classmethod
    def from_environment(cls) -> "Process":
        """Reads torchrun's variables, and picks the GPU of LOCAL_RANK where there are GPUs.

        Raises:
            UserError: more processes on this node than GPUs.
        """
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        device = torch.device("cpu")
        if torch.cuda.is_available():
            if local_world_size > torch.cuda.device_count():
                raise UserError(
                    f"{local_world_size} processes were started on a machine with {torch.cuda.device_count()} GPUs; "
                    f"each process needs its own: start at most --nproc_per_node={torch.cuda.device_count()} "
                    "(the global batch stays the same)"
                )
            device = torch.device("cuda", local_rank)
        return cls(
            rank=int(os.environ.get("RANK", 0)),
            local_rank=local_rank,
            world_size=int(os.environ.get("WORLD_SIZE", 1)),
            local_world_size=local_world_size,
            node=int(os.environ.get("GROUP_RANK", 0)),
            nodes=int(os.environ.get("GROUP_WORLD_SIZE", 1)),
            device=device,
        )

    @property
    def is_main(self) -> bool:
        """Whether this is the one process that prints and writes."""
        return self.rank == 0

    @property
    def is_launched(self) -> bool:
        """Whether torchrun, or another launcher with its variables, has started this process."""
        return "RANK" in os.environ

    def remarks(self) -> list[str]:
        """What the user should know of the number of processes that were started."""
        cores = cores_here()
        if self.device.type != "cpu" or self.local_world_size <= cores:
            return []
        started = (
            f"{self.local_world_size} processes were started on a machine with {cores} CPU core{'s' * (cores > 1)}"
        )
        return [f"{started}: they take turns, and --nproc_per_node={cores} is at least as fast; the run is the same"]

    @contextmanager
    def group(self) -> Iterator["Group"]:
        """Joins the processes of the run, and leaves them in order whatever happens. Every rank must enter."""
        store: dist.Store = dist.HashStore()
        if self.is_launched:
            leave_with_launcher()
            use_all_cores(self.local_world_size)
            store, _, _ = next(iter(dist.rendezvous("env://")))
            store = dist.PrefixStore(agreed_name(store, self.rank, self.world_size), store)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        dist.init_process_group(
            "nccl" if self.device.type == "cuda" else "gloo",
            store=dist.PrefixStore("group", store),
            rank=self.rank,
            world_size=self.world_size,
        )
        group = Group(self, dist.PrefixStore("first", store))
        if self.nodes > 1 and self.local_rank == 0:
            give_signs_of_life(group.store, self.node)
        try:
            yield group
        except BaseException as error:
            if isinstance(error, InterruptionError):
                self._leave_after_rank_0(group)
            everywhere = isinstance(error, UserError | RunError | InterruptionError)
            everywhere = everywhere and not isinstance(error, LostError | OneRankError)
            # NCCL's destruction waits for the other ranks, which know nothing of any other failure; torchrun ends them.
            if everywhere or self.device.type == "cpu" or self.world_size == 1:
                dist.destroy_process_group()
            if is_loss(error):
                raise LostError(f"rank {self.rank}: {lost_text('another process of the run')}") from error
            raise
        dist.destroy_process_group()

    def _leave_after_rank_0(self, group: "Group") -> None:
        """Waits until rank 0 has done all that it does at its end: torchrun ends the others when one has left."""
        if self.is_main:
            group.store.set("rank 0 leaves", "")
            return
        with suppress(RuntimeError, LostError):  # the store, or rank 0's machine, has gone
            group.wait_for("rank 0 leaves", 0)

    def use_reproducible_kernels(self) -> None:
        """Makes the same inputs give the same bits, for the rest of this process.

        On a CPU the number of threads decides how sums are split, so it is one: more processes use more cores, to the
        same end.
        """
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # for finding faults
        if self.device.type == "cpu":
            torch.set_num_threads(1)
        else:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts

    def machine(self) -> str:
        """The hardware in words, for the record."""
        if self.device.type == "cuda":
            return f"{self.world_size} x {torch.cuda.get_device_name(self.device)}"
        return f"{_processor_name()}, {os.cpu_count()} cores"


@dataclass(frozen=True)
class Group:
    """The processes of a run, joined."""

    process: Process
    store: dist.Store

    def first(self, name: str, action: Callable[[], Result], per_node: bool = False) -> Result:
        """Lets one process do something and hands its result to all. Every rank must call this.

        Args:
            name: of this meeting, used once in a run.
            action: what to do; its result must be JSON-able.
            per_node: done by local rank 0 of each node (a download), else by global rank 0 alone.

        Raises:
            UserError, RunError: on every rank, if it was raised by the action anywhere.
        """
        if (self.process.local_rank if per_node else self.process.rank) == 0:
            try:
                outcome: dict[str, Any] = {"result": action()}
            except (UserError, RunError) as error:
                outcome = {"mistake" if isinstance(error, UserError) else "failure": str(error)}
            self.store.set(f"{name}/{self.process.node if per_node else 0}", json.dumps(outcome))
        keys = [f"{name}/{node}" for node in range(self.process.nodes if per_node else 1)]
        for node, key in enumerate(keys):
            self.wait_for(key, node)
        outcomes = [json.loads(self.store.get(key)) for key in keys]
        for outcome in outcomes:
            if "mistake" in outcome:
                raise UserError(outcome["mistake"])
            if "failure" in outcome:
                raise RunError(outcome["failure"])
        result: Result = outcomes[self.process.node if per_node else 0]["result"]
        return result

    def wait_for(self, key: str, node: int) -> None:
        """Waits until a process of a node has set a key, as long as it takes; LostError if the node is gone."""
        if self.process.nodes == 1:  # torchrun sees who ends, and ends the others
            self.store.wait([key], _AS_LONG_AS_IT_TAKES)
        else:
            wait_for(self.store, key, node)

    def process_ids(self) -> list[int]:
        """The process ids of the ranks on this node. Every rank must call this."""
        process = self.process
        self.store.set(f"process/{process.node}/{process.local_rank}", str(os.getpid()))
        keys = [f"process/{process.node}/{rank}" for rank in range(process.local_world_size)]
        self.store.wait(keys, _AS_LONG_AS_IT_TAKES)
        return [int(self.store.get(key)) for key in keys]

    def sum(self, tensor: Tensor) -> Tensor:
        """Adds a tensor over the processes, in place. Every rank must call this."""
        dist.all_reduce(tensor, dist.ReduceOp.SUM)
        return tensor

    @property
    def collectives(self) -> int:
        """Collectives of the whole group so far, those that DDP starts included; 0 where torch does not tell."""
        # There is no public name. A torch without this one trains all the same, and tests/test_verify.py fails.
        count = getattr(dist.group.WORLD, "_get_sequence_number_for_group", None)
        return 0 if count is None else int(count())

    def maximum(self, tensor: Tensor) -> Tensor:
        """Takes the element-wise maximum of a tensor over the processes, in place. Every rank must call this."""
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Copies tensors from rank 0 into those of the other ranks. Every rank must call this."""
        for tensor in tensors:
            dist.broadcast(tensor, src=0)

    def parallel(self, module: nn.Module, in_bf16: bool = False) -> DistributedDataParallel:
        """Wraps a module so that the gradients of a step are averaged over the processes.

        Gradients live in DDP's buckets, so they are stored once; `in_bf16`, they are rounded for the exchange, by one
        process too. The weights become those of rank 0. Every rank must call this.
        """
        device = self.process.device
        parallel = DistributedDataParallel(
            module,
            device_ids=[device.index] if device.type == "cuda" else None,
            gradient_as_bucket_view=True,
        )
        if in_bf16:
            parallel.register_comm_hook(None, _average_in_bf16)
        return parallel


def _average_in_bf16(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Averages a bucket of gradients with half the bytes sent. torch's own hook for it refuses gloo."""
    buffer = bucket.buffer()
    rounded = buffer.div_(dist.get_world_size()).to(torch.bfloat16)
    exchanged: torch.futures.Future[list[Tensor]] = dist.all_reduce(rounded, async_op=True).get_future()
    return exchanged.then(lambda averaged: buffer.copy_(averaged.value()[0]))


def is_loss(error: BaseException) -> bool:
    """Whether an error is what a collective raises where another process is gone."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/" in str(error))


def lost_text(who: str) -> str:
    """What is said where another process is gone; what gloo or NCCL say of it is about sockets."""
    return (
        f"{who} is gone or does not answer; its own messages say why, or it was killed (out of memory: see dmesg); the "
        "last checkpoint is as it was: go on with --resume latest"
    )


def use_all_cores(local_world_size: int) -> None:
    """Shares this machine's cores among its processes.

    torchrun sets OMP_NUM_THREADS to 1 for several processes, whatever the machine; any other value is the user's.
    """
    if local_world_size > 1 and os.environ.get("OMP_NUM_THREADS") == "1":
        torch.set_num_threads(max(1, cores_here() // local_world_size))


def cores_here() -> int:
    """How many CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor_name() -> str:
    information = Path("/proc/cpuinfo")
    for line in information.read_text().splitlines() if information.exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "CPU"
