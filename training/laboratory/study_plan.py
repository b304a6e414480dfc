"""What a study has to do: which of its runs are done, begun or missing, how long the rest takes, and its disk space."""

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path

from model.gpt import flops_per_token, parameter_count
from training.changes import compare_configs, shown
from training.checkpoint_files import list_checkpoints, number_of
from training.config import RunConfig
from training.config_check import config_of_record
from training.free_space import BYTES_PER_PARAMETER, size_in_words
from training.json_file import append_objects, parse_json
from training.laboratory.comparison import TWO_SEEDS
from training.laboratory.study_file import Study, StudyRun
from training.metrics_file import read_metrics
from training.run_folder import CONFIG, METRICS
from training.yaml_reader import read_yaml

LAUNCHES = "launches.jsonl"
WITHOUT_EFFECT = ("batch", "checkpoint", "evaluation", "hub", "tracking")
"""Sections whose changes, where a resumed run may take them, leave its result as it is: what counts is
the validation of the last step, over the whole range, and of `batch` only the split can be another. Any other change
would mix two configs."""
SHARE_OF_PRODUCTS = 1 / 3
"""Of the speed of large matrix products, what training is guessed to reach before anything has been measured."""
START_UP = 25.0
"""Seconds that a run takes beside its training, for imports, last validation and report, until one has been measured.
The median of forerunner-mini's 42 runs, on two CPU cores with other work beside them, was 22 s."""
FEWEST_SEEDS = 3


@dataclass(frozen=True)
class RunState:
    """How far a run of a study is, by what lies in its folder."""

    step: int
    """Of its newest checkpoint, where it goes on; 0 = from the beginning."""
    total_steps: int | None
    """None while the length of the data is not known."""
    finished: bool
    changed: tuple[str, ...] = ()
    """In what the study's config is not that with which the folder's run was begun."""

    @property
    def share_left(self) -> float:
        """The share of the run's steps that is still to be trained."""
        if self.finished:
            return 0.0
        return 1 - self.step / self.total_steps if self.total_steps else 1.0

    @property
    def words(self) -> str:
        """The state, for the plan."""
        if self.changed:
            return f"again, as it was trained with {', '.join(self.changed)}"
        if self.finished:
            return "done"
        return f"at step {self.step:,} of {self.total_steps or 0:,}" if self.step else "missing"


@dataclass(frozen=True)
class Launch:
    """What training a run, or the rest of one, took from start to end of its processes."""

    run: str
    share: float
    """Of the run's steps."""
    seconds: float
    processes: int


def read_run_state(run_folder: Path, config: RunConfig) -> RunState:
    """Looks at the folder of a run.

    Raises:
        UserError: it holds a config.yaml or metrics.jsonl that cannot be read.
    """
    if not (run_folder / CONFIG).is_file():
        return RunState(0, config.total_steps, finished=False)
    saved = config_of_record({**read_yaml(run_folder / CONFIG), "name": config.name}, str(run_folder / CONFIG))
    checkpoints = list_checkpoints(run_folder)
    step = number_of(checkpoints[-1]) if checkpoints else 0
    changes = compare_configs(saved, config, step)
    taken = [shown(*item, " ") for item in changes.taken.items() if item[0].split(".")[0] not in WITHOUT_EFFECT]
    if changes.refused or taken:
        return RunState(0, config.total_steps, finished=False, changed=(*changes.refused, *taken))
    events = read_metrics(run_folder / METRICS).events if (run_folder / METRICS).is_file() else []
    begins = [event for event in events if event["event"] in ("start", "resume")]
    total = begins[-1].get("total_steps") if begins else config.total_steps
    endings = [event["step"] for event in events if event["event"] == "finished"]
    return RunState(step, total, finished=total is not None and total in endings)


def read_launches(folder: Path) -> list[Launch]:
    """What earlier runs of the study took; a line that says nothing of the kind is left out."""
    launches = []
    for line in (folder / LAUNCHES).read_bytes().splitlines() if (folder / LAUNCHES).is_file() else []:
        try:
            launches.append(_launch(line))
        except (ValueError, TypeError):
            continue
    return launches


def _launch(line: bytes) -> Launch:
    launch = Launch(**parse_json(line))
    if not (0 < launch.share <= 1 and 0 < launch.seconds < math.inf and isinstance(launch.run, str)):
        raise ValueError("no launch takes that long")
    return launch


def record_launch(folder: Path, launch: Launch) -> None:
    """Adds to what `read_launches` reads; raises an OSError where that cannot be written."""
    append_objects(folder / LAUNCHES, asdict(launch))


@dataclass(frozen=True)
class Estimate:
    """How long runs take, by what was measured so far, each in proportion to its floating-point operations.

    A run is held against those of its own group, where there are any, else against all of the study.
    """

    runs: Mapping[str, StudyRun]
    launches: tuple[Launch, ...]
    """Of these runs, with as many processes as now."""
    guess: float
    """Operations per second, for as long as nothing has been measured."""

    def with_launch(self, launch: Launch) -> "Estimate":
        """The same, knowing one more."""
        return replace(self, launches=(*self.launches, launch))

    def seconds(self, run: StudyRun, share: float) -> float:
        """How long so much of a run takes."""
        own = [launch for launch in self.launches if self.runs[launch.run].group == run.group]
        known = own or self.launches
        done = sum(launch.share * operations(self.runs[launch.run].config) for launch in known)
        if not done:
            return share * operations(run.config) / self.guess + (START_UP if share else 0.0)
        return share * operations(run.config) * sum(launch.seconds for launch in known) / done

    def total(self, states: Mapping[str, RunState]) -> float:
        """How long all that is left takes."""
        return sum(self.seconds(self.runs[name], state.share_left) for name, state in states.items())


