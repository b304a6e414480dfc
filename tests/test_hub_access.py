"""What is refused before any work is done, because the upload would be refused at the end."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.monkeypatch import MonkeyPatch as Patch
from fake_hub import READ_TOKEN, TOKEN, FakeHub
from hub_process import MODEL, Client


@pytest.fixture(scope="module")
def module_hub() -> Iterator[FakeHub]:
    with FakeHub(organisations={"lab": "write", "museum": "read"}) as hub:
        yield hub


@pytest.mark.parametrize("repository", ["tester/model", "lab/model"])
def test_a_token_that_may_write_passes(hub: FakeHub, client: Client, repository: str) -> None:
    assert client.ask(check=repository) == {"checked": None, "said": []}
    assert [request.path for request in hub.requests] == ["/api/whoami-v2"], "and nothing is made there"


def test_a_licence_that_the_hub_does_not_know_is_refused_before(hub: FakeHub, client: Client) -> None:
    """With the upload it would be refused too, when everything is done."""
    assert client.ask(check=MODEL, licence="mit") == {"checked": None, "said": []}
    refusal = client.ask(check=MODEL, licence="apache")["refusal"]
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
def test_what_would_fail_at_the_end_is_refused_before(
    hub: FakeHub, client: Client, token: str, repository: str, expected: str
) -> None:
    answer = client.ask(token, check=repository)
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
    hub: FakeHub, client: Client, entity: str, permissions: list[str], passes: bool
) -> None:
    scope = {"entity": {"type": "user", "name": entity}, "permissions": permissions}
    hub.tokens["hf_fine"] = {"role": "fineGrained", "fineGrained": {"scoped": [scope]}}
    answer = client.ask("hf_fine", check="tester/model")
    assert ("checked" in answer) is passes
    if not passes:
        assert "the fine-grained token in HF_TOKEN has no write permission for tester;" in answer["refusal"]


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ({"status": 503}, "the Hub is in trouble (HTTP 503: injected)"),
        ({"status": 429}, "the Hub gets too many requests from here (HTTP 429: injected)"),
        ({"status": -1}, "the upload to http://127.0.0.1"),
    ],
)
def test_a_hub_in_trouble_is_asked_again_and_is_no_mistake_of_the_user_s(
    hub: FakeHub, client: Client, fault: dict[str, Any], expected: str
) -> None:
    hub.fail("/api/whoami-v2", **fault, times=1)
    answer = client.ask(check="tester/model")
    assert answer["checked"] is None
    [line] = answer["said"]
    assert expected in line
    assert line.endswith("; trying again in 2 s")
    assert "try again later" not in line, "it is tried again already"
    hub.requests.clear()
    hub.fail("/api/whoami-v2", **fault)
    answer = client.ask(check="tester/model")
    assert expected in answer["refusal"]
    assert (answer["kind"], len(hub.requests)) == ("RunError", 5)


def test_an_answer_of_another_form_is_told_in_a_sentence(hub: FakeHub, client: Client, monkeypatch: Patch) -> None:
    monkeypatch.setitem(hub.tokens, TOKEN, "no mapping")
    answer = client.ask(check="tester/model")
    assert answer["kind"] == "RunError"
    assert "the Hub's answer has not the form of one (" in answer["refusal"]
    assert len(hub.requests) == 1


def test_a_hub_that_does_not_answer_about_a_licence_is_not_waited_for(hub: FakeHub, client: Client) -> None:
    hub.fail("/api/validate-yaml", delay=3.0)
    began = time.monotonic()
    assert "Timeout" in client.ask(check=MODEL, licence="mit", patience=0.5)["refusal"]
    assert time.monotonic() - began < 2.5


def test_offline_is_told_at_once(hub: FakeHub, tmp_path: Path) -> None:
    with Client(hub, tmp_path / "offline", HF_HUB_OFFLINE="1") as client:
        assert "HF_HUB_OFFLINE forbids to reach the Hub" in client.ask(check="tester/model")["refusal"]
    assert hub.requests == []
