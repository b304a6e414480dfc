"""The real client downloads from a stand-in for the Hub, in a process of its own (see fake_hub)."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import fake_hub_server
import numpy as np
import pytest
from fake_hub import FakeHub
from safetensors.numpy import load_file, save

from training.errors import RunError, UserError
from training.hub.hub_client import recorded_revision
from training.hub.hub_retry import failure_kind
from training.preparation.vocabulary import byte_vocabulary

REPOSITORY = Path(__file__).parents[1]
NAME = "owner/tokens"
TRAIN = save({"tokens": np.arange(1025, dtype=np.uint16)})
VALIDATION = save({"tokens": np.arange(65, dtype=np.uint16)})
FILES = {
    "train.safetensors": TRAIN,
    "validation.safetensors": VALIDATION,
    "README.md": b"# Tokens\n",
    "other.bin": b"not wanted",
}
PROGRAM = """
import json, os, sys
from pathlib import Path
from impatient import hurry
hurry()
from training.hub import hub_client
from training.errors import RunError, UserError

for line in sys.stdin:
    kind, name, destination, revision, token = json.loads(line)
    os.environ["HF_TOKEN"] = token
    try:
        if kind == "tokenizer":
            hub_client.download_tokenizer(name, Path(destination))
            answer = {}
        else:
            answer = {"sha": hub_client.download_dataset(name, revision, Path(destination))}
    except (RunError, UserError) as error:
        answer = {"refusal": str(error), "kind": type(error).__name__}
    print(json.dumps(answer), flush=True)
"""


class Client:
    """A process that has imported training.hub.hub_client under the given environment, and downloads on request."""

    def __init__(self, hub: FakeHub, home: Path, **environment: str) -> None:
        home.mkdir()
        self.kind = self.said_before = ""
        self.errors = home / "stderr"
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM],
                cwd=Path(__file__).parents[1],
                env=hub.environment(home, PYTHONPATH=f"{REPOSITORY}:{REPOSITORY / 'tests'}", **environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.process.communicate()

    def ask(
        self,
        destination: Path,
        name: str = NAME,
        revision: str | None = None,
        kind: str = "dataset",
        token: str = "",
    ) -> None:
        assert self.process.stdin is not None
        self.said_before = self.errors.read_text()
        self.process.stdin.write(json.dumps([kind, name, str(destination), revision, token]) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, str]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.errors.read_text()
        return dict(json.loads(line))

    def download(self, destination: Path, **options: str) -> str:
        """The sha of a download that succeeds without a word."""
        self.ask(destination, **options)
        sha = self.answer()["sha"]
        assert self.errors.read_text() == self.said_before
        return sha

    def refusal(self, destination: Path, **options: str) -> str:
        """The one sentence of a download that fails and leaves nothing behind."""
        self.ask(destination, **options)
        answer = self.answer()
        sentence, self.kind = answer["refusal"], answer["kind"]
        assert "\n" not in sentence
        assert list(destination.parent.iterdir()) == []
        return sentence


@pytest.fixture(scope="module")
def client(module_hub: FakeHub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with Client(module_hub, tmp_path_factory.mktemp("client") / "home") as client:
        yield client


@pytest.fixture
def destination(tmp_path: Path) -> Path:
    return tmp_path / "owner" / "tokens"


def test_dataset_is_downloaded_whole_and_its_commit_recorded(hub: FakeHub, client: Client, destination: Path) -> None:
    sha = hub.add("dataset", NAME, FILES)

    assert client.download(destination) == sha

    names = sorted(path.name for path in destination.iterdir())
    assert names == ["README.md", "download.json", "train.safetensors", "validation.safetensors"]
    np.testing.assert_array_equal(load_file(destination / "train.safetensors")["tokens"], np.arange(1025))
    record = json.loads((destination / "download.json").read_text())
    assert record == {"repository": NAME, "revision": sha, "requested": None}
    assert recorded_revision(destination) == sha
    assert [path.name for path in destination.parent.iterdir()] == ["tokens"]


def test_a_branch_is_resolved_once_and_an_old_commit_still_found(
    hub: FakeHub, client: Client, destination: Path
) -> None:
    first = hub.add("dataset", NAME, FILES)
    hub.add("dataset", NAME, {**FILES, "train.safetensors": VALIDATION})

    assert client.download(destination, revision=first) == first

    assert (destination / "train.safetensors").read_bytes() == TRAIN
    resolved = {request.path.split("/resolve/")[1][:40] for request in hub.requests if "/resolve/" in request.path}
    assert resolved == {first}


def test_r45_missing_repository_is_named_at_once(hub: FakeHub, client: Client, destination: Path) -> None:
    sentence = client.refusal(destination, name="owner/nothing")
    assert "dataset owner/nothing: the Hub has no such repository" in sentence
    assert "HF_TOKEN" in sentence


def test_missing_revision_is_named(hub: FakeHub, client: Client, destination: Path) -> None:
    hub.add("dataset", NAME, FILES)
    assert "owner/tokens: the repository has no revision 'v9'" in client.refusal(destination, revision="v9")


def test_repository_without_token_files_is_refused_with_what_it_has(
    hub: FakeHub, client: Client, destination: Path
) -> None:
    hub.add("dataset", NAME, {"README.md": b"", "data.parquet": b""})
    assert "has no train.safetensors, only README.md, data.parquet" in client.refusal(destination)


def test_name_that_is_no_repository_is_refused(hub: FakeHub, client: Client, destination: Path) -> None:
    assert "dataset a/b/c: " in client.refusal(destination, name="a/b/c")


@pytest.mark.parametrize(
    ("status", "code", "message", "expected", "kind", "attempts"),
    [
        (403, "GatedRepo", "restricted", "accept them on its page", "UserError", 1),
        (401, "", "Invalid credentials in Authorization header", "refuses the token (HTTP 401)", "UserError", 1),
        (404, "", "", "no such repository or revision (HTTP 404)", "UserError", 1),
        (429, "", "slow down", "too many requests", "RunError", 5),
        (503, "", "maintenance", "answers with HTTP 503", "RunError", 5),
        (-1, "", "", "check the network", "RunError", 5),
        (200, "", "", "the Hub's answer has not the form of one (KeyError", "RunError", 1),
        (416, "", "", "the Hub refuses it (HTTP 416)", "UserError", 1),
        (404, "EntryNotFound", "", "the Hub lists a file that it does not have", "UserError", 1),
    ],
)
def test_refusals_of_the_hub_are_one_sentence_with_a_remedy(
    hub: FakeHub,
    client: Client,
    destination: Path,
    status: int,
    code: str,
    message: str,
    expected: str,
    kind: str,
    attempts: int,
) -> None:
    """What can pass is tried again, and is no mistake of the user's."""
    hub.add("dataset", NAME, FILES)
    hub.fail("/api/", status, code, message)
    sentence = client.refusal(destination)
    assert sentence.startswith("dataset owner/tokens: ")
    assert expected in sentence
    assert (client.kind, len(hub.requests)) == (kind, attempts)


