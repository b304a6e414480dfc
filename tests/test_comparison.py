"""Groups of runs against a baseline: rows, order, verdicts and marks."""

from pathlib import Path
from typing import Any

import pytest
from small_results import DIGESTS, write_import, write_result
from test_statistics import BASELINES, SINGLE_RUNS

from training.errors import UserError
from training.laboratory.comparison import ONE_RUN, TWO_SEEDS, Comparison, Row, compare_results
from training.laboratory.results import read_results


def compared(place: Path, baseline: str = "plain-1", **groups: Any) -> Comparison:
    """Compares groups of losses by seed, of which each is another config, `plain` the baseline."""
    folders = []
    for index, (name, losses) in enumerate(groups.items()):
        for seed, loss in enumerate(losses, start=1):
            folders.append(write_result(place / f"{name}-{seed}", loss, (seed, seed), optimizer={"eps": 1e-8 + index}))
    return compare_results(read_results(folders), baseline)


def row_of(comparison: Comparison, group: str) -> Row:
    return next(row for row in comparison.rows if row.group == group)


def test_two_seeds_are_said_to_find_little(tmp_path: Path) -> None:
    assert TWO_SEEDS in compared(tmp_path / "two", plain=[4.0, 4.1], other=[3.9, 4.05]).remarks
    assert TWO_SEEDS not in compared(tmp_path / "three", plain=[4.0, 4.1, 4.2], other=[3.9, 4.05, 4.0]).remarks


def test_rows_are_sorted_and_judged(tmp_path: Path) -> None:
    comparison = compared(
        tmp_path,
        plain=[4.00, 4.01, 4.02],
        better=[3.70, 3.71, 3.7201],
        noise=[3.97, 4.05, 3.98],
        worse=[4.30, 4.31, 4.3205],
    )
    assert [(row.group, row.verdict) for row in comparison.rows] == [
        ("better-1", "better"),
        ("noise-1", "inside the noise"),
        ("plain-1", "baseline"),
        ("worse-1", "worse"),
    ]
    row = row_of(comparison, "better-1")
    assert (row.runs, row.seeds, row.method) == (3, 3, "paired")
    assert row.mean == pytest.approx(3.71003333)
    assert row.difference == pytest.approx(-0.29996667)
    assert row.tokens == 20480
    assert (row.tokens_per_second, row.seconds) == (2048.0, 10.0)
    assert row.changes == "optimizer.eps 1e-08 → 1.00000001"
    assert row.adjusted_p_value == pytest.approx(3 * row.p_value if row.p_value else None)


def test_baseline_row_has_its_noise_and_no_difference(tmp_path: Path) -> None:
    comparison = compared(tmp_path, plain=[4.00, 4.01, 4.02], other=[3.9, 3.9, 3.9])
    row = row_of(comparison, "plain-1")
    assert row.deviation == pytest.approx(0.01)
    assert (row.difference, row.interval, row.p_value, row.changes) == (None, None, None, "")
    assert comparison.remarks[0] == (
        "Noise of the seeds: the baseline's 3 have a standard deviation of 0.0100 nats per token; that of all seeds "
        "lies between 0.0052 and 0.0628 (95 %)"
    )


def test_one_seed_each_makes_no_claim_and_warns(tmp_path: Path) -> None:
    comparison = compared(tmp_path, plain=[4.0], other=[3.0])
    row = row_of(comparison, "other-1")
    assert (row.verdict, row.difference, row.interval) == ("one seed: no claim possible", -1.0, None)
    assert "The baseline has one seed" in comparison.remarks[0]
    other = write_result(
        tmp_path / "elsewhere", 3.0, optimizer={"eps": 9.0}, begin={**DIGESTS, "validation_sha256": "ee"}
    )
    alone = compare_results(read_results([tmp_path / "plain-1", other]), "plain-1")
    assert not any("one seed" in remark for remark in alone.remarks)  # more seeds would not make them compare


def test_the_forerunners_series(tmp_path: Path) -> None:
    """Its seven baselines and its single runs: what docs/comparing.md shows."""
    folders = [write_result(tmp_path / f"baseline-{seeds}", loss, seeds) for seeds, loss in BASELINES.items()]
    folders += [
        write_result(tmp_path / name, loss, optimizer={"eps": 1e-8 + index})
        for index, (name, loss) in enumerate(SINGLE_RUNS.items(), start=1)
    ]
    comparison = compare_results(read_results(folders), "baseline-(42, 42)")
    assert {row.group: row.verdict for row in comparison.rows} == {
        "schedule-learning-rate": "better",
        "remove-dropout": "inside the noise",
        "weight-decay-gpt2": "inside the noise",
        "qkv-bias": "inside the noise",
        "baseline-(42, 42)": "baseline",
        "gradient-clipping": "inside the noise",
        "no-amp": "inside the noise",
        "weight-decay-cerebras": "worse",
        "weight-tying": "worse",
    }
    assert row_of(comparison, "baseline-(42, 42)").mean == pytest.approx(3.674103, abs=5e-7)
    assert all(row.marks == (ONE_RUN,) for row in comparison.rows if row.verdict != "baseline")


def test_losses_that_are_the_same_make_no_noise(tmp_path: Path) -> None:
    comparison = compared(tmp_path, plain=[4.0, 4.1], same=[4.0, 4.1], shifted=[3.9, 4.0])
    assert row_of(comparison, "same-1").verdict == "the same losses"
    assert row_of(comparison, "shifted-1").verdict == "no noise: no claim possible"


