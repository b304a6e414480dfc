"""The real client uploads to a stand-in for the Hub, in a process whose waits are 500 times shorter."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import READ_TOKEN, TOKEN, FakeHub
from hub_process import MODEL, Client

WEIGHTS = os.urandom(300_000)
CARD = "---\nlibrary_name: transformers\n---\n# A model\n"
FILES = {"model.safetensors": WEIGHTS, "README.md": CARD.encode(), "config.json": b"{}", "runs/a/x.tfevents": b"\0\1"}


@pytest.fixture(scope="module", params=["lfs", "xet"])
def module_hub(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHub]:
    xet = tmp_path_factory.mktemp("xet") if request.param == "xet" else None
    with FakeHub(xet, organisations={"lab": "write", "museum": "read"}) as hub:
        yield hub


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
        ("/commit/", 503, {"RateLimit": '"api";r=400;t=280'}),
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
    if status == 429 and waits:
        assert waits[0] == (
            f"{MODEL}: the Hub gets too many requests from here (HTTP 429: injected); trying again in 55 s"
        )
    if status == 503:
        assert waits[0].endswith("; trying again in 2 s"), "it may pass before the present five minutes are over"


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
    assert "tester/model: the Hub's answer has not the form of one (KeyError: 'url'); try" in client.refusal(folder)


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
