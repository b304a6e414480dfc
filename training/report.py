"""A run's report: three charts and a page of Markdown, from its config.yaml and metrics.jsonl alone.

Nothing else is read, so `isobatch report RUN` can write it again at any time, also for a run that was stopped
half way or that went on elsewhere.
"""

import io
import json
import math
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml
from numpy.typing import NDArray

from training.errors import UserError

# matplotlib takes most of a second to import, so only the functions that draw do it.
if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TRAIN_FIELDS: dict[str, type] = {
    "step": int,
    "tokens": int,
    "loss": float,
    "loss_min": float,
    "loss_max": float,
    "learning_rate": float,
    "grad_norm": float,
    "clipped": bool,
    "skipped": bool,
    "target_tokens": int,
    "tokens_per_second": float,
    "seconds": float,
}
VALIDATION_FIELDS: dict[str, type] = {
    "step": int,
    "loss": float,
    "target_tokens": int,
    "bits_per_byte": float,
}
# What a field takes from JSON, and up to which size: a float may lack its point; 1e999 is read as infinity.
ACCEPTED = {int: ((int,), 2**53), float: ((int, float), sys.float_info.max), bool: ((bool,), 1)}

MOST_POINTS = 2000
# Okabe and Ito's colours, which stay apart for every kind of colour blindness.
BLUE, VERMILION, GREEN, PURPLE, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#707070"

Column = NDArray[np.float64]
Event = dict[str, Any]


@dataclass(frozen=True)
class Metrics:
    """What a metrics.jsonl holds.

    `train` and `validation` are structured arrays with an element per row and a field per key of the file:
    `train["loss"]` is a column, `train[-1]["loss"]` one value. A null is nan. Losses are in nats per token.
    Events are the file's own objects, in its order.
    """

    train: NDArray[np.void]
    validation: NDArray[np.void]
    events: list[Event]

    def events_named(self, *names: str) -> list[Event]:
        """The events of these names, in the order of the file."""
        return [event for event in self.events if event["event"] in names]

    def best_validation(self) -> np.void | None:
        """The validation row of the lowest loss (the earliest, if several share it); None without one."""
        finite = self.validation[np.isfinite(self.validation["loss"])]
        best: np.void | None = finite[np.argmin(finite["loss"])] if len(finite) else None
        return best


def read_metrics(path: Path) -> Metrics:
    """Reads a metrics.jsonl.

    A last line without its newline was cut by a crash and is left out if it cannot be read.

    Raises:
        UserError: there is no such file, or a line is not a row of the format (strict JSON, a known kind,
            all keys, steps of a kind strictly increasing); the message names the file and the line.
    """
    rows: dict[str, list[Any]] = {"train": [], "validation": [], "event": []}
    _require_file(path)
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                kind, row = _parse_line(line)
                if kind != "event" and rows[kind] and row[0] <= rows[kind][-1][0]:
                    raise ValueError(f"step {row[0]} comes after step {rows[kind][-1][0]}")
            except ValueError as problem:
                if not line.endswith(b"\n"):
                    break
                raise UserError(
                    f"{path}, line {number}: {problem}; each line is one JSON object as training writes it; "
                    "remove or repair the line"
                ) from problem
            rows[kind].append(row)
    return Metrics(
        train=np.array(rows["train"], dtype=list(TRAIN_FIELDS.items())),
        validation=np.array(rows["validation"], dtype=list(VALIDATION_FIELDS.items())),
        events=rows["event"],
    )


def _require_file(path: Path) -> None:
    if not path.is_file():
        raise UserError(f"{path}: there is no such file; training writes it; name the folder of a run that has begun")


def _parse_line(line: bytes) -> tuple[str, Any]:
    """The kind of a line, and its values in the order of the fields (an event: the object itself)."""
    row = json.loads(line, parse_constant=_refuse_constant)
    kind = row.get("kind") if isinstance(row, dict) else None
    if kind == "event" and type(row.get("step")) is int and isinstance(row.get("event"), str):
        return "event", row
    if kind == "train":
        return "train", tuple(_value(row, name, wanted) for name, wanted in TRAIN_FIELDS.items())
    if kind == "validation":
        return "validation", tuple(_value(row, name, wanted) for name, wanted in VALIDATION_FIELDS.items())
    raise ValueError("it is no train, validation or event row")


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _value(row: dict[str, Any], name: str, wanted: type) -> Any:
    value: Any = row.get(name, "nothing")
    types, largest = ACCEPTED[wanted]
    if value is None and wanted is float:
        return math.nan
    if type(value) not in types or abs(value) > largest:
        raise ValueError(f"{name} must be a finite {wanted.__name__}, got {value!r}")
    return value


