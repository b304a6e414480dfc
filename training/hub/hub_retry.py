"""What the Hub's client raises, which of it can pass, and trying again: for downloads and uploads.

huggingface_hub is imported inside the functions, because importing it takes longer than `--help` should.
"""

import json
import re
import sys
import time
from collections.abc import Callable
from typing import TypeVar, cast

from training.errors import RunError, UserError

WAITS = (2.0, 8.0, 30.0, 60.0)
"""Seconds before each further attempt; the client itself has by then tried most requests six times in 23 seconds."""
LONGEST_WAIT = 330.0  # the Hub counts requests per five minutes

Say = Callable[[str], None]
Result = TypeVar("Result")


def patiently(
    attempt: Callable[[], Result],
    problem_of: Callable[[Exception], str],
    say: Say,
    passes: Callable[[BaseException], bool] | None = None,
) -> Result:
    """Tries until it works, or has failed for good.

    Args:
        attempt: what is tried; it may be done again.
        problem_of: a failure in words.
        say: shows a line to the user.
        passes: whether a failure may pass; `may_pass` unless given.

    Raises:
        Exception: the last of `client_errors`.
    """
    for wait in (*WAITS, None):
        try:
            return attempt()
        except client_errors() as error:
            if wait is None or not (passes or may_pass)(error):
                raise
            pause = max(wait, min(_asked_to_wait(error), LONGEST_WAIT))
            what, _, remedy = problem_of(error).rpartition("; ")  # the remedy is for the last failure
            say(f"{what or remedy}; trying again in {pause:.0f} s")
            time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


def client_errors() -> tuple[type[Exception], ...]:
    """What the client raises where the Hub, the network or the disk refuses."""
    from huggingface_hub.errors import HfHubHTTPError

    # Its first base is the root of httpx, or of its successor: whichever this version of the client uses. An answer of
    # another form than the Hub's is one of the last.
    form = (ValueError, KeyError, TypeError, AttributeError)
    return (cast(type[Exception], HfHubHTTPError.__bases__[0]), OSError, RuntimeError, *form)


def to_stderr(line: str) -> None:
    """Shows a line to the user, beside what a command prints."""
    print(line, file=sys.stderr, flush=True)


def failure_kind(error: BaseException) -> type[RunError] | type[UserError]:
    """Whose mistake a failure is: where the Hub, the network or the disk refuses, none of the user's."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    cause = cause_of(error)
    if may_pass(error) or is_wrong_form(error):
        return RunError
    if status_of(cause) is not None or isinstance(cause, (OfflineModeIsEnabled, ValueError)):
        return UserError
    return RunError


def is_wrong_form(error: BaseException) -> bool:
    """Whether an answer has not the form of the Hub's answers, on which the client stumbles in these ways."""
    return isinstance(cause_of(error), (TypeError, KeyError, AttributeError))


def may_pass(error: BaseException) -> bool:
    """Whether the same request may succeed a little later."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    cause = cause_of(error)
    status = status_of(cause)
    if status is not None:
        return status in (408, 429) or status >= 500
    if isinstance(cause, OfflineModeIsEnabled):
        return False
    network = (HfHubHTTPError.__bases__[0], ConnectionError, TimeoutError)
    # A page of HTML where the client expects JSON comes from a proxy, or from a Hub in trouble; a RuntimeError of
    # unknown cause is Xet's.
    return isinstance(cause, (*network, json.JSONDecodeError, RuntimeError))


def is_unreachable(error: BaseException) -> bool:
    """Whether nobody has answered at all: then there may be no network, and waiting would not help."""
    cause = cause_of(error)
    return status_of(cause) is None and re.search("Connect|Timeout", type(cause).__name__) is not None


def cause_of(error: BaseException) -> BaseException:
    """The client wraps the failure of a large file in a RuntimeError, and of a download in "cannot find it here"."""
    return error.__cause__ if isinstance(error, (RuntimeError, FileNotFoundError)) and error.__cause__ else error


def status_of(error: BaseException) -> int | None:
    """The HTTP status behind an exception, if the Hub has answered."""
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, HfHubHTTPError):
        return int(error.response.status_code)
    in_text = re.search(r"HTTP status (?:client|server) error \((\d{3})", str(error))  # of Xet's own client
    return int(in_text[1]) if in_text else None


def _asked_to_wait(error: BaseException) -> float:
    """Seconds that the Hub asks for: `Retry-After: 7`, or where it gets too many requests `RateLimit: "api";r=0;t=55`.

    The latter comes with other answers too, and tells then how long the present five minutes last.
    """
    from huggingface_hub.errors import HfHubHTTPError

    cause = cause_of(error)
    if not isinstance(cause, HfHubHTTPError):
        return 0.0
    headers = cause.response.headers
    asked = re.search(r"t=(\d+)", headers.get("RateLimit", "")) if cause.response.status_code == 429 else None
    seconds = headers.get("Retry-After", "") or (asked[1] if asked else "0")
    return float(seconds) if seconds.isdecimal() else 0.0
