"""What `isobatch bench` has found: rates, shares and ratios, each a median with its spread; as a table and as JSON."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from model.gpt import flops_per_token, parameter_count
from training.benchmark.bench_process import PRODUCT, Launched, Measured
from training.benchmark.step_parts import PARTS
from training.config import RunConfig

GIGA, GIB = 1e9, 2**30


@dataclass(frozen=True)
class Spread:
    """A median over the rounds, and the extremes."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        """That of some values, of which there must be one."""
        found = sorted(values)
        return cls(median(found), found[0], found[-1])

    def show(self, pattern: str, scale: float = 1.0) -> str:
        """As text: the median, and the extremes where they differ from it."""
        middle, low, high = (format(value * scale, pattern) for value in (self.median, self.low, self.high))
        return middle if low == high else f"{middle} ({low}-{high})"


@dataclass(frozen=True)
class Row:
    """What one layout came to."""

    world_size: int
    microbatch: int
    accumulation: int
    tokens_per_second: Spread
    flops_per_second: Spread
    share: Spread
    """Of the rate of large products: the model FLOP utilisation, with what this machine can do as its ceiling."""
    logging_share: Spread
    """Of a step's time, for reading and recording its results."""
    part_seconds: dict[str, float]
    """Of one step under a profiler, with the reading of its results."""
    peak_memory: int
    """Bytes, of the process that needs most."""


@dataclass(frozen=True)
class Report:
    """The whole result."""

    run: str
    parameters: int
    context_length: int
    flops_per_token: int
    device: str
    machine: str
    torch: str
    precision: str
    product_dtype: str
    emulated: bool
    """Whether the config's precision is one that this CPU has no instructions for."""
    rates: dict[int, Spread]
    """FLOP/s of large products, by number of processes, all of them together."""
    threads: dict[int, int]
    """Of each process, by number of processes."""
    rows: list[Row]
    without_group: dict[int, Spread]
    """By number of processes: tokens/s with the largest accumulation, over the same without a process group."""
    efficiency: dict[int, Spread]
    """By number of processes, with the largest accumulation: tokens/s over those of one process on the same cores, or
    on as many GPUs if each were as fast as one alone."""

    def values(self) -> dict[str, Any]:
        """As plain values."""
        return {**asdict(self), "product": PRODUCT, "accumulation": self.rows[-1].accumulation}


def build_report(config: RunConfig, launches: Sequence[Launched]) -> Report:
    """Puts together what was measured on each number of processes."""
    first, per_token = launches[0], flops_per_token(config.model)
    amp = config.precision.amp
    rows, step_seconds, without_group = [], {}, {}
    for launched in launches:
        *with_group, last = launched.measured
        if last.exchanged:
            with_group.append(last)
        rows += [_row(config, launched, measured, per_token) for measured in with_group]
        step_seconds[launched.world_size] = with_group[-1].step_seconds
        if not last.exchanged:
            pairs = zip(last.step_seconds, with_group[-1].step_seconds, strict=True)
            without_group[launched.world_size] = Spread.of(alone / together for alone, together in pairs)
    return Report(
        run=config.name,
        parameters=parameter_count(config.model),
        context_length=config.model.context_length,
        flops_per_token=per_token,
        device=first.device,
        machine=max(launches, key=lambda launched: launched.world_size).machine,
        torch=first.torch,
        precision="float32" if amp == "off" else amp,
        product_dtype=first.product_dtype,
        emulated=amp == "bf16" and first.product_dtype == "float32",
        rates={launched.world_size: Spread.of(launched.measured[0].rates) for launched in launches},
        threads={launched.world_size: launched.threads for launched in launches},
        rows=rows,
        without_group=without_group,
        efficiency=_efficiency(step_seconds, on_gpus=first.device != "cpu"),
    )


