"""How a run begins in its folder: held by one process, started, gone on with, or refused."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY
from recorded_runs import event, train_row
from small_checkpoints import TINY, adamw, state_at
from small_configs import small_config

from model.gpt import build_gpt
from training import run_folder
from training.checkpoint import point, publish, write_checkpoint
from training.checkpoint_files import SUPERSEDED
from training.config import RunConfig, config_mapping
from training.config_check import config_from_mapping
from training.errors import UserError
from training.file_digest import file_digest
from training.launch_record import LAUNCH
from training.metrics_file import read_metrics
from training.restore import read_state
from training.run_folder import (
    CONFIG,
    LOCK,
    METRICS,
    Opening,
    begin,
    held,
    open_run,
    refuse_to_start_beside,
    saved_overrides,
)
from training.snapshot import take_snapshot
from training.yaml_reader import read_yaml


def start(folder: Path, config: RunConfig | None = None) -> RunConfig:
    """Starts a run in a folder and leaves it without a checkpoint."""
    folder.mkdir(exist_ok=True)
    config = config or small_config()
    begin(folder, open_run(folder, config, None, overwrite=False))
    return config


def save(folder: Path, step: int, config: RunConfig | None = None) -> Path:
    """Saves a checkpoint of the run; its model is not looked at here."""
    model = build_gpt(TINY, seed=0)
    state = replace(state_at(step), config=config_mapping(config or small_config()))
    return write_checkpoint(folder, take_snapshot(model, adamw(model), state))


def write_files(state_file: Path, state: dict[str, Any]) -> None:
    """Replaces a checkpoint's state, and its entry in the manifest with it."""
    state_file.write_text(json.dumps(state))
    manifest = json.loads(state_file.with_name("manifest.json").read_text())
    manifest["state.json"] = {"size": state_file.stat().st_size, "sha256": file_digest(state_file)}
    state_file.with_name("manifest.json").write_text(json.dumps(manifest))


def record(folder: Path, *steps: int) -> None:
    """Writes a line of metrics for each step."""
    (folder / METRICS).write_text("".join(f'{{"kind": "event", "step": {step}, "event": "x"}}\n' for step in steps))


def names_in(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name != LAUNCH)


