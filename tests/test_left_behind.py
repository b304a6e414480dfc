"""What killed exports have left is removed by the next one, whatever its name."""

import os
import subprocess
import sys
from pathlib import Path

from training.exchange.left_behind import partial_path, remove_left_behind


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
    assert set(tmp_path.iterdir()) == set(kept)
    remove_left_behind(tmp_path / "nowhere")
    remove_left_behind(own)
