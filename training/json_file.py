"""JSON: strict text of our own, and files that others may have written."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from training.errors import UserError
from training.foreign_file import instead

MOST_BYTES = 256 * 1024**2


def strict(value: Any) -> Any:
    """The value as strict JSON can hold it: null for a number that is not finite, also in dicts, lists and tuples."""
    if isinstance(value, dict):
        return {key: strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def strict_json(value: Any) -> str:
    """The value as one line of strict JSON."""
    return json.dumps(strict(value), allow_nan=False)


def parse_json(text: str | bytes, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """What a text says in JSON.

    Args:
        text: in bytes, it is UTF-8.
        parse_constant: as `json.loads` has it.

    Raises:
        ValueError: it is no JSON, or nested too deeply.
    """
    try:
        return json.loads(text, parse_constant=parse_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def append_objects(path: Path, *objects: dict[str, Any]) -> None:
    """Adds objects to a file of JSON lines, one a line, and brings them to the disk.

    A last line that a crash has cut off is removed first: what is added would be glued to it, and neither could be
    read. One that lacks nothing but its newline gets it.

    Raises:
        OSError: the file cannot be written.
    """
    with path.open("a+b") as file:
        file.seek(0)
        whole, newline, last = file.read().rpartition(b"\n")
        if last and _is_object(last):
            file.write(b"\n")
        elif last:
            file.truncate(len(whole) + len(newline))
        file.write("".join(strict_json(item) + "\n" for item in objects).encode())
        file.flush()
        os.fsync(file.fileno())


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(parse_json(line), dict)
    except ValueError:
        return False


def read_json_object(path: Path, remedy: str) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises:
        UserError: it cannot be read, is too large or nested too deeply, or holds something else.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            raise UserError(f"{path}: is larger than {MOST_BYTES:,} bytes, too large for what it should be; {remedy}")
        values = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error}{instead(path)}); {remedy}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: must be a JSON object; {remedy}")
    return values
