"""Training in processes of its own: the command, what a failed one said, and that none outlives us."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import REPOSITORY

from training.torchrun import started, training_command, what_it_said

SLEEPS = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]

WITHOUT_TORCH = """
import os, subprocess, sys
sys.modules["training.config"] = type(sys)("training.config")
sys.modules["training.config"].REPOSITORY = None
"""


def test_the_command_is_the_users() -> None:
    """Under torchrun; one process needs none."""
    alone = training_command("tiny", Path("datasets"), 1, "--resume", "auto")
    assert alone == [sys.executable, str(REPOSITORY / "ddp_train.py"), "tiny", "datasets", "--resume", "auto"]
    two = training_command("tiny", Path("datasets"), 2)
    assert two[1:5] == ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    assert two[5:] == [*alone[1:4]]


def test_what_a_failed_run_said() -> None:
    """The last sentence, wherever torchrun's own report is; without one, the last line that says anything."""
    said = "error: too early\na warning\nerror: config: is wrong\nTraceback\n"
    assert what_it_said(said) == "error: config: is wrong"
    assert what_it_said("Traceback\n  in main\nKilled\n \n") == "Killed"
    assert what_it_said("\n") == ""


def test_a_block_that_is_left_ends_what_it_started() -> None:
    with pytest.raises(KeyboardInterrupt), started(SLEEPS, subprocess.DEVNULL) as process:
        raise KeyboardInterrupt
    assert process.returncode == -signal.SIGTERM


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent is gone")
def test_when_we_are_killed_it_ends_too(tmp_path: Path) -> None:
    """The pipe of its output closes when the last process that holds it is gone."""
    script = f"""
{WITHOUT_TORCH}
from training.torchrun import started
with started({SLEEPS!r}, sys.stderr) as process:
    print("started", flush=True)
    process.wait()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=REPOSITORY, text=True
    ) as parent:
        assert parent.stdout is not None
        assert parent.stderr is not None
        assert parent.stdout.readline() == "started\n"
        begun = time.monotonic()
        parent.kill()
        parent.stderr.read()
        assert time.monotonic() - begun < 60
    assert parent.returncode == -signal.SIGKILL


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent is gone")
def test_when_we_are_killed_before_it_has_begun_it_ends_too() -> None:
    """Its parent is then another than that which it should end with: here, one of two forks."""
    script = f"""
{WITHOUT_TORCH}
from training.torchrun import _end_with_parent
first_thing = _end_with_parent()
if os.fork() == 0:
    if os.fork() == 0:
        first_thing()
        print("goes on", flush=True)
        os._exit(0)
    os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")
