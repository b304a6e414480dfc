"""The most memory that a process has needed."""

import sys

import pytest
import torch

from training.benchmark.peak_memory import peak_memory, reset_peak_memory

CPU = torch.device("cpu")
HUNDRED = 100 * 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux forgets a peak")
def test_a_peak_is_seen_and_forgotten() -> None:
    reset_peak_memory(CPU)
    before = peak_memory(CPU)
    block = torch.ones(HUNDRED, dtype=torch.uint8)
    del block
    seen = peak_memory(CPU)
    assert 0.9 * HUNDRED < seen - before < 1.5 * HUNDRED  # Linux counts in batches of pages
    reset_peak_memory(CPU)
    assert peak_memory(CPU) < seen
