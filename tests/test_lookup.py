"""What a user may call a run and a checkpoint, and what happens when there is none of that name."""

import shutil
from pathlib import Path

import pytest
from small_checkpoints import save

from training import lock
from training.checkpoint import point
from training.errors import UserError
from training.lookup import find_model, find_run, find_run_or_beginning, find_runs


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """A folder of runs: `tiny` with three checkpoints, the second of them the best, and `begun` with none."""
    folder = tmp_path / "checkpoints"
    for step in (4, 8, 12):
        save(folder / "tiny", step)
    point(folder / "tiny", "best", "step_00000008")
    point(folder / "tiny", "latest", "step_00000012")
    (folder / "begun").mkdir()
    (folder / "begun" / "metrics.jsonl").touch()
    (folder / "README.md").write_text("no run")
    return folder


@pytest.mark.parametrize(
    ("name", "step"),
    [("tiny", 12), ("tiny/", 12), ("tiny/latest", 12), ("tiny/best", 8), ("tiny/step_00000004", 4)],
)
def test_a_checkpoint_by_name_and_by_path(
    checkpoints: Path, name: str, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoints / "tiny" / f"step_{step:08d}"
    assert find_model(name, checkpoints).path == folder
    nowhere = checkpoints.parent / "nowhere"
    assert find_model(f"{checkpoints}/{name}", nowhere).path == folder
    monkeypatch.chdir(checkpoints)
    assert find_model(name, nowhere).path.resolve() == folder
    assert find_model(f"./{name}", nowhere).path.resolve() == folder


def test_a_run_that_has_recorded_nothing_yet(checkpoints: Path) -> None:
    """It is one while a process holds it."""
    (checkpoints / "new").mkdir()
    with lock.held(checkpoints / "new" / lock.RUN_LOCK):
        assert find_run_or_beginning("new", checkpoints) == checkpoints / "new"
        assert find_run_or_beginning("begun", checkpoints) == checkpoints / "begun"
        with pytest.raises(UserError, match="there is no such run"):
            find_run("new", checkpoints)
    with pytest.raises(UserError, match="'new': there is no such run"):
        find_run_or_beginning("new", checkpoints)


def test_a_run_by_name_and_by_path(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = checkpoints.parent / "nowhere"
    for name in ("tiny", "begun"):
        assert find_run(name, checkpoints) == checkpoints / name
        assert find_run(str(checkpoints / name), nowhere) == checkpoints / name
    monkeypatch.chdir(checkpoints / "tiny")
    assert find_run(".", nowhere).resolve() == checkpoints / "tiny"


def test_a_name_comes_before_a_path_unless_it_says_that_it_is_one(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = checkpoints.parent / "here"
    save(here / "tiny", 1)
    monkeypatch.chdir(here)
    assert find_run("tiny", checkpoints) == checkpoints / "tiny"
    assert find_run("./tiny", checkpoints).resolve() == here / "tiny"
    assert find_model("./tiny", checkpoints).path.name == "step_00000001"


def test_a_model_needs_no_optimizer_state(checkpoints: Path) -> None:
    (checkpoints / "tiny" / "step_00000012" / "optimizer.safetensors").unlink()
    found = find_model("tiny", checkpoints)
    assert (found.path.name, found.passed_over) == ("step_00000012", [])


def test_a_checkpoint_outside_of_any_run(checkpoints: Path) -> None:
    copy = shutil.copytree(checkpoints / "tiny" / "step_00000004", checkpoints.parent / "elsewhere" / "my model")
    assert find_model(str(copy), checkpoints).path == copy


def test_a_damaged_latest_is_passed_over_and_one_asked_for_is_refused(checkpoints: Path) -> None:
    (checkpoints / "tiny" / "step_00000012" / "model.safetensors").write_bytes(b"")
    found = find_model("tiny", checkpoints)
    assert found.path.name == "step_00000008"
    assert [name for name, _ in found.passed_over] == ["step_00000012"]
    with pytest.raises(UserError, match=r"step_00000012: model\.safetensors has 0 bytes"):
        find_model("tiny/step_00000012", checkpoints)


@pytest.mark.parametrize("name", ["tyni", "", "tyni/best", "README.md", "README.md/best", "/tyni"])
def test_what_is_not_there_is_named_with_what_is(checkpoints: Path, name: str) -> None:
    with pytest.raises(UserError, match=rf"'{name}': there is no such run; .*checkpoints: begun, tiny$"):
        find_run(name, checkpoints)
    with pytest.raises(UserError, match=rf"'{name}': there is no such run or checkpoint; .*: begun, tiny$"):
        find_model(name, checkpoints)
    with pytest.raises(UserError, match=r"nowhere: none$"):
        find_model(name, checkpoints.parent / "nowhere")


def test_a_run_without_such_a_checkpoint_lists_those_it_has(checkpoints: Path) -> None:
    with pytest.raises(UserError, match=r"no checkpoint 'step_5'; those there are: step_00000004, step_00000008"):
        find_model("tiny/step_5", checkpoints)
    with pytest.raises(UserError, match="begun: there is no complete checkpoint"):
        find_model("begun", checkpoints)


def test_several_runs_each_once_and_folders_of_runs(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b", "a"):
        (checkpoints / "study" / name).mkdir(parents=True)
        (checkpoints / "study" / name / "metrics.jsonl").touch()
    (checkpoints / "study" / "configs").mkdir()
    study = [checkpoints / "study" / name for name in ("a", "b")]
    assert find_runs(["tiny", "study", "study/b", str(checkpoints / "tiny")], checkpoints) == [
        checkpoints / "tiny",
        *study,
    ]
    assert find_runs(["study/b", "study"], checkpoints) == study[::-1]
    monkeypatch.chdir(checkpoints)
    assert [run.name for run in find_runs(["./study"], checkpoints.parent)] == ["a", "b"]
    for name in ("study/configs", "nowhere", "n" * 300):
        with pytest.raises(UserError, match="there is no such run"):
            find_runs(["tiny", name], checkpoints)
