"""Means, intervals and tests: by hand, against scipy.stats and statsmodels, and on the forerunner's losses."""

import math

import numpy as np
import pytest
import scipy.stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.weightstats import CompareMeans, DescrStatsW

from training.laboratory.statistics import (
    Seeds,
    adjust_by_holm,
    compare_means,
    deviation_interval,
    deviation_of,
    mean_interval,
    mean_of,
)

# The forerunner's baselines: test loss by (weights, training) seed.
BASELINES: dict[Seeds, float] = {
    (42, 42): 3.691526,
    (22, 22): 3.673453,
    (67, 67): 3.653593,
    (42, 23): 3.681356,
    (42, 67): 3.680505,
    (23, 23): 3.673943,
    (67, 23): 3.664345,
}
WHOLE_SEED = [(42, 42), (22, 22), (67, 67)]
OTHER_TRAINING = [(42, 42), (42, 23), (42, 67)]
OTHER_WEIGHTS = [(42, 23), (23, 23), (67, 23)]


def by_seed(*losses: float, first: int = 0) -> dict[Seeds, float]:
    return {(seed, seed): loss for seed, loss in enumerate(losses, start=first)}


def test_the_seven_baselines_have_the_published_mean_and_deviation() -> None:
    losses = list(BASELINES.values())
    assert mean_of(losses) == pytest.approx(3.674103, abs=5e-7)
    assert deviation_of(losses) == pytest.approx(0.012339, abs=5e-7)
    interval = mean_interval(losses)
    assert interval == pytest.approx(DescrStatsW(losses).tconfint_mean(alpha=0.05), rel=1e-12)


@pytest.mark.parametrize(
    ("seeds", "deviation"), [(WHOLE_SEED, 0.018974), (OTHER_TRAINING, 0.006132), (OTHER_WEIGHTS, 0.008529)]
)
def test_seed_noise_of_three_runs_each_is_the_recomputed_one(seeds: list[Seeds], deviation: float) -> None:
    assert deviation_of([BASELINES[pair] for pair in seeds]) == pytest.approx(deviation, abs=5e-7)


def test_three_runs_leave_a_deviation_all_but_open() -> None:
    """What docs/comparing.md says: each could be the other's, and six times as large as it looks."""
    intervals = {}
    for name, seeds in (("training", OTHER_TRAINING), ("weights", OTHER_WEIGHTS), ("both", WHOLE_SEED)):
        losses = [BASELINES[pair] for pair in seeds]
        interval = deviation_interval(deviation_of(losses), 3)
        assert interval is not None
        squares = np.var(losses, ddof=1) * 2 / scipy.stats.chi2.ppf([0.975, 0.025], 2)
        assert interval == pytest.approx(np.sqrt(squares).tolist(), rel=1e-12)
        intervals[name] = [round(end, 4) for end in interval]
    assert intervals == {"training": [0.0032, 0.0385], "weights": [0.0044, 0.0536], "both": [0.0099, 0.1192]}
    ratio = (0.008529 / 0.006132) ** 2
    assert 2 * scipy.stats.f.sf(ratio, 2, 2) == pytest.approx(0.68, abs=0.005)
    lower, upper = np.sqrt(ratio / scipy.stats.f.ppf([0.975, 0.025], 2, 2))
    assert (round(lower, 2), round(upper, 1)) == (0.22, 8.7)


def test_deviation_of_seven_runs_has_the_interval_by_chi_square() -> None:
    """s sqrt(6 / 14.449) to s sqrt(6 / 1.237), with chi-square's quantiles as printed in any table."""
    interval = deviation_interval(deviation_of(list(BASELINES.values())), 7)
    assert interval == pytest.approx((0.007951, 0.027175), abs=5e-6)


