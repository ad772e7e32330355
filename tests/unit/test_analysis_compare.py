"""Comparison of two studies: matched points, ratios of times, and the gate."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from results import CONFIG, make_result, stored_conditions

from raypar.analysis.compare import Side, compare, holm_estimates, match
from raypar.analysis.comparison import Gate, Outcome
from raypar.analysis.question import PointSamples, Question
from raypar.analysis.stats import (
    Estimate,
    Method,
    independent_prior,
    independent_shift_estimate,
)
from raypar.errors import RayparError
from raypar.study.trial import TrialResult, TrialState

STEADY = (4.00, 4.01, 3.99, 4.02, 3.98)
Results = list[TrialResult]


def trials(times=STEADY, point=None, **config):
    return [make_result(point or {"num_workers": 1}, r, t, config=config) for r, t in enumerate(times)]


def side(results, keys=("num_workers",), name="a", **origin):
    origins = {key.replace("_", "."): (value,) for key, value in origin.items()}
    return Side(Question(name, {}, keys), tuple(results), origins)


def compared(a, b, allowed_share=None):
    return compare(side(a), side(b, name="b"), allowed_share)


def scaled(factor, times=STEADY):
    return [t * factor for t in times]


def ended(state, num=1):
    return [make_result({"num_workers": 1}, 9 - r, state=state) for r in range(num)]


WIDE = (3.0, 4.0, 5.0)
DIVERGED, FAILED = ended(TrialState.DIVERGED), ended(TrialState.FAILED)
WHOLE = [make_result({"num_workers": 1}, r, None, wall_s=9.0 + r / 99) for r in range(3)]
TIMED = [make_result({"num_workers": 1}, r, 4.0, wall_s=6.0 + r / 99) for r in range(3)]
MORE_WORK = [make_result({"num_workers": 1}, r, 8.0 + r / 99, num_samples=720_000) for r in range(3)]
S, F, OPEN = Outcome.SLOWER, Outcome.FASTER, Outcome.INCONCLUSIVE
PASSED, LOST, UNCLEAR = Gate.PASSED, Gate.FAILED, Gate.INCONCLUSIVE


@pytest.mark.parametrize(
    ("a", "b", "difference", "ratio", "gate"),
    [
        (trials(), trials(scaled(1.2)), S, 1.2, LOST),
        (trials(), trials(scaled(1.02)), S, 1.02, PASSED),
        (trials(), trials(scaled(1 / 1.2)), F, 1 / 1.2, PASSED),
        (trials(), trials((4.3, 3.7, 4.01)), OPEN, 4.01 / 4, UNCLEAR),
        (trials(), trials((8.0,)), Outcome.UNCONFIRMED, 2.0, UNCLEAR),
        # B takes exactly 1.1 times as long in every block. Pairs would be conclusive, independent samples are not.
        (trials(WIDE), trials(scaled(1.1, WIDE)), OPEN, 1.1, UNCLEAR),
        (trials(), MORE_WORK, F, 0.5, PASSED),  # rates are compared if the work differs
        (TIMED, WHOLE, S, 1.5, LOST),  # whole trials are compared if either study has no times of steps
        (WHOLE, TIMED, F, 1 / 1.5, PASSED),
        # Lost trials of B are not a pass, and missing ones of A are not a loss.
        (trials(), FAILED, Outcome.MISSING, None, LOST),
        (trials(), DIVERGED, Outcome.MISSING, None, LOST),
        (trials(), ended(TrialState.STOPPED), Outcome.MISSING, None, UNCLEAR),
        (trials(), [*trials(), *DIVERGED], OPEN, 1.0, UNCLEAR),
        (trials(), [*trials(), *FAILED], OPEN, 1.0, PASSED),
        ([*trials(), *DIVERGED], [*trials(), *DIVERGED], OPEN, 1.0, PASSED),
        (FAILED, trials(), Outcome.MISSING, None, None),
    ],
)
def test_the_ratio_is_bs_time_divided_by_as(a, b, difference, ratio, gate):
    comparison = compared(a, b)
    (point,) = comparison.matched
    assert point.time.outcome is difference
    assert (point.time.estimate and point.time.estimate.value) == (ratio and pytest.approx(ratio, rel=5e-3))
    assert comparison.time_metric == ("wall_s" if WHOLE in (a, b) else "train_time_s")
    judged = compared(a, b, 0.05)
    assert judged.matched[0].gate is gate
    assert judged.gate is (gate if ratio or gate is LOST else None)


@pytest.mark.parametrize(
    ("low", "high", "gate"),
    [(1.06, 1.10, LOST), (1.05, 1.10, UNCLEAR), (0.90, 1.20, UNCLEAR), (1.01, 1.04, PASSED)],
)
def test_the_gate_needs_the_whole_interval_on_one_side(low, high, gate):
    ratio = Estimate(math.sqrt(low * high), low, high, 5, 0.95, Method.T_LOG)
    point = compared(trials(), trials(), 0.05).matched[0]
    assert replace(point, time=replace(point.time, estimate=ratio)).gate is gate


@pytest.mark.parametrize(
    ("in_b", "gate"),
    [
        ({1: 1.0, 2: 1.0, 4: 1.0}, PASSED),
        ({1: 1.0, 2: 1.0, 4: 1.0, 8: 9.9}, PASSED),  # a point that only B has
        ({1: 1.0, 2: 1.0}, UNCLEAR),
        ({1: 1.0, 2: 1.0, 4: 1.2}, LOST),
        ({1: 1.2}, LOST),
        ({8: 1.0}, None),
    ],
)
def test_a_point_that_b_lacks_counts(in_b, gate):
    a = [r for n in (1, 2, 4) for r in trials(point={"num_workers": n})]
    b = [r for n, factor in in_b.items() for r in trials(scaled(factor), {"num_workers": n})]
    comparison = compared(a, b, 0.05)
    assert comparison.gate is gate
    assert [p["num_workers"] for p in comparison.missing] == [n for n in (1, 2, 4) if n not in in_b]
    if gate is PASSED:  # a point with different work is missing, too
        other = [replace(r, spec=replace(r.spec, config={**r.spec.config, "epochs": 9})) for r in b]
        assert compared(a, other, 0.05).missing == ({"num_workers": 1}, {"num_workers": 2}, {"num_workers": 4})


# ---- claims that hold together


def samples(rng, num_points, size, shift=0.0):
    first = rng.normal(0, 0.02, (num_points, size))
    return list(zip(first, rng.normal(shift, 0.02, (num_points, size)), strict=True))


@given(st.integers(1, 9), st.integers(2, 7), st.floats(-0.1, 0.1), st.integers(0, 99))
def test_intervals_of_one_level_show_the_claims_of_holms_steps(num_points, size, against, seed):
    pairs = samples(np.random.default_rng(seed), num_points, size, 0.05)
    priors = tuple(independent_prior([pair[i] for pair in pairs]) for i in (0, 1))

    def excludes(pair, level):
        return independent_shift_estimate(*pair, level=level, priors=priors).excludes(against)

    claimed: list[int] = []  # in Holm's steps, each at the level of the remaining comparisons
    while True:
        left = [i for i in range(num_points) if i not in claimed]
        new = [i for i in left if excludes(pairs[i], 1 - 0.05 / len(left))]
        if not new:
            break
        claimed += new
    estimates = holm_estimates(pairs, against=against, error=0.05)
    assert [i for i, e in enumerate(estimates) if e.excludes(against)] == sorted(claimed)
    assert {e.level for e in estimates} == {1 - 0.05 / max(1, num_points - len(claimed))}


def test_pairs_with_a_single_value_are_not_counted():
    pairs = samples(np.random.default_rng(0), 2, 5, 0.2)
    single = ([0.0], [1.0, 1.1])
    alone, among = (holm_estimates(p, against=0.0, error=0.05) for p in (pairs, [*pairs, single, None]))
    assert among[:2] == alone and (among[2].low, among[3]) == (None, None)


@pytest.mark.parametrize(
    ("first", "second", "low"),
    [
        ([0.9] * 3, [0.9] * 3, 0.0),
        ([0.9] * 3, [0.8] * 3, None),  # 20 orders of the trials, two of which are as extreme
        ([0.9] * 6, [0.8] * 6, -0.1),
    ],
)
def test_values_without_scatter_differ_if_there_are_many(first, second, low):
    estimate = independent_shift_estimate(first, second, level=0.95)
    assert estimate.low == (low if low is None else pytest.approx(low))


def disturbed(results, num=None):
    """Return trials whose first `num`, or all, lost half of their cores' time to other load."""
    busy = {"cores": [[0]], "foreign_cpu_share": [0.5]}
    num = len(results) if num is None else num
    return [replace(r, conditions=stored_conditions(busy)) for r in results[:num]] + list(results[num:])


