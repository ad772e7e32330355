"""Recommendation: the fastest point within the limits, the cheapest of equals, or the trials that settle it."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from results import make_result, stored_conditions

from raypar.analysis.question import Question
from raypar.analysis.recommend import Constraints, Decision, pareto_front, recommend
from raypar.analysis.time_to_target import Target
from raypar.errors import RayparError
from raypar.reporting.recommend import _notes
from raypar.study.trial import TrialState

QUESTION = Question("s", {"num_workers": 1}, ("num_workers",))
NOISE = (1.0, 1.01, 0.99, 1.005, 0.995, 1.002)
WILD = (1.0, 1.5, 0.7)


def trials(times, noise=NOISE[:3], accuracies=None):
    """Trials by number of workers, two per host, with different noise at each point."""
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
BY_LR = Question("s", {}, ("lr",))
GOOD = Target("accuracy", 0.97)
ONE_MISS = trials(BY_THREE, accuracies={1: 0.98, 2: 0.98, 4: 0.9})
ONE_MISS[3] = replace(ONE_MISS[3], reports=({"accuracy": 0.3},))
FAILED = [*trials({1: 40.0}), make_result({"num_workers": 2}, 0, state=TrialState.FAILED)]
NO_NODES = [replace(r, conditions=stored_conditions({})) if r.spec.point["num_workers"] == 4 else r for r in THREE]
WORSE, SINGLE = "accuracy worse than the best", "accuracy 47.0 points worse (1 trial, unconfirmed)"
PRICED = {"price_per_node_hour": 36.0}


@pytest.mark.parametrize(
    ("results", "constraints", "expected", "decision", "reasons"),
    [
        (THREE, {}, 4, CLEAR, {}),
        (trials({1: 40.0, 2: 12.05, 4: 12.0}, NOISE), {}, 2, TIED, {}),  # the one with fewer workers of two equals
        (trials({1: 90.0, 2: 13.0, 4: 12.0}, WILD), {}, 2, UNCLEAR, {}),
        (trials({1: 40.0, 2: 22.0, 4: 21.0}, ONCE), {}, 4, UNCLEAR, {}),  # the fastest is the best guess
        # The metric is worse, unconfirmed, within the margin, or better if smaller.
        (trials(BY_THREE, accuracies={4: 0.9}), {}, 2, CLEAR, {4: WORSE}),
        (trials(BY_TWO, ONCE, accuracies={2: 0.5}), {}, 1, UNCLEAR, {2: SINGLE}),
        (trials(BY_TWO, accuracies={2: 0.9695}), {}, 2, CLEAR, {}),
        (trials(BY_TWO, accuracies={2: 0.9695}), {"metric_margin": 0.0}, 1, CLEAR, {2: WORSE}),
        (trials(BY_TWO, accuracies={2: 0.9}), {"metric_margin": 0.1}, 2, CLEAR, {}),
        (trials(BY_TWO, accuracies={1: 0.1, 2: 0.4}), {"mode": "min"}, 1, CLEAR, {2: WORSE}),
        (trials(BY_TWO, accuracies={1: 0.4, 2: 0.1}), {"mode": "min"}, 2, CLEAR, {1: WORSE}),
        # Every trial must reach the target.
        (ONE_MISS, {"target": GOOD}, 1, CLEAR, {2: "reached by 2 of 3", 4: "target not reached"}),
        (TWO, {"target": Target("accuracy", 0.999)}, None, NONE, dict.fromkeys((1, 2), "target not reached")),
        (trials({1: 40.0, 2: 22.0, 4: 15.0}), {"min_efficiency": 0.7}, 2, CLEAR, {4: "efficiency below 70 %"}),
        (THREE, {"max_time_s": 30.0}, 4, CLEAR, {1: "longer than 30.0 s"}),
        # Four workers are on two nodes, the others on one.
        (THREE, {"limits": {"cost": 0.23}, **PRICED}, 2, CLEAR, {1: "cost above 0.23", 4: "cost above 0.23"}),
        (NO_NODES, {"limits": {"cost": 9.0}, **PRICED}, 2, CLEAR, {4: "cost unknown"}),
        (TWO, {"min_metric": 0.99}, None, NONE, dict.fromkeys((1, 2), "accuracy below 99.0 %")),
        (FAILED, {}, 1, CLEAR, {2: "failed"}),
        (THREE, {"only": {"num_workers": (1, 2), "lr": (0.1,)}}, 2, CLEAR, {}),
    ],
)
def test_the_fastest_point_within_the_limits_is_chosen(results, constraints, expected, decision, reasons):
    advice = asked(results, **constraints)
    assert (chosen(advice), advice.decision, why_not(advice)) == (expected, decision, reasons)
    assert (advice.settling is not None) == (decision is UNCLEAR)


def test_a_lead_has_a_runner_up_and_a_tie_its_rivals():
    advice = asked(THREE)
    assert advice.runner_up.point == {"num_workers": 2} and advice.lead.value == pytest.approx(22 / 12, rel=0.02)
    assert advice.lead.low > 1 and advice.rivals == ()
    tied = asked(trials({1: 40.0, 2: 12.05, 4: 12.0}, NOISE))
    assert [c.point["num_workers"] for c in tied.rivals] == [4] and tied.leader is tied.rivals[0]
    assert tied.lead.low < 1 < tied.lead.high


@pytest.mark.parametrize(
    ("results", "points", "num_repeats"),
    [
        (trials({1: 90.0, 2: 13.0, 4: 12.0}, (1.0, 1.12, 0.93)), {2, 4}, 47),
        (trials({1: 900.0, 2: 13.0, 4: 12.0}, WILD), {2, 4}, None),
        (trials({1: 40.0, 2: 22.0, 4: 21.0}, ONCE), {1, 2, 4}, 6),
        (trials(BY_TWO, ONCE, accuracies={2: 0.5}), {1, 2}, 6),  # the metric of a single trial is unconfirmed
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
        ({"limits": {"cost": 9.0}, **PRICED}, "--max-cost 9: no result has its number of nodes recorded"),
        ({"only": {"num_worker": (1,)}}, "--set num_worker=1: no trial has `num_worker`"),
        ({"only": {"num_workers": (3,)}}, "--set num_workers=3: no point has it"),
        ({"min_efficiency": 0.7, "baseline": {}}, "no point has an efficiency"),
    ],
)
def test_a_limit_on_a_missing_quantity_is_an_error(constraints, message):
    with pytest.raises(RayparError) as caught:
        asked([replace(r, conditions=stored_conditions({})) for r in TWO], **constraints)
    assert message in caught.value.message and caught.value.hint


def test_efficiencies_are_relative_to_an_excluded_baseline_too():
    (two,) = asked(trials({1: 40.0, 2: 25.0}), only={"num_workers": (2,)}).candidates
    assert two.efficiency.value == pytest.approx(0.8, rel=0.02)


# ---- as good as the best


def measured(rng, accuracies, num_repeats, spread, times_s=None):
    """Times and accuracies by point, with an effect of each block on the accuracy."""
    ease = rng.normal(0, 0.01, num_repeats)
    times_s = times_s or [8.0 / 2**i for i in range(len(accuracies))]
    return [
        make_result({"lr": float(i)}, r, t * float(np.exp(rng.normal(0, 0.02))), a + ease[r] + rng.normal(0, spread))
        for i, (t, a) in enumerate(zip(times_s, accuracies, strict=True))
        for r in range(num_repeats)
    ]


def test_a_faster_point_that_may_be_worse_is_an_open_rival():
    results = measured(np.random.default_rng(1), (0.95, 0.95), 3, 0.01)
    advice = recommend(BY_LR, results, Constraints())
    assert (advice.decision, advice.chosen.point, advice.rivals) == (UNCLEAR, {"lr": 0.0}, ())
    (doubted,) = (rival.candidate for rival in advice.open_rivals)
    assert doubted.point == {"lr": 1.0} and doubted.is_close_call
    assert doubted.exclusion == f"accuracy could be {-100 * doubted.metric_gap.low:.1f} points worse"
    assert advice.settling.points == ({"lr": 0.0}, {"lr": 1.0}) and advice.settling.num_repeats > 3
    # A slower point that may be worse leaves nothing open.
    slower = measured(np.random.default_rng(1), (0.95, 0.95), 3, 0.01, [4.0, 8.0])
    assert recommend(BY_LR, slower, Constraints()).decision is CLEAR


def test_metrics_without_scatter_are_compared_with_the_margin():
    rng = np.random.default_rng(0)
    for accuracy, lr in ((0.95, 1.0), (0.946, 1.0), (0.944, 0.0)):
        advice = recommend(BY_LR, measured(rng, (0.95, accuracy), 3, 0.0), Constraints())
        assert (advice.decision, advice.chosen.point["lr"], advice.metric_margin) == (CLEAR, lr, 0.005)


@pytest.mark.parametrize("accuracies", [(0.95, 0.95, 0.95), (0.95, 0.949, 0.9), (0.9, 0.95, 0.9)])
def test_one_trial_per_point_recommends_nothing(accuracies):
    advice = recommend(BY_LR, measured(np.random.default_rng(0), accuracies, 1, 0.0), Constraints())
    assert advice.decision is UNCLEAR and advice.settling.num_repeats == 6
    assert all(
        c.is_close_call and c.exclusion.endswith("(1 trial, unconfirmed)") for c in advice.candidates if c.exclusion
    )
    assert advice.chosen.median_s == min(c.median_s for c in advice.candidates if not c.exclusion)


def test_a_single_trial_of_the_best_confirms_no_other():
    results = measured(np.random.default_rng(0), (0.95, 0.95, 0.952), 3, 0.0, [8.0, 4.0, 16.0])[:7]
    advice = recommend(BY_LR, results, Constraints())
    assert (advice.decision, advice.chosen.point) == (UNCLEAR, {"lr": 1.0})
    assert not any(c.exclusion for c in advice.candidates)


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


def test_points_that_do_not_fit_into_a_gpu_are_excluded():
    peaks = {1: 24e9, 2: 19e9, 4: 10e9}
    results = [
        replace(r, conditions=stored_conditions({"peak_memory_bytes": [peaks[int(str(r.spec.point["num_workers"]))]]}))
        for r in trials({1: 12.0, 2: 22.0, 4: 40.0})
    ]
    assert chosen(asked(results)) == 1
    advice = asked(results, gpu_bytes=22e9)
    assert chosen(advice) == 4
    assert why_not(advice) == {1: "does not fit into 22.0 GB", 2: "may not fit into 22.0 GB"}
    assert [c.is_close_call for c in advice.candidates] == [False, True, False]
    (said, maybe) = [line for line in _notes(advice, ()) if "into a GPU of 22.0 GB" in line]
    assert "num_workers=1" in said and "num_workers=2" in maybe
    assert chosen(asked(results, gpu_bytes=40e9)) == 1
    with pytest.raises(RayparError, match="no result has counted what its training allocates"):
        asked(THREE, gpu_bytes=22e9)


def test_a_point_of_unknown_memory_is_not_recommended_for_a_gpu():
    known = [replace(r, conditions=stored_conditions({"peak_memory_bytes": [1e9]})) for r in trials({1: 40.0})]
    results = [*known, *(r for r in THREE if r.spec.point["num_workers"] == 4)]
    advice = asked(results, gpu_bytes=24e9)
    assert chosen(advice) == 1 and why_not(advice) == {4: "GPU memory unknown"}
