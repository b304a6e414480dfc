"""One of the processes in which `isobatch bench` measures, on one number of processes: a program of its own.

    python -m training.benchmark.bench_process PLAN.json      (under torchrun for several processes)

Each round trains some steps with every accumulation, so that whatever else the machine does falls on all of them, and
multiplies large matrices before and after: what is computed is compared with what the machine can do at that moment.
A last step with each accumulation runs under a profiler, for its parts.
"""

import gc
import json
import math
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any, cast

import torch
import typer
from torch.profiler import ProfilerActivity, profile, record_function

from model.gpt import build_gpt
from training.benchmark.peak_memory import peak_memory, reset_peak_memory
from training.benchmark.step_parts import STEP, seconds_by_part
from training.command import run_command
from training.compilation import compile_blocks
from training.config import Batch, Data, RunConfig
from training.config_check import config_from_mapping
from training.data import open_training_data
from training.distributed import Group, Process
from training.errors import OneRankError
from training.gradients import AveragedGradients, gradient_sums
from training.layout import plan_layout
from training.loss import SequenceLoss
from training.memory import is_out_of_memory, keep_freed_memory
from training.metrics import RunLog
from training.optimizer import build_optimizer
from training.step import AMP_DTYPES, Trainer, build_scaler
from training.step_records import SECONDS_BETWEEN_READS, StepReader

PROGRESS = "progress: "
"""Begins the lines on standard error that are for the user."""
RESULT = ".result"
"""What the name of the result has in place of the plan's `.json`."""
PRODUCT = (4096, 768, 3072)
"""Rows, inner dimension and columns of the products that the ceiling is measured with."""
PRODUCT_SECONDS = 0.4
LEAST_PRODUCTS = 3
EPOCHS = 10**6
"""Enough for any number of steps."""


@dataclass(frozen=True)
class Plan:
    """What the processes are asked to measure."""

    name: str
    config: dict[str, Any]
    """As config_mapping writes it."""
    accumulations: list[int]
    rounds: int
    threads: int
    """Of all processes together, on a CPU."""
    folder: str
    """Where the random tokens are, and where the result goes."""
    activation_checkpointing: bool = False
    compile: bool = False


