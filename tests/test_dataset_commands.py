"""The command line of `isobatch prepare`, in real processes: killed and interrupted; and --check."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import typer
from small_corpora import GPT2, contents, isobatch, json_lines, read_dataset, small_texts, start_isobatch

from training.errors import UserError
from training.preparation.corpus import Settings, prepare_documents
from training.preparation.dataset_commands import _unescaped, prepare
from training.preparation.sources import find_sources
from training.preparation.vocabulary import read_vocabulary


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a source of some megabytes, enough to be killed in, and the dataset that comes of it."""
    folder = tmp_path_factory.mktemp("place")
    words = [f"{text} {number}" for number in range(150) for text in small_texts(60, number % 7)]
    (folder / "a.jsonl").write_bytes(json_lines(words))
    sources = find_sources([str(folder / "a.jsonl")], None, [])
    prepare_documents(sources, folder / "whole", Settings("text", None, 0.01, 5), read_vocabulary(GPT2), 1)
    return folder


def begun(place: Path, name: str, *options: object) -> "subprocess.Popen[str]":
    """A process that makes the dataset, and has recorded some progress of its own."""
    progress = place / f".{name}.preparing" / "progress.json"
    before = json.loads(progress.read_text())["progress"]["documents"] if progress.exists() else 0
    process = start_isobatch(*arguments(place, name), *options)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        if progress.exists() and json.loads(progress.read_text())["progress"]["documents"] > before:
            return process
        time.sleep(0.01)
    raise AssertionError(process.communicate())


def arguments(place: Path, name: str) -> list[object]:
    return ["prepare", place / "a.jsonl", "--output", place / name, "--tokenizer", GPT2, "--decontaminate", 5]


def processes_of(group: int) -> list[str]:
    """The processes of a group that still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, of_group = path.read_text().rpartition(") ")[2].split()[:3]
        except OSError:  # it has just ended
            continue
        if int(of_group) == group and state != "Z":
            found.append(path.parent.name)
    return found


def wait_for_end(group: int) -> None:
    """Waits until no process of a group is left."""
    deadline = time.monotonic() + 10
    while processes_of(group):
        assert time.monotonic() < deadline, "orphans"
        time.sleep(0.05)


@pytest.mark.slow
def test_killed_and_interrupted_it_goes_on_to_the_same_bytes(place: Path) -> None:
    """With another number of processes each time; what is killed leaves none, and Ctrl-C, which reaches every process
    of a terminal, no traceback."""
    process = begun(place, "again", "--workers", 2)
    process.kill()
    process.communicate()
    wait_for_end(process.pid)
    assert not (place / "again").exists()
    process = begun(place, "again", "--workers", 3)
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=120)
    assert (process.returncode, output) == (1, "")
    assert errors.startswith("going on after ")
    said = f"error: {place / 'again'}: interrupted; the same command goes on where this one ended"
    assert errors.splitlines()[1:] == [said]
    wait_for_end(process.pid)
    assert isobatch(*arguments(place, "again"), "--workers", 1).stderr.startswith("going on after ")
    assert contents(place / "again") == contents(place / "whole")
    expected, found = (json.loads((place / name / "dataset.json").read_text()) for name in ("whole", "again"))
    assert found == expected | {"name": "again"}
    assert not (place / ".again.preparing").exists()


@pytest.mark.slow
def test_a_dataset_from_the_command_line_is_checked_by_it(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n\nthree")
    output = tmp_path / "set"
    made = isobatch("prepare", tmp_path / "a.txt", "--output", output, "--bytes", "--separator", r"\n\n",
                    "--validation-share", 0, "--workers", 1)  # fmt: skip
    assert made.stdout == ""
    assert made.stderr.startswith("set: train 3 documents of 14 tokens, 0.79 bytes per token, ")
    assert read_dataset(output) == {"train": ["one", "two", "three"]}
    done = isobatch("prepare", "--check", output)
    assert done.stdout == f"{output}: is whole: train 14 tokens, ids up to 256 in a vocabulary of 257\n"


def test_all_problems_of_several_datasets_are_told_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As lines, or with --json as one object a dataset; status 2."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    problems = [f"{tmp_path / name}/train.safetensors: there is no such file; download or prepare the dataset again"
                for name in ("a", "b")]  # fmt: skip
    with pytest.raises(UserError) as caught:
        prepare([str(tmp_path / "a"), str(tmp_path / "b")], check=True)
    assert str(caught.value).splitlines() == ["2 problems:", *problems]
    with pytest.raises(typer.Exit) as ended:
        prepare([str(tmp_path / "a")], check=True, as_json=True)
    assert ended.value.exit_code == 2
    assert json.loads(capsys.readouterr().out) == {
        "folder": str(tmp_path / "a"),
        "problems": problems[:1],
        "vocab_size": None,
        "end_of_text": None,
        "described": False,
        "splits": {},
    }


def test_a_missing_output_is_named(tmp_path: Path) -> None:
    done = isobatch("prepare", tmp_path, "--bytes", status=2)
    assert done.stderr == "error: --output: is missing; the new dataset needs a folder; give --output datasets/NAME\n"


def test_escapes_in_a_separator_are_what_they_mean() -> None:
    assert _unescaped(r"\n\n") == "\n\n"
    assert _unescaped(r"\t|\r\n") == "\t|\r\n"
    assert _unescaped(r"\\n \x") == r"\n \x"
    assert _unescaped("<|endoftext|>") == "<|endoftext|>"
    assert _unescaped(None) is None
