"""Reads JSON files that others may have written."""

import json
from pathlib import Path
from typing import Any

from training.errors import UserError

MOST_BYTES = 256 * 1024**2


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