def summary_lines(metrics: Metrics) -> list[str]:
    """The lines that training prints at its end; the first four are worded as the forerunner's were.

    Time and tokens count from the run's beginning, over resumes; the time is that of training alone.
    """
    if not len(metrics.train):
        return ["No step has been trained yet"]
    last = metrics.train[-1]
    seconds, tokens = float(last["seconds"]), int(last["tokens"])
    state = "complete" if _ending(metrics) == "finished" else f"reached {_progress(metrics)}"
    lines = [f"Training {state} in {seconds:,.3f} seconds", f"Tokens seen: {tokens:,}"]
    if seconds > 0:
        lines.append(f"Throughput: {tokens / seconds:,.0f} tokens/second")
    lines.append(f"Final train loss: {_number(last['loss'], '.3f')}")
    best = metrics.best_validation()
    if best is not None:
        final = _number(metrics.validation[-1]["loss"], ".3f")
        lines.append(f"Final validation loss: {final} (best: {best['loss']:.3f} at step {best['step']:,})")
    return lines


def _ending(metrics: Metrics) -> str:
    """finished, stopped or interrupted; start or resume for a run that goes on or was killed."""
    events = metrics.events_named("start", "resume", "finished", "stopped", "interrupted")
    return str(events[-1]["event"]) if events else "start"


def _progress(metrics: Metrics) -> str:
    step = int(metrics.train[-1]["step"]) if len(metrics.train) else 0
    begins = metrics.events_named("start", "resume")
    total = begins[-1].get("total_steps") if begins else None
    return f"step {step:,}" if total is None else f"step {step:,} of {total:,}"


def _number(value: float, form: str) -> str:
    return format(float(value), form) if math.isfinite(value) else "not finite"


def write_report(run_folder: Path) -> Path:
    """Writes loss.png, grad_norm.png, learning_rate.png and report.md into a run's folder; returns the last.

    Each file is written beside its place and moved there, so a reader never sees half of one.

    Raises:
        UserError: config.yaml or metrics.jsonl is missing or cannot be read.
    """
    config_text, config = _read_config(run_folder / "config.yaml")
    metrics = read_metrics(run_folder / "metrics.jsonl")
    name = run_folder.resolve().name
    clip_norm = (config.get("optimizer") or {}).get("clip_norm")
    for file_name, figure in (
        ("loss.png", _loss_chart(metrics, name)),
        ("grad_norm.png", _grad_norm_chart(metrics, name, clip_norm)),
        ("learning_rate.png", _learning_rate_chart(metrics, name)),
    ):
        picture = io.BytesIO()
        figure.savefig(picture, format="png")
        _replace(run_folder / file_name, picture.getvalue())
    sections = [
        [f"# {name}", "", _status(metrics)],
        _result_section(metrics),
        _chart_section(),
        _run_section(metrics, config),
        _place_section(metrics),
        _gradient_section(metrics, clip_norm),
        _sample_section(metrics),
        ["## Config", "", _fenced(config_text, "yaml")],
    ]
    text = "\n\n".join("\n".join(section) for section in sections if section) + "\n"
    report = run_folder / "report.md"
    # A sample can end in half a character, which UTF-8 cannot hold.
    _replace(report, text.encode("utf-8", errors="replace"))
    return report


def _read_config(path: Path) -> tuple[str, dict[str, Any]]:
    _require_file(path)
    try:
        text = path.read_text(encoding="utf-8")
        config = yaml.safe_load(text)
    except (UnicodeDecodeError, yaml.YAMLError) as problem:
        raise UserError(f"{path}: not YAML ({' '.join(str(problem).split())}); restore the file") from problem
    if not isinstance(config, dict):
        raise UserError(f"{path}: a config is a mapping of sections, got {config!r}; restore the file")
    return text, config


def _replace(path: Path, content: bytes) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


# The page


def _status(metrics: Metrics) -> str:
    endings = {
        "finished": "Finished",
        "stopped": "Stopped by `--stop-after`, can be resumed",
        "interrupted": "Interrupted, can be resumed",
    }
    return f"{endings.get(_ending(metrics), 'Not finished')}: {_progress(metrics)}."


def _table(head: Iterable[object], rows: Iterable[Iterable[object]]) -> list[str]:
    def line(cells: Iterable[object]) -> str:
        return "| " + " | ".join(" ".join(str(cell).split()).replace("|", "\\|") for cell in cells) + " |"

    titles = list(head)
    return [line(titles), "|" + " --- |" * len(titles), *(line(row) for row in rows)]


