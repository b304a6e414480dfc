"""What stands between the command and its first step: nothing heavy that only comes later."""

import re
import subprocess
import sys

from conftest import REPOSITORY, Workplace

LATER = {"matplotlib", "scipy", "plotly", "pandas", "PIL", "huggingface_hub", "transformers", "numpy.ma", "rich.live"}
"""What the end of a run, or another command, imports."""


def test_nothing_is_imported_before_the_first_step_that_only_its_end_needs(workplace: Workplace) -> None:
    config = workplace.write_config(evaluation={"every": None})
    paths = [str(path) for path in (REPOSITORY / "ddp_train.py", config, workplace.datasets)]
    command = [sys.executable, "-X", "importtime", *paths]
    options = ["--output", str(workplace.checkpoints), "--stop-after", "1"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=240, check=True)
    before, told, after = done.stderr.partition("step 1 of 10: ")
    assert told, done.stderr[-1000:]
    imported, later = (set(re.findall(r"^import time:.*\| +(\S+)$", text, re.MULTILINE)) for text in (before, after))
    assert {"torch", "training.loop"} <= imported, "the list is read right"
    assert imported & LATER == set()
    assert {module for module in imported if module.startswith("training.hub.push")} == set()
    assert "matplotlib" in later
