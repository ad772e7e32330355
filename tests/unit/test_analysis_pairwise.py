"""Comparisons of a study's points: simultaneous intervals, metrics within a margin, needed repeats."""

import math
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from results import make_result

from raypar.analysis.analyse import analyse
from raypar.analysis.comparison import Outcome
from raypar.analysis.pairwise import (
    MARGIN,
    METRIC_ERROR,
    TIME_ERROR,
    TREND_ERROR,
    Family,
    family_of,
    repeats_for_margin,
    repeats_needed,
    worker_metrics,
)
from raypar.analysis.question import Question, collect
from raypar.analysis.recommend import Constraints, recommend
from raypar.analysis.stats import HODGES_LEHMANN_ERROR, LEVEL, NO_PRIOR, VariancePrior
from raypar.units import ratio_interval

WORKERS = Question("s", {"num_workers": 1}, ("num_workers",), unit="share")
BATCHES = Question("s", {}, ("batch_size",))
BOTH = Question("s", {"num_workers": 1}, ("batch_size", "num_workers"))


def gathered(question, results):
    return collect(question, results, "train_time_s")


def trials(times, num_repeats=4, noise=0.03, seed=0, metrics=None, spread=0.0):
    """Log-normal times and normal metrics, with a disturbance of each block."""
    rng = np.random.default_rng(seed)
    blocks = rng.normal(0, 0.2, num_repeats)
    return [
        make_result(
            point,
            r,
            time_s * math.exp(blocks[r] + rng.normal(0, noise)),
            (0.97 if metrics is None else metrics[i]) + rng.normal(0, spread),
        )
        for i, (point, time_s) in enumerate(times)
        for r in range(num_repeats)
    ]


def by_workers(*times, **more):
    return trials([({"num_workers": 2**i}, time_s) for i, time_s in enumerate(times)], **more)


def by_both(num_batches, num_workers, **more):
    pairs = [(b, w) for b in range(num_batches) for w in range(num_workers)]
    return trials([({"batch_size": 2**b, "num_workers": 2**w}, 8.0 / 2**w / (b + 1)) for b, w in pairs], **more)


def on_the_way(results):
    """Trials that reported twice."""
    return [replace(r, reports=r.reports * 2) for r in results]


# ---- the family


@pytest.mark.parametrize(
    ("question", "results", "num_comparisons", "num_metric_comparisons"),
    [
        (WORKERS, [], 1, 1),
        (WORKERS, by_workers(8.0), 1, 1),
        (WORKERS, by_workers(8.0, 4.0), 1, 1),  # with its baseline, which is also with the next one
        (WORKERS, by_workers(8.0, 4.0, 2.0, 1.0), 3 + 1.5, 1.5 + 3 / 4),
        (Question("s", {}, ("num_workers",)), by_workers(8.0, 4.0, 2.0, 1.0), 1.5 + 3 / 4, 1.5 + 3 / 4),  # scaling
        (Question("s", {}, ("lr",)), trials([({"lr": i}, 4.0) for i in range(4)]), 1.5, 1.5),
        (
            Question("s", {}, ("batch_size",)),
            on_the_way(trials([({"batch_size": i}, 4.0) for i in (1, 2, 3)])),
            1 + 3 * 2 / 4,
            1,
        ),
        (BOTH, by_both(2, 2), 2 + 1.5 + 2 * 2 / 4, 1.5 + (2 + 2) / 4),
        (BOTH, by_both(3, 4), 9 + 5.5 + 2 * 5 / 4, 5.5 + (9 + 5) / 4),
        (BOTH, by_both(3, 4)[:-16], 6 + 3.5 + 2 * 4 / 4, 3.5 + (6 + 4) / 4),  # only points that ran count
    ],
)
def test_a_family_counts_its_comparisons(question, results, num_comparisons, num_metric_comparisons):
    family = family_of(question, gathered(question, results))
    assert family.num_comparisons == num_comparisons
    assert family.time_level(3) == pytest.approx(1 - TIME_ERROR / num_comparisons)
    assert family.metric_level(3) == pytest.approx(1 - METRIC_ERROR / num_metric_comparisons)


