"""A comparison for people and for programs: every form says the same."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from small_results import DIGESTS, write_result

from training.laboratory.comparison import Comparison, compare_results
from training.laboratory.comparison_table import FORMS, marked, shown_table, write_tables
from training.laboratory.results import read_results


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """Two seeds of a baseline and of a better run with a long name, one that diverged, one that does not compare."""
    place = tmp_path_factory.mktemp("table")
    folders = [write_result(place / f"plain-{seed}", 4 + seed / 3, (seed, seed)) for seed in (1, 2)]
    folders += [
        write_result(
            place / f"a-name-longer-than-its-column-{seed}", 3 + seed / 2.9, (seed, seed), optimizer={"eps": 1}
        )
        for seed in (1, 2)
    ]
    folders.append(write_result(place / "exploded", None, optimizer={"eps": 2}))
    other = {**DIGESTS, "validation_sha256": "ee"}
    folders.append(write_result(place / "else|*where*<b>", 1.0, optimizer={"eps": 3}, begin=other))
    return compare_results(read_results(folders), "plain-1")


@pytest.fixture(scope="module")
def tables(comparison: Comparison) -> dict[str, str]:
    tables = write_tables(comparison)
    assert tuple(tables) == FORMS
    return {str(form): text for form, text in tables.items()}


def test_terminal_fits_into_100_columns(tables: dict[str, str]) -> None:
    lines = tables["terminal"].splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[0].split() == ["run", "loss", "SD", "difference", "p", "(Holm)", "n", "tok/s", "time", "verdict"]
    assert lines[1] == "a-name-longer-than-its-column-1"
    assert lines[2].split() == ["3.5172", "0.2438", "-0.9828±0.0730", ".0037", "2", "2,048", "10", "s", "better"]
    assert lines[3] == "    optimizer.eps 1e-08 → 1.0"
    assert ["plain-1", "4.5000", "0.2357", "2", "2,048", "10", "s", "baseline"] in [line.split() for line in lines]
    assert "not finite a" in tables["terminal"]
    assert "not comparable b" in tables["terminal"]
    assert (
        "\na: exploded: the loss is not finite\nb: else|*where*<b> left out: other validation data\n"
        in tables["terminal"]
    )


def test_markdown_shows_names_as_they_are(tables: dict[str, str]) -> None:
    text = tables["markdown"]
    assert "| else\\|\\*where\\*&lt;b&gt; |" in text
    assert "| a-name-longer-than-its-column-1 | 3.5172 | 0.2438 | -0.9828 | better | -1.0558 to -0.9097 |" in text
    assert "| else\\|\\*where\\*&lt;b&gt; |  |  |  | not comparable (b) |" in text
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) == 2 + 4 + 2 + 6  # heads, rules, rows, runs
    assert "| exploded | exploded | 42 / 42 | not finite |" in text


def test_csv_has_every_value_in_full(tables: dict[str, str], comparison: Comparison) -> None:
    rows = list(csv.DictReader(io.StringIO(tables["csv"])))
    assert [row["group"] for row in rows] == [row.group for row in comparison.rows]
    first, expected = rows[0], comparison.rows[0]
    assert float(first["mean"]) == expected.mean
    assert expected.interval is not None
    assert (float(first["interval_low"]), float(first["interval_high"])) == expected.interval
    assert float(first["adjusted_p_value"]) == expected.adjusted_p_value
    assert rows[1]["difference"] == ""


def test_json_is_strict_and_full(tables: dict[str, str], comparison: Comparison) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    values = json.loads(tables["json"], parse_constant=refuse)
    assert {key: values[key] for key in ("baseline", "measure", "unit", "confidence")} == {
        "baseline": "plain-1",
        "measure": "loss",
        "unit": "nats per token",
        "confidence": 0.95,
    }
    assert values["rows"][0]["difference"] == comparison.rows[0].difference
    assert values["rows"][0]["interval"] == list(comparison.rows[0].interval or ())
    assert [row["verdict"] for row in values["rows"]] == ["better", "baseline", "not finite", "not comparable"]
    exploded = next(run for run in values["runs"] if run["name"] == "exploded")
    assert exploded["loss"] is None
    assert (exploded["weights_sha256"], exploded["obstacle"]) == ("aa" * 32, None)
    assert values["remarks"] == list(comparison.remarks)


def test_each_mark_has_one_letter(comparison: Comparison) -> None:
    letters, marks = marked(comparison)
    assert letters == ["", "", "a", "b"]
    assert [mark[:2] for mark in marks] == ["a:", "b:"]


def test_no_text_in_csv_is_a_formula(tmp_path: Path) -> None:
    """A spreadsheet would take it for one; numbers keep their sign."""
    folders = [write_result(tmp_path / "=cmd", 4.0), write_result(tmp_path / "@sum", 3.0, optimizer={"eps": 1})]
    comparison = compare_results(read_results(folders), "=cmd")
    rows = list(csv.DictReader(io.StringIO(write_tables(comparison)["csv"])))
    assert [(row["group"], row["difference"]) for row in rows] == [("'@sum", "-1.0"), ("'=cmd", "")]


def test_changes_are_left_out_where_the_name_says_them(comparison: Comparison) -> None:
    """And the column, where it would be empty; the verdict stands beside the difference, p (Holm) under one name."""
    heads, rows = shown_table(comparison)
    assert heads[:5] == ["Run", "Loss, mean", "SD", "Difference", "Verdict"]
    assert (heads[6:8], heads[-1], rows[0][-1]) == (["p", "p (Holm)"], "Changes", "optimizer.eps 1e-08 → 1.0")
    named = [replace(row, group="no-dropout-and-more", changes="no-dropout, and-more") for row in comparison.rows]
    assert "Changes" not in shown_table(replace(comparison, rows=tuple(named)))[0]
