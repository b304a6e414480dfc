"""The real client uploads to a stand-in for the Hub, in a process whose waits are 500 times shorter."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest
from conftest import REPOSITORY
from fake_hub import READ_TOKEN, TOKEN, FakeHub

MODEL = "tester/model"
WEIGHTS = os.urandom(300_000)
CARD = "---\nlibrary_name: transformers\n---\n# A model\n"
FILES = {"model.safetensors": WEIGHTS, "README.md": CARD.encode(), "config.json": b"{}", "runs/a/x.tfevents": b"\0\1"}
PROGRAM = """
import json, os, sys
from pathlib import Path
from impatient import hurry
hurry()
from training.errors import RunError, UserError
from training.hub.hub_access import check_access
from training.hub.hub_upload import Destination, files_of, upload_files

for line in sys.stdin:
    wish = json.loads(line)
    os.environ["HF_TOKEN"] = wish["token"]
    said = []
    try:
        if "check" in wish:
            answer = {"checked": check_access(wish["check"], "--push-to-hub", wish.get("licence"))}
        else:
            to, stale = Destination(**wish["to"]), wish.get("stale", ())
            answer = {"sha": upload_files(files_of(Path(wish["folder"])), to, "A title", said.append, stale)}
    except (RunError, UserError) as error:
        answer = {"refusal": str(error), "kind": type(error).__name__}
    print(json.dumps(answer | {"said": said}), flush=True)
"""


class Client:
    """A process that has imported training.hub.hub_upload under the given environment, and uploads on request."""

    def __init__(self, hub: FakeHub, home: Path, **environment: str) -> None:
        home.mkdir()
        self.errors = home / "stderr"
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM],
                cwd=REPOSITORY,
                env=hub.environment(home, **{"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests'}", **environment}),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.process.communicate()

    def ask(self, token: str = TOKEN, **wish: Any) -> dict[str, Any]:
        """What comes of a wish; nothing of the client's own must reach the user, least of all the token."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"token": token, **wish}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert self.errors.read_text() == ""
        assert not token.strip() or token.strip() not in line
        return dict(json.loads(line))

    def upload(self, folder: Path, repository: str = MODEL, token: str = TOKEN, **more: Any) -> dict[str, Any]:
        stale = {"stale": more.pop("stale")} if "stale" in more else {}
        return self.ask(token, folder=str(folder), to={"repository": repository, **more}, **stale)

    def refusal(self, folder: Path, **more: Any) -> str:
        """The one sentence of an upload that fails; the folder is as it was."""
        answer = self.upload(folder, **more)
        assert answer["kind"] == "RunError"
        assert "\n" not in answer["refusal"]
        assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == FILES.keys()
        return str(answer["refusal"])


@pytest.fixture(scope="module", params=["lfs", "xet"])
def module_hub(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHub]:
    xet = tmp_path_factory.mktemp("xet") if request.param == "xet" else None
    with FakeHub(xet, organisations={"lab": "write", "museum": "read"}) as hub:
        yield hub


@pytest.fixture(scope="module")
def client(module_hub: FakeHub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with Client(module_hub, tmp_path_factory.mktemp("client") / "home") as client:
        yield client


@pytest.fixture
def hub(module_hub: FakeHub) -> FakeHub:
    module_hub.reset()
    return module_hub


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "folder")


def write(folder: Path, **more: bytes) -> Path:
    for name, content in {**FILES, **more}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def test_folder_is_one_commit_in_a_private_repository_and_comes_back_whole(
    hub: FakeHub, client: Client, folder: Path
) -> None:
    """R87: one create, one commit; R86: with the token of HF_TOKEN."""
    answer = client.upload(folder)
    assert hub.repositories["model", MODEL].private
    assert hub.repositories["model", MODEL].refs["main"] == answer["sha"]
    assert hub.titles("model", MODEL) == ["added", "A title"]
    assert {name: hub.read("model", MODEL, name) for name in hub.files("model", MODEL)} == FILES
    assert hub.count("POST", "/api/repos/create") == hub.count("POST", "/commit/") == 1
    sent = {r.authorization for r in hub.requests if not r.path.startswith("/_lfs/") and "xet" not in r.path}
    assert sent == {f"Bearer {TOKEN}"}
    page = f"{hub.url}/{MODEL}"
    assert answer["said"] == [
        f"uploading 4 files (0.3 MB) to {page}",
        f"{page}: uploaded, commit {answer['sha']}",
    ]


