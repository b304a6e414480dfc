"""Time and memory of the head and the loss, forward and backward: all logits at once against training/loss.py.

    PYTHONPATH=. OMP_NUM_THREADS=2 python benchmarks/head.py

At the size of GPT-2 small, 8 x 1,024 tokens, unless the options say otherwise. Each measurement is a process of its
own, alternating in rounds. Memory is what the process's largest resident set grows by from before the first forward;
the inputs, and the gradients that are the result, are there before. Prints the medians. Both use the same way of
multiplying bf16 matrices (model/half_products.py).
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from statistics import median

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from model.half_products import linear
from training.loss import head_loss

TYPES = {"float32": torch.float32, "bf16": torch.bfloat16}


def plain(hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor, dtype: torch.dtype) -> None:
    """A linear layer and cross_entropy in float32."""
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        logits = linear(hidden, head, None)
    (F.cross_entropy(logits.float(), targets, reduction="none") @ weights).backward()


def own(hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor, dtype: torch.dtype) -> None:
    """The head of training."""
    head_loss(hidden, head, targets, weights, dtype)[0].backward()


def measure(variant: str, tokens: int, width: int, vocabulary: int, dtype: str) -> None:
    """Prints the seconds and the MiB of one forward and backward, as JSON."""
    generator = torch.Generator().manual_seed(1)
    hidden, head = (torch.randn(size, width, generator=generator) for size in (tokens, vocabulary))
    for tensor in (hidden, head.mul_(0.02)):
        tensor.requires_grad_().grad = torch.zeros_like(tensor)
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    weights = torch.full((tokens,), 1 / tokens)
    function = {"plain": plain, "own": own}[variant]
    small = torch.ones(8, 8, requires_grad=True)
    function(small, small, targets[:8] % 8, weights[:8], TYPES[dtype])  # loads what is loaded on the first use
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    function(hidden, head, targets, weights, TYPES[dtype])
    seconds = time.perf_counter() - started
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(json.dumps([seconds, grown / 1024]))


def main() -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8 * 1024)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=TYPES, help="only this one")
    parser.add_argument("--alone", choices=["plain", "own"], help="one measurement, in this process")
    options = parser.parse_args()
    size = (options.tokens, options.width, options.vocabulary)
    if options.alone:
        measure(options.alone, *size, options.dtype or "float32")
        return
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {options.rounds} rounds, {size}")
    print("| head, forward and backward | ms | MiB | time, of plain | memory, of plain |\n|---|---|---|---|---|")
    for dtype in [options.dtype] if options.dtype else list(TYPES):
        found: dict[str, list[list[float]]] = {"plain": [], "own": []}
        for _ in range(options.rounds):
            for variant, measured in found.items():
                command = [sys.executable, __file__, *sys.argv[1:], "--alone", variant, "--dtype", dtype]
                measured.append(json.loads(subprocess.run(command, check=True, capture_output=True).stdout))
        for variant, measured in found.items():
            pairs = [zip(*both, strict=True) for both in zip(measured, found["plain"], strict=True)]
            ratios = [median(column) for column in zip(*([a / b for a, b in pair] for pair in pairs), strict=True)]
            seconds, memory = (median(column) for column in zip(*measured, strict=True))
            print(f"| {variant}, {dtype} | {1000 * seconds:,.0f} | {memory:,.0f} | {ratios[0]:.2f} | {ratios[1]:.2f} |")


if __name__ == "__main__":
    main()
