"""Which torchruns have begun a run; test_runs.py and test_several_nodes.py have their restarts."""

from pathlib import Path

import pytest

from training import launch_record
from training.launch_record import begin_record, begun_by_this_launch, note_launch


def test_every_node_that_sees_the_folder_knows_what_its_torchrun_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 may be on another machine after a restart; a torchrun that had no part in it is another launch."""
    folder = tmp_path
    of_node = {name: f"torchrun of {name}" for name in ("a", "b", "c")}
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "ours")
    for name, begins in (("a", True), ("b", False)):
        monkeypatch.setattr(launch_record, "launch", lambda name=name: of_node[name])
        if begins:
            begin_record(folder)
        assert begun_by_this_launch(folder) == begins
        note_launch(folder)
        assert begun_by_this_launch(folder)
    monkeypatch.setattr(launch_record, "launch", lambda: of_node["c"])
    assert not begun_by_this_launch(folder)
    note_launch(folder / "not shared")
    assert not (folder / "not shared").exists()
