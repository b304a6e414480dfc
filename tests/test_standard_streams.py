"""What is shown may be lost, and nothing else with it."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import REPOSITORY, Workplace

from training.checkpoint_files import find_checkpoint

PROGRAM = """
import os, sys
from training.standard_streams import let_nothing_shown_end_the_command
let_nothing_shown_end_the_command()
with open("data", "w") as data:
    for number in range(3):
        print("shown", number, file=sys.stderr, flush=True)
        os.write(2, b"by a library")
    data.write("mine")
print(sys.stderr.isatty(), sys.stderr.encoding)
"""


def run_with(redirection: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    environment = {"PYTHONPATH": str(REPOSITORY), "PYTHONUTF8": "1"}
    command = ["bash", "-c", f'"$0" -c "$1" {redirection}', sys.executable, PROGRAM]
    return subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True, check=False)


@pytest.mark.parametrize("redirection", ["2>/dev/full", "2>&-", "<&- 2>&-", "2>&1 >&- | true; exit ${PIPESTATUS[0]}"])
def test_standard_error_that_cannot_be_written_is_no_failure(tmp_path: Path, redirection: str) -> None:
    """And a file that is opened where it was closed does not get what is shown."""
    done = run_with(redirection, tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "data").read_text() == "mine"


def test_what_can_be_written_is(tmp_path: Path) -> None:
    done = run_with("", tmp_path)
    assert done.stderr == "".join(f"shown {number}\nby a library" for number in range(3))
    assert done.stdout == "False utf-8\n"


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_whose_reader_is_gone_saves_when_it_is_asked_to_stop(workplace: Workplace, processes: int) -> None:
    """`... 2>&1 | tee log` and Ctrl-C, which ends the tee too; or a terminal that is closed."""
    config = workplace.write_config(
        data={"train_tokens": 20_480, "epochs": 500}, evaluation={"every": None}, checkpoint={"every": None}
    )
    process = workplace.start(config, processes=processes)
    assert process.stdout is not None
    assert process.stderr is not None
    while "starting" not in process.stderr.readline():
        pass
    process.stderr.close()
    metrics = workplace.folder / "checkpoints" / "run" / "metrics.jsonl"
    while '"step": 30,' not in metrics.read_text():
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 1
    process.stdout.close()
    assert find_checkpoint(metrics.parent, "latest").path.name >= "step_00000030"
    assert '"interrupted"' in metrics.read_text().splitlines()[-1]
