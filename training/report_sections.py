"""The sections of a report: tables and lists in Markdown, of what a run has recorded."""

import json
import math
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from training.metrics_file import Metrics

DIGESTS = {"Initial weights": "weights_sha256", "Data order": "data_order_sha256"}
DIGESTS |= {"Validation data": "validation_sha256", "Tokenizer": "tokenizer_sha256"}
"""What two runs share if they have the same digest of it; docs/comparing.md says what each covers."""


def last_validation(metrics: Metrics, what: str = "") -> str:
    """How the last validation is called: final, unless steps have been trained since."""
    step = int(metrics.validation[-1]["step"])
    return f"Last validation{what}, at step {step:,}" if step < metrics.reached else f"Final validation{what}"


def progress(metrics: Metrics) -> str:
    step = metrics.reached
    begins = metrics.events_named("start", "resume")
    total = begins[-1].get("total_steps") if begins else None
    return f"step {step:,}" if total is None else f"step {step:,} of {total:,}"


def number(value: float, form: str) -> str:
    return format(float(value), form) if math.isfinite(value) else "not finite"


def table(head: Iterable[object], rows: Iterable[Iterable[object]]) -> list[str]:
    """The lines of a table in Markdown."""

    def line(cells: Iterable[object]) -> str:
        return "| " + " | ".join(" ".join(str(cell).split()).replace("|", "\\|") for cell in cells) + " |"

    titles = list(head)
    return [line(titles), "|" + " --- |" * len(titles), *(line(row) for row in rows)]


def fenced(text: str, language: str = "") -> str:
    """A fenced block; the fence is longer than any run of backticks in the text."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def result_section(metrics: Metrics) -> list[str]:
    best = metrics.best_validation()
    rows = [] if best is None else [_loss_row("Best validation", best, best["bits_per_byte"])]
    if len(metrics.validation):
        final = metrics.validation[-1]
        rows.append(_loss_row(last_validation(metrics), final, final["bits_per_byte"]))
    if len(metrics.train):
        is_last = metrics.train[-1]["step"] == metrics.reached
        rows.append(_loss_row("Final training step" if is_last else "Last step recorded", metrics.train[-1], math.nan))
    if not rows:
        return []
    titles = ("", "Step", "Loss (nats per token)", "Perplexity", "Bits per byte", "Target tokens")
    section = ["## Result", "", *table(titles, rows)]
    if len(np.unique(metrics.validation["target_tokens"])) > 1:
        note = (
            "The validations do not all cover the same tokens: compare losses with the same number. "
            "Which step is the best was decided over those of the validations in the loop, anew where they changed."
        )
        section += ["", note]
    return section


def _loss_row(title: str, row: np.void, bits_per_byte: float) -> list[str]:
    loss = float(row["loss"])
    # exp() of a loss that has exploded would overflow; exp(30) is 1e13, beyond any vocabulary.
    perplexity = "over 1e13" if loss > 30 else number(math.exp(loss), ",.2f")
    bits = format(float(bits_per_byte), ".4f") if math.isfinite(bits_per_byte) else "-"
    return [
        title,
        f"{row['step']:,}",
        number(loss, ".6f"),
        perplexity,
        bits,
        f"{row['target_tokens']:,}" if row["target_tokens"] else "-",
    ]


def chart_section() -> list[str]:
    """The charts, as links."""
    return [
        "## Charts",
        "",
        "![Training and validation loss](loss.png)",
        "",
        "![Gradient norm before clipping](grad_norm.png)",
        "",
        "![Learning rate](learning_rate.png)",
    ]


def run_section(metrics: Metrics, config: dict[str, Any]) -> list[str]:
    rows = [
        ("Interventions", ", ".join(map(str, config.get("interventions") or ())) or "none"),
        ("Overrides", ", ".join(f"`{override}`" for override in config.get("overrides") or ()) or "none"),
    ]
    begin = (metrics.events_named("start", "resume") or [{}])[-1]
    if "parameters" in begin:
        rows.append(("Parameters", f"{begin['parameters']:,}"))
    if "tokens_per_step" in begin:
        rows.append(("Tokens per step", f"{begin['tokens_per_step']:,}"))
    if "documents" in begin:
        rows.append(("Documents", f"{begin['documents']['documents']:,}"))
    dataset = str((config.get("data") or {}).get("dataset", "not known"))
    revision = begin.get("dataset_revision")
    rows.append(("Dataset", f"{dataset}, revision {revision}" if revision else dataset))
    for title, key in DIGESTS.items():
        if begin.get(key):
            rows.append((f"{title}, sha256", f"`{begin[key]}`"))
    rows.append(("Steps", progress(metrics).removeprefix("step ")))
    if known := metrics.tokens_and_seconds():
        tokens, seconds = known
        rows.append(("Tokens seen", f"{tokens:,}"))
        rows.append(("Training time", duration(seconds)))
        rows.append(("Throughput", _throughput(tokens, seconds)))
    return ["## Run", "", *table(("", ""), rows)]


def duration(seconds: float) -> str:
    """A time for people."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{seconds:,.0f} s ({hours} h {minutes} min)"


def _throughput(tokens: float, seconds: float) -> str:
    return f"{tokens / seconds:,.0f} tokens/s" if seconds > 0 else "not known"


def place_section(metrics: Metrics) -> list[str]:
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
        begun = begin.get("tokens", tokens[first]), begin.get("seconds", seconds[first])  # also where rows were lost
        speed = _throughput(tokens[end] - begun[0], seconds[end] - begun[1])
        rows.append((f"step {begin['step']:,}{checkpoint}", layout, *place, speed))
    titles = ("From", "Layout", "Machine", "Device", "PyTorch", "Speed")
    return ["## Layouts and machines", "", *table(titles, rows)]


def change_section(metrics: Metrics) -> list[str]:
    """What resumptions changed; of several at one step only the last was trained on with."""
    resumes = {event["step"]: event for event in metrics.events_named("resume")}
    rows = [
        (f"step {step + 1:,}", f"`{key}`", *(f"`{json.dumps(value)}`" for value in values))
        for step, event in resumes.items()
        for key, values in (event.get("changed") or {}).items()
    ]
    return ["## Changed on the way", "", *table(("From", "Key", "Before", "After"), rows)] if rows else []


def gradient_section(metrics: Metrics, clip_norm: float | None) -> list[str]:
    train = metrics.train
    clipped, skipped = int(train["clipped"].sum()), int(train["skipped"].sum())
    overflows, nonfinite = metrics.bad_steps()
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
    return ["## Gradients", "", *table(("", ""), rows)]


def _share(count: int, total: int) -> str:
    return f"{count:,} of {total:,} ({count / total:.2%})" if total else "none"


def _step_list(steps: list[int]) -> str:
    if not steps:
        return "none"
    shown = ", ".join(f"{step:,}" for step in steps[:10]) + (", ..." if len(steps) > 10 else "")
    return f"{len(steps):,} ({'step' if len(steps) == 1 else 'steps'} {shown})"


def sample_section(metrics: Metrics) -> list[str]:
    samples = metrics.events_named("sample")
    if not samples:
        return []
    sample = samples[-1]
    prompt, text = str(sample.get("prompt", "")), str(sample.get("text", ""))
    title = f"Step {sample['step']:,}, prompt:"
    return ["## Sample", "", title, "", fenced(prompt), "", "Text:", "", fenced(text)]
