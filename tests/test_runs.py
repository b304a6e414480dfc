"""Whole runs through the real command line, in real processes."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import REPOSITORY, Finished, Workplace, golden_tokens, train_in_folder
from fake_hub import FakeHub
from ranks import as_workers
from safetensors.torch import load_file
from small_checkpoints import set_final_norm

from training import launch_record
from training.errors import RunError, UserError

GOLDEN_DATA = {"train_tokens": 20_480}
GOLDEN: dict[str, dict[str, Any]] = {
    "S1": {
        "sections": {
            "data": GOLDEN_DATA,
            "batch": {"world_size": 1, "microbatch": 4, "accumulation": 4},
            "optimizer": {"learning_rate": 1.4e-3, "weight_decay": 0.01, "clip_norm": 0.5},
            "schedule": {"name": "cosine", "warmup_percent": 5, "final_fraction": 0.1},
        },
        "curve": {
            1: (5.7016244, 0.4703354),
            2: (5.7489058, 0.4484049),
            3: (5.6813740, 0.4596668),
            5: (5.6353805, 0.4579223),
            10: (5.3482007, 0.6245800),
            20: (4.7724754, 0.6319856),
            30: (4.5867405, 0.5491394),
            40: (4.5175242, 0.4910928),
        },
        "sums": (9877.25830, 887.57172),
    },
    "S2": {
        "sections": {
            "data": GOLDEN_DATA,
            "batch": {"world_size": 2, "microbatch": 4, "accumulation": 2},
            "optimizer": {"learning_rate": 4e-4, "weight_decay": 0.1},
        },
        "curve": {
            1: (5.7016244, 0.4703354),
            2: (5.7379602, 0.4474847),
            3: (5.6780030, 0.4599937),
            5: (5.6840163, 0.4424283),
            10: (5.6086031, 0.4873496),
            20: (5.4426850, 0.6070203),
            30: (5.1778367, 0.6753870),
            40: (4.9183887, 0.6392447),
        },
        "sums": (9866.43702, 880.26822),
    },
}
TIMES = ("seconds", "tokens_per_second")


def without_times(run: Finished, kinds: tuple[str, ...] = ("train", "validation")) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that a resumed run must share with an uninterrupted one."""
    lines = [line for line in run.lines if line["kind"] in kinds]
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


def files_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file of a run with its time of change and content."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize(
    ("curve", "processes", "microbatch"),
    [
        ("S1", 1, None),
        ("S2", 1, None),
        pytest.param("S2", 2, None, marks=pytest.mark.slow),
        pytest.param("S2", 4, None, marks=pytest.mark.slow),
        pytest.param("S2", 3, 3, marks=pytest.mark.slow),
    ],
)
def test_golden_curve(workplace: Workplace, curve: str, processes: int, microbatch: int | None) -> None:
    """The forerunner's own training code gave these losses and gradient norms; S2 on two processes."""
    golden = GOLDEN[curve]
    config = workplace.write_config(evaluation={"every": None}, checkpoint={"every": None}, **golden["sections"])
    if processes == 1:
        run = workplace.train_here(config)
    elif processes == 2:
        run = workplace.train(config, processes=2)
        assert run.status == 0, run.errors
    else:
        run = workplace.train_on_ranks(config, processes, microbatch=microbatch)
    steps = {line["step"]: line for line in run.of_kind("train")}
    assert len(steps) == 40
    for step, (loss, norm) in golden["curve"].items():
        assert steps[step]["loss"] == pytest.approx(loss, rel=2e-5)
        assert steps[step]["grad_norm"] == pytest.approx(norm, rel=2e-5)
    weights = load_file(run.folder / "latest" / "model.safetensors")
    sums = [weights[name].double().abs().sum().item() for name in ("token_embedding.weight", "head.weight")]
    assert sums == pytest.approx(golden["sums"], rel=1e-6)


def assert_alike(expected: Finished, found: Finished, relative: float) -> None:
    """The train and validation lines agree, numbers within a relative tolerance."""
    for one, other in zip(without_times(expected), without_times(found), strict=True):
        numbers = {key for key, value in one.items() if isinstance(value, float)}
        assert {key: one[key] for key in numbers} == pytest.approx({key: other[key] for key in numbers}, rel=relative)
        assert {key: one[key] for key in one.keys() - numbers} == {key: other[key] for key in other.keys() - numbers}


