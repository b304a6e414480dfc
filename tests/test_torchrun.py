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


def test_the_command_is_the_users() -> None:
    """Under torchrun; one process needs none."""
    alone = training_command("tiny", Path("datasets"), 1, "--resume", "auto")
    assert alone == [sys.executable, str(REPOSITORY / "ddp_train.py"), "tiny", "datasets", "--resume", "auto"]
    two = training_command("tiny", Path("datasets"), 2)
    assert two[1:5] == ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    assert two[5:] == [*alone[1:4]]


def test_what_a_failed_run_said() -> None:
    """The sentence, wherever torchrun's own report is; without one, the end of all that it wrote."""
    assert what_it_said("a warning\nerror: config: is wrong\nTraceback\n") == "error: config: is wrong"
    assert what_it_said("x" * 5000 + "Killed") == "x" * 1994 + "Killed"


def test_a_block_that_is_left_ends_what_it_started() -> None:
    with pytest.raises(KeyboardInterrupt), started(SLEEPS, subprocess.DEVNULL) as process:
        raise KeyboardInterrupt
    assert process.returncode == -signal.SIGTERM


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent is gone")
def test_when_we_are_killed_it_ends_too(tmp_path: Path) -> None:
    """The pipe of its output closes when the last process that holds it is gone."""
    script = f"""
import subprocess, sys
sys.modules["training.config"] = type(sys)("training.config")
sys.modules["training.config"].REPOSITORY = None  # it would import torch
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
