"""From a packed run to a run on instructions that starts with its weights, through the commands."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY, Finished, Workplace

from training.checkpoint_evaluation import evaluate_checkpoint
from training.config_file import load_run_config
from training.data import open_training_data
from training.loss import SequenceLoss
from training.restore import load_model
from training.tokenizer import load_tokenizer, train_tokenizer

RECORDS = [
    {"prompt": f"Say {word} {count} times.", "response": f"{f' {word}' * count}."}
    for word in ("yes", "no", "so", "on")
    for count in range(1, 12)
]
BATCH = {"world_size": 1, "microbatch": 4, "accumulation": 2}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """A packed run of six steps, and the documents of instructions, made by the command, with its tokenizer."""
    place = Workplace(tmp_path_factory.mktemp("fine_tuning"))
    place.write_tokens()
    train_tokenizer([str(record) for record in RECORDS], 257).save(str(place.datasets / "data" / "tokenizer.json"))
    place.train_here(place.write_config("packed", data={"train_tokens": 6 * 512}))
    source = place.folder / "instructions.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    command = [sys.executable, "-m", "training.cli", "prepare", source, "--output", place.datasets / "instructions"]
    options = ["--tokenizer", place.datasets / "data", "--validation-share", "0.2"]
    done = subprocess.run(
        [*map(str, command + options)], cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("instructions: train ")
    return place


def write_config(place: Workplace, name: str, **sections: Any) -> Path:
    """Two shuffled epochs over the instructions, from the packed run's weights."""
    defaults: dict[str, Any] = {
        "data": {
            "dataset": "instructions",
            "train_tokens": -1,
            "validation_start": 0,
            "validation_tokens": -1,
            "epochs": 2,
            "shuffle": True,
        },
        "batch": BATCH,
        "evaluation": {"every": 4},
        "init_from": str(place.checkpoints / "packed" / "step_00000006"),
    }
    return place.write_config(name, **{**defaults, **sections})


def curve(run: Finished) -> list[tuple[Any, ...]]:
    """What is recorded of each step and validation but its loss and its time."""
    keys = ("kind", "step", "tokens", "target_tokens", "learning_rate")
    return [tuple(line.get(key) for key in keys) for line in run.lines if line["kind"] != "event"]


def losses(run: Finished) -> list[float]:
    return [line["loss"] for line in run.lines if line["kind"] != "event"]


@pytest.mark.slow
def test_a_fine_tuning_is_the_same_on_any_layout_and_begins_with_the_given_weights(place: Workplace) -> None:
    config = write_config(place, "tuned")
    one, three = place.train(config, output="on1"), place.train_on_ranks(config, 3, output="on3")
    assert one.status == 0, one.errors
    data = open_training_data(load_run_config(str(config)), place.datasets / "instructions")
    per_epoch = data.rows.count // 8 + 1
    assert data.rows.count % 8, "the last step of an epoch is a short one"
    assert len(one.losses) == data.total_steps == 2 * per_epoch
    assert curve(one) == curve(three)
    assert losses(three) == pytest.approx(losses(one), rel=1e-6)
    # The first loss is that of the weights it starts from, over the first step's documents.
    module = SequenceLoss(load_model(place.checkpoints / "packed" / "step_00000006"))
    first = data.target_counts(0).sum()
    loss = module(*data.read(0, range(8)))[0].item() / first
    assert one.losses[0] == pytest.approx(loss, rel=1e-6)
    lines = one.of_kind("train")
    assert (lines[0]["target_tokens"], lines[0]["tokens"]) == (first, data.input_tokens(0))
    assert data.rows.summary is not None
    assert lines[-1]["tokens"] == 2 * data.rows.summary.tokens
    [start] = [event for event in one.of_kind("event") if event["event"] == "start"]
    assert start["documents"]["documents"] == data.rows.count
    assert start["validation_documents"]["documents"] == len(RECORDS) - data.rows.count
    assert "tokens_per_step" not in start
    assert f"steps over {data.rows.count} documents x 2 epochs: {2 * data.rows.summary.tokens:,} tokens" in one.errors
    assert data.rows.summary.truncated, "the longest answers do not fit 33 tokens"
    assert f"data: {data.rows.summary.sentence(32)}" in one.errors
    assert "validation: " in one.errors
    assert f"| Documents | {data.rows.count} |" in (one.folder / "report.md").read_text()
    evaluated = evaluate_checkpoint(one.folder / "latest", load_run_config(str(config)), place.datasets).evaluated
    assert evaluated.loss == pytest.approx(one.of_kind("validation")[-1]["loss"], abs=1e-6)
    [sample] = [event for event in one.of_kind("event") if event["event"] == "sample"]
    assert sample["prompt"].endswith(" times.")


@pytest.mark.slow
def test_a_fine_tuning_resumed_in_the_middle_of_an_epoch_on_another_layout(place: Workplace) -> None:
    config = write_config(place, "resumed")
    whole = place.train_here(config, output="whole")
    place.train_on_ranks(config, 3, output="parts", stop_after=3)
    parts = place.train_here(config, output="parts", resume="latest", microbatch=3)
    assert curve(parts) == curve(whole)
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-6)


@pytest.mark.slow
def test_the_plan_of_a_fine_tuning(place: Workplace) -> None:
    """Its length is that of the documents; nothing claims tokens per step."""
    done = place.train(write_config(place, "planned"), "--dry-run")
    assert done.status == 0
    assert "documents x 2 epochs" in done.output
    assert "steps of" not in done.output


@pytest.mark.slow
def test_documents_without_a_validation_file(place: Workplace) -> None:
    """Everything is trained on: refused, with the remedy; and it does as it says."""
    folder = place.datasets / "all"
    folder.mkdir()
    for name in ("train.safetensors", "tokenizer.json", "dataset.json"):
        (folder / name).write_bytes((place.datasets / "instructions" / name).read_bytes())
    data = {"dataset": "all", "train_tokens": -1, "validation_start": 0, "validation_tokens": -1}
    refused = place.train(write_config(place, "all", data=data), processes=2)
    assert refused.status == 1
    assert refused.errors.count("prepare the dataset with a validation share, or set evaluation.every to null") == 1
    run = place.train_here(write_config(place, "all", data=data, evaluation={"every": None}), stop_after=2)
    assert len(run.losses) == 2
    assert load_tokenizer(folder / "tokenizer.json").get_vocab_size() == 257
