"""Which point to take: the fastest that does what is asked for, the cheapest of equals, or that a study can't tell."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from results import make_result

from raypar.analysis.candidates import Constraints, dominates, pareto_front
from raypar.analysis.pairwise import MARGIN, Basis, confidence_of, joint_share, repeats_needed, time_ratio
from raypar.analysis.question import Question
from raypar.analysis.recommend import Decision, Recommendation, recommend
from raypar.analysis.time_to_target import Target
from raypar.errors import RayparError
from raypar.study.trial import TrialResult, TrialState

QUESTION = Question("s", {"num_workers": 1}, ("num_workers",))
NOISE = (1.0, 1.01, 0.99, 1.005, 0.995, 1.002)
WILD = (1.0, 1.5, 0.7)


def trials(
    times: Mapping[int, float],
    noise: Sequence[float] = NOISE[:3],
    accuracies: Mapping[int, float] | None = None,
    **more: Any,
) -> list[TrialResult]:
    """By number of workers; the noise is another one in each point."""
    environment = {n: {"node": [f"host{i // 2}" for i in range(n)]} for n in times}
    return [
        make_result(
            {"num_workers": n},
            r,
            time_s * noise[(r + i) % len(noise)],
            (accuracies or {}).get(n, 0.97) + 1e-4 * r,
            environment=environment[n],
            **more,
        )
        for i, (n, time_s) in enumerate(times.items())
        for r in range(len(noise))
    ]


def asked(
    results: Sequence[TrialResult], price_per_node_hour: float | None = None, **constraints: Any
) -> Recommendation:
    return recommend(replace(QUESTION, price_per_node_hour=price_per_node_hour), results, Constraints(**constraints))


def chosen(found: Recommendation) -> object:
    return found.chosen.point["num_workers"] if found.chosen else None


def why_not(found: Recommendation) -> dict[Any, str]:
    return {c.point["num_workers"]: c.exclusion for c in found.candidates if c.exclusion}


def test_the_fastest_is_chosen_where_it_can_be_told_from_all_others() -> None:
    found = asked(trials({1: 40.0, 2: 22.0, 4: 12.0}))
    assert (chosen(found), found.decision) == (4, Decision.CLEAR)
    assert found.runner_up is not None and found.runner_up.point == {"num_workers": 2}
    assert found.lead is not None and found.lead.value == pytest.approx(22 / 12, rel=0.02)
    assert found.confidence is not None and found.confidence.share > 0.99
    assert found.rivals == () and found.settling is None


def test_of_equals_the_one_with_fewer_workers_is_preferred() -> None:
    found = asked(trials({1: 40.0, 2: 12.05, 4: 12.0}, NOISE))
    assert (chosen(found), found.decision) == (2, Decision.TIED)
    assert [c.point["num_workers"] for c in found.rivals] == [4]
    assert found.leader is not None and found.leader.point == {"num_workers": 4}
    assert found.confidence is not None and found.confidence.basis is Basis.BOOTSTRAP and found.confidence.share > 0.99
    assert found.settling is None


def test_what_noise_hides_is_not_told_and_the_trials_that_would_settle_it_are_named() -> None:
    found = asked(trials({1: 90.0, 2: 13.0, 4: 12.0}, WILD))
    assert found.decision is Decision.UNCLEAR
    assert found.settling is not None and found.settling.spread_is_known
    assert {p["num_workers"] for p in found.settling.points} == {2, 4}
    assert found.settling.num_repeats is None or found.settling.num_repeats > 3


def test_one_trial_each_tells_nothing_and_the_fastest_is_the_best_guess() -> None:
    found = asked(trials({1: 40.0, 2: 22.0, 4: 21.0}, (1.0,)))
    assert (chosen(found), found.decision, found.confidence) == (4, Decision.UNCLEAR, None)
    assert found.settling is not None
    assert not found.settling.spread_is_known and found.settling.num_repeats == 6


def test_without_a_target_a_worse_metric_is_no_bargain() -> None:
    found = asked(trials({1: 40.0, 2: 22.0, 4: 12.0}, accuracies={1: 0.97, 2: 0.97, 4: 0.9}))
    assert chosen(found) == 2
    assert why_not(found) == {4: "accuracy worse than the best"}


def test_with_one_trial_each_the_metrics_are_compared_as_they_are() -> None:
    found = asked(trials({1: 40.0, 2: 22.0}, (1.0,), accuracies={1: 0.97, 2: 0.5}))
    assert (chosen(found), found.decision, found.runner_up) == (1, Decision.UNCLEAR, None)
    assert found.settling is not None and {p["num_workers"] for p in found.settling.points} == {1, 2}


def test_a_metric_that_differs_by_less_than_a_report_shows_is_as_good() -> None:
    found = asked(trials({1: 40.0, 2: 22.0}, accuracies={1: 0.97, 2: 0.9695}))
    assert chosen(found) == 2


def test_less_is_better_where_the_study_says_so() -> None:
    losses = trials({1: 40.0, 2: 22.0}, accuracies={1: 0.1, 2: 0.4})
    found = recommend(replace(QUESTION, mode="min"), losses, Constraints())
    assert chosen(found) == 1


def test_the_target_has_to_be_reached_by_every_trial() -> None:
    results = trials({1: 40.0, 2: 22.0, 4: 12.0}, accuracies={1: 0.98, 2: 0.98, 4: 0.9})
    results[3] = replace(results[3], reports=({"accuracy": 0.3},))
    found = asked(results, target=Target("accuracy", 0.97))
    assert chosen(found) == 1
    assert why_not(found) == {2: "reached by 2 of 3", 4: "target not reached"}


def test_where_nothing_reaches_the_target_nothing_is_recommended() -> None:
    found = asked(trials({1: 40.0, 2: 22.0}), target=Target("accuracy", 0.999))
    assert (found.decision, found.chosen, found.leader) == (Decision.NONE, None, None)


@pytest.mark.parametrize(
    ("constraints", "expected", "reasons"),
    [
        ({"min_efficiency": 0.7}, 2, {4: "efficiency below 70 %"}),
        ({"max_time_s": 30.0}, 4, {1: "longer than 30.0 s"}),
        ({"max_cost": 0.21, "price_per_node_hour": 36.0}, 4, {1: "cost above 0.21", 2: "cost above 0.21"}),
        ({"min_metric": 0.99}, None, dict.fromkeys((1, 2, 4), "accuracy below 99.0 %")),
    ],
)
def test_limits_leave_points_out(constraints: dict[str, Any], expected: object, reasons: dict[int, str]) -> None:
    found = asked(trials({1: 40.0, 2: 22.0, 4: 15.0}) if "max_cost" not in constraints else cheap(), **constraints)
    assert chosen(found) == expected
    assert why_not(found) == reasons


def cheap() -> list[TrialResult]:
    """Four workers are on two nodes, the others on one."""
    return trials({1: 40.0, 2: 22.0, 4: 10.0})


def test_the_cost_is_of_nodes_not_of_workers() -> None:
    found = asked(cheap(), price_per_node_hour=36.0)
    costs = {c.point["num_workers"]: c.cost.value for c in found.candidates if c.cost}
    assert costs == pytest.approx({1: 0.40, 2: 0.22, 4: 0.20}, rel=0.02)
    assert asked(cheap()).candidates[0].cost is None


def test_an_unknown_cost_meets_no_limit() -> None:
    results = [replace(r, environment={}) if r.spec.point["num_workers"] == 4 else r for r in cheap()]
    found = asked(results, max_cost=9.0, price_per_node_hour=1.0)
    assert (chosen(found), why_not(found)) == (2, {4: "cost unknown"})


def test_a_limit_within_the_interval_is_a_close_call() -> None:
    for noise, is_close in ((WILD, True), (NOISE, False)):
        found = asked(trials({1: 40.0, 2: 30.0}, noise), min_efficiency=0.9)
        assert why_not(found) == {2: "efficiency below 90 %"}
        assert {c.point["num_workers"] for c in found.candidates if c.is_close_call} == ({2} if is_close else set())


def test_the_front_is_of_time_metric_and_cost() -> None:
    found = asked(trials({1: 40.0, 2: 22.0, 4: 12.0}, accuracies={1: 0.97, 2: 0.99, 4: 0.95}))
    assert {c.point["num_workers"] for c in found.candidates if c.is_on_front} == {2, 4}


def test_a_failed_point_is_told_and_never_chosen() -> None:
    results = [*trials({1: 40.0}), make_result({"num_workers": 2}, 0, state=TrialState.FAILED)]
    found = asked(results)
    assert (chosen(found), why_not(found)) == (1, {2: "failed"})
    assert found.decision is Decision.CLEAR and found.runner_up is None


@pytest.mark.parametrize(
    ("constraints", "message"),
    [
        ({"target": Target("acuracy", 0.9)}, "no trial reports `acuracy`"),
        ({"max_cost": 9.0, "price_per_node_hour": 1.0}, "--max-cost 9: no result says on how many nodes it ran"),
        ({"only": {"num_worker": (1,)}}, "--set num_worker=1: no trial has `num_worker`"),
        ({"only": {"num_workers": (3,)}}, "--set num_workers=3: no point has it"),
    ],
)
def test_what_the_study_does_not_have_is_told(constraints: dict[str, Any], message: str) -> None:
    with pytest.raises(RayparError) as caught:
        asked([replace(r, environment={}) for r in trials({1: 40.0, 2: 22.0})], **constraints)
    assert message in caught.value.message and caught.value.hint


def test_an_efficiency_needs_a_baseline() -> None:
    with pytest.raises(RayparError, match="no point has an efficiency"):
        recommend(replace(QUESTION, baseline={}), trials({1: 40.0, 2: 22.0}), Constraints(min_efficiency=0.7))


def test_values_can_be_fixed_by_any_hyperparameter() -> None:
    assert chosen(asked(trials({1: 40.0, 2: 22.0, 4: 12.0}), only={"num_workers": (1, 2), "lr": (0.1,)})) == 2


def test_efficiencies_are_over_the_studys_baseline_even_where_it_is_left_out() -> None:
    found = asked(trials({1: 40.0, 2: 25.0}), only={"num_workers": (2,)})
    assert found.candidates[0].efficiency is not None
    assert found.candidates[0].efficiency.value == pytest.approx(0.8, rel=0.02)


TIMES = st.dictionaries(st.integers(0, 7), st.floats(0.5, 2.0), min_size=2, max_size=8)


@given(first=TIMES, second=TIMES)
def test_confidences_of_both_orders_add_up_to_one(first: dict[int, float], second: dict[int, float]) -> None:
    one, other = confidence_of(first, second), confidence_of(second, first)
    if one is not None and other is not None:
        assert one.share + other.share == pytest.approx(1.0, abs=0.03)


@given(first=TIMES, factor=st.floats(1.01, 3.0))
def test_a_constant_factor_is_certain_in_pairs(first: dict[int, float], factor: float) -> None:
    slower = {repeat: time_s * factor for repeat, time_s in first.items()}
    found = confidence_of(slower, first)
    assert found is not None and found.is_paired and found.share > 0.99
    assert time_ratio(slower, first).value == pytest.approx(factor)


def test_the_repeats_that_settle_it_grow_with_the_square_of_the_spread() -> None:
    def pairs(spread: float) -> int:
        times = {r: math.exp(spread * (-1) ** r) for r in range(4)}
        count = repeats_needed(times, dict.fromkeys(times, 1.0))
        assert count is not None
        return count

    # z(97.5 %) + z(80 %) is 2.80; times sqrt(pi/2), over log(1 + MARGIN), which is what an unknown difference leaves.
    per_spread = 2.8016 * math.sqrt(math.pi / 2) / math.log1p(MARGIN)
    for spread in (0.2, 0.4):
        deviation = spread * math.sqrt(4 / 3)
        assert pairs(spread) == math.ceil((per_spread * deviation) ** 2)
    assert pairs(0.001) == 6
    assert repeats_needed({0: 1.0}, {0: 2.0}) is None


# ---- Pareto front

ROWS = st.integers(1, 3).flatmap(
    lambda width: st.lists(st.lists(st.integers(0, 5).map(float), min_size=width, max_size=width), max_size=12)
)


def is_beaten(row: list[float], by: list[float]) -> bool:
    return all(b <= a for a, b in zip(row, by, strict=True)) and by != row


@given(rows=ROWS)
def test_no_point_of_the_front_is_dominated_by_any(rows: list[list[float]]) -> None:
    for i in pareto_front(rows):
        assert not any(is_beaten(rows[i], other) for other in rows)


@given(rows=ROWS)
def test_whatever_is_left_out_is_dominated_by_a_point_of_the_front(rows: list[list[float]]) -> None:
    front = pareto_front(rows)
    for i in set(range(len(rows))) - set(front):
        assert any(is_beaten(rows[i], rows[j]) for j in front)


@given(rows=ROWS, told=st.sets(st.tuples(st.integers(0, 11), st.integers(0, 11), st.integers(0, 2))))
def test_the_less_the_data_can_tell_the_more_points_stay(
    rows: list[list[float]], told: set[tuple[int, int, int]]
) -> None:
    some = pareto_front(rows, lambda one, other, k: (one, other, k) in told)
    assert set(pareto_front(rows)) <= set(some)
    assert pareto_front(rows, lambda one, other, k: False) == tuple(range(len(rows)))
    assert bool(some) == bool(rows)


def test_a_point_is_dominated_only_where_the_data_can_tell() -> None:
    rows = [[1.0, 0.02], [2.0, 0.02], [1.1, 0.03]]
    only_large = lambda one, other, k: abs(rows[one][k] - rows[other][k]) > 0.5  # noqa: E731
    assert pareto_front(rows) == (0,)
    assert pareto_front(rows, only_large) == (0, 2)
    assert dominates(rows, 0, 1, only_large) and not dominates(rows, 0, 2, only_large)


def test_a_median_that_is_worse_in_one_respect_keeps_a_point_from_dominating() -> None:
    assert not dominates([[1.0, 0.021], [9.0, 0.02]], 0, 1, lambda one, other, k: k == 0)


def test_equal_points_are_both_on_the_front() -> None:
    assert pareto_front([[1.0, 1.0], [1.0, 1.0]]) == (0, 1)


# ---- made-up studies whose truth is known

BY_LR = Question("s", {}, ("lr",))


def study(rng: np.random.Generator, medians_s: Sequence[float], num_repeats: int, noise: float) -> list[TrialResult]:
    """Log-normal times; what disturbs a block disturbs all its trials alike."""
    blocks = rng.normal(0, noise, num_repeats)
    return [
        make_result({"lr": float(i)}, repeat, float(median_s * np.exp(rng.normal(blocks[repeat], noise))))
        for i, median_s in enumerate(medians_s)
        for repeat in range(num_repeats)
    ]


def found_in(seed: int, medians_s: Sequence[float], num_repeats: int, noise: float, count: int) -> list[Recommendation]:
    rng = np.random.default_rng(seed)
    return [recommend(BY_LR, study(rng, medians_s, num_repeats, noise), Constraints()) for _ in range(count)]


@pytest.mark.parametrize(("num_points", "num_repeats"), [(2, 3), (2, 6), (2, 10), (5, 3), (5, 6)])
def test_of_equal_points_a_winner_is_named_in_no_more_than_one_study_of_twenty(
    num_points: int, num_repeats: int
) -> None:
    found = found_in(1, [10.0] * num_points, num_repeats, 0.1, 60)
    assert sum(f.decision is Decision.CLEAR for f in found) <= 3


@pytest.mark.parametrize("num_repeats", [3, 6])
def test_a_point_that_is_clearly_faster_is_found(num_repeats: int) -> None:
    found = found_in(2, [10.0, 8.0, 10.0, 10.0], num_repeats, 0.03, 40)
    assert {f.chosen.point["lr"] for f in found if f.chosen} == {1.0}
    assert sum(f.decision is Decision.CLEAR for f in found) >= 32


def test_what_is_said_to_be_sure_is_right_as_often_or_more_whatever_the_number_of_points() -> None:
    """The winner of many owes part of its lead to luck; its share must allow for that."""
    shares, right = [], []
    for seed in range(2):
        for f in found_in(seed, [10.0, 10.2, 10.2, 10.2], 6, 0.03, 25):
            assert f.confidence is not None and f.chosen is not None
            if f.chosen is f.leader and f.confidence.share > 0.5:
                shares.append(f.confidence.share)
                right.append(f.chosen.point["lr"] == 0.0)
    assert len(shares) > 5
    assert np.mean(right) > np.mean(shares) - 0.1


def test_the_repeats_that_would_settle_it_do() -> None:
    """By a test of 80 % power, with a spread that is itself an estimate: most studies of as many repeats can tell."""
    medians_s, noise = [10.0, 9.0], 0.09
    unclear = [f for f in found_in(3, medians_s, 4, noise, 80) if f.decision is Decision.UNCLEAR]
    counts = [f.settling.num_repeats for f in unclear if f.settling and f.settling.num_repeats]
    assert len(counts) > 20
    settled = Counter(
        found_in(seed, medians_s, count, noise, 1)[0].decision is not Decision.UNCLEAR
        for seed, count in enumerate(counts)
    )
    as_before = found_in(4, medians_s, 4, noise, 40)
    assert settled[True] >= 0.7 * settled.total()
    assert sum(f.decision is not Decision.UNCLEAR for f in as_before) < 0.6 * len(as_before)


def test_shares_of_several_claims_hold_together() -> None:
    assert joint_share([0.9]) == pytest.approx(0.9)
    assert joint_share([0.99, 0.98, 0.97]) == pytest.approx(0.94)
    assert joint_share([0.6, 0.6, 0.6]) == pytest.approx(0.25)  # one of four
