"""What may change when a run goes on: every key of the config, and the cases that depend on what has been done."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Finished, Workplace
from small_configs import small_config, write_positions

from training.changes import Changed, Passes, change_lines, compare_configs, refuse_changes
from training.config import RunConfig, config_mapping
from training.config_file import load_run_config
from training.data import TrainingData, permuted
from training.errors import UserError
from training.layout import Layout
from training.metrics_file import read_metrics
from training.optimizer import learning_rate_at
from training.rows import Rows, TokenFile

# Another value for every key; of a run of 10 steps of 64 tokens, 5 of them done.
REFUSED: dict[str, Any] = {
    "model.vocab_size": 2049,
    "model.context_length": 16,
    "model.emb_dim": 64,
    "model.n_heads": 4,
    "model.n_layers": 3,
    "model.dropout": 0.1,
    "model.qkv_bias": True,
    "model.tie_weights": True,
    "model.init": "gpt2",
    "data.dataset": "other",
    "data.revision": "a" * 40,
    "data.train_start": 8,
    "data.shuffle": True,
    "batch.world_size": 3,
    "batch.microbatch": 3,
    "batch.accumulation": 3,
    "seeds.weights": 1,
    "seeds.training": 1,
    "init_from": "checkpoints/other/step_00000004",
}
TAKEN: dict[str, Any] = {
    "data.train_tokens": 1280,
    "data.epochs": 2,
    "data.validation_start": 8,
    "data.validation_tokens": 64,
    "data.tokenizer": "other.json",
    "precision.amp": "bf16",
    "precision.matmul": "highest",
    "precision.gradients": "bf16",
    "optimizer.learning_rate": 1e-3,
    "optimizer.weight_decay": 0.01,
    "optimizer.betas": [0.9, 0.95],
    "optimizer.eps": 1e-7,
    "optimizer.decay": "matrices",
    "optimizer.clip_norm": 1.0,
    "schedule.name": "cosine",
    "loss.reduction": "sum",
    "evaluation.every": 3,
    "evaluation.tokens": 64,
    "checkpoint.every": None,
    "checkpoint.keep": 1,
    "tracking.trackers": ["tensorboard"],
    "tracking.project": "other",
    "tracking.space": "owner/space",
    "hub.repo": "owner/model",
    "hub.private": False,
    "hub.licence": "mit",
    "hub.every": 0,
    "reproducibility": "bitwise",
}
ALONG: dict[str, dict[str, Any]] = {"tracking.space": {"trackers": ["trackio"]}}
"""What a value needs beside it."""
IS_THE_RECORD: dict[str, Any] = {"interventions": ["no-dropout"], "overrides": ["checkpoint.keep=1"]}
ONLY_VALUE = {"optimizer.name", "resolved"}
"""Keys that have one valid value, so far."""


def flat(mapping: dict[str, Any]) -> dict[str, Any]:
    """Dotted keys of a mapping of sections."""
    pairs: dict[str, Any] = {}
    for key, value in mapping.items():
        pairs |= {f"{key}.{name}": item for name, item in value.items()} if isinstance(value, dict) else {key: value}
    return pairs


def run_of(**sections: Any) -> RunConfig:
    return small_config(**{**sections, "data": {"train_tokens": 640, **sections.get("data", {})}})


def changed(key: str, value: Any) -> RunConfig:
    section, _, name = key.partition(".")
    return run_of(**{section: {name: value, **ALONG.get(key, {})} if name else value})


def test_every_key_of_a_config_is_classified() -> None:
    """A new one fails here until somebody has thought about it."""
    classified = [*REFUSED, *TAKEN, *IS_THE_RECORD, *ONLY_VALUE]
    assert sorted(classified) == sorted(flat(config_mapping(run_of())))


@pytest.mark.parametrize("key", REFUSED)
def test_what_the_steps_so_far_depended_on_is_refused(key: str) -> None:
    before, after = run_of(), changed(key, REFUSED[key])
    for old, new in ((before, after), (after, before)):
        [problem] = compare_configs(old, new, done=5).refused
        assert problem.startswith(f"{key} ")
        assert compare_configs(old, new, done=5).taken == {}
    assert compare_configs(after, after, done=5).refused == []


@pytest.mark.parametrize("key", TAKEN)
def test_what_only_steps_to_come_depend_on_is_taken(key: str) -> None:
    before, after = run_of(), changed(key, TAKEN[key])
    was, now = flat(config_mapping(before))[key], flat(config_mapping(after))[key]
    assert was != now
    for old, new, values in ((before, after, [was, now]), (after, before, [now, was])):
        changes = compare_configs(old, new, done=5)
        assert changes.refused == []
        assert changes.taken[key] == values
        assert set(changes.taken) == {key} or key == "schedule.name" or key in ALONG
    assert compare_configs(after, after, done=5).taken == {}


@pytest.mark.parametrize("key", IS_THE_RECORD)
def test_how_a_config_came_about_is_not_compared(key: str) -> None:
    changes = compare_configs(run_of(), changed(key, IS_THE_RECORD[key]), done=5)
    assert (changes.refused, changes.taken) == ([], {})


def test_a_key_that_only_one_schedule_has_is_null_in_the_other() -> None:
    taken = compare_configs(run_of(), changed("schedule.name", "cosine"), done=5).taken
    assert taken == {
        "schedule.final_fraction": [None, 0.1],
        "schedule.name": ["constant", "cosine"],
        "schedule.warmup_percent": [None, 5.0],
    }


@pytest.mark.parametrize("now", [(1, 8, 1), (2, 4, 1), (8, 1, 1), (1, 2, 4)])
def test_the_split_of_the_global_batch_may_change(now: tuple[int, int, int]) -> None:
    """R29: 8 sequences per step all the same; another microbatch not where the loss was a mean of their means."""
    batch = dict(zip(("world_size", "microbatch", "accumulation"), now, strict=True))
    for reduction in ("token", "sum", "microbatch_mean"):
        loss = {"reduction": reduction}
        changes = compare_configs(run_of(loss=loss), run_of(loss=loss, batch=batch), done=5)
        refused = reduction == "microbatch_mean" and now[1] != 2
        assert bool(changes.refused) == refused
        assert any(key.startswith("batch.") for key in changes.taken) != refused
    changes = compare_configs(run_of(), run_of(loss={"reduction": "microbatch_mean"}, batch=batch), done=5)
    assert changes.refused == [], "steps to come have it"


# Runs of 64 tokens per step: train_tokens and epochs before and after, shuffle, steps done, and what is said of it.
LENGTHS = [
    ((640, 1), (1280, 1), False, 5, ""),
    ((640, 1), (1280, 1), False, 10, ""),
    ((640, 1), (1280, 1), True, 5, "data.shuffle orders another number of sequences otherwise; data.epochs may grow"),
    ((640, 1), (1280, 1), True, 0, ""),
    ((640, 1), (600, 1), True, 5, ""),  # whole steps: the same range
    ((640, 1), (640, 3), True, 5, ""),
    ((640, 3), (640, 2), True, 15, ""),
    ((640, 2), (1280, 1), False, 10, ""),
    ((640, 2), (1280, 1), False, 11, "the steps from 11 on would have been in another epoch"),
    ((1280, 1), (640, 2), False, 11, "the steps from 11 on would have been in another epoch"),
    ((640, 2), (1280, 2), False, 15, "the steps from 11 on would have been in another epoch"),
    ((640, 1), (384, 1), False, 5, ""),
    ((640, 1), (320, 1), False, 5, "5 steps in all instead of 10, and 5 are done"),
    ((640, 1), (256, 1), False, 5, "4 steps in all instead of 10, and 5 are done"),
    ((640, 2), (640, 1), False, 12, "10 steps in all instead of 20, and 12 are done"),
]


@pytest.mark.parametrize(("before", "after", "shuffle", "done", "problem"), LENGTHS)
def test_the_length_may_change_where_the_steps_so_far_stay_the_same(
    before: tuple[int, int], after: tuple[int, int], shuffle: bool, done: int, problem: str
) -> None:
    """R18, R35: judged by the configs, and alike by the data where the config says -1, all there is."""
    old, new = (
        run_of(data={"train_tokens": tokens, "epochs": epochs, "shuffle": shuffle})
        for tokens, epochs in (before, after)
    )
    changes = compare_configs(old, new, done)
    assert changes.refused == [] if not problem else changes.refused[0].endswith(f" ({problem})")
    assert set(changes.taken) <= {"data.train_tokens", "data.epochs"}
    assert bool(changes.taken) != bool(problem)

    everything = run_of(data={"train_tokens": -1, "epochs": before[1], "shuffle": shuffle})
    assert compare_configs(everything, new, done).refused == [], "not known yet"
    steps = [-(-tokens // 64) for tokens, _ in (before, after)]
    passes = (Passes(steps[0], before[1]), Passes(steps[1], after[1]))
    refused = compare_configs(everything, new, done, passes).refused
    assert refused == [] if not problem else refused[0].endswith(f" ({problem})")


def test_all_that_is_refused_is_in_one_sentence() -> None:
    old = run_of()
    new = run_of(
        model={"dropout": 0.1, "init": "gpt2"},
        data={"train_tokens": 128, "epochs": 2},
        batch={"world_size": 3, "microbatch": 4},
        optimizer={"learning_rate": 1e-3},
        init_from="checkpoints/other/latest",
    )
    changes = compare_configs(old, new, done=5)
    with pytest.raises(UserError) as caught:
        refuse_changes(changes, Path("checkpoints/run"), done=5)
    assert str(caught.value) == (
        "checkpoints/run: after 5 steps these changes would make it another run: "
        "init_from null -> checkpoints/other/latest, model.dropout 0.0 -> 0.1, model.init pytorch -> gpt2, "
        "batch.microbatch 2 -> 4, batch.world_size 2 -> 3 (the global batch 8 -> 24), "
        "data.train_tokens 640 -> 128, data.epochs 1 -> 2 (2 steps in all instead of 10, and 5 are done); "
        "a run keeps its model, seeds, global batch and the order of its data: undo them, or start another run "
        "(another name, or --overwrite)"
    )
    assert list(changes.taken) == ["optimizer.learning_rate"]
    refuse_changes(compare_configs(old, old, done=5), Path("checkpoints/run"), done=5)


def test_what_is_told_of_a_change() -> None:
    taken: Changed = {"optimizer.clip_norm": [None, 1.0], "schedule.name": ["constant", "cosine"]}
    assert change_lines(taken, done=1234) == [
        "optimizer.clip_norm: null -> 1.0 from step 1,235 on",
        "schedule.name: constant -> cosine from step 1,235 on",
    ]
    for key in ("evaluation.tokens", "data.validation_start", "data.validation_tokens"):
        line, remark = change_lines({key: [64, 128]}, done=20)
        assert line == f"{key}: 64 -> 128 from step 21 on"
        assert remark.startswith("validation losses up to step 20 do not compare with those to come: ")


def test_g86_a_step_is_a_place_in_the_data_whatever_the_accumulation(tmp_path: Path) -> None:
    """Epochs of 100 microbatches, 4 a step: steps 500 and 510 are in epoch 20, at its microbatches 0 and 40."""
    rows = Rows(TokenFile(write_positions(tmp_path / "train.safetensors", 801)), start=0, count=100, context=8)
    for world_size, accumulation in ((1, 4), (2, 2), (4, 1)):
        layout = Layout(world_size, accumulation, global_batch=4)
        for step, first in ((500, 0), (510, 40)):
            data = TrainingData(rows, global_batch=4, epochs=30, shuffle_seed=None)
            assert data.total_steps == 750
            assert data.sequences(step, layout.microbatches(0)[0]) == [first]
            shuffled = TrainingData(rows, global_batch=4, epochs=30, shuffle_seed=42)
            assert (
                shuffled.sequences(step, layout.microbatches(0)[0]) == permuted(np.array([first]), 100, 42, 20).tolist()
            )


# Whole runs: 10 steps of 512 tokens, validated every 4 steps, saved every 5


def trained(run: Finished) -> list[dict[str, Any]]:
    """The train lines, but for what depends on the clock."""
    return [{key: line[key] for key in line.keys() - {"seconds", "tokens_per_second"}} for line in run.of_kind("train")]


def weights(run: Finished) -> bytes:
    return (run.folder / "latest" / "model.safetensors").read_bytes()


def resumes(run: Finished) -> list[dict[str, Any]]:
    return [event for event in run.of_kind("event") if event["event"] == "resume"]


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def edit_config(checkpoint: Path, section: str, **values: Any) -> None:
    """Changes the config that a checkpoint says it was trained with."""
    state = json.loads((checkpoint / "state.json").read_text())
    state["config"][section] |= values
    (checkpoint / "state.json").write_text(json.dumps(state))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    written = (checkpoint / "state.json").read_bytes()
    manifest["state.json"] = {"size": len(written), "sha256": hashlib.sha256(written).hexdigest()}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def test_a_learning_rate_that_changes_on_the_way(workplace: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing changes before, the first step after has the loss of the unchanged run; it is told and recorded."""
    config = workplace.write_config(evaluation={"every": None})
    whole = workplace.train_here(config, output="whole", stop_after=4)
    workplace.train_here(config, stop_after=2)
    capsys.readouterr()
    run = workplace.train_here(config, resume="latest", stop_after=4, overrides=["optimizer.learning_rate=2e-3"])
    assert "\noptimizer.learning_rate: 0.0004 -> 0.002 from step 3 on\n" in capsys.readouterr().err
    assert trained(run)[:2] == trained(whole)[:2]
    assert run.losses[2] == whole.losses[2]
    assert run.losses[3] != whole.losses[3]
    assert [line["learning_rate"] for line in run.of_kind("train")] == [4e-4, 4e-4, 2e-3, 2e-3]
    assert resumes(run)[0]["changed"] == {"optimizer.learning_rate": [4e-4, 2e-3]}
    assert "learning_rate: 0.002" in (run.folder / "config.yaml").read_text()
    state = json.loads((run.folder / "latest" / "state.json").read_text())
    assert state["config"]["optimizer"]["learning_rate"] == 2e-3
    assert "| step 3 | `optimizer.learning_rate` | `0.0004` | `0.002` |" in (run.folder / "report.md").read_text()


