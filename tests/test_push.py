"""isobatch push and the push at a run's end: what is refused before, what a failure leaves, and what is built."""

import json
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY, Workplace
from fake_hub import READ_TOKEN, TOKEN, FakeHub
from recorded_runs import begin, event, write_run
from small_checkpoints import save
from small_configs import small_config
from small_push import PUSHED, prepare_push
from worker import Worker

from training.hub.push import Push, base_model_of, built_folder
from training.lock import held
from training.metrics_file import read_metrics

NAME = "tester/model"


@dataclass(frozen=True)
class Place:
    """A finished run that was not pushed."""

    work: Workplace
    config: Path
    run: Path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    work = Workplace(tmp_path_factory.mktemp("place"))
    config, _ = prepare_push(work)
    return Place(work, config, work.train_here(config).folder)


@pytest.fixture(scope="module")
def worker(module_hub: FakeHub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with Worker(module_hub.environment(tmp_path_factory.mktemp("worker"))) as worker:
        yield worker


@pytest.mark.slow
def test_a_failed_upload_ends_with_1_and_loses_nothing(
    hub: FakeHub, place: Place, worker: Worker, tmp_path: Path
) -> None:
    """Told with the command that repeats it, file for file; and resuming the finished run does so too, once."""
    train = ["ddp_train.py", place.config, place.work.datasets, "--output", tmp_path]
    train += ["--set", "hub.repo=tester/second"]
    hub.fail("/commit/", 403)
    done = worker.run(*train)
    run = tmp_path / "run"
    assert done.status == 1
    last = done.errors.splitlines()[-1]
    assert last == (
        "error: tester/second: the token may not write there (HTTP 403: injected); use one that may, or another "
        f"repository; nothing is lost, {run / 'hub'} holds what was to be uploaded; to try again: "
        f"isobatch push {run} tester/second --datasets {place.work.datasets}"
    )
    assert read_metrics(run / "metrics.jsonl").events[-1]["event"] == "finished"
    assert (run / "report.md").is_file()
    assert (run / "latest" / "model.safetensors").is_file()
    built = sorted(str(path.relative_to(run / "hub")) for path in (run / "hub").rglob("*") if path.is_file())
    assert built == PUSHED
    assert hub.files("model", "tester/second") == []

    hub.faults.clear()
    for left in (".hub.old", ".hub.partial"):  # by pushes that were killed
        shutil.copytree(run / "hub", run / left)
    done = worker.run(*shlex.split(last.partition("to try again: ")[2]))
    assert done.status == 0, done.errors
    assert hub.files("model", "tester/second") == PUSHED
    for file in PUSHED:
        if file not in ("metrics.jsonl", "README.md"):
            assert hub.read("model", "tester/second", file) == (run / "hub" / file).read_bytes()

    assert not list(run.glob(".hub.[op]*"))

    hub.repositories.clear()
    hub.requests.clear()
    done = worker.run(*train, "--resume", "latest")
    assert done.status == 0, done.errors
    assert "nothing left to do, 10 of 10 steps are done\n" in done.errors
    assert hub.files("model", "tester/second") == PUSHED
    assert hub.count("PUT", "/_lfs/") == 0, "what had arrived was not sent again"
    done = worker.run(*train, "--resume", "latest")
    assert done.status == 0
    assert hub.count("POST", "/commit/") == 1


@pytest.mark.slow
def test_what_cannot_be_uploaded_is_refused_before_training(
    hub: FakeHub, place: Place, worker: Worker, tmp_path: Path
) -> None:
    """R84, R90: status 2, one sentence, no folder, no download."""
    train = ["ddp_train.py", place.config, place.work.datasets, "--output", tmp_path / "out"]
    missing = ["--set", "data.dataset=owner/not-there", "--push-to-hub"]
    hub.requests.clear()
    cases = {
        ("", "tester/x"): "hub.repo: there is no token to upload to tester/x with; set HF_TOKEN to one that may write",
        (READ_TOKEN, "tester/x"): "hub.repo: tester/x: the token in HF_TOKEN may only read; make one that may",
        (TOKEN, "else/x"): "hub.repo: else/x: the token in HF_TOKEN is tester's, who may not write to else",
        (TOKEN, "./out"): "--push-to-hub: must be owner/name, as a repository on the Hub is called",
        (TOKEN, ""): "--push-to-hub: must be owner/name, as a repository on the Hub is called",
    }
    for (token, repository), expected in cases.items():
        done = worker.run(*train, *missing, repository, token=token)
        assert done.status == 2
        assert done.errors.startswith(f"error: {expected}")
        assert done.errors.count("\n") == 1
    assert {request.path for request in hub.requests} == {"/api/whoami-v2"}
    assert list((tmp_path / "out").iterdir()) == []
    done = worker.run(*train, *missing, "tester/x", "--dry-run", token="")
    assert done.status == 0, "a plan needs no Hub"


@pytest.mark.slow
def test_mistakes_on_the_command_line(hub: FakeHub, place: Place, worker: Worker) -> None:
    cases = {
        (place.run, "./out"): "REPO: must be owner/name",
        (place.run, "me/x", "--checkpoint", "first"): "--checkpoint: must be one of last, best, got 'first'",
        (place.run, "me/x", "--dtype", "int8"): "--dtype: must be one of float32, bfloat16, float16, got 'int8'",
        (place.run, "me/x", "--licence", "My own"): "--licence: must be the Hub's name of a licence",
        (place.run, NAME, "--licence", "apache"): "REPO: tester/model: the Hub knows no licence 'apache'",
        (place.run, "me/x"): "REPO: me/x: the token in HF_TOKEN is tester's, who may not write to me",
        ("nothing", NAME): "'nothing': there is no such run or checkpoint",
        (place.run, NAME): "/datasets/data: there is no such folder, so nobody knows whether the model has a tokenizer",
    }
    for words, expected in cases.items():
        done = worker.run("isobatch", "push", *words)
        assert done.status == 2
        assert done.errors.startswith("error: ")
        assert expected in done.errors
        assert done.errors.count("\n") == 1


@pytest.mark.slow
def test_another_push_and_what_is_the_users_own_are_left_alone(place: Place, worker: Worker, tmp_path: Path) -> None:
    run = shutil.copytree(place.run / "latest", tmp_path / "run" / "step_00000010").parent
    (run / "config.yaml").write_bytes((place.run / "config.yaml").read_bytes())
    push = ["isobatch", "push", run, NAME, "--dry-run", "--datasets", place.work.datasets]
    with held(run / ".hub.lock"):
        done = worker.run(*push)
    assert (done.status, done.errors) == (
        2,
        f"error: {run / 'hub'}: another push of this model is under way; wait for its end\n",
    )
    (run / "hub").mkdir()
    (run / "hub" / "notes.txt").touch()
    done = worker.run(*push)
    assert (done.status, done.output) == (2, "")
    assert done.errors == (
        f"error: {run / 'hub'}: exists, and is no earlier upload; nothing of yours is overwritten: rename it\n"
    )
    assert [path.name for path in (run / "hub").iterdir()] == ["notes.txt"]


def test_the_base_model_is_found_over_the_runs_in_between(tmp_path: Path) -> None:
    """An import from the Hub counts, one from a folder does not; a run that starts from itself is no loop."""
    imported = event(0, "import", source="openai-community/gpt2", revision="abc")
    first = write_run(tmp_path / "first", [imported], {})
    second = write_run(tmp_path / "second", [], {"init_from": str(first / "step_00000000")})
    third = write_run(tmp_path / "third", [begin(0, "start", 1)], {"init_from": str(second / "latest")})
    local = write_run(tmp_path / "local", [event(0, "import", source="/here", revision=None)], {})
    loop = write_run(tmp_path / "loop", [], {"init_from": str(tmp_path / "loop" / "latest")})
    gone = write_run(tmp_path / "gone", [], {"init_from": str(tmp_path / "nowhere" / "latest")})
    for run in (first, second, third):
        assert base_model_of(run) == "openai-community/gpt2"
    for other in (local, loop, gone, None):
        assert base_model_of(other) is None


def test_the_command_that_repeats_a_push(tmp_path: Path) -> None:
    """With what was chosen; the last checkpoint goes by the run's name."""
    folder = save(tmp_path / "run", 4)
    (tmp_path / "run" / "config.yaml").touch()
    vocabulary, ours = tmp_path / "tokenizer.json", REPOSITORY / "datasets"
    wish = Push(
        *(folder, small_config(), NAME, tmp_path),
        private=False,
        licence="mit",
        tokenizer=vocabulary,
        dtype="bfloat16",
        branch="half",
    )
    options = "--public --licence mit --branch half --dtype bfloat16"
    places = f"--datasets {tmp_path} --tokenizer {vocabulary}"
    assert wish.again() == f"isobatch push {tmp_path}/run/step_00000004 {NAME} {options} {places}"
    (tmp_path / "run" / "latest").symlink_to(folder.name)
    assert Push(folder, small_config(), NAME, ours).again() == f"isobatch push {tmp_path}/run {NAME}"
    own = tmp_path / "data" / "tokenizer.json"
    own.parent.mkdir()
    own.touch()
    again = Push(folder, small_config(), NAME, tmp_path, tokenizer=own).again()
    assert again == f"isobatch push {tmp_path}/run {NAME} --datasets {tmp_path}"


def local_push(tmp_path: Path, **options: Any) -> Push:
    """Of a run that was recorded, not trained; its dataset has no tokenizer."""
    (tmp_path / "data").mkdir()
    run = write_run(tmp_path / "run", [begin(0, "start", 1)], {})
    config = small_config(model={"vocab_size": 64})
    return Push(save(run, 4, config=config.model), config, NAME, tmp_path, **options)


@pytest.mark.slow
def test_the_folder_of_a_run_is_built_among_the_runs_own_files(tmp_path: Path) -> None:
    push = local_push(tmp_path)
    for _ in range(2):  # in place of an earlier one, too
        with built_folder(push, say=lambda _line: None) as folder:
            assert folder == tmp_path / "run" / "hub"
            assert {"README.md", "model.safetensors", "metrics.jsonl"} <= {path.name for path in folder.iterdir()}
    assert not list((tmp_path / "run").glob(".hub.[op]*"))


@pytest.mark.slow
def test_what_was_not_uploaded_from_here_is_not_replaced_unasked(
    hub: FakeHub, place: Place, worker: Worker, tmp_path: Path
) -> None:
    """Before the export and before training; an edit of the page counts, on the Hub and here."""
    bare = shutil.copytree(place.run / "latest", tmp_path / "bare")
    push = ["isobatch", "push", bare, NAME, "--tokenizer", place.work.datasets / "data" / "tokenizer.json"]
    hub.add("model", NAME, {"adapter_config.json": b"{}", "model-00001-of-00002.safetensors": b"", "mine.txt": b"1"})
    done = worker.run(*push)
    assert (done.status, done.errors.count("\n")) == (2, 1)
    assert f"error: REPO: {NAME}: holds files that were not uploaded from here (adapter_config.json, mine.txt, mod" in (
        done.errors
    )
    assert done.errors.endswith("; give --replace to go on, or choose another repository\n")
    assert not (tmp_path / "bare-hub").exists()
    train = ["ddp_train.py", place.config, place.work.datasets, "--output", tmp_path / "out", "--push-to-hub", NAME]
    done = worker.run(*train)
    assert done.status == 2
    assert done.errors.endswith("then: isobatch push RUN REPO --replace\n")
    assert not (tmp_path / "out" / "run").exists()
    hub.add("model", "tester/state", {".gitattributes": b""})
    hub.add("model", "tester/state", {"mine.txt": b"1"}, ref="training-state")
    done = worker.run(*train[:-1], "tester/state", "--set", "hub.every=5")
    assert (done.status, done.errors) == (
        2,
        "error: hub.every: tester/state: its branch training-state holds files of no run's state (mine.txt), which an "
        "upload would remove; remove the branch on the Hub, choose another repository, or train without hub.every\n",
    )
    assert not (tmp_path / "out" / "run").exists()

    assert worker.run(*push, "--replace").status == 0
    files = hub.files("model", NAME)
    assert "mine.txt" in files
    assert not {"adapter_config.json", "model-00001-of-00002.safetensors"} & set(files)
    uploaded = {name: hub.read("model", NAME, name) for name in files}
    page = uploaded["README.md"]
    edited = {"README.md": page + b"My words", "config.json": b"{}"}
    hub.add("model", NAME, edited)
    assert "its README.md was not written from here, or was edited since" in worker.run(*push).errors
    hub.add("model", NAME, {**uploaded, "adapter_model.bin": b"", "config.json": b"{}"})
    assert "were changed since (adapter_model.bin, config.json), which" in worker.run(*push).errors
    hub.add("model", NAME, {"README.md": page})
    (tmp_path / "bare-hub" / "LICENSE").touch()
    done = worker.run(*push)
    assert (done.status, (tmp_path / "bare-hub" / "LICENSE").exists()) == (2, True)
    assert "bare-hub: holds what was added or changed since a push wrote it (LICENSE), and the next" in done.errors
    (tmp_path / "bare-hub" / "README.md").write_bytes(edited["README.md"])
    done = worker.run(*push)
    assert done.status == 2
    assert "README.md: was edited since it was written, and a push writes it anew; move it away" in done.errors
    assert (tmp_path / "bare-hub" / "README.md").read_bytes() == edited["README.md"]


@pytest.mark.slow
def test_dry_run_builds_the_folder_alone(hub: FakeHub, place: Place, worker: Worker, tmp_path: Path) -> None:
    """Without a token; beside a checkpoint that lies in no run's folder; in bfloat16.

    The end of text comes from beside the tokenizer that is given, where the run's dataset is not here.
    """
    bare = shutil.copytree(place.run / "latest", tmp_path / "bare")
    vocabulary = place.work.datasets / "data" / "tokenizer.json"
    options = ["--dry-run", "--dtype", "bfloat16", "--tokenizer", vocabulary]
    hub.requests.clear()
    done = worker.run("isobatch", "push", bare, "someone/model", *options, token="")
    folder = tmp_path / "bare-hub"
    assert done.status == 0, done.errors
    assert done.output == f"{folder}\n"
    assert hub.requests == []
    config = json.loads((folder / "config.json").read_text())
    assert (config["dtype"], config["eos_token_id"]) == ("bfloat16", 269)
    assert (folder / "README.md").is_file()
