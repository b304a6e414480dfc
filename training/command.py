"""How a command ends: results, one sentence, or a traceback of something nobody foresaw."""

import os
import sys
from typing import Never

import typer

from training.errors import RunError, UserError

# typer brings its own click or uses the package, depending on its version.
CommandLineError: type[Exception] = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)
INTERRUPTED = 130
"""What recent versions of typer make of Ctrl-C; older ones raise Abort."""


def run_command(app: typer.Typer) -> Never:
    """Runs a command line to its exit status: 0 done, 2 the user's mistake, 1 anything else.

    Of the processes of a run, one speaks; and not again when torchrun starts it again.
    """
    try:
        status = app(standalone_mode=False)
        if status == INTERRUPTED:
            raise KeyboardInterrupt
        sys.exit(status)
    except UserError as mistake:
        _end(f"error: {mistake}", 2)
    except RunError as failure:
        _end(f"error: {failure}", 1)
    except (KeyboardInterrupt, typer.Abort):
        _end("interrupted", 1)
    except CommandLineError as error:
        if _speaks():
            error.show()  # type: ignore[attr-defined]
        sys.exit(2)


def _speaks() -> bool:
    # Local rank: on each machine somebody must say what is wrong with that machine.
    return os.environ.get("LOCAL_RANK", "0") == "0" and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"


def _end(text: str, status: int) -> Never:
    if _speaks():
        print(text, file=sys.stderr, flush=True)
    sys.exit(status)
