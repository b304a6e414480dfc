"""The trackers that exist, by their own readers: TensorBoard, trackio and wandb, with no network."""

import json
import socket
import sqlite3
import struct
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from conftest import Workplace
from recorded_runs import event, train_row, validation_row, write_run
from small_configs import small_config
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_trackers import wait_for
from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

from training.hub.tensorboard import FILE
from training.metrics import RunLog
from training.tracking.services import About, Point, TensorBoard
from training.tracking.trackers import Trackers


def about(folder: Path, step: int, seconds: float) -> About:
    return About("tensorboard", str(folder), "tiny", "isobatch", None, step, seconds, 60, {})


def points(*steps: int, loss: float) -> list[Point]:
    return [Point("train", step, 0.5 * step, {"train/loss": loss + step}) for step in steps]


def curve(reader: EventAccumulator) -> dict[int, float]:
    """Loss by step as TensorBoard would draw it; a step that it has twice is a fault."""
    reader.Reload()
    events = reader.Scalars("train/loss") if "train/loss" in reader.Tags()["scalars"] else []
    assert len({event.step for event in events}) == len(events)
    return {event.step: event.value for event in events}


def test_tensorboard_shows_each_step_once_also_where_it_is_open(tmp_path: Path) -> None:
    """Killed after step 5, which is half written, and gone on with from step 3: the given-up past disappears."""
    (tmp_path / FILE).write_bytes(b"of a push")
    first = TensorBoard(about(tmp_path, 0, 0.0))
    first.send(points(1, 2, 3, 4, 5, loss=10))
    file = max(tmp_path.glob("events*"))
    open_one = EventAccumulator(str(tmp_path))
    assert curve(open_one) == {1: 11, 2: 12, 3: 13, 4: 14, 5: 15}
    first.close(complete=False)
    with file.open("ab") as torn:
        torn.write(b"\x18\x00\x00")
    second = TensorBoard(about(tmp_path, 3, 1.5))
    second.send(points(1, 2, 3, loss=10))
    second.send(points(4, loss=20))
    after = {1: 11, 2: 12, 3: 13, 4: 24}
    assert curve(open_one) == curve(EventAccumulator(str(tmp_path))) == after
    second.send([Point("train", 5, 2.5, {"train/loss": 25.0}), Point("validation", 5, 2.5, {"validation/loss": 4.5})])
    second.close(complete=True)
    assert curve(open_one) == {**after, 5: 25}
    [validation] = open_one.Scalars("validation/loss")
    assert (validation.step, validation.value) == (5, 4.5)
    assert abs(validation.wall_time - 1 - time.time()) < 30, "its clock is that of the day, 1.5 seconds after the start"
    TensorBoard(about(tmp_path, 5, 2.5)).close(complete=True)
    assert len(list(tmp_path.glob("events*"))) == 2
    assert curve(open_one) == {}, "the third file is still empty"


