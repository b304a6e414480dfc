"""A model of a step's time over world size, interconnect and accumulation: printed, and checked against measurements.

    PYTHONPATH=. python benchmarks/scaling.py                     the table of docs/performance.md
    isobatch bench RUN --json > bench.json
    PYTHONPATH=. python benchmarks/scaling.py --check bench.json  predicted and measured steps of several processes

A step is `accumulation` microbatches, the exchange of gradients as far as the last backward does not hide it, and the
update. The exchange is a ring all-reduce: each of n processes sends and receives 2 (n - 1) / n times the gradients, in
2 (n - 1) turns (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", Journal of
Parallel and Distributed Computing 69, 2009). Its bandwidth is that of the narrowest link: the "bus bandwidth" of
NVIDIA's nccl-tests. DDP exchanges a bucket as soon as the backward has filled it, so all but the last bucket can be
hidden.
"""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.gpt import GPTConfig, flops_per_token, parameter_count

BUCKET = 25 * 2**20
"""Bytes of one of DDP's buckets."""
BACKWARD = 2 / 3
"""Share of the backward in a microbatch's time: it has twice the products of the forward."""
GPUS_OF_A_NODE = 8


@dataclass(frozen=True)
class Work:
    """What a process computes."""

    microbatch_seconds: float
    """Forward and backward."""
    update_seconds: float
    """Clipping and the optimizer."""
    gradient_bytes: float
    """What is exchanged in a step, whatever the accumulation."""


@dataclass(frozen=True)
class Link:
    """An interconnect, on paper."""

    name: str
    within: float
    """Bytes per second and GPU within a machine."""
    between: float
    """Bytes per second of a whole machine to the others."""
    latency: float = 10e-6
    """Seconds of a turn."""

    def bandwidth(self, world_size: int) -> float:
        """Of the ring's narrowest link."""
        return self.within if world_size <= GPUS_OF_A_NODE else min(self.within, self.between)


def exchange_seconds(work: Work, link: Link, world_size: int) -> float:
    """Seconds of a step's exchange by itself."""
    bandwidth = link.bandwidth(world_size)
    turns = 2 * (world_size - 1)
    return turns / world_size * work.gradient_bytes / bandwidth + _buckets(work) * turns * link.latency


def exposed_seconds(work: Work, exchange: float) -> float:
    """What of an exchange of so many seconds the last backward does not hide.

    The exchange begins when the first bucket is full; the last is sent when there is nothing left to compute.
    """
    buckets = _buckets(work)
    hidden = BACKWARD * work.microbatch_seconds * (1 - 1 / buckets)
    return max(exchange / buckets, exchange - hidden)


def step_seconds(work: Work, accumulation: int, exchange: float) -> float:
    """Seconds of a step whose exchange by itself takes so many; 0 for one process."""
    return accumulation * work.microbatch_seconds + work.update_seconds + exposed_seconds(work, exchange)


def efficiency(work: Work, link: Link, world_size: int, accumulation: int) -> float:
    """Tokens/s of a GPU among so many, against one alone."""
    alone = step_seconds(work, accumulation, 0.0)
    return alone / step_seconds(work, accumulation, exchange_seconds(work, link, world_size))


def _buckets(work: Work) -> int:
    return max(1, math.ceil(work.gradient_bytes / BUCKET))


SMALL = GPTConfig()
MICROBATCH = 12
PEAK = 312e12
"""FLOP/s of an A100 in bf16, on paper."""
UTILISATION = 0.4
"""Share of it, assumed."""
UPDATE_SECONDS = 2.6e-3
"""28 bytes a parameter (weights, gradients and two moments read, three of them written) at 1.75 of its 2 TB/s."""
LINKS = (
    Link("NVLink, 8 x 200 Gb/s InfiniBand", 230e9, 200e9),
    Link("NVLink, 100 Gb/s Ethernet", 230e9, 12.5e9),
    Link("PCIe 4.0, 25 Gb/s Ethernet", 20e9, 3.1e9),
)
WORLD_SIZES = (2, 4, 8, 16, 32, 64)
ACCUMULATIONS = (1, 4, 16)


def on_paper(bytes_per_gradient: int) -> Work:
    """GPT-2 small, untied, on an A100 with microbatches of 12 sequences."""
    flops = flops_per_token(SMALL) * MICROBATCH * SMALL.context_length
    return Work(flops / (UTILISATION * PEAK), UPDATE_SECONDS, bytes_per_gradient * parameter_count(SMALL))


def table() -> list[str]:
    """Efficiency by interconnect, accumulation and number of GPUs, in per cent; float32 gradients / bf16."""
    sizes = [
        f"{size}" if size <= GPUS_OF_A_NODE else f"{size // GPUS_OF_A_NODE} x {GPUS_OF_A_NODE}" for size in WORLD_SIZES
    ]
    lines = [f"| interconnect | accumulation | {' | '.join(sizes)} |", "|---" * (2 + len(sizes)) + "|"]
    for link in LINKS:
        for accumulation in ACCUMULATIONS:
            cells = [
                " / ".join(f"{100 * efficiency(on_paper(size), link, world_size, accumulation):.0f}" for size in (4, 2))
                for world_size in WORLD_SIZES
            ]
            lines.append(f"| {link.name} | {accumulation} | {' | '.join(cells)} |")
    return lines


def check(report: dict[str, Any]) -> list[str]:
    """Predicted and measured steps of several processes, from a result of `isobatch bench --json`.

    The times of a microbatch and of the update are those of the parts with the largest accumulation, where the exchange
    weighs least; that of the exchange is the part with the smallest.
    """
    lines = [
        "| layout | exchange, ms | predicted step, ms | measured | predicted / measured |",
        "|---|---|---|---|---|",
    ]
    for world_size in sorted({row["world_size"] for row in report["rows"]} - {1}):
        rows = sorted(
            (row for row in report["rows"] if row["world_size"] == world_size), key=lambda row: row["accumulation"]
        )
        lines += _checked(rows, report["parameters"], report["context_length"])
    return lines


def _checked(rows: Sequence[dict[str, Any]], parameters: int, context_length: int) -> list[str]:
    lines = []
    parts, exchange = rows[-1]["part_seconds"], rows[0]["part_seconds"]["all-reduce"]
    microbatch = sum(parts[part] for part in ("data", "forward", "backward")) / rows[-1]["accumulation"]
    work = Work(microbatch, parts["optimizer"] + parts["logging"] + parts["rest"], 4 * parameters)
    for row in rows:
        tokens = row["world_size"] * row["microbatch"] * row["accumulation"] * context_length
        measured = tokens / row["tokens_per_second"]["median"]
        predicted = step_seconds(work, row["accumulation"], exchange)
        lines.append(
            f"| {row['world_size']} x {row['microbatch']} x {row['accumulation']} | {1e3 * exchange:,.1f} "
            f"| {1e3 * predicted:,.1f} | {1e3 * measured:,.1f} | {predicted / measured:.2f} |"
        )
    return lines


def main() -> None:
    """Prints what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", type=Path, metavar="BENCH.json", help="a result of isobatch bench --json")
    arguments = parser.parse_args()
    print("\n".join(check(json.loads(arguments.check.read_text())) if arguments.check else table()))


if __name__ == "__main__":
    main()
