"""A worker ends with its launcher."""

import signal
import subprocess
import sys
import time

# Killed in the second in which the worker would import PyTorch.
LAUNCHER = """
import subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", '''
import training.launcher
import time
print("ready", flush=True)
time.sleep(1)
training.launcher.leave_with_launcher()
time.sleep(60)
'''])
time.sleep(60)
"""


def test_a_worker_ends_with_its_launcher() -> None:
    """Killed, so that it cannot end its workers itself; the pipe closes when the last process that holds it is gone."""
    with subprocess.Popen([sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "ready\n"
        launcher.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        assert launcher.stdout.read() == ""
        assert time.monotonic() - killed < 10
