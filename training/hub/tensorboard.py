"""A run's metrics as a file that TensorBoard reads, and that the Hub shows as "Training metrics".

The format takes a few lines: records as tensorflow/core/lib/io/record_writer.cc frames them, each an Event of
tensorflow/core/util/event.proto. A library that writes it would put the machine's name and the time of day in it; so
the same metrics give the same bytes.
"""

import math
import struct
from collections.abc import Mapping

from training.metrics_file import Metrics

FILE = "events.out.tfevents.0.isobatch"
"""The files that TensorBoard reads have `tfevents` in their names."""
POLYNOMIAL = 0x82F63B78  # CRC-32C (Castagnoli), reflected
TRAIN = {"loss": "train/loss", "grad_norm": "train/grad_norm", "learning_rate": "train/learning_rate"}
TRAIN |= {"tokens_per_second": "train/tokens_per_second"}
VALIDATION = {"loss": "validation/loss", "bits_per_byte": "validation/bits_per_byte"}


def event_file(metrics: Metrics) -> bytes:
    """The content of the file: the curves of training and validation, without values that are not finite.

    Its clock is the training time since the run's beginning, in seconds.
    """
    seconds = dict(zip(metrics.train["step"].tolist(), metrics.train["seconds"].tolist(), strict=True))
    events = []
    for rows, tags in ((metrics.train, TRAIN), (metrics.validation, VALIDATION)):
        columns = [(tag, rows[name].tolist()) for name, tag in tags.items()]
        for number, step in enumerate(rows["step"].tolist()):
            values = {tag: column[number] for tag, column in columns if math.isfinite(column[number])}
            events.append((step, seconds.get(step, 0.0), values))
    events.sort(key=lambda event: event[0])
    return version() + b"".join(scalars(time, step, values) for step, time, values in events)


def version() -> bytes:
    """The record that each file begins with."""
    return _event(0.0, 0, _text(3, b"brain.Event:2"))


def restart(time: float, step: int) -> bytes:
    """A record by which a reader forgets what it has read of this step and of those after it: a SessionLog's START."""
    return _event(time, step, _text(7, b"\x08\x01"))


def scalars(time: float, step: int, values: Mapping[str, float]) -> bytes:
    """The record of a step's values by their tags; time in seconds."""
    entries = (_text(1, tag.encode()) + b"\x15" + struct.pack("<f", value) for tag, value in values.items())
    return _event(time, step, _text(5, b"".join(_text(1, entry) for entry in entries)))


def _event(time: float, step: int, body: bytes) -> bytes:
    return _record(b"\x09" + struct.pack("<d", time) + _number(2, step) + body)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _text(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    """Seven bits a byte, the low ones first."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _record(content: bytes) -> bytes:
    length = struct.pack("<Q", len(content))
    return length + struct.pack("<I", _checksum(length)) + content + struct.pack("<I", _checksum(content))


def _table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return table


TABLE = _table()


def _checksum(content: bytes) -> int:
    """The masked CRC-32C of a record."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc = TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