def test_the_errors_of_all_kinds_of_claims_add_up_to_five_percent():
    assert pytest.approx(1 - LEVEL) == TIME_ERROR + METRIC_ERROR + TREND_ERROR


@given(st.integers(0, 99), st.sampled_from([2, 3, 6]))
def test_a_speedup_has_one_interval_in_every_view(seed, num_repeats):
    results = by_workers(8.0, 4.5, 2.6, num_repeats=num_repeats, seed=seed)
    analysis, advice = analyse(WORKERS, results), recommend(WORKERS, results, Constraints())
    speedups = {p.num_workers: p.speedup for p in analysis.points}
    (group,) = analysis.worker_groups
    assert group.speedups == speedups
    assert {c.num_workers: c.speedup for c in advice.candidates} == speedups
    assert analysis.verdict.comparisons[-1].comparison.estimate == speedups[4]
    # The lead is the same in the verdict, and the interval of an inverse ratio is the inverse interval.
    one, two, four = analysis.points
    assert advice.chosen.num_workers == 4
    assert advice.lead == analysis.family.speedup(two, four)
    is_claimed = any(ratio_interval(advice.lead) in line for line in analysis.statements)
    assert is_claimed == (advice.rivals == ())
    inverse = analysis.family.speedup(four, one)
    assert (inverse.low, inverse.high) == pytest.approx((1 / speedups[4].high, 1 / speedups[4].low))


def test_a_limit_on_the_points_keeps_their_intervals():
    results = by_both(2, 3)
    every, some = (recommend(BOTH, results, Constraints(only=only)) for only in ({}, {"batch_size": (2,)}))
    shown = {(c.point["batch_size"], c.num_workers): c.speedup for c in every.candidates}
    assert all(shown[2, c.num_workers] == c.speedup for c in some.candidates)
    assert some.lead.level == every.lead.level


@pytest.mark.parametrize(("base", "other"), [((4.0, 4.4, 4.2), (2.0, 2.2, 2.1)), ((4.0,), (2.0,))])
def test_pairs_are_compared_block_by_block(base, other):
    one, two = gathered(
        WORKERS,
        [make_result({"num_workers": w}, r, t) for w, times in ((1, base), (2, other)) for r, t in enumerate(times)],
    )
    ratio = Family().speedup(one, two)
    assert (ratio.value, ratio.num_samples) == (pytest.approx(2.0), len(base))
    assert (ratio.low, ratio.high) == (pytest.approx((2.0, 2.0)) if len(base) > 1 else (None, None))


# ---- metrics


@pytest.mark.parametrize("num_tests", [1, 4])
def test_bounds_have_the_level_of_their_one_sided_tests(num_tests):
    one, two = gathered(WORKERS, by_workers(8.0, 4.0, metrics=(0.96, 0.97), spread=0.002))
    level = Family().metric_bounds(one, two, num_tests).level
    assert (1 - level) / 2 == pytest.approx(0.05 / num_tests)


def test_the_prior_does_not_apply_to_points_that_differ_by_rounding():
    prior = VariancePrior(0.01**2, 9.0, 90)
    one, two, three = gathered(
        WORKERS,
        [
            make_result({"num_workers": w}, r, 8.0 / w, 0.9 + 0.01 * ((r + 3 * (w == 4)) % 5) + 1e-5 * w * r)
            for w in (1, 2, 4)
            for r in range(5)
        ],
    )
    alike, unlike = (Family(metrics=prior).metric_change(one, p) for p in (two, three))
    assert alike == Family(metrics=NO_PRIOR).metric_change(one, two) and alike.high < 1e-3
    assert unlike != Family(metrics=NO_PRIOR).metric_change(one, three) and unlike.high > 0.01


EQUIVALENT, LOWER, UNKNOWN = Outcome.EQUIVALENT, Outcome.LOWER, Outcome.INCONCLUSIVE


