"""What killed exports have left is removed by the next one, whatever its name."""

import os
import subprocess
import sys
import time
from pathlib import Path

from training.left_behind import SECONDS_OF_SILENCE, is_left_behind, partial_path, remove_left_behind


def make_old(*paths: Path) -> None:
    """As if nobody had written there for more than an hour."""
    before = time.time() - SECONDS_OF_SILENCE - 1
    for path in paths:
        os.utime(path, (before, before))


def test_what_is_written_deep_inside_is_seen(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as ended:
        pass
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").touch()
    make_old(tmp_path / "folder")
    assert not is_left_behind(tmp_path / "folder", str(ended.pid))
    make_old(tmp_path / "folder" / "file")
    assert is_left_behind(tmp_path / "folder", str(ended.pid))
    assert not is_left_behind(tmp_path / "folder", str(os.getpid()))
    assert not is_left_behind(tmp_path / "folder", "no process id")


def test_only_what_dead_processes_of_this_machine_were_writing_is_removed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    own = partial_path(tmp_path / "model.gguf")
    assert own.parent == tmp_path
    form = own.name.removesuffix(str(os.getpid()))
    dead_file, dead_folder = tmp_path / f"{form}{ended.pid}", tmp_path / f".other{form[11:]}{ended.pid}"
    kept = [own, tmp_path / ".model.gguf.partial-elsewhere-1", tmp_path / f"{form}x", tmp_path / "model.gguf"]
    for path in (*kept, dead_file):
        path.touch()
    (dead_folder / "deep").mkdir(parents=True)
    remove_left_behind(tmp_path)
    assert set(tmp_path.iterdir()) == {*kept, dead_file, dead_folder}, "who wrote may be in another container"
    make_old(dead_file, dead_folder / "deep", dead_folder)
    remove_left_behind(tmp_path)
    assert set(tmp_path.iterdir()) == set(kept)
    remove_left_behind(tmp_path / "nowhere")
    remove_left_behind(own)
