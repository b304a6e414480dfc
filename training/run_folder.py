"""checkpoints/<run>/: who may write there, whether a run starts or goes on, and with which config."""

import os
import re
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from training import lock
from training.changes import Changed, change_lines, compare_configs, refuse_changes
from training.checkpoint import supersede
from training.checkpoint_files import RESCUE, SUPERSEDED, checkpoint_name, find_checkpoint, list_checkpoints, number_of
from training.config import RunConfig, config_mapping
from training.config_check import config_of_record
from training.errors import UserError
from training.launch_record import LAUNCH, begin_record, begun_by_this_launch
from training.metrics_file import Metrics, cut_back, read_if_any, read_to_go_on
from training.restore import read_state
from training.yaml_reader import yaml_text

CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
LOCK = lock.RUN_LOCK
SECONDS_TO_WAIT_FOR_LOCK = 5.0
WRITTEN = (CONFIG, METRICS, LAUNCH, *(f".{name}.new" for name in (CONFIG, METRICS, "latest", "best")))
"""What is written anew in the folder of a run that goes on."""
OURS = re.compile(
    r"step_\d+|latest|best|config\.yaml|metrics\.jsonl|report\.md|(loss|grad_norm|learning_rate)\.png"
    r"|events\.out\.tfevents\.\d+\.isobatch|tracking|hub|\.(lock|launch)|\..*\.(new|partial|old)"
)
"""Names that a run's folder has from us."""