def _row(config: RunConfig, launched: Launched, measured: Measured, per_token: int) -> Row:
    sequences = launched.world_size * config.batch.microbatch * measured.accumulation
    tokens = sequences * config.model.context_length
    seconds = [sum(pair) for pair in zip(measured.step_seconds, measured.logging_seconds, strict=True)]
    rates = [tokens / duration for duration in seconds]
    return Row(
        world_size=launched.world_size,
        microbatch=config.batch.microbatch,
        accumulation=measured.accumulation,
        tokens_per_second=Spread.of(rates),
        flops_per_second=Spread.of(per_token * rate for rate in rates),
        share=Spread.of(per_token * rate / ceiling for rate, ceiling in zip(rates, measured.rates, strict=True)),
        logging_share=Spread.of(
            logging / duration for logging, duration in zip(measured.logging_seconds, seconds, strict=True)
        ),
        part_seconds=measured.parts,
        peak_memory=max(measured.peak_memory),
    )


def _efficiency(step_seconds: dict[int, list[float]], on_gpus: bool) -> dict[int, Spread]:
    """By number of processes, each of which has the same work in a step as the one process alone."""
    alone = step_seconds.get(1, [])
    return {
        processes: Spread.of(
            one * (1 if on_gpus else processes) / seconds for one, seconds in zip(alone, found, strict=True)
        )
        for processes, found in step_seconds.items()
        if processes > 1 and alone
    }


def report_lines(report: Report) -> list[str]:
    """The table, and what it means."""
    accumulation = report.rows[-1].accumulation
    share = max(row.logging_share.median for row in report.rows)
    return [
        f"run {report.run}: {report.parameters:,} parameters, {report.flops_per_token / 1e6:,.1f} MFLOP per token, "
        f"{report.precision}; {report.machine}, torch {report.torch}",
        *(_ceiling(report, processes) for processes in report.rates),
        "",
        *_table(report.rows),
        "",
        "layout: processes x microbatch x accumulation; parts: milliseconds of one step on the first process, "
        "profiled;",
        "all-reduce overlaps with backward, the rest belongs to no part; memory: of one process, GiB",
        *(
            f"accumulation {accumulation} on {_processes(processes)}: {ratio.show('.1f', 100)} % of the tokens/s "
            "without a process group"
            for processes, ratio in report.without_group.items()
        ),
        *(
            f"accumulation {accumulation} on {_where(report, processes)}: {ratio.show('.1f', 100)} % of the tokens/s "
            + (f"on {_where(report, 1)}" if report.device == "cpu" else "of one GPU, for each")
            for processes, ratio in report.efficiency.items()
        ),
        f"logging and metrics: {100 * share:.2f} % of the time at most",
    ]


def _ceiling(report: Report, processes: int) -> str:
    rows, inner, columns = PRODUCT
    note = "; this CPU has no instructions for bf16 and computes through float32" if report.emulated else ""
    return (
        f"R = {report.rates[processes].show(',.1f', 1 / GIGA)} GFLOP/s on {_where(report, processes)}: "
        f"{report.product_dtype} products of {rows}x{inner}x{columns}{note}"
    )


def _processes(number: int) -> str:
    return f"{number} process{'es' * (number > 1)}"


def _where(report: Report, processes: int) -> str:
    threads = report.threads[processes]
    on_cpu = f" x {threads} thread{'s' * (threads > 1)}" if report.device == "cpu" else ""
    return f"{_processes(processes)}{on_cpu}"


def _table(rows: Sequence[Row]) -> list[str]:
    head = ["layout", "tokens/s", "GFLOP/s", "% of R", *PARTS, "rest", "memory"]
    cells = [head]
    for row in rows:
        milliseconds = [f"{1e3 * row.part_seconds[part]:,.1f}" for part in (*PARTS, "rest")]
        cells.append(
            [
                f"{row.world_size} x {row.microbatch} x {row.accumulation}",
                row.tokens_per_second.show(",.0f"),
                row.flops_per_second.show(",.1f", 1 / GIGA),
                row.share.show(".1f", 100),
                *milliseconds,
                f"{row.peak_memory / GIB:.2f}",
            ]
        )
    widths = [max(len(line[column]) for line in cells) for column in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
