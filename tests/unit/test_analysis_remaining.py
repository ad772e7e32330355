"""How long a study will still take: by the trials alike, never nonsense."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from results import make_spec

from raypar.analysis.progress import TrialKind, remaining_s, trial_kind

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
