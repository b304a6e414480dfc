"""The trackers themselves, behind one small interface: TensorBoard's files, trackio, wandb."""

import os
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from training.hub.tensorboard import restart, scalars, version

OWN_FOLDER = "tracking"
"""In a run's folder: what trackers keep of it."""


@dataclass(frozen=True)
class About:
    """What is to be shown, and where."""

    tracker: str
    folder: str
    """checkpoints/<run>."""
    run: str
    project: str
    space: str | None
    """On the Hub, for trackio."""
    step: int
    """Where the run begins or goes on."""
    seconds: float
    """Of training, up to there."""
    patience: float
    """Seconds that a tracker may take for what is left when training has ended."""
    config: Mapping[str, Any]

    @property
    def own_folder(self) -> Path:
        """Where the trackers of a run keep what is theirs."""
        return Path(self.folder) / OWN_FOLDER


class Point(NamedTuple):
    """What a step, or a validation after it, has measured."""

    kind: str
    """train or validation."""
    step: int
    seconds: float
    """Of training, since the run's beginning."""
    values: dict[str, float]
    """By their tags, such as train/loss."""


class Tracker(Protocol):
    """Somewhere that a run is shown. Its methods may raise anything and take any time: see follower.py."""

    remembers: bool
    """Whether it keeps what it was sent before a resumption, and so cannot take those steps again."""

    @property
    def where(self) -> str:
        """How to look at it: the end of a sentence."""

    def send(self, points: Sequence[Point]) -> None:
        """Shows points, in the order of their steps; of one that remembers, not those it has."""

    def close(self, complete: bool) -> None:
        """Brings away what has been sent; complete: training has come to its end, not to a failure."""


def open_tracker(about: About, run_id: str) -> Tracker:
    """The tracker that is asked for; an id that it knows is gone on with."""
    if about.tracker == "tensorboard":
        return TensorBoard(about)
    return Trackio(about, run_id) if about.tracker == "trackio" else Wandb(about, run_id)


class TensorBoard:
    """An event file in the run's folder, written anew at each start from all that metrics.jsonl holds by then.

    So it never has a step twice, nor one that was given up. It begins with a restart, which makes TensorBoard forget
    the file before it. That one stays until the next start: a TensorBoard that is open still reads it, and would stop
    there if it were gone.
    """

    remembers = False

    def __init__(self, about: About) -> None:
        folder = Path(about.folder)
        self.where = f"tensorboard --logdir {folder.parent}"
        self._began = time.time() - about.seconds  # TensorBoard's clock is that of the day
        older = sorted(folder.glob("events.out.tfevents.*.isobatch"))[:-1]
        self._file = (folder / f"events.out.tfevents.{time.time_ns()}.isobatch").open("xb")
        self._file.write(version() + restart(self._began, 0))
        self._file.flush()
        for path in older:
            path.unlink()

    def send(self, points: Sequence[Point]) -> None:
        self._file.write(b"".join(scalars(self._began + point.seconds, point.step, point.values) for point in points))
        self._file.flush()

    def close(self, complete: bool) -> None:
        self._file.close()


class Trackio:
    """A run of the local database that `trackio show` shows; of a Space on the Hub too, if the config names one."""

    remembers = True

    def __init__(self, about: About, run_id: str) -> None:
        if about.space is None:  # it would ask the Hub for the user's name, and send to what the environment names
            os.environ["HF_HUB_OFFLINE"] = "1"
            for what in ("SPACE_ID", "SERVER_URL", "WEBHOOK_URL", "BUCKET_ID", "DATASET_ID", "REGISTRY_BUCKET_ID"):
                os.environ.pop(f"TRACKIO_{what}", None)
        import trackio

        self._run: Any = trackio.init(
            about.project,
            name=run_id,
            space_id=about.space,
            private=True,
            config=dict(about.config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self._fault: str | None = None
        warnings.showwarning = self._note  # as it raises nothing: a failure is a warning, in a thread of its own
        space = f"https://huggingface.co/spaces/{about.space}"
        self.where = f"run {run_id}: " + (space if about.space else f"trackio show --project {about.project}")

    def send(self, points: Sequence[Point]) -> None:
        for point in points:
            self._run.log(point.values, step=point.step)
        self._raise_fault()

    def close(self, complete: bool) -> None:
        self._run.finish()
        self._raise_fault()

    def _note(self, message: Warning | str, *where: Any, **file: Any) -> None:
        print(f"warning: {message}", flush=True)
        self._fault = self._fault or str(message)

    def _raise_fault(self) -> None:
        if self._fault is not None:
            raise RuntimeError(self._fault)


class Wandb:
    """A run of Weights & Biases: curves and config, without code, machine, command line or what is printed."""

    remembers = True

    def __init__(self, about: About, run_id: str) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # its own reports of its own faults
        import wandb

        self._run: Any = wandb.init(
            project=about.project,
            id=run_id,
            name=about.run,
            resume="allow",
            dir=about.own_folder,
            config=dict(about.config),
            settings=wandb.Settings(
                console="off",
                disable_code=True,
                disable_git=True,
                disable_job_creation=True,
                host="not recorded",
                x_disable_meta=True,
                x_disable_machine_info=True,
                x_disable_stats=True,
                x_save_requirements=False,
            ),
        )
        offline = f"offline, in {about.own_folder / 'wandb'}"
        self.where = f"run {run_id}: {offline if self._run.offline else self._run.url}"

    def send(self, points: Sequence[Point]) -> None:
        for point in points:
            self._run.log(point.values, step=point.step)

    def close(self, complete: bool) -> None:
        self._run.finish(exit_code=0 if complete else 1)
