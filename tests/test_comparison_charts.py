"""The pictures of a comparison: who is drawn and how; that they are drawn."""

from dataclasses import replace
from pathlib import Path

from small_results import write_import, write_result

from training.laboratory.comparison import Comparison, compare_results
from training.laboratory.comparison_charts import band_label, draw_comparison, drawn_groups, group_styles, verdicts_of
from training.laboratory.results import RunResult, read_results


def many_groups(place: Path, count: int) -> tuple[Comparison, list[RunResult]]:
    folders = [
        write_result(place / f"run-{index}", 4.0 + index / 100, optimizer={"eps": 1.0 + index})
        for index in range(count)
    ]
    results = read_results(folders)
    return compare_results(results, "run-3"), results


def test_each_group_looks_different_also_in_grey(tmp_path: Path) -> None:
    comparison, _ = many_groups(tmp_path, 24)
    everywhere = group_styles(comparison, 24).values()
    assert len({(style.colour, style.line) for style in everywhere}) == 24
    styles = {group: style for group, style in group_styles(comparison).items() if style.named}
    assert len(styles) == 11
    looks = {(style.line, style.marker) for style in styles.values()}
    assert len({(style.colour, style.line) for style in styles.values()}) == 11
    assert len(looks) >= 10  # the baseline is told by its width and its black
    assert (styles["run-3"].colour, styles["run-3"].width) == ("#000000", 2.0)


def test_of_many_groups_the_best_and_the_baseline_are_named(tmp_path: Path) -> None:
    comparison, results = many_groups(tmp_path, 14)
    styles = group_styles(comparison)
    assert [group for group, style in styles.items() if not style.named] == ["run-11", "run-12", "run-13"]
    assert all(style.named for style in group_styles(comparison, 14).values())
    assert all(picture.startswith(b"\x89PNG") for picture in draw_comparison(comparison, results).values())


def test_what_differs_by_more_than_the_noise_is_named_first(tmp_path: Path) -> None:
    comparison, _ = many_groups(tmp_path, 14)
    rows = [replace(row, verdict="worse") if row.group == "run-13" else row for row in comparison.rows]
    styles = group_styles(replace(comparison, rows=tuple(rows)))
    assert [group for group, style in styles.items() if not style.named] == ["run-10", "run-11", "run-12"]


def test_the_legend_of_differences_has_only_what_occurs(tmp_path: Path) -> None:
    comparison, _ = many_groups(tmp_path, 3 + 1)
    assert (verdicts_of(comparison), band_label(comparison)) == (["no claim possible"], "")
    rows = [replace(row, verdict="worse" if row.difference else row.verdict, deviation=0.5) for row in comparison.rows]
    changed = replace(comparison, rows=tuple(rows))
    assert verdicts_of(changed) == ["worse"]
    assert band_label(changed) == "± one standard deviation of the baseline's 1 seeds"


def test_unfinished_runs_are_drawn_where_there_is_nothing_else(tmp_path: Path) -> None:
    folders = [
        write_result(tmp_path / "a", 4.0),
        write_result(tmp_path / "b", 4.0, (1, 1), steps=7, end=None),
        write_result(tmp_path / "c", 4.0, steps=7, end=None, optimizer={"eps": 1.0}),
        write_import(tmp_path / "d", 3.5),
    ]
    groups = drawn_groups(read_results(folders), 100)
    lengths = {name: [len(run["training loss"].values) for run in runs] for name, runs in groups.items()}
    assert lengths == {"a": [20], "c": [7], "d": []}


def test_single_run_is_drawn_too(tmp_path: Path) -> None:
    results = read_results([write_import(tmp_path / "$gpt2$", 3.5)])
    pictures = draw_comparison(compare_results(results, "$gpt2$"), results)
    assert len(pictures) == 6