@dataclass(frozen=True)
class Opening:
    """How a run begins in its folder; plain values, to be handed to all processes."""

    checkpoint: str | None
    """Folder name of the checkpoint to go on from; None = start."""
    config: dict[str, Any]
    """The run's config, as `config_mapping` makes it."""
    remarks: list[str]
    """What the user should know, a sentence each."""
    state: dict[str, Any] | None = None
    """The checkpoint's TrainingState."""
    changed: Changed = field(default_factory=dict)
    """In what the config is not that of the checkpoint."""
    superseded: tuple[str, ...] = ()
    """Checkpoints after the one to go on from: no longer this run's, removed once its next one is complete."""
    lacking: str | None = None
    """What of the run's record is lost; one of the remarks."""
    had_reached: int = 0
    """The last step recorded, where it lies behind the one to go on from: steps since are computed again."""
    ended: str = ""
    """How that came: interrupted, stopped, finished or killed."""
    starts: int = 1
    """How many times torchrun has started the run before its first checkpoint."""
    keeps_others: bool = False
    """Whether a start leaves foreign files alone, and puts checkpoints that cannot be used aside."""


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Holds a run's folder for this process, by a lock that the system releases even if the process is killed.

    Raises:
        UserError: another process holds it, also after a short wait, or the folder cannot be written.
    """
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _refuse_what_is_no_file(folder / LOCK)
            stack.enter_context(lock.held(folder / LOCK, SECONDS_TO_WAIT_FOR_LOCK))
        except lock.BusyError:
            raise UserError(f"{folder}: another process is training this run; wait for it or stop it first") from None
        except lock.RemovedError:
            raise UserError(f"{folder}: the process that had this run has just given up; start again") from None
        except OSError as error:
            raise UserError(
                f"{folder}: cannot be written ({error.strerror}); choose another folder with --output"
            ) from None
        try:
            yield
        finally:
            is_ours = folder.is_dir() and not lock.is_lost(folder / LOCK)
            if is_ours and [path.name for path in folder.iterdir()] == [LOCK]:  # nothing came of it
                (folder / LOCK).unlink()
                folder.rmdir()


def saved_overrides(folder: Path, resume: str, fresh: Sequence[str]) -> list[str]:
    """The --set of a run up to the checkpoint to go on from, and those given now; the later of a key counts.

    Args:
        folder: checkpoints/<run>.
        resume: latest, best, auto or a checkpoint's name. Going back to an older one leaves out what came later.
        fresh: the --set of this command.
    """
    saved: list[str] = []
    if resume in ("latest", "auto"):
        checkpoints = [path for path in list_checkpoints(folder) if not (path / SUPERSEDED).exists()]
    else:
        checkpoints = [(folder / resume).resolve()]
    for checkpoint in reversed(checkpoints):
        try:
            config = read_state(checkpoint).config
            overrides = config["overrides"]
            if isinstance(overrides, list) and all(isinstance(override, str) for override in overrides):
                saved = _without_the_old_schedule(overrides, fresh, config["schedule"]["name"])
                break
        except (UserError, KeyError, TypeError):  # damaged: open_run says so, if it is the one wanted
            continue
    return list({_key_and_value(override)[0]: override for override in [*saved, *fresh]}.values())


def _without_the_old_schedule(saved: list[str], fresh: Sequence[str], schedule: str) -> list[str]:
    """Drops the keys of a schedule that the fresh overrides replace by another, which does not have them."""
    if dict(map(_key_and_value, fresh)).get("schedule.name", schedule) == schedule:
        return saved
    return [override for override in saved if not override.strip().startswith("schedule.")]


def _key_and_value(override: str) -> tuple[str, str]:
    key, _, value = override.partition("=")
    return key.strip(), value.strip()


def open_run(folder: Path, config: RunConfig, resume: str | None, overwrite: bool) -> Opening:
    """Decides how a run begins, without changing anything yet.

    Args:
        folder: checkpoints/<run>.
        config: as the YAML file and --set give it now; for a resumption with the --set of the run's start.
        resume: latest, best, auto or a checkpoint's name; None = start.
        overwrite: start although the folder holds a run.

    Raises:
        UserError: it can neither start nor go on as asked.
    """
    checkpoints = list_checkpoints(folder)
    holds_run = bool(checkpoints) or any((folder / name).exists() for name in (CONFIG, METRICS))
    found, remarks = None, []
    if resume == "auto":
        try:
            found = find_checkpoint(folder, "latest")
        except UserError as none_is_good:
            overwrite = holds_run
            if checkpoints:
                why = str(none_is_good).removesuffix(f"; {RESCUE}")
                remarks = [f"{why}; starting afresh, with the old checkpoints kept under another name"]
    elif resume is not None:
        found = find_checkpoint(folder, resume)
    if found is None:
        if not overwrite and any(not _is_trifle(path) for path in _entries(folder)):
            what = "a run already; go on with --resume latest" if holds_run else "other files; choose another --output"
            raise UserError(f"{folder}: holds {what}, or start again with --overwrite (which deletes all of it)")
        past = _past(read_if_any(folder / METRICS), 0, remarks) if begun_by_this_launch(folder) else {}
        return Opening(None, config_mapping(config), remarks, keeps_others=resume == "auto", **past)
    remarks = [f"passed over {name}: {reason}" for name, reason in found.passed_over]
    state = read_state(found.path)
    if found.path not in checkpoints:  # scp -r and object stores turn links into folders
        copied = checkpoint_name(state.step)
        raise UserError(f"{found.path}: is a copy of {copied} and no link to it; name that one, or give it that name")
    files = [folder / name for name in WRITTEN]
    _refuse_what_is_no_file(*files, *(path / SUPERSEDED for path in checkpoints))
    if state.best_step is not None and not (folder / checkpoint_name(state.best_step)).is_dir():
        state = replace(state, best_step=None, best_loss=None)  # it went with a past that was given up
    superseded = tuple(path.name for path in checkpoints if number_of(path) > state.step)
    newer = [name for name in superseded if name not in dict(found.passed_over)]
    if newer:
        remarks.append(f"newer checkpoints will be removed once the next one is complete: {', '.join(newer)}")
    saved = config_of_record({"name": config.name, **state.config}, str(found.path / "state.json"))
    changes = compare_configs(saved, config, state.step)
    refuse_changes(changes, folder, state.step)
    remarks += change_lines(changes.taken, state.step)
    if (goes := _goes_with_fewer(changes.taken, found.path, checkpoints)) and not newer:
        remarks.append(f"checkpoint.keep is lower now: the next checkpoint removes {', '.join(goes)}")
    record = read_to_go_on(folder / METRICS, state.step)
    lacking = record.lacking_up_to(state.step)
    if lacking:
        lacking = (
            f"{folder / METRICS}: lacks {lacking} of the {state.step:,} steps so far, and so will charts and report; "
            "the run itself is whole"
        )
        remarks.append(lacking)
    name, now = found.path.name, config_mapping(config)
    past = _past(record, state.step, remarks)
    return Opening(name, now, remarks, asdict(state), changes.taken, superseded, lacking, **past)


def _past(record: Metrics, step: int, remarks: list[str]) -> dict[str, Any]:
    """How far a run had come that now goes on from a step, or begins again at 0, for its Opening; adds a remark."""
    ended = record.ending if record.ending in ("finished", "stopped", "interrupted") else "killed"
    past: dict[str, Any] = {"ended": ended} if record.events else {}
    if step == 0 and record.events:
        past["starts"] = int(record.events[0].get("starts") or 1) + 1
        remarks.append(
            f"no checkpoint was written yet: the run begins again (start {past['starts']} by the same torchrun)"
        )
    if record.reached > step:
        past["had_reached"] = record.reached
        lost = record.reached - step
        remarks.append(
            f"it had reached step {record.reached:,} ({ended}): {lost:,} step{'s' * (lost > 1)} will be computed again"
        )
    return past


def _goes_with_fewer(changed: Changed, resumed: Path, checkpoints: list[Path]) -> list[str]:
    """The checkpoints that a lowered checkpoint.keep removes at the next save, in which they would have stayed."""
    before, now = changed.get("checkpoint.keep", [1, 1])
    best, count = resumed.with_name("best").resolve(), len(checkpoints)
    going = checkpoints[max(0, count - before + 1) : max(0, count - now + 1)]
    return [path.name for path in going if path.resolve() != best]


def _refuse_what_is_no_file(*paths: Path) -> None:
    """Looks at files of a run's folder before they are opened: a pipe there would be waited at for ever."""
    for path in paths:
        if path.exists() and not path.is_file():
            raise UserError(f"{path}: is no regular file, and the run has one of this name; move it away")


