"""What was compared, in a few lines, for whoever opens a comparison without knowing how it came about."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from training.laboratory.comparability import UNITS
from training.laboratory.comparison import Comparison
from training.laboratory.results import RunResult
from training.run_folder import METRICS

MOST_NAMES = 3
JUDGED = ("better", "worse")


def heading(comparison: Comparison, title: str | None) -> str:
    """The title of a comparison: of the study or folder that its runs are from, if they are from one."""
    return f"{title}: comparison with {comparison.baseline}" if title else f"Comparison with {comparison.baseline}"


def summary(comparison: Comparison, results: Sequence[RunResult]) -> list[str]:
    """Runs, model, training, data, measure, machines and date, a sentence each, as far as the runs' folders tell."""
    trained = [result for result in results if not result.imported]
    rows, seeds = len(comparison.rows), _range({row.seeds for row in comparison.rows if row.seeds})
    lines = [f"Runs: {len(results):,} in {rows:,} row{'s' * (rows != 1)}" + (f", seeds of each: {seeds}" * bool(seeds))]
    base = [result for result in results if result.group == comparison.baseline]
    parameters, others = (_range(set(_said(runs, "parameters"))) for runs in (base, results))
    others = "" if others == parameters else f" (all rows: {others})"
    context = _range({result.config.model.context_length for result in results})
    if parameters:
        lines.append(f"Model: {parameters} parameters{others}, context of {context} tokens")
    if trained:
        tokens, steps = _range({run.train_tokens for run in trained}), _range({run.step for run in trained})
        lines.append(f"Training: {tokens} tokens in {steps} steps per run")
    lines.append(f"Dataset: {_names(_datasets(results))}")
    targets = next((run.result.target_tokens for run in comparison.runs if run.obstacle is None), None)
    over = f", over {targets:,} tokens" if targets and comparison.measure == "loss" else ""
    lines.append(f"Measure: validation loss after the last step, {UNITS[comparison.measure]}{over}; lower is better")
    if machines := _machines(trained):
        lines.append(f"Machine: {_names(machines)}")
    # A run does not record the time of day; a copied file may be younger than its content.
    days = sorted({_day(result) for result in results})
    lines.append(f"Date: {' to '.join(dict.fromkeys([days[0], days[-1]]))}, of the runs' files")
    return lines


def how_to_read(comparison: Comparison) -> list[str]:
    """What the verdicts of this table do not say, a sentence each."""
    verdicts = [row.verdict for row in comparison.rows]
    sentences = []
    if "inside the noise" in verdicts:
        sentences.append(
            '"Inside the noise" does not mean "no effect": these runs cannot tell the difference from another draw of '
            "the seeds, and the interval says how large an effect may still be hidden in them"
        )
    if sum(verdict in JUDGED for verdict in verdicts) > 1:
        sentences.append(
            "Rows that differ from the baseline by more than the noise are not ranked among themselves: each was "
            "tested against the baseline alone"
        )
    return sentences


def _said(results: Iterable[RunResult], key: str) -> list[Any]:
    """What the runs recorded of themselves when they began."""
    begins = (event for result in results for event in result.metrics.events_named("start", "resume", "import"))
    return [event[key] for event in begins if event.get(key) is not None]


def _datasets(results: Iterable[RunResult]) -> list[str]:
    revisions = ((result.config.data.dataset, result.dataset_revision) for result in results)
    return [f"{name} (revision {revision[:12]})" if revision else name for name, revision in revisions]


def _machines(results: Iterable[RunResult]) -> list[str]:
    """Each machine with the processes, the device and the version of torch of the runs on it."""
    machines = []
    for result in results:
        for event in result.metrics.events_named("start", "resume"):
            layout = event.get("layout")
            processes = layout.get("world_size") if isinstance(layout, dict) else None
            parts = [str(event["machine"])] if event.get("machine") else []
            parts += [f"{processes} process{'es' * (processes != 1)}"] if processes else []
            parts += [f"torch {event['torch']}"] if event.get("torch") else []
            machines.append(", ".join(parts))
    return [machine for machine in machines if machine]


def _day(result: RunResult) -> str:
    return datetime.fromtimestamp((result.folder / METRICS).stat().st_mtime, UTC).strftime("%Y-%m-%d")


def _range(numbers: Iterable[int]) -> str:
    ordered = sorted(numbers)
    return " to ".join(f"{number:,}" for number in dict.fromkeys([*ordered[:1], *ordered[-1:]]))


def _names(names: Iterable[str]) -> str:
    """Each once, the first few."""
    different = list(dict.fromkeys(names))
    more = f" and {len(different) - MOST_NAMES} more" if different[MOST_NAMES:] else ""
    return "; ".join(different[:MOST_NAMES]) + more