def remarks_of(opening: Opening) -> list[str]:
    """But for that on metrics.jsonl, which `save` does not write."""
    return [remark for remark in opening.remarks if "steps so far" not in remark]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a run that has none yet."""
    path = tmp_path / "run"
    path.mkdir()
    return path


# The lock

HOLDER = """
import sys
from pathlib import Path
from training.run_folder import held
with held(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_is_refused_until_the_first_is_gone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a short wait; the system takes the lock from a process that is killed, and the one that waits gets it."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)], cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    with holder.stdin, holder.stdout:
        assert holder.stdout.readline() == b"held\n"
        monkeypatch.setattr(run_folder, "SECONDS_TO_WAIT_FOR_LOCK", 0.5)
        began = time.monotonic()
        with (
            pytest.raises(UserError, match=f"^{folder}: another process is training this run; wait for it"),
            held(folder),
        ):
            pass
        assert 0.5 < time.monotonic() - began < 5
        monkeypatch.setattr(run_folder, "SECONDS_TO_WAIT_FOR_LOCK", 30)
        killer = threading.Timer(0.3, holder.send_signal, [signal.SIGKILL])
        killer.start()
        began = time.monotonic()
        with held(folder):
            assert time.monotonic() - began < 10
        holder.wait()


def test_a_folder_is_left_as_it_was_where_nothing_came_of_it(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "run"
    with held(folder):
        assert (folder / LOCK).exists()
    assert not folder.exists()
    with pytest.raises(KeyError), held(folder):
        raise KeyError
    assert not folder.exists()
    with held(folder):
        (folder / "something").write_text("")
    assert sorted(os.listdir(folder)) == [LOCK, "something"]
    with held(folder):
        pass


def test_who_waits_for_a_process_that_gives_up_is_told_so(folder: Path) -> None:
    """The lock's file went with the folder: a third process could hold a new one."""
    holds = threading.Event()

    def give_up() -> None:
        with held(folder):
            holds.set()
            time.sleep(0.3)

    first = threading.Thread(target=give_up)
    first.start()
    holds.wait()
    with pytest.raises(UserError, match="the process that had this run has just given up; start again"), held(folder):
        pass
    first.join()
    with held(folder):
        assert (folder / LOCK).exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "run", Path("/proc/run")):
        with (
            pytest.raises(UserError, match=f"^{folder}: cannot be written .*choose another folder with --output"),
            held(folder),
        ):
            pass


# Starting


def test_a_start_in_an_empty_folder(folder: Path) -> None:
    config = small_config(schedule={"name": "cosine"}, interventions=["no-dropout"], overrides=["seeds.weights=1"])
    with held(folder):  # its lock is no file of a run
        opening = open_run(folder, config, None, overwrite=False)
        assert (opening.checkpoint, opening.state, opening.remarks, opening.superseded) == (None, None, [], ())
        assert os.listdir(folder) == [LOCK]
        begin(folder, opening)
    assert names_in(folder) == [LOCK, CONFIG, METRICS]
    assert (folder / METRICS).read_bytes() == b""
    assert (folder / CONFIG).read_text().startswith("# The resolved config of this run")
    assert config_from_mapping({"name": "run", **read_yaml(folder / CONFIG)}, "here") == config


def test_text_that_looks_like_a_number_stays_text(folder: Path) -> None:
    """The record is read with our own YAML, to which 1e3 is a number unless it is quoted."""
    config = small_config(data={"tokenizer": "1e3"}, init_from="12e4567", overrides=["data.tokenizer='1e3'"])
    start(folder, config)
    assert read_yaml(folder / CONFIG) == config_mapping(config)
    save(folder, 1, config)
    assert saved_overrides(folder, "latest", []) == ["data.tokenizer='1e3'"]
    assert open_run(folder, config, "latest", overwrite=False).checkpoint == "step_00000001"


@pytest.mark.parametrize("content", ["config", "checkpoint", "broken checkpoint"])
def test_a_start_in_a_folder_that_holds_a_run(folder: Path, content: str) -> None:
    """R27: refused with both remedies, also where only a part of the run is left; --overwrite starts again."""
    if content == "config":
        start(folder)
    else:
        path = save(folder, 4)
        if content == "broken checkpoint":
            (path / "state.json").unlink()
    problem = rf"^{folder}: holds a run already; go on with --resume latest, or start again with --overwrite "
    with pytest.raises(UserError, match=problem):
        open_run(folder, small_config(), None, overwrite=False)
    assert open_run(folder, small_config(), None, overwrite=True).checkpoint is None


def test_a_folder_of_something_else_is_not_emptied(folder: Path) -> None:
    """A start empties its folder: not one that --output points to by mistake, unless the user insists."""
    (folder / "thesis.tex").write_text("")
    problem = f"^{folder}: holds other files; choose another --output, or start again with --overwrite "
    for resume in (None, "auto"):
        with pytest.raises(UserError, match=problem):
            open_run(folder, small_config(), resume, overwrite=False)
    assert open_run(folder, small_config(), None, overwrite=True).checkpoint is None


def test_a_start_empties_the_folder_and_nothing_beyond_it(folder: Path) -> None:
    """A link goes, what it points to stays."""
    elsewhere = folder.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("")
    start(folder)
    point(folder, "latest", save(folder, 4).name)
    (folder / "link").symlink_to(elsewhere)
    (folder / METRICS).write_text("of an older format")
    (folder / ".step_00000008.partial").mkdir()
    (folder / "damaged_step_00000002_1").mkdir()
    with held(folder):
        begin(folder, open_run(folder, small_config(), None, overwrite=True))
        assert names_in(folder) == [LOCK, CONFIG, METRICS]
    assert (folder / METRICS).read_bytes() == b""
    assert (elsewhere / "kept").exists()


# Going on


def test_resuming_where_there_is_nothing(folder: Path) -> None:
    """R27: naming the folder."""
    for resume in ("latest", "best", "step_00000004"):
        with pytest.raises(UserError, match=f"^{folder}.*no "):
            open_run(folder, small_config(), resume, overwrite=False)
    start(folder)
    with pytest.raises(UserError, match=f"^{folder}: there is no complete checkpoint"):
        open_run(folder, small_config(), "latest", overwrite=False)


def test_a_node_that_holds_the_run_keeps_rank_0_from_beginning_elsewhere(folder: Path) -> None:
    """Only with a complete checkpoint: one that is damaged, in a shared folder, was seen by rank 0 too."""
    refuse_to_start_beside(folder)
    save(folder, 4)
    with pytest.raises(UserError, match=r"run: on .* it holds step_00000004 of this run.* rank 0 nothing; share"):
        refuse_to_start_beside(folder)
    (folder / "step_00000004" / "optimizer.safetensors").unlink()
    refuse_to_start_beside(folder)


def test_a_checkpoint_is_named_within_the_run(folder: Path) -> None:
    start(folder)
    other = folder.parent / "other"
    save(other, 4)
    for name in ("../other/step_00000004", str(other / "step_00000004"), ".", "", "step_4", "STEP_00000004"):
        with pytest.raises(UserError, match="there is no checkpoint"):
            open_run(folder, small_config(), name, overwrite=False)


def test_latest_is_the_newest_complete_checkpoint(folder: Path) -> None:
    """R01: one that was cut off is passed over and named; asked for by its name, it is an error naming the file."""
    config = start(folder)
    for step in (4, 8, 12):
        save(folder, step)
    (folder / "step_00000012" / "optimizer.safetensors").unlink()
    for resume in ("latest", "auto"):
        opening = open_run(folder, config, resume, overwrite=False)
        assert opening.checkpoint == "step_00000008"
        assert remarks_of(opening) == ["passed over step_00000012: optimizer.safetensors missing"]
        assert opening.superseded == ("step_00000012",)
        assert opening.state == asdict(read_state(folder / "step_00000008"))
    with pytest.raises(
        UserError, match=r"step_00000012: optimizer.safetensors missing; the others there are: step_00000004, "
    ):
        open_run(folder, config, "step_00000012", overwrite=False)


def test_an_older_checkpoint_names_the_newer_ones(folder: Path) -> None:
    config = start(folder)
    for step in (4, 8, 12, 16):
        save(folder, step)
    (folder / "step_00000016" / "model.safetensors").write_bytes(b"")
    point(folder, "best", "step_00000004")
    for resume in ("best", "step_00000004"):
        opening = open_run(folder, config, resume, overwrite=False)
        assert opening.checkpoint == "step_00000004"
        [remark] = remarks_of(opening)
        newer = ("step_00000008", "step_00000012", "step_00000016")
        assert remark == f"newer checkpoints will be removed once the next one is complete: {', '.join(newer)}"
        assert opening.superseded == newer


def test_a_past_that_was_given_up_is_not_resumed_again(folder: Path) -> None:
    """Killed before its next checkpoint, a run goes on from the one that it was resumed from, unless told otherwise."""
    config = start(folder)
    for step in (4, 8, 12):
        save(folder, step)
    record(folder, *range(13))
    begin(folder, open_run(folder, config, "step_00000004", overwrite=False))
    assert os.readlink(folder / "latest") == "step_00000004"
    for resume in ("latest", "auto"):
        opening = open_run(folder, config, resume, overwrite=False)
        assert opening.checkpoint == "step_00000004"
        assert opening.superseded == ("step_00000008", "step_00000012")
        reason = "superseded: the run went on from an older checkpoint"
        assert remarks_of(opening) == [f"passed over step_000000{step}: {reason}" for step in ("12", "08")]

    begin(folder, open_run(folder, config, "step_00000008", overwrite=False))
    assert not (folder / "step_00000008" / SUPERSEDED).exists()
    assert os.readlink(folder / "latest") == "step_00000008"
    assert open_run(folder, config, "latest", overwrite=False).checkpoint == "step_00000008"

    model = build_gpt(TINY, seed=0)
    state = replace(state_at(9), config=config_mapping(config))
    publish(folder, take_snapshot(model, adamw(model), state), keep=9)
    assert [path.name for path in sorted(folder.glob("step_*"))] == [f"step_0000000{step}" for step in (4, 8, 9)]
    assert remarks_of(open_run(folder, config, "latest", overwrite=False)) == []


def test_auto_starts_afresh_without_deleting_damaged_checkpoints(folder: Path) -> None:
    """Somebody may be able to mend them; all else of the run begins anew. Only --overwrite deletes them."""
    config = start(folder)
    for step in (4, 8):
        (save(folder, step) / "model.safetensors").write_bytes(b"not weights")
    point(folder, "latest", "step_00000008")
    record(folder, 1, 2)
    opening = open_run(folder, config, "auto", overwrite=False)
    assert (opening.checkpoint, opening.state, opening.superseded) == (None, None, ())
    [remark] = opening.remarks
    assert remark.startswith(
        f"{folder}: there is no complete checkpoint; step_00000008: model.safetensors has 11 bytes"
    )
    assert remark.endswith("; starting afresh, with the old checkpoints kept under another name")
    for _ in range(2):  # the second: started again before the first checkpoint
        begin(folder, open_run(folder, config, "auto", overwrite=False))
        damaged = sorted(path for path in folder.glob("damaged_*"))
        assert [path.name[: len("damaged_step_00000000")] for path in damaged] == [
            "damaged_step_00000004",
            "damaged_step_00000008",
        ]
        assert names_in(folder) == sorted([CONFIG, METRICS, *(path.name for path in damaged)])
        assert (damaged[0] / "model.safetensors").read_bytes() == b"not weights"
        assert (folder / METRICS).read_bytes() == b""
    assert open_run(folder, config, "auto", overwrite=False).remarks == []
    begin(folder, open_run(folder, config, None, overwrite=True))
    assert names_in(folder) == [CONFIG, METRICS]


def test_auto_resumes_what_it_can_and_starts_otherwise(folder: Path) -> None:
    """Without a complete checkpoint it starts afresh; it never takes a damaged one."""
    config = small_config()
    assert open_run(folder, config, "auto", overwrite=False).checkpoint is None
    start(folder)
    assert open_run(folder, config, "auto", overwrite=False).checkpoint is None
    broken = save(folder, 4)
    (broken / "model.safetensors").write_bytes(b"not weights")
    assert open_run(folder, config, "auto", overwrite=False).checkpoint is None
    save(folder, 2)
    assert open_run(folder, config, "auto", overwrite=False).checkpoint == "step_00000002"


def test_going_on_keeps_what_is_there(folder: Path) -> None:
    """The record has the config that the run goes on with; the metrics end at the checkpoint."""
    start(folder)
    save(folder, 4)
    record(folder, 3, 4, 5)
    (folder / "notes.txt").write_text("mine")
    changed = small_config(checkpoint={"keep": 9}, overrides=["checkpoint.keep=9"])
    begin(folder, open_run(folder, changed, "latest", overwrite=False))
    assert names_in(folder) == [CONFIG, "latest", METRICS, "notes.txt", "step_00000004"]
    assert read_yaml(folder / CONFIG) == config_mapping(changed)
    assert [event["step"] for event in read_metrics(folder / METRICS).events] == [3, 4]


def test_going_on_compares_with_what_was_computed_not_with_the_record(folder: Path) -> None:
    """config.yaml can be edited; what a checkpoint says of itself is verified."""
    config = start(folder)
    save(folder, 4)
    text = (folder / CONFIG).read_text()
    assert "learning_rate: 0.0004\n" in text
    (folder / CONFIG).write_text(text.replace("learning_rate: 0.0004\n", "learning_rate: 0.1\n"))
    begin(folder, open_run(folder, config, "latest", overwrite=False))
    assert (folder / CONFIG).read_text() == text
    opening = open_run(folder, small_config(optimizer={"learning_rate": 0.1}), "latest", overwrite=False)
    assert opening.changed == {"optimizer.learning_rate": [0.0004, 0.1]}


@pytest.mark.parametrize("text", [None, "[", "- 1", "overrides: 3", "overrides: [3]"])
def test_a_run_whose_record_is_gone_or_damaged(folder: Path, text: str | None) -> None:
    """The checkpoint has all that is compared, and the --set of the start; the record is written again."""
    config = small_config(overrides=["seeds.weights=42"])
    start(folder, config)
    save(folder, 4, config)
    (folder / CONFIG).unlink()
    if text is not None:
        (folder / CONFIG).write_text(text)
    assert saved_overrides(folder, "latest", []) == ["seeds.weights=42"]
    begin(folder, open_run(folder, config, "latest", overwrite=False))
    assert read_yaml(folder / CONFIG)["overrides"] == ["seeds.weights=42"]


@pytest.mark.parametrize(
    ("content", "lacking"),
    [
        (None, "steps 1 to 4"),
        ("", "steps 1 to 4"),
        ("{1}\n{2}\n", "steps 3 to 4"),
        ('{1}\n{2}\n{3}\n{"kind": "tra', "step 4"),
        ("{2}\n{4}\n{5}\n", "steps 1, 3"),
        ("{1}\n{2}\n{3}\n{4}\n{5}\n", None),
    ],
    ids=["missing", "empty", "cut at a line end", "cut within a line", "holes", "whole"],
)
def test_metrics_that_lack_steps_are_told(folder: Path, content: str | None, lacking: str | None) -> None:
    """In one sentence, with the steps, and the run goes on; {N} stands for the row of step N."""
    config = start(folder)
    save(folder, 4)
    (folder / METRICS).unlink()
    if content is not None:
        rows = re.sub(r"\{(\d)\}", lambda number: json.dumps(train_row(int(number[1]))), content)
        (folder / METRICS).write_text(rows)
    opening = open_run(folder, config, "latest", overwrite=False)
    told = f"{folder / METRICS}: lacks {lacking} of the 4 steps so far, and so will charts and report; "
    assert [line for line in opening.remarks if "again" not in line] == (
        [f"{told}the run itself is whole"] * bool(lacking)
    )
    begin(folder, opening)
    assert read_metrics(folder / METRICS).train["step"].max(initial=0) <= 4


def test_a_checkpoint_whose_config_is_none(folder: Path) -> None:
    """Written by other software: an error that names its file."""
    start(folder)
    model = build_gpt(TINY, seed=0)
    write_checkpoint(folder, take_snapshot(model, adamw(model), state_at(4)))
    with pytest.raises(UserError, match=rf"^{folder / 'step_00000004' / 'state.json'} has 2 problems"):
        open_run(folder, small_config(), "latest", overwrite=False)


@pytest.mark.parametrize("ended", ["killed", "interrupted"])
def test_steps_that_are_computed_again_are_told(folder: Path, ended: str) -> None:
    """A run that was killed leaves rows behind its last checkpoint."""
    config = start(folder)
    save(folder, 4)
    rows = [event(0, "start"), *map(train_row, range(1, 10)), *([event(9, ended)] if ended == "interrupted" else [])]
    (folder / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    opening = open_run(folder, config, "latest", overwrite=False)
    assert opening.remarks == [f"it had reached step 9 ({ended}): 5 steps will be computed again"]
    assert (opening.had_reached, opening.ended, opening.starts) == (9, ended, 1)
    begin(folder, opening)
    again = open_run(folder, config, "latest", overwrite=False)
    assert (again.remarks, again.had_reached) == ([], 0), "they were cut off"


def test_a_restart_before_the_first_checkpoint_is_told_and_counted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By torchrun, which starts all again; another torchrun starts a run of its own."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "ours")
    config = start(folder)
    for starts in (2, 3):
        rows = [event(0, "start", **({"starts": starts - 1} if starts > 2 else {})), *map(train_row, (1, 2))]
        (folder / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
        opening = open_run(folder, config, "auto", overwrite=True)
        assert (opening.had_reached, opening.ended, opening.starts) == (2, "killed", starts)
        assert opening.remarks == [
            f"no checkpoint was written yet: the run begins again (start {starts} by the same torchrun)",
            "it had reached step 2 (killed): 2 steps will be computed again",
        ]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")
    opening = open_run(folder, config, "auto", overwrite=True)
    assert (opening.remarks, opening.starts) == ([], 1)


@pytest.mark.parametrize(
    ("keep", "goes"),
    [(1, [6, 8]), (2, [6]), (3, []), (9, [])],
)
def test_a_lower_keep_says_what_it_will_remove(folder: Path, keep: int, goes: list[int]) -> None:
    """At the next save, when one more counts: of 2, 4 (the best), 6 and 8, where three were kept."""
    start(folder)
    for step in (2, 4, 6, 8):
        save(folder, step, small_config(checkpoint={"keep": 3}))
    point(folder, "best", "step_00000004")
    opening = open_run(folder, small_config(checkpoint={"keep": keep}), "latest", overwrite=False)
    removed = [remark for remark in opening.remarks if "removes" in remark]
    names = ", ".join(f"step_{step:08d}" for step in goes)
    assert removed == ([f"checkpoint.keep is lower now: the next checkpoint removes {names}"] if goes else [])


def test_a_checkpoint_of_another_version_says_so(folder: Path) -> None:
    """It has keys that this one does not know, in its config or beside it."""
    config = start(folder)
    path = save(folder, 4) / "state.json"
    state = json.loads(path.read_text())
    spoilt = {**state, "config": {**state["config"], "precision": {"amp": "off", "gradient_bits": 8}}}
    for content, unknown in ((spoilt, "precision.gradient_bits"), ({**state, "spare": 1}, "spare")):
        write_files(path, content)
        with pytest.raises(UserError) as caught:
            open_run(folder, config, "latest", overwrite=False)
        assert str(caught.value) == (
            f"{path}: was written by another version of Isobatch: {unknown} is not known here; update this one, or use "
            "the one that wrote it"
        )


# With another config


def test_resuming_with_another_config(folder: Path) -> None:
    """What may change is taken and told; of what may not, everything is named, and nothing is taken."""
    start(folder)
    save(folder, 4)
    new = small_config(batch={"microbatch": 4, "accumulation": 1}, optimizer={"learning_rate": 1e-3})
    opening = open_run(folder, new, "latest", overwrite=False)
    assert opening.config == config_mapping(new)
    assert opening.changed == {
        "batch.accumulation": [2, 1],
        "batch.microbatch": [2, 4],
        "optimizer.learning_rate": [4e-4, 1e-3],
    }
    assert remarks_of(opening)[-1] == "optimizer.learning_rate: 0.0004 -> 0.001 from step 5 on"
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for resume in ("latest", "auto", "step_00000004"):
        with pytest.raises(UserError, match=r"batch\.accumulation 2 -> 3.*; a run keeps its model") as caught:
            open_run(folder, small_config(batch={"accumulation": 3}, seeds={"training": 1}), resume, overwrite=False)
        assert "seeds.training 42 -> 1" in str(caught.value)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_overrides_of_the_start_stay_part_of_the_run(folder: Path) -> None:
    """The later of a key counts; those of a run without a checkpoint do not."""
    fresh = ["seeds.weights=3", " data.epochs =2"]
    assert saved_overrides(folder, "latest", fresh) == fresh
    config = small_config(overrides=["optimizer.eps=1e-7", "seeds.weights=1", "a=b=c"])
    start(folder, config)
    assert saved_overrides(folder, "auto", fresh) == fresh
    save(folder, 4, config)
    assert saved_overrides(folder, "latest", []) == ["optimizer.eps=1e-7", "seeds.weights=1", "a=b=c"]
    assert saved_overrides(folder, "auto", fresh) == [
        "optimizer.eps=1e-7", "seeds.weights=3", "a=b=c", " data.epochs =2",
    ]  # fmt: skip


def test_a_schedule_that_is_replaced_takes_its_overrides_with_it(folder: Path) -> None:
    """The other has no such keys, and nothing but another --set can take one back."""
    overrides = ["schedule.name=cosine", "seeds.weights=1", "schedule.warmup_percent=10"]
    start(folder)
    save(folder, 4, small_config(schedule={"name": "cosine", "warmup_percent": 10}, overrides=overrides))
    assert saved_overrides(folder, "latest", ["schedule.name = cosine"]) == ["schedule.name = cosine", *overrides[1:]]
    assert saved_overrides(folder, "latest", ["schedule.name=constant"]) == [
        "seeds.weights=1",
        "schedule.name=constant",
    ]


def test_overrides_are_those_up_to_the_checkpoint_to_go_on_from(folder: Path) -> None:
    """Who goes back gives up what was changed later, with the steps that it was changed for."""
    early, late = (small_config(overrides=[f"checkpoint.keep={keep}"]) for keep in (2, 5))
    start(folder)
    save(folder, 4, early)
    save(folder, 8, late)
    point(folder, "best", "step_00000004")
    assert saved_overrides(folder, "latest", []) == ["checkpoint.keep=5"]
    for resume in ("best", "step_00000004"):
        assert saved_overrides(folder, resume, []) == ["checkpoint.keep=2"]
    begin(folder, open_run(folder, early, "step_00000004", overwrite=False))
    for resume in ("latest", "auto"):
        assert saved_overrides(folder, resume, []) == ["checkpoint.keep=2"], "step 8 is of a past that was given up"
    assert saved_overrides(folder, "step_00000012", []) == []