@pytest.mark.slow
def test_same_run_on_any_number_of_processes(workplace: Workplace) -> None:
    """1, 2 and 4 processes: training losses to 1e-5 at each step, validation losses, extremes and counts."""
    config = workplace.write_config()
    fewer = ["data.train_tokens=4096"]
    one = workplace.train_here(config, output="on1", overrides=fewer)
    for processes in (2, 4):
        run = workplace.train_on_ranks(config, processes, output=f"on{processes}", overrides=fewer)
        assert_alike(one, run, 1e-5)


@pytest.mark.slow
def test_dropout_is_the_same_on_any_number_of_processes(workplace: Workplace) -> None:
    """1 and 4 processes, and G85, stopped on 2 and resumed on 3 (uneven): each step's loss within 1e-6."""
    config = workplace.write_config(model={"dropout": 0.1})
    one = workplace.train_here(config, output="on1")
    assert len(one.losses) == 10
    four = workplace.train_on_ranks(config, 4, output="on4")
    assert four.losses == pytest.approx(one.losses, rel=1e-6)
    workplace.train_on_ranks(config, 2, output="parts", stop_after=4)
    parts = workplace.train_on_ranks(config, 3, output="parts", resume="latest")
    assert parts.losses == pytest.approx(one.losses, rel=1e-6)
    without = workplace.train_here(config, output="without", overrides=["model.dropout=0"])
    assert without.losses != pytest.approx(one.losses, rel=1e-3), "there is dropout"


@pytest.mark.slow
def test_stop_after_any_step_and_resume(workplace: Workplace) -> None:
    """R31, R33: stopped after a step of 16, metrics.jsonl and the weights are those of no stop."""
    config = workplace.write_config(
        data={"train_tokens": 16 * 512, "shuffle": True, "epochs": 1},
        model={"dropout": 0.1},
        evaluation={"every": 3, "tokens": 128},
        schedule={"name": "cosine", "warmup_percent": 20},
    )
    whole = workplace.train_here(config, output="whole")
    weights = (whole.folder / "latest" / "model.safetensors").read_bytes()
    for stop in (0, 1, 2, 3, 4, 6, 9, 12, 15):
        workplace.train_here(config, output="parts", stop_after=stop, overwrite=True)
        parts = workplace.train_here(config, output="parts", resume="latest")
        assert without_times(parts) == without_times(whole), f"stopped after {stop}"
        assert (parts.folder / "latest" / "model.safetensors").read_bytes() == weights


@pytest.mark.slow
def test_resume_several_times_over_epochs(workplace: Workplace) -> None:
    """R33, R35: three stops over two shuffled epochs."""
    config = workplace.write_config(data={"train_tokens": 4096, "shuffle": True, "epochs": 2})
    whole = workplace.train_here(config, output="whole")
    parts = workplace.train_here(config, output="parts", stop_after=4)
    for stop in (7, 12, None):
        parts = workplace.train_here(config, output="parts", stop_after=stop, resume="auto")
    assert without_times(parts) == without_times(whole)
    assert [event["event"] for event in parts.of_kind("event") if event["event"] != "checkpoint"] == [
        "start", "stopped", "resume", "stopped", "resume", "stopped", "resume", "finished",
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [(2, 2), (2, 1), (1, 3)])
def test_resume_on_another_number_of_processes(workplace: Workplace, first: int, then: int) -> None:
    """R38, R29: the same layout continues bit for bit, another one to rounding; no token is lost or repeated.

    R21: that is so with dropout, and where the run stops after an evaluation.
    """
    config = workplace.write_config(model={"dropout": 0.5}, evaluation={"every": 2})
    whole = workplace.train_on_ranks(config, first, output="whole")
    workplace.train_on_ranks(config, first, output="parts", stop_after=4)
    parts = workplace.train(config, "--resume", "latest", processes=then, output="parts")
    assert parts.status == 0, parts.errors
    if first == then:
        assert without_times(parts) == without_times(whole)
    assert_alike(whole, parts, 1e-5)