@dataclass
class Measured:
    """What steps with one accumulation took, by round; the slowest process counts."""

    accumulation: int
    exchanged: bool
    """Whether a process group exchanged the gradients, as in training."""
    step_seconds: list[float] = field(default_factory=list)
    """Seconds of a step, without the reading of its results."""
    logging_seconds: list[float] = field(default_factory=list)
    """Seconds of reading and recording the results, for each step."""
    peak_memory: list[int] = field(default_factory=list)
    """Bytes; see peak_memory."""
    rates: list[float] = field(default_factory=list)
    """FLOP/s of large products, all processes together: the mean of before and after the round."""
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds of each part of one step, with its reading, under a profiler."""


@dataclass(frozen=True)
class Launched:
    """What was measured on one number of processes."""

    world_size: int
    threads: int
    """Of each process."""
    device: str
    machine: str
    torch: str
    product_dtype: str
    measured: list[Measured]
    """By accumulation; then, but in bitwise mode, the largest without a process group."""


class LocalGradients:
    """Gradients that no process group knows of, for comparison: added up in place, exchanged with nobody.

    Hooks that DDP has left on the parameters are still called, and return at once.
    """

    averaged_over = 1

    def __init__(self, module: SequenceLoss, group: Group) -> None:
        self.module = module
        self.group = group
        self.parameters = list(module.parameters())

    def begin(self, weight_sum: float, microbatches: int, loss_scale: torch.Tensor) -> None:
        """Begins a step."""
        torch._foreach_zero_([parameter.grad for parameter in self.parameters if parameter.grad is not None])

    def microbatch(self, last: bool) -> AbstractContextManager[None]:
        """The context of a microbatch: none is needed."""
        return nullcontext()

    def finish(self) -> None:
        """Ends a step."""


@dataclass(frozen=True)
class Bench:
    """What a process measures with."""

    group: Group
    config: RunConfig
    trainers: list[Trainer]
    """By accumulation, and last one without exchange, with the largest."""
    log: RunLog
    folder: Path
    """The plan's."""

    def measure(self, rounds: int) -> list[Measured]:
        """Runs all rounds, and the profiled steps; by trainer. Every rank must call this."""
        found = [
            Measured(trainer.config.batch.accumulation, not isinstance(trainer.gradients, LocalGradients))
            for trainer in self.trainers
        ]
        self._say("warming up")
        for step in range(2):  # DDP forms its buckets in the first
            self.trainers[0].step(step)
        numbers = [self._steps_at_once(trainer) for trainer in self.trainers]
        rate = self._rate()
        for number in range(rounds):
            self._say(f"round {number + 1} of {rounds}")
            before = rate
            order = [(number + place) % len(found) for place in range(len(found))]
            for place in order:
                self._span(self.trainers[place], numbers[place], found[place])
            rate = self._rate()
            for measured in found:
                measured.rates.append(fmean((before, rate)))
        self._say("the parts of a step")
        return [
            replace(measured, parts=self._parts(trainer))
            for trainer, measured in zip(self.trainers, found, strict=True)
        ]

    def _steps_at_once(self, trainer: Trainer) -> int:
        """How many steps take as long as lies between two reads of results in a run; the same on every rank."""
        measured = Measured(0, False)
        self._span(trainer, 1, measured)
        return math.ceil(SECONDS_BETWEEN_READS / measured.step_seconds[0])

    def _span(self, trainer: Trainer, steps: int, measured: Measured) -> None:
        """Trains some steps, and reads and records their results once, as a run does from time to time."""
        reader, device = StepReader(self.group), self.group.process.device
        reset_peak_memory(device)
        self._together()
        begun = time.perf_counter()
        for step in range(steps):
            reader.add(step + 1, trainer.step(step))
        synchronize(device)
        stepped = time.perf_counter()
        self.log.steps(*reader.read())
        times = torch.tensor([stepped - begun, time.perf_counter() - stepped], dtype=torch.float64)
        peak = torch.tensor([peak_memory(device)])
        step_seconds, logging_seconds = self.group.maximum(times.to(device)).tolist()
        measured.step_seconds.append(step_seconds / steps)
        measured.logging_seconds.append(logging_seconds / steps)
        measured.peak_memory.append(int(self.group.maximum(peak.to(device))))

    def _parts(self, trainer: Trainer) -> dict[str, float]:
        """Seconds of each part of a step on this process, the first of which is profiled."""
        reader, process = StepReader(self.group), self.group.process
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if process.device.type == "cuda" else [])]
        self._together()
        with profile(activities=activities) if process.is_main else nullcontext() as profiler:
            with record_function(STEP):
                reader.add(1, trainer.step(0))
                synchronize(process.device)
            with record_function("logging"):
                self.log.steps(*reader.read())
        if profiler is None:
            return {}
        trace = self.folder / "trace.json"
        profiler.export_chrome_trace(str(trace))
        return seconds_by_part(json.loads(trace.read_text())["traceEvents"])

    def _rate(self) -> float:
        """FLOP/s of large matrix products, all processes together, each at the same time."""
        device = self.group.process.device
        self._together()
        mine = torch.tensor(product_rate(product_dtype(self.config, device), device), dtype=torch.float64)
        return float(self.group.sum(mine.to(device)))

    def _together(self) -> None:
        """Waits for the other processes."""
        self.group.sum(torch.zeros(1, device=self.group.process.device))
        synchronize(self.group.process.device)

    def _say(self, text: str) -> None:
        process = self.group.process
        if process.is_main:
            processes = f"{process.world_size} process{'es' * (process.world_size > 1)}"
            print(f"{PROGRESS}{processes}: {text}", file=sys.stderr, flush=True)


def product_dtype(config: RunConfig, device: torch.device) -> torch.dtype:
    """The type whose products are the ceiling: the config's; float32 on a CPU without instructions for bf16."""
    dtype = AMP_DTYPES[config.precision.amp]
    emulated = device.type == "cpu" and dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.float32 if emulated else dtype


