"""Steps read from the device, and when a run that goes wrong is ended."""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Workplace
from known_model import ONE_TO_FOUR, SMALL, build_trainer
from ranks import on_ranks
from small_records import GOOD, INFINITE, NAN, NOT_FINITE_AT_LAST, OVERFLOW, WITHOUT_TARGETS
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from model.gpt import build_gpt
from training.config import Batch, Optimizer, Precision
from training.distributed import Group, Process
from training.loss import SequenceLoss
from training.step import StepResult
from training.step_records import (
    MOST_NONFINITE_IN_A_ROW,
    StepReader,
    StepRecord,
    nonfinite_in_a_row,
    what_was_not_finite,
)

# Reading from the device


class Waits(TorchFunctionMode):
    """Counts what would make the host wait for a GPU: values that Python is given."""

    count = 0
    NAMES = ("item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__float__", "__int__", "__index__", "__array__")

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += getattr(func, "__name__", "") in self.NAMES
        return func(*args, **(kwargs or {}))


class Syncs(TorchDispatchMode):
    """The same for what torch does itself, the backward and the optimizer included."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return func(*args, **(kwargs or {}))


def counted_waits(group: Group, reproducibility: str, accumulation: int) -> list[tuple[int, int]]:
    """(in a step, in the read after it) of some steps with dropout, clipping and autocast."""
    model = build_gpt(dataclasses.replace(SMALL, dropout=0.1), seed=0)
    steps = (ONE_TO_FOUR,) * 4
    trainer = build_trainer(
        group,
        model,
        steps,
        Batch(world_size=1, microbatch=4 // accumulation, accumulation=accumulation),
        optimizer=Optimizer(learning_rate=1e-3, clip_norm=0.1),
        precision=Precision(amp="bf16", matmul="highest"),
        reproducibility=reproducibility,
    )
    reader, counts = StepReader(group), []
    for step in range(len(steps)):
        counted = []
        for action in (lambda: reader.add(step + 1, trainer.step(step)), reader.read):  # noqa: B023
            with Syncs() as syncs, Waits() as waits:
                action()
            counted.append(syncs.count + waits.count)
        counts.append((counted[0], counted[1]))
    return counts


@pytest.mark.parametrize("reproducibility", ["rounding", "bitwise"])
def test_no_step_waits_for_the_device_and_a_read_waits_as_often_for_any_number_of_microbatches(
    reproducibility: str,
) -> None:
    for accumulation in (1, 4):
        counts = on_ranks(1, counted_waits, reproducibility, accumulation)[0]
        assert [of_step for of_step, _ in counts] == [0] * 4
        assert [of_read for _, of_read in counts] == [4] * 4, "sums, extremes, what is common, and when to read next"


@pytest.fixture
def group() -> Iterator[Group]:
    """One process."""
    with Process.from_environment().group() as group:
        yield group


def result(loss_sum: float, targets: int = 4, norm: float = 0.5, scale: float = 1.0) -> StepResult:
    low, high = (loss_sum / targets - 1, loss_sum / targets + 1) if targets else (math.inf, -math.inf)
    return StepResult(
        loss_sum=torch.tensor(loss_sum, dtype=torch.float64),
        loss_min=torch.tensor(low, dtype=torch.float64),
        loss_max=torch.tensor(high, dtype=torch.float64),
        grad_norm=torch.tensor(norm),
        loss_scale=torch.tensor(scale),
        target_tokens=targets,
        learning_rate=0.25,
        input_tokens=8,
    )


def test_steps_are_read_together_and_in_order(group: Group) -> None:
    """Sums become means over the targets; a loss without targets does not exist."""
    reader = StepReader(group)
    assert reader.add(1, result(8.0))
    reader.add(2, result(0.0, targets=0, norm=0.0))
    reader.add(3, result(math.nan, norm=math.inf, scale=65536.0))
    records, seconds = reader.read()
    assert seconds > 0
    assert records[0] == StepRecord(1, 2.0, 1.0, 3.0, 0.5, 1.0, 4, 0.25, 8)
    assert not records[0].skipped
    assert records[1] == StepRecord(2, None, None, None, 0.0, 1.0, 0, 0.25, 8)
    assert records[1].skipped
    assert not records[1].overflow
    assert [record.step for record in records] == [1, 2, 3]
    assert records[2].loss is not None
    assert math.isnan(records[2].loss)
    assert records[2].skipped
    assert records[2].overflow
    assert reader.read() == ([], 0.0)


def test_a_wish_to_stop_is_agreed_in_a_read(group: Group) -> None:
    """Not before: all processes know it after the same step. On several: tests/test_interruption.py."""
    wishes: list[str] = []
    reader = StepReader(group, lambda: bool(wishes))
    for step, expected in ((1, False), (2, True)):
        reader.add(step, result(8.0))
        reader.read()
        assert reader.must_stop is expected
        wishes.append("stop")
        assert reader.must_stop is expected


def test_reads_follow_the_speed(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """About one a second, of at most a hundred steps, at least one; without the time that was left out."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    reader = StepReader(group)

    def steps_to_the_next_read(seconds_per_step: float) -> int:
        for count in range(1, 1000):
            now[0] += seconds_per_step
            if reader.add(count, result(8.0)):
                assert reader.read()[1] == pytest.approx(count * seconds_per_step)
                return count
        raise AssertionError("never read")

    assert [steps_to_the_next_read(0.1) for _ in range(2)] == [1, 10]
    assert [steps_to_the_next_read(0.001) for _ in range(2)] == [10, 100]
    assert [steps_to_the_next_read(4.0) for _ in range(3)] == [100, 1, 1]
    now[0] += 50
    reader.restart_clock()
    assert steps_to_the_next_read(4.0) == 1