def test_resume_of_a_finished_run_changes_nothing(workplace: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    """R27, R108: it says so, exits 0, and no file changes."""
    config = workplace.write_config()
    run = workplace.train_here(config)
    before = files_of(run.folder)
    capsys.readouterr()
    workplace.train_here(config, resume="latest")
    assert "nothing left to do" in capsys.readouterr().err
    assert files_of(run.folder) == before


def test_a_run_killed_before_its_end_is_ended(workplace: Workplace) -> None:
    """Its trackers are told too: a new TensorBoard file holds all of it."""
    config = workplace.write_config(tracking={"trackers": ["tensorboard"]})
    run = workplace.train_here(config)
    metrics = run.folder / "metrics.jsonl"
    metrics.write_text("".join(line for line in metrics.read_text().splitlines(True) if '"finished"' not in line))
    (first,) = run.folder.glob("events.*")
    again = workplace.train_here(config, resume="latest")
    assert again.of_kind("event")[-1]["event"] == "finished"
    (second,) = set(run.folder.glob("events.*")) - {first}
    assert second.stat().st_size == first.stat().st_size


def test_start_in_a_folder_that_holds_a_run(workplace: Workplace) -> None:
    """R27: refused, naming both options; --overwrite starts again; a failed start leaves the run as it was."""
    config = workplace.write_config()
    run = workplace.train_here(config, stop_after=5)
    before = files_of(run.folder)
    with pytest.raises(UserError, match=r"--resume latest.*--overwrite"):
        workplace.train_here(config)
    with pytest.raises(UserError, match="no such dataset"):
        workplace.train_here(config, overwrite=True, overrides=["data.dataset=elsewhere"])
    assert files_of(run.folder) == before
    again = workplace.train_here(config, overwrite=True, stop_after=2)
    assert len(again.losses) == 2
    assert not (again.folder / "step_00000005").exists()


def test_resume_where_there_is_nothing(workplace: Workplace) -> None:
    """R27: an error naming the folder, which is not created; auto starts."""
    config = workplace.write_config()
    with pytest.raises(UserError, match="checkpoints/run"):
        workplace.train_here(config, resume="latest")
    assert not (workplace.checkpoints / "run").exists()
    assert len(workplace.train_here(config, resume="auto", stop_after=1).losses) == 1


@pytest.mark.slow
def test_resume_from_best_drops_what_came_later(workplace: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    """R28: newer checkpoints are named, kept until a new one is complete; each step stands once in the metrics."""
    config = workplace.write_config(evaluation={"every": 3}, checkpoint={"every": 1, "keep": 20})
    run = workplace.train_here(config, stop_after=8)
    (run.folder / "best").unlink()
    (run.folder / "best").symlink_to("step_00000005")
    capsys.readouterr()
    resumed = workplace.train_here(config, resume="best", stop_after=6)
    assert "step_00000006, step_00000007, step_00000008" in capsys.readouterr().err
    assert [line["step"] for line in resumed.of_kind("train")] == [1, 2, 3, 4, 5, 6]
    assert sorted(path.name for path in resumed.folder.glob("step_*"))[-1] == "step_00000006"
    assert os.readlink(resumed.folder / "latest") == "step_00000006"


@pytest.mark.slow
def test_a_past_that_was_given_up_does_not_come_back(workplace: Workplace) -> None:
    """Killed before its first checkpoint, a run resumed from an older one goes on from there, not from the newer."""
    config = workplace.write_config(checkpoint={"every": 2, "keep": 9}, evaluation={"every": None})
    whole = workplace.train_here(config, output="whole", stop_after=6)
    run = workplace.train_here(config, stop_after=6)
    kept = shutil.copytree(run.folder / "step_00000006", workplace.folder / "kept")
    workplace.train_here(config, resume="step_00000002", stop_after=3)
    shutil.rmtree(run.folder / "step_00000003")  # as if it had been killed just before
    shutil.copytree(kept, run.folder / "step_00000006")
    (run.folder / "step_00000006" / "superseded").touch()
    again = workplace.train_here(config, resume="latest", stop_after=6)
    assert without_times(again) == without_times(whole)


def test_a_restart_by_torchrun_keeps_what_there_is(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    """--overwrite deletes once: started again after a crash, the same command goes on."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "ours")
    config = workplace.write_config(evaluation={"every": None})
    workplace.train_here(config, stop_after=5)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    run = workplace.train_here(config, overwrite=True)
    assert [event["event"] for event in run.of_kind("event") if event["event"] != "checkpoint"][:3] == [
        "start", "stopped", "resume",
    ]  # fmt: skip


def train_as_node(config: str, datasets: Path, output: Path, counts: tuple[int, int], stop: int) -> None:
    """As a worker of two nodes, whose agents count restarts each for themselves."""
    os.environ["TORCHELASTIC_RUN_ID"] = "ours"
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(counts[int(os.environ["GROUP_RANK"])])
    train_in_folder(config, datasets, output, {"stop_after": stop})


@pytest.mark.slow
def test_a_restart_of_several_nodes_goes_on(workplace: Workplace) -> None:
    """Whoever's worker failed: no rank waits for another for ever, and the run is known as this launch's."""
    config = str(workplace.write_config(evaluation={"every": None}))
    for step, counts in ((1, (0, 0)), (2, (1, 0)), (3, (0, 1))):
        as_workers(2, train_as_node, config, workplace.datasets, workplace.checkpoints, counts, step, nodes=2)
    lines = (workplace.checkpoints / "run" / "metrics.jsonl").read_text().splitlines()
    assert [line["step"] for line in map(json.loads, lines) if line["kind"] == "train"] == [1, 2, 3]


@pytest.mark.parametrize("another", ["run id", "agent"])
def test_a_restart_by_torchrun_repeats_a_refusal(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch, another: str
) -> None:
    """What this launch has not begun is not its to go on with; an agent in another container may have the same id."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "ours")
    config = workplace.write_config(evaluation={"every": None})
    workplace.train_here(config, stop_after=5)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    if another == "run id":
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")
    else:
        monkeypatch.setattr(launch_record, "_started", lambda process_id: "at another time")
    with pytest.raises(UserError, match="holds a run already"):
        workplace.train_here(config)
    with pytest.raises(UserError, match="step_00000003"):
        workplace.train_here(config, resume="step_00000003")


@pytest.mark.slow
@pytest.mark.parametrize("content", [None, ""])
def test_metrics_that_are_gone_are_told(
    workplace: Workplace, capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    """The run goes on, but not in silence; its config comes from the checkpoint."""
    config = workplace.write_config()
    run = workplace.train_here(config, stop_after=5, overrides=["optimizer.learning_rate=1e-3"])
    (run.folder / "metrics.jsonl").unlink()
    (run.folder / "config.yaml").unlink()
    if content is not None:
        (run.folder / "metrics.jsonl").write_text(content)
    again = workplace.train_here(config, resume="latest", stop_after=6)
    assert "lacks steps 1 to 5 of the 5 steps so far" in capsys.readouterr().err
    assert again.of_kind("train")[0]["learning_rate"] == 1e-3


def test_foreign_files_are_not_ours_to_delete(workplace: Workplace) -> None:
    """A start refuses a folder with other files, hidden ones too; auto leaves them alone."""
    config = workplace.write_config()
    folder = workplace.checkpoints / "run"
    folder.mkdir(parents=True)
    (folder / ".env").write_text("mine")
    with pytest.raises(UserError, match="holds other files"):
        workplace.train_here(config)
    (folder / "metrics.jsonl").write_text("")
    workplace.train_here(config, resume="auto", stop_after=1)
    assert (folder / ".env").read_text() == "mine"


def test_other_data_are_refused_on_resume(workplace: Workplace) -> None:
    """The config can stay the same while the dataset does not: another revision, or prepared on another machine."""
    config = workplace.write_config()
    workplace.train_here(config, stop_after=3)
    workplace.write_tokens(tokens=golden_tokens(30_001)[1:].astype(np.uint16))
    with pytest.raises(UserError, match="not those that step_00000003 was trained on"):
        workplace.train_here(config, resume="latest")


@pytest.mark.slow
def test_a_run_killed_before_its_report_gets_it(workplace: Workplace) -> None:
    """All steps are done and saved, the end is not recorded: resuming records it."""
    config = workplace.write_config(evaluation={"every": None})
    run = workplace.train_here(config)
    (run.folder / "report.md").unlink()
    lines = (run.folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    assert '"finished"' in lines[-1]
    (run.folder / "metrics.jsonl").write_text("".join(lines)[:-20])  # in the middle of writing it
    workplace.train_here(config, resume="latest")
    assert (run.folder / "report.md").exists()
    assert run.of_kind("event")[-1]["event"] == "finished"


@pytest.mark.slow
def test_a_full_disk_is_one_sentence(workplace: Workplace) -> None:
    """R06: a checkpoint that twice cannot be written ends all processes with status 1; the one before is as it was."""
    config = workplace.write_config(evaluation={"every": None}, checkpoint={"every": 2})
    run = workplace.train_here(config, stop_after=2)
    before = files_of(run.folder / "step_00000002")
    launcher = f"{sys.executable} -m torch.distributed.run --standalone --nproc_per_node=2"
    limited = f"ulimit -f 300; exec {launcher} {REPOSITORY / 'ddp_train.py'} {config} {workplace.datasets}"
    command = ["bash", "-c", f"{limited} --resume latest --output {workplace.checkpoints}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert time.time() - (run.folder / "metrics.jsonl").stat().st_mtime < 30
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("step 4 could not be saved") == 2, "a warning, and the end"
    assert f'File "{REPOSITORY}' not in done.stderr, "no trace of ours; the launcher shows its own"
    assert files_of(run.folder / "step_00000002") == before
    assert os.readlink(run.folder / "latest") == "step_00000002"


def test_overrides_stay_part_of_the_run(workplace: Workplace) -> None:
    """--set counts from then on: not repeated on resume."""
    config = workplace.write_config()
    workplace.train_here(config, overrides=["optimizer.learning_rate=1e-3"], stop_after=2)
    run = workplace.train_here(config, resume="latest", stop_after=4, overrides=["checkpoint.keep=7"])
    assert {line["learning_rate"] for line in run.of_kind("train")} == {0.001}


@pytest.mark.slow
def test_initial_weights_and_init_from(workplace: Workplace) -> None:
    """--stop-after 0 writes the initial weights; init_from starts another run from a run's."""
    config = workplace.write_config()
    start = workplace.train_here(config, stop_after=0)
    initial = load_file(start.folder / "step_00000000" / "model.safetensors")
    assert initial["token_embedding.weight"][0, 0].item() == pytest.approx(1.9269152880)
    again = workplace.train_here(config, output="again", stop_after=0)
    digests = {run.of_kind("event")[0]["weights_sha256"] for run in (start, again)}
    assert len(digests) == 1
    other = workplace.train_here(config, output="other", stop_after=0, overrides=["seeds.weights=43"])
    assert other.of_kind("event")[0]["weights_sha256"] not in digests
    trained = workplace.train_here(config, resume="latest", stop_after=3)
    tuned = workplace.write_config("tuned", init_from=str(trained.folder / "latest"))
    copied = workplace.train_here(tuned, stop_after=0)
    weights = [(run.folder / "latest" / "model.safetensors").read_bytes() for run in (trained, copied)]
    assert weights[0] == weights[1]
    whole = workplace.write_config("whole", init_from=str(trained.folder))
    with pytest.raises(UserError, match=r"/run: is a run; give one of its checkpoints, such as .*/run/latest$"):
        workplace.train_here(whole)
    broken = workplace.write_config("broken", init_from=str(workplace.folder / "nowhere"))
    with pytest.raises(UserError, match=r"^init_from: .*nowhere: there is no such folder; give that of a checkpoint"):
        workplace.train_here(broken)


@pytest.mark.slow
def test_evaluation_changes_nothing(workplace: Workplace) -> None:
    """G67: with dropout, the losses are the same however often evaluation runs."""
    losses = []
    for every in (1, 3, None):
        config = workplace.write_config(model={"dropout": 0.1}, evaluation={"every": every})
        losses.append(workplace.train_here(config, output=f"every{every}").losses)
    assert losses[0] == losses[1] == losses[2]


def test_gradients_that_stay_not_finite_end_the_run(workplace: Workplace) -> None:
    """R09, G57: five in a row stop the run, all reported; the last good checkpoint is as it was, best too."""
    config = workplace.write_config(evaluation={"every": 2}, checkpoint={"every": 2}, data={"train_tokens": 30 * 512})
    run = workplace.train_here(config, stop_after=4)
    set_final_norm(run.folder / "step_00000004", 1e38)  # finite, but its logits are not
    before = files_of(run.folder / "step_00000004")
    with pytest.raises(RunError, match="5 steps in a row"):
        workplace.train_here(config, resume="latest")
    bad = [line for line in run.of_kind("train") if line["skipped"]]
    assert [line["step"] for line in bad][:5] == [5, 6, 7, 8, 9]
    assert all(line["loss"] is None and line["grad_norm"] is None for line in bad)
    assert sum(line.get("event") == "nonfinite" for line in run.lines) == len(bad)
    assert files_of(run.folder / "step_00000004") == before
    assert os.readlink(run.folder / "best") == "step_00000004"
    saved = [(path / "model.safetensors").read_bytes() for path in run.folder.glob("step_*") if path.name[-1] in "468"]
    assert len(set(saved)) == 1  # a skipped step changes no weight


def test_weights_that_are_not_finite_are_never_saved(workplace: Workplace) -> None:
    """R09: latest is not moved to them."""
    config = workplace.write_config(evaluation={"every": None}, checkpoint={"every": 2})
    run = workplace.train_here(config, stop_after=4)
    set_final_norm(run.folder / "step_00000004", float("nan"))
    with pytest.raises(RunError, match="not finite after step 6"):
        workplace.train_here(config, resume="latest")
    assert os.readlink(run.folder / "latest") == "step_00000004"


def test_retention(workplace: Workplace) -> None:
    """The newest N and best are kept; latest and best are relative links that resolve."""
    config = workplace.write_config(evaluation={"every": 4}, checkpoint={"every": 1, "keep": 2})
    run = workplace.train_here(config)
    best = min(run.of_kind("validation"), key=lambda line: line["loss"])["step"]
    kept = {path.name for path in run.folder.glob("step_*")}
    assert kept == {"step_00000009", "step_00000010", f"step_{best:08d}"}
    assert os.readlink(run.folder / "latest") == "step_00000010"
    assert os.readlink(run.folder / "best") == f"step_{best:08d}"


@pytest.mark.slow
def test_tied_weights_through_a_whole_run(workplace: Workplace) -> None:
    """R91, R105, G82: trained, saved, resumed and evaluated with one storage for both names."""
    config = workplace.write_config(model={"tie_weights": True, "init": "gpt2"}, evaluation={"every": 5})
    whole = workplace.train_here(config, output="whole")
    workplace.train_here(config, output="parts", stop_after=5)
    parts = workplace.train_here(config, output="parts", resume="latest")
    assert without_times(parts) == without_times(whole)
    assert "head.weight" not in load_file(parts.folder / "latest" / "model.safetensors")


@pytest.mark.slow  # a CPU without bf16 instructions computes it at a hundredth of its speed
def test_bf16_trains_on_a_cpu(workplace: Workplace) -> None:
    """R62: the whole cycle on a CPU."""
    run = workplace.train(workplace.write_config(precision={"amp": "bf16"}))
    assert run.status == 0, run.errors
    assert run.losses[-1] < run.losses[0]


def test_fp16_on_a_cpu_is_refused(workplace: Workplace) -> None:
    """R62: an error with the remedy, and nothing is written."""
    config = workplace.write_config()
    refused = workplace.train(config, "--set", "precision.amp=fp16", output="refused")
    assert refused.status == 2
    assert refused.errors.startswith("error: precision.amp: fp16 needs a GPU")
    assert refused.errors.count("\n") == 1
    assert not (workplace.folder / "refused" / "run").exists()


@pytest.mark.slow
def test_mistakes_are_told_once(workplace: Workplace) -> None:
    """One sentence from one process under torchrun; 2 is the process's own status; nothing is written."""
    for options in (["--set", "data.dataset=nowhere"], ["--bogus"]):
        alone = workplace.train(workplace.write_config(), *options)
        assert alone.status == 2, alone.errors
        together = workplace.train(workplace.write_config(), *options, processes=2)
        assert together.status == 1
        sentence = alone.errors.strip().splitlines()[-1]
        assert together.errors.count(sentence) == 1, together.errors
        assert 'Traceback (most recent call last):\n  File "' + str(workplace.folder) not in together.errors
    assert not workplace.checkpoints.exists() or not list(workplace.checkpoints.iterdir())


def running_workers(folder: Path) -> list[int]:
    """Processes whose command line names a folder, launchers apart."""
    listing = subprocess.run(["ps", "-ww", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 1) for line in listing.splitlines()[1:]]
    return [int(pid) for pid, command in rows if str(folder) in command and "torch.distributed.run" not in command]


@pytest.mark.slow
def test_workers_leave_with_a_killed_launcher(workplace: Workplace) -> None:
    """torchrun's workers outlive a killed launcher: ours end at once, without saving, the lock free.

    They look five times a second; one whose thread waits for the disk ends when that answers.
    """
    config = workplace.write_config(data={"train_tokens": 200 * 512, "epochs": 1}, evaluation={"every": None})
    workplace.write_tokens(tokens=[1] * 300_000)
    process = workplace.start(config, "--set", "checkpoint.every=5", processes=2)
    latest = workplace.checkpoints / "run" / "latest"
    deadline = time.monotonic() + 120
    while not latest.exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    deadline = time.monotonic() + 5
    while running_workers(workplace.folder):
        assert time.monotonic() < deadline, "a worker outlives its launcher"
        time.sleep(0.1)
    process.communicate()
    resumed = workplace.train(config, "--resume", "latest", processes=2)
    assert resumed.status == 0, resumed.errors
    assert [line["step"] for line in resumed.of_kind("train")] == list(range(1, 201))


@pytest.mark.slow
def test_second_process_on_a_run_is_refused(workplace: Workplace) -> None:
    """The folder is held by a lock: after a short wait the second is told so, and the first goes on."""
    workplace.write_tokens(tokens=[1] * 600_000)
    config = workplace.write_config(data={"train_tokens": 500_000}, evaluation={"every": None})
    first = workplace.start(config)
    while not (workplace.checkpoints / "run" / "metrics.jsonl").exists():
        assert first.poll() is None, first.communicate()[1]
        time.sleep(0.05)
    second = workplace.train(config, "--resume", "auto")
    assert second.status == 2
    assert "another process is training this run" in second.errors
    assert first.poll() is None
    first.kill()
    first.communicate()


@pytest.mark.slow
def test_dataset_is_downloaded_once(workplace: Workplace) -> None:
    """R82, R102: by one process of the node, while the others wait; its commit is recorded; then it is just there."""
    content = workplace.write_tokens("elsewhere").read_bytes()
    config = workplace.write_config(data={"dataset": "someone/tokens", "train_tokens": 1024})
    with FakeHub() as hub:
        workplace.environment = hub.environment(workplace.folder / "home")
        commit = hub.add("dataset", "someone/tokens", {"train.safetensors": content})
        hub.fail("/resolve/", delay=3)
        run = workplace.train(config, processes=4)
        assert run.status == 0, run.errors
        assert hub.downloads("train.safetensors") == 1
    assert run.of_kind("event")[0]["dataset_revision"] == commit
    workplace.environment |= {"HF_HUB_OFFLINE": "1"}
    again = workplace.train(config, "--overwrite")
    assert again.status == 0, again.errors
    assert again.losses == pytest.approx(run.losses, rel=1e-5)


@pytest.mark.slow
def test_dataset_that_is_not_on_the_hub(workplace: Workplace) -> None:
    """R45: all processes end within half a minute, with one sentence that names the dataset."""
    config = workplace.write_config(data={"dataset": "someone/missing"})
    with FakeHub() as hub:
        workplace.environment = hub.environment(workplace.folder / "home")
        started = time.monotonic()
        run = workplace.train(config, processes=2)
    assert time.monotonic() - started < 30
    assert run.status == 1
    assert run.errors.count("error: dataset someone/missing") == 1, run.errors
    assert not (workplace.datasets / "someone" / "missing").exists()
