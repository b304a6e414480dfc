"""The room that a run's checkpoints need, worked out by hand."""

import dataclasses
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import Workplace
from small_checkpoints import save, state_at

from model.gpt import parameter_count
from training.config import RunConfig
from training.config_check import config_from_mapping
from training.errors import UserError
from training.free_space import bytes_needed, check_free_space, disk_line, size_in_words
from training.run_folder import Opening

START = Opening(None, {}, [])


def config_of(evaluation: int | None, every: int | None, keep: int, **sections: Any) -> RunConfig:
    mapping = {
        "name": "run",
        "data": {"dataset": "data", "train_tokens": 1},
        "batch": {"world_size": 1, "microbatch": 1, "accumulation": 1},
        "evaluation": {"every": evaluation},
        "checkpoint": {"every": every, "keep": keep},
        **sections,
    }
    return config_from_mapping(mapping, "test")


@pytest.mark.parametrize(
    ("intervals", "steps", "there", "checkpoints"),
    [
        ((5, 5, 3), (0, 100), 0, 5),  # three stay and the best, and one more while it is written
        ((None, 5, 3), (0, 100), 0, 4),  # nothing says which is best
        ((0, 5, 3), (0, 100), 0, 4),  # the best is the last
        ((None, 5, 3), (0, 12), 0, 3),  # after 5, 10 and 12
        ((None, None, 3), (0, 12), 0, 1),
        ((4, None, 3), (0, 12), 0, 3),  # each evaluation may be the best so far
        ((5, 5, 3), (0, 0), 0, 1),  # --stop-after 0
        ((5, 5, 3), (50, 100), 4, 1),  # all that stay are there
        ((5, 5, 3), (10, 100), 2, 3),
        ((5, 5, 3), (50, 100), 7, 1),  # of a past that was given up: they go once the next one is whole
        ((5, 5, 3), (99, 100), 2, 1),
    ],
)
def test_what_a_run_will_need(
    intervals: tuple[int | None, int | None, int], steps: tuple[int, int], there: int, checkpoints: int
) -> None:
    config = config_of(*intervals)
    size = 12 * parameter_count(config.model)
    assert bytes_needed(config, state_at(steps[0]), steps[1], there * size) == checkpoints * size


@pytest.mark.parametrize(
    ("intervals", "steps", "said"),
    [
        ((5, 5, 3), 100, "up to 5 at once: 9.8 GB"),
        ((5, 5, 3), None, "up to 5 at once: 9.8 GB"),
        ((None, 5, 3), 12, "up to 3 at once: 5.9 GB"),
    ],
)
def test_the_plan_says_what_the_disk_must_hold(
    intervals: tuple[int | None, int, int], steps: int | None, said: str
) -> None:
    """163 million parameters of 12 bytes; where the length is not known, of a run that is long enough."""
    assert disk_line(config_of(*intervals), steps) == f"disk: 2.0 GB for a checkpoint, {said}"


def test_an_earlier_best_and_uploads_stay_as_well() -> None:
    config = config_of(None, 5, 3)
    size = 12 * parameter_count(config.model)
    best = dataclasses.replace(state_at(0), best_step=3, best_loss=1.0)
    assert bytes_needed(config, best, 100, 0) == 5 * size
    uploaded = config_of(None, 5, 3, hub={"repo": "me/run", "every": 5})
    assert bytes_needed(uploaded, state_at(0), 100, 0) == 6 * size


def test_too_little_room_is_a_sentence_with_both_numbers(tmp_path: Path) -> None:
    """A model of 500 billion parameters: 6 TB for each checkpoint."""
    config = config_of(None, 5, 3, model={"emb_dim": 2**14, "n_layers": 155, "n_heads": 64})
    said = (
        rf"^{tmp_path}: [\d.,]+ [MG]B are free, and the checkpoints of this run will need up to 24,[\d.]+ GB more, "
        r"6,[\d.]+ GB each; make room, lower checkpoint\.keep, or write elsewhere with --output$"
    )
    with pytest.raises(UserError, match=said):
        check_free_space(tmp_path, config, START, state_at(0), 100)


def test_what_is_there_goes_stays_or_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk with room for one checkpoint but for a byte, and one lying there; a dead write is removed first."""
    config = config_of(None, None, 1)
    size = 12 * parameter_count(config.model)
    there = save(tmp_path, 4)
    shutil.copytree(there, tmp_path / ".step_00000008.partial")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=size - 1))
    check_free_space(tmp_path, config, START, state_at(0), 10)  # it is deleted before the first is written
    assert {path.name for path in tmp_path.iterdir()} == {there.name}
    for opening in (dataclasses.replace(START, keeps_others=True), dataclasses.replace(START, checkpoint=there.name)):
        with pytest.raises(UserError, match="are free"):
            check_free_space(tmp_path, config, opening, state_at(4), 10)


def test_a_link_that_leads_nowhere_does_not_count(tmp_path: Path) -> None:
    """An editor that has a file of the checkpoint open leaves one; a folder within counts as little."""
    (save(tmp_path, 4) / ".#state.json").symlink_to("me@host.123:456")
    check_free_space(tmp_path, config_of(None, None, 1), dataclasses.replace(START, keeps_others=True), state_at(0), 1)


def test_a_run_without_room_does_not_begin(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in its folder stays; with --overwrite it counts as free, 1 MB here, as it would be deleted."""
    config = workplace.write_config(evaluation={"every": None})
    run = workplace.train_here(config, stop_after=1)
    before = {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}
    usage = shutil.disk_usage(run.folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1_000_000))
    said = re.escape("2 MB are free, and the checkpoints of this run will need up to 3 MB more, 1 MB each")
    with pytest.raises(UserError, match=said):
        workplace.train_here(config, overwrite=True)
    assert {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()} == before


def test_sizes_for_people() -> None:
    assert [size_in_words(size) for size in (7.5e6, 1.956e9, 1.23e12)] == ["8 MB", "2.0 GB", "1,230.0 GB"]
