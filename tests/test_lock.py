"""A lock is one process's until it ends, however it does (test_run_folder.py has the wait, and the kill)."""

from pathlib import Path

import pytest

from training.lock import BusyError, RemovedError, held, is_held, is_lost


def test_a_lock_is_held_by_one_at_a_time_and_its_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with held(path):
        with pytest.raises(BusyError), held(path):
            pass
        with pytest.raises(BusyError), held(path, seconds=0.2):
            pass
    assert path.exists()
    with held(path):
        pass


def test_whether_a_lock_is_held_can_be_asked_without_taking_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not is_held(path)
    assert not path.exists()
    with held(path):
        assert is_held(path)
        path.chmod(0o444)
        assert is_held(path)
    assert not is_held(path)


def test_a_lock_whose_file_was_removed_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between opening and locking it the one before has gone, with the folder."""
    path = tmp_path / "lock"

    def removed(descriptor: int) -> bool:
        path.unlink()
        return True

    monkeypatch.setattr("training.lock._taken", removed)
    with pytest.raises(RemovedError), held(path):
        pass


def test_a_lock_is_lost_with_its_file_or_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "run" / "lock"
    for spoil in (path.unlink, lambda: path.parent.rename(tmp_path / "moved"), None):
        path.parent.mkdir(exist_ok=True)
        assert not is_lost(path), "nobody holds it"
        with held(path):
            assert not is_lost(path)
            if spoil is not None:
                spoil()
                assert is_lost(path)
                path.parent.mkdir(exist_ok=True)
                path.touch()
                assert is_lost(path), "it is another one"
        assert not is_lost(path)


def test_a_lock_that_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), held(tmp_path / "nowhere" / "lock"):
        pass