def test_an_answer_without_a_commit_is_told(
    hub: FakeHub, client: Client, destination: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("dataset", NAME, FILES)
    answer = {"id": NAME, "siblings": [{"rfilename": "train.safetensors"}]}
    route = ("GET", "/api/datasets/.+", lambda _handler: answer)
    monkeypatch.setattr(fake_hub_server, "ROUTES", [route, *fake_hub_server.ROUTES])
    assert client.refusal(destination) == "dataset owner/tokens: the Hub's answer names no commit; try again later"
    assert client.kind == "RunError"


def test_what_the_disk_refuses_is_no_mistake_of_the_users() -> None:
    assert failure_kind(OSError(28, "No space left on device")) is RunError
    assert failure_kind(TypeError("argument after ** must be a mapping")) is RunError
    assert failure_kind(ValueError("Repo id must be in the form")) is UserError


@pytest.mark.parametrize(("path", "status"), [("/api/", 503), ("/resolve/.*/train", -1), ("/resolve/.*/train", 500)])
def test_what_passes_is_waited_for(hub: FakeHub, client: Client, destination: Path, path: str, status: int) -> None:
    sha = hub.add("dataset", NAME, FILES)
    hub.fail(path, status, times=2)
    client.ask(destination)
    assert client.answer() == {"sha": sha}
    assert (destination / "train.safetensors").read_bytes() == TRAIN


def test_r45_unreachable_hub_is_reported_at_once(hub: FakeHub, tmp_path: Path, destination: Path) -> None:
    began = time.monotonic()
    with Client(hub, tmp_path / "home", HF_ENDPOINT="http://127.0.0.1:9") as client:
        sentence = client.refusal(destination)
    assert time.monotonic() - began < 20
    assert "dataset owner/tokens: the download from http://127.0.0.1:9 failed (Connect" in sentence


@pytest.mark.slow
def test_r45_hub_that_never_answers_is_reported_within_half_a_minute(
    hub: FakeHub, client: Client, destination: Path
) -> None:
    hub.fail("/api/", delay=40)
    began = time.monotonic()
    assert "check the network" in client.refusal(destination)
    assert time.monotonic() - began < 20


def test_failure_halfway_leaves_nothing_behind(hub: FakeHub, client: Client, destination: Path) -> None:
    hub.add("dataset", NAME, FILES)
    hub.fail(r"/resolve/.*/train.safetensors", 403)
    assert "HTTP 403" in client.refusal(destination)
    assert hub.downloads("README.md") == 1


def test_r82_offline_is_said_clearly(hub: FakeHub, tmp_path: Path, destination: Path) -> None:
    with Client(hub, tmp_path / "home", HF_HUB_OFFLINE="1") as client:
        sentence = client.refusal(destination)
    assert "dataset owner/tokens: not on this machine, and HF_HUB_OFFLINE forbids" in sentence
    assert hub.requests == []


@pytest.mark.parametrize(
    ("token", "authorization"),
    [("", None), (" \n", None), ("hf_abc\n", "Bearer hf_abc"), ("hf_abc", "Bearer hf_abc")],
)
def test_r84_empty_token_or_line_end_does_not_break_a_public_download(
    hub: FakeHub, client: Client, destination: Path, token: str, authorization: str | None
) -> None:
    sha = hub.add("dataset", NAME, FILES)
    assert client.download(destination, token=token) == sha
    assert {request.authorization for request in hub.requests} == {authorization}


@pytest.mark.parametrize("token", ["hf_se cret", "hf_secr\x07et", "hf_secr\u2026et"])
def test_r84_token_that_cannot_be_sent_is_refused_and_never_printed(
    hub: FakeHub, client: Client, destination: Path, token: str
) -> None:
    hub.add("dataset", NAME, FILES)
    sentence = client.refusal(destination, token=token)
    assert sentence.startswith("HF_TOKEN: the token holds a character that cannot be sent")
    assert "hf_se" not in sentence + client.errors.read_text()
    assert hub.requests == []


def test_r102_simultaneous_downloads_leave_one_complete_folder(
    hub: FakeHub, client: Client, tmp_path: Path, destination: Path
) -> None:
    sha = hub.add("dataset", NAME, FILES)
    with Client(hub, tmp_path / "home") as other:
        other.refusal(destination, name="owner/nothing")  # so that both have imported the client
        hub.fail(r"/resolve/.*/train.safetensors", delay=0.7)
        for process in (client, other):
            process.ask(destination)
        while hub.downloads("train.safetensors") < 2:
            assert not destination.exists()
            time.sleep(0.02)
        assert [process.answer() for process in (client, other)] == [{"sha": sha}, {"sha": sha}]
    assert (destination / "train.safetensors").read_bytes() == TRAIN
    assert [path.name for path in destination.parent.iterdir()] == ["tokens"]


def test_existing_folder_is_not_overwritten(hub: FakeHub, client: Client, destination: Path) -> None:
    destination.mkdir(parents=True)
    (destination / "train.safetensors").write_bytes(b"mine")
    client.ask(destination)
    assert client.answer()["refusal"].startswith(f"{destination}: exists already")
    assert (destination / "train.safetensors").read_bytes() == b"mine"


def test_tokenizer_is_downloaded_from_a_model_repository(hub: FakeHub, client: Client, tmp_path: Path) -> None:
    content = byte_vocabulary().content
    hub.add("model", "owner/gpt2", {"tokenizer.json": content, "model.safetensors": b"big"})
    file = tmp_path / "run" / "tokenizer.json"
    client.ask(file, name="owner/gpt2", kind="tokenizer")
    assert client.answer() == {}
    assert file.read_bytes() == content
    assert list(file.parent.iterdir()) == [file]
    assert hub.downloads("model.safetensors") == 0


def test_a_tokenizer_that_cannot_be_read_is_not_kept(hub: FakeHub, client: Client, tmp_path: Path) -> None:
    """So that it is downloaded again once it has been mended."""
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12\n"
    hub.add("model", "owner/gpt2", {"tokenizer.json": pointer})
    file = tmp_path / "run" / "tokenizer.json"
    file.parent.mkdir()
    sentence = client.refusal(file, name="owner/gpt2", kind="tokenizer")
    assert not file.exists()
    assert sentence.startswith("tokenizer owner/gpt2: its tokenizer.json is none that tokenizers can read (")
    assert "it was not kept; choose another repository, or start again when it has been mended there" in sentence
    hub.add("model", "owner/gpt2", {"tokenizer.json": byte_vocabulary().content})
    client.ask(file, name="owner/gpt2", kind="tokenizer")
    assert client.answer() == {}
    assert file.read_bytes() == byte_vocabulary().content


def test_model_repository_without_tokenizer_json_is_refused(hub: FakeHub, client: Client, tmp_path: Path) -> None:
    hub.add("model", "owner/gpt2", {"vocab.json": b"{}"})
    (tmp_path / "run").mkdir()
    sentence = client.refusal(tmp_path / "run" / "tokenizer.json", name="owner/gpt2", kind="tokenizer")
    assert "tokenizer owner/gpt2: the repository has no tokenizer.json" in sentence


def test_folder_that_was_not_downloaded_has_no_revision(tmp_path: Path) -> None:
    assert recorded_revision(tmp_path) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_damaged_record_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "download.json").write_text(text)
    with pytest.raises(UserError, match=r"download\.json: not a record of a download"):
        recorded_revision(tmp_path)


def test_importing_the_module_does_not_import_the_client() -> None:
    program = "import sys, training.hub.hub_client; sys.exit('huggingface_hub' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[1], check=True)
