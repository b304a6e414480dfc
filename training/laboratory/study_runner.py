"""Training a study's runs one after the other, whatever happens to one of them or to us, and writing the result."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from training import lock
from training.config import config_mapping
from training.config_check import refuse_fp16_without_gpu
from training.config_file import shown
from training.data import open_training_data, open_validation, provide_dataset
from training.errors import UserError, one_line
from training.json_file import parse_json
from training.laboratory.study_file import Study, StudyRun
from training.laboratory.study_plan import Estimate, Launch, RunState, in_words, read_run_state, record_launch
from training.laboratory.study_result import write_result
from training.layout import plan_layout
from training.progress import MOST_COLUMNS
from training.run_folder import METRICS
from training.torchrun import started, training_command, what_it_said
from training.yaml_reader import yaml_text

SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_BETWEEN_LINES = 60.0
SHARE_FOR_RESULTS = 0.02
"""Of the time, what writing the result again and again may take."""
LOCK = ".study.lock"
"""Not a run's: nobody is to wait for what this one records."""
TAIL = 8192
"""Bytes at the end of metrics.jsonl that surely hold a whole line."""


@dataclass(frozen=True)
class Machine:
    """How the runs are trained here."""

    datasets: Path
    folder: Path
    """The study's."""
    processes: int
    microbatch: int | None


def check_machine(study: Study, processes: int, microbatch: int | None, gpus: int) -> None:
    """Refuses what every run would fail with, before any starts.

    Raises:
        UserError: fp16 without a GPU, more processes than GPUs, or a microbatch that bitwise mode does not allow.
    """
    if gpus and processes > gpus:
        raise UserError(
            f"--nproc {processes}: this machine has {gpus} GPUs, and each process needs one; give at most {gpus}"
        )
    for run in study.runs:
        plan_layout(run.config.batch, processes, microbatch, run.config.bitwise)
        elsewhere = "run this study where there is one, or one whose `set` has precision: {amp: bf16}"
        refuse_fp16_without_gpu(run.config.precision, gpus > 0, elsewhere, f"{shown(study.path)}: {run.name}: ")


def open_data(study: Study, datasets: Path) -> None:
    """Fetches or makes the datasets, and opens them, as the runs will.

    Raises:
        UserError: they are not there, or do not hold what a run's config asks for.
    """
    for config in {run.group: run.config for run in study.runs}.values():
        provide_dataset(config.data, datasets)
        data = open_training_data(config, datasets / config.data.dataset)
        open_validation(config, datasets / config.data.dataset, data.rows)


