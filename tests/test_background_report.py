"""The report that is written while a run trains: in a process of its own, not too often, and never in the way."""

import signal
from contextlib import closing
from pathlib import Path

import pytest
from recorded_runs import begin, train_row, write_run

from training import background_report
from training.background_report import BackgroundReport


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", [begin(0, "start", 1), train_row(1), train_row(2)])


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_report, "SECONDS_BETWEEN", 0.0)


def wait_for(report: BackgroundReport) -> None:
    """Until its process has ended, by itself."""
    assert report._process is not None
    report._process.wait(300)


@pytest.mark.usefixtures("at_once")
@pytest.mark.slow
def test_it_is_written_beside_training_one_at_a_time(run: Path) -> None:
    """A half-written last line is the run's own, which goes on writing."""
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"kind": "train", "step": 3, "lo')
    said: list[str] = []
    with closing(BackgroundReport(run, said.append)) as report:
        report.refresh()
        first = report._process
        report.refresh()
        assert first is not None
        assert report._process is first
        wait_for(report)
    assert (first.returncode, said) == (0, [])
    assert "step 2 of 20" in (run / "report.md").read_text()
    assert {path.name for path in run.iterdir()} == {
        "config.yaml",
        "metrics.jsonl",
        "report.md",
        "loss.png",
        "grad_norm.png",
        "learning_rate.png",
    }


def test_short_runs_start_no_process(run: Path) -> None:
    report = BackgroundReport(run, print)
    report.refresh()
    assert report._process is None
    report.close()


@pytest.mark.usefixtures("at_once")
def test_a_failure_is_said_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the report cannot be written or the process cannot be started."""
    (run / "config.yaml").unlink()
    said: list[str] = []
    with closing(BackgroundReport(run, said.append)) as report:
        report.refresh()
        wait_for(report)
    (sentence,) = said
    assert sentence.startswith(f"{run}: report.md could not be written again, training goes on: ")
    assert sentence.endswith(
        "config.yaml: there is no such file; training writes it; name the folder of a run that has begun"
    )
    monkeypatch.setattr("sys.executable", str(run / "no-python"))
    report.refresh()
    report.close()
    other: list[str] = []
    BackgroundReport(run, other.append).refresh()
    assert len(said) == 1
    assert "No such file or directory" in other[0]


@pytest.mark.usefixtures("at_once")
def test_whatever_it_says_it_comes_to_its_end(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a pipe holds; its last line is the reason."""
    talker = run / "talker"
    talker.write_text(
        "#!/bin/sh\nhead -c 200000 /dev/zero | tr '\\0' x >&2; echo; printf '\\nlast words\\n' >&2; exit 3\n"
    )
    talker.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(talker))
    said: list[str] = []
    with closing(BackgroundReport(run, said.append)) as report:
        report.refresh()
        wait_for(report)
    assert said == [f"{run}: report.md could not be written again, training goes on: last words"]


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("seconds", [0.0, 5.0], ids=["by force", "at once"])
def test_nothing_stays_behind_the_run(run: Path, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """The end of the run ends what is being written, without a word and without half a file."""
    monkeypatch.setattr(background_report, "SECONDS_TO_END", seconds)
    said: list[str] = []
    report = BackgroundReport(run, said.append)
    report.refresh()
    process = report._process
    assert process is not None
    report.close()
    assert process.returncode in (1, -signal.SIGTERM, -signal.SIGKILL)
    assert said == []
    assert {path.name for path in run.iterdir()} == {"config.yaml", "metrics.jsonl"}
    report.close()
