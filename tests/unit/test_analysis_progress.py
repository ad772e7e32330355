"""Progress of a study: its leading point, and the time that remains."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from results import make_result, make_spec

from raypar.analysis.analyse import analyse
from raypar.analysis.progress import TrialKind, interim_best, remaining_s, trial_kind
from raypar.analysis.question import Question
from raypar.study.trial import TrialState

SCALING = Question("s", {"num_workers": 1}, ("num_workers", "lr"))
SEARCH = Question("s", {}, ("lr",), num_repeats=1)


def scaling(times: dict[tuple[int, float], list[float]]):
    return [
        make_result({"num_workers": n, "lr": lr}, repeat, time_s)
        for (n, lr), all_s in times.items()
        for repeat, time_s in enumerate(all_s)
    ]


def test_nothing_is_best_before_a_point_and_its_baseline_have_finished() -> None:
    assert interim_best(SCALING, []) is None
    assert interim_best(SCALING, scaling({(1, 0.1): [4.0]})) is None
    assert interim_best(SCALING, scaling({(1, 0.1): [4.0], (2, 0.3): [2.0]})) is None
    failed = make_result({"num_workers": 2, "lr": 0.1}, state=TrialState.FAILED)
    assert interim_best(SCALING, [*scaling({(1, 0.1): [4.0]}), failed]) is None
    assert interim_best(SEARCH, [make_result({"lr": 0.1})]) is None


def test_the_point_with_the_best_median_speedup_over_its_own_baseline_is_best() -> None:
    results = scaling({(1, 0.1): [4.0] * 3, (2, 0.1): [2.5, 2.4, 2.6], (1, 0.3): [8.0] * 3, (2, 0.3): [4.0, 4.1, 4.2]})
    best = interim_best(SCALING, results)
    assert best.point == {"num_workers": 2, "lr": 0.3} and best.is_significant
    assert best.estimate.value == pytest.approx(8 / 4.1)
    known = {tuple(p.point.items()): p.speedup for p in analyse(SCALING, results).points}
    assert known[tuple(best.point.items())] == best.estimate  # what the report will say


@pytest.mark.parametrize(
    ("times", "is_significant"), [([2.0], False), ([2.0, 6.0, 3.5], False), ([2.0, 2.1, 2.05], True)]
)
def test_a_speedup_is_told_only_where_its_interval_leaves_out_one(times: list[float], is_significant: bool) -> None:
    best = interim_best(SCALING, scaling({(1, 0.1): [4.0] * len(times), (2, 0.1): times}))
    assert best.is_significant is is_significant


@pytest.mark.parametrize(("mode", "lr"), [("max", 0.3), ("min", 0.1)])
def test_without_a_baseline_the_best_metric_counts_and_one_trial_tells_nothing(mode: str, lr: float) -> None:
    question = Question("s", {}, ("lr",), mode=mode, num_repeats=1)
    results = [make_result({"lr": 0.1}, accuracy=0.91), make_result({"lr": 0.3}, accuracy=0.97)]
    best = interim_best(question, results)
    assert best.point == {"lr": lr} and best.quantity == "accuracy" and not best.is_significant


def test_a_metric_is_told_where_it_is_better_block_by_block() -> None:
    question = Question("s", {}, ("lr",))
    for gaps, is_significant in (((0.05, 0.051, 0.049), True), ((0.05, -0.05, 0.02), False)):
        results = [make_result({"lr": 0.1}, repeat, accuracy=0.9) for repeat in range(3)]
        results += [make_result({"lr": 0.3}, repeat, accuracy=0.9 + gap) for repeat, gap in enumerate(gaps)]
        assert interim_best(question, results).is_significant is is_significant


# ---- remaining time

ONE, TWO, WIDE = (
    trial_kind(make_spec(p)) for p in ({"num_workers": 1}, {"num_workers": 2}, {"num_workers": 2, "lr": 0.3})
)
KINDS = st.sampled_from([ONE, TWO, WIDE, TrialKind()])
SECONDS = st.floats(0, 1e6)
TIMED = st.lists(st.tuples(KINDS, SECONDS), max_size=12)


def test_nothing_is_said_before_a_trial_has_ended() -> None:
    assert remaining_s([ONE, TWO], [(ONE, 3.0)], [], gang_starts_s=[20.0], num_gang_starts=2) is None


def test_a_trial_takes_as_long_as_its_point_else_as_its_placement_else_as_all() -> None:
    ended = [(ONE, 40.0), (TWO, 10.0), (TWO, 12.0)]
    assert remaining_s([TWO], [], ended) == 11.0
    assert remaining_s([WIDE], [], ended) == 11.0  # two workers as well
    assert remaining_s([trial_kind(make_spec({"num_workers": 4}))], [], ended) == 12.0
    assert remaining_s([TrialKind()], [], ended) == 12.0


def test_a_median_is_not_moved_by_one_slow_trial() -> None:
    assert remaining_s([ONE], [], [(ONE, 10.0), (ONE, 1000.0), (ONE, 10.0)]) == 10.0


@given(st.lists(KINDS, max_size=12), TIMED, TIMED, st.integers(1, 8), st.lists(SECONDS), st.integers(0, 3))
def test_it_is_never_negative_and_never_less_than_the_longest_rest(
    queued, running, ended, num_slots, pauses, gangs
) -> None:
    left_s = remaining_s(
        queued,
        running,
        ended,
        num_slots=num_slots,
        overheads_s=pauses,
        gang_starts_s=pauses,
        num_gang_starts=gangs,
    )
    assert (left_s is None) == (not ended)
    if left_s is not None:
        assert left_s >= 0
        alone = [remaining_s([kind], [], ended) for kind in queued]
        assert left_s >= max([one for one in alone if one is not None], default=0.0) * (1 - 1e-9)


@given(st.integers(1, 30), st.floats(0.1, 1e4), st.integers(1, 4), st.floats(0, 10))
def test_it_falls_with_every_trial_that_ends_if_all_take_the_same(num_trials, each_s, num_slots, pause_s) -> None:
    told = [
        remaining_s([ONE] * (num_trials - n), [], [(ONE, each_s)] * n, num_slots=num_slots, overheads_s=[pause_s])
        for n in range(1, num_trials + 1)
    ]
    assert told == sorted(told, reverse=True) and told[-1] == 0
    assert told[0] >= (num_trials - 1) * each_s / num_slots * (1 - 1e-9)


@given(TIMED.filter(bool), st.floats(0, 1e5), st.floats(0, 1e5))
def test_it_falls_as_a_running_trial_goes_on(ended, first_s, later_s) -> None:
    before, after = sorted((first_s, later_s))
    left_s = [remaining_s([TWO], [(ONE, since_s)], ended) for since_s in (before, after)]
    assert left_s[0] >= left_s[1]


@given(TIMED.filter(bool), st.lists(KINDS, max_size=12), st.integers(1, 7))
def test_more_side_by_side_never_takes_longer(ended, queued, num_slots) -> None:
    few, more = (remaining_s(queued, [], ended, num_slots=n) for n in (num_slots, num_slots + 1))
    assert more <= few


def test_gangs_that_have_still_to_start_add_a_measured_start_each() -> None:
    left_s = remaining_s([ONE, TWO], [], [(ONE, 5.0)], gang_starts_s=[20.0, 22.0], num_gang_starts=2)
    assert left_s == pytest.approx(10.0 + 2 * 21.0)