def estimate_from(study: Study, launches: Sequence[Launch], processes: int) -> Estimate:
    """The estimate at a study's start; without anything measured, a guess."""
    runs = {run.name: run for run in study.runs}
    same = tuple(launch for launch in launches if launch.processes == processes and launch.run in runs)
    return Estimate(runs, same, 0.0 if same else guessed_speed(study.runs[0].config, processes))


def operations(config: RunConfig) -> float:
    """Floating-point operations of a run; where its length is not known, those of a token for each epoch.

    Which is enough to compare the runs of a study: they read the same data.
    """
    tokens = config.data.epochs if config.total_steps is None else config.total_steps * config.tokens_per_step
    return float(tokens) * flops_per_token(config.model)


def guessed_speed(config: RunConfig, processes: int) -> float:
    """Operations per second that training may reach: a third of what matrix products do on this machine.

    With GPUs they are tried in a process of its own, which leaves no memory taken on one of them.
    """
    import torch

    if not torch.cuda.is_available():
        return SHARE_OF_PRODUCTS * speed_of_products("cpu", "float32", 512)
    dtype = {"off": "float32", "bf16": "bfloat16", "fp16": "float16"}[config.precision.amp]
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return SHARE_OF_PRODUCTS * processes * pool.submit(speed_of_products, "cuda", dtype, 8192).result()


def speed_of_products(device: str, dtype: str, size: int) -> float:
    """Floating-point operations per second of square matrix products, tried for a moment."""
    import torch

    matrix = torch.ones(size, size, dtype=getattr(torch, dtype), device=device)

    def seconds_for(products: int) -> float:
        begun = time.perf_counter()
        for _ in range(products):
            result = matrix @ matrix
        result[0, 0].item()  # waits for a GPU
        return time.perf_counter() - begun

    seconds_for(3)
    return 10 * 2 * size**3 / seconds_for(10)


def plan_lines(study: Study, states: Mapping[str, RunState], estimate: Estimate) -> list[str]:
    """The plan of a study: every run with its state and time, and what all of it takes in time and space."""
    width = max(len(run.name) for run in study.runs)
    about = "about" if estimate.launches else "perhaps"
    lines = [_headline(study, states)]
    for run in study.runs:
        left = states[run.name].share_left
        time_left = f", {about} {in_words(estimate.seconds(run, left))}" if left else ""
        lines.append(f"  {run.name:<{width}}  {states[run.name].words}{time_left}")
    lines += [f"time: {_time_line(states, estimate)}", f"disk: {_disk_line(study)}"]
    return [*lines, *_seeds_lines(study)]


def _seeds_lines(study: Study) -> list[str]:
    """A warning where so few seeds can show little; none where a row of one seed has a well-known baseline."""
    seeds = Counter(run.group for run in study.runs)
    if seeds[study.baseline] >= FEWEST_SEEDS:
        return []
    if min(seeds.values()) == 1:
        return ["seeds: one of each row, so that no claim will be possible; give at least three"]
    return [f"seeds: {TWO_SEEDS}"]


def _headline(study: Study, states: Mapping[str, RunState]) -> str:
    groups = {run.group for run in study.runs}
    done = sum(state.finished for state in states.values())
    begun = sum(not state.finished and state.step > 0 for state in states.values())
    config = study.runs[0].config
    length = "" if config.total_steps is None else f" of {config.total_steps * config.tokens_per_step:,} tokens"
    return (
        f"study {study.name}: {study.baseline} and {len(groups) - 1} others, {len(study.runs)} runs{length}: "
        f"{done} done, {begun} begun, {len(states) - done - begun} to start"
    )


def _time_line(states: Mapping[str, RunState], estimate: Estimate) -> str:
    left = sum(not state.finished for state in states.values())
    if not left:
        return "nothing left to train"
    what = f"{in_words(estimate.total(states))} for {left} run{'s' * (left > 1)}"
    if estimate.launches:
        return f"about {what}, by what {len(estimate.launches)} took on as many processes"
    return (
        f"perhaps {what}: a guess, easily wrong by a factor of three, from this machine's matrix "
        "products, of whose speed training often reaches a third; it becomes a measurement once the first run trains"
    )


def _disk_line(study: Study) -> str:
    """Checkpoints: how large, how many stay of each run, and together."""
    sizes = {run.name: BYTES_PER_PARAMETER * parameter_count(run.config.model) for run in study.runs}
    config = study.runs[0].config
    keep, best = config.checkpoint.keep, bool(config.evaluation.every)  # only a best on the way can be another one
    return (
        f"checkpoints of {size_in_words(max(sizes.values()))}; of each run {keep}{' and the best' * best} stay, at "
        f"most {size_in_words((keep + best) * sum(sizes.values()))} in all, and one more while a run trains"
    )


def in_words(seconds: float) -> str:
    """A time for people, no more exact than an estimate."""
    seconds = max(seconds, 1.0)  # nothing takes no time
    for limit, unit, name in ((90, 1, "s"), (90 * 60, 60, "min"), (48 * 3600, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.0f} {name}" if unit < 3600 else f"{seconds / unit:.1f} {name}"
    return f"{seconds / 86400:.1f} days"
