"""A dataset to the Hub, and a run that downloads it there by name and revision."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Workplace
from fake_hub import READ_TOKEN, FakeHub
from worker import Worker

from training.errors import UserError
from training.file_digest import file_digest
from training.hub.card_text import is_ours
from training.hub.push import read_description
from training.metrics_file import read_metrics
from training.preparation.dataset_files import fingerprint, write_description, write_split
from training.tokenizer import train_tokenizer

pytestmark = pytest.mark.slow  # for the process that has to start
NAME = "tester/tokens"
TEXT = "Every effort moves you a little further than the last one did. "
FILES = ["README.md", "dataset.json", "tokenizer.json", "train.safetensors", "validation.safetensors"]


@pytest.fixture(scope="module")
def worker(module_hub: FakeHub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with Worker(module_hub.environment(tmp_path_factory.mktemp("home"))) as worker:
        yield worker


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """A whole one, of 270 ids."""
    folder = tmp_path / "datasets" / "books"
    folder.mkdir(parents=True)
    tokenizer = train_tokenizer([TEXT], 270)
    tokenizer.save(str(folder / "tokenizer.json"))
    document = [*tokenizer.encode(TEXT).ids, 269]
    splits = {
        split: write_split(folder, split, {"documents": count, "bytes": count * len(TEXT)}, document * count, 270)
        for split, count in (("train", 300), ("validation", 40))
    }
    write_description(
        folder,
        name="books",
        kind="packed",
        vocab_size=270,
        end_of_text=269,
        source="A sentence",
        licence="CC0-1.0",
        fingerprint=fingerprint(file_digest(folder / "tokenizer.json"), 269, splits),
        splits=splits,
    )
    (folder / "notes.txt").write_text("mine")
    return folder


def test_a_run_elsewhere_trains_on_what_was_pushed(hub: FakeHub, worker: Worker, dataset: Path, tmp_path: Path) -> None:
    """By the name and the revision that the command prints; the same files, and only those of a dataset."""
    done = worker.run("isobatch", "push-dataset", dataset, NAME)
    assert done.status == 0, done.errors
    sha = hub.repositories["dataset", NAME].refs["main"]
    assert done.output == f"data: {{dataset: {NAME}, revision: {sha}}}\n"
    assert hub.repositories["dataset", NAME].private
    assert hub.files("dataset", NAME) == FILES
    assert all(hub.read("dataset", NAME, name) == (dataset / name).read_bytes() for name in FILES)
    assert "license: cc0-1.0" in (dataset / "README.md").read_text()

    hub.add("dataset", NAME, {"train.safetensors": b"another, later"})
    place = Workplace(tmp_path / "elsewhere")
    place.folder.mkdir()
    data = {"dataset": NAME, "revision": sha, "train_tokens": 1024, "validation_start": 0, "validation_tokens": 64}
    config = place.write_config(model={"vocab_size": 270}, data=data, evaluation={"every": None})
    done = worker.run("ddp_train.py", config, place.datasets, "--output", place.checkpoints)
    assert done.status == 0, done.errors
    [start] = read_metrics(place.checkpoints / "run" / "metrics.jsonl").events_named("start")
    assert start["dataset_revision"] == sha
    assert (place.datasets / NAME / "train.safetensors").read_bytes() == (dataset / "train.safetensors").read_bytes()


def test_a_second_push_sends_what_has_changed(hub: FakeHub, worker: Worker, dataset: Path) -> None:
    """A page of the user's own is left as it is; one that was written here is written again.

    Where the Hub has another page than the user's own, that is somebody's, and is not replaced unasked.
    """
    assert worker.run("isobatch", "push-dataset", dataset, NAME, "--public").status == 0
    assert not hub.repositories["dataset", NAME].private
    assert worker.run("isobatch", "push-dataset", dataset, NAME, "--licence", "mit").status == 0
    assert hub.count("PUT", "/_lfs/") == 2
    card = hub.read("dataset", NAME, "README.md").decode()
    assert "license: mit" in card
    own = "---\nlicense: mit\n---\n# My words\n"
    assert is_ours(card.encode())
    (dataset / "README.md").write_text(own)
    assert worker.run("isobatch", "push-dataset", dataset, NAME).status == 0
    assert worker.run("isobatch", "push-dataset", dataset, NAME).status == 0
    (dataset / "README.md").write_text(card)
    done = worker.run("isobatch", "push-dataset", dataset, NAME)
    assert done.status == 2
    assert done.errors == (
        f"error: REPO: {NAME}: its README.md was not written from here, or was edited since, and an upload would "
        "replace it; give --replace to go on, or choose another repository\n"
    )
    (dataset / "README.md").write_text(own)
    assert hub.read("dataset", NAME, "README.md").decode() == own == (dataset / "README.md").read_text()
    assert len(hub.titles("dataset", NAME)) == 4

    (dataset / "README.md").unlink()
    assert worker.run("isobatch", "push-dataset", dataset, NAME, "--replace").status == 0
    written = {name: hub.read("dataset", NAME, name) for name in FILES}
    assert worker.run("isobatch", "push-dataset", dataset, NAME).status == 0
    hub.add("dataset", NAME, {**written, "train.safetensors": b"another's"})
    done = worker.run("isobatch", "push-dataset", dataset, NAME)
    assert done.status == 2
    assert "not uploaded from here, or were changed since (train.safetensors), which an upload would" in done.errors


def test_a_dataset_that_is_not_whole_stays_here(hub: FakeHub, worker: Worker, dataset: Path) -> None:
    description = json.loads((dataset / "dataset.json").read_text())
    description["splits"]["train"]["sha256"] = "0" * 64
    (dataset / "dataset.json").write_text(json.dumps(description))
    done = worker.run("isobatch", "push-dataset", dataset, NAME)
    assert done.status == 2
    assert done.errors.startswith(f"error: {dataset / 'train.safetensors'}: its sha256 are ")
    assert {request.path for request in hub.requests} == {"/api/whoami-v2", f"/api/datasets/{NAME}/revision/main"}
    assert not (dataset / "README.md").exists()


@pytest.mark.parametrize(
    ("words", "token", "expected"),
    [
        (["DATASET", "./books"], "hf_write", "REPO: must be owner/name"),
        (["DATASET", NAME], "", "REPO: there is no token"),
        (["DATASET", NAME], READ_TOKEN, "REPO: tester/tokens: the token in HF_TOKEN may only read"),
        (["DATASET", NAME, "--licence", "Mine"], "hf_write", "--licence: must be the Hub's name of a licence"),
        (["nowhere", NAME], "hf_write", "nowhere: there is no such folder"),
    ],
)
def test_mistakes(hub: FakeHub, worker: Worker, dataset: Path, words: list[str], token: str, expected: str) -> None:
    given = [str(dataset) if word == "DATASET" else word for word in words]
    done = worker.run("isobatch", "push-dataset", *given, token=token)
    assert done.status == 2
    assert done.errors.startswith(f"error: {expected}")
    assert hub.repositories == {}


@pytest.mark.parametrize(
    ("page", "said"),
    [
        (b"caf\xe9", "README.md: cannot be read as UTF-8 text"),
        ("folder", "README.md: cannot be read as UTF-8 text"),
        ("fifo", "README.md: cannot be read as UTF-8 text (it is no file)"),
        (b" \n", "README.md: is empty, which the Hub does not take"),
        (b"\xef\xbb\xbf---\nlicense: mit\n---\n", "README.md: begins with a byte order mark, which the Hub does not"),
    ],
)
def test_a_page_that_is_no_text_is_refused(
    hub: FakeHub, worker: Worker, dataset: Path, page: bytes | str, said: str
) -> None:
    if page == "folder":
        (dataset / "README.md").mkdir()
    elif page == "fifo":
        os.mkfifo(dataset / "README.md")
    elif isinstance(page, bytes):
        (dataset / "README.md").write_bytes(page)
    done = worker.run("isobatch", "push-dataset", dataset, NAME)
    assert (done.status, done.errors.count("\n")) == (2, 1)
    assert said in done.errors


@pytest.mark.parametrize(("key", "value"), [("licence", ["mit"]), ("source", 3), ("fingerprint", {})])
def test_a_description_of_other_kinds_is_refused(dataset: Path, key: str, value: object) -> None:
    description = json.loads((dataset / "dataset.json").read_text())
    (dataset / "dataset.json").write_text(json.dumps(description | {key: value}))
    with pytest.raises(UserError, match=rf"dataset\.json: {key} is a (list|int|dict), but must be a str"):
        read_description(dataset / "dataset.json")


def test_a_failed_upload_is_told_with_the_command(hub: FakeHub, worker: Worker, dataset: Path) -> None:
    hub.fail("/commit/", 403)
    done = worker.run("isobatch", "push-dataset", dataset, NAME, "--licence", "mit")
    assert done.status == 1
    assert done.errors.endswith(
        f"nothing is lost; to try again: isobatch push-dataset {dataset} {NAME} --licence mit\n"
    )
    assert hub.files("dataset", NAME) == []
