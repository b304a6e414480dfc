"""The file for TensorBoard, read by TensorBoard's own definition of its format."""

import math
import struct
from pathlib import Path
from typing import Any

import pytest
from recorded_runs import full_run, train_row, validation_row, write_run
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

from training.hub.tensorboard import event_file
from training.metrics_file import read_metrics


def read(content: bytes) -> list[Any]:
    """The events, with every checksum checked."""
    events, position = [], 0
    while position < len(content):
        length, check = struct.unpack_from("<QI", content, position)
        assert check == masked_crc32c(content[position : position + 8])
        record = content[position + 12 : position + 12 + length]
        assert struct.unpack_from("<I", content, position + 12 + length)[0] == masked_crc32c(record)
        events.append(Event.FromString(record))
        position += 16 + length
    return events


def curve(events: list[Any], tag: str) -> dict[int, float]:
    return {event.step: value.simple_value for event in events for value in event.summary.value if value.tag == tag}


def test_the_curves_of_a_run(tmp_path: Path) -> None:
    """Each step once, in order, at its training time; what is not finite is left out; the same again, byte for byte."""
    metrics = read_metrics(full_run(tmp_path / "run") / "metrics.jsonl")
    content = event_file(metrics)
    first, *events = read(content)
    assert first.file_version == "brain.Event:2"
    assert [event.step for event in events] == sorted([*range(1, 21), 10, 15, 20])
    losses = curve(events, "train/loss")
    assert sorted(losses) == [step for step in range(1, 21) if step not in (1, 7)]
    assert losses[20] == pytest.approx(4.1, rel=1e-6)
    assert curve(events, "train/grad_norm")[13] == pytest.approx(2.5)
    assert curve(events, "train/learning_rate")[1] == pytest.approx(1e-3)
    assert curve(events, "train/tokens_per_second")[2] == 2048
    assert curve(events, "validation/loss") == pytest.approx({10: 4.25, 15: math.log(64), 20: 4.2})
    assert curve(events, "validation/bits_per_byte")[15] == 1.25
    assert {event.step: event.wall_time for event in events}[12] == 5.5
    assert event_file(metrics) == content


def test_a_run_of_no_step_and_a_long_one(tmp_path: Path) -> None:
    assert len(read(event_file(read_metrics(write_run(tmp_path / "none", []) / "metrics.jsonl")))) == 1
    rows = [train_row(step) for step in (1, 127, 128, 40_000)] + [validation_row(2**31, None)]
    events = read(event_file(read_metrics(write_run(tmp_path / "long", rows) / "metrics.jsonl")))
    assert [event.step for event in events] == [0, 1, 127, 128, 40_000, 2**31]