@pytest.mark.slow
def test_a_changed_rate_is_that_of_an_edited_checkpoint(workplace: Workplace) -> None:
    """Bit for bit: by --set, which stays over another resumption, or in the YAML file."""
    config = workplace.write_config()
    for output in ("set", "edited"):
        workplace.train_here(config, stop_after=5, output=output)
    changed = ["optimizer.learning_rate=2e-3"]
    workplace.train_here(config, resume="latest", stop_after=7, output="set", overrides=changed)
    run = workplace.train_here(config, resume="latest", output="set")
    assert [event["changed"] for event in resumes(run)] == [{"optimizer.learning_rate": [4e-4, 2e-3]}, {}]
    edit_config(workplace.folder / "edited" / "run" / "step_00000005", "optimizer", learning_rate=2e-3)
    config = workplace.write_config(optimizer={"learning_rate": 2e-3})
    edited = workplace.train_here(config, resume="latest", output="edited")
    assert resumes(edited)[0]["changed"] == {}
    assert trained(edited) == trained(run)
    assert weights(edited) == weights(run)


@pytest.mark.slow
def test_a_restart_by_torchrun_takes_a_change_once(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same command again: before the next checkpoint from the same step, after it without anything new."""
    config = workplace.write_config(checkpoint={"every": 2})
    workplace.train_here(config, stop_after=4)
    new = ["optimizer.learning_rate=2e-3"]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "ours")
    run = workplace.train_here(config, resume="step_00000002", stop_after=3, overrides=new)
    (run.folder / "step_00000003").rename(run.folder / ".step_00000003.partial")  # as if killed while writing it
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    run = workplace.train_here(config, resume="step_00000002", stop_after=6, overrides=new)
    run = workplace.train_here(config, resume="step_00000002", overrides=new)
    taken = {"optimizer.learning_rate": [4e-4, 2e-3]}
    assert [(event["step"], event["changed"]) for event in resumes(run)] == [(2, taken), (2, taken), (6, {})]
    assert [line["learning_rate"] for line in run.of_kind("train")] == [4e-4] * 2 + [2e-3] * 8
    assert (run.folder / "report.md").read_text().count("| `optimizer.learning_rate` |") == 1


@pytest.mark.slow
def test_a_run_that_is_made_longer(workplace: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    """Half way or when it had finished: bit for bit the run that was as long from the start."""
    config = workplace.write_config()
    whole = workplace.train_here(config, output="whole", overrides=["data.train_tokens=10240"])
    for stop in (5, None):
        workplace.train_here(config, stop_after=stop, overwrite=True)
        run = workplace.train_here(config, resume="latest", overrides=["data.train_tokens=10240"])
        assert trained(run) == trained(whole)
        assert weights(run) == weights(whole)
        assert resumes(run)[0]["changed"] == {"data.train_tokens": [5120, 10240]}
    assert "Finished: step 20 of 20." in (run.folder / "report.md").read_text()
    assert [event["step"] for event in run.of_kind("event") if event["event"] == "finished"] == [10, 20]
    best = read_metrics(run.folder / "metrics.jsonl").best_validation()
    assert best is not None
    assert f"step_{best['step']:08d}" == os.readlink(run.folder / "best")

    lines = (run.folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run.folder / "metrics.jsonl").write_text("".join(lines[:-1]))  # killed before its second end was recorded
    run = workplace.train_here(config, resume="latest")
    assert run.of_kind("event")[-1]["event"] == "finished"
    before = content(run.folder)
    capsys.readouterr()
    workplace.train_here(config, resume="latest", overrides=["optimizer.eps=1e-7"])
    assert "nothing left to do, 20 of 20 steps are done; not taken: optimizer.eps" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"train_tokens 10240 -> 5120 \(10 steps in all instead of 20, and 20 are done"):
        workplace.train_here(config, resume="latest", overrides=["data.train_tokens=5120"])
    assert content(run.folder) == before


@pytest.mark.slow
def test_a_cosine_follows_the_new_length(workplace: Workplace) -> None:
    """Ended, it goes on where the schedule of 20 steps is at step 11: the rate jumps up."""
    config = workplace.write_config(schedule={"name": "cosine", "warmup_percent": 20})
    workplace.train_here(config)
    longer = ["data.train_tokens=10240"]
    run = workplace.train_here(config, resume="latest", overrides=longer)
    resolved = load_run_config(str(config), longer)
    rates = [learning_rate_at(step, resolved, 10 if step < 10 else 20) for step in range(20)]
    assert [line["learning_rate"] for line in run.of_kind("train")] == rates
    assert rates[10] > 3 * rates[9]


def test_what_is_refused_leaves_the_run_as_it_was(workplace: Workplace) -> None:
    """Also where only the data tell: train_tokens -1 is as many steps as they hold."""
    config = workplace.write_config(data={"train_tokens": -1, "shuffle": True, "validation_tokens": 640})
    workplace.write_tokens(file="validation")
    run = workplace.train_here(config, stop_after=3)
    before = content(run.folder)
    for overrides, problem in (
        (["data.train_tokens=5120"], r"data.train_tokens -1 -> 5120 \(data.shuffle orders another number"),
        (["data.train_tokens=1000"], r"-1 -> 1000 \(2 steps in all instead of 58, and 3 are done\)"),
        (["seeds.training=1", "data.shuffle=false"], "data.shuffle true -> false, seeds.training 42 -> 1; "),
        (["batch.accumulation=4"], r"batch.accumulation 2 -> 4 \(the global batch 16 -> 32\)"),
    ):
        with pytest.raises(UserError, match=problem):
            workplace.train_here(config, resume="auto", overrides=[*overrides, "optimizer.learning_rate=1e-3"])
        assert content(run.folder) == before


@pytest.mark.slow
def test_a_validation_that_changes_looks_for_the_best_anew(
    workplace: Workplace, capsys: pytest.CaptureFixture[str]
) -> None:
    """`best` stays until there is another, also where few checkpoints are kept; more tokens can have a higher loss."""
    config = workplace.write_config(checkpoint={"every": 1, "keep": 1})
    run = workplace.train_here(config, stop_after=6)
    assert os.readlink(run.folder / "best") == "step_00000004"
    capsys.readouterr()
    other = ["evaluation.tokens=64", "data.validation_start=26000"]
    run = workplace.train_here(config, resume="latest", stop_after=7, overrides=other)
    assert "validation losses up to step 6 do not compare with those to come" in capsys.readouterr().err
    assert os.readlink(run.folder / "best") == "step_00000004"
    assert sorted(path.name for path in run.folder.glob("step_*")) == ["step_00000004", "step_00000007"]
    state = json.loads((run.folder / "latest" / "state.json").read_text())
    assert (state["best_step"], state["best_loss"]) == (None, None)
    best = read_metrics(run.folder / "metrics.jsonl").best_validation()
    assert best is not None
    assert best["step"] == 4

    run = workplace.train_here(config, resume="latest", stop_after=8)
    assert os.readlink(run.folder / "best") == "step_00000008"
    assert sorted(path.name for path in run.folder.glob("step_*")) == ["step_00000008"]
    row = run.of_kind("validation")[-1]
    assert (row["step"], row["target_tokens"]) == (8, 64)
    state = json.loads((run.folder / "latest" / "state.json").read_text())
    assert (state["best_step"], state["best_loss"]) == (8, row["loss"])


@pytest.mark.slow
def test_everything_that_may_change_at_once(workplace: Workplace) -> None:
    """The optimizer's state finds its parameters in other groups; the scaler, the schedule and the loss begin anew."""
    config = workplace.write_config()
    workplace.train_here(config, stop_after=5)
    changes: Changed = {
        "precision.amp": ["off", "bf16"],
        "precision.matmul": ["highest", "high"],
        "optimizer.weight_decay": [0.1, 0.01],
        "optimizer.betas": [[0.9, 0.999], [0.9, 0.95]],
        "optimizer.decay": ["all", "matrices"],
        "optimizer.clip_norm": [None, 0.1],
        "loss.reduction": ["token", "microbatch_mean"],
        "schedule.name": ["constant", "cosine"],
        "checkpoint.keep": [3, 1],
    }
    overrides = [f"{key}={json.dumps(new)}" for key, (_, new) in changes.items()]
    run = workplace.train_here(config, resume="latest", overrides=overrides)
    assert changes.items() <= resumes(run)[0]["changed"].items()
    assert len(run.losses) == 10
    assert [line["clipped"] for line in run.of_kind("train")] == [False] * 5 + [True] * 5


@pytest.mark.slow
def test_another_rate_on_another_number_of_processes(workplace: Workplace) -> None:
    """Two processes, then three with another rate: the same losses as on one."""
    config = workplace.write_config()
    rate = "optimizer.learning_rate=2e-3"
    workplace.train_here(config, output="one", stop_after=5)
    one = workplace.train_here(config, output="one", resume="latest", overrides=[rate])
    workplace.train_on_ranks(config, 2, stop_after=5)
    several = workplace.train(config, "--resume", "latest", "--set", rate, processes=3)
    assert several.status == 0, several.errors
    assert several.losses == pytest.approx(one.losses, rel=1e-5)
    assert several.errors.count("optimizer.learning_rate: 0.0004 -> 0.002 from step 6 on") == 1
    assert [line["learning_rate"] for line in several.of_kind("train")] == [4e-4] * 5 + [2e-3] * 5


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_refusal_is_one_sentence_from_one_process(workplace: Workplace, processes: int) -> None:
    """Status 2, or torchrun's 1: every key is named, no file changes."""
    config = workplace.write_config()
    run = workplace.train_here(config, stop_after=5)
    before = content(run.folder)
    refused = ["--set", "model.dropout=0.1", "--set", "seeds.weights=1", "--set", "data.train_tokens=2560"]
    done = workplace.train(config, "--resume", "latest", *refused, processes=processes)
    assert done.status == (2 if processes == 1 else 1)
    sentence = (
        "after 5 steps these changes would make it another run: model.dropout 0.0 -> 0.1, seeds.weights 42 -> 1, "
    )
    assert done.errors.count(sentence) == 1, done.errors
    assert "data.train_tokens 5120 -> 2560 (5 steps in all instead of 10, and 5 are done); " in done.errors
    assert content(run.folder) == before


def test_a_dry_run_looks_at_the_run_to_go_on_with(workplace: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    """What would be refused is refused, what would be taken is told, and nothing is written."""
    config = workplace.write_config(evaluation={"every": None})
    run = workplace.train_here(config, stop_after=1)
    before = sorted(path.name for path in run.folder.iterdir())
    with pytest.raises(UserError, match=r"model\.n_layers 3 -> 2"):
        workplace.train_here(config, resume="latest", dry_run=True, overrides=["model.n_layers=2"])
    capsys.readouterr()
    workplace.train_here(config, resume="latest", dry_run=True, overrides=["optimizer.learning_rate=1e-3"])
    assert "optimizer.learning_rate: 0.0004 -> 0.001 from step 2 on" in capsys.readouterr().out
    assert sorted(path.name for path in run.folder.iterdir()) == before