@pytest.mark.slow
def test_a_run_that_training_itself_shows(workplace: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    """From the config to the file, over a resumption that trains steps again; started anew, it is another run."""
    config = workplace.write_config(tracking={"trackers": ["tensorboard"]}, checkpoint={"every": 2})
    run = workplace.train_here(config, stop_after=4)
    run = workplace.train_here(config, stop_after=5, resume="step_00000002")
    assert curve(EventAccumulator(str(run.folder))) == pytest.approx(dict(enumerate(run.losses, start=1)))
    said = capsys.readouterr().err
    assert said.count(f"tensorboard: tensorboard --logdir {workplace.checkpoints}\n") == 2
    assert "waiting for" not in said
    workplace.train_here(config, stop_after=1, overwrite=True, overrides=["tracking.trackers=[]"])
    assert not list(run.folder.glob("events*"))
    assert not (run.folder / "tracking").exists()


class Refusing:
    """Whatever would be sent anywhere comes here."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        self.server.settimeout(0)
        address = f"http://127.0.0.1:{self.server.getsockname()[1]}"
        for name in ("HF_ENDPOINT", "WANDB_BASE_URL", "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
            monkeypatch.setenv(name, address)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)

    def was_asked(self) -> bool:
        try:
            self.server.accept()[0].close()
        except BlockingIOError:
            return False
        return True


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> Iterator[Refusing]:
    refusing = Refusing(monkeypatch)
    yield refusing
    refusing.server.close()


def shown_twice(folder: Path, tracker: str, said: list[str]) -> str:
    """A run of 3 steps in a tracker, then gone on with from step 2 to step 5; returns its id there."""
    run = write_run(folder / "tiny", [event(0, "start"), *(train_row(step) for step in (1, 2, 3))])
    log = RunLog(run / "metrics.jsonl", True, 5, None)
    log.say = said.append  # type: ignore[method-assign,assignment]
    config = small_config(name="tiny", tracking={"trackers": [tracker], "project": "ours"})
    first = Trackers(run, config, log)
    first.start(0)
    wait_for(lambda: said)
    first.close()
    rows = [*(train_row(step, loss=9.0) for step in (1, 2, 3, 4, 5)), validation_row(5, 4.25)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    second = Trackers(run, config, log)
    second.start(2)
    wait_for(lambda: len(said) > 1)
    second.close()
    said[:] = [line for line in said if not line.startswith("waiting for")]
    return str(json.loads((run / "tracking" / f"{tracker}.json").read_text())["id"])


EXPECTED = [(1, "train/loss", 6.0), (2, "train/loss", 5.0), (3, "train/loss", 4.0 + 2 / 3), (4, "train/loss", 9.0)]
EXPECTED += [(5, "train/loss", 9.0), (5, "validation/loss", 4.25)]


@pytest.mark.slow
def test_trackio_keeps_a_run_in_its_database_and_asks_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nobody: Refusing
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("TRACKIO_SPACE_ID", "somebody/space")
    monkeypatch.setenv("HF_TOKEN", "hf_of_somebody")
    said: list[str] = []
    run_id = shown_twice(tmp_path, "trackio", said)
    start = f"trackio: run {run_id}: trackio show --project ours"
    assert said == [start, start, "trackio: keeps steps 3 to 3 as they were before; it goes on behind them"]
    (database,) = (tmp_path / "trackio").glob("*.db")
    with closing(sqlite3.connect(database)) as connection:
        rows = connection.execute("SELECT run_name, step, metrics FROM metrics ORDER BY step").fetchall()
    assert {row[0] for row in rows} == {run_id}
    values = [(row[1], tag, value) for row in rows for tag, value in json.loads(row[2]).items() if tag.endswith("loss")]
    assert sorted(values) == EXPECTED
    assert not nobody.was_asked()


def test_trackio_that_cannot_write_is_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It only warns; here the folder of its database is a file."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "file" / "trackio"))
    said: list[str] = []
    shown_twice(tmp_path, "trackio", said)
    assert any(line.startswith("trackio: switched off, training goes on: ") for line in said)


def wandb_records(file: Path) -> list[Any]:
    """The records of a small .wandb file, whose framing is that of LevelDB's log."""
    content, place, records = file.read_bytes(), 7, []
    while place < len(content):
        _, size, kind = struct.unpack_from("<IHB", content, place)
        assert kind == 1, "a record lies in one block"
        records.append(Record.FromString(content[place + 7 : place + 7 + size]))
        place += 7 + size
    return records


def wandb_values(record: Any) -> list[tuple[int, str, float]]:
    """(step, tag, loss) of a record."""
    items = {item.nested_key[0]: float(item.value_json) for item in record.history.item if item.nested_key}
    return [(int(items["_step"]), tag, value) for tag, value in items.items() if tag.endswith("loss")]


@pytest.mark.slow
def test_wandb_offline_keeps_a_run_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nobody: Refusing
) -> None:
    """One id, the curves and the config: no machine, code, command line or package of it."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    said: list[str] = []
    run_id = shown_twice(tmp_path, "wandb", said)
    where = tmp_path / "tiny" / "tracking" / "wandb"
    start = f"wandb: run {run_id}: offline, in {where}"
    assert said == [start, start, "wandb: keeps steps 3 to 3 as they were before; it goes on behind them"]
    records = [
        record for file in sorted(where.glob(f"offline-run-*/run-{run_id}.wandb")) for record in wandb_records(file)
    ]
    assert sorted(value for record in records for value in wandb_values(record)) == EXPECTED
    runs = [record.run for record in records if record.HasField("run")]
    assert {(run.run_id, run.project, run.display_name, run.host) for run in runs} == {
        (run_id, "ours", "tiny", "not recorded")
    }
    assert not any(record.HasField(what) for record in records for what in ("environment", "stats", "output_raw"))
    assert list(where.glob("*/files/*")) == []
    assert not nobody.was_asked()