# Steps that are not finite


@pytest.mark.parametrize(
    ("records", "before", "count"),
    [
        ([GOOD, GOOD], 0, 0),
        ([NAN], 0, 1),
        ([NAN, INFINITE, NAN, INFINITE], 0, 4),
        ([NAN] * 5, 0, 5),
        ([NAN] * 4 + [GOOD], 0, 0),
        ([NAN] * 4 + [GOOD, NAN], 0, 1),
        ([NAN], 4, 5),
        ([GOOD], 4, 0),
        ([NAN] * 5 + [GOOD] * 3, 0, 5),
        ([NAN] * 9, 0, 5),
        ([OVERFLOW] * 20, 0, 0),
        ([OVERFLOW] * 20, 4, 4),
        ([OVERFLOW] * 16 + [NOT_FINITE_AT_LAST] * 5, 0, 5),
        ([NAN, OVERFLOW, NAN], 0, 2),
        ([WITHOUT_TARGETS] * 20, 0, 0),
        ([NAN, WITHOUT_TARGETS, NAN], 2, 4),
        ([], 3, 3),
    ],
)
def test_five_steps_in_a_row_that_are_not_finite_are_too_many(
    records: list[StepRecord], before: int, count: int
) -> None:
    """R09: also across reads; a scaler's search is not counted, nor is a step without targets; neither ends the row."""
    assert nonfinite_in_a_row(records, before) == count
    assert MOST_NONFINITE_IN_A_ROW == 5


def spoilt(group: Group, bad: dict[int, float], sequences: int = 20) -> StepRecord:
    """The record of a step whose sequences, dealt to the ranks in turn, have some bad losses among good ones."""
    positions = range(group.process.rank, sequences, group.process.world_size)
    losses = torch.tensor([bad.get(position, 2.0) for position in positions])
    reader = StepReader(group, spans=lambda step, places: [(100 * step + place, 7) for place in places])
    good = result(float(losses.sum()), targets=sequences, norm=math.nan if bad else 0.5)
    reader.add(3, dataclasses.replace(good, losses=losses, positions=positions, sequences=sequences))
    reader.add(4, dataclasses.replace(result(1.0), losses=losses[:0], positions=[], sequences=sequences))
    (record, other), _ = reader.read()
    assert other.bad_sequences == 0
    return record


def test_sequences_whose_loss_is_not_finite_are_named_on_all_ranks() -> None:
    """At most eight of them, those first in the step; nothing is asked where all is well."""
    some = {19: math.nan, 4: math.inf, 5: math.nan}
    many = dict.fromkeys(range(2, 12), math.nan)
    for bad, named in ((some, [4, 5, 19]), (many, [2, 3, 4, 5, 6, 7, 8, 9]), ({}, [])):
        records = on_ranks(2, spoilt, bad)
        for record in records:
            assert record.bad_sequences == len(bad)
            assert record.bad_spans == tuple((200 + position, 7) for position in named)
            assert record.sequences == (20 if bad else 0)


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        (NAN, "the gradient was not finite, though each loss was"),
        (dataclasses.replace(INFINITE, out_of_range=True), "the gradient was out of bitwise mode's range"),
        (
            dataclasses.replace(NAN, sequences=96, bad_sequences=1, bad_spans=((4096, 5121),)),
            "the loss of 1 of 96 sequences was not finite: tokens [4,096, 5,121) of the training file",
        ),
        (
            dataclasses.replace(NAN, sequences=96, bad_sequences=3, bad_spans=((0, 9), (8, 17))),
            "the loss of 3 of 96 sequences was not finite: tokens [0, 9), [8, 17), ... of the training file",
        ),
    ],
)
def test_what_was_not_finite_in_words(record: StepRecord, sentence: str) -> None:
    assert what_was_not_finite(record) == sentence


def test_a_run_names_the_sequences_that_spoil_it(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sequence that holds a certain token has no finite loss: its step is skipped, told, and the run goes on."""
    tokens = np.arange(30_000) % 250
    tokens[[32 * 20 + 5, 32 * 37 + 1]] = 256  # sequences 20 and 37 of 32 tokens; a step has 16
    workplace.write_tokens(tokens=tokens.astype(np.uint16))
    forward = SequenceLoss.forward

    def spoil(self: SequenceLoss, inputs: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        spoilt = torch.where((inputs == 256).any(dim=1), math.nan, 1.0)
        loss, sums = forward(self, inputs, *others)
        return loss * spoilt.sum(), sums * spoilt

    monkeypatch.setattr(SequenceLoss, "forward", spoil)
    config = workplace.write_config(data={"train_tokens": 4 * 512}, evaluation={"every": None})
    run = workplace.train_here(config)
    spans = {2: [640, 673], 3: [1184, 1217]}
    events = [event for event in run.of_kind("event") if event["event"] == "nonfinite"]
    assert [(event["step"], event["bad_sequences"], event["bad_spans"]) for event in events] == [
        (step, 1, [span]) for step, span in spans.items()
    ]
    assert [line["skipped"] for line in run.of_kind("train")] == [False, True, True, False]
    told = [line for line in capsys.readouterr().err.splitlines() if "not finite" in line and "sequences" in line]
    assert told == [
        f"step {step}: the loss of 1 of 16 sequences was not finite: tokens [{start:,}, {stop:,}) of the training "
        "file; the update is skipped"
        for step, (start, stop) in spans.items()
    ]
    report = (run.folder / "report.md").read_text()
    assert "Non-finite steps" in report
    assert json.loads((run.folder / "latest" / "state.json").read_text())["nonfinite_in_a_row"] == 0
