"""How a command ends, in processes of its own; test_cli.py and test_runs.py have what each command says."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY

from training.errors import LONGEST_LINE, UserError, one_line

PROGRAM = """
import sys, time
from pathlib import Path
import typer
from training.command import run_command
from training.errors import OneRankError, UserError

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)

@app.command()
def do(what: str) -> None:
    if what == "wait":
        try:
            print("waiting", flush=True)
            time.sleep(60)
        finally:
            Path("cleaned").touch()
    elif what == "print":
        print("a result")
    elif what == "long":
        Path("x" * 300).is_dir()
    elif what == "one rank":
        raise OneRankError("rank 3: out of memory")
    else:
        raise UserError(f"{what}: is wrong", "  - a\\x1b[31m", "  - b")

run_command(app)
"""


def start(folder: Path, what: str, stdout: int = subprocess.PIPE, **variables: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", PROGRAM, what]
    environment = {"PYTHONPATH": str(REPOSITORY), "PYTHONUTF8": "1", **variables}
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=stdout, stderr=subprocess.PIPE, text=True)


def test_sigterm_ends_a_command_as_ctrl_c_does(tmp_path: Path) -> None:
    """What is half done is removed, and the exit status is 1."""
    with start(tmp_path, "wait") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (1, "interrupted\n")
    assert (tmp_path / "cleaned").exists()


def test_what_one_rank_alone_knows_it_says_itself(tmp_path: Path) -> None:
    """Other sentences are those of the first process of a machine."""
    for what, said, status in (("one rank", "error: rank 3: out of memory\n", 1), ("mistake", "", 2)):
        with start(tmp_path, what, RANK="3", LOCAL_RANK="3") as process:
            assert process.communicate(timeout=60)[1] == said
            assert process.returncode == status


def test_results_that_cannot_be_written_are_told(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full, start(tmp_path, "print", full.fileno()) as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.startswith("error: standard output: cannot be written ([Errno 28]")
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("one\ntwo\x1b", "error: one\\ntwo\\x1b: is wrong\n  - a\\x1b[31m\n  - b\n"),
        ("long", f"error: {'x' * 60}...: the name is longer than this file system takes; give a shorter one\n"),
    ],
)
def test_a_mistake_is_one_sentence_whatever_it_names(tmp_path: Path, what: str, expected: str) -> None:
    with start(tmp_path, what) as process:
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, output, errors) == (2, "", expected)


def test_what_cannot_be_seen_is_spelled_out() -> None:
    assert one_line("naïve 東京 a\tb\udcff\u2028") == "naïve 東京 a\\tb\\udcff\\u2028"
    assert len(one_line("x" * 3_000_000)) == LONGEST_LINE + 5
    assert str(UserError("two:", "a", "b")) == "two:\na\nb"