@pytest.mark.parametrize("factor", [3.59, 1.0, 0.5])
@pytest.mark.parametrize("is_disturbed", [(False, True), (True, False), (True, True)])
def test_nothing_is_claimed_on_times_if_most_trials_of_a_side_were_disturbed(factor, is_disturbed):
    a, b = (disturbed(r) if d else r for r, d in zip((trials(), trials(scaled(factor))), is_disturbed, strict=True))
    comparison = compared(a, b, 0.05)
    why = "other processes used up to 50 % of the cores in 5 of 5 trials"
    assert comparison.doubts == tuple(why if d else "" for d in is_disturbed)
    assert comparison.matched[0].time.outcome is Outcome.DISTURBED
    assert (comparison.matched[0].gate, comparison.gate) == (UNCLEAR, UNCLEAR)
    # A search asks for a metric, so its own report has no doubt. Here, its times are compared.
    searched = compare(
        replace(side(a), question=Question("a", {}, ("num_workers",), num_repeats=1, is_search=True)), side(b), 0.05
    )
    assert searched.gate is UNCLEAR


def test_disturbed_times_do_not_hide_lost_trials():
    assert compared(disturbed(trials()), FAILED, 0.05).gate is LOST
    half = disturbed(trials(scaled(1.2)), 2)
    assert (compared(trials(), half, 0.05).gate, compared(trials(), half).doubts) == (LOST, ("", ""))