def test_paired_test_is_that_of_scipy_and_statsmodels() -> None:
    random = np.random.default_rng(1)
    first, second = random.normal(3.7, 0.01, 5), random.normal(3.69, 0.01, 5)
    difference = compare_means(by_seed(*first), by_seed(*second))
    expected = scipy.stats.ttest_rel(second, first)
    assert (difference.method, difference.shared) == ("paired", 5)
    assert difference.p_value == pytest.approx(expected.pvalue, rel=1e-10)
    assert difference.interval == pytest.approx(tuple(expected.confidence_interval()), rel=1e-10)
    assert difference.estimate == pytest.approx(second.mean() - first.mean(), rel=1e-10)
    assert difference.interval == pytest.approx(DescrStatsW(second - first).tconfint_mean(), rel=1e-10)


def test_pairs_are_found_by_seed_and_the_others_left_out() -> None:
    """Worked by hand: differences -1, -2, -3 at the seeds 1, 2, 3, so -2 +- 4.303 x 1 / sqrt(3)."""
    baseline = {(1, 1): 5.0, (3, 3): 6.0, (2, 2): 4.0, (9, 9): 100.0}
    difference = compare_means(baseline, {(2, 2): 2.0, (1, 1): 4.0, (3, 3): 3.0, (8, 8): -50.0})
    assert difference.estimate == -2.0
    assert difference.interval == pytest.approx((-4.484138, 0.484138), abs=1e-6)
    assert difference.p_value == pytest.approx(0.074180, abs=1e-6)
    assert difference.shared == 3


@pytest.mark.parametrize(
    ("sizes", "offset", "method"),
    [
        ((7, 7), 5, "Welch"),  # two seeds of seven: a pairing with one degree of freedom
        ((3, 3), 1, "Welch"),
        ((7, 7), 4, "paired"),
        ((7, 2), 5, "paired"),  # all that one side has
        ((2, 7), 0, "paired"),
        ((7, 1), 0, "one run"),
    ],
)
def test_few_shared_seeds_are_paired_only_where_a_side_has_no_more(
    sizes: tuple[int, int], offset: int, method: str
) -> None:
    random = np.random.default_rng(4)
    first, second = random.normal(size=sizes[0]), random.normal(size=sizes[1])
    assert compare_means(by_seed(*first), by_seed(*second, first=offset)).method == method


def test_without_shared_seeds_the_test_is_welchs() -> None:
    random = np.random.default_rng(2)
    first, second = random.normal(3.7, 0.01, 4), random.normal(3.69, 0.03, 7)
    difference = compare_means(by_seed(*first), by_seed(*second, first=3))  # one seed is shared
    expected = scipy.stats.ttest_ind(second, first, equal_var=False)
    assert (difference.method, difference.shared) == ("Welch", 1)
    assert difference.p_value == pytest.approx(expected.pvalue, rel=1e-10)
    by_statsmodels = CompareMeans(DescrStatsW(second), DescrStatsW(first))
    assert difference.interval == pytest.approx(by_statsmodels.tconfint_diff(usevar="unequal"), rel=1e-10)


def test_a_single_run_is_judged_by_the_noise_of_one_run() -> None:
    """The baseline's limits of prediction: Student's test of two samples, one of them a single value."""
    losses = list(BASELINES.values())
    difference = compare_means(BASELINES, {(42, 42): 3.642940})
    expected = scipy.stats.ttest_ind([3.642940], losses, equal_var=True)
    assert difference.method == "one run"
    assert difference.p_value == pytest.approx(expected.pvalue, rel=1e-10)
    half = scipy.stats.t.ppf(0.975, 6) * 0.0123390 * math.sqrt(1 + 1 / 7)
    assert difference.interval == pytest.approx((3.642940 - 3.674103 - half, 3.642940 - 3.674103 + half), abs=2e-6)
    turned = compare_means({(42, 42): 3.642940}, BASELINES)
    assert turned.p_value == pytest.approx(expected.pvalue, rel=1e-10)
    assert turned.estimate == pytest.approx(-difference.estimate)


# Each a single run of the forerunner's, with the verdict of docs/comparing.md.
SINGLE_RUNS = {
    "schedule-learning-rate": 3.601917,
    "remove-dropout": 3.641282,
    "weight-decay-gpt2": 3.642940,
    "qkv-bias": 3.669385,
    "gradient-clipping": 3.678317,
    "no-amp": 3.678968,
    "weight-decay-cerebras": 3.813856,
    "weight-tying": 3.874305,
}


