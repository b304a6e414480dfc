"""What a comparison says of itself: title, runs, model, data, machine, date, and what its verdicts do not say."""

import os
from pathlib import Path

from small_results import DIGESTS, write_import, write_result

from training.laboratory.comparison import compare_results
from training.laboratory.comparison_summary import heading, how_to_read, summary
from training.laboratory.results import read_results

WHERE = {"torch": "2.13.0", "layout": {"world_size": 2}}


def test_what_was_compared(tmp_path: Path) -> None:
    folders = [
        write_result(
            tmp_path / f"{name}-{seed}",
            loss + seed / 100,
            (seed, seed),
            optimizer={"eps": eps},
            begin={**DIGESTS, **WHERE, "parameters": parameters},
        )
        for name, loss, eps, parameters in (("plain", 4.0, 1.0, 110688), ("tied", 5.0, 2.0, 98352))
        for seed in (1, 2, 3)
    ]
    for folder in folders:
        os.utime(folder / "metrics.jsonl", (1.7e9, 1.7e9))
    results = read_results(folders)
    comparison = compare_results(results, "plain-1")
    assert summary(comparison, results) == [
        "Runs: 6 in 2 rows, seeds of each: 3",
        "Model: 110,688 parameters (all rows: 98,352 to 110,688), context of 32 tokens",
        "Training: 20,480 tokens in 20 steps per run",
        "Dataset: data",
        "Measure: validation loss after the last step, nats per token, over 4,096 tokens; lower is better",
        "Machine: box, 2 processes, torch 2.13.0",
        "Date: 2023-11-14, of the runs' files",
    ]
    assert heading(comparison, "mine") == "mine: comparison with plain-1"
    assert heading(comparison, None) == "Comparison with plain-1"


def test_what_is_not_known_is_left_out(tmp_path: Path) -> None:
    results = read_results([write_import(tmp_path / "gpt2", 3.5)])
    lines = summary(compare_results(results, "gpt2"), results)
    assert [line.partition(":")[0] for line in lines] == ["Runs", "Model", "Dataset", "Measure", "Date"]


def test_what_verdicts_do_not_say_stands_where_they_stand(tmp_path: Path) -> None:
    losses = {"plain": (4.0, 4.01, 4.02), "good": (3.0, 3.01, 3.0201), "bad": (5.0, 5.01, 5.0201), "odd": (3.9, 4, 4.2)}
    folders = {
        name: [
            write_result(tmp_path / f"{name}-{seed}", loss, (seed, seed), optimizer={"eps": 1.0 + index})
            for seed, loss in enumerate(values)
        ]
        for index, (name, values) in enumerate(losses.items())
    }

    def said(*names: str) -> list[str]:
        results = read_results([folder for name in names for folder in folders[name]])
        return [sentence.partition(" ")[0] for sentence in how_to_read(compare_results(results, "plain-0"))]

    assert said("plain", "good") == []
    assert said("plain", "good", "bad") == ["Rows"]
    assert said("plain", "good", "bad", "odd") == ['"Inside', "Rows"]
