"""JSON: strict text of our own, and files that others may have written."""

import json
import math
from pathlib import Path
from typing import Any

from training.errors import UserError

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


def read_json_object(path: Path, remedy: str) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises:
        UserError: it cannot be read, is too large or nested too deeply, or holds something else.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            raise UserError(f"{path}: is larger than {MOST_BYTES:,} bytes, too large for what it should be; {remedy}")
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error}); {remedy}") from None
    except RecursionError:
        raise UserError(f"{path}: cannot be read as JSON (it is nested too deeply); {remedy}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: must be a JSON object; {remedy}")
    return values
