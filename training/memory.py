"""Memory that does not suffice: what is said then, and what to do."""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from training.config import RunConfig
from training.distributed import Process
from training.errors import OneRankError
from training.layout import Layout, describe

OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "ALLOC_FAILED")
"""What a RuntimeError says where the machine's own memory is used up, or a library on the GPU found none."""


def keep_freed_memory() -> None:
    """Tells glibc to keep what tensors have freed, as the next step wants it again, in place of new, empty pages.

    On two cores of an AMD EPYC with bf16 instructions (Zen 4) a step of a model of 14 million parameters took 6 % less
    time so; on an older one, in float32, as long as before. What the user has set in the environment stays.
    """
    if sys.platform != "linux" or any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    with suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        for parameter, value in ((-3, 2**30), (-1, 2**31 - 1), (-2, 2**26)):  # M_MMAP_THRESHOLD, M_TRIM_, M_TOP_PAD
            mallopt(parameter, value)


@contextmanager
def memory_told(process: Process, layout: Layout, config: RunConfig, recomputing: bool) -> Iterator[None]:
    """Makes one sentence of it where training does not fit into memory.

    Args:
        process: this one.
        layout: the split of the global batch that is trained with.
        config: the run's.
        recomputing: whether activations are checkpointed already.

    Raises:
        OneRankError: naming the layout and how to need less. The other ranks may have enough.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        reason = ". ".join(str(error).splitlines()[0].split(". ")[:2]).rstrip(".")
        raise OneRankError(
            f"rank {process.rank}: out of memory on {process.device} ({reason}), with "
            f"{describe(layout, config.batch)}; {less_memory(layout, config, process, recomputing)}"
        ) from None


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether it was raised for want of memory."""
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in OUT_OF_MEMORY)


def less_memory(layout: Layout, config: RunConfig, process: Process, recomputing: bool) -> str:
    """What makes a step need less memory."""
    microbatch = layout.microbatch
    if microbatch > 1 and not config.bitwise:
        halved = f"go on with --microbatch {microbatch // 2} --resume auto: it is the same run"
        search = " (--find-max-microbatch searches the largest that fits)"
        return halved + (search if process.device.type == "cuda" else "")
    if not recomputing:
        return "go on with --activation-checkpointing --resume auto: it is the same run, slower and in less memory"
    if config.bitwise and microbatch > 1:
        return (
            f"use a device with more memory, or start another run with batch.microbatch below {microbatch}, which in "
            "bitwise mode must stay"
        )
    return "a step cannot take less than one sequence at a time: use a device with more memory, or a smaller model"
