"""The command line of `isobatch prepare`, in real processes: killed, interrupted, twice at once; and --check."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from small_corpora import GPT2, contents, isobatch, json_lines, read_dataset, small_texts, start_isobatch

from training.preparation.corpus import Settings, prepare_documents
from training.preparation.dataset_commands import _unescaped
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
    """A process that makes the dataset, and has recorded some progress."""
    process = start_isobatch(*arguments(place, name), *options)
    progress = place / f".{name}.preparing" / "progress.json"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        if progress.exists() and json.loads(progress.read_text())["progress"]["documents"]:
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
def test_killed_and_started_again_it_goes_on_to_the_same_bytes(place: Path) -> None:
    """With another number of processes; the killed one's do not outlive it."""
    process = begun(place, "killed", "--workers", 2)
    process.kill()
    process.communicate()
    wait_for_end(process.pid)
    assert not (place / "killed").exists()
    done = isobatch(*arguments(place, "killed"), "--workers", 3)
    assert done.stderr.startswith("going on after ")
    assert contents(place / "killed") == contents(place / "whole")
    expected, found = (json.loads((place / name / "dataset.json").read_text()) for name in ("whole", "killed"))
    assert found == expected | {"name": "killed"}
    assert not (place / ".killed.preparing").exists()


@pytest.mark.slow
def test_interrupted_it_says_how_to_go_on(place: Path) -> None:
    """Ctrl-C reaches every process of a terminal: no traceback, none left over."""
    process = begun(place, "interrupted", "--workers", 2)
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=30)
    assert (process.returncode, output) == (1, "")
    assert errors == f"error: {place / 'interrupted'}: interrupted; the same command goes on where this one ended\n"
    wait_for_end(process.pid)
    assert isobatch(*arguments(place, "interrupted")).stderr.startswith("going on after ")
    assert contents(place / "interrupted") == contents(place / "whole")


@pytest.mark.slow
def test_two_at_once_are_not_in_each_other_s_way(place: Path) -> None:
    first = begun(place, "twice", "--workers", 1)
    second = isobatch(*arguments(place, "twice"), status=2)
    assert second.stderr == (
        f"error: {place / 'twice'}: another process is preparing it; wait for it or stop it first\n"
    )
    assert first.wait(timeout=60) == 0
    first.communicate()
    assert contents(place / "twice") == contents(place / "whole")


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


@pytest.mark.slow
def test_all_problems_of_several_datasets_are_told_together(tmp_path: Path) -> None:
    """As lines, or with --json as one object a dataset; status 2."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    problems = [f"{tmp_path / name}/train.safetensors: there is no such file; download or prepare the dataset again"
                for name in ("a", "b")]  # fmt: skip
    done = isobatch("prepare", "--check", tmp_path / "a", tmp_path / "b", status=2)
    assert done.stderr.splitlines() == ["error: 2 problems:", *problems]
    one = isobatch("prepare", "--check", tmp_path / "a", "--json", status=2)
    assert one.stderr == ""
    assert json.loads(one.stdout) == {
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
