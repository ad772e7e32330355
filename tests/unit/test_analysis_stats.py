"""Medians, shifts, ratios and their intervals, with their coverage in simulated samples."""

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.stats import binom
from scipy.stats import t as student

from raypar.analysis.stats import (
    HODGES_LEHMANN_ERROR,
    LEVEL,
    NO_PRIOR,
    Estimate,
    Method,
    VariancePrior,
    censored_median_estimate,
    median_estimate,
    prior_of_mean,
    ratio_estimate,
    shift_estimate,
    variance_prior,
)

times = st.floats(min_value=1e-3, max_value=1e4)
samples = st.lists(times, min_size=2, max_size=20)
pairs = st.lists(st.tuples(times, times), min_size=2, max_size=12)
factors = st.floats(0.01, 100.0)


def bounds(estimate):
    return estimate.low, estimate.value, estimate.high


# ---- medians


def confidence(k, size):
    """Confidence of the k-th smallest and the k-th largest as bounds of the median."""
    return 1 - 2 * binom.cdf(k - 1, size, 0.5)


@pytest.mark.parametrize("size", range(6, 31))
def test_bounds_are_interpolated_between_order_statistics_from_six_samples_on(size):
    values = np.arange(1.0, size + 1) ** 2
    k = max(k for k in range(1, size // 2 + 1) if confidence(k, size) >= LEVEL)
    estimate = median_estimate(values.tolist())
    assert (estimate.level, estimate.method) == (LEVEL, Method.RANKS)
    assert values[k - 1] <= estimate.low < values[k] and values[-k - 1] < estimate.high <= values[-k]
    outermost = median_estimate(values.tolist(), level=confidence(k, size))
    assert bounds(outermost) == pytest.approx((values[k - 1], np.median(values), values[-k]))


def test_few_times_get_a_t_interval_on_logarithms_and_few_scores_a_linear_one():
    # 4.3027: the tabled two-sided 95 % quantile of Student's t with two degrees of freedom; 1.160: see MEDIAN_ERRORS.
    half = 4.3027 * 1.160 * np.std(np.log([2.0, 2.1, 2.4]), ddof=1) / math.sqrt(3)
    low, high = (pytest.approx(2.1 * math.exp(sign * half), rel=1e-4) for sign in (-1, 1))
    assert median_estimate([2.0, 2.1, 2.4]) == Estimate(2.1, low, high, 3, LEVEL, Method.T_LOG)
    high = pytest.approx(4.3027 * 1.160 * 0.1 / math.sqrt(3), rel=1e-4)
    estimate = median_estimate([-0.1, 0.0, 0.1], log_scale=False)
    assert estimate == Estimate(0.0, -estimate.high, high, 3, LEVEL, Method.T_LINEAR)


@pytest.mark.parametrize(("size", "method"), [(7, Method.RANKS), (6, Method.T_LOG)])
def test_a_level_that_order_statistics_do_not_reach_uses_students_t(size, method):
    assert median_estimate(np.arange(1.0, size + 1).tolist(), level=0.98).method is method


@given(samples, factors, st.booleans(), st.sampled_from([0.8, 0.95, 0.999]))
@example([3.0, 3.0], 1.0, True, 0.8)
@example([1.0] * 5 + [4506.0] + [4505.221146611729] * 2, 1.0, False, 0.8)
def test_an_interval_of_a_median_scales_with_the_samples_and_grows_with_the_level(values, factor, log_scale, level):
    estimate = median_estimate(values, log_scale=log_scale, level=level)
    scaled = median_estimate([factor * v for v in values], log_scale=log_scale, level=level)
    if estimate.high < 1e300:  # two values far apart reach the largest float, whatever their scale
        assert bounds(scaled) == pytest.approx([factor * b for b in bounds(estimate)], rel=1e-6, abs=1e-6 * factor)
    wider = median_estimate(values, log_scale=log_scale, level=(1 + level) / 2)
    assert estimate.low <= estimate.value <= estimate.high
    if wider.method is estimate.method:
        rounding = 1e-12 * max(map(abs, values))
        assert wider.low <= estimate.low + rounding and estimate.high <= wider.high + rounding
    assert estimate.value == pytest.approx(np.median(values))


@pytest.mark.parametrize("estimate", [median_estimate([3.0]), ratio_estimate([3.0], [1.0])])
def test_a_single_sample_has_no_interval_and_excludes_nothing(estimate):
    assert estimate == Estimate(pytest.approx(3.0), None, None, 1, None, Method.SINGLE)
    assert not estimate.excludes(1e9)


@pytest.mark.parametrize("bad", [[], [1.0, math.nan], [1.0, math.inf], [1.0, 0.0], [1.0, -2.0]])
def test_invalid_times_are_refused(bad):
    with pytest.raises(ValueError, match="needs"):
        median_estimate(bad)
    with pytest.raises(ValueError, match="needs"):
        ratio_estimate(bad, [1.0] * len(bad))
    if not bad or not all(map(math.isfinite, bad)):
        with pytest.raises(ValueError, match="needs"):
            shift_estimate(bad, level=LEVEL)


CENSORED = Method.CENSORED


@pytest.mark.parametrize(
    ("values", "num_longer", "expected"),
    [
        ([3.0, 1.0, 2.0], 0, median_estimate([1.0, 2.0, 3.0])),
        ([], 0, None),
        ([], 3, None),
        ([1.0, 2.0], 2, None),
        ([1.0, 3.0, 2.0], 2, Estimate(3.0, None, None, 5, None, CENSORED)),
        ([1.0, 2.0, 4.0], 1, Estimate(3.0, None, None, 4, None, CENSORED)),
        (np.arange(1.0, 10.0), 1, Estimate(5.5, 2.0, 9.0, 10, pytest.approx(confidence(2, 10)), CENSORED)),
        (np.arange(1.0, 6.0), 1, Estimate(3.5, 1.0, math.inf, 6, pytest.approx(0.96875), CENSORED)),
    ],
)
def test_censored_values_count_as_longer_than_all_others(values, num_longer, expected):
    assert censored_median_estimate(list(values), num_longer) == expected


# ---- ratios


def test_pairs_need_partners():
    with pytest.raises(ValueError, match="3 numerators don't pair with 2"):
        ratio_estimate([1.0, 2.0, 3.0], [1.0, 2.0])
    assert ratio_estimate([1.0, 2.0, 3.0], [1.0, 2.0], paired=False).num_samples == 2


@pytest.mark.parametrize("size", [4, 6, 9, 20])
def test_pairing_cancels_disturbances_of_a_block(size):
    blocks = np.linspace(1, 3, size)
    paired, unpaired = (ratio_estimate(2.0 * blocks, blocks, paired=paired) for paired in (True, False))
    assert bounds(paired) == pytest.approx((2.0, 2.0, 2.0))
    assert unpaired.high - unpaired.low > 0.5


@given(pairs, factors, st.booleans())
def test_an_interval_of_a_ratio_scales_and_inverts_with_it(values, factor, paired):
    tops, bottoms = zip(*values, strict=True)
    ratio, inverse = ratio_estimate(tops, bottoms, paired=paired), ratio_estimate(bottoms, tops, paired=paired)
    assert ratio.low <= ratio.value <= ratio.high and ratio.level == LEVEL
    assert bounds(inverse)[::-1] == pytest.approx([1 / b for b in bounds(ratio)])
    scaled = ratio_estimate([factor * top for top in tops], bottoms, paired=paired)
    assert bounds(scaled) == pytest.approx([factor * b for b in bounds(ratio)], rel=1e-6)


def test_an_unpaired_ratio_is_that_of_the_medians():
    tops, bottoms = [2.0, 2.1, 2.2], [1.0, 1.05, 1.1, 1.0, 1.1]
    ratio = ratio_estimate(tops, bottoms, paired=False)
    assert ratio.value == pytest.approx(2.1 / 1.05)
    # The same spread on both sides: the degrees of freedom add up.
    same = ratio_estimate(tops, [top / 2 for top in tops], paired=False)
    half = student.ppf(0.975, 4) * 1.160 * np.std(np.log(tops), ddof=1) * math.sqrt(2 / 3)
    assert math.log(same.high / same.value) == pytest.approx(half)
    # A constant side adds nothing.
    still = ratio_estimate(tops, [1.0] * 9, paired=False)
    assert bounds(still) == pytest.approx(bounds(median_estimate(tops)))


def test_a_ratio_is_limited_to_the_range_of_a_float():
    wild = ratio_estimate([1e300, 1e-300], [1e-5, 1e5])
    assert wild.low > 0 and math.isfinite(wild.high)


# ---- shifts, and the variances of many points


def test_a_shift_is_the_median_of_pairwise_means_with_a_t_interval():
    sample = [0.1, 0.2, 0.6]
    estimate = shift_estimate(sample, level=0.99)
    half = student.ppf(0.995, 2) * HODGES_LEHMANN_ERROR * np.std(sample, ddof=1) / math.sqrt(3)
    assert bounds(estimate) == pytest.approx((0.275 - half, 0.275, 0.275 + half))  # of .1 .15 .2 .35 .4 .6
    assert (estimate.level, estimate.num_samples, estimate.method) == (0.99, 3, Method.MODERATED)


def test_a_prior_adds_its_degrees_of_freedom_and_half_the_variance_of_a_difference():
    sample, prior = [0.0, 0.1, 0.2], VariancePrior(0.02, 4.0, 100)
    variance = (4 * 2 * 0.02 + 2 * 0.01) / 6
    half = student.ppf(0.975, 6) * HODGES_LEHMANN_ERROR * math.sqrt(variance / 3)
    assert shift_estimate(sample, level=LEVEL, prior=prior).high == pytest.approx(0.1 + half)
    few = VariancePrior(0.02, 4.0, 5)  # all points together have no more than five
    half *= student.ppf(0.975, 5) / student.ppf(0.975, 6)
    assert shift_estimate(sample, level=LEVEL, prior=few).high == pytest.approx(0.1 + half)


def test_equal_differences_have_an_interval_of_width_zero():
    assert bounds(shift_estimate([0.25] * 4, level=0.999)) == (0.25, 0.25, 0.25)
    single = shift_estimate([0.25], level=LEVEL, prior=VariancePrior(0.1, 9.0, 20))
    assert single == Estimate(0.25, None, None, 1, None, Method.SINGLE)


def table(rng, num_points, num_blocks, spreads=0.05):
    """Logarithms of times: points 0.2 apart, disturbed blocks, and noise."""
    points, blocks = 0.2 * np.arange(num_points)[:, None], rng.normal(0, 0.3, num_blocks)
    return points + blocks + rng.normal(0, 1, (num_points, num_blocks)) * spreads


def test_the_prior_of_equally_noisy_points_has_many_degrees_of_freedom():
    prior = variance_prior(table(np.random.default_rng(0), 400, 8))
    assert prior.variance == pytest.approx(0.05**2, rel=0.05)
    assert (prior.num_freedom, prior.num_pooled) == (36, 7 * 399)  # (8 - 2)²


def test_a_simulated_prior_is_recovered():
    # Smyth's model: a variance is s² · d / chi²(d).
    rng = np.random.default_rng(1)
    spreads = 0.05 * np.sqrt(6 / rng.chisquare(6, (4000, 1)))
    prior = variance_prior(table(rng, 4000, 10, spreads))
    assert prior.variance == pytest.approx(0.05**2, rel=0.05)
    assert prior.num_freedom == pytest.approx(6, rel=0.1)


@pytest.mark.parametrize(
    "logs",
    [
        table(np.random.default_rng(0), 2, 9),  # two points have one variance, that of their differences
        table(np.random.default_rng(0), 9, 2),
        np.zeros((5, 6)),
        np.zeros((0, 0)),
    ],
)
def test_two_points_two_blocks_or_constant_points_have_no_prior(logs):
    assert variance_prior(logs) == NO_PRIOR


@given(st.integers(3, 8), st.integers(3, 8), st.floats(-5, 5), factors)
def test_a_prior_does_not_depend_on_the_level_of_points_and_blocks(num_points, num_blocks, offset, factor):
    logs = table(np.random.default_rng(num_points), num_points, num_blocks)
    moved = logs + offset * np.arange(num_points)[:, None] + offset * np.arange(num_blocks)
    one, other = variance_prior(logs), variance_prior(factor * moved)
    assert other.variance == pytest.approx(factor**2 * one.variance, rel=1e-6)
    assert other.num_freedom == pytest.approx(one.num_freedom, rel=1e-6)


# ---- coverage

NUM_STUDIES = 1000  # a share of 95 % of them has a standard error of 0.7 points
FEW, MANY = (0.92, 0.99), (0.925, 0.985)


def log_normal(rng, count):
    return np.exp(rng.normal(0, 0.1, count))


def skewed(rng, count):
    """Times of a busy machine: a minimum plus delays."""
    return 1 + rng.exponential(0.2, count)


def of_ratio(rng, draw, size, paired):
    blocks = np.exp(rng.normal(0, 0.2, size)) if paired else 1.0
    return ratio_estimate(1.5 * draw(rng, size) * blocks, draw(rng, size) * blocks, paired=paired)


def of_shift(rng, size, num_points, freedom, level):
    """Estimate the shift between two of several points with variances by Smyth's model."""
    spreads = 0.02 * np.sqrt(freedom / rng.chisquare(freedom, (num_points, 1)))
    logs = table(rng, num_points, size, spreads)
    return shift_estimate(logs[1] - logs[0], level=level, prior=variance_prior(logs))


def assert_covered(truth, size, least, most, estimate, *how):
    """Assert the coverage of intervals in simulated studies."""
    rng = np.random.default_rng(size)
    hits = sum(not estimate(rng, *how).excludes(truth) for _ in range(NUM_STUDIES))
    assert least <= hits / NUM_STUDIES <= most


@pytest.mark.parametrize("draw", [log_normal, skewed])
@pytest.mark.parametrize("size", [2, 3, 5, 6, 10])
def test_a_ratio_or_a_median_lies_in_its_interval(draw, size):
    limits = FEW if size < 6 else MANY
    for paired in (True, False):
        assert_covered(1.5, size, *limits, of_ratio, draw, size, paired)
    median = 1.0 if draw is log_normal else 1 + 0.2 * np.log(2)
    assert_covered(median, size, *limits, lambda rng: median_estimate(draw(rng, size)))


@pytest.mark.parametrize(("num_points", "freedom"), [(2, 1e9), (3, 1e9), (8, 1e9), (20, 1e9), (8, 4), (20, 4)])
@pytest.mark.parametrize(("size", "level"), [(3, 0.95), (3, 0.99), (6, 0.95), (6, 0.998)])
def test_a_shift_lies_in_its_interval_whatever_the_points_have_in_common(size, level, num_points, freedom):
    error = 3 * math.sqrt(level * (1 - level) / NUM_STUDIES)
    assert_covered(0.2, size, level - 0.005 - error, 1, of_shift, size, num_points, freedom, level)


@pytest.mark.parametrize(
    ("num_blocks", "num_pairs", "helps"),
    [(1, 2, False), (3, 1, True), (3, 8, True), (6, 2, True), (6, 8, False), (12, 8, False), (30, 1, True)],
)
def test_the_prior_helps_means_of_few_points_or_few_blocks(num_blocks, num_pairs, helps):
    prior = VariancePrior(1.0, (num_blocks - 2) ** 2, 7 * num_blocks)
    assert prior_of_mean(prior, num_blocks, num_pairs, 0.999) == (prior if helps else NO_PRIOR)
    assert prior_of_mean(NO_PRIOR, num_blocks, num_pairs, 0.999) == NO_PRIOR