def test_an_unchanged_folder_makes_no_commit_and_a_changed_one_another(
    hub: FakeHub, client: Client, folder: Path
) -> None:
    """R87: a second upload succeeds; R88: and sends only what has changed."""
    first = client.upload(folder)["sha"]
    again = client.upload(folder)
    assert again["sha"] == first
    assert again["said"][-1] == f"{hub.url}/{MODEL}: had all of it already, commit {first}"
    (folder / "config.json").write_bytes(b'{"changed": true}')
    assert client.upload(folder)["sha"] != first
    assert len(hub.titles("model", MODEL)) == 3
    last = hub.requests[-1].body + next(r.body for r in reversed(hub.requests) if "/commit/" in r.path)
    assert b"config.json" in last
    assert b"model.safetensors" not in last
    assert hub.count("PUT", "/_lfs/") == (0 if hub.xet else 2)


def test_r87_an_existing_repository_keeps_its_visibility(hub: FakeHub, client: Client, folder: Path) -> None:
    hub.add("model", MODEL, {"LICENSE": b"mine", "old.json": b"{}"})
    answer = client.upload(folder, stale=["old.json", "other.json"])
    assert not hub.repositories["model", MODEL].private
    assert answer["said"][1] == f"{hub.url}/{MODEL}: exists already and stays public"
    assert hub.files("model", MODEL) == sorted([*FILES, "LICENSE"]), "only what is stale goes"
    hub.add("model", "tester/secret", {}, private=True)
    client.upload(folder, "tester/secret", private=False)
    assert hub.repositories["model", "tester/secret"].private


def test_a_branch_holds_the_folder_and_nothing_else(hub: FakeHub, client: Client, folder: Path) -> None:
    hub.add("model", MODEL, {"LICENSE": b"mine"})
    client.upload(folder, branch="state", stale=None)
    assert hub.files("model", MODEL, "state") == sorted(FILES)
    (folder / "config.json").rename(folder / "new.json")
    client.upload(folder, branch="state", stale=None)
    assert hub.files("model", MODEL, "state") == sorted({*FILES, "new.json"} - {"config.json"})
    assert hub.files("model", MODEL) == ["LICENSE"]


def test_a_dataset_goes_to_a_dataset_repository(hub: FakeHub, client: Client, folder: Path) -> None:
    sha = client.upload(folder, "lab/tokens", kind="dataset", private=False)["sha"]
    assert hub.repositories["dataset", "lab/tokens"].refs["main"] == sha
    assert not hub.repositories["dataset", "lab/tokens"].private


@pytest.mark.parametrize(
    ("path", "status", "headers"),
    [
        (r"/api/models/tester/model$", 503, {}),
        ("/api/repos/create", 500, {}),
        ("/api/validate-yaml", 502, {}),
        ("/preupload/", 429, {"Retry-After": "7"}),
        ("/commit/", 429, {"RateLimit": '"api";r=0;t=55'}),
        ("/commit/", 500, {}),
        ("/commit/", 504, {}),
        ("/commit/", -1, {}),
        ("/api/repos/create", -1, {}),
    ],
)
def test_what_can_pass_is_tried_again(
    hub: FakeHub, client: Client, folder: Path, path: str, status: int, headers: dict[str, str]
) -> None:
    """429, 5xx and dropped connections, twice at each step: in the end there is one repository and one commit."""
    hub.fail(path, status, times=2, headers=headers)
    answer = client.upload(folder)
    assert hub.titles("model", MODEL) == ["added", "A title"]
    assert {name: hub.read("model", MODEL, name) for name in hub.files("model", MODEL)} == FILES
    waits = [line for line in answer["said"] if "trying again in" in line]
    assert len(waits) == (0 if path == "/preupload/" else 2), "the client repeats that one itself"
    if "RateLimit" in headers:
        assert waits[0] == (
            f"{MODEL}: the Hub gets too many requests from here (HTTP 429: injected); wait some minutes; "
            "trying again in 55 s"
        )


def test_r88_files_that_arrived_are_not_sent_again(hub: FakeHub, client: Client, folder: Path) -> None:
    """The commit is lost on its way there, once: the bytes are kept."""
    hub.fail("/commit/", 503, times=1)
    client.upload(folder)
    assert hub.count("POST", "/commit/") == 2
    if hub.xet is None:
        assert hub.count("PUT", "/_lfs/") == 2
    else:
        stored = sum(path.stat().st_size for path in hub.xet.rglob("*") if "xorbs/xorbs" in str(path))
        assert stored < 4 * len(WEIGHTS)


def test_a_commit_whose_answer_is_lost_is_not_made_twice(hub: FakeHub, client: Client, folder: Path) -> None:
    hub.add("model", MODEL, {"old.json": b"{}"})
    hub.fail("/commit/", times=1, lost=True)
    sha = client.upload(folder, stale=["old.json"])["sha"]
    assert hub.repositories["model", MODEL].refs["main"] == sha
    assert hub.titles("model", MODEL) == ["added", "A title"]
    assert hub.count("POST", "/commit/") == 1