def product_rate(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of a large matrix product whose output is preallocated: a median of several."""
    rows, inner, columns = PRODUCT
    one, other = torch.randn(rows, inner).to(device, dtype), torch.randn(inner, columns).to(device, dtype)
    output = torch.empty(rows, columns, dtype=dtype, device=device)
    at_once = 1 if device.type == "cpu" else 100  # a GPU takes less time for one than a CPU to ask for it
    torch.mm(one, other, out=output)
    times: list[float] = []
    while len(times) < LEAST_PRODUCTS or sum(times) < PRODUCT_SECONDS:
        synchronize(device)
        begun = time.perf_counter()
        for _ in range(at_once):
            torch.mm(one, other, out=output)
        synchronize(device)
        times.append(time.perf_counter() - begun)
    return 2 * rows * inner * columns * at_once / median(times)


def synchronize(device: torch.device) -> None:
    """Waits for all that a device was asked to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def build_bench(plan: Plan, config: RunConfig, group: Group) -> Bench:
    """Builds one model, and a trainer of it for each accumulation. Every rank must call this."""
    process, folder = group.process, Path(plan.folder)
    if process.device.type == "cpu":
        torch.set_num_threads(max(1, plan.threads // process.world_size))
        keep_freed_memory()
    torch.set_float32_matmul_precision(config.precision.matmul)
    if config.bitwise:
        process.use_reproducible_kernels()
    model = build_gpt(config.model, config.seeds.weights).to(process.device)
    model.recompute_blocks = plan.activation_checkpointing
    if plan.compile:
        said = compile_blocks(model, config, config.batch.microbatch, group)
        if process.is_main:
            print(f"{PROGRESS}{said}", file=sys.stderr, flush=True)
    optimizer, scaler = build_optimizer(model, config.optimizer), build_scaler(config.precision)
    module = SequenceLoss(model)
    gradients = gradient_sums(module, group, config)
    ways = [(accumulation, gradients) for accumulation in plan.accumulations]
    if not config.bitwise:  # which has no other way to add up
        ways.append((plan.accumulations[-1], cast(AveragedGradients, LocalGradients(module, group))))
    trainers = []
    for accumulation, way in ways:
        batch = Batch(world_size=process.world_size, microbatch=config.batch.microbatch, accumulation=accumulation)
        data = Data(dataset="random", epochs=EPOCHS, shuffle=config.data.shuffle)
        changed = config.model_copy(update={"batch": batch, "data": data})
        layout = plan_layout(batch, process.world_size, bitwise=config.bitwise)
        opened = open_training_data(changed, folder)
        trainers.append(Trainer(changed, process, layout, opened, way, optimizer, scaler))
    log = RunLog(folder / f"metrics{process.world_size}.jsonl", process.is_main, EPOCHS, config.optimizer.clip_norm)
    log.start(0, 0.0, 0)
    return Bench(group, config, trainers, log, folder)


def main(plan_file: Annotated[Path, typer.Argument()]) -> None:
    """Measures what a plan asks for; the first process writes the result beside it."""
    plan = Plan(**json.loads(plan_file.read_text()))
    config = config_from_mapping({"name": plan.name, **plan.config}, plan.name)
    process = Process.from_environment()
    with process.group() as group:
        try:
            bench = build_bench(plan, config, group)
            gc.freeze()  # as ddp_train.py does
            found = bench.measure(plan.rounds)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise OneRankError(
                f"rank {process.rank}: out of memory on {process.device} with microbatch {config.batch.microbatch}; "
                "try a smaller one: --set batch.microbatch=1"
            ) from None
        launched = Launched(
            process.world_size,
            torch.get_num_threads(),
            process.device.type,
            process.machine(),
            torch.__version__,
            str(product_dtype(config, process.device)).removeprefix("torch."),
            found,
        )
        if process.is_main:
            plan_file.with_suffix(RESULT).write_text(json.dumps(asdict(launched)))


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command()(main)
    run_command(app)