def test_the_change_of_the_metric_has_an_interval():
    a, b = ([make_result({"num_workers": 1}, r, 4.0, v + r / 100) for r in range(3)] for v in (0.95, 0.90))
    change = compared(a, b).matched[0].metric.estimate
    assert change is not None and change.value == pytest.approx(-0.05)
    assert change.low is not None and change.high is not None and change.low < -0.05 < change.high


# ---- matched points

values = st.sampled_from([1, 2, 4, True, False, None, "sgd", (1, 2)])
spaces = st.lists(st.fixed_dictionaries({"x": values, "y": values}), max_size=6, unique_by=lambda p: written(p))


def written(point):
    return repr(sorted(point.items()))


@given(spaces, spaces)
def test_every_point_is_matched_once(a, b):
    of_a, of_b = ([PointSamples(p, {**CONFIG, **p}) for p in points] for points in (a, b))
    pairs, only_a, only_b = match(of_a, of_b, ("x", "y"))
    assert sorted(map(id, [*(p for p, _ in pairs), *only_a])) == sorted(map(id, of_a))
    assert sorted(map(id, [*(p for _, p in pairs), *only_b])) == sorted(map(id, of_b))
    assert all(written(first.point) == written(second.point) for first, second in pairs)
    assert len(pairs) == len(set(map(written, a)) & set(map(written, b)))


def test_hyperparameters_that_one_study_sweeps_come_from_the_others_config():
    a = [r for size in (32, 64) for r in trials(point={"num_workers": 2, "batch_size": size})]
    b = trials(point={"num_workers": 2}, batch_size=64)
    for swept in (("num_workers", "batch_size"), ("num_workers",)):  # now, or only in an earlier execution
        comparison = compare(side(a, swept), side(b))
        assert [p.point for p in comparison.matched] == [{"num_workers": 2, "batch_size": 64}]
        assert comparison.only == (({"num_workers": 2, "batch_size": 32},), ())


def test_only_points_that_do_the_same_work_are_compared():
    assert compared(trials(epochs=1), trials(epochs=2)).unlike == (({"num_workers": 1}, {"epochs": (1, 2)}),)
    (point,) = compared(trials(device="cpu"), trials(device="cuda", option_of_a_newer_version=3)).matched
    assert point.execution_changes == {"device": ("cpu", "cuda")}


def test_points_without_a_trial_are_ignored():
    asked = Question("a", {}, ("num_workers",), points=({"num_workers": 1}, {"num_workers": 2}))
    comparison = compare(Side(asked, tuple(trials()), {}), side(trials(point={"num_workers": 2})))
    assert comparison.only == (({"num_workers": 1},), ({"num_workers": 2},))


def test_studies_of_different_workloads_are_refused():
    other = [replace(r, spec=replace(r.spec, workload="resnet")) for r in trials()]
    with pytest.raises(RayparError, match="`a` trains mnist_mlp, `b` trains resnet"):
        compared(trials(), other)


# ---- provenance

ORIGIN = {"version_torch": "2.13", "cpu": "x", "command": "raypar study a", "git_dirty": "no"}
OTHER = {**ORIGIN, "version_torch": "2.15", "command": "raypar study b", "git_dirty": "yes"}


def test_only_differences_in_origin_are_reported():
    comparison = compare(side(trials(), **ORIGIN), side(trials(), **OTHER))
    assert comparison.origins == {"version.torch": (("2.13",), ("2.15",))}
    assert comparison.uncommitted == (False, True)
    comparison = compare(
        side(trials(), **ORIGIN), side(trials())
    )  # a value that is unknown for one is not a difference
    assert (comparison.origins, comparison.is_known) == ({}, (True, False))
    n1, n2 = ([make_result({}, environment={"node": [n] * 2, "device_name": ["cpu"] * 2})] for n in ("n1", "n2"))
    assert compare(side(n1, ()), side(n2, ())).origins == {"node": (("n1",), ("n2",))}


def test_metrics_of_different_units_are_not_compared():
    point = {"num_workers": 1}
    share, percent = ([make_result(point, r, t, value) for r, t in enumerate(STEADY)] for value in (0.9, 90.0))
    for a, b, units in ((share, percent, ("share", "percent")), (percent, percent, ("percent", "percent"))):
        both = compared(a, b)
        (matched,) = both.matched
        assert both.metric_units == units and (matched.metric.estimate is None) == (units[0] != units[1])
    assert compared(percent, percent).judged_by.show(90.0) == "90.00 %"
