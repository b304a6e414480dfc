"""Runs compared: a row for each group of repetitions, against a baseline, and what may be claimed of it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from training.config_file import INTERVENTIONS
from training.errors import UserError
from training.laboratory.comparability import (
    UNITS,
    Measure,
    choose_measure,
    describe_changes,
    obstacle,
    remarks_on,
    same_beginnings,
    value_of,
)
from training.laboratory.results import RunResult
from training.laboratory.statistics import (
    PAIRED,
    SIGNIFICANT,
    Difference,
    Interval,
    Method,
    Seeds,
    adjust_by_holm,
    compare_means,
    deviation_interval,
    deviation_of,
    mean_interval,
    mean_of,
)
from training.yaml_reader import read_yaml

NO_DIFFERENCE = Difference(math.nan, None, None, "none", 0)
ONE_RUN = "one run on one side: judged by how far single runs of the other side lie apart"
TWO_SEEDS = (
    "With two seeds only an effect of more than nine standard deviations of the differences between seeds can be told "
    "from the noise; three seeds find one of two and a half, five one of 1.2"
)

Verdict = Literal[
    "baseline",
    "better",
    "worse",
    "inside the noise",
    "one seed: no claim possible",
    "no noise: no claim possible",
    "the same losses",
    "reference",
    "not finite",
    "not comparable",
]


@dataclass(frozen=True)
class Run:
    """A run's place in a comparison."""

    result: RunResult
    value: float | None
    """In the comparison's measure."""
    obstacle: str | None
    """Why it is not compared; None if it is."""


@dataclass(frozen=True)
class Row:
    """A group of repetitions. What cannot be said is None."""

    group: str
    changes: str
    """In what its config differs from the baseline's."""
    runs: int
    """Runs that are compared."""
    seeds: int
    """Different seeds among them, over which everything is taken: runs of the same seeds count as their mean."""
    mean: float | None
    mean_interval: Interval | None
    deviation: float | None
    """Sample standard deviation over the seeds."""
    deviation_interval: Interval | None
    difference: float | None
    """To the baseline's mean; where the test is paired, over the shared seeds."""
    interval: Interval | None
    """Of the difference, 95 %, for this row alone."""
    method: Method
    p_value: float | None
    adjusted_p_value: float | None
    """By Holm over all rows with a p value; the verdict goes by this one."""
    tokens: int | None
    """Trained on, the mean of the runs."""
    tokens_per_second: float | None
    seconds: float | None
    """Training time, the mean of the runs."""
    verdict: Verdict
    marks: tuple[str, ...]
    """What is to be known before it is believed."""


@dataclass(frozen=True)
class Comparison:
    """What `compare_results` found; rows from the lowest mean on."""

    baseline: str
    measure: Measure
    rows: tuple[Row, ...]
    runs: tuple[Run, ...]
    remarks: tuple[str, ...]


def compare_results(results: Sequence[RunResult], baseline: str) -> Comparison:
    """Compares groups of runs with a baseline.

    Args:
        results: of the runs; `group` says which of them are repetitions.
        baseline: name of a group, or of a run in it.

    Raises:
        UserError: the baseline has no result to compare with.
    """
    base = next((result.group for result in results if baseline in (result.group, result.name)), None)
    assert base is not None, f"{baseline} is one of the results"
    members = [result for result in results if result.group == base]
    reference = next((result for result in members if obstacle(result, None, "loss") is None), None)
    if reference is None:
        why = "; ".join(f"{result.name}: {obstacle(result, None, 'loss')}" for result in members)
        raise UserError(
            f"the baseline {base} has no result to compare with ({why}); finish a run of it, measure it with "
            "--datasets DATASETS, or choose another one with --baseline"
        )
    measure = choose_measure(results, reference)
    runs = tuple(Run(result, value_of(result, measure), obstacle(result, reference, measure)) for result in results)
    groups = {name: [run for run in runs if run.result.group == name] for name in _names(results)}
    interventions = {name: values.get("set", {}) for name, values in read_yaml(INTERVENTIONS).items()}
    rows = _judged([_row(name, group, groups[base], reference, interventions) for name, group in groups.items()])
    rows.sort(key=lambda row: math.inf if row.mean is None or math.isnan(row.mean) else row.mean)
    baseline_row = next(row for row in rows if row.group == base)
    remarks = [*_remarks(baseline_row, groups[base], rows, measure), *same_beginnings(results)]
    return Comparison(base, measure, tuple(rows), runs, tuple(remarks))


def _names(results: Sequence[RunResult]) -> list[str]:
    return list(dict.fromkeys(result.group for result in results))


def _by_seed(runs: Sequence[Run]) -> dict[Seeds, float]:
    """The result of each seed: the mean of the runs that share it."""
    seeds = dict.fromkeys(run.result.seeds for run in runs)
    return {
        pair: mean_of([run.value for run in runs if run.result.seeds == pair and run.value is not None])
        for pair in seeds
    }


