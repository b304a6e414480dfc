"""A run's report: a page of Markdown and three charts, from its config.yaml and metrics.jsonl alone.

Of all else only the names of checkpoints are looked at, so `isobatch report RUN` can write it again at any time, also
for a run that was stopped half way or that went on elsewhere.
"""

import os
from pathlib import Path
from typing import Any

from training.charts import draw_charts
from training.checkpoint_files import SUPERSEDED, list_checkpoints, number_of
from training.errors import RunError, UserError, one_line
from training.metrics_file import Metrics, read_metrics, require_file
from training.report_sections import (
    change_section,
    chart_section,
    fenced,
    gradient_section,
    last_validation,
    number,
    place_section,
    progress,
    result_section,
    run_section,
    sample_section,
)
from training.yaml_reader import read_yaml


def summary_lines(metrics: Metrics) -> list[str]:
    """The lines that training prints at its end; the first four are worded as the forerunner's were.

    Time and tokens count from the run's beginning, over resumes; the time is that of training alone.
    """
    if not metrics.reached:
        return ["No step has been trained yet"]
    state = "complete" if metrics.ending == "finished" else f"reached {progress(metrics)}"
    lines = [f"Training {state}"]
    if known := metrics.tokens_and_seconds():
        tokens, seconds = known
        lines = [f"Training {state} in {seconds:,.3f} seconds", f"Tokens seen: {tokens:,}"]
        lines += [f"Throughput: {tokens / seconds:,.0f} tokens/second"] if seconds > 0 else []
    if lacking := metrics.lacking():
        lines.append(f"Not recorded: {lacking}")
    if len(metrics.train):
        last = metrics.train[-1]
        name = "Final train loss" if last["step"] == metrics.reached else f"Train loss at step {last['step']:,}"
        lines.append(f"{name}: {number(last['loss'], '.3f')}")
    best = metrics.best_validation()
    if best is not None and not len(metrics.validation):
        lines.append(f"Best validation loss: {best['loss']:.3f} at step {best['step']:,}")
    elif best is not None:
        name, final = last_validation(metrics, " loss"), number(metrics.validation[-1]["loss"], ".3f")
        lines.append(f"{name}: {final} (best: {best['loss']:.3f} at step {best['step']:,})")
    return lines


def write_report(run_folder: Path) -> Path:
    """Writes loss.png, grad_norm.png, learning_rate.png and report.md into a run's folder; returns the last.

    Each file is written beside its place and moved there, so a reader never sees half of one.

    Raises:
        UserError: config.yaml or metrics.jsonl is missing or cannot be read.
        RunError: a file cannot be written.
    """
    config_file = run_folder / "config.yaml"
    config = _read_config(config_file)
    metrics = read_metrics(run_folder / "metrics.jsonl")
    name = one_line(run_folder.resolve().name)
    clip_norm = (config.get("optimizer") or {}).get("clip_norm")
    for file_name, picture in draw_charts(metrics, name, clip_norm).items():
        _replace(run_folder / file_name, picture)
    sections = [
        [f"# {name}", "", _status(metrics, _newest_checkpoint(run_folder))],
        result_section(metrics),
        chart_section(),
        run_section(metrics, config),
        place_section(metrics),
        change_section(metrics),
        gradient_section(metrics, clip_norm),
        sample_section(metrics),
        ["## Config", "", fenced(config_file.read_text(encoding="utf-8"), "yaml")],
    ]
    text = "\n\n".join("\n".join(section) for section in sections if section) + "\n"
    report = run_folder / "report.md"
    # A sample can end in half a character, which UTF-8 cannot hold.
    _replace(report, text.encode("utf-8", errors="replace"))
    return report


def _read_config(path: Path) -> dict[str, Any]:
    require_file(path)
    config = read_yaml(path)
    kinds: dict[str, type] = {"optimizer": dict, "data": dict, "interventions": list, "overrides": list}
    wrong = [key for key, kind in kinds.items() if not isinstance(config.get(key), kind | None)]
    if not wrong and type((config.get("optimizer") or {}).get("clip_norm")) not in (int, float, type(None)):
        wrong = ["optimizer.clip_norm"]
    if wrong:
        raise UserError(f"{path}: {wrong[0]}: is not as training writes it; repair it by hand")
    return config


def _replace(path: Path, content: bytes) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error}); make room, or make place for it") from None
    finally:
        partial.unlink(missing_ok=True)


# The page


def _newest_checkpoint(run_folder: Path) -> int:
    """The step of the newest checkpoint that is this run's."""
    return max(
        (number_of(path) for path in list_checkpoints(run_folder) if not (path / SUPERSEDED).exists()), default=0
    )


def _status(metrics: Metrics, newest_checkpoint: int) -> str:
    endings = {
        "finished": "Finished",
        "stopped": "Stopped by `--stop-after`, can be resumed",
        "interrupted": "Interrupted, can be resumed",
    }
    status = f"{endings.get(metrics.ending, 'Not finished')}: {progress(metrics)}."
    lacking = metrics.lacking(newest_checkpoint)
    return f"{status} The record (`metrics.jsonl`) lacks {lacking}, and so do the figures here." if lacking else status