def _fenced(text: str, language: str = "") -> str:
    """A fenced block; the fence is longer than any run of backticks in the text."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def _result_section(metrics: Metrics) -> list[str]:
    best = metrics.best_validation()
    rows = [] if best is None else [_loss_row("Best validation", best, best["bits_per_byte"])]
    if len(metrics.validation):
        final = metrics.validation[-1]
        rows.append(_loss_row("Final validation", final, final["bits_per_byte"]))
    if len(metrics.train):
        rows.append(_loss_row("Final training step", metrics.train[-1], math.nan))
    if not rows:
        return []
    titles = ("", "Step", "Loss (nats per token)", "Perplexity", "Bits per byte", "Target tokens")
    section = ["## Result", "", *_table(titles, rows)]
    if len(np.unique(metrics.validation["target_tokens"])) > 1:
        note = "The validations do not all cover the same tokens: compare those with the same number."
        section += ["", note]
    return section


def _loss_row(title: str, row: np.void, bits_per_byte: float) -> list[str]:
    loss = float(row["loss"])
    # exp() of a loss that has exploded would overflow; exp(30) is 1e13, beyond any vocabulary.
    perplexity = "over 1e13" if loss > 30 else _number(math.exp(loss), ",.2f")
    bits = format(float(bits_per_byte), ".4f") if math.isfinite(bits_per_byte) else "-"
    return [title, f"{row['step']:,}", _number(loss, ".6f"), perplexity, bits, f"{row['target_tokens']:,}"]


def _chart_section() -> list[str]:
    return [
        "## Charts",
        "",
        "![Training and validation loss](loss.png)",
        "",
        "![Gradient norm before clipping](grad_norm.png)",
        "",
        "![Learning rate](learning_rate.png)",
    ]


def _run_section(metrics: Metrics, config: dict[str, Any]) -> list[str]:
    rows = [
        ("Interventions", ", ".join(config.get("interventions") or ()) or "none"),
        ("Overrides", ", ".join(f"`{override}`" for override in config.get("overrides") or ()) or "none"),
    ]
    begin = (metrics.events_named("start", "resume") or [{}])[-1]
    if "parameters" in begin:
        rows.append(("Parameters", f"{begin['parameters']:,}"))
    if "tokens_per_step" in begin:
        rows.append(("Tokens per step", f"{begin['tokens_per_step']:,}"))
    dataset = str((config.get("data") or {}).get("dataset", "not known"))
    revision = begin.get("dataset_revision")
    rows.append(("Dataset", f"{dataset}, revision {revision}" if revision else dataset))
    rows.append(("Steps", _progress(metrics).removeprefix("step ")))
    if len(metrics.train):
        last = metrics.train[-1]
        seconds, tokens = float(last["seconds"]), int(last["tokens"])
        rows.append(("Tokens seen", f"{tokens:,}"))
        rows.append(("Training time", _duration(seconds)))
        rows.append(("Throughput", _throughput(tokens, seconds)))
    return ["## Run", "", *_table(("", ""), rows)]


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{seconds:,.0f} s ({hours} h {minutes} min)"


def _throughput(tokens: float, seconds: float) -> str:
    return f"{tokens / seconds:,.0f} tokens/s" if seconds > 0 else "not known"


def _place_section(metrics: Metrics) -> list[str]:
    """Where the run went: a row for its start and for each resume, with the throughput up to the next."""
    begins = metrics.events_named("start", "resume")
    if not begins:
        return []
    edges = np.searchsorted(metrics.train["step"], [begin["step"] for begin in begins], side="right")
    tokens = np.concatenate([[0], metrics.train["tokens"]])
    seconds = np.concatenate([[0.0], metrics.train["seconds"]])
    rows = []
    for begin, first, end in zip(begins, edges, [*edges[1:], len(metrics.train)], strict=True):
        checkpoint = f", from {begin['checkpoint']}" if "checkpoint" in begin else ""
        layout = (begin.get("layout") or {}).get("sentence", "")
        place = [begin.get(key, "") for key in ("machine", "device", "torch")]
        speed = _throughput(tokens[end] - tokens[first], seconds[end] - seconds[first])
        rows.append((f"step {begin['step']:,}{checkpoint}", layout, *place, speed))
    titles = ("From", "Layout", "Machine", "Device", "PyTorch", "Speed")
    return ["## Layouts and machines", "", *_table(titles, rows)]


def _gradient_section(metrics: Metrics, clip_norm: float | None) -> list[str]:
    train = metrics.train
    clipped, skipped = int(train["clipped"].sum()), int(train["skipped"].sum())
    overflows, nonfinite = _bad_steps(metrics)
    at_norm = "" if clip_norm is None else f", at norm {clip_norm:g}"
    rows = [
        ("Clipped steps", f"{_share(clipped, len(train))}{at_norm}" if at_norm else "clipping is off"),
        ("Skipped steps", _share(skipped, len(train))),
        ("Non-finite steps", _step_list(nonfinite)),
    ]
    if overflows:
        note = "the loss scaler's search, not counted as non-finite"
        rows.append(("Loss-scale overflows", f"{_step_list(overflows)}; {note}"))
    norms = train[np.isfinite(train["grad_norm"])]
    if len(norms):
        largest = norms[np.argmax(norms["grad_norm"])]
        middle, high = np.quantile(norms["grad_norm"], (0.5, 0.99))
        rows.append(("Gradient norm before clipping, median", f"{middle:.4g}"))
        rows.append(("99th percentile", f"{high:.4g}"))
        rows.append(("largest", f"{largest['grad_norm']:.4g} at step {largest['step']:,}"))
    return ["## Gradients", "", *_table(("", ""), rows)]


def _bad_steps(metrics: Metrics) -> tuple[list[int], list[int]]:
    """The steps of loss-scale overflows, and those whose loss or gradient was really not finite."""
    events = metrics.events_named("nonfinite")
    overflows = {int(event["step"]) for event in events if event.get("overflow")}
    nonfinite = {int(event["step"]) for event in events} - overflows
    return sorted(overflows), sorted(nonfinite)


def _share(count: int, total: int) -> str:
    return f"{count:,} of {total:,} ({count / total:.2%})" if total else "none"


def _step_list(steps: list[int]) -> str:
    if not steps:
        return "none"
    shown = ", ".join(f"{step:,}" for step in steps[:10]) + (", ..." if len(steps) > 10 else "")
    return f"{len(steps):,} ({'step' if len(steps) == 1 else 'steps'} {shown})"


def _sample_section(metrics: Metrics) -> list[str]:
    samples = metrics.events_named("sample")
    if not samples:
        return []
    sample = samples[-1]
    prompt, text = str(sample.get("prompt", "")), str(sample.get("text", ""))
    title = f"Step {sample['step']:,}, prompt:"
    return ["## Sample", "", title, "", _fenced(prompt), "", "Text:", "", _fenced(text)]


# The charts


def bin_curve(step: Column, mean: Column, low: Column, high: Column) -> tuple[Column, Column, Column, Column]:
    """Shortens a curve of n points to at most 2,000, so that long runs stay readable and quick to draw.

    Each bin of neighbouring steps becomes one point: the middle of its steps, the mean of `mean`, the minimum
    of `low` and the maximum of `high`, so no extreme is lost. nan is left out; a bin of nothing else is nan.
    """
    width = max(1, math.ceil(len(step) / MOST_POINTS))
    starts = np.arange(0, len(step), width)
    if width == 1:
        return step, mean, low, high
    ends = np.append(starts[1:], len(step)) - 1
    finite = np.isfinite(mean)
    count = np.add.reduceat(finite.astype(np.float64), starts)
    total = np.add.reduceat(np.where(finite, mean, 0.0), starts)
    means = np.divide(total, count, out=np.full(len(starts), np.nan), where=count > 0)
    middle = (step[starts] + step[ends]) / 2
    return middle, means, np.fmin.reduceat(low, starts), np.fmax.reduceat(high, starts)


def _figure(metrics: Metrics, title: str, y_title: str) -> tuple["Figure", "Axes"]:
    """An empty chart over the run's steps, with the tokens on top. No pyplot: it keeps global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    figure = Figure(figsize=(9.0, 5.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    # A run's name is not mathematics, whatever dollar signs it has.
    axes.set_title(title, loc="left", parse_math=False)
    axes.set_xlabel("step")
    axes.set_ylabel(y_title)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    if not len(metrics.train):
        axes.set_xlim(0, 1)
        axes.text(0.5, 0.6, "no step has been trained yet", transform=axes.transAxes, ha="center", color=GREY)
        return figure, axes
    last = metrics.train[-1]
    axes.set_xlim(0, 1.01 * max(1, int(last["step"])))
    size, unit = next(
        (pair for pair in ((1e9, "billion tokens"), (1e6, "million tokens")) if last["tokens"] >= pair[0]),
        (1.0, "tokens"),
    )
    per_step = max(1, int(last["tokens"])) / max(1, int(last["step"])) / size
    top = axes.secondary_xaxis(
        "top", functions=(lambda step: np.multiply(step, per_step), lambda token: np.divide(token, per_step))
    )
    top.set_xlabel(unit)
    top.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    return figure, axes


