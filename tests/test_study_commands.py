"""The command study: its plan, and a study in real processes, killed and gone on with."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY, Workplace
from small_study import record_run, write_study

from training.errors import RunError, UserError
from training.laboratory.study_commands import study as study_command
from training.laboratory.study_runner import last_step


def test_the_plan_needs_no_dataset_and_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_study(tmp_path)
    study_command(str(tmp_path / "mine.yaml"), tmp_path / "datasets", output=tmp_path / "out", dry_run=True)
    printed = capsys.readouterr()
    assert printed.out.startswith("study mine: baseline and 2 others, 6 runs of 10,240 tokens: 0 done")
    assert printed.out.endswith(
        f"dataset: {tmp_path}/datasets/data is not there; make it before training (isobatch prepare)\n"
    )
    assert printed.err == ""
    assert not (tmp_path / "out").exists()


def test_a_folder_in_the_place_of_the_study_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a folder; the study comes first, then the folder of the datasets"):
        study_command(str(tmp_path), Path("mine"), dry_run=True)


def test_a_changed_study_is_refused_but_planned_with_overwrite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = write_study(tmp_path)
    record_run(tmp_path / "mine", study.runs[0], 5.0, optimizer={"weight_decay": 0.2})
    path = str(tmp_path / "mine.yaml")
    with pytest.raises(UserError, match=r"baseline-w1-t1 \(optimizer.weight_decay 0.2 -> 0.1\)"):
        study_command(path, tmp_path, output=tmp_path, dry_run=True)
    study_command(path, tmp_path, output=tmp_path, dry_run=True, overwrite=True)
    assert "baseline-w1-t1      again, as it was trained with optimizer.weight_decay 0.2" in capsys.readouterr().out


STUDY = """
base: base
interventions: [no-dropout]
seeds: [{weights: 1, training: 1}]
"""


def comparable(folder: Path) -> list[dict[str, Any]]:
    """The rows of a study's table, without how long they took."""
    rows: list[dict[str, Any]] = json.loads((folder / "comparison.json").read_text())["rows"]
    return [{key: value for key, value in row.items() if "second" not in key} for row in rows]


@pytest.mark.slow
def test_a_killed_study_goes_on_to_the_same_table(workplace: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    """Killed alone in the middle of its first run: its processes end too, and the same command goes on from that run's
    last checkpoint. A run that fails is told, and trained by the next attempt, alone."""
    write_study(workplace.folder, STUDY)
    path, output = str(workplace.folder / "mine.yaml"), workplace.folder / "checkpoints"
    command = [sys.executable, "-m", "training.cli", "study", path, str(workplace.datasets), "--output", str(output)]
    metrics = output / "mine" / "baseline-w1-t1" / "metrics.jsonl"
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}
    ) as process:
        assert process.stderr is not None
        while last_step(metrics) < 6:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.02)
        process.kill()
        process.stderr.read()  # ends when the last process that holds it is gone: the run's too
    assert process.returncode == -signal.SIGKILL

    study_command(path, workplace.datasets, output=output)
    said = capsys.readouterr().err
    assert "0 done, 1 begun, 1 to start" in said
    assert "baseline-w1-t1    at step " in said
    events = [line for line in map(json.loads, metrics.read_text().splitlines()) if line["kind"] == "event"]
    assert [event["event"] for event in events if event["event"] in ("start", "resume")] == ["start", "resume"]

    other = workplace.folder / "other"
    blocked = other / "mine" / "baseline-w1-t1"
    shutil.copytree(output / "mine" / "no-dropout-w1-t1", other / "mine" / "no-dropout-w1-t1", symlinks=True)
    blocked.write_text("a file where the run's folder should be")
    with pytest.raises(RunError, match=r"1 of 2 runs failed: baseline-w1-t1; what they said is in .*logs"):
        study_command(path, workplace.datasets, output=other)
    assert "baseline-w1-t1: failed after" in capsys.readouterr().err
    blocked.unlink()
    study_command(path, workplace.datasets, output=other)
    assert "run 2 of 2" not in capsys.readouterr().err
    assert comparable(other / "mine") == comparable(output / "mine")
