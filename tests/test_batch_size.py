"""The fitted batch size: the published curve, an interval that keeps its level, and when there is none."""

import math
import re

import numpy as np
import pytest

from training.laboratory.batch_size import SAME_RATE, draw_fit, fieller_interval, fit_batch_sizes, fit_sentences

PUBLISHED = [(104, 3.674), (216, 3.725), (224, 3.730), (512, 3.771), (6, 3.944)]
SIZES = [4, 8, 16, 32, 64, 128]


def on_curve(a: float, optimum: float, lowest: float, sizes: list[int]) -> list[tuple[int, float]]:
    return [(size, a * math.log(size / optimum) ** 2 + lowest) for size in sizes]


def shifted(points: list[tuple[int, float]], by: list[float]) -> list[tuple[int, float]]:
    return [(size, loss + shift) for (size, loss), shift in zip(points, by, strict=True)]


def test_the_published_curve() -> None:
    """Oracles: the coefficients of the forerunner's fit, its minimum at 97.1 and the loss there."""
    fit = fit_batch_sizes(PUBLISHED)
    assert fit is not None
    assert fit.coefficients == pytest.approx((0.0323126, -0.2957154, 4.3687459), abs=5e-8)
    assert fit.optimum == pytest.approx(97.1, abs=0.05)
    assert fit.lowest_loss == pytest.approx(3.692, abs=5e-4)
    assert fit.interval is not None
    assert fit.interval[0] < 97.1 < fit.interval[1]
    assert fit.interval[1] > 512
    assert fit.remarks[0].startswith("The interval reaches beyond the sizes tried")
    assert fit.remarks[1].startswith("One run at each size")
    assert fit.remarks[2] == SAME_RATE


def test_the_interval_ends_where_the_slope_is_just_significant() -> None:
    """Against numpy's own covariance of a fit, and the slope's t value there: 4.302653 for two degrees of freedom."""
    fit = fit_batch_sizes(PUBLISHED)
    assert fit is not None
    assert fit.interval is not None
    logs, losses = np.log([size for size, _ in PUBLISHED]), [loss for _, loss in PUBLISHED]
    (a, b, _), variance = np.polyfit(logs, losses, 2, cov=True)
    for end in fit.interval:
        x = math.log(end)
        deviation = math.sqrt(4 * x * x * variance[0, 0] + 4 * x * variance[0, 1] + variance[1, 1])
        assert abs(2 * a * x + b) / deviation == pytest.approx(4.302653, rel=1e-5)


def test_the_interval_keeps_its_level() -> None:
    """Of 400 studies of a known curve, the intervals of 95 % hold the true optimum; those without one may."""
    random = np.random.default_rng(0)
    true, held, bounded = on_curve(0.02, 40, 3.7, SIZES * 3), 0, 0
    for _ in range(400):
        fit = fit_batch_sizes(shifted(true, random.normal(0, 0.02, len(true)).tolist()))
        assert fit is not None
        if fit.interval is not None:
            bounded += 1
            held += fit.interval[0] <= 40 <= fit.interval[1]
    assert bounded > 380
    assert 0.915 < held / bounded < 0.985  # three standard errors are 0.033


def test_a_curve_without_noise_is_found() -> None:
    fit = fit_batch_sizes(shifted(on_curve(0.02, 40, 3.7, SIZES), [1e-9, -1e-9, 0, 0, 1e-9, -1e-9]))
    assert fit is not None
    assert fit.optimum == pytest.approx(40, rel=1e-6)
    assert fit.interval == pytest.approx((40, 40), rel=1e-5)
    assert fit.losses_at(np.array([40.0])) == pytest.approx([3.7])


@pytest.mark.parametrize(
    ("points", "optimum", "remark"),
    [
        (on_curve(-0.02, 40, 3.7, SIZES), None, "does not open upwards"),
        (
            on_curve(0.02, 1000, 3.7, SIZES),
            1000,
            r"1e\+03, lies outside the sizes.* falls towards 128. Try larger",
        ),
        (on_curve(0.02, 2, 3.7, SIZES), 2, "2, lies outside the sizes tried.* falls towards 4. Try smaller"),
        (on_curve(0.02, 40, 3.7, [4, 32, 256]), 40, "nothing is left to judge its error by"),
        (shifted(on_curve(0.002, 23, 3.7, SIZES), [0.02, -0.03, 0.02] * 2), 23, "curvature cannot be told from none"),
    ],
)
def test_where_there_is_no_honest_interval_there_is_none(
    points: list[tuple[int, float]], optimum: float | None, remark: str
) -> None:
    fit = fit_batch_sizes(points)
    assert fit is not None
    assert fit.interval is None
    assert (fit.optimum is None) == (optimum is None)
    assert optimum is None or fit.optimum == pytest.approx(optimum, rel=0.5)
    assert re.search(remark, "\n".join(fit.remarks))
    assert "95 % interval" not in "\n".join(fit_sentences(fit))
    assert draw_fit(fit, "a study")


def test_two_sizes_have_no_curve() -> None:
    assert fit_batch_sizes([(4, 3.7), (8, 3.6), (8, 3.61), (4, 3.72)]) is None


def test_a_shape_that_is_no_parabola_is_told() -> None:
    """Seeds that hardly differ, and means that lie off the curve by ten times as much."""
    bent = shifted(on_curve(0.02, 30, 3.7, SIZES), [0.01, -0.01, 0.01, -0.01, 0.01, -0.01])
    repeated = [(size, loss + noise) for size, loss in bent for noise in (-0.001, 0.0, 0.001)]
    fit = fit_batch_sizes(repeated)
    assert fit is not None
    assert any("lack of fit, p = " in remark for remark in fit.remarks)
    smooth = [(size, loss + noise) for size, loss in on_curve(0.02, 30, 3.7, SIZES) for noise in (-0.01, 0.0, 0.01)]
    fit = fit_batch_sizes(smooth)
    assert fit is not None
    assert fit.remarks == (SAME_RATE,)


def test_fiellers_interval_without_curvature_is_none() -> None:
    assert fieller_interval(0.001, -0.1, np.eye(2), 10) is None


def test_the_fit_in_words_and_as_a_picture() -> None:
    fit = fit_batch_sizes(PUBLISHED)
    assert fit is not None
    lines = fit_sentences(fit)
    assert lines[0].startswith("Fitted through 5 runs: loss = 0.0323126 (ln b)² - 0.2957154 ln b + 4.3687459, with b")
    assert lines[1].startswith("Lowest at 97.1 sequences per step (95 % interval 62.4 to 595), where")
    assert len(lines) == 2
    assert draw_fit(fit, "forerunner-batch-size").startswith(b"\x89PNG")
