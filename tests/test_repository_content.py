"""What an upload would take from its owner: on the Hub, on the branch of a state, and in the folder of a push."""

from pathlib import Path

import pytest
from fake_hub import FakeHub
from hub_process import MODEL, Client

from training.errors import UserError
from training.hub.card_text import listed_files, page, with_files
from training.hub.repository_content import refuse_what_was_added

FILES = {"config.json": b"{}", "merges.txt": b"ours", "model.safetensors": b"weights"}
OWNERS = {"adapter_model.safetensors": b"", "pytorch_model_notes/readme.txt": b"", "mine.txt": b"", "vocab.json": b""}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What a push has written."""
    (tmp_path / "hub" / "runs" / "run").mkdir(parents=True)
    for name, content in {**FILES, "runs/run/events.out.tfevents.0.isobatch": b"1"}.items():
        (tmp_path / "hub" / name).write_bytes(content)
    (tmp_path / "hub" / "README.md").write_text(our_page(tmp_path / "hub"))
    return tmp_path / "hub"


def our_page(folder: Path) -> str:
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return with_files(page("license: mit", "# A model"), files)


def found(client: Client, look: str = "content", branch: str = "main", own: str | None = None) -> str | None:
    answer = client.ask(look=look, to={"repository": MODEL, "branch": branch}, own=own)
    text: str | None = answer["found"]
    return text


def test_a_page_lists_what_came_with_it_and_stays_ours(folder: Path) -> None:
    listed = listed_files((folder / "README.md").read_bytes())
    assert listed is not None
    assert sorted(listed) == sorted([*FILES, "runs/run/events.out.tfevents.0.isobatch"])
    assert listed["config.json"] == [
        "9e26dfeeb6e641a33dae4961196235bdb965b21b",  # git hash-object
        "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a",  # sha256sum
    ]
    assert listed_files(page("license: mit", "# Older").encode()) is None


def test_files_on_the_hub_that_the_page_does_not_list_are_their_owners(
    hub: FakeHub, client: Client, folder: Path
) -> None:
    """Those that an upload would replace or remove; others stay there anyway."""
    ours = {**FILES, "README.md": (folder / "README.md").read_bytes()}
    assert found(client) is None, "there is no repository"
    hub.add("model", MODEL, ours)
    assert found(client) is None
    hub.add("model", MODEL, {**ours, **OWNERS, "config.json": b"{ }"})
    assert found(client) == (
        "holds files that were not uploaded from here, or were changed since (adapter_model.safetensors, config.json, "
        "vocab.json), which an upload would replace or remove"
    )
    hub.fail(f"/api/models/{MODEL}/revision/main", 503, times=1)
    answer = client.ask(look="content", to={"repository": MODEL})
    assert "vocab.json" in answer["found"]
    assert len(answer["said"]) == 1, "what passes is waited for"


def test_of_an_older_page_without_a_list_what_we_write_is_ours(hub: FakeHub, client: Client) -> None:
    old = page("license: mit", "# Older").encode()
    hub.add("model", MODEL, {"README.md": old, "config.json": b"{}", "tokenizer.json": b"{}", "mine.txt": b""})
    assert found(client) is None
    hub.add("model", MODEL, {"README.md": old, **OWNERS})
    assert "changed since (adapter_model.safetensors, vocab.json), which" in str(found(client))


def test_an_empty_page_is_not_ours(hub: FakeHub, client: Client) -> None:
    hub.add("model", MODEL, {"README.md": b"", "model-00001-of-00002.safetensors": b""})
    assert (
        found(client) == "its README.md was not written from here, or was edited since, and an upload would replace it"
    )
    assert found(client, own="# Mine") is not None
    hub.add("model", MODEL, {"README.md": b"# Mine"})
    assert found(client, own="# Mine") is None


def test_a_branch_of_somebody_elses_is_no_run_s_state(hub: FakeHub, client: Client) -> None:
    """One that was made for a state which never came is as main is, and may be taken."""
    hub.add("model", MODEL, {"mine.txt": b""})
    assert found(client, "state", "training-state") is None
    repository = hub.repositories["model", MODEL]
    repository.refs["training-state"] = repository.refs["main"]
    assert found(client, "state", "training-state") is None
    state = {"config.yaml": b"", "metrics.jsonl": b"", "step_00000004/model.safetensors": b""}
    hub.add("model", MODEL, state, ref="training-state")
    assert found(client, "state", "training-state") is None
    hub.add("model", MODEL, {**state, "data/x.bin": b"", "mine.txt": b""}, ref="training-state")
    assert found(client, "state", "training-state") == (
        "its branch training-state holds files of no run's state (data/x.bin, mine.txt), which an upload would remove"
    )


def test_what_was_added_to_the_folder_of_a_push_or_changed_there_is_refused(folder: Path) -> None:
    refuse_what_was_added(folder, "the command")
    (folder / "config.json").write_bytes(b"{ }")
    (folder / "LICENSE").touch()
    (folder / "link").symlink_to("nowhere")
    with pytest.raises(
        UserError, match=r"a push wrote it \(LICENSE, config.json, link\), .* or go on with: the command"
    ):
        refuse_what_was_added(folder, "the command")


def test_a_page_in_the_folder_of_a_push_that_was_edited_or_is_none_is_refused(folder: Path) -> None:
    content = (folder / "README.md").read_text()
    (folder / "README.md").write_text(content + "My words")
    with pytest.raises(UserError, match=r"README\.md: was edited since it was written"):
        refuse_what_was_added(folder, "the command")
    (folder / "README.md").unlink()
    (folder / "merges.txt").unlink()
    refuse_what_was_added(folder, "the command")
    (folder / "README.md").mkdir()
    (folder / "README.md" / "notes.txt").touch()
    with pytest.raises(UserError, match=r"a push wrote it \(README.md/notes.txt\)"):
        refuse_what_was_added(folder, "the command")
