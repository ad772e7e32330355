"""Two studies: which of their points are the same, how their times compare, and what an allowance says."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from results import CONFIG, make_result

from raypar.analysis.compare import Difference, Gate, Side, compare, match
from raypar.analysis.question import PointSamples, Question
from raypar.analysis.stats import Estimate, Method, difference_estimate, median_estimate
from raypar.errors import RayparError
from raypar.study.trial import TrialResult, TrialState

STEADY = (4.00, 4.01, 3.99, 4.02, 3.98)
Results = list[TrialResult]


def trials(times=STEADY, point=None, **config):
    return [make_result(point or {"num_workers": 1}, r, t, config=config) for r, t in enumerate(times)]


def side(results, keys=("num_workers",), name="a", **origin):
    origins = {key.replace("_", "."): (value,) for key, value in origin.items()}
    return Side(Question(name, {}, keys), tuple(results), origins)


def compared(a, b):
    return compare(side(a), side(b, name="b"))


def scaled(factor):
    return [t * factor for t in STEADY]


WIDE = (3.0, 4.0, 5.0)
FAILED = [make_result({"num_workers": 1}, state=TrialState.FAILED)]
WHOLE = [make_result({"num_workers": 1}, r, None, wall_s=9.0) for r in range(2)]
TIMED = [make_result({"num_workers": 1}, r, 4.0, wall_s=6.0) for r in range(2)]
MORE_WORK = [make_result({"num_workers": 1}, r, 8.0, num_samples=720_000) for r in range(3)]
S, F, T = Difference.SLOWER, Difference.FASTER, Difference.TIED


@pytest.mark.parametrize(
    ("a", "b", "difference", "ratio", "gate"),
    [
        (trials(), trials(scaled(1.2)), S, 1.2, Gate.SLOWER),
        (trials(), trials(scaled(1 / 1.2)), F, 1 / 1.2, Gate.WITHIN),
        (trials(), trials((4.3, 3.7, 4.01)), T, 4.01 / 4, Gate.UNKNOWN),
        (trials(), trials((8.0,)), Difference.NO_INTERVAL, 2.0, Gate.UNKNOWN),
        (trials(), FAILED, Difference.NO_TIME, None, Gate.UNKNOWN),
        # In every block B takes exactly 1.1 times as long: pairs would leave no doubt, independent samples do.
        (trials(WIDE), trials([1.1 * t for t in WIDE]), T, 1.1, Gate.UNKNOWN),
        (trials((4.0,) * 3), MORE_WORK, F, 0.5, Gate.WITHIN),  # rates are compared where the work differs
        (TIMED, WHOLE, S, 1.5, Gate.SLOWER),  # as are whole trials where either has no time of its steps
        (WHOLE, TIMED, F, 1 / 1.5, Gate.WITHIN),
    ],
)
def test_the_ratio_is_how_many_times_as_long_b_takes(a, b, difference, ratio, gate):
    comparison = compared(a, b)
    (point,) = comparison.matched
    assert (point.difference, point.gate(0.05)) == (difference, gate)
    assert (point.ratio and point.ratio.value) == (ratio and pytest.approx(ratio, rel=1e-3))
    assert point.num_finished == (len(a), 0 if b is FAILED else len(b))
    assert comparison.time_metric == ("wall_s" if WHOLE in (a, b) else "train_time_s")


@pytest.mark.parametrize(
    ("low", "high", "gate"),
    [(1.06, 1.10, Gate.SLOWER), (1.05, 1.10, Gate.UNKNOWN), (0.90, 1.20, Gate.UNKNOWN), (1.01, 1.05, Gate.WITHIN)],
)
def test_b_is_slower_than_allowed_only_if_the_whole_interval_is(low, high, gate):
    comparison = compared(trials(), trials())
    ratio = Estimate(math.sqrt(low * high), low, high, 5, 0.95, Method.T_LOG)
    point = replace(comparison.matched[0], ratio=ratio)
    assert replace(comparison, matched=(point,)).gate(0.05)[gate] == (point,)


def test_the_change_of_the_metric_has_an_interval():
    a, b = ([make_result({"num_workers": 1}, r, 4.0, v + r / 100) for r in range(3)] for v in (0.95, 0.90))
    change = compared(a, b).matched[0].metric_change
    assert change is not None and change.value == pytest.approx(-0.05)
    assert change.low is not None and change.high is not None and change.low < -0.05 < change.high


bounds = st.tuples(st.floats(-10, 10), st.floats(0, 5), st.floats(0, 5))


@given(bounds, bounds)
def test_a_difference_turns_round_with_its_sides_and_holds_its_value(a, b):
    first, second = (Estimate(v, v - down, v + up, 7, 0.95, Method.RANKS) for v, down, up in (a, b))
    there, back = difference_estimate(first, second), difference_estimate(second, first)
    assert there.low <= there.value <= there.high
    assert (there.low, there.high) == (pytest.approx(-back.high), pytest.approx(-back.low))
    widths = [(e.high or 0) - (e.low or 0) for e in (first, second)]
    assert there.high - there.low <= sum(widths) + 1e-9
    assert difference_estimate(first, median_estimate([0.8], log_scale=False)).low is None  # of a single value


# ---- which points are the same

values = st.sampled_from([1, 2, 4, True, False, None, "sgd", (1, 2)])
spaces = st.lists(st.fixed_dictionaries({"x": values, "y": values}), max_size=6, unique_by=lambda p: written(p))


def written(point):
    return repr(sorted(point.items()))


@given(spaces, spaces)
def test_every_point_is_in_one_place(a, b):
    of_a, of_b = ([PointSamples(p, {**CONFIG, **p}) for p in points] for points in (a, b))
    pairs, only_a, only_b = match(of_a, of_b, ("x", "y"))
    assert sorted(map(id, [*(p for p, _ in pairs), *only_a])) == sorted(map(id, of_a))
    assert sorted(map(id, [*(p for _, p in pairs), *only_b])) == sorted(map(id, of_b))
    assert all(written(first.point) == written(second.point) for first, second in pairs)
    assert len(pairs) == len(set(map(written, a)) & set(map(written, b)))


def test_what_only_one_study_sweeps_is_looked_up_in_the_others_config():
    a = [r for size in (32, 64) for r in trials(point={"num_workers": 2, "batch_size": size})]
    b = trials(point={"num_workers": 2}, batch_size=64)
    for swept in (("num_workers", "batch_size"), ("num_workers",)):  # now, or in an earlier execution alone
        comparison = compare(side(a, swept), side(b))
        assert [p.point for p in comparison.matched] == [{"num_workers": 2, "batch_size": 64}]
        assert comparison.only == (({"num_workers": 2, "batch_size": 32},), ())


def test_only_points_that_do_the_same_work_are_compared():
    assert compared(trials(epochs=1), trials(epochs=2)).unlike == (({"num_workers": 1}, {"epochs": (1, 2)}),)
    (point,) = compared(trials(device="cpu"), trials(device="cuda", option_of_a_newer_version=3)).matched
    assert point.execution_changes == {"device": ("cpu", "cuda")}


def test_points_without_a_trial_are_not_there():
    asked = Question("a", {}, ("num_workers",), points=({"num_workers": 1}, {"num_workers": 2}))
    comparison = compare(Side(asked, tuple(trials()), {}), side(trials(point={"num_workers": 2})))
    assert comparison.only == (({"num_workers": 1},), ({"num_workers": 2},))


def test_studies_of_different_workloads_are_refused():
    other = [replace(r, spec=replace(r.spec, workload="resnet")) for r in trials()]
    with pytest.raises(RayparError, match="`a` trains mnist_mlp, `b` trains resnet"):
        compared(trials(), other)


# ---- where they come from

ORIGIN = {"version_torch": "2.13", "cpu": "x", "command": "raypar study a", "git_dirty": "no"}
OTHER = {**ORIGIN, "version_torch": "2.15", "command": "raypar study b", "git_dirty": "yes"}


def test_only_what_differs_in_their_origin_is_reported():
    comparison = compare(side(trials(), **ORIGIN), side(trials(), **OTHER))
    assert comparison.origins == {"version.torch": (("2.13",), ("2.15",))}
    assert comparison.uncommitted == (False, True)
    comparison = compare(side(trials(), **ORIGIN), side(trials()))  # what is unknown of one is no difference
    assert (comparison.origins, comparison.is_known) == ({}, (True, False))
    n1, n2 = ([make_result({}, environment={"node": [n] * 2, "device_name": ["cpu"] * 2})] for n in ("n1", "n2"))
    assert compare(side(n1, ()), side(n2, ())).origins == {"node": (("n1",), ("n2",))}
