"""The time left, worked out by hand."""

import math

import pytest

from training.pace import Pace


def test_steps_at_their_speed() -> None:
    """Half a second each."""
    pace = Pace(10)
    pace.trained(2, 1.0)
    assert pace.seconds_left(2) == 4
    assert pace.seconds_left(10) == 0
    assert pace.next_evaluation(2) is None


def test_nothing_is_known_before_the_first_step() -> None:
    assert Pace(10).seconds_left(0) == math.inf
    assert Pace(10, evaluate_every=5).next_evaluation(0) == (5, math.inf)
    assert Pace(10).seconds_left(10) == 0


def test_the_first_reading_is_forgotten_with_the_second() -> None:
    """A first step of 30 s, then steps of 1 s."""
    pace = Pace(101)
    pace.trained(1, 30.0)
    assert pace.seconds_left(1) == 3000
    pace.trained(1, 1.0)
    pace.trained(2, 2.0)
    assert pace.seconds_left(4) == 97


def test_an_old_speed_is_forgotten() -> None:
    """A minute at 1 s a step counts, and no longer than that; then the machine is three times slower."""
    pace = Pace(1000)
    for _ in range(200):
        pace.trained(1, 1.0)
    for _ in range(10):
        pace.trained(1, 3.0)
    assert pace.seconds_left(500) == pytest.approx(500 * (30 * 1 + 10 * 3) / 40)
    for _ in range(10):
        pace.trained(1, 3.0)
    assert pace.seconds_left(500) == 1500


def test_evaluations_and_checkpoints_to_come_are_counted() -> None:
    """100 steps of 1 s; evaluations after 30, 60, 90 and 100 take 20 s; checkpoints after 40, 80 and 100 stop training
    for 5 s, and the last one is waited for, 7 s more."""
    pace = Pace(100, evaluate_every=30, save_every=40)
    pace.trained(10, 10.0)
    assert pace.seconds_left(10) == 90, "how long they take is not known yet"
    pace.evaluated(99.0)
    pace.evaluated(20.0)
    pace.saved(5.0, 7.0)
    assert pace.seconds_left(10) == 90 + 4 * 20 + 3 * 5 + 7
    assert pace.seconds_left(60) == 40 + 2 * 20 + 2 * 5 + 7, "what is due at this very step is past"
    assert pace.seconds_left(99) == 1 + 20 + 5 + 7
    assert pace.next_evaluation(10) == (30, 20)
    assert pace.next_evaluation(30) == (60, 30 + 5)
    assert pace.next_evaluation(90) == (100, 10)
    assert pace.next_evaluation(100) is None


@pytest.mark.parametrize(
    ("evaluate_every", "save_every", "left", "evaluation"),
    [
        (None, None, 50 + 5 + 7, None),
        (0, 0, 50 + 20 + 5 + 7, (100, 50)),
        (25, 25, 50 + 2 * 20 + 2 * 5 + 7, (75, 25)),
    ],
)
def test_what_is_due_at_the_end_only(
    evaluate_every: int | None, save_every: int | None, left: float, evaluation: tuple[int, float] | None
) -> None:
    """Evaluation: null is never, 0 is at the end; the end always has a checkpoint."""
    pace = Pace(100, evaluate_every, save_every)
    pace.trained(50, 50.0)
    pace.evaluated(20.0)
    pace.saved(5.0, 7.0)
    assert pace.seconds_left(50) == left
    assert pace.next_evaluation(50) == evaluation
