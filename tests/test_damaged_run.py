"""A run's folder in which something is not what the run has written: refused in a sentence, before anything changes."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_run_folder import names_in, record, save, start

from training import run_folder
from training.checkpoint import point
from training.config import RunConfig, config_mapping
from training.errors import UserError
from training.metrics_file import read_metrics
from training.run_folder import CONFIG, LOCK, METRICS, begin, held, open_run, saved_overrides


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a run that has none yet."""
    path = tmp_path / "run"
    path.mkdir()
    return path


def files_of(folder: Path) -> dict[str, bytes | str]:
    """All that is in a folder: of a file its content, of anything else its kind."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else str(path.lstat().st_mode)
        for path in folder.rglob("*")
    }


def two_checkpoints(folder: Path) -> RunConfig:
    """A run that has saved steps 4 and 8, which is the best; the files are those of other tests' checkpoints."""
    config = start(folder)
    shutil.copytree(save(folder, 4), folder / "step_00000008")
    change_state(folder / "step_00000008", step=8)
    point(folder, "best", "step_00000008")
    point(folder, "latest", "step_00000008")
    return config


def change_state(checkpoint: Path, **values: Any) -> None:
    """Edits a state and its manifest with it, as no crash could."""
    content = json.dumps(json.loads((checkpoint / "state.json").read_text()) | values).encode()
    (checkpoint / "state.json").write_bytes(content)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["state.json"] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("name", "make"),
    [
        *((name, os.mkfifo) for name in (*run_folder.WRITTEN, "step_00000008/superseded")),
        ("step_00000004/superseded", Path.mkdir),
        (METRICS, Path.mkdir),
        (METRICS, lambda path: path.symlink_to("/dev/zero")),
    ],
)
def test_what_is_no_file_in_a_files_place_is_refused_before_anything_changes(
    folder: Path, name: str, make: Callable[[Path], None]
) -> None:
    """A pipe would be waited at for ever, /dev/zero read for ever."""
    config = two_checkpoints(folder)
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    before = files_of(folder)
    with pytest.raises(UserError, match=f"^{folder / name}: is no regular file, and the run has one .*move it away$"):
        open_run(folder, config, "step_00000004", overwrite=False)
    assert files_of(folder) == before
    begin(folder, open_run(folder, config, None, overwrite=True))
    assert names_in(folder) == [CONFIG, METRICS]


def test_a_lock_that_is_a_pipe_is_not_waited_at(folder: Path) -> None:
    os.mkfifo(folder / LOCK)
    with pytest.raises(UserError, match=f"^{folder / LOCK}: is no regular file"), held(folder):
        pass


@pytest.mark.parametrize("values", [{"step": -5}, {"step": 100}, {"tokens": -1}, {"best_step": 10**300}])
def test_a_state_that_was_edited_is_refused_before_anything_changes(folder: Path, values: dict[str, int]) -> None:
    config = two_checkpoints(folder)
    change_state(folder / "step_00000008", **values)
    before = files_of(folder)
    for resume in ("latest", "auto", "best", "step_00000008"):
        with pytest.raises(UserError, match=f"^{folder / 'step_00000008' / 'state.json'}: "):
            open_run(folder, config, resume, overwrite=False)
    assert files_of(folder) == before
    assert open_run(folder, config, "step_00000004", overwrite=False).checkpoint == "step_00000004"


@pytest.mark.parametrize("overrides", [[1, None, {"a": 2}], "abc", {"a": 1}, None])
def test_overrides_that_are_none_are_refused(folder: Path, overrides: object) -> None:
    config = two_checkpoints(folder)
    saved = config_mapping(config)
    change_state(folder / "step_00000008", config={**saved, "overrides": overrides})
    assert saved_overrides(folder, "latest", ["checkpoint.keep=2"]) == ["checkpoint.keep=2"]
    with pytest.raises(UserError, match=rf"^{folder / 'step_00000008' / 'state.json'}[\s\S]*overrides"):
        open_run(folder, config, "latest", overwrite=False)


@pytest.mark.parametrize("target", ["keepme", "../elsewhere/step_00000008", "best", "../run", "/", "step_00000008/.."])
def test_a_best_that_leads_to_no_checkpoint_of_the_run(folder: Path, target: str) -> None:
    config = two_checkpoints(folder)
    for other in (folder / "keepme", folder.parent / "elsewhere" / "step_00000008"):
        shutil.copytree(folder / "step_00000008", other)
    (folder / "best").unlink()
    (folder / "best").symlink_to(target)
    problem = rf"^{folder / 'best'}: leads to .*, which is no checkpoint of this run; those there are: step_00000004, "
    with pytest.raises(UserError, match=problem):
        open_run(folder, config, "best", overwrite=False)


def test_a_best_that_is_found_however_it_leads_there(folder: Path) -> None:
    """An absolute link, or one that goes round; a copy in the link's place is named as what it is a copy of."""
    config = two_checkpoints(folder)
    for target in (folder / "step_00000008", Path("..", folder.name, "step_00000008")):
        (folder / "best").unlink()
        (folder / "best").symlink_to(target)
        assert open_run(folder, config, "best", overwrite=False).checkpoint == "step_00000008"
    (folder / "best").unlink()
    shutil.copytree(folder / "step_00000008", folder / "best")
    with pytest.raises(UserError, match=f"^{folder / 'best'}: is a copy of step_00000008 and no link to it; name that"):
        open_run(folder, config, "best", overwrite=False)


def test_a_record_that_could_not_be_read_at_the_end_is_refused_at_the_beginning(folder: Path) -> None:
    """Whatever is resumed; what lies behind the checkpoint goes anyway."""
    config = two_checkpoints(folder)
    record(folder, 3, 4, 5)
    with (folder / METRICS).open("a") as file:
        file.write('{"kind": "train", "step": 7}\n')
    before = files_of(folder)
    for resume in ("latest", "auto"):
        with pytest.raises(UserError, match=f"^{folder / METRICS}, line 4: tokens must be .*; remove or repair the"):
            open_run(folder, config, resume, overwrite=False)
    assert files_of(folder) == before
    begin(folder, open_run(folder, config, "step_00000004", overwrite=False))
    assert len(read_metrics(folder / METRICS).events) == 2
