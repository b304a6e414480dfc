"""The live view of a run: what it shows in any width, and on a real terminal."""

import io
import json
import math
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import REPOSITORY
from recorded_runs import bad_row, begin, event, full_run, train_row, validation_row, write_run
from rich.console import Console

from training.errors import UserError
from training.follow import FollowedRun
from training.watch import chart, look, view, watch_run


def shown(folder: Path, columns: int = 100) -> list[str]:
    followed = FollowedRun(folder)
    followed.look()
    console = Console(file=io.StringIO(), width=columns, color_system=None)
    console.print(view(followed, columns))
    file = console.file
    assert isinstance(file, io.StringIO)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_a_run_in_the_middle(tmp_path: Path) -> None:
    rows = [begin(0, "start", 1), *map(train_row, range(1, 11)), validation_row(5, 4.5), validation_row(10, 4.25)]
    rows.append(event(10, "checkpoint", checkpoint="step_00000010", best=True, seconds=2.0))
    folder = write_run(tmp_path / "run", rows)
    head, bar, *lines = shown(folder)
    assert re.fullmatch(r"run: step 10 of 20, last record 00:0\d ago", head)
    assert bar == " 50% " + "█" * 47 + "░" * 48
    assert lines[:6] == [
        "time           00:07 left",
        "loss           4.2000, mean of the last 10 steps 4.5858",
        "validation     4.2500 at step 10, best 4.2500 at step 10",
        "speed          2,048 tokens/s, 10,240 tokens in 00:05",
        "gradient norm  0.4000, 0 of the last 10 clipped to 0.5",
        "learning rate  0.001",
    ]
    assert lines[6:8] == ["loss up to step 10", "6.000 █"]
    assert lines[12] == "4.200 ████▅▄▂▁▁▁", "6 rows of 8 eighths between 4.2 and 6: 4.4 is 5, 4.333 is 4 of them"
    assert lines[-2:] == ["step 0: started", "step 10: saved step_00000010, the best so far"]


def test_names_are_shown_not_obeyed(tmp_path: Path) -> None:
    """An event's name may be anything; half a surrogate pair could not even be printed."""
    folder = write_run(tmp_path / "a\x1b[31m\nb", [event(0, "start"), event(0, "odd\x1b[31m\ud800\nname")])
    lines = shown(folder)
    assert lines[0] == r"a\x1b[31m\nb: waiting for its first step"
    assert r"step 0: odd\x1b[31m\ud800\nname" in lines


def test_records_that_are_a_folder_are_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(UserError, match="cannot be read"):
        look(FollowedRun(tmp_path))


def test_a_finished_run(tmp_path: Path) -> None:
    lines = shown(full_run(tmp_path / "run"))
    assert lines[0] == "run: finished at step 20 of 20"
    assert "skipped        2 steps" in lines
    assert not any(line.startswith("time ") for line in lines)


@pytest.mark.parametrize("columns", [20, 40, 80, 100])
def test_no_line_is_wider_than_the_terminal(tmp_path: Path, columns: int) -> None:
    lines = shown(full_run(tmp_path / ("long-name-" * 5)), columns)
    assert max(map(len, lines)) <= columns
    assert len(lines) < 24, "nothing is wrapped"


def test_a_run_before_its_first_step(tmp_path: Path) -> None:
    assert shown(tmp_path)[0] == f"{tmp_path.name}: waiting for its first step"
    folder = write_run(tmp_path / "bad", [begin(0, "start", 1), bad_row(1)])
    assert "loss           not finite, mean of the last 1 steps not finite" in shown(folder)


def test_a_chart_of_blocks() -> None:
    """Eighths of a row between the lowest and the highest value; a gap where there is none."""
    assert chart([0.0, 1.0, math.nan, 2.0], 12, 2) == ["2.000    █", "0.000 ▁█ █"]
    assert chart([0.0, 0.5, 1.0], 9, 1) == ["0.000 ▁▄█"]
    assert chart([float(value) for value in range(300)], 30, 1) != []
    assert chart([1.0], 20, 4) == chart([1.0, 1.0], 20, 4) == chart([], 20, 4) == []


def test_the_first_losses_do_not_press_the_others_flat() -> None:
    """An axis up to the 95th percentile, with a mark for what is above it."""
    top, bottom = chart([11.0] + [4.0 - value / 100 for value in range(40)], 60, 2)
    assert (top.split()[0], bottom.split()[0]) == ("3.990+", "3.610")
    assert top[7] == "█"


def test_without_a_terminal_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^--watch: needs a terminal; leave it out, and report\.md .* are written$"):
        watch_run(full_run(tmp_path / "run"))


# On a real terminal

WATCH = "import sys; from pathlib import Path; from training.watch import watch_run; watch_run(Path(sys.argv[1]))"


def train_line(step: int) -> str:
    return json.dumps(train_row(step))


class Watched:
    """The view in a process of its own, on a pseudo-terminal."""

    def __init__(self, folder: Path) -> None:
        self._terminal, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", WATCH, folder], cwd=REPOSITORY, stdin=theirs, stdout=theirs, stderr=theirs
        )
        os.close(theirs)
        self.output = ""

    def until(self, text: str) -> None:
        """Reads on until something has been shown."""
        deadline = time.monotonic() + 60
        while text not in self.output:
            assert time.monotonic() < deadline, self.output
            self.output += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", os.read(self._terminal, 65536).decode())

    def status(self) -> int:
        """Reads the rest, and waits for the end."""
        try:
            while piece := os.read(self._terminal, 65536):
                self.output += piece.decode(errors="replace")
        except OSError:  # how Linux tells that nobody has the terminal any more
            pass
        os.close(self._terminal)
        return self.process.wait(60)


def test_a_run_that_goes_on_and_ends_while_it_is_watched(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [begin(0, "start", 1), train_row(1)])
    watched = Watched(folder)
    watched.until("run: step 1 of 20")
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write(f"{train_line(2)}\n{train_line(3)[:30]}")
        metrics.flush()
        watched.until("run: step 2 of 20")
        metrics.write(f'{train_line(3)[30:]}\n{{"kind": "event", "step": 3, "event": "stopped"}}\n')
    watched.until(f"{folder}: stopped at step 3 of 20")
    assert watched.status() == 0
    assert "Traceback" not in watched.output


def test_ctrl_c_leaves_quietly(tmp_path: Path) -> None:
    watched = Watched(write_run(tmp_path / "run", [begin(0, "start", 1), train_row(1)]))
    watched.until("run: step 1 of 20")
    watched.process.send_signal(signal.SIGINT)
    assert watched.status() == 0
    assert "Traceback" not in watched.output
