"""metrics.jsonl, and the lines on the terminal."""

import dataclasses
import json
import math
import os
import re
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from conftest import Workplace
from ranks import as_workers
from small_records import GOOD, NAN, OVERFLOW, WITHOUT_TARGETS

import ddp_train
from training import lock
from training.errors import RunError, UserError
from training.evaluation import Evaluated
from training.metrics import RunLog
from training.metrics_file import cut_back
from training.step_records import StepRecord


def numbered(*records: StepRecord) -> list[StepRecord]:
    return [dataclasses.replace(record, step=step) for step, record in enumerate(records, start=1)]


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The lines, read as strict JSON, without the time of day that each event has, in UTC."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    lines = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    for line in lines:
        if "time" in line:
            assert datetime.fromisoformat(line.pop("time")).utcoffset() == timedelta()
    return lines


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def log_to(path: Path, is_main: bool = True, clip_norm: float | None = None, total_steps: int = 10) -> RunLog:
    log = RunLog(path, is_main, total_steps, clip_norm)
    log.start(0, 0.0, 0)
    return log


# Cutting back


def record_of_a_crash(path: Path) -> None:
    """Ten steps, a checkpoint at 7, and a line that was cut off."""
    lines = [{"kind": "event", "step": 0, "event": "start"}]
    for step in range(1, 11):
        lines.append({"kind": "train", "step": step, "loss": float(step)})
        if step in (4, 7, 8):
            lines.append({"kind": "validation", "step": step, "loss": 1.0})
    lines.insert(10, {"kind": "event", "step": 7, "event": "checkpoint"})
    lines.append({"kind": "event", "step": 10, "event": "nonfinite"})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "train", "step": 11, "lo')


def test_what_lies_behind_the_resumed_step_is_cut_off(path: Path) -> None:
    """R28: crash at 10, checkpoint at 7: steps, validations and events behind 7 go, and the line cut in writing."""
    record_of_a_crash(path)
    cut_back(path, 7)
    lines = lines_of(path)
    assert [line["step"] for line in lines if line["kind"] == "train"] == list(range(1, 8))
    assert [line["step"] for line in lines if line["kind"] == "validation"] == [4, 7]
    assert [line["event"] for line in lines if line["kind"] == "event"] == ["start", "checkpoint"]
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    content = path.read_text()
    cut_back(path, 7)
    assert path.read_text() == content
    cut_back(path, 7, evaluation_due=True)
    assert [line for line in lines_of(path) if (line["step"], line["kind"]) != (7, "validation")] == lines_of(path)
    assert len(lines_of(path)) == len(lines) - 1


def test_each_step_stands_once_after_a_resumption(path: Path) -> None:
    """R28: the steps behind carry the new values, and the record is strictly increasing."""
    record_of_a_crash(path)
    cut_back(path, 7)
    log = RunLog(path, True, 12, None)
    log.start(7, 70.0, 448)
    log.steps([dataclasses.replace(GOOD, step=step, loss=100.0) for step in (8, 9, 10, 11, 12)], 5.0)
    log.close()
    train = [line for line in lines_of(path) if line["kind"] == "train"]
    assert [line["step"] for line in train] == list(range(1, 13))
    assert [line["loss"] for line in train[7:]] == [100.0] * 5
    assert [line["seconds"] for line in train[7:]] == [71.0, 72.0, 73.0, 74.0, 75.0]
    assert [line["tokens"] for line in train[7:]] == [512, 576, 640, 704, 768]
    assert log.seconds == 75


@pytest.mark.parametrize(("step", "kept"), [(0, 1), (3, 4), (100, 16)])
def test_cutting_back_to_any_step(path: Path, step: int, kept: int) -> None:
    record_of_a_crash(path)
    cut_back(path, step)
    assert len(lines_of(path)) == kept


def test_cutting_back_what_is_not_there(path: Path) -> None:
    """A start has no record yet; a record may be empty, or a single half line."""
    for content in (None, "", '{"kind'):
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_text(content)
        cut_back(path, 5)
        assert path.read_text() == ""


