"""How long the rest of a run will take, from how long its parts have taken. Pure."""

from collections import deque

RECENT_SECONDS = 60.0
"""Of training: long enough to even out, short enough to follow a machine that slows down."""


class Pace:
    """Estimates times to come: steps at their recent speed, evaluations and checkpoints as long as the last one took.

    Checkpoints are written while training goes on, so they count with the time that training waits; the last of a run
    with all of its time.

    What happens once counts for nothing: start-up lies outside the training time, and the first reading, in which
    kernels are chosen and buffers made, is forgotten with the second.
    """

    def __init__(self, total_steps: int, evaluate_every: int | None = None, save_every: int | None = None) -> None:
        """For a run of so many steps; the intervals are `evaluation.every` and `checkpoint.every` of its config."""
        self.total_steps = total_steps
        self._every = {"evaluation": evaluate_every, "checkpoint": save_every}
        self._lasts = {"evaluation": 0.0, "checkpoint": 0.0}
        self._writing = 0.0
        self._recent: deque[tuple[int, float]] = deque()
        self._steps, self._seconds = 0, 0.0  # of all in `_recent`
        self._readings = 0

    def trained(self, steps: int, seconds: float) -> None:
        """Takes how long a few steps took, in seconds of training."""
        self._recent.append((steps, seconds))
        self._steps, self._seconds = self._steps + steps, self._seconds + seconds
        self._readings += 1
        if self._readings == 2:
            self._forget_oldest()
        while self._seconds - self._recent[0][1] >= RECENT_SECONDS:
            self._forget_oldest()

    def evaluated(self, seconds: float) -> None:
        """Takes how long an evaluation took."""
        self._lasts["evaluation"] = seconds

    def saved(self, stall: float, seconds: float) -> None:
        """Takes how long training waited for a checkpoint, and how long writing it took."""
        self._lasts["checkpoint"], self._writing = stall, seconds

    def seconds_left(self, step: int) -> float:
        """From step `step` to the run's end, with the evaluation and the checkpoint there; infinite where unknown."""
        if step >= self.total_steps:
            return 0.0
        at_the_end = self._lasts["checkpoint"] + self._writing
        if self._every["evaluation"] is not None:
            at_the_end += self._lasts["evaluation"]
        return self._seconds_between(step, self.total_steps) + at_the_end

    def next_evaluation(self, step: int) -> tuple[int, float] | None:
        """The step of the first evaluation behind `step`, and the seconds until then; None if there is none."""
        every = self._every["evaluation"]
        if every is None or step >= self.total_steps:
            return None
        due = min((step // every + 1) * every, self.total_steps) if every else self.total_steps
        return due, self._seconds_between(step, due)

    def _forget_oldest(self) -> None:
        steps, seconds = self._recent.popleft()
        self._steps, self._seconds = self._steps - steps, self._seconds - seconds

    def _seconds_between(self, step: int, until: int) -> float:
        """Training from one step to another, and what is due at the steps between them."""
        if not self._recent:
            return float("inf")
        seconds = (until - step) * self._seconds / self._steps
        for occasion, every in self._every.items():
            if every:
                seconds += ((until - 1) // every - step // every) * self._lasts[occasion]
        return seconds
