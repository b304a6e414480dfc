"""`isobatch compare`: which runs it takes, what it prints and where it writes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY
from small_results import write_result

from training.errors import RunError, UserError
from training.laboratory.compare_commands import compare, compare_runs


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds of `plain`, and two of `clipped` in a folder of their own."""
    place = tmp_path_factory.mktemp("checkpoints")
    for seed in (1, 2):
        write_result(place / f"plain-{seed}", 4.0 + seed / 9, (seed, seed))
        write_result(place / "study" / f"clipped-{seed}", 3.0 + seed / 8, (seed, seed), optimizer={"clip_norm": 1.0})
    (place / "study" / "configs").mkdir()
    return place


def test_baseline_may_be_any_run(place: Path) -> None:
    """Also one that does not stand among the others; names are those of runs in the folder of runs."""
    for baseline, first in (("study/clipped-1", "clipped-1"), ("study/clipped-2", "clipped-2"), (None, "plain-1")):
        comparison, results = compare_runs(["plain-1", "study/clipped-1"], baseline, None, place)
        assert comparison.baseline == first
        assert len(results) == (3 if first == "clipped-2" else 2)


def test_baseline_is_found_among_the_runs_given(tmp_path: Path) -> None:
    """By the end of its path or as a row of a study, though nothing of it lies in the folder of runs."""
    for seed in (1, 2):
        write_result(tmp_path / "mine" / f"base-w{seed}-t{seed}", 4.0 + seed / 9, (seed, seed))
        write_result(tmp_path / "mine" / f"a-w{seed}-t{seed}", 3.0 + seed / 8, (seed, seed), optimizer={"eps": 1.0})
    nowhere, mine = tmp_path / "checkpoints", str(tmp_path / "mine")
    for name, first in (
        *(("base-w2-t2", "base-w2-t2"), ("mine/base-w2-t2", "base-w2-t2"), ("base", "base-w1-t1")),
        *((f"{mine}/base-w2-t2", "base-w2-t2"), ("a", "a-w1-t1")),
    ):
        comparison, results = compare_runs([mine], name, None, nowhere)
        assert (comparison.baseline, len(results)) == (first, 4)
    with pytest.raises(UserError, match=r"--baseline bsae-w1-t1: is none of .* did you mean base-w1-t1\?"):
        compare_runs([mine], "bsae-w1-t1", None, nowhere)
    with pytest.raises(UserError, match=r"--baseline x: .* nor another run; these are a-w1-t1, a-w2-t2, base-w1-t1,"):
        compare_runs([mine], "x", None, nowhere)
    write_result(tmp_path / "other" / "base-w1-t1", 4.0)
    with pytest.raises(UserError, match=r"--baseline base-w1-t1: several .*mine.*other/base-w1-t1\); give a path"):
        compare_runs([mine, str(tmp_path / "other")], "base-w1-t1", None, nowhere)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"runs": ["nowhere-to-be-found"]}, "there is no such run"),
        ({"runs": ["plain-1"], "form": "yaml"}, "--format: must be one of terminal, markdown, csv, json"),
    ],
)
def test_mistakes_are_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        compare(**arguments)  # type: ignore[arg-type]


def test_folder_that_cannot_be_written_is_named(place: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot be written"):
        compare([str(place / "plain-1")], output=tmp_path / "file")


@pytest.mark.slow
def test_command_prints_and_writes_the_table(place: Path, tmp_path: Path) -> None:
    """As the shell starts it; and nothing heavy is imported where only help is wanted."""
    command = [sys.executable, "-X", "importtime", "-m", "training.cli", "compare"]
    runs = [str(place / "plain-1"), str(place / "plain-2"), str(place / "study")]
    folder = tmp_path / "written"

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        done = subprocess.run(
            [*command, *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
        return done

    done = run(*runs, "--output", str(folder), "--format", "json")
    values = json.loads(done.stdout)
    assert [row["group"] for row in values["rows"]] == ["clipped-1", "plain-1"]
    assert values["baseline"] == "plain-1"
    assert json.loads((folder / "comparison.json").read_text()) == values
    assert f"{folder}: comparison.md, comparison.csv, comparison.json, loss_steps.png" in done.stderr
    assert (folder / "comparison.html").stat().st_size > 3_000_000
    helped = run("--help")
    assert "--baseline" in helped.stdout
    imported = {line.rpartition("|")[2].strip() for line in helped.stderr.splitlines()}
    assert not imported & {"torch", "scipy", "plotly", "matplotlib", "numpy"}
