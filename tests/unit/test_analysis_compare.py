"""Two studies: which of their points are the same, how their times compare, and what an allowance says."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from results import CONFIG, make_result

from raypar.analysis.compare import EXECUTION_KEYS, Comparison, Difference, Gate, Side, compare, match
from raypar.analysis.question import PointSamples, Question
from raypar.analysis.stats import Estimate, Method, difference_estimate, median_estimate
from raypar.errors import RayparError
from raypar.study.space import Value
from raypar.study.trial import TrialResult, TrialState

STEADY = (4.00, 4.01, 3.99, 4.02, 3.98)


def trials(point: Mapping[str, Value], times: Sequence[float] = STEADY, **config: Value) -> list[TrialResult]:
    return [make_result(point, r, t, config=config) for r, t in enumerate(times)]


def side(
    results: Sequence[TrialResult], keys: tuple[str, ...] = ("num_workers",), name: str = "a", **origin: str
) -> Side:
    question = Question(name, {}, keys)
    return Side(question, tuple(results), {key.replace("_", "."): (value,) for key, value in origin.items()})


def compared(a: Sequence[TrialResult], b: Sequence[TrialResult]) -> Comparison:
    return compare(side(a), side(b, name="b"))


def scaled(factor: float) -> list[float]:
    return [t * factor for t in STEADY]


# ---- times


FAILED = [make_result({"num_workers": 1}, state=TrialState.FAILED)]


@pytest.mark.parametrize(
    ("b", "difference", "ratio", "gate"),
    [
        (scaled(1.2), Difference.SLOWER, 1.2, Gate.SLOWER),
        (scaled(1 / 1.2), Difference.FASTER, 1 / 1.2, Gate.WITHIN),
        ((4.3, 3.7, 4.01), Difference.TIED, 4.01 / 4, Gate.UNKNOWN),
        ((8.0,), Difference.NO_INTERVAL, 2.0, Gate.UNKNOWN),
        (None, Difference.NO_TIME, None, Gate.UNKNOWN),  # all failed
    ],
)
def test_the_ratio_is_how_many_times_as_long_b_takes(
    b: Sequence[float] | None, difference: Difference, ratio: float | None, gate: Gate
) -> None:
    one = {"num_workers": 1}
    (point,) = compared(trials(one), FAILED if b is None else trials(one, b)).matched
    assert (point.difference, point.gate(0.05)) == (difference, gate)
    assert (point.ratio and point.ratio.value) == (ratio and pytest.approx(ratio, rel=1e-3))
    assert point.num_finished == (5, len(b or ()))


def test_trials_of_the_same_block_are_not_paired_across_studies() -> None:
    # In every block B takes exactly 1.1 times as long: pairs would leave no doubt, independent samples do.
    wide = (3.0, 4.0, 5.0)
    (point,) = compared(trials({"num_workers": 1}, wide), trials({"num_workers": 1}, [1.1 * t for t in wide])).matched
    assert point.ratio is not None and point.ratio.low is not None and point.ratio.high is not None
    assert point.ratio.high - point.ratio.low > 0.5
    assert point.difference is Difference.TIED


def test_rates_are_compared_where_the_work_differs() -> None:
    a = [make_result({"num_workers": 1}, r, 4.0, num_samples=1000) for r in range(3)]
    b = [make_result({"num_workers": 1}, r, 8.0, num_samples=4000) for r in range(3)]
    (point,) = compared(a, b).matched
    assert point.ratio is not None and point.ratio.value == pytest.approx(0.5)


def test_the_whole_trial_is_compared_where_either_study_has_no_time_of_its_steps() -> None:
    timed = [make_result({"num_workers": 1}, r, 4.0, wall_s=6.0) for r in range(2)]
    loops = [make_result({"num_workers": 1}, r, None, wall_s=9.0) for r in range(2)]
    for a, b, ratio in ((timed, loops, 1.5), (loops, timed, 1 / 1.5)):
        comparison = compared(a, b)
        assert comparison.time_metric == "wall_s"
        (point,) = comparison.matched
        assert point.ratio is not None and point.ratio.value == pytest.approx(ratio)


# ---- the allowance


@pytest.mark.parametrize(
    ("low", "high", "gate"),
    [
        (1.06, 1.10, Gate.SLOWER),
        (1.05, 1.10, Gate.UNKNOWN),
        (0.90, 1.20, Gate.UNKNOWN),
        (1.01, 1.05, Gate.WITHIN),
        (0.80, 0.90, Gate.WITHIN),
    ],
)
def test_b_is_slower_than_allowed_only_if_the_whole_interval_is(low: float, high: float, gate: Gate) -> None:
    (point,) = compared(trials({"num_workers": 1}), trials({"num_workers": 1})).matched
    ratio = Estimate(math.sqrt(low * high), low, high, 5, 0.95, Method.T_LOG)
    assert type(point)(**{**vars(point), "ratio": ratio}).gate(0.05) is gate


def test_the_points_are_sorted_by_what_the_allowance_says_of_them() -> None:
    a = [*trials({"num_workers": 1}), *trials({"num_workers": 2}), *trials({"num_workers": 4}, (4.0,))]
    b = [*trials({"num_workers": 1}, scaled(1.3)), *trials({"num_workers": 2}), *trials({"num_workers": 4})]
    gate = compared(a, b).gate(0.1)
    shown = {key: [p.point["num_workers"] for p in points] for key, points in gate.items()}
    assert shown == {Gate.SLOWER: [1], Gate.WITHIN: [2], Gate.UNKNOWN: [4]}


# ---- metrics


def test_the_change_of_the_metric_has_an_interval() -> None:
    a = [make_result({}, r, 4.0, v) for r, v in enumerate((0.95, 0.96, 0.97))]
    b = [make_result({}, r, 4.0, v) for r, v in enumerate((0.90, 0.91, 0.92))]
    (point,) = compare(side(a, ()), side(b, ())).matched
    change = point.metric_change
    assert change is not None and change.value == pytest.approx(-0.05)
    assert change.low is not None and change.high is not None and change.low < -0.05 < change.high


bounds = st.tuples(st.floats(-10, 10), st.floats(0, 5), st.floats(0, 5))


@given(bounds, bounds)
def test_a_difference_turns_round_with_its_sides_and_holds_its_value(
    a: tuple[float, float, float], b: tuple[float, float, float]
) -> None:
    first, second = (Estimate(v, v - down, v + up, 7, 0.95, Method.RANKS) for v, down, up in (a, b))
    there, back = difference_estimate(first, second), difference_estimate(second, first)
    assert there.low is not None and there.high is not None and back.low is not None and back.high is not None
    assert there.low <= there.value <= there.high
    assert (there.low, there.high) == (pytest.approx(-back.high), pytest.approx(-back.low))
    widths = [(e.high or 0) - (e.low or 0) for e in (first, second)]
    assert there.high - there.low <= sum(widths) + 1e-9


def test_a_difference_to_a_single_value_has_no_interval() -> None:
    found = difference_estimate(median_estimate([0.9, 0.91], log_scale=False), median_estimate([0.8], log_scale=False))
    assert (found.low, found.high, found.level) == (None, None, None)


# ---- which points are the same

values = st.sampled_from([1, 2, 4, True, False, None, "sgd", (1, 2)])
spaces = st.lists(st.fixed_dictionaries({"x": values, "y": values}), max_size=6, unique_by=lambda p: written(p))


def written(point: Mapping[str, Value]) -> str:
    return repr(sorted(point.items()))


def samples(point: Mapping[str, Value], **config: Value) -> PointSamples:
    return PointSamples(point, {**CONFIG, **config, **point})


@given(spaces, spaces, st.booleans())
def test_every_point_is_in_one_place(a: list[dict[str, Value]], b: list[dict[str, Value]], other_epochs: bool) -> None:
    of_a, of_b = [samples(p) for p in a], [samples(p, epochs=9 if other_epochs else 3) for p in b]
    found = match(of_a, of_b, ("x", "y"))
    pairs = [*found.pairs, *found.unlike]
    assert sorted(map(id, [*(p for p, _ in pairs), *found.only_a])) == sorted(map(id, of_a))
    assert sorted(map(id, [*(p for _, p in pairs), *found.only_b])) == sorted(map(id, of_b))
    assert not (found.pairs if other_epochs else found.unlike)
    assert all(written(first.point) == written(second.point) for first, second in pairs)
    assert len(pairs) == len(set(map(written, a)) & set(map(written, b)))


@given(spaces)
def test_a_study_matches_itself_point_by_point(points: list[dict[str, Value]]) -> None:
    own = [samples(p) for p in points]
    found = match(own, own, ("x", "y"))
    assert all(first is second for first, second in found.pairs) and len(found.pairs) == len(own)
    assert not (found.unlike or found.only_a or found.only_b)


@given(spaces, spaces)
def test_matching_turns_round_with_its_sides(a: list[dict[str, Value]], b: list[dict[str, Value]]) -> None:
    of_a, of_b = [samples(p) for p in a], [samples(p) for p in b]
    there, back = match(of_a, of_b, ("x", "y")), match(of_b, of_a, ("x", "y"))
    assert {(id(p), id(q)) for p, q in there.pairs} == {(id(q), id(p)) for p, q in back.pairs}
    assert list(map(id, there.only_a)) == list(map(id, back.only_b))


def test_what_only_one_study_sweeps_is_looked_up_in_the_others_config() -> None:
    a = [r for b in (32, 64) for r in trials({"num_workers": 2, "batch_size": b})]
    b = trials({"num_workers": 2}, batch_size=64)
    comparison = compare(side(a, ("num_workers", "batch_size")), side(b))
    assert [p.point for p in comparison.matched] == [{"num_workers": 2, "batch_size": 64}]
    assert comparison.only == (({"num_workers": 2, "batch_size": 32},), ())


def test_points_that_do_different_work_are_not_compared() -> None:
    comparison = compared(trials({"num_workers": 1}, epochs=1), trials({"num_workers": 1}, epochs=2))
    assert not comparison.matched
    (unlike,) = comparison.unlike
    assert (dict(unlike.point), unlike.config) == ({"num_workers": 1}, {"epochs": (1, 2)})


def test_how_trials_are_run_may_differ_and_is_told() -> None:
    (point,) = compared(trials({"num_workers": 1}, device="cpu"), trials({"num_workers": 1}, device="cuda")).matched
    assert point.execution_changes == {"device": ("cpu", "cuda")}
    assert "lr" not in EXECUTION_KEYS and "epochs" not in EXECUTION_KEYS and "precision" not in EXECUTION_KEYS


def test_a_hyperparameter_that_only_one_version_knows_keeps_nothing_apart() -> None:
    assert len(compared(trials({"num_workers": 1}), trials({"num_workers": 1}, new_option=3)).matched) == 1


def test_points_without_a_trial_are_not_there() -> None:
    asked = Question("a", {}, ("num_workers",), points=({"num_workers": 1}, {"num_workers": 2}))
    comparison = compare(Side(asked, tuple(trials({"num_workers": 1})), {}), side(trials({"num_workers": 2})))
    assert comparison.only == (({"num_workers": 1},), ({"num_workers": 2},))


def test_an_earlier_execution_that_swept_more_loses_no_point() -> None:
    a = [*trials({"num_workers": 1}), *trials({"num_workers": 1, "batch_size": 128})]
    comparison = compared(a, trials({"num_workers": 1}))
    assert [p.point for p in comparison.matched] == [{"num_workers": 1, "batch_size": 64}]
    assert comparison.only == (({"num_workers": 1, "batch_size": 128},), ())


def test_studies_of_different_workloads_are_refused() -> None:
    (other,) = (r for r in trials({"num_workers": 1}, (4.0,)))
    other = type(other)(**{**vars(other), "spec": type(other.spec)(**{**vars(other.spec), "workload": "resnet"})})
    with pytest.raises(RayparError, match="`a` trains mnist_mlp, `b` trains resnet"):
        compared(trials({"num_workers": 1}), [other])


# ---- where they come from


def test_only_what_differs_in_their_origin_is_told() -> None:
    a = side(trials({"num_workers": 1}), version_torch="2.13", cpu="x", command="raypar study a", git_dirty="no")
    b = side(trials({"num_workers": 1}), version_torch="2.15", cpu="x", command="raypar study b", git_dirty="yes")
    comparison = compare(a, b)
    assert comparison.origins == {"version.torch": (("2.13",), ("2.15",))}
    assert comparison.uncommitted == (False, True)


def test_what_is_not_known_of_one_study_is_no_difference() -> None:
    comparison = compare(side(trials({"num_workers": 1}), cpu="x"), side(trials({"num_workers": 1})))
    assert (comparison.origins, comparison.is_known) == ({}, (True, False))


def test_the_machines_of_the_trials_are_told() -> None:
    on = [[make_result({}, environment={"node": [node] * 2, "device_name": ["cpu"] * 2})] for node in ("n1", "n2")]
    assert compare(side(on[0], ()), side(on[1], ())).origins == {"node": (("n1",), ("n2",))}
