"""What a run shows of itself: the lines in a file (more of them in test_metrics.py), and the bar on a real terminal."""

import os
import pty
import re
import subprocess
import sys

import pytest
from conftest import REPOSITORY

from training.pace import Pace
from training.progress import Progress, duration, validation_line

ON_A_TERMINAL = """
import fcntl, struct, sys, termios
fcntl.ioctl(2, termios.TIOCSWINSZ, struct.pack("HHHH", 24, int(sys.argv[1]), 0, 0))
from training.pace import Pace
from training.progress import Progress
pace = Pace(33165, 617, 617)
progress = Progress(pace)
progress.start(32000, (31863, 3.538161))
pace.evaluated(2000.0)
pace.trained(1, 4.5)
progress.show(32001, 10.991234, 1285044.0)
progress.validation(32084, 10.6, 19660800, (31863, 3.538161))
progress.show(32085, 3.6, 1285044.0)
progress.close()
"""


def shown_on_a_terminal(columns: int) -> list[str]:
    """All that was shown, line by line, the earlier states of a line included."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", ON_A_TERMINAL, str(columns)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        try:
            while piece := os.read(ours, 4096):
                shown += piece
        except OSError:  # how Linux tells that nobody has the terminal any more
            pass
        os.close(ours)
    assert process.returncode == 0, shown.decode()
    return [re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", line).rstrip() for line in re.split(r"[\r\n]+", shown.decode())]


def test_a_wide_terminal() -> None:
    """Bar, time left and next evaluation; no line is longer than 100 columns, whatever the terminal's width."""
    lines = shown_on_a_terminal(200)
    # 1,164 steps of 4.5 s, and three evaluations of 2,000 s.
    assert " 96%|█████████▋| 32001/33165  loss 10.9912, 1,285,044 tokens/s, 3:07:18 left" in lines
    assert "best 3.5382 at step 31,863, next evaluation in 06:13" in lines
    assert "step 32,084: validation loss 10.6000 over 19,660,800 tokens, best 3.5382 at step 31,863" in lines
    assert "validation loss 10.6000 at step 32,084, best 3.5382 at step 31,863, next evaluation in 46:12" in lines
    assert max(len(line) for line in lines) <= 100


def test_a_narrow_terminal() -> None:
    lines = [line for line in shown_on_a_terminal(40) if not line.startswith("step ")]
    assert max(len(line) for line in lines) <= 40
    assert " 96%|█████████▋| 32001/33165  loss 10.9" in lines


@pytest.mark.parametrize(
    ("evaluate_every", "said"),
    [(None, ""), (0, ""), (4, ", next evaluation in 00:03"), (10, ""), (7, ", next evaluation in 00:06")],
)
def test_the_next_evaluation_is_said_unless_it_is_the_last(
    evaluate_every: int | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pace = Pace(10, evaluate_every)
    pace.trained(1, 1.0)
    progress = Progress(pace)
    progress.start(0, None)
    progress.show(1, 2.0, 64.0)
    assert capsys.readouterr().err == f"step 1 of 10: loss 2.0000, 64 tokens/s, 00:09 left{said}\n"


def test_the_line_below_the_bar() -> None:
    pace = Pace(100)
    assert validation_line(None, None, pace, 1) == ""
    assert validation_line((8, 3.0), (8, 3.0), pace, 9) == "validation loss 3.0000 at step 8"
    assert validation_line(None, (8, 3.0), pace, 9) == "best 3.0000 at step 8", "after a resumption"
    assert validation_line(None, None, Pace(100, 10), 1) == "next evaluation in --:--"


def test_times() -> None:
    assert [duration(seconds) for seconds in (0.4, 95, 3600, 146292, float("inf"))] == [
        "00:00",
        "01:35",
        "1:00:00",
        "40:38:12",
        "--:--",
    ]
