"""How a command ends: results, one sentence, or a traceback of something nobody foresaw."""

import errno
import io
import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Never

import typer

from training.errors import InterruptionError, OneRankError, RunError, UserError, one_line
from training.launcher import is_news, note_mistake
from training.standard_streams import let_nothing_shown_end_the_command

# typer brings its own click or uses the package, depending on its version.
CommandLineError: type[Exception] = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)
INTERRUPTED = 130
"""What recent versions of typer make of Ctrl-C; older ones raise Abort."""
SECONDS_FOR_THE_SPEAKER = 1.0
"""Before the other processes end: torchrun terminates all as soon as one has."""


def run_command(app: typer.Typer) -> Never:
    """Runs a command line to its exit status: 0 done, 2 the user's mistake, 1 anything else.

    Of the processes of a run, one speaks; and not again when torchrun starts it again.
    """
    let_nothing_shown_end_the_command()
    try:
        _be_ended_like_ctrl_c()
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="surrogateescape")  # a path is printed in the bytes it was given in
        status = app(standalone_mode=False)
        if status == INTERRUPTED:
            raise KeyboardInterrupt
        _flush()
        sys.exit(status)
    except UserError as mistake:
        _end(mistake, 2)
    except OneRankError as failure:  # whichever rank it is
        print(f"error: {one_line(failure)}", file=sys.stderr, flush=True)
        os._exit(1)  # PyTorch would wait for ranks that wait for this one
    except RunError as failure:
        _end(failure, 1)
    except InterruptionError:  # said already, by rank 0; all is saved and closed
        sys.stderr.flush()
        os._exit(1)  # to take PyTorch down takes seconds of those that torchrun gives
    except OSError as error:
        _flush()
        if error.errno != errno.ENAMETOOLONG:
            raise
        name = one_line(error.filename)
        _end(UserError(f"{name[:60]}...: the name is longer than this file system takes; give a shorter one"), 2)
    except (KeyboardInterrupt, typer.Abort):
        _say("interrupted")
        sys.exit(1)
    except CommandLineError as error:
        if _speaks() and is_news(str(error)):
            error.show()  # type: ignore[attr-defined]
        note_mistake()
        sys.exit(2)


def _be_ended_like_ctrl_c() -> None:
    """Lets SIGTERM end this process as Ctrl-C does, so that it removes what is half done.

    Not torchrun's workers: one that waits for the others would be late to see it, and torchrun waits for all. They end
    at once, but while they train (training/interruption.py).
    """
    if "RANK" in os.environ or threading.current_thread() is not threading.main_thread():
        return
    own = os.getpid()

    def end(number: int, frame: FrameType | None) -> None:
        if os.getpid() != own:  # forked by a library
            os._exit(128 + number)
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGTERM, end)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # as it is while ddp_train.py imports
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _flush() -> None:
    """Brings the results out while a failure can still be told: a full disk, or nobody who reads them."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python fails with it again at its end
        if isinstance(error, BrokenPipeError):
            sys.exit(1)
        _end(RunError(f"standard output: cannot be written ({error}); what the command did is done"), 1)


def _speaks() -> bool:
    # Local rank: on each machine somebody must say what is wrong with that machine.
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _say(line: str) -> None:
    if _speaks() and is_news(line):
        print(line, file=sys.stderr, flush=True)


def _end(error: Exception, status: int) -> Never:
    _say("\n".join(map(one_line, (f"error: {error.args[0] if error.args else error}", *error.args[1:]))))
    if not _speaks():
        time.sleep(SECONDS_FOR_THE_SPEAKER)
    if status == 2:
        note_mistake()
    sys.exit(status)
