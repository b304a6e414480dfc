"""What a run shows while it trains: a bar on a terminal, a line now and then in a file."""

import sys
import time
from typing import Any

from tqdm import tqdm

from training.pace import Pace

SECONDS_BETWEEN_LINES = 10.0
MOST_COLUMNS = 100
BAR = "{percentage:3.0f}%|{bar:10}| {n_fmt}/{total_fmt}  {desc}"

Best = tuple[int, float]
"""A step and its validation loss."""


class Progress:
    """Shows how far a run is, on standard error. Two lines on a terminal: the bar, and below it the validations."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._said = 0.0
        self._bar: tqdm[Any] | None = None
        self._below: tqdm[Any] | None = None
        self._validation: Best | None = None
        self._best: Best | None = None

    def start(self, step: int, best: Best | None) -> None:
        """Begins at a step of the run, with the best validation so far."""
        self._best = best
        self._bar = tqdm(total=self._pace.total_steps, initial=step, disable=None, bar_format=BAR, dynamic_ncols=True)
        self._below = tqdm(total=1, disable=None, bar_format="{desc}", dynamic_ncols=True, leave=False, position=1)

    def show(self, step: int, loss: float | None, tokens_per_second: float) -> None:
        """Shows a step: at once on a terminal, else every ten seconds, and the last."""
        assert self._bar is not None, "start() comes first"
        left = duration(self._pace.seconds_left(step))
        loss_text = "no targets" if loss is None else f"loss {loss:.4f}"
        text = f"{loss_text}, {tokens_per_second:,.0f} tokens/s, {left} left"
        if not self._bar.disable:
            self._bar.n = step
            self._bar.set_description_str(text)
            self._show_below(step)
        elif time.perf_counter() - self._said > SECONDS_BETWEEN_LINES or step == self._pace.total_steps:
            self._said = time.perf_counter()
            self.say(f"step {step:,} of {self._pace.total_steps:,}: {text}{self._next_evaluation(step)}")

    def validation(self, step: int, loss: float, target_tokens: int, best: Best | None) -> None:
        """Says a validation loss, and the best so far where that is another one."""
        self._validation, self._best = (step, loss), best
        better = f", best {best[1]:.4f} at step {best[0]:,}" if best is not None and best[0] != step else ""
        self.say(f"step {step:,}: validation loss {loss:.4f} over {target_tokens:,} tokens{better}")

    def say(self, text: str) -> None:
        """Prints a line, once, without tearing the bar."""
        tqdm.write(text, file=sys.stderr)

    def close(self) -> None:
        """Ends the bar."""
        for bar in (self._below, self._bar):
            if bar is not None:
                bar.close()

    def _show_below(self, step: int) -> None:
        assert self._below is not None, "start() comes first"
        text = validation_line(self._validation, self._best, self._pace, step)
        self._below.set_description_str(text[:MOST_COLUMNS])

    def _next_evaluation(self, step: int) -> str:
        """Nothing where that is the one at the end: the time to it is told already."""
        evaluation = self._pace.next_evaluation(step)
        if evaluation is None or evaluation[0] == self._pace.total_steps:
            return ""
        return f", next evaluation in {duration(evaluation[1])}"


def validation_line(validation: Best | None, best: Best | None, pace: Pace, step: int) -> str:
    """The last validation, the best one and when the next is due; empty where there is none of them."""
    parts = []
    if validation is not None:
        parts.append(f"validation loss {validation[1]:.4f} at step {validation[0]:,}")
    if best is not None and best != validation:
        parts.append(f"best {best[1]:.4f} at step {best[0]:,}")
    evaluation = pace.next_evaluation(step)
    if evaluation is not None:
        parts.append(f"next evaluation in {duration(evaluation[1])}")
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """A time as 01:35 or 40:38:12, and --:-- where it is not known."""
    return tqdm.format_interval(seconds) if seconds < float("inf") else "--:--"
