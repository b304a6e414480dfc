"""The report of a run: the figures in its Markdown, and its charts."""

from pathlib import Path
from typing import Any

import pytest
from recorded_runs import bad_row, begin, event, full_run, train_row, validation_row, write_run

from training.errors import RunError, UserError
from training.metrics_file import read_metrics
from training.report import summary_lines, write_report

CHARTS = ("loss.png", "grad_norm.png", "learning_rate.png")


def cells(report: str) -> list[list[str]]:
    """The table rows of a Markdown text."""
    lines = [line for line in report.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the full run, with its report."""
    run = full_run(tmp_path_factory.mktemp("report") / "tiny|run")
    (run / "loss.png").write_bytes(b"an older chart")
    assert write_report(run) == run / "report.md"
    return run


@pytest.fixture(scope="module")
def odd_report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The report of a run that exploded: no clipping, and a last validation on more tokens than the first."""
    rows = [
        train_row(1, seconds=1.0, grad_norm=0.0, loss=0),
        validation_row(1, 4.0),
        train_row(2, seconds=146300.0, grad_norm=1e9, loss=1e6),
        validation_row(2, 4.1, target_tokens=8192),
        event(2, "sample", prompt="a\rb", text="half \ud83d"),
    ]
    run = write_run(tmp_path_factory.mktemp("odd") / "run", rows, config={"optimizer": {"clip_norm": None}})
    return write_report(run).read_text()


def test_summary_lines_of_a_finished_run(tmp_path: Path) -> None:
    metrics = read_metrics(full_run(tmp_path / "run") / "metrics.jsonl")
    assert summary_lines(metrics) == [
        "Training complete in 7.500 seconds",
        "Tokens seen: 20,480",
        "Throughput: 2,731 tokens/second",
        "Final train loss: 4.100",
        "Final validation loss: 4.200 (best: 4.159 at step 15)",
    ]


def test_a_validation_before_the_last_step_is_not_called_final(tmp_path: Path) -> None:
    rows = [train_row(10), validation_row(10, 4.25), train_row(12)]
    run = write_run(tmp_path / "run", rows)
    lines = summary_lines(read_metrics(run / "metrics.jsonl"))
    assert lines[-1] == "Last validation loss, at step 10: 4.250 (best: 4.250 at step 10)"
    assert ["Last validation, at step 10", "10", "4.250000", "70.11", "-", "4,096"] in cells(
        write_report(run).read_text()
    )


def test_summary_lines_have_the_forerunners_words_and_figures(tmp_path: Path) -> None:
    """1xrtx3090-stacked-interventions: 33,165 steps of 98,304 tokens in 146,300 s at 22,285 tokens/s."""
    last = train_row(33165, tokens=3260252160, seconds=146300.0, loss=3.538161)
    run = write_run(tmp_path / "run", [last, event(33165, "finished")])
    assert summary_lines(read_metrics(run / "metrics.jsonl")) == [
        "Training complete in 146,300.000 seconds",
        "Tokens seen: 3,260,252,160",
        "Throughput: 22,285 tokens/second",
        "Not recorded: steps 1 to 33,164",
        "Final train loss: 3.538",
    ]


@pytest.mark.parametrize(
    ("rows", "first", "loss"),
    [
        ([begin(0, "start", 1), train_row(2)], "Training reached step 2 of 20 in 1.000 seconds", "5.000"),
        (
            [begin(0, "start", 1), bad_row(2), event(2, "stopped")],
            "Training reached step 2 of 20 in 1.000 seconds",
            "not finite",
        ),
        ([train_row(2)], "Training reached step 2 in 1.000 seconds", "5.000"),
    ],
)
def test_summary_lines_of_an_unfinished_run(tmp_path: Path, rows: list[dict[str, Any]], first: str, loss: str) -> None:
    run = write_run(tmp_path / "run", rows)
    lines = summary_lines(read_metrics(run / "metrics.jsonl"))
    assert lines[0] == first
    assert lines[-1] == f"Final train loss: {loss}"


def test_report_says_what_a_run_shares_with_others(tmp_path: Path) -> None:
    """The digests of its last beginning, those that it has."""
    known = {"weights_sha256": "ab12", "data_order_sha256": "cd34", "validation_sha256": None}
    rows = [begin(0, "start", 1, **{**known, "data_order_sha256": "older"}), begin(0, "resume", 1, **known)]
    table = cells(write_report(write_run(tmp_path / "run", rows)).read_text())
    assert [row for row in table if row[0].endswith("sha256")] == [
        ["Initial weights, sha256", "`ab12`"],
        ["Data order, sha256", "`cd34`"],
    ]


def test_report_has_the_runs_figures(reported: Path) -> None:
    report = (reported / "report.md").read_text()
    assert report.startswith("# tiny|run\n\nFinished: step 20 of 20.\n")
    table = cells(report)
    for row in (
        ["Best validation", "15", "4.158883", "64.00", "1.2500", "4,096"],
        ["Final validation", "20", "4.200000", "66.69", "1.2700", "4,096"],
        ["Final training step", "20", "4.100000", "60.34", "-", "1,024"],
        ["Interventions", "gradient-clipping, no-dropout"],
        ["Overrides", "`optimizer.clip_norm=0.5`"],
        ["Parameters", "163,009,536"],
        ["Tokens per step", "1,024"],
        ["Dataset", "gpjt/fineweb-gpt2-tokens, revision abc123"],
        ["Steps", "20 of 20"],
        ["Tokens seen", "20,480"],
        ["Training time", "7.5 s"],
        ["Throughput", "2,731 tokens/s"],
        ["step 0", "global batch 8 = 1 x 2 x 4", "box 1", "cpu", "2.13.0", "2,048 tokens/s"],
        [
            "step 10, from step_00000010",
            "global batch 8 = 2 x 2 x 2",
            "box 2",
            "cpu",
            "2.13.0",
            "4,096 tokens/s",
        ],
        ["Clipped steps", "3 of 20 (15.00%), at norm 0.5"],
        ["Skipped steps", "2 of 20 (10.00%)"],
        ["Non-finite steps", "1 (step 7)"],
        ["Loss-scale overflows", "1 (step 1); the loss scaler's search, not counted as non-finite"],
        ["Gradient norm before clipping, median", "0.4"],
        ["largest", "2.5 at step 13"],
    ):
        assert row in table
    for chart in CHARTS:
        assert f"]({chart})" in report
    assert "clip_norm: 0.5" in report


def test_report_lists_what_changed_on_the_way(reported: Path, odd_report: str) -> None:
    """But for the change of a resume that was killed before its first step, and given up with the next."""
    report = (reported / "report.md").read_text()
    assert "\n## Changed on the way\n" in report
    assert ["step 11", "`optimizer.betas`", "`[0.9, 0.95]`", "`[0.9, 0.999]`"] in cells(report)
    assert "optimizer.eps" not in report
    assert "Changed on the way" not in odd_report


def test_sample_with_backticks_stays_in_its_fence(reported: Path) -> None:
    report = (reported / "report.md").read_text()
    assert "`````\n ends in ```` and\n```python\n# code\n`````\n" in report
    assert "an older text" not in report


def test_charts_are_pictures_and_nothing_else_is_left(reported: Path) -> None:
    for chart in CHARTS:
        content = (reported / chart).read_bytes()
        assert content.startswith(b"\x89PNG\r\n\x1a\n")
        assert content.endswith(b"IEND\xaeB`\x82")
        assert int.from_bytes(content[16:20]) == 1080  # the width in the PNG's header
    assert {path.name for path in reported.iterdir()} == {
        *CHARTS,
        "report.md",
        "config.yaml",
        "metrics.jsonl",
    }


def test_writing_again_gives_the_same_files(reported: Path) -> None:
    names = ("report.md", *CHARTS)
    first = [(reported / name).read_bytes() for name in names]
    write_report(reported)
    assert [(reported / name).read_bytes() for name in names] == first


@pytest.mark.parametrize(
    ("rows", "status"),
    [
        ([], "Not finished: step 0."),
        (
            [begin(0, "start", 1), event(0, "stopped")],
            "Stopped by `--stop-after`, can be resumed: step 0 of 20.",
        ),
        ([begin(0, "start", 1), validation_row(0, 5.5)], "Not finished: step 0 of 20."),
        (
            [begin(0, "start", 1), train_row(1, seconds=0.0), event(1, "interrupted")],
            "Interrupted, can be resumed: step 1 of 20.",
        ),
        ([bad_row(1), bad_row(2), validation_row(2, None)], "Not finished: step 2."),
    ],
    ids=["empty", "no step", "validation only", "one step in no time", "nothing finite"],
)
def test_reports_of_runs_with_little_in_them(tmp_path: Path, rows: list[dict[str, Any]], status: str) -> None:
    run = write_run(tmp_path / "run", rows, config={})
    assert status in write_report(run).read_text()
    assert summary_lines(read_metrics(run / "metrics.jsonl"))
    for chart in CHARTS:
        assert (run / chart).stat().st_size > 1000


def test_long_run_is_drawn_from_bins(tmp_path: Path) -> None:
    """More steps than points, huge first losses and a spike, for which the axis is cut."""
    steps = [train_row(step, loss=3.5 + 30 / step, loss_max=4.0 + 30 / step) for step in range(1, 2501)]
    steps[2000] = train_row(2001, grad_norm=500.0, loss=40.0, loss_max=45.0)
    run = write_run(tmp_path / "run", steps)
    assert "| largest | 500 at step 2,001 |" in write_report(run).read_text()


@pytest.mark.parametrize("missing", ["config.yaml", "metrics.jsonl"])
def test_missing_file_is_named(tmp_path: Path, missing: str) -> None:
    run = full_run(tmp_path / "run")
    (run / missing).unlink()
    with pytest.raises(UserError, match=f"{missing}: there is no such file"):
        write_report(run)


@pytest.mark.parametrize("text", [b"a: [", b"- a list", b"\xff\xfe\xff"])
def test_broken_config_is_named(tmp_path: Path, text: bytes) -> None:
    run = full_run(tmp_path / "run")
    (run / "config.yaml").write_bytes(text)
    with pytest.raises(UserError, match=r"config\.yaml"):
        write_report(run)


@pytest.mark.parametrize(
    ("key", "value"),
    [("optimizer", [1]), ("optimizer.clip_norm", "x"), ("data", "x"), ("interventions", 5), ("overrides", "x")],
)
def test_config_of_wrong_kinds_is_named(tmp_path: Path, key: str, value: Any) -> None:
    section, _, name = key.partition(".")
    run = write_run(tmp_path / "run", [train_row(1)], {section: {name: value} if name else value})
    with pytest.raises(UserError, match=rf"config\.yaml: {key}: is not as training writes it"):
        write_report(run)


def test_a_report_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    run = full_run(tmp_path / "run")
    (run / "report.md").mkdir()
    with pytest.raises(RunError, match=r"report\.md: cannot be written"):
        write_report(run)


def test_validations_of_different_ranges_are_pointed_out(reported: Path, odd_report: str) -> None:
    sentence = "do not all cover the same tokens"
    assert sentence in odd_report
    assert ["Best validation", "1", "4.000000", "54.60", "-", "4,096"] in cells(odd_report)
    assert sentence not in (reported / "report.md").read_text()


def test_half_a_character_in_a_sample_does_not_stop_the_report(odd_report: str) -> None:
    assert "half ?" in odd_report


def test_clipping_that_is_off_is_said(odd_report: str) -> None:
    assert "| Clipped steps | clipping is off |" in odd_report


def test_perplexity_of_an_exploded_loss_does_not_overflow(odd_report: str) -> None:
    assert "| Final training step | 2 | 1000000.000000 | over 1e13 | - | 1,024 |" in odd_report


def test_duration_of_a_long_run(odd_report: str) -> None:
    assert "| Training time | 146,300 s (40 h 38 min) |" in odd_report
