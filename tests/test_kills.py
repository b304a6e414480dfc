"""Killed again and again, a run loses no checkpoint and becomes what it would have been; kills.py does more of it."""

import re

import kills
import pytest


@pytest.mark.slow
def test_a_run_survives_kills_of_its_processes(capsys: pytest.CaptureFixture[str]) -> None:
    """R01: a launcher's and a worker's; on another number of processes each time."""
    status = kills.main(["--kills", "2", "--seed", "60"])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert printed.endswith(
        "2 kills: no checkpoint was lost, no process stayed, each run that finished is the undisturbed one\n"
    )
    assert re.search("kill 1: launcher of ., training", printed), printed
    assert re.search("kill 2: worker of ., training", printed), printed