@pytest.mark.parametrize(
    ("path", "status", "expected"),
    [
        ("/api/repos/create", 403, "the token may not write there (HTTP 403: injected)"),
        ("/preupload/", 401, "the Hub does not know the token (HTTP 401: injected); correct HF_TOKEN"),
        ("/commit/", 403, "the token may not write there (HTTP 403: injected)"),
        ("/commit/", 404, "the Hub has no such repository, or hides it from this token (HTTP 404: injected)"),
        ("/commit/", 409, "somebody else changed the repository at the same time (HTTP 409: injected)"),
        ("/commit/", 412, "somebody else changed the repository at the same time (HTTP 412: injected)"),
        ("/commit/", 413, "it is more than the Hub takes at once (HTTP 413: injected)"),
        ("/commit/", 400, "the Hub refuses it (HTTP 400: injected)"),
        ("/api/validate-yaml", 400, "Invalid metadata in README.md."),
    ],
)
def test_what_cannot_pass_is_one_sentence_at_once(
    hub: FakeHub, client: Client, folder: Path, path: str, status: int, expected: str
) -> None:
    hub.fail(path, status)
    assert client.refusal(folder).startswith(f"{MODEL}: {expected}")
    assert sum(path in request.path for request in hub.requests) == 1


@pytest.mark.parametrize(
    ("status", "expected"),
    [(401, "the Hub does not know the token (HTTP 401)"), (403, "the token may not write there")],
)
def test_a_refusal_to_xet_is_one_sentence_at_once(
    hub: FakeHub, client: Client, folder: Path, status: int, expected: str
) -> None:
    """Its part of the client has exceptions of its own."""
    if hub.xet is None:
        pytest.skip("by git-lfs, nobody asks for a token of Xet's")
    hub.fail("/xet-write-token/", status)
    assert client.refusal(folder).startswith(f"{MODEL}: {expected}")
    assert hub.count("GET", "/xet-write-token/") == 1


def test_what_does_not_pass_is_given_up(hub: FakeHub, client: Client, folder: Path) -> None:
    """R86, R88: the remote shows nothing then; the next call succeeds."""
    hub.fail("/commit/", 500)
    assert "the Hub is in trouble (HTTP 500: injected)" in client.refusal(folder)
    assert hub.count("POST", "/commit/") == 5
    assert hub.files("model", MODEL) == []
    hub.faults.clear()
    client.upload(folder)
    assert hub.files("model", MODEL) == sorted(FILES)


def test_409_at_creation_without_an_address_is_a_sentence(hub: FakeHub, client: Client, folder: Path) -> None:
    hub.fail("/api/repos/create", 409)
    assert "the upload to http://127.0.0.1" in client.refusal(folder)


def test_the_token_decides(hub: FakeHub, client: Client, folder: Path) -> None:
    """R84: a line end is stripped; what the Hub does not know, or may only read, fails."""
    client.upload(folder, token=f"{TOKEN}\n")
    assert "the token may not write there (HTTP 403" in client.refusal(folder, token=READ_TOKEN, repository="tester/b")
    assert "the Hub does not know the token (HTTP 401" in client.refusal(
        folder, token="hf_other", repository="tester/b"
    )


@pytest.fixture(scope="module")
def plain_hub() -> Iterator[FakeHub]:
    """For what is the same with git-lfs and Xet, and what only git-lfs has."""
    with FakeHub(organisations={"lab": "write", "museum": "read"}) as hub:
        yield hub


