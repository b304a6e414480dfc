"""The live view of a run in a terminal: `isobatch report RUN --watch`."""

import contextlib
import math
import sys
import time
from itertools import pairwise
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from training.errors import UserError, one_line
from training.follow import FollowedRun, RunSoFar
from training.progress import MOST_COLUMNS, duration

SECONDS_BETWEEN_LOOKS = 1.0
CHART_ROWS = 6
BLOCKS = " ▁▂▃▄▅▆▇█"


def watch_run(folder: Path) -> None:
    """Shows a run until it is over, or Ctrl-C.

    Args:
        folder: checkpoints/<run>; it need not hold metrics.jsonl yet.

    Raises:
        UserError: its files cannot be read, or standard output is not a terminal.
    """
    if not sys.stdout.isatty():
        raise UserError("--watch: needs a terminal; leave it out, and report.md and the charts are written")
    followed = FollowedRun(folder)
    with contextlib.suppress(KeyboardInterrupt):
        with Live(console=Console(), auto_refresh=False) as live:
            while True:
                is_over = followed.is_over()  # before the look, so that nothing is missed
                look(followed)
                live.update(view(followed, min(live.console.width, MOST_COLUMNS)), refresh=True)
                if is_over:
                    break
                time.sleep(SECONDS_BETWEEN_LOOKS)
        print(one_line(followed.sentence()))


def look(followed: FollowedRun) -> None:
    """Takes what is new; a UserError where a file cannot be read."""
    try:
        followed.look()
    except OSError as error:
        raise UserError(f"{followed.folder}: cannot be read ({error}); name the folder of a run") from None


def view(followed: FollowedRun, columns: int) -> RenderableType:
    """All that is shown, in so many columns."""
    run = followed.so_far
    name = one_line(followed.folder.resolve().name)
    head = Text(no_wrap=True, overflow="ellipsis")
    head.append(name, style="bold").append(f": {state_words(followed)}")
    parts: list[RenderableType] = [head]
    if run.total_steps is not None:
        parts.append(bar(run.step / max(1, run.total_steps), columns))
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True, min_width=min(13, columns // 3))
    table.add_column(no_wrap=True, overflow="ellipsis")
    for title, text in figures(run):
        table.add_row(title, text)
    parts.append(table)
    drawn = chart(run.losses.means(), columns, CHART_ROWS)
    parts += [Text(f"loss up to step {run.step:,}", style="dim")] if drawn else []
    parts += [Text(line, no_wrap=True) for line in drawn]
    parts += [Text(one_line(line), style="dim", no_wrap=True, overflow="ellipsis") for line in run.events]
    return Group(*parts)


def bar(share: float, columns: int) -> Text:
    """A bar with its percentage; it can be read without colours too."""
    width = max(1, columns - 5)
    done = int(share * width)
    text = Text(f"{share:4.0%} ", no_wrap=True)
    return text.append("█" * done, style="green").append("░" * (width - done), style="dim")


def state_words(followed: FollowedRun) -> str:
    """What the run is doing."""
    run = followed.so_far
    if run.last is None and run.ending is None:
        return "waiting for its first step"
    how_far = f"step {run.step:,}" + ("" if run.total_steps is None else f" of {run.total_steps:,}")
    if run.ending is not None:
        return f"{run.ending} at {how_far}"
    return f"{how_far}, last record {duration(followed.silence)} ago"


def figures(run: RunSoFar) -> list[tuple[str, str]]:
    """The rows of the table: what is known of them."""
    rows = []
    if run.pace is not None and run.ending is None:
        left = f"{duration(run.pace.seconds_left(run.step))} left"
        evaluation = run.pace.next_evaluation(run.step)
        due = f", next evaluation at step {evaluation[0]:,} in {duration(evaluation[1])}" if evaluation else ""
        rows.append(("time", left + due))
    if run.last is not None:
        last, recent = run.last, len(run.recent)
        rows.append(("loss", f"{number(last['loss'])}, mean of the last {recent:,} steps {number(run.smoothed_loss)}"))
    if run.validation is not None:
        best = f", best {number(run.best[1])} at step {run.best[0]:,}" if run.best else ""
        rows.append(("validation", f"{number(run.validation[1])} at step {run.validation[0]:,}{best}"))
    if run.last is not None:
        seconds = duration(last["seconds"])
        rows.append(("speed", f"{last['tokens_per_second']:,.0f} tokens/s, {last['tokens']:,} tokens in {seconds}"))
        clipped = sum(row["clipped"] for row in run.recent)
        clipping = "" if run.clip_norm is None else f", {clipped:,} of the last {recent:,} clipped to {run.clip_norm:g}"
        rows.append(("gradient norm", number(last["grad_norm"]) + clipping))
        rows.append(("learning rate", f"{last['learning_rate']:.4g}"))
        rows += [("skipped", f"{run.skipped:,} steps")] if run.skipped else []
    return rows


def number(value: float) -> str:
    """A loss or a norm."""
    return f"{value:.4f}" if math.isfinite(value) else "not finite"


def chart(values: list[float], columns: int, rows: int) -> list[str]:
    """A series as columns of blocks, its lowest and highest value beside it; nothing for fewer than two values.

    The axis ends where 95 % of the values do, marked `+`: the first losses would press the others flat.
    """
    finite = sorted(value for value in values if math.isfinite(value))
    if len(finite) < 2 or finite[0] == finite[-1]:
        return []
    low, high = finite[0], finite[math.ceil(0.95 * (len(finite) - 1))]
    high = high if high > low else finite[-1]
    labels = [""] * rows
    labels[0], labels[-1] = f"{high:.3f}" + ("+" if high < finite[-1] else ""), f"{low:.3f}"
    space = max(len(label) for label in labels) + 1
    levels = [_level(value, low, high, 8 * rows) for value in _shortened(values, max(1, columns - space))]
    lines = []
    for row, label in enumerate(labels):
        floor = 8 * (rows - 1 - row)
        lines.append(label.rjust(space - 1) + " " + "".join(BLOCKS[min(max(level - floor, 0), 8)] for level in levels))
    return lines


def _level(value: float, low: float, high: float, most: int) -> int:
    """How many eighths of a row a value is high: at least one, none where there is no value."""
    if not math.isfinite(value):
        return 0
    return max(1, round((min(value, high) - low) / (high - low) * most))


def _shortened(values: list[float], columns: int) -> list[float]:
    """At most so many means of neighbouring values."""
    count = min(len(values), columns)
    edges = [len(values) * column // count for column in range(count + 1)]
    means = []
    for start, stop in pairwise(edges):
        finite = [value for value in values[start:stop] if math.isfinite(value)]
        means.append(sum(finite) / len(finite) if finite else math.nan)
    return means
