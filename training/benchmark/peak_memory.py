"""The most memory that this process has needed since it was last asked to forget."""

import re
import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch

STATUS = Path("/proc/self/status")
REFERENCES = Path("/proc/self/clear_refs")
FORGET_PEAK = "5"
"""What makes Linux take the present resident set for the highest so far (man 5 proc)."""


def reset_peak_memory(device: torch.device) -> None:
    """Forgets the peak so far; on a CPU only Linux can, elsewhere the peak is that since the process began."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        REFERENCES.write_text(FORGET_PEAK)


def peak_memory(device: torch.device) -> int:
    """Bytes: what PyTorch held at most on a GPU; on a CPU the highest resident set, libraries included."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if STATUS.exists() and (found := re.search(r"VmHWM:\s+(\d+) kB", STATUS.read_text())):
        return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