def _marker(points: int) -> str:
    """Few points are marked, so that one between two gaps can be seen."""
    return "o" if points <= 60 else ""


def _loss_chart(metrics: Metrics, name: str) -> "Figure":
    figure, axes = _figure(metrics, f"{name}: loss", "loss (nats per token)")
    train, validation = metrics.train, metrics.validation
    step, loss, low, high = bin_curve(train["step"], train["loss"], train["loss_min"], train["loss_max"])
    if len(step):
        axes.fill_between(step, low, high, color=BLUE, alpha=0.18, lw=0, label="lowest and highest sequence")
        axes.plot(step, loss, color=BLUE, lw=1.2, marker=_marker(len(step)), ms=4, label="training")
    best = metrics.best_validation()
    if best is not None:
        where, value, _, _ = bin_curve(validation["step"], *[validation["loss"]] * 3)
        label = f"validation (best {best['loss']:.4f} at step {best['step']:,})"
        size = 4 if len(where) <= 100 else 2
        axes.plot(where, value, color=VERMILION, lw=1.5, marker="s", ms=size, label=label)
    for number, resume in enumerate(metrics.events_named("resume")):
        axes.axvline(resume["step"], color=GREY, lw=1, ls=":", label="" if number else "resumed")
    _limit_losses(axes, low, high, np.concatenate([train["loss"], validation["loss"]]))
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside lower center", ncols=4, frameon=False)
    return figure