@pytest.fixture(scope="module")
def plain_client(plain_hub: FakeHub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with Client(plain_hub, tmp_path_factory.mktemp("plain") / "home") as client:
        yield client


def test_r88_a_file_that_fails_is_sent_again(plain_hub: FakeHub, plain_client: Client, folder: Path) -> None:
    """The second file fails twice with 503, then arrives; the first is sent once."""
    plain_hub.reset()
    sha256 = hashlib.sha256(WEIGHTS).hexdigest()
    plain_hub.fail(f"/_lfs/{sha256}", 503, times=2, method="PUT")
    plain_client.upload(folder)
    assert plain_hub.count("PUT", f"/_lfs/{sha256}") == 3
    assert plain_hub.count("PUT", "/_lfs/") == 4
    assert plain_hub.files("model", MODEL) == sorted(FILES)


def test_r88_a_file_that_fails_for_good_is_named_and_nothing_is_published(
    plain_hub: FakeHub, plain_client: Client, folder: Path
) -> None:
    """Not its config without its weights either; the next call sends the missing one alone."""
    plain_hub.reset()
    sha256 = hashlib.sha256(WEIGHTS).hexdigest()
    plain_hub.fail(f"/_lfs/{sha256}", 403)
    sentence = plain_client.refusal(folder)
    assert sentence.startswith(f"{MODEL}: model.safetensors could not be sent: the token may not write there (HTTP 403")
    assert plain_hub.files("model", MODEL) == []
    plain_hub.faults.clear()
    plain_hub.requests.clear()
    plain_client.upload(folder)
    assert plain_hub.count("PUT", "/_lfs/") == plain_hub.count("PUT", f"/_lfs/{sha256}") == 1
    assert plain_hub.files("model", MODEL) == sorted(FILES)


# Before


@pytest.mark.parametrize("repository", ["tester/model", "lab/model"])
def test_a_token_that_may_write_passes(plain_hub: FakeHub, plain_client: Client, repository: str) -> None:
    plain_hub.reset()
    assert plain_client.ask(check=repository) == {"checked": None, "said": []}
    assert [request.path for request in plain_hub.requests] == ["/api/whoami-v2"], "and nothing is made there"


def test_a_licence_that_the_hub_does_not_know_is_refused_before(plain_hub: FakeHub, plain_client: Client) -> None:
    """With the upload it would be refused too, when everything is done."""
    plain_hub.reset()
    assert plain_client.ask(check=MODEL, licence="mit") == {"checked": None, "said": []}
    refusal = plain_client.ask(check=MODEL, licence="apache")["refusal"]
    assert refusal.startswith("--push-to-hub: tester/model: the Hub knows no licence 'apache'; https://")


@pytest.mark.parametrize(
    ("token", "repository", "expected"),
    [
        ("", "tester/model", "there is no token to upload to tester/model with; set HF_TOKEN to one that may write"),
        (" \n", "tester/model", "there is no token to upload to tester/model with; set HF_TOKEN to one that may write"),
        ("hf_other", "tester/model", "tester/model: HF_TOKEN: the Hub does not know the token (HTTP 401"),
        (READ_TOKEN, "tester/model", "tester/model: the token in HF_TOKEN may only read; make one that may at https"),
        (TOKEN, "else/model", "the token in HF_TOKEN is tester's, who may not write to else, but to: lab, tester"),
        (TOKEN, "museum/model", "museum/model: tester may only read in the organisation museum; ask its"),
    ],
)
def test_r84_what_would_fail_at_the_end_is_refused_before(
    plain_hub: FakeHub, plain_client: Client, token: str, repository: str, expected: str
) -> None:
    plain_hub.reset()
    answer = plain_client.ask(token, check=repository)
    assert answer["kind"] == "UserError"
    assert answer["refusal"].startswith("--push-to-hub: ")
    assert expected in answer["refusal"]


@pytest.mark.parametrize(
    ("entity", "permissions", "passes"),
    [
        ("tester", ["repo.content.read", "repo.write"], True),
        ("tester", ["repo.content.read"], False),
        ("tester/model", ["repo.write"], True),
        ("tester/other", ["repo.write"], False),
        ("lab", ["repo.write"], False),
    ],
)
def test_a_fine_grained_token_must_have_been_given_the_place(
    plain_hub: FakeHub, plain_client: Client, entity: str, permissions: list[str], passes: bool
) -> None:
    plain_hub.reset()
    scope = {"entity": {"type": "user", "name": entity}, "permissions": permissions}
    plain_hub.tokens["hf_fine"] = {"role": "fineGrained", "fineGrained": {"scoped": [scope]}}
    answer = plain_client.ask("hf_fine", check="tester/model")
    assert ("checked" in answer) is passes
    if not passes:
        assert "the fine-grained token in HF_TOKEN has no write permission for tester;" in answer["refusal"]


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ({"status": 429}, "the Hub gets too many requests from here (HTTP 429: injected)"),
        ({"status": 503}, "the Hub is in trouble (HTTP 503: injected)"),
        ({"status": -1}, "the upload to http://127.0.0.1"),
    ],
)
def test_a_hub_in_trouble_is_told_at_once(
    plain_hub: FakeHub, plain_client: Client, fault: dict[str, Any], expected: str
) -> None:
    plain_hub.reset()
    plain_hub.fail("/api/whoami-v2", **fault)
    answer = plain_client.ask(check="tester/model")
    assert expected in answer["refusal"]
    assert len(plain_hub.requests) == 1


def test_a_hub_that_cannot_be_reached_is_told_at_once(plain_hub: FakeHub, tmp_path: Path) -> None:
    plain_hub.reset()
    with Client(plain_hub, tmp_path / "home", HF_ENDPOINT="http://127.0.0.1:9") as client:
        assert "the upload to http://127.0.0.1:9 failed (Connect" in client.ask(check="tester/model")["refusal"]
    with Client(plain_hub, tmp_path / "offline", HF_HUB_OFFLINE="1") as client:
        assert "HF_HUB_OFFLINE forbids to reach the Hub" in client.ask(check="tester/model")["refusal"]
    assert plain_hub.requests == []
