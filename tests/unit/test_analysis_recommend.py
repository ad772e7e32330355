"""Which point to take: the fastest that does what is asked for, the cheapest of equals, or that a study can't tell."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from results import make_result

from raypar.analysis.pairwise import MARGIN, Basis, confidence_of, joint_share, repeats_needed, time_ratio
from raypar.analysis.question import Question
from raypar.analysis.recommend import Constraints, Decision, pareto_front, recommend
from raypar.analysis.time_to_target import Target
from raypar.errors import RayparError
from raypar.study.trial import TrialState

QUESTION = Question("s", {"num_workers": 1}, ("num_workers",))
NOISE = (1.0, 1.01, 0.99, 1.005, 0.995, 1.002)
WILD = (1.0, 1.5, 0.7)


def trials(times, noise=NOISE[:3], accuracies=None):
    """By number of workers, two to a host; the noise is another one in each point."""
    return [
        make_result(
            {"num_workers": n},
            r,
            time_s * noise[(r + i) % len(noise)],
            (accuracies or {}).get(n, 0.97) + 1e-4 * r,
            environment={"node": [f"host{i // 2}" for i in range(n)]},
        )
        for i, (n, time_s) in enumerate(times.items())
        for r in range(len(noise))
    ]


def asked(results, **limits):
    of_question = {key: limits.pop(key) for key in ("price_per_node_hour", "mode", "baseline") if key in limits}
    return recommend(replace(QUESTION, **of_question), results, Constraints(**limits))


def chosen(advice):
    return advice.chosen.point["num_workers"] if advice.chosen else None


def why_not(advice):
    return {c.point["num_workers"]: c.exclusion for c in advice.candidates if c.exclusion}


BY_THREE, BY_TWO = {1: 40.0, 2: 22.0, 4: 12.0}, {1: 40.0, 2: 22.0}
THREE, TWO = trials(BY_THREE), trials(BY_TWO)
CLEAR, TIED, UNCLEAR, NONE = Decision
ONCE = (1.0,)
GOOD = Target("accuracy", 0.97)
ONE_MISS = trials(BY_THREE, accuracies={1: 0.98, 2: 0.98, 4: 0.9})
ONE_MISS[3] = replace(ONE_MISS[3], reports=({"accuracy": 0.3},))
FAILED = [*trials({1: 40.0}), make_result({"num_workers": 2}, 0, state=TrialState.FAILED)]
NO_NODES = [replace(r, environment={}) if r.spec.point["num_workers"] == 4 else r for r in THREE]
WORSE = "accuracy worse than the best"
PRICED = {"price_per_node_hour": 36.0}


@pytest.mark.parametrize(
    ("results", "constraints", "expected", "decision", "reasons"),
    [
        (THREE, {}, 4, CLEAR, {}),
        (trials({1: 40.0, 2: 12.05, 4: 12.0}, NOISE), {}, 2, TIED, {}),  # of equals the one with fewer workers
        (trials({1: 90.0, 2: 13.0, 4: 12.0}, WILD), {}, 2, UNCLEAR, {}),
        (trials({1: 40.0, 2: 22.0, 4: 21.0}, ONCE), {}, 4, UNCLEAR, {}),  # the fastest is the best guess
        # The metric: significantly worse, in one trial each, by less than a report shows; less is better.
        (trials(BY_THREE, accuracies={4: 0.9}), {}, 2, CLEAR, {4: WORSE}),
        (trials(BY_TWO, ONCE, accuracies={2: 0.5}), {}, 1, UNCLEAR, {2: WORSE}),
        (trials(BY_TWO, accuracies={2: 0.9695}), {}, 2, CLEAR, {}),
        (trials(BY_TWO, accuracies={1: 0.1, 2: 0.4}), {"mode": "min"}, 1, CLEAR, {2: WORSE}),
        # A target has to be reached by every trial.
        (ONE_MISS, {"target": GOOD}, 1, CLEAR, {2: "reached by 2 of 3", 4: "target not reached"}),
        (TWO, {"target": Target("accuracy", 0.999)}, None, NONE, dict.fromkeys((1, 2), "target not reached")),
        (trials({1: 40.0, 2: 22.0, 4: 15.0}), {"min_efficiency": 0.7}, 2, CLEAR, {4: "efficiency below 70 %"}),
        (THREE, {"max_time_s": 30.0}, 4, CLEAR, {1: "longer than 30.0 s"}),
        # Four workers are on two nodes, the others on one.
        (THREE, {"max_cost": 0.23, **PRICED}, 2, CLEAR, {1: "cost above 0.23", 4: "cost above 0.23"}),
        (NO_NODES, {"max_cost": 9.0, **PRICED}, 2, CLEAR, {4: "cost unknown"}),
        (TWO, {"min_metric": 0.99}, None, NONE, dict.fromkeys((1, 2), "accuracy below 99.0 %")),
        (FAILED, {}, 1, CLEAR, {2: "failed"}),
        (THREE, {"only": {"num_workers": (1, 2), "lr": (0.1,)}}, 2, CLEAR, {}),
    ],
)
def test_the_fastest_point_within_the_limits_is_chosen(results, constraints, expected, decision, reasons):
    advice = asked(results, **constraints)
    assert (chosen(advice), advice.decision, why_not(advice)) == (expected, decision, reasons)
    assert (advice.settling is not None) == (decision is UNCLEAR)


def test_a_lead_has_a_confidence_and_a_tie_its_rivals():
    advice = asked(THREE)
    assert advice.runner_up.point == {"num_workers": 2} and advice.lead.value == pytest.approx(22 / 12, rel=0.02)
    assert advice.confidence.share > 0.99 and advice.rivals == ()
    tied = asked(trials({1: 40.0, 2: 12.05, 4: 12.0}, NOISE))
    assert [c.point["num_workers"] for c in tied.rivals] == [4] and tied.leader is tied.rivals[0]
    assert tied.confidence.basis is Basis.BOOTSTRAP and tied.confidence.share > 0.99


@pytest.mark.parametrize(
    ("results", "points", "num_repeats"),
    [
        (trials({1: 90.0, 2: 13.0, 4: 12.0}, (1.0, 1.12, 0.93)), {2, 4}, 51),
        (trials({1: 900.0, 2: 13.0, 4: 12.0}, WILD), {2, 4}, None),
        (trials({1: 40.0, 2: 22.0, 4: 21.0}, ONCE), {1, 2, 4}, 6),
        (trials(BY_TWO, ONCE, accuracies={2: 0.5}), {1, 2}, 6),  # doubted for one trial's metric
    ],
)
def test_the_trials_that_would_settle_it_are_named(results, points, num_repeats):
    settling = asked(results).settling
    assert settling.spread_is_known == (num_repeats != 6)
    assert ({p["num_workers"] for p in settling.points}, settling.num_repeats) == (points, num_repeats)


def test_costs_are_of_nodes_and_the_front_is_of_time_metric_and_cost():
    results = trials(BY_THREE, accuracies={1: 0.97, 2: 0.99, 4: 0.95})
    advice = asked(results, **PRICED)
    costs = {c.point["num_workers"]: c.cost.value for c in advice.candidates if c.cost}
    assert costs == pytest.approx({1: 0.40, 2: 0.22, 4: 0.24}, rel=0.02)
    assert {c.point["num_workers"] for c in advice.candidates if c.is_on_front} == {2, 4}


def test_a_limit_within_the_interval_is_a_close_call():
    for noise, close in ((WILD, [2]), (NOISE, [])):
        advice = asked(trials({1: 40.0, 2: 30.0}, noise), min_efficiency=0.9)
        assert why_not(advice) == {2: "efficiency below 90 %"}
        assert [c.point["num_workers"] for c in advice.candidates if c.is_close_call] == close


@pytest.mark.parametrize(
    ("constraints", "message"),
    [
        ({"target": Target("acuracy", 0.9)}, "no trial reports `acuracy`"),
        ({"max_cost": 9.0, **PRICED}, "--max-cost 9: no result says on how many nodes it ran"),
        ({"only": {"num_worker": (1,)}}, "--set num_worker=1: no trial has `num_worker`"),
        ({"only": {"num_workers": (3,)}}, "--set num_workers=3: no point has it"),
        ({"min_efficiency": 0.7, "baseline": {}}, "no point has an efficiency"),
    ],
)
def test_a_limit_on_what_the_study_lacks_is_an_error(constraints, message):
    with pytest.raises(RayparError) as caught:
        asked([replace(r, environment={}) for r in TWO], **constraints)
    assert message in caught.value.message and caught.value.hint


def test_efficiencies_are_over_the_studys_baseline_even_where_it_is_excluded():
    (two,) = asked(trials({1: 40.0, 2: 25.0}), only={"num_workers": (2,)}).candidates
    assert two.efficiency.value == pytest.approx(0.8, rel=0.02)


TIMES = st.dictionaries(st.integers(0, 7), st.floats(0.5, 2.0), min_size=2, max_size=8)


@given(first=TIMES, second=TIMES)
def test_confidences_of_both_orders_add_up_to_one(first, second):
    one, other = confidence_of(first, second), confidence_of(second, first)
    if one is not None and other is not None:
        assert one.share + other.share == pytest.approx(1.0, abs=0.03)


@given(first=TIMES, factor=st.floats(1.01, 3.0))
def test_a_constant_factor_is_certain_in_pairs(first, factor):
    slower = {repeat: time_s * factor for repeat, time_s in first.items()}
    advice = confidence_of(slower, first)
    assert advice.is_paired and advice.share > 0.99
    assert time_ratio(slower, first).value == pytest.approx(factor)


def test_the_repeats_that_settle_it_grow_with_the_square_of_the_spread():
    # z(97.5 %) + z(80 %) is 2.80; times sqrt(pi/2), over log(1 + MARGIN), which is what an unknown difference leaves.
    per_spread = 2.8016 * math.sqrt(math.pi / 2) / math.log1p(MARGIN)
    for spread, expected in (
        (0.2, (per_spread * 0.2) ** 2 * 4 / 3),
        (0.4, (per_spread * 0.4) ** 2 * 4 / 3),
        (0.001, 6),
    ):
        times = {r: math.exp(spread * (-1) ** r) for r in range(4)}
        assert repeats_needed(times, dict.fromkeys(times, 1.0)) == math.ceil(expected)
    assert repeats_needed({0: 1.0}, {0: 2.0}) is None


# ---- Pareto front

ROWS = st.integers(1, 3).flatmap(
    lambda width: st.lists(st.lists(st.integers(0, 5).map(float), min_size=width, max_size=width), max_size=12)
)


@given(rows=ROWS, apart=st.sets(st.tuples(st.integers(0, 11), st.integers(0, 11), st.integers(0, 2))))
def test_a_point_is_on_the_front_unless_one_of_the_front_beats_it(rows, apart):
    front = pareto_front(rows)
    for i, row in enumerate(rows):
        assert (i in front) != any((np.array(rows[j]) <= row).all() and rows[j] != row for j in front)
    # The fewer differences are significant, the more points stay.
    some = pareto_front(rows, lambda one, other, k: (one, other, k) in apart)
    assert set(front) <= set(some) and bool(some) == bool(rows)
    assert pareto_front(rows, lambda one, other, k: False) == tuple(range(len(rows)))


def test_a_point_is_dominated_only_where_a_difference_is_significant():
    rows = [[1.0, 0.02], [2.0, 0.02], [1.1, 0.03]]
    assert pareto_front(rows) == (0,)
    assert pareto_front(rows, lambda one, other, k: abs(rows[one][k] - rows[other][k]) > 0.5) == (0, 2)
    # A median that is worse in one respect keeps a point from dominating.
    assert pareto_front([[1.0, 0.021], [9.0, 0.02]], lambda one, other, k: k == 0) == (0, 1)


# ---- made-up studies whose truth is known

BY_LR = Question("s", {}, ("lr",))


def study(rng, medians_s, num_repeats, noise):
    """Log-normal times; what disturbs a block disturbs all its trials alike."""
    blocks = rng.normal(0, noise, num_repeats)
    return [
        make_result({"lr": float(i)}, repeat, float(median_s * np.exp(rng.normal(blocks[repeat], noise))))
        for i, median_s in enumerate(medians_s)
        for repeat in range(num_repeats)
    ]


def made(seed, medians_s, num_repeats, noise, count):
    rng = np.random.default_rng(seed)
    return [recommend(BY_LR, study(rng, medians_s, num_repeats, noise), Constraints()) for _ in range(count)]


# The made medians, repeats, noise and studies; of the studies those that name a clear winner, at the least and most.
STUDIES = {
    "five equal points, few repeats": ([10.0] * 5, 3, 0.1, 60, 0, 3),
    "two equal points, by the bootstrap": ([10.0] * 2, 6, 0.1, 60, 0, 3),
    "a point that is clearly faster": ([8.0, 10.0, 10.0, 10.0], 3, 0.03, 40, 32, 40),
}


@pytest.mark.parametrize(
    ("medians_s", "num_repeats", "noise", "num_studies", "least", "most"), STUDIES.values(), ids=STUDIES
)
def test_a_winner_is_named_where_there_is_one(medians_s, num_repeats, noise, num_studies, least, most):
    advice = made(1, medians_s, num_repeats, noise, num_studies)
    assert least <= sum(f.decision is CLEAR for f in advice) <= most
    assert medians_s[0] == 10.0 or {f.chosen.point["lr"] for f in advice} == {0.0}


def test_what_is_said_to_be_sure_is_right_as_often_or_more_whatever_the_number_of_points():
    # The winner of many owes part of its lead to luck; its share must allow for that.
    advice = made(0, [10.0, 10.2, 10.2, 10.2], 6, 0.03, 50)
    sure = [f for f in advice if f.chosen is f.leader and f.confidence.share > 0.5]
    right = [f.chosen.point["lr"] == 0.0 for f in sure]
    assert len(sure) > 5 and np.mean(right) > np.mean([f.confidence.share for f in sure]) - 0.1


def test_shares_of_several_claims_hold_together():
    # The last is one of four.
    for shares, joint in (([0.9], 0.9), ([0.99, 0.98, 0.97], 0.94), ([0.6] * 3, 0.25)):
        assert joint_share(shares) == pytest.approx(joint)
