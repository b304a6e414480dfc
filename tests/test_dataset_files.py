import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from test_left_behind import make_old

from training.errors import RunError, UserError
from training.preparation.dataset_files import (
    TokenWriter,
    refuse_existing,
    staged_folder,
    write_description,
    write_tokens,
)


@pytest.mark.parametrize("token", [65536, 70000, -1, 2**40])
def test_r71_id_outside_uint16_is_refused_before_the_cast(tmp_path: Path, token: int) -> None:
    with pytest.raises(UserError, match=rf"token id {token} at position 2.* 65535"):
        write_tokens(tmp_path / "train.safetensors", [0, 65535, token, token], 65536)
    assert list(tmp_path.iterdir()) == []


def test_r71_id_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="token id 4096 at position 1; the vocabulary of 4096 ends at 4095"):
        write_tokens(tmp_path / "train.safetensors", [4095, 4096], 4096)


def test_r71_vocabulary_too_large_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a vocabulary of 4294967297 tokens; uint32 holds ids up to 4294967295"):
        write_tokens(tmp_path / "train.safetensors", [1], 2**32 + 1)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65536, np.uint16), (65537, np.uint32), (2**32, np.uint32)])
def test_the_vocabulary_decides_the_type(tmp_path: Path, vocab_size: int, dtype: type[np.integer[Any]]) -> None:
    path = tmp_path / "train.safetensors"
    assert write_tokens(path, np.array([0, vocab_size - 1]), vocab_size, document_ends=np.array([2])) == 2
    content = load_file(path)
    assert content["tokens"].dtype == dtype
    assert content["tokens"].tolist() == [0, vocab_size - 1]
    assert content["document_ends"].tolist() == [2]
    with pytest.raises(
        UserError, match=rf"token id {vocab_size} at position 0; .* ends at {vocab_size - 1}, {dtype.__name__}"
    ):
        write_tokens(path, [vocab_size], vocab_size)


@pytest.mark.parametrize("ids", [[0.5], [[1]], [2**70]])
def test_r71_ids_that_are_no_row_of_integers_are_refused(tmp_path: Path, ids: list[Any]) -> None:
    with pytest.raises(UserError, match="must be a row of integers"):
        write_tokens(tmp_path / "train.safetensors", ids, 10)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64, np.uint64])
def test_extreme_ids_survive(tmp_path: Path, dtype: type[np.integer[Any]]) -> None:
    path = tmp_path / "train.safetensors"
    write_tokens(path, np.array([0, 1, 65535], dtype=dtype), 65536)
    tokens = load_file(path)["tokens"]
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == [0, 1, 65535]


def test_a_token_file_is_never_lengthened(tmp_path: Path) -> None:
    """The tokens it lacks would be 0."""
    path, dtype = tmp_path / "train.safetensors", np.dtype(np.uint16)
    writer = TokenWriter(path, dtype)
    writer.append(np.array([5, 6], dtype=np.uint16).tobytes())
    writer.close()
    with pytest.raises(UserError, match=r"train.safetensors: has fewer than the 3 tokens that were written; start"):
        TokenWriter(path, dtype, 3)
    writer = TokenWriter(path, dtype, 2)
    writer.finish()
    writer.close()
    assert load_file(path)["tokens"].tolist() == [5, 6]


def test_a_dataset_is_on_the_disk_before_it_has_its_name(tmp_path: Path, synced: list[Path]) -> None:
    """Its files and folders, and at last the folder that it lies in."""
    with staged_folder(tmp_path / "mine") as folder:
        (folder / "file").write_text("x")
        (folder / "part").mkdir()
        (folder / "part" / "other").write_text("y")
        write_description(folder)
        assert synced == [folder / ".dataset.json.new", folder]
        synced.clear()
    names = ("file", "part", "part/other", "dataset.json")
    assert set(synced[:-2]) == {folder / name for name in names}
    assert synced[-2:] == [folder, tmp_path]


def test_folder_appears_only_when_complete(tmp_path: Path) -> None:
    destination = tmp_path / "datasets" / "mine"
    with staged_folder(destination) as folder:
        (folder / "file").write_text("x")
        assert not destination.exists()
    assert (destination / "file").read_text() == "x"
    assert list(destination.parent.iterdir()) == [destination]


def test_only_a_free_name_or_an_empty_folder_is_taken(tmp_path: Path) -> None:
    """Not a link to an empty folder, whose place a folder cannot take."""
    new = tmp_path / "new"
    refuse_existing(new)
    refuse_existing(tmp_path / ("n" * 300))  # where it is made, the system says what is wrong with it
    new.mkdir()
    refuse_existing(new)
    (tmp_path / "link").symlink_to(new)
    (tmp_path / "dangling").symlink_to("nothing")
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "dangling", "file", "pipe", ""):
        with pytest.raises(UserError, match=f"{name}: exists already; a dataset is never overwritten; remove it first"):
            refuse_existing(tmp_path / name)


def test_failed_preparation_leaves_nothing(tmp_path: Path) -> None:
    def fail_halfway() -> None:
        with staged_folder(tmp_path / "mine") as folder:
            (folder / "file").write_text("x")
            raise RuntimeError("disk")

    with pytest.raises(RuntimeError, match="disk"):
        fail_halfway()
    assert list(tmp_path.iterdir()) == []


def test_leftover_of_a_dead_process_goes_and_that_of_a_live_one_stays(tmp_path: Path) -> None:
    child, other = (subprocess.Popen([sys.executable, "-S", "-c", ""]) for _ in range(2))
    child.wait()
    other.wait()
    host = socket.gethostname()
    kept = [f".mine.partial-{host}-{os.getppid()}", f".mine.partial-elsewhere-{child.pid}", ".mine.partial-2"]
    fresh = f".mine.partial-{host}-{other.pid}"  # a container of the same name may be writing it
    gone = [f".mine.partial-{host}-{child.pid}", f".mine.partial-{host}-{os.getpid()}"]
    for name in [*kept, *gone, fresh]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.safetensors").write_text("half")
        if name != fresh:
            make_old(tmp_path / name / "train.safetensors", tmp_path / name)

    with staged_folder(tmp_path / "mine") as folder:
        assert list(folder.iterdir()) == []

    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, fresh, "mine"])


@pytest.mark.parametrize("keep_other", [True, False])
def test_r102_of_two_processes_the_first_to_finish_publishes(tmp_path: Path, keep_other: bool) -> None:
    """The other one fails, unless both made the same."""
    destination = tmp_path / "mine"
    mistake = pytest.raises(UserError, match="mine: was made by another process in the meantime, and stays as it is")
    with contextlib.nullcontext() if keep_other else mistake, staged_folder(destination, keep_other) as folder:
        (folder / "file").write_text("second")
        destination.mkdir()
        (destination / "file").write_text("first")
    assert (destination / "file").read_text() == "first"
    assert list(tmp_path.iterdir()) == [destination]


def test_a_disk_that_is_full_is_told(tmp_path: Path) -> None:
    sentence = r"mine: cannot be written \(\[Errno 28\] No space left on device\); make room, or choose another folder"
    with pytest.raises(RunError, match=sentence), staged_folder(tmp_path / "mine"):
        raise OSError(28, "No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "datasets").write_text("a file")
    with (
        pytest.raises(UserError, match="datasets: cannot write there"),
        staged_folder(tmp_path / "datasets" / "mine"),
    ):
        pass
