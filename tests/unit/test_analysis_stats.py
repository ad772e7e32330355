"""Medians, ratios and their intervals; of made-up samples 95 % hold the truth, within what simulation can show."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypar.analysis.stats import (
    BOOTSTRAP_SEED,
    LEVEL,
    NUM_RESAMPLES,
    Estimate,
    Method,
    censored_median_estimate,
    difference_estimate,
    median_estimate,
    median_ranks,
    ratio_estimate,
)

times = st.floats(min_value=1e-3, max_value=1e4)
pairs = st.lists(st.tuples(times, times), min_size=2, max_size=12)


# Conover, Practical Nonparametric Statistics, and the tables of the sign test: ranks and achieved confidence.
RANKS = {6: (1, 6, 0.9688), 7: (1, 7, 0.9844), 9: (2, 8, 0.9609), 10: (2, 9, 0.9785), 20: (6, 15, 0.9586)}


def test_ranks_around_a_median_are_those_of_the_tables():
    for size, (low, high, level) in RANKS.items():
        assert median_ranks(size) == (low, high, pytest.approx(level, abs=5e-5))
    with pytest.raises(ValueError, match="5 samples"):
        median_ranks(5)


def test_from_six_samples_on_the_bounds_are_samples_with_the_achieved_level():
    expected = Estimate(3.5, 1.0, 6.0, 6, pytest.approx(0.96875), Method.RANKS)
    assert median_estimate([5.0, 1.0, 4.0, 2.0, 6.0, 3.0]) == expected


def test_few_times_get_a_t_interval_on_the_log_scale_and_few_scores_on_the_linear_one():
    # 4.3027: the tabled two-sided 95 % quantile of Student's t with two degrees of freedom.
    half = 4.3027 * math.sqrt(math.pi / 2) * np.std(np.log([2.0, 2.1, 2.4]), ddof=1) / math.sqrt(3)
    low, high = (pytest.approx(2.1 * math.exp(sign * half), rel=1e-4) for sign in (-1, 1))
    assert median_estimate([2.0, 2.1, 2.4]) == Estimate(2.1, low, high, 3, LEVEL, Method.T_LOG)
    high = pytest.approx(4.3027 * math.sqrt(math.pi / 2) * 0.1 / math.sqrt(3), rel=1e-4)
    estimate = median_estimate([-0.1, 0.0, 0.1], log_scale=False)
    assert estimate == Estimate(0.0, -estimate.high, high, 3, LEVEL, Method.T_LINEAR)


def test_a_single_sample_has_no_interval_and_excludes_nothing():
    for estimate in (median_estimate([3.0]), ratio_estimate([3.0], [1.0])):
        assert (estimate.value, estimate.low, estimate.high, estimate.level) == (3.0, None, None, None)
        assert not estimate.excludes(1e9)


@pytest.mark.parametrize("bad", [[], [1.0, math.nan], [1.0, math.inf], [1.0, 0.0], [1.0, -2.0]])
def test_values_that_are_no_times_are_refused(bad):
    with pytest.raises(ValueError, match="needs"):
        median_estimate(bad)
    with pytest.raises(ValueError, match="needs"):
        ratio_estimate(bad, [1.0] * len(bad))


def test_pairs_need_partners():
    with pytest.raises(ValueError, match="3 numerators don't pair with 2"):
        ratio_estimate([1.0, 2.0, 3.0], [1.0, 2.0])
    assert ratio_estimate([1.0, 2.0, 3.0], [1.0, 2.0], paired=False).num_samples == 2


@pytest.mark.parametrize("size", [4, 9])
def test_pairing_cancels_what_disturbed_a_whole_block(size):
    blocks = np.linspace(1, 3, size)
    paired, unpaired = (ratio_estimate(2.0 * blocks, blocks, paired=paired) for paired in (True, False))
    assert (paired.low, paired.high) == (pytest.approx(2.0), pytest.approx(2.0))
    assert unpaired.high - unpaired.low > 0.5


@given(pairs, st.booleans())
def test_an_interval_holds_its_estimate(values, flag):
    tops, bottoms = zip(*values, strict=True)
    median, ratio = median_estimate(tops, log_scale=flag), ratio_estimate(tops, bottoms, paired=flag)
    assert median.low <= median.value <= median.high and ratio.low <= ratio.value <= ratio.high
    assert median.value == pytest.approx(np.median(tops))


@given(st.lists(st.tuples(times, times), min_size=2, max_size=5))
def test_turning_a_ratio_of_few_pairs_over_turns_its_interval_over(values):
    tops, bottoms = zip(*values, strict=True)
    one, other = ratio_estimate(tops, bottoms), ratio_estimate(bottoms, tops)
    assert other.value == pytest.approx(1 / one.value)
    assert other.low == pytest.approx(1 / one.high)
    assert other.high == pytest.approx(1 / one.low)


NINE, TEN = ([float(i) for i in range(1, num)] for num in (10, 11))


@pytest.mark.parametrize(
    ("values", "num_longer", "expected"),
    [
        ([3.0, 1.0, 2.0], 0, median_estimate([1.0, 2.0, 3.0])),
        ([], 0, None),
        ([], 3, None),
        ([1.0, 2.0], 2, None),
        ([1.0, 3.0, 2.0], 2, Estimate(3.0, None, None, 5, None, Method.CENSORED)),
        ([1.0, 2.0, 4.0], 1, Estimate(3.0, None, None, 4, None, Method.CENSORED)),
        (NINE, 1, replace(median_estimate(TEN), method=Method.CENSORED)),
        (NINE[:5], 1, Estimate(3.5, 1.0, math.inf, 6, pytest.approx(0.96875), Method.CENSORED)),
    ],
)
def test_censored_values_count_as_longer_than_any_that_is_observed(values, num_longer, expected):
    assert censored_median_estimate(values, num_longer) == expected


@pytest.mark.parametrize(("num_tops", "num_bottoms"), [(6, 6), (7, 7), (31, 31), (256, 256), (9, 14), (120, 6)])
@pytest.mark.parametrize("digits", [15, 1], ids=["all different", "many equal"])
def test_a_bootstrap_is_what_drawing_every_resample_gives(num_tops, num_bottoms, digits):
    random = np.random.default_rng(num_tops)
    tops, bottoms = (np.round(np.exp(random.normal(size=size)), digits) + 0.1 for size in (num_tops, num_bottoms))
    for paired in {False, num_tops == num_bottoms}:
        draws = np.random.default_rng(BOOTSTRAP_SEED)
        first = draws.integers(num_tops, size=(NUM_RESAMPLES, num_tops))
        second = first if paired else draws.integers(num_bottoms, size=(NUM_RESAMPLES, num_bottoms))
        ratios = np.median(tops[first], axis=1) / np.median(bottoms[second], axis=1)
        low, high = np.quantile(ratios, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        for _ in range(2):  # the second time, what was drawn is remembered
            estimate = ratio_estimate(tops.tolist(), bottoms.tolist(), paired=paired)
            assert (estimate.low, estimate.high) == (min(low, estimate.value), max(high, estimate.value))


# ---- coverage

NUM_STUDIES = 500
# Of few repeats, Welch's degrees of freedom and the median's error are on the safe side.
FEW, MANY = (0.93, 0.998), (0.905, 0.985)


def log_normal(rng, count):
    return np.exp(rng.normal(0, 0.1, count))


def skewed(rng, count):
    """A floor, and delays on top of it: what a busy machine's times look like."""
    return 1 + rng.exponential(0.2, count)


