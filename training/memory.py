"""Memory that does not suffice: what is said then, and what to do."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from training.config import RunConfig
from training.distributed import Process
from training.errors import OneRankError
from training.layout import Layout, describe

ON_CPU = "can't allocate memory"
"""What PyTorch's RuntimeError says where the machine's own memory is used up."""


@contextmanager
def memory_told(process: Process, layout: Layout, config: RunConfig) -> Iterator[None]:
    """Makes one sentence of it where training does not fit into memory.

    Raises:
        OneRankError: naming the layout and how to need less. The other ranks may have enough.
    """
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and ON_CPU not in str(error):
            raise
        reason = ". ".join(str(error).splitlines()[0].split(". ")[:2]).rstrip(".")
        raise OneRankError(
            f"rank {process.rank}: out of memory on {process.device} ({reason}), with "
            f"{describe(layout, config.batch)}; {less_memory(layout, config.bitwise)}"
        ) from None


def less_memory(layout: Layout, bitwise: bool) -> str:
    """What makes a step need less memory."""
    microbatch = layout.microbatch
    if microbatch == 1:
        return "a step cannot take less than one sequence at a time: use a device with more memory, or a smaller model"
    if bitwise:
        return (
            f"use a device with more memory, or start another run with batch.microbatch below {microbatch}, which in "
            "bitwise mode must stay"
        )
    return f"go on with --microbatch {microbatch // 2} --resume auto: it is the same run"