@pytest.mark.parametrize("line", ["not json", "[]", "{}", '{"step": "3"}', '{"step": null}', ""])
def test_a_line_that_is_no_record(path: Path, line: str) -> None:
    path.write_text(f'{{"kind": "train", "step": 1}}\n{line}\n')
    with pytest.raises(UserError, match=f"^{path}, line 2: is not a record of a run; remove or repair the line$"):
        cut_back(path, 5)


# Lines


def test_the_line_of_a_step(path: Path) -> None:
    """As the specification has it: the keys, the unit of each, and the training time of two steps in a row."""
    log = log_to(path, clip_norm=0.4)
    log.steps(numbered(GOOD, dataclasses.replace(GOOD, grad_norm=0.3)), 0.5)
    first, second = lines_of(path)
    assert first == {
        "kind": "train",
        "step": 1,
        "tokens": 64,
        "loss": 2.0,
        "loss_min": 1.5,
        "loss_max": 2.5,
        "learning_rate": 4e-4,
        "grad_norm": 0.5,
        "clipped": True,
        "skipped": False,
        "target_tokens": 64,
        "tokens_per_second": 256.0,
        "seconds": 0.25,
    }
    assert (second["step"], second["tokens"], second["seconds"], second["clipped"]) == (2, 128, 0.5, False)


