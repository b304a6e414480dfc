"""The process that shows a run in one tracker, by following its metrics.jsonl; started by trackers.py.

    python -P -m training.tracking.follower

Its standard input is a line of JSON, an About, and then END when the run has come to its end; where the input ends
without that, training has failed or was killed. What there is to say goes to standard output, a sentence a line, and
what the tracker's package prints to tracking/<tracker>.log in the run's folder.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Never

from training import lock
from training.hub.tensorboard import TRAIN, VALIDATION
from training.tracking.services import About, Point, open_tracker

REPOSITORY = Path(__file__).resolve().parents[2]
END = "end\n"
TOLD = 75
"""Exit status of a process that has taken all, or has said why not: a package may end it with any other, 0 too."""
SECONDS_BETWEEN_LOOKS = 1.0
MOST_AT_ONCE = 1000

Say = Callable[[str], None]


class Rows:
    """The rows of a metrics.jsonl that grows, as points of curves."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._seconds = 0.0

    def next(self) -> list[Point]:
        """The next points, MOST_AT_ONCE at most; none if none have been added. Half a row is left for later."""
        points: list[Point] = []
        while len(points) < MOST_AT_ONCE:
            line = self._file.readline()
            if not line.endswith(b"\n"):
                self._file.seek(-len(line), os.SEEK_CUR)
                break
            row = json.loads(line)
            self._seconds = row["seconds"] if row["kind"] == "train" else self._seconds
            tags = {"train": TRAIN, "validation": VALIDATION}.get(row["kind"], {})
            values = {tag: float(row[key]) for key, tag in tags.items() if row[key] is not None}
            if values:
                points.append(Point(row["kind"], row["step"], self._seconds, values))
        return points


@dataclass
class Shown:
    """What a tracker has been given of a run, kept in tracking/<tracker>.json for the run's next resumption."""

    path: Path
    run_id: str
    last_steps: dict[str, int]
    """Of each kind of point: "train" may be far ahead of "validation", which a kill in its evaluation leaves out."""

    @classmethod
    def read(cls, path: Path, run: str) -> "Shown":
        """What there is, or a new id."""
        if not path.exists():
            return cls(path, f"{run}-{os.urandom(4).hex()}", {})
        content = json.loads(path.read_bytes())
        return cls(path, str(content["id"]), {kind: int(step) for kind, step in content["last_steps"].items()})

    def has(self, point: Point) -> bool:
        """Whether the tracker has been given one of its kind and its step, or of a later one."""
        return point.step <= self.last_steps.get(point.kind, 0)

    def add(self, points: Sequence[Point]) -> None:
        """Takes down what the tracker is about to be given: what may have arrived is never sent again."""
        self.last_steps |= {point.kind: point.step for point in points}
        beside = self.path.with_name(f".{self.path.name}.new")
        content = {"id": self.run_id, "last_steps": self.last_steps}
        beside.write_text(json.dumps(content) + "\n", encoding="utf-8")
        beside.replace(self.path)


class Training:
    """The process that trains, as far as this one hears of it. After its end, this one does not stay for ever."""

    def __init__(self, orders: BinaryIO, about: About, say: Say) -> None:
        self.ended = threading.Event()
        self.complete = False
        self._orders, self._about, self._say = orders, about, say
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        self.complete = self._orders.readline() == END.encode()
        self.ended.set()
        time.sleep(self._about.patience)
        self._say(given_up(self._about.tracker, self._about.patience))
        leave()


def follow(about: About, training: Training, say: Say) -> None:
    """Gives a tracker all points of a run until training ends; whatever goes wrong is raised."""
    name, folder = about.tracker, about.own_folder
    with lock.held(folder / f".{name}.lock", about.patience):  # that of a killed run may still be finishing
        shown = Shown.read(folder / f"{name}.json", about.run)
        tracker = open_tracker(about, shown.run_id)
        say(f"{name}: {tracker.where}")
        has = max(shown.last_steps.values(), default=0) if tracker.remembers else 0
        if about.step < has:
            say(f"{name}: keeps steps {about.step + 1:,} to {has:,} as they were before; it goes on behind them")
        with (Path(about.folder) / "metrics.jsonl").open("rb") as file:
            rows = Rows(file)
            while True:
                last_look = training.ended.is_set()
                points = rows.next()
                if new := [point for point in points if not (tracker.remembers and shown.has(point))]:
                    shown.add(new)
                    tracker.send(new)
                if last_look and not points:
                    break
                if len(points) < MOST_AT_ONCE:
                    training.ended.wait(SECONDS_BETWEEN_LOOKS)
        tracker.close(training.complete)


def given_up(name: str, seconds: float) -> str:
    """What is said of a tracker that is too slow at the end."""
    return f"{name}: has not taken all within {seconds:g} seconds; not waited for any longer"


def leave() -> Never:
    """Ends this process at once, and those that the tracker's package has started."""
    with suppress(OSError):
        os.killpg(0, signal.SIGTERM)
    os._exit(TOLD)


def main() -> None:
    """Follows what the first line of standard input says."""
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, lambda *_: None)
    os.nice(10)  # the cores are for training
    orders = os.fdopen(os.dup(0), "rb", buffering=0)  # unbuffered: no lock is held where a thread waits for it
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8", errors="backslashreplace")
    about = About(**json.loads(orders.readline()))

    def say(text: str) -> None:
        with suppress(OSError):  # nobody listens any more
            answers.write(" ".join(text.split()) + "\n")

    training = Training(orders, about, say)
    try:
        about.own_folder.mkdir(exist_ok=True)
        printed = os.open(about.own_folder / f"{about.tracker}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        # Packages must not take our folder `datasets` for Hugging Face's library; ours are imported by now.
        sys.path[:] = [path for path in sys.path if Path(path).resolve() != REPOSITORY]
        follow(about, training, say)
    except (Exception, SystemExit) as error:
        say(f"{about.tracker}: switched off, training goes on: {type(error).__name__}: {str(error)[:300]}")
        leave()


if __name__ == "__main__":
    main()
    sys.exit(TOLD)