def begin(folder: Path, opening: Opening) -> None:
    """Makes the folder ready: emptied for a start, cut back for a resumption, with the resolved config.

    Raises:
        UserError: something in the folder cannot be changed.
    """
    try:
        _begin(folder, opening)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error}); make it writable, or use --output") from None


def _begin(folder: Path, opening: Opening) -> None:
    if opening.checkpoint is None:
        _empty(folder, opening.keeps_others)
    else:
        supersede(folder, opening.checkpoint, opening.superseded)
    # Before the run's other files: where a signal ends it here, the restart must know them for its own.
    begin_record(folder)
    beside = folder / f".{CONFIG}.new"
    comment = "# The resolved config of this run: base, interventions and overrides are in the values already.\n"
    beside.write_text(comment + yaml_text(opening.config), encoding="utf-8")
    os.replace(beside, folder / CONFIG)
    state = opening.state or {"step": 0, "evaluation_due": False}
    cut_back(folder / METRICS, state["step"], state["evaluation_due"])


def refuse_to_start_beside(folder: Path) -> None:
    """Looks at a node's own folder where rank 0 has found nothing to go on from; one process of each node does this.

    Raises:
        UserError: it holds what rank 0 would have gone on from: the folder is not shared, and rank 0 was here before.
    """
    try:
        found = find_checkpoint(folder, "latest").path.name
    except UserError:
        return
    raise UserError(
        f"{folder}: on {socket.gethostname()} it holds {found} of this run, and on the machine of rank 0 nothing; "
        "share the output folder, copy the run there, or remove it here if it is another one"
    )


def _is_trifle(path: Path) -> bool:
    """Whether it is a hidden file of ours, which may lie there before a run has begun."""
    return path.name.startswith(".") and OURS.fullmatch(path.name) is not None


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _empty(folder: Path, keeps_others: bool) -> None:
    for path in list_checkpoints(folder) if keeps_others else []:
        path.rename(folder / f"damaged_{path.name}_{time.time_ns()}")
    for path in _entries(folder):
        if path.name == LOCK or (keeps_others and not OURS.fullmatch(path.name)):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
