"""How metrics.jsonl is read back, also a damaged one."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from recorded_runs import event, full_run, train_row, validation_row, write_run

from training.errors import UserError
from training.metrics_file import read_metrics


def test_reads_rows_in_order_with_null_as_nan(tmp_path: Path) -> None:
    metrics = read_metrics(full_run(tmp_path / "run") / "metrics.jsonl")
    assert metrics.train["step"].tolist() == list(range(1, 21))
    assert np.isnan(metrics.train[6]["loss"])
    assert metrics.train[6]["skipped"]
    assert metrics.validation["loss"].tolist() == [4.25, math.log(64), 4.2]
    assert [found["step"] for found in metrics.events_named("start", "resume")] == [0, 10, 10]


@pytest.mark.parametrize(
    ("losses", "saved_as_best", "best"),
    [
        ([4.2, 4.1, 3.9], [1, 2], 2),  # the last is lower, but over more tokens
        ([4.2, 4.1, 4.3], [1, 2, 3], 3),  # it was the best over the same tokens
        ([3.8, 4.1, 3.9], [1, 3], 3),  # validated on something else from step 2 on, or made longer
        ([4.1, 4.1, 3.9], [], 1),
        ([None, 4.1, 3.9], [2], 2),
        ([None, None, 3.9], [], None),
    ],
)
def test_best_validation_is_the_one_that_best_points_to(
    tmp_path: Path, losses: list[float | None], saved_as_best: list[int], best: int | None
) -> None:
    """With evaluation.tokens, the last validation is over all tokens, the others over the first so many."""
    targets = [4096, 4096, 8192]
    rows = [
        validation_row(step, loss, target_tokens=count)
        for step, (loss, count) in enumerate(zip(losses, targets, strict=True), start=1)
    ]
    saved = [event(step, "checkpoint", best=step in saved_as_best) for step in (1, 2, 3)]
    found = read_metrics(write_run(tmp_path / "run", rows + saved) / "metrics.jsonl").best_validation()
    assert (None if found is None else found["step"]) == best


def test_cut_last_line_is_ignored(tmp_path: Path) -> None:
    path = full_run(tmp_path / "run") / "metrics.jsonl"
    with path.open("ab") as file:
        file.write('{"kind": "event", "step": 21, "event": "sample", "text": "ü'.encode()[:-1])
    metrics = read_metrics(path)
    assert len(metrics.train) == 20
    assert metrics.events[-1]["event"] == "finished"


def test_last_line_that_only_lacks_its_newline_counts(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [train_row(1), train_row(2)])
    path = run / "metrics.jsonl"
    path.write_text(path.read_text().removesuffix("\n"))
    assert len(read_metrics(path).train) == 2


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("garbage", "Expecting value"),
        ("", "Expecting value"),
        ("[1, 2]", "no train, validation or event row"),
        ('{"kind": "trian", "step": 2}', "no train, validation or event row"),
        ('{"kind": ["train"], "step": 2}', "no train, validation or event row"),
        ('{"kind": "event", "step": 2}', "no train, validation or event row"),
        ('{"kind": "validation", "step": 2, "loss": NaN}', "NaN is not JSON"),
        (json.dumps(validation_row(2, 3.0)).replace("3.0", "1e999"), "loss must be a finite float, got inf"),
        (json.dumps(train_row(2, loss="3.5")), "loss must be a finite float, got '3.5'"),
        (json.dumps(train_row(2, tokens=None)), "tokens must be a finite int, got None"),
        (json.dumps(train_row(2, clipped=1)), "clipped must be a finite bool, got 1"),
        (json.dumps(train_row(1)), "step 1 comes after step 1"),
        ("\udcff", "codec can't decode"),
        ("[" * 100_000, "nested too deeply"),
        (json.dumps(event(2, "resume", total_steps="20")), "total_steps must be a finite int, got '20'"),
        (json.dumps(event(2, "resume", parameters=[1])), "parameters must be a finite int, got [1]"),
        (json.dumps(event(2, "checkpoint", seconds="x")), "seconds must be a finite float, got 'x'"),
        (json.dumps(event(2, "start", weights_sha256=5)), "weights_sha256 must be printable text, got 5"),
        (
            json.dumps(event(2, "start", tokenizer_sha256="\ud800")),
            r"tokenizer_sha256 must be printable text, got '\ud800'",
        ),
        (json.dumps(event(2, "start", layout="x")), "layout must be an object, got 'x'"),
        (json.dumps(event(2, "resume", changed=5)), "changed must be an object, got 5"),
        (json.dumps(event(2, "resume", changed={"a": [1]})), "changed.a must be the old and the new value, got [1]"),
        (json.dumps(event(2, "start", documents={})), "documents must be a finite int, got 'nothing'"),
        (json.dumps(event(2**54, "start")), "step must be a finite int"),
        (json.dumps(validation_row(2, 3.0, seconds="x")), "seconds must be a finite float, got 'x'"),
    ],
)
def test_garbage_names_file_and_line(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps(train_row(1)), line, json.dumps(train_row(3))]
    path.write_bytes("".join(f"{one}\n" for one in lines).encode(errors="surrogateescape"))
    with pytest.raises(UserError) as error:
        read_metrics(path)
    assert f"{path}, line 2: " in str(error.value)
    assert problem in str(error.value)


def test_garbage_in_a_complete_last_line_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(train_row(1)) + "\n{\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2: "):
        read_metrics(path)