def refuse_changed(study: Study, folder: Path, states: Mapping[str, RunState]) -> None:
    """Refuses to mix runs of the study as it is with runs of the study as it was.

    Raises:
        UserError: naming the runs whose config has changed, and in what.
    """
    runs: dict[tuple[str, ...], list[str]] = {}
    for name, state in states.items():
        runs.setdefault(state.changed, []).append(name)
    runs.pop((), None)
    if runs:
        which = "; ".join(f"{', '.join(names)} ({', '.join(changed)})" for changed, names in runs.items())
        raise UserError(
            f"{folder}: {shown(study.path)} is no longer what these runs were trained with: {which}; undo the change, "
            "give the study another name, or train these runs again with --overwrite"
        )


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Holds a study's folder for this process.

    Raises:
        UserError: another process runs this study, or the folder cannot be written.
    """
    if (folder / METRICS).exists():
        raise UserError(
            f"{folder}: is the folder of a run; give the study another name, or another folder with --output"
        )
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(lock.held(folder / LOCK))
        except lock.BusyError:
            raise UserError(f"{folder}: another process runs this study; wait for it, or stop it first") from None
        except OSError as error:
            raise UserError(f"{folder}: cannot be written ({error}); choose another folder with --output") from None
        yield


def train_missing(study: Study, states: dict[str, RunState], estimate: Estimate, machine: Machine) -> list[str]:
    """Trains what is not finished, in the study's order, and writes the result from time to time.

    A run that fails is told, and the next one is trained: its fault may be its own, and a night is not lost.

    Returns:
        The runs that failed; `states` has the others as finished.
    """
    progress = Progress()
    failed = []
    written, cost = time.monotonic(), 0.0
    for number, run in enumerate(study.runs, start=1):
        state = states[run.name]
        if state.finished:
            continue
        place = f"run {number} of {len(study.runs)}, {run.name}"
        progress.say(f"{place}: {_time_left(run, states, estimate)}")
        begun = time.monotonic()
        try:
            problem = _train(run, states, estimate, machine, progress)
        except (OSError, UserError) as error:  # of its config, its log or what it recorded
            problem = one_line(error)
        seconds = time.monotonic() - begun
        if problem is not None:
            failed.append(run.name)
            progress.say(f"{place}: failed after {in_words(seconds)}: {problem}")
            continue
        if state.share_left:
            launch = Launch(run.name, state.share_left, seconds, machine.processes)
            try:
                record_launch(machine.folder, launch)
            except OSError as error:  # only later estimates are the worse for it
                progress.say(f"what the run took could not be recorded: {error}")
            estimate = estimate.with_launch(launch)
        states[run.name] = replace(state, finished=True)
        progress.say(f"{place}: done in {in_words(seconds)}")
        if cost <= SHARE_FOR_RESULTS * (time.monotonic() - written):
            begun = time.monotonic()
            refresh_result(study, machine.folder, states, progress)
            written, cost = time.monotonic(), time.monotonic() - begun
    return failed


def refresh_result(study: Study, folder: Path, states: Mapping[str, RunState], progress: "Progress") -> None:
    """Writes the result on the way; what goes wrong with it is told, and is no reason to stop training."""
    try:
        write_result(study, folder, states)
    except Exception as error:  # of whatever draws it, too
        progress.say(f"the result could not be written: {error or type(error).__name__}")


def _time_left(run: StudyRun, states: Mapping[str, RunState], estimate: Estimate) -> str:
    about = "about" if estimate.launches else "at a guess"
    own = in_words(estimate.seconds(run, states[run.name].share_left))
    return f"{about} {own} for this run, {in_words(estimate.total(states))} for the study"


def _train(
    run: StudyRun, states: Mapping[str, RunState], estimate: Estimate, machine: Machine, progress: "Progress"
) -> str | None:
    """Trains a run, or the rest of it, and shows how far it is; returns what went wrong, if anything did."""
    state, metrics = states[run.name], machine.folder / run.name / METRICS
    before, begun = _changed_at(metrics), time.monotonic()

    def show() -> None:
        step = last_step(metrics) if _changed_at(metrics) != before else 0
        total = state.total_steps
        if step and total is None:
            total = recorded_total(metrics)
        if step and step == total:
            progress.show(f"  step {step:,} of {total:,}: writing the report")
        elif step > state.step and state.total_steps is None:
            progress.show(f"  step {step:,}" + (f" of {total:,}" if total else ""))
        elif step > state.step and state.total_steps is not None:
            share = (step - state.step) / state.total_steps
            launch = Launch(run.name, share, time.monotonic() - begun, machine.processes)
            left = _time_left(run, {**states, run.name: replace(state, step=step)}, estimate.with_launch(launch))
            progress.show(f"  step {step:,} of {state.total_steps:,}: {left}")

    (machine.folder / "logs").mkdir(exist_ok=True)
    with (machine.folder / "logs" / f"{run.name}.log").open("a+", encoding="utf-8", errors="replace") as log:
        place = log.seek(0, os.SEEK_END)
        with started(_command(run, state, machine), log) as process:
            while not _ended(process):
                show()
        log.seek(place)
        said = log.read()
    if process.returncode < 0:  # so it has said nothing of its end
        return f"it was ended by signal {-process.returncode} ({signal.strsignal(-process.returncode)})"
    if process.returncode:
        return f"status {process.returncode}; {what_it_said(said)}"
    finished = read_run_state(machine.folder / run.name, run.config).finished
    return None if finished else f"it ended before its last step; {what_it_said(said)}"


def _command(run: StudyRun, state: RunState, machine: Machine) -> list[str]:
    """The command that trains a run, whose config it writes."""
    config = machine.folder / "configs" / f"{run.name}.yaml"
    config.parent.mkdir(exist_ok=True)
    comment = "# A run of a study, with every value: base, set, interventions and seeds are in them already.\n"
    config.write_text(comment + yaml_text(config_mapping(run.config)), encoding="utf-8")
    options = ["--output", str(machine.folder), *(["--overwrite"] if state.changed else ["--resume", "auto"])]
    options += ["--microbatch", str(machine.microbatch)] if machine.microbatch is not None else []
    return training_command(str(config), machine.datasets, machine.processes, *options)


def _changed_at(path: Path) -> int | None:
    """When a file was last written; what an earlier launch recorded behind its checkpoint says nothing of this one."""
    return path.stat().st_mtime_ns if path.is_file() else None


def _ended(process: "subprocess.Popen[str]") -> bool:
    """Whether it has, after waiting a little."""
    try:
        process.wait(SECONDS_BETWEEN_LOOKS)
    except subprocess.TimeoutExpired:
        return False
    return True


def last_step(path: Path) -> int:
    """The last step that a run has recorded; 0 without any. Only the end of the file is read."""
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL))
        lines = file.read().split(b"\n")
    for line in reversed(lines[:-1]):
        try:
            return int(parse_json(line)["step"])
        except (ValueError, KeyError, TypeError):  # the first line of the piece may be half of one
            continue
    return 0


def recorded_total(path: Path) -> int | None:
    """The steps of a run, as its beginning recorded them; None where it did not yet."""
    try:
        with path.open("rb") as file:
            total = parse_json(file.readline())["total_steps"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return total if isinstance(total, int) else None


class Progress:
    """What is shown on the way: on a terminal the last line changes in place, elsewhere one appears now and then."""

    def __init__(self) -> None:
        self._line: tqdm[Any] = tqdm(bar_format="{desc}", disable=None, leave=False)
        self._shown = time.monotonic()

    def say(self, text: str) -> None:
        """A line that stays."""
        self._line.set_description_str("", refresh=False)
        tqdm.write(text, file=sys.stderr)
        self._shown = time.monotonic()

    def show(self, text: str) -> None:
        """A line that the next one replaces."""
        if not self._line.disable:
            self._line.set_description_str(text[:MOST_COLUMNS])
        elif time.monotonic() - self._shown > SECONDS_BETWEEN_LINES:
            self.say(text)