def of_ratio(rng, draw, size, paired):
    blocks = np.exp(rng.normal(0, 0.2, size)) if paired else 1.0
    return ratio_estimate(1.5 * draw(rng, size) * blocks, draw(rng, size) * blocks, paired=paired)


def of_difference(rng, size):
    return difference_estimate(*(median_estimate(rng.normal(m, 0.01, size), log_scale=False) for m in (0.90, 0.92)))


def assert_covered(truth, size, least, most, estimate, *how):
    """Assert that intervals of samples of this size hold the truth in such a share of made-up studies."""
    rng = np.random.default_rng(size)
    hits = sum(not estimate(rng, *how).excludes(truth) for _ in range(NUM_STUDIES))
    assert least <= hits / NUM_STUDIES <= most


@pytest.mark.parametrize("draw", [log_normal, skewed])
@pytest.mark.parametrize("size", [2, 3, 5, 6, 10])
def test_a_ratio_or_a_median_lies_in_its_interval(draw, size):
    for paired in (True, False):
        assert_covered(1.5, size, *(FEW if size < 6 else MANY), of_ratio, draw, size, paired)
    median = 1.0 if draw is log_normal else 1 + 0.2 * np.log(2)
    assert_covered(median, size, 0.93, 0.995, lambda rng: median_estimate(draw(rng, size)))


@pytest.mark.parametrize("size", [3, 6, 12])
def test_a_difference_of_metrics_lies_in_its_interval(size):
    assert_covered(0.02, size, *FEW, of_difference, size)