def test_of_the_forerunners_single_runs_three_are_more_than_noise() -> None:
    p_values = [compare_means(BASELINES, {(42, 42): loss}).p_value for loss in SINGLE_RUNS.values()]
    adjusted = adjust_by_holm(p_values)
    assert adjusted == pytest.approx(multipletests(p_values, method="holm")[1].tolist(), rel=1e-12)
    clear = [name for name, p in zip(SINGLE_RUNS, adjusted, strict=True) if p is not None and p < 0.05]
    assert clear == ["schedule-learning-rate", "weight-decay-cerebras", "weight-tying"]


def test_holm_worked_by_hand() -> None:
    """Of four: 0.01 x 4, 0.02 x 3, then 0.025 x 2 = 0.05 but not below 0.06, then 0.9; None does not count."""
    assert adjust_by_holm([0.9, None, 0.01, 0.025, 0.02]) == pytest.approx([0.9, None, 0.04, 0.06, 0.06])
    assert adjust_by_holm([0.8, 0.7]) == [1.0, 1.0]
    assert adjust_by_holm([]) == []


def test_one_run_each_makes_no_claim() -> None:
    difference = compare_means(by_seed(3.7), by_seed(3.6))
    assert (difference.method, difference.interval, difference.p_value) == ("none", None, None)
    assert difference.estimate == pytest.approx(-0.1)
    assert deviation_of([3.7]) is None
    assert mean_interval([3.7]) is None
    assert deviation_interval(None, 1) is None


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [
        ([3.7, 3.7], [3.6, 3.6], 2),
        ([3.7, 3.7], [3.6, 3.6], 0),
        ([3.7, 3.8, 3.9], [3.6, 3.7, 3.8], 3),  # the same difference each time, up to rounding
        ([3.7, 3.7], [3.6], 0),
        ([3.7, 3.8], [3.7, 3.8], 2),
    ],
)
def test_where_seeds_change_nothing_no_noise_is_made_of_rounding(
    first: list[float], second: list[float], shared: int
) -> None:
    difference = compare_means(by_seed(*first), by_seed(*second, first=0 if shared else 10))
    assert (difference.method, difference.interval, difference.p_value) == ("none", None, None)
    assert difference.estimate == pytest.approx(second[0] - first[0])


def test_equal_losses_have_no_deviation() -> None:
    assert deviation_of([0.1 + 0.2, 0.3, 0.3]) == 0.0
    assert mean_interval([3.7, 3.7]) is None
    assert deviation_interval(0.0, 3) is None


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, 1e300, -1e76])
def test_a_loss_that_is_not_finite_is_no_number_to_reckon_with(odd: float) -> None:
    assert math.isnan(mean_of([1.0, odd]))
    deviation = deviation_of([1.0, odd, 2.0])
    assert deviation is not None
    assert math.isnan(deviation)
    assert mean_interval([1.0, odd]) is None
    for first, second in (([1.0, odd], [1.0, 2.0]), ([1.0, 2.0], [odd])):
        difference = compare_means(by_seed(*first), by_seed(*second))
        assert math.isnan(difference.estimate)
        assert (difference.method, difference.p_value) == ("none", None)


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    """Of 2,000 pairs of samples without a difference, 95 % of the intervals hold 0 (binomial: +- 1.3 %, 99 %)."""
    random = np.random.default_rng(3)
    for first_size, second_size, offset in ((3, 3, 0), (3, 5, 10), (7, 1, 10)):
        held = 0
        for _ in range(2000):
            first, second = random.normal(size=first_size), random.normal(size=second_size)
            interval = compare_means(by_seed(*first), by_seed(*second, first=offset)).interval
            assert interval is not None
            held += interval.low < 0 < interval.high
        assert held / 2000 == pytest.approx(0.95, abs=0.02)