def test_runs_of_the_same_seeds_count_as_one(tmp_path: Path) -> None:
    """A second machine repeats a run; it does not draw another seed."""
    folders = [
        write_result(tmp_path / "a", 4.0, (1, 1)),
        write_result(tmp_path / "b", 4.2, (1, 1)),
        write_result(tmp_path / "c", 4.4, (2, 2)),
    ]
    row = compare_results(read_results(folders), "a").rows[0]
    assert (row.runs, row.seeds) == (3, 2)
    assert row.mean == pytest.approx(4.25)
    assert row.deviation == pytest.approx(0.3 / 2**0.5)
    assert row.marks == ("3 runs with 2 different seeds: runs that share their seeds count as their mean",)


def test_unfinished_runs_are_left_out_and_named(tmp_path: Path) -> None:
    folders = [
        write_result(tmp_path / "a", 4.0),
        write_result(tmp_path / "b", 3.0, (1, 1), steps=10, end=None),
        write_result(tmp_path / "c", 3.0, steps=5, end="interrupted", optimizer={"eps": 1e-6}),
    ]
    comparison = compare_results(read_results(folders), "a")
    assert [row.group for row in comparison.rows] == ["a", "c"]
    assert row_of(comparison, "a").marks == ("b left out: not finished: step 10 of 20",)
    row = row_of(comparison, "c")
    assert (row.verdict, row.runs, row.mean) == ("not comparable", 0, None)
    assert [run.obstacle for run in comparison.runs] == [
        None,
        "not finished: step 10 of 20",
        "not finished: step 5 of 20",
    ]


def test_run_that_diverged_is_a_result(tmp_path: Path) -> None:
    """Left out, it would make its intervention look better than it is."""
    comparison = compared(tmp_path, plain=[4.0, 4.1], risky=[3.9, None])
    row = row_of(comparison, "risky-1")
    assert (row.verdict, row.difference, row.p_value) == ("not finite", None, None)
    assert comparison.rows[-1] is row
    assert row.marks == ("risky-2: the loss is not finite",)


def test_run_that_diverged_is_a_result_in_bits_per_byte_too(tmp_path: Path) -> None:
    """Also where it is another run that turns the table."""
    words = {**DIGESTS, "validation_sha256": "ee", "tokenizer_sha256": "ff"}
    plain, risky = {"eps": 1e-8}, {"eps": 1e-6}
    folders = [
        write_result(tmp_path / "plain-1", 4.0, (1, 1), bits_per_byte=1.3, optimizer=plain),
        write_result(tmp_path / "plain-2", 4.1, (2, 2), bits_per_byte=1.33, optimizer=plain),
        write_result(tmp_path / "risky-1", 3.9, (1, 1), bits_per_byte=1.27, optimizer=risky),
        write_result(tmp_path / "risky-2", None, (2, 2), optimizer=risky),
        write_result(tmp_path / "words", 4.0, bits_per_byte=1.3, begin=words, optimizer={"eps": 1e-7}),
    ]
    comparison = compare_results(read_results(folders), "plain-1")
    assert comparison.measure == "bits_per_byte"
    row = row_of(comparison, "risky-1")
    assert (row.runs, row.verdict, row.p_value) == (2, "not finite", None)
    assert row.marks == ("risky-2: the loss is not finite",)


def test_baseline_that_diverged_compares_with_nothing_and_it_is_said(tmp_path: Path) -> None:
    comparison = compared(tmp_path, plain=[4.0, None], other=[3.9, 3.8])
    assert row_of(comparison, "other-1").verdict == "not comparable"
    assert comparison.remarks[0] == (
        "A run of the baseline is not finite (plain-2), so nothing can be compared with it; choose another baseline"
    )


def test_other_validation_data_are_marked_and_not_compared(tmp_path: Path) -> None:
    folders = [
        write_result(tmp_path / "a", 4.0),
        write_result(tmp_path / "b", 3.0, optimizer={"eps": 1e-6}, begin={**DIGESTS, "validation_sha256": "ee"}),
    ]
    row = row_of(compare_results(read_results(folders), "a"), "b")
    assert (row.verdict, row.difference) == ("not comparable", None)
    assert row.marks == ("b left out: other validation data",)


def test_other_tokenizers_turn_the_table_to_bits_per_byte(tmp_path: Path) -> None:
    begin = {**DIGESTS, "validation_sha256": "ee", "tokenizer_sha256": "ff"}
    folders = [
        write_result(tmp_path / "a", 4.0, bits_per_byte=1.3),
        write_result(tmp_path / "b", 8.8, bits_per_byte=1.43, optimizer={"eps": 1e-6}, begin=begin, target_tokens=2048),
    ]
    comparison = compare_results(read_results(folders), "a")
    assert comparison.measure == "bits_per_byte"
    row = row_of(comparison, "b")
    assert row.difference == pytest.approx(0.13)
    assert row.marks == ("other tokenizer: what compares is bits per byte, over 18,182 and 18,182 bytes of text",)


def test_imported_model_is_a_reference(tmp_path: Path) -> None:
    folders = [write_result(tmp_path / f"a{seed}", 4.0 + seed / 100, (seed, 1)) for seed in range(3)]
    comparison = compare_results(read_results([*folders, write_import(tmp_path / "gpt2", 3.5)]), "a0")
    row = comparison.rows[0]
    assert (row.group, row.verdict, row.p_value, row.tokens) == ("gpt2", "reference", None, None)
    assert row.difference == pytest.approx(-0.51)


def test_baseline_is_found_by_group_or_by_any_of_its_runs(tmp_path: Path) -> None:
    assert compared(tmp_path, "other-2", plain=[4.0, 4.1], other=[3.9, 3.8]).baseline == "other-1"


def test_baseline_without_a_result_is_refused(tmp_path: Path) -> None:
    folder = write_result(tmp_path / "a", 4.0, steps=10, end=None)
    with pytest.raises(UserError, match=r"the baseline a has no result .*a: not finished: step 10 of 20"):
        compare_results(read_results([folder]), "a")