def _row(
    name: str,
    group: Sequence[Run],
    baseline: Sequence[Run],
    reference: RunResult,
    interventions: Mapping[str, dict[str, Any]],
) -> Row:
    """A group's row, its verdict as far as the group alone tells."""
    good = [run for run in group if run.obstacle is None]
    losses = _by_seed(good)
    values = list(losses.values())
    deviation = deviation_of(values) if values else None
    against = _by_seed([run for run in baseline if run.obstacle is None])
    difference = NO_DIFFERENCE if not values or group is baseline else compare_means(against, losses)
    imported = any(run.result.imported for run in good)
    if imported:  # its training differs in more than anything here could name
        difference = replace(difference, interval=None, p_value=None, method="none")
    seconds = [run.result.seconds for run in good if run.result.seconds > 0]
    tokens = [run.result.train_tokens for run in good if not run.result.imported]
    return Row(
        group=name,
        changes="" if imported else describe_changes(group[0].result.config, reference.config, interventions),
        runs=len(good),
        seeds=len(values),
        mean=mean_of(values) if values else None,
        mean_interval=mean_interval(values),
        deviation=deviation,
        deviation_interval=deviation_interval(deviation, len(values)),
        difference=difference.estimate if math.isfinite(difference.estimate) else None,
        interval=difference.interval,
        method=difference.method,
        p_value=difference.p_value,
        adjusted_p_value=None,
        tokens=round(mean_of(tokens)) if tokens else None,
        tokens_per_second=sum(tokens) / sum(seconds) if seconds else None,
        seconds=mean_of(seconds) if seconds else None,
        verdict="baseline" if group is baseline else "reference" if imported else _without_test(losses, against),
        marks=tuple(_marks(group, reference, difference.method, len(losses))),
    )


def _without_test(losses: Mapping[Seeds, float], against: Mapping[Seeds, float]) -> Verdict:
    """What is said of a group as long as no test says more."""
    if not losses or not math.isfinite(mean_of(list(against.values()))):
        return "not comparable"
    if not math.isfinite(mean_of(list(losses.values()))):
        return "not finite"
    if all(math.isclose(loss, against.get(seeds, math.nan), rel_tol=1e-12) for seeds, loss in losses.items()):
        return "the same losses"
    if len(losses) == len(against) == 1:
        return "one seed: no claim possible"
    return "no noise: no claim possible"


def _judged(rows: Sequence[Row]) -> list[Row]:
    """The rows with Holm's p values, and the verdicts that follow from them."""
    judged = []
    for row, adjusted in zip(rows, adjust_by_holm([row.p_value for row in rows]), strict=True):
        verdict: Verdict = row.verdict
        if adjusted is not None and adjusted >= SIGNIFICANT:
            verdict = "inside the noise"
        elif adjusted is not None and row.difference is not None:
            verdict = "better" if row.difference < 0 else "worse"
        judged.append(replace(row, adjusted_p_value=adjusted, verdict=verdict))
    return judged


def _marks(group: Sequence[Run], reference: RunResult, method: Method, seeds: int) -> list[str]:
    """What is to be known of a row before it is believed, a phrase each."""
    good = [run.result for run in group if run.obstacle is None]
    marks = [f"{run.result.name} left out: {run.obstacle}" for run in group if run.obstacle is not None]
    marks += [f"{result.name}: the loss is not finite" for result in good if not math.isfinite(result.loss or 0)]
    for result in good:
        marks += remarks_on(result, reference)
    if len(good) > seeds:
        marks.append(f"{len(good)} runs with {seeds} different seeds: runs that share their seeds count as their mean")
    if method == "one run":
        marks.append(ONE_RUN)
    return list(dict.fromkeys(marks))


def _remarks(baseline: Row, runs: Sequence[Run], rows: Sequence[Row], measure: Measure) -> list[str]:
    """What holds for the whole table, a sentence each; `runs` are the baseline's."""
    remarks = []
    good = [run for run in runs if run.obstacle is None]
    diverged = [run.result.name for run in good if not math.isfinite(run.value or 0)]
    if diverged:
        remarks.append(
            f"A run of the baseline is not finite ({', '.join(diverged)}), so nothing can be compared with it; choose "
            "another baseline"
        )
    if baseline.deviation is not None and baseline.deviation_interval is not None:
        low, high = baseline.deviation_interval
        remarks.append(
            f"Noise of the seeds: the baseline's {baseline.seeds} have a standard deviation of "
            f"{baseline.deviation:.4f} {UNITS[measure]}; that of all seeds lies between {low:.4f} and {high:.4f} (95 %)"
        )
    others = [row for row in rows if row is not baseline]
    if baseline.seeds == 1 and (not others or any(row.seeds for row in others)):
        remarks.append(
            "The baseline has one seed, so nothing says how far another one would have ended: train it with at least "
            "two more (--set seeds.weights=..., --set seeds.training=...) before a difference is believed"
        )
    if any(row.method == PAIRED and min(row.seeds, baseline.seeds) == 2 for row in others):
        remarks.append(TWO_SEEDS)
    tests = sum(row.p_value is not None for row in rows)
    if tests > 1:
        remarks.append(
            f"p (Holm) is p corrected for the {tests} differences tested, and the verdict goes by it (below "
            f"{SIGNIFICANT}); each 95 % interval is for its difference alone, not corrected, so one may leave out 0 "
            "and the verdict still be inside the noise"
        )
    return remarks
