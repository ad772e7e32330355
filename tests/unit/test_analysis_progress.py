"""Progress of a study: its leading point, and the time that remains."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from results import make_result, make_spec

from raypar.analysis.progress import SPEEDUP, Interim, Leader, TrialKind, remaining_s, trial_kind
from raypar.analysis.question import Question
from raypar.reporting.live import interim_text
from raypar.study.trial import TrialState

SCALING = Question("s", {"num_workers": 1}, ("num_workers", "lr"))


def scaling(times):
    return [
        make_result({"num_workers": n, "lr": lr}, repeat, time_s)
        for (n, lr), all_s in times.items()
        for repeat, time_s in enumerate(all_s)
    ]


def test_nothing_leads_before_a_point_and_its_baseline_have_finished():
    failed = make_result({"num_workers": 2, "lr": 0.1}, state=TrialState.FAILED)
    for results in ([], scaling({(1, 0.1): [4.0], (2, 0.3): [2.0]}), [*scaling({(1, 0.1): [4.0]}), failed]):
        assert Leader(SCALING, results).best is None
    assert Leader(Question("s", {}, ("lr",), num_repeats=1, is_search=True), [make_result({"lr": 0.1})]).best is None


def test_the_point_with_the_best_median_speedup_leads():
    results = scaling({(1, 0.1): [4.0] * 3, (2, 0.1): [2.5, 2.4, 2.6], (1, 0.3): [8.0] * 3, (2, 0.3): [4.0, 4.1, 4.2]})
    best = Leader(SCALING, results).best
    assert (best.point, best.quantity, best.num_trials) == ({"num_workers": 2, "lr": 0.3}, SPEEDUP, 3)
    assert best.value == pytest.approx(8 / 4.1)


def test_the_baseline_leads_if_every_point_is_slower():
    best = Leader(SCALING, scaling({(1, 0.1): [4.0] * 3, (2, 0.1): [6.2, 6.3, 6.1], (1, 0.3): [8.0]})).best
    assert (best.point, best.num_trials) == ({"num_workers": 1, "lr": 0.1}, 3)
    assert interim_text(best) == "leading: the baseline at num_workers=1 lr=0.1 (3 trials, unconfirmed)"


@pytest.mark.parametrize(("mode", "lr", "value"), [("max", 0.3, 0.92), ("min", 0.1, 0.9)])
@pytest.mark.parametrize("gaps", [(0.02,), (0.05, -0.05, 0.02)])
def test_without_a_baseline_the_best_median_metric_leads(mode, lr, value, gaps):
    results = [make_result({"lr": 0.1}, repeat, accuracy=0.9) for repeat in range(len(gaps))]
    results += [make_result({"lr": 0.3}, repeat, accuracy=0.9 + gap) for repeat, gap in enumerate(gaps)]
    best = Leader(Question("s", {}, ("lr",), mode=mode), results).best
    assert (best.point, best.quantity, best.num_trials) == ({"lr": lr}, "accuracy", len(gaps))
    assert best.value == pytest.approx(value)


def test_a_leading_point_is_shown_as_unconfirmed():
    speedup, accuracy = Interim({"num_workers": 2}, SPEEDUP, 1.52, 1), Interim({"lr": 0.1}, "accuracy", 0.97, 9)
    assert interim_text(speedup) == "leading: 1.52× at num_workers=2 (1 trial, unconfirmed)"
    assert interim_text(accuracy) == "leading: accuracy 97.0 % at lr=0.1 (9 trials, unconfirmed)"


TRIALS = st.dictionaries(
    st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([0.1, 0.3]), st.integers(0, 2)),
    st.sampled_from([1.0, 2.0, 3.0, 4.0]),
    min_size=1,
)


@given(TRIALS, st.randoms(use_true_random=False))
def test_the_leader_is_the_same_in_any_order(times, random):
    trials = random.sample(sorted(times), len(times))
    leader = Leader(SCALING, [make_result({"num_workers": n, "lr": lr}, i, times[n, lr, i]) for n, lr, i in trials])
    speedups = {}
    for n, lr, i in trials:
        if n > 1 and (1, lr, i) in times:
            speedups.setdefault((n, lr), []).append(times[1, lr, i] / times[n, lr, i])
    best = max(map(statistics.median, speedups.values()), default=None)
    assert (leader.best and leader.best.value) == (best and max(1.0, best))
    if best and best > 1:
        first = min(point for point, values in speedups.items() if statistics.median(values) == best)
        assert tuple(leader.best.point.values()) == first


# ---- remaining time

ONE, TWO, WIDE, FOUR = (
    trial_kind(make_spec(p))
    for p in ({"num_workers": 1}, {"num_workers": 2}, {"num_workers": 2, "lr": 0.3}, {"num_workers": 4})
)
ENDED = [(ONE, 40.0), (ONE, 1000.0), (ONE, 40.0), (TWO, 10.0), (TWO, 12.0)]
KINDS = st.sampled_from([ONE, TWO, WIDE, TrialKind()])
SECONDS = st.floats(0, 1e6)
TIMED = st.lists(st.tuples(KINDS, SECONDS), max_size=12)


def test_there_is_no_estimate_before_a_trial_has_ended():
    assert remaining_s([ONE, TWO], [(ONE, 3.0)], [], gang_starts_s=[20.0], num_gang_starts=2) is None


@pytest.mark.parametrize(
    ("kind", "remaining"),
    [(ONE, 40.0), (TWO, 11.0), (WIDE, 11.0), (FOUR, 40.0), (TrialKind(), 40.0)],
    ids=["median of its point", "its point", "as many workers", "all", "a point still to draw"],
)
def test_a_trials_time_is_that_of_its_point_its_placement_or_all(kind, remaining):
    assert remaining_s([kind], [], ENDED) == remaining


@given(st.lists(KINDS, max_size=12), TIMED, TIMED.filter(bool), st.integers(1, 8), st.lists(SECONDS), st.integers(0, 3))
def test_the_rest_is_at_least_the_longest_trial_and_falls_with_more_slots(
    queued, running, ended, num_slots, pauses, gangs
):
    more = {"overheads_s": pauses, "gang_starts_s": pauses, "num_gang_starts": gangs}
    left_s, with_one_more_s = (remaining_s(queued, running, ended, num_slots=num_slots + i, **more) for i in (0, 1))
    alone = [remaining_s([kind], [], ended) for kind in queued]
    assert left_s >= max(alone, default=0.0) * (1 - 1e-9)
    assert with_one_more_s <= left_s


def test_each_missing_gang_adds_a_measured_start():
    left_s = remaining_s([ONE, TWO], [], [(ONE, 5.0)], gang_starts_s=[20.0, 22.0], num_gang_starts=2)
    assert left_s == pytest.approx(10.0 + 2 * 21.0)


def test_a_counterfactual_does_not_lead():
    question = Question("s", {"what_if": "none"}, ("what_if",), num_repeats=3)
    results = [make_result({"what_if": value}, 0, time_s) for value, time_s in (("none", 4.0), ("no loading", 1.0))]
    assert Leader(question, results).best is None