def _limit_losses(axes: "Axes", low: Column, high: Column, losses: Column) -> None:
    """Cuts the y axis where the first losses, or rare spikes, would press the rest of the curve flat."""
    low, high, losses = (values[np.isfinite(values)] for values in (low, high, losses))
    if not len(losses):
        return
    # Without training rows there is no band.
    bottom = min(losses.min(), np.quantile(low, 0.05) if len(low) else math.inf)
    usual = max(np.quantile(values, 0.95) for values in (losses, high) if len(values))
    largest = max(values.max() for values in (losses, high) if len(values))
    if largest - bottom <= 2 * (usual - bottom) or usual == bottom:
        return
    margin = 0.05 * (usual - bottom)
    axes.set_ylim(bottom - margin, usual + margin)
    axes.set_title(f"axis cut, the highest value is {largest:,.2f}", loc="right", fontsize=9, color=GREY)


def _grad_norm_chart(metrics: Metrics, name: str, clip_norm: float | None) -> "Figure":
    figure, axes = _figure(metrics, f"{name}: gradient norm before clipping", "L2 norm")
    norms = metrics.train["grad_norm"]
    positive = norms[norms > 0]
    if len(positive) and positive.max() > 30 * positive.min():
        axes.set_yscale("log")
        norms = np.where(norms > 0, norms, np.nan)
    step, mean, low, high = bin_curve(metrics.train["step"], norms, norms, norms)
    if len(step) < len(norms):
        axes.fill_between(step, low, high, color=BLUE, alpha=0.3, lw=0.6, label="lowest and highest step")
    axes.plot(step, mean, color=BLUE, lw=1.2, marker=_marker(len(step)), ms=4, label="gradient norm")
    if clip_norm is not None:
        axes.axhline(clip_norm, color=VERMILION, lw=1.5, ls="--", label=f"clipped to {clip_norm:g}")
    overflows, nonfinite = _bad_steps(metrics)
    for steps, style, colour, label in (
        (nonfinite, "X", PURPLE, f"not finite ({len(nonfinite):,})"),
        (overflows, "v", GREEN, f"loss scale overflowed ({len(overflows):,})"),
    ):
        if steps:
            # At the bottom edge, because there is no norm to draw.
            edge: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "clip_on": False}
            axes.plot(steps, [0.02] * len(steps), style, color=colour, ms=8, label=label, **edge)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure


def _learning_rate_chart(metrics: Metrics, name: str) -> "Figure":
    from matplotlib.ticker import StrMethodFormatter

    figure, axes = _figure(metrics, f"{name}: learning rate", "learning rate")
    rate = metrics.train["learning_rate"]
    step, mean, _, _ = bin_curve(metrics.train["step"], rate, rate, rate)
    axes.plot(step, mean, color=BLUE, lw=1.5, marker=_marker(len(step)), ms=4)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:.4g}"))
    axes.set_ylim(bottom=0)
    return figure
