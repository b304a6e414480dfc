"""How long each part of a step takes, from a profile of it."""

import bisect
from collections.abc import Iterable, Sequence
from typing import Any

PARTS = ("data", "forward", "backward", "all-reduce", "optimizer", "logging")
"""Labels of training/step.py, and of whoever reads the results of steps."""
STEP = "step"
"""Label of the whole of it."""
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of what a GPU does, in a trace."""
COLLECTIVES = ("gloo:", "nccl")
"""How the names of exchanges begin: gloo's on a CPU, and NCCL's kernels."""

Span = tuple[float, float]
"""Beginning and end, in microseconds."""


def seconds_by_part(events: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Seconds of each part of a profiled step, of the step, and of the rest that belongs to no part.

    On a CPU a part is as long as its label. A GPU works behind: there a part is as long as what was started under its
    label runs, from whichever thread; reading the results is work of the host all the same. DDP exchanges gradients
    during the last backward, so "all-reduce" may overlap with that: the parts can add up to more than the step.

    Args:
        events: `traceEvents` of a trace in Chrome's format, of a step and of the reading of its results.
    """
    labels = {
        label: [_span(event) for event in events if _is_label(event) and event["name"] == label]
        for label in (*PARTS, STEP)
    }
    on_device = [event for event in events if event.get("cat") in ON_DEVICE]
    spans = _spans_on_device(events, on_device, labels) if on_device else {part: labels[part] for part in PARTS}
    spans["logging"] = labels["logging"]
    spans["all-reduce"] = spans["all-reduce"] + [
        _span(event)
        for event in [*filter(_is_label, events), *on_device]
        if event["name"].startswith(COLLECTIVES) and not _inside(event["ts"], labels["logging"])
    ]
    total = _length(labels[STEP] + labels["logging"])
    covered = _length(span for part in PARTS for span in spans[part])
    seconds = {part: _length(spans[part]) for part in PARTS} | {"rest": max(0.0, total - covered), STEP: total}
    return {name: length / 1e6 for name, length in seconds.items()}


def _spans_on_device(
    events: Sequence[dict[str, Any]], on_device: Sequence[dict[str, Any]], labels: dict[str, list[Span]]
) -> dict[str, list[Span]]:
    """What the device did for each part, by the label that was open when the host started it."""
    started = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    opened = sorted((begin, end, part) for part in PARTS for begin, end in labels[part])
    spans: dict[str, list[Span]] = {part: [] for part in PARTS}
    for event in on_device:
        moment = started.get(event.get("args", {}).get("correlation"))
        if moment is None or event["name"].startswith(COLLECTIVES):
            continue
        place = bisect.bisect_right(opened, moment, key=lambda label: label[0]) - 1
        if place >= 0 and moment <= opened[place][1]:
            spans[opened[place][2]].append(_span(event))
    return spans


def _is_label(event: dict[str, Any]) -> bool:
    return event.get("cat") == "user_annotation"


def _span(event: dict[str, Any]) -> Span:
    return event["ts"], event["ts"] + event["dur"]


def _inside(moment: float, spans: Iterable[Span]) -> bool:
    return any(begin <= moment <= end for begin, end in spans)


def _length(spans: Iterable[Span]) -> float:
    """How long at least one of some spans lasts."""
    length, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        length += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return length
