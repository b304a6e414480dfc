"""The curves of the charts; that the charts are drawn is seen in test_report.py."""

import numpy as np
import pytest

from training.charts import MOST_POINTS, bin_curve


def test_bins_keep_the_extremes_and_the_mean() -> None:
    random = np.random.default_rng(0)
    step = np.arange(1.0, 33166.0)
    mean = random.normal(size=len(step))
    low, high = mean - 1, mean + 1
    low[12345], high[23456], mean[777] = -50.0, 60.0, np.nan
    mean[17 * 100 : 17 * 101] = np.nan
    middle, means, lows, highs = bin_curve(step, mean, low, high)
    assert len(middle) == len(means) == len(lows) == len(highs) == 1951  # bins of 17 steps
    assert len(middle) <= MOST_POINTS
    assert (middle[0], middle[-1]) == (9.0, 33158.0)
    assert np.nanmin(lows) == -50.0
    assert np.nanmax(highs) == 60.0
    assert np.argmin(lows) == 12345 // 17
    assert np.flatnonzero(np.isnan(means)).tolist() == [100]
    assert means[777 // 17] == pytest.approx(np.nanmean(mean[765:782]))
    assert means[5] == pytest.approx(mean[85:102].mean())


def test_short_curves_are_left_as_they_are() -> None:
    step = np.arange(1.0, MOST_POINTS + 1)
    assert bin_curve(step, step, step, step)[0] is step
