"""The end of a run: what it records and shows, and the sample that its model writes."""

import dataclasses
import json
from datetime import datetime
from pathlib import Path

import pytest
import torch
from conftest import Workplace
from recorded_runs import begin, event, train_row, validation_row, write_run
from small_checkpoints import TINY, save, state_at
from small_configs import write_tokens
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy

from model.gpt import GPT, build_gpt
from training import ending
from training.checkpoint import point
from training.ending import finish_run, is_finished, sample_text
from training.errors import UserError
from training.metrics import RunLog
from training.metrics_file import Event, read_metrics
from training.rows import Rows, TokenFile
from training.tokenizer import END_OF_TEXT, train_tokenizer

LINE = "Every effort moves you"


# The sample


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A token for each byte, and the end of text."""
    return train_tokenizer([LINE], 257)


@pytest.fixture(scope="module")
def rows(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """The line over and over, behind 5 tokens that are not part of the range."""
    line = [*tokenizer.encode(LINE).ids, tokenizer.token_to_id(END_OF_TEXT)]
    path = write_tokens(tmp_path_factory.mktemp("data") / "train.safetensors", [0] * 5 + line * 6)
    return Rows(TokenFile(path), start=5, count=4, context=32)


@pytest.fixture(scope="module")
def model(rows: Rows) -> GPT:
    """Knows the line by heart; its vocabulary is larger than the tokenizer's."""
    model = build_gpt(dataclasses.replace(TINY, vocab_size=300, context_length=32), seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs, targets = rows.read(range(rows.count))
    for _ in range(60):
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
    assert loss < 0.3
    return model


def test_a_sample_goes_on_with_the_data_up_to_the_end_of_the_text(
    model: GPT, rows: Rows, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Behind the end of text the model would go on with the next line."""
    assert sample_text(model, rows, tokenizer, tmp_path, seed=0) == ("Every effort mov", "es you")
    assert model.training, "in the mode it was"


def test_the_end_of_text_is_that_of_the_dataset(model: GPT, rows: Rows, tokenizer: Tokenizer, tmp_path: Path) -> None:
    (space,) = tokenizer.encode(" ").ids
    (tmp_path / "dataset.json").write_text(json.dumps({"end_of_text": space}))
    assert sample_text(model, rows, tokenizer, tmp_path, seed=0) == ("Every effort mov", "es ")
    (tmp_path / "dataset.json").write_text("[]")
    with pytest.raises(UserError, match=f"^{tmp_path / 'dataset.json'}: "):
        sample_text(model, rows, tokenizer, tmp_path, seed=0)


def test_a_sample_has_an_end_of_its_own(rows: Rows, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Fresh weights draw from all bytes: 80 tokens at most, the same for a seed; the prompt is a short row."""
    fresh = build_gpt(dataclasses.replace(TINY, vocab_size=257, context_length=8), seed=0)
    short = dataclasses.replace(rows, context=8)
    state = torch.random.get_rng_state()
    prompt, text = sample_text(fresh, short, tokenizer, tmp_path, seed=3)
    assert prompt == "Every ef"
    assert 0 < len(text) <= 80
    assert sample_text(fresh, short, tokenizer, tmp_path, seed=3) == (prompt, text)
    assert sample_text(fresh, short, tokenizer, tmp_path, seed=4)[1] != text
    assert torch.equal(torch.random.get_rng_state(), state)


# The records


def finish(folder: Path, total_steps: int, text: tuple[str, str] | None, step: int = 3) -> list[Event]:
    """Ends a run of 20 steps after `step`, and returns the events that this adds."""
    point(folder, "latest", save(folder, step).name)
    before = len(read_metrics(folder / "metrics.jsonl").events)
    log = RunLog(folder / "metrics.jsonl", True, total_steps, None)
    state = dataclasses.replace(
        state_at(step), tokens=1024 * step, seconds=0.5 * step, best_step=step or None, best_loss=4.25 if step else None
    )
    finish_run(folder, log, state, total_steps, text)
    events = read_metrics(folder / "metrics.jsonl").events[before:]
    assert all(datetime.fromisoformat(event.pop("time")).tzinfo for event in events)
    return events


ROWS = [begin(0, "start", 1), *map(train_row, (1, 2, 3)), validation_row(3, 4.25)]


def test_the_end_of_a_run_is_recorded_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", ROWS)
    assert not is_finished(folder, 3)
    assert finish(folder, 3, ("Every effort", " moves you")) == [
        event(3, "sample", prompt="Every effort", text=" moves you"),
        event(
            3,
            "finished",
            seconds=1.5,
            tokens=3072,
            tokens_per_second=2048.0,
            loss=4.0 + 2.0 / 3,
            validation_loss=4.25,
            all_reduces_per_step=None,
            best_step=3,
            best_loss=4.25,
        ),
    ]
    assert is_finished(folder, 3)
    assert not is_finished(folder, 6), "made longer, it has another end"
    assert {"report.md", "loss.png", "grad_norm.png", "learning_rate.png"} < {path.name for path in folder.iterdir()}
    assert " moves you" in (folder / "report.md").read_text()
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines() == [
        "Training complete in 1.500 seconds",
        "Tokens seen: 3,072",
        "Throughput: 2,048 tokens/second",
        "Final train loss: 4.667",
        "Final validation loss: 4.250 (best: 4.250 at step 3)",
        "Sample: 'Every effort' goes on with ' moves you'",
        f"Report: {folder / 'report.md'} (with loss.png, grad_norm.png, learning_rate.png)",
        f"Checkpoint: {folder / 'step_00000003'}",
    ]


def test_a_validation_on_the_way_is_not_that_of_the_end(tmp_path: Path) -> None:
    rows = [begin(0, "start", 1), *map(train_row, (1, 2)), validation_row(2, 4.25), train_row(3)]
    folder = write_run(tmp_path / "run", rows)
    (finished,) = finish(folder, 3, None)
    assert (finished["event"], finished["validation_loss"]) == ("finished", None)


def test_a_run_without_a_tokenizer_that_stops_early(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No sample is recorded or shown; a stopped run is not finished."""
    folder = write_run(tmp_path / "run", ROWS)
    (stopped,) = finish(folder, 20, None)
    assert (stopped["event"], stopped["step"]) == ("stopped", 3)
    assert not is_finished(folder, 3)
    shown = capsys.readouterr().err
    assert shown.startswith("Training reached step 3 of 20 in 1.500 seconds\n")
    assert "Sample" not in shown


def test_a_run_of_no_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--stop-after 0: what was not measured is null."""
    folder = write_run(tmp_path / "run", ROWS[:1])
    (stopped,) = finish(folder, 20, None, step=0)
    nothing = dict.fromkeys(
        ("tokens_per_second", "loss", "validation_loss", "all_reduces_per_step", "best_step", "best_loss")
    )
    assert stopped == event(0, "stopped", seconds=0.0, tokens=0, **nothing)
    assert "No step has been trained yet" in capsys.readouterr().err


def test_a_report_that_fails_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever it raises, the run's end is recorded and shown."""

    def fail(folder: Path) -> Path:
        raise RuntimeError("no font\nof that name")

    monkeypatch.setattr(ending, "write_report", fail)
    folder = write_run(tmp_path / "run", ROWS)
    (finished,) = finish(folder, 3, None)
    assert finished["event"] == "finished"
    shown = capsys.readouterr().err.splitlines()
    assert f"{folder}: report.md: could not be made, but the run is saved (no font\\nof that name)" in shown
    assert "Training complete in 1.500 seconds" in shown
    assert shown[-1].startswith("Checkpoint: ")


@pytest.mark.parametrize("content", ["", "damaged\n"], ids=["removed", "damaged"])
def test_a_record_that_cannot_be_read_does_not_lose_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    """All is trained and saved by then: the end is recorded without its losses."""
    folder = write_run(tmp_path / "run", ROWS)
    point(folder, "latest", save(folder, 3).name)
    (folder / "metrics.jsonl").unlink()
    (folder / "metrics.jsonl").write_text(content)
    if not content:
        (folder / "metrics.jsonl").unlink()
    finish_run(folder, RunLog(folder / "metrics.jsonl", True, 3, None), state_at(3), 3, None)
    finished = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert (finished["event"], finished["step"], finished["loss"]) == ("finished", 3, None)
    shown = capsys.readouterr().err
    assert f"{folder}: the losses at the end: could not be made, but the run is saved ({folder}/metrics.jsonl" in shown
    assert shown.endswith(f"Checkpoint: {folder / 'step_00000003'}\n")


def test_a_sample_that_fails_is_a_warning(workplace: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    """Here the dataset's description is damaged, which only the sample needs."""
    data = workplace.datasets / "data"
    train_tokenizer([LINE], 257).save(str(data / "tokenizer.json"))
    (data / "dataset.json").write_text("[]")
    config = workplace.write_config(data={"train_tokens": 512}, evaluation={"every": None})
    run = workplace.train_here(config)
    assert run.of_kind("event")[-1]["event"] == "finished"
    assert (
        f"run: a sample: could not be made, but the run is saved ({data / 'dataset.json'}: " in capsys.readouterr().err
    )
    assert (run.folder / "report.md").exists()


@pytest.mark.parametrize("kept", [0, 6, -1], ids=["empty", "cut early", "cut late"])
def test_the_end_of_a_run_whose_record_was_cut(
    workplace: Workplace, capsys: pytest.CaptureFixture[str], kept: int
) -> None:
    """Nothing is left to train: what is said at the end comes from the checkpoint where the record lacks it."""
    config = workplace.write_config()
    run = workplace.train_here(config)
    whole = read_metrics(run.folder / "metrics.jsonl")
    lines = (run.folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run.folder / "metrics.jsonl").write_text("".join(lines[:kept]) + lines[kept][:9])
    capsys.readouterr()
    again = workplace.train_here(config, resume="latest")
    said = capsys.readouterr().err
    assert "Tokens seen: 5,120\n" in said
    assert ("metrics.jsonl: lacks step" in said) == ("Not recorded: step" in said) == (kept >= 0)
    best = whole.best_validation()
    assert best is not None
    assert f"{best['loss']:.3f} at step {best['step']}" in said
    report = (again.folder / "report.md").read_text()
    assert "Finished: step 10" in report
    assert ("lacks step" in report) == (kept >= 0)
    end = again.of_kind("event")[-1]
    assert (end["event"], end["step"], end["tokens"], end["best_step"]) == ("finished", 10, 5120, best["step"])
