"""Checkpoints on the disk: found by number, and verified."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from small_checkpoints import names_in, resumed_from_an_older_one, save

from training.checkpoint import point, retain, supersede
from training.checkpoint_files import (
    SUPERSEDED,
    checkpoint_name,
    find_checkpoint,
    list_checkpoints,
    number_of,
    problem_of,
)
from training.errors import UserError
from training.restore import load_model


def test_names_and_numbers() -> None:
    assert checkpoint_name(617) == "step_00000617"
    assert checkpoint_name(1_234_567_890) == "step_1234567890"
    assert [number_of(Path("run") / name) for name in ("step_00000617", "step_9", "step_1234567890")] == [
        617,
        9,
        1_234_567_890,
    ]


def test_a_superseded_checkpoint_is_passed_over_but_can_be_asked_for(tmp_path: Path) -> None:
    resumed_from_an_older_one(tmp_path)
    reason = "superseded: the run went on from an older checkpoint"
    found = find_checkpoint(tmp_path, "latest")
    assert found.path.name == os.readlink(tmp_path / "latest") == "step_00000004"
    assert found.passed_over == [("step_00000012", reason), ("step_00000008", reason)]
    assert find_checkpoint(tmp_path, "step_00000012").path.name == "step_00000012"
    assert problem_of(tmp_path / "step_00000012") is None, "it is whole"

    supersede(tmp_path, "step_00000012", [])
    assert not (tmp_path / "step_00000012" / SUPERSEDED).exists()
    assert find_checkpoint(tmp_path, "latest").path.name == os.readlink(tmp_path / "latest") == "step_00000012"


def test_an_incomplete_newer_folder_is_passed_over_and_named(tmp_path: Path) -> None:
    """R01: step_12 holds the weights alone, beside a good step_8."""
    good = save(tmp_path, 8)
    (tmp_path / "step_12").mkdir()
    shutil.copy(good / "model.safetensors", tmp_path / "step_12")
    found = find_checkpoint(tmp_path, "latest")
    assert found.path == good
    assert found.passed_over == [
        ("step_12", "optimizer.safetensors, state.json, manifest.json missing"),
    ]
    with pytest.raises(UserError, match=r"step_12: optimizer\.safetensors, .* missing; .*step_00000008"):
        find_checkpoint(tmp_path, "step_12")
    shutil.rmtree(good)
    remedy = "copy a whole one there from elsewhere .*, or train again with --overwrite$"
    with pytest.raises(UserError, match=rf"{tmp_path}: there is no complete checkpoint; step_12: .*missing; {remedy}"):
        find_checkpoint(tmp_path, "latest")
    with pytest.raises(UserError, match=rf"step_12: .*missing; {remedy}"):  # it does not offer itself
        find_checkpoint(tmp_path, "step_12")


@pytest.mark.parametrize(("name", "meant"), [("lastest", "latest"), ("bset", "best"), ("step_4", "step_00000004")])
def test_a_misspelt_checkpoint(tmp_path: Path, name: str, meant: str) -> None:
    save(tmp_path, 4)
    with pytest.raises(UserError) as caught:
        find_checkpoint(tmp_path, name)
    said = "" if name == "step_4" else f"did you mean {meant}? "
    assert str(caught.value) == f"{tmp_path}: there is no checkpoint {name!r}; {said}those there are: step_00000004"


def test_nothing_to_find(tmp_path: Path) -> None:
    for which in ("latest", "best", "step_00000001"):
        for run_folder in (tmp_path, tmp_path / "absent"):
            with pytest.raises(UserError, match=str(run_folder)):
                find_checkpoint(run_folder, which)


def test_names_are_compared_as_numbers(tmp_path: Path) -> None:
    """R07: steps that gain a digit, paddings of any width, and a folder that only looks like a step."""
    good = save(tmp_path, 1)
    for name in ("step_900", "step_1000", "step_0950", "step_final_notes"):
        shutil.copytree(good, tmp_path / name)
    shutil.rmtree(good)
    (tmp_path / "step_2000").write_text("a file")
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_900", "step_0950", "step_1000"]
    assert find_checkpoint(tmp_path, "latest").path.name == "step_1000"
    retain(tmp_path, keep=2)
    assert names_in(tmp_path) == {"step_0950", "step_1000", "step_final_notes", "step_2000"}


def test_best_is_the_pointers_target_and_must_be_good(tmp_path: Path) -> None:
    folder = save(tmp_path, 4)
    save(tmp_path, 8)
    point(tmp_path, "best", folder.name)
    assert find_checkpoint(tmp_path, "best").path == folder
    (folder / "state.json").write_text("{}")
    with pytest.raises(UserError, match=r"step_00000004: state\.json has 2 bytes.*step_00000008"):
        find_checkpoint(tmp_path, "best")
    shutil.rmtree(folder)
    with pytest.raises(UserError, match="step_00000004: there is no such checkpoint"):
        find_checkpoint(tmp_path, "best")


@pytest.mark.parametrize(
    "name", ["../other/step_00000004", "../other", "..", ".", "", "/", "step_4", ".step_00000004.partial"]
)
def test_a_name_cannot_leave_the_folder(tmp_path: Path, name: str) -> None:
    save(tmp_path / "other", 4)
    folder = save(tmp_path / "run", 4)
    shutil.copytree(folder, folder.with_name(".step_00000004.partial"))
    assert find_checkpoint(tmp_path / "run", "step_00000004").path == folder
    for which in (name, str(tmp_path / "other" / "step_00000004")):
        with pytest.raises(UserError, match=r"there is no checkpoint .* those there are: step_00000004"):
            find_checkpoint(tmp_path / "run", which)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip_one_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", [cut, empty, flip_one_bit, Path.unlink])
def test_damage_is_named(tmp_path: Path, name: str, damage: Callable[[Path], None]) -> None:
    save(tmp_path, 4)
    folder = save(tmp_path, 8)
    damage(folder / name)
    problem = problem_of(folder)
    assert problem is not None
    assert problem.startswith(name)
    found = find_checkpoint(tmp_path, "latest")
    assert (found.path.name, found.passed_over) == ("step_00000004", [(folder.name, problem)])
    with pytest.raises(UserError, match=name):
        find_checkpoint(tmp_path, folder.name)
    if name != "optimizer.safetensors":
        with pytest.raises(UserError, match=name):
            load_model(folder)