def test_tokens_of_steps_that_differ_in_length(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Counted as they are; the speed is over the steps read together, the time left goes by steps."""
    log = log_to(path)
    log.steps(numbered(GOOD, dataclasses.replace(GOOD, input_tokens=16)), 0.5)
    assert [(line["tokens"], line["tokens_per_second"]) for line in lines_of(path)] == [(64, 160.0), (80, 160.0)]
    assert log.tokens == 80
    assert capsys.readouterr().err == "step 2 of 10: loss 2.0000, 160 tokens/s, 00:02 left\n"


@pytest.mark.parametrize("clip_norm", [None, 0.5, 0.6])
def test_a_norm_up_to_the_limit_is_not_clipped(path: Path, clip_norm: float | None) -> None:
    log_to(path, clip_norm=clip_norm).steps(numbered(GOOD, NAN), 1.0)
    assert [line["clipped"] for line in lines_of(path) if line["kind"] == "train"] == [False, False]


def test_values_that_are_not_finite_are_null(path: Path) -> None:
    """G57, strict JSON: no NaN and no Infinity in any line; such a step is an event too, whatever is read with it."""
    log = log_to(path)
    bad = dataclasses.replace(NAN, loss=math.nan, loss_min=-math.inf, loss_max=math.inf)
    log.steps(numbered(bad, OVERFLOW, WITHOUT_TARGETS), 3.0)
    log.validation(3, Evaluated(math.nan, 10, None), 0.5, None)
    log.event(3, "finished", loss=math.inf, seconds=1.0, best_step=None)
    step, first, skipped, second, empty, validation, finished = lines_of(path)
    assert [step[key] for key in ("loss", "loss_min", "loss_max", "grad_norm", "skipped")] == [None] * 4 + [True]
    assert first == {
        "kind": "event",
        "step": 1,
        "event": "nonfinite",
        "loss_scale": 1.0,
        "overflow": False,
        "out_of_range": False,
    }
    assert (skipped["loss"], skipped["grad_norm"], skipped["skipped"]) == (2.0, None, True)
    assert second == {
        "kind": "event",
        "step": 2,
        "event": "nonfinite",
        "loss_scale": 65536.0,
        "overflow": True,
        "out_of_range": False,
    }
    assert (empty["loss"], empty["loss_min"], empty["skipped"], empty["target_tokens"]) == (None, None, True, 0)
    assert validation == {
        "kind": "validation",
        "step": 3,
        "loss": None,
        "target_tokens": 10,
        "bits_per_byte": None,
        "seconds": 0.5,
    }
    assert finished == {
        "kind": "event",
        "step": 3,
        "event": "finished",
        "loss": None,
        "seconds": 1.0,
        "best_step": None,
    }


def test_a_validation(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Means over tokens and bytes; the number of targets is told, and the best where it is another."""
    log = log_to(path)
    log.validation(4, Evaluated(8192.0 * math.log(2), 2048, 4096), 1.5, (4, 2.7726))
    log.validation(8, Evaluated(6144.0, 2048, None), 1.5, (4, 2.7726))
    line, _ = lines_of(path)
    assert line["loss"] == pytest.approx(4 * math.log(2))
    assert (line["target_tokens"], line["bits_per_byte"], line["seconds"]) == (2048, pytest.approx(2), 1.5)
    assert capsys.readouterr().err.splitlines() == [
        "step 4: validation loss 2.7726 over 2,048 tokens",
        "step 8: validation loss 3.0000 over 2,048 tokens, best 2.7726 at step 4",
    ]


def test_the_time_left_knows_of_evaluations_and_checkpoints(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """8 steps of 0.5 s, evaluations of 20 s after 4, 8 and 10; 1 s of waiting after 5 and 10, then 6 s of writing."""
    log = RunLog(path, True, 10, None, 4, 5)
    log.start(0, 0.0, 0)
    log.validation(0, Evaluated(6144.0, 2048, None), 20.0, None)
    log.checkpoint(0, "step_00000000", False, 6.0, 1.0)
    log.steps(numbered(GOOD, GOOD), 1.0)
    assert lines_of(path)[1] == {
        "kind": "event",
        "step": 0,
        "event": "checkpoint",
        "checkpoint": "step_00000000",
        "best": False,
        "seconds": 6.0,
        "stall": 1.0,
    }
    said = "step 2 of 10: loss 2.0000, 128 tokens/s, 01:12 left, next evaluation in 00:01"
    assert capsys.readouterr().err.splitlines()[-1] == said


def test_the_number_of_validation_rows_is_recorded(workplace: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    """R100: in the loop the first 96 of 671 tokens, 3 rows of 32; at the end the 20 whole rows there are."""
    config = workplace.write_config(
        data={"train_tokens": 1024, "validation_tokens": 671},
        evaluation={"every": 1, "tokens": 96},
        checkpoint={"every": None},
    )
    run = workplace.train_here(config)
    assert [(line["step"], line["target_tokens"]) for line in run.of_kind("validation")] == [(1, 3 * 32), (2, 20 * 32)]
    told = re.findall(r"step (\d): validation loss [\d.]+ over (\d+) tokens", capsys.readouterr().err)
    assert told == [("1", "96"), ("2", "640")]


def test_only_one_process_writes_and_speaks(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """R57, R103, R110: the others record the same time and nothing else."""
    log = log_to(path, is_main=False)
    log.steps(numbered(GOOD, NAN), 2.0)
    log.validation(2, Evaluated(1.0, 1, None), 0.5, (2, 1.0))
    log.checkpoint(2, "step_00000002", True, 0.5, 0.1)
    log.event(2, "finished")
    log.say("something")
    log.close()
    assert log.seconds == 2
    assert not path.exists()
    assert capsys.readouterr() == ("", "")


def fill_disk(metrics: Path) -> None:
    """From here on there is no room for a line."""
    metrics.rename(metrics.with_name("kept"))
    metrics.symlink_to("/dev/full")


def test_a_line_that_cannot_be_written_is_kept_and_raised_when_asked(path: Path) -> None:
    """No later line follows a half one; no checkpoint is newer than its metrics."""
    log = log_to(path)
    log.steps(numbered(GOOD), 1.0)
    log.sync()
    assert not log.failed
    fill_disk(path)
    log.steps(numbered(GOOD, GOOD)[1:], 1.0)
    assert log.failed
    path.unlink()
    path.with_name("kept").rename(path)
    log.event(2, "stopped")
    assert len(lines_of(path)) == 1
    told = (
        rf"^{path}: step 2 could not be recorded \(.*No space.*\); .* make room or mend the disk, then --resume latest$"
    )
    for ask in (log.check, log.sync):
        with pytest.raises(RunError, match=told):
            ask()


def test_nothing_is_written_into_a_folder_that_took_the_place_of_the_runs(tmp_path: Path) -> None:
    """It was moved or removed while this process was in a long moment, and another one trains there by now."""
    folder = tmp_path / "run"
    folder.mkdir()
    with lock.held(folder / lock.RUN_LOCK):
        log = log_to(folder / "metrics.jsonl")
        log.steps(numbered(GOOD), 1.0)
        folder.rename(tmp_path / "moved")
        folder.mkdir()
        (folder / lock.RUN_LOCK).touch()
        log.steps(numbered(GOOD, GOOD)[1:], 1.0)
        assert log.failed
        with pytest.raises(RunError, match=r"run: was removed or replaced by another folder while this run trained;"):
            log.sync()
    assert [path.name for path in folder.iterdir()] == [lock.RUN_LOCK]
    assert len(lines_of(tmp_path / "moved" / "metrics.jsonl")) == 1


def fill_disk_and_train(config: str, datasets: Path, output: Path) -> str:
    """A run whose disk is full when the steps up to 6 are to be recorded; what it ends with."""
    steps = RunLog.steps

    def record(self: RunLog, records: list[StepRecord], seconds: float) -> None:
        if records[-1].step == 6 and os.environ["RANK"] == "0":
            fill_disk(output / "run" / "metrics.jsonl")
        steps(self, records, seconds)

    RunLog.steps = record  # type: ignore[method-assign]
    with pytest.raises(RunError) as ended:
        ddp_train.main(config, datasets, output=output)
    return str(ended.value)


@pytest.mark.slow
def test_a_full_disk_ends_a_run_on_all_ranks(workplace: Workplace) -> None:
    """In one sentence, without a newer checkpoint; with room again, it goes on from the one before."""
    config = workplace.write_config(checkpoint={"every": 3}, evaluation={"every": None})
    told = as_workers(2, fill_disk_and_train, str(config), workplace.datasets, workplace.checkpoints)
    assert len(set(told)) == 1
    assert re.search(r"metrics\.jsonl: step [4-6] could not be recorded \(", told[0])
    run = workplace.checkpoints / "run"
    (run / "kept").replace(run / "metrics.jsonl")
    assert sorted(path.name for path in run.glob("step_*")) == ["step_00000003"]
    again = workplace.train_here(config, resume="latest")
    assert [line["step"] for line in again.of_kind("train")] == list(range(1, 11))


# Progress


def progress(log: RunLog, monkeypatch: pytest.MonkeyPatch, seconds: list[float], capsys: Any) -> list[str]:
    """What is printed while one step is recorded at each of some moments."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: 1000.0 + now[0])
    for step, now[0] in enumerate(seconds, start=1):
        log.steps([dataclasses.replace(GOOD, step=step)], 0.5)
    printed: str = capsys.readouterr().err
    assert "\r" not in printed
    return printed.splitlines()


def test_progress_without_a_terminal(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """R57: at most one line in ten seconds, the first at once, and the last in any case."""
    lines = progress(log_to(path), monkeypatch, [0, 1, 9.9, 10.5, 11, 20.4, 20.6, 25, 29, 30], capsys)
    assert [int(line.split()[1]) for line in lines] == [1, 4, 7, 10]
    assert lines[0] == "step 1 of 10: loss 2.0000, 128 tokens/s, 00:04 left"
    assert lines[-1] == "step 10 of 10: loss 2.0000, 128 tokens/s, 00:00 left"


def test_progress_of_a_step_without_targets(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log_to(path).steps(numbered(WITHOUT_TARGETS), 1.0)
    assert capsys.readouterr().err == "step 1 of 10: no targets, 64 tokens/s, 00:09 left\n"