@pytest.mark.parametrize(
    ("metrics", "spread", "num_repeats", "verdict"),
    [
        ((0.95, 0.95), 0.0, 3, EQUIVALENT),
        ((0.95, 0.9503), 0.001, 10, EQUIVALENT),
        ((0.95, 0.92), 0.001, 10, LOWER),
        ((0.95, 0.953), 0.0, 3, EQUIVALENT),  # a difference without a spread, but within the margin
        ((0.95, 0.95), 0.02, 3, UNKNOWN),
        ((0.95, 0.92), 0.001, 1, Outcome.UNCONFIRMED),
    ],
)
def test_the_metric_over_workers_is_equivalent_different_or_inconclusive(metrics, spread, num_repeats, verdict):
    points = gathered(WORKERS, by_workers(8.0, 4.0, metrics=metrics, spread=spread, num_repeats=num_repeats))
    (compared,) = worker_metrics(WORKERS, points, family_of(WORKERS, points))
    assert (compared.point.num_workers, compared.base.num_workers, compared.comparison.margin) == (2, 1, 0.005)
    assert compared.comparison.outcome is verdict
    assert compared.comparison.estimate.value == pytest.approx(metrics[1] - metrics[0], abs=2 * spread)


def test_metrics_over_workers_are_compared_with_the_baselines():
    results = by_both(2, 3, num_repeats=2)
    question = Question("s", {"num_workers": 2}, ("batch_size", "num_workers"))
    points = gathered(question, results)
    compared = worker_metrics(question, points, Family())
    assert [(c.point.point["batch_size"], c.base.num_workers, c.point.num_workers) for c in compared] == [
        (b, 2, w) for b in (1, 2) for w in (1, 4)
    ]
    assert worker_metrics(Question("s", {}, ("lr",)), gathered(WORKERS, results[:2]), Family()) == []


# ---- repeats still needed


def test_needed_repeats_grow_with_the_square_of_the_spread():
    # z(97.5 %) + z(80 %) is 2.8016; the distance is log(1 + MARGIN).
    per_spread = 2.8016 * HODGES_LEHMANN_ERROR / math.log1p(MARGIN)
    for spread, expected in (
        (0.2, (per_spread * 0.2) ** 2 * 4 / 3),
        (0.4, (per_spread * 0.4) ** 2 * 4 / 3),
        (0.001, 6),
    ):
        times = {r: math.exp(spread * (-1) ** r) for r in range(4)}
        assert repeats_needed(times, dict.fromkeys(times, 1.0)) == math.ceil(expected)
    assert repeats_needed({0: 1.0}, {0: 2.0}) is None


def metrics(differences):
    """Return the metrics of two points that differ by these from block to block."""
    return dict.fromkeys(range(len(differences)), 0.0), dict(enumerate(differences))


def test_needed_blocks_depend_on_the_distance_to_the_margin():
    # z(95 %) + z(80 %) is 2.4865.
    differences, margin = (0.01, -0.01, 0.01, -0.01), 0.005
    expected = (2.4865 * HODGES_LEHMANN_ERROR * np.std(differences, ddof=1) / margin) ** 2
    assert repeats_for_margin(*metrics(differences), margin) == math.ceil(expected)
    assert repeats_for_margin(*metrics([d + 0.005 for d in differences]), margin) == math.ceil(expected / 4)
    assert repeats_for_margin(*metrics([-0.005] * 3), margin) == sys.maxsize  # on the margin
    assert repeats_for_margin(*metrics([0.0] * 3), margin) == 4
    assert repeats_for_margin(*metrics([0.0]), margin) is None
    best, other = metrics(differences)
    apart = repeats_for_margin(best, {repeat + 100: value for repeat, value in other.items()}, margin)
    assert apart == math.ceil(expected)  # the best has no scatter


TIMES = st.dictionaries(st.integers(0, 7), st.floats(0.5, 2.0), min_size=2, max_size=8)


@given(first=TIMES, factor=st.floats(1.01, 3.0))
def test_a_constant_factor_is_certain_in_pairs(first, factor):
    slower = {repeat: time_s * factor for repeat, time_s in first.items()}
    ratio = Family(99.0).ratio(slower, first)
    assert (ratio.low, ratio.value, ratio.high) == pytest.approx((factor,) * 3)
