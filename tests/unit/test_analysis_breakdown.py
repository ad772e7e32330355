"""Where a step's time goes: every part by itself, and that nothing is counted twice or lost."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypar.analysis.breakdown import (
    BACKWARD,
    BUBBLE,
    COMMUNICATION,
    DATA_WAIT,
    FORWARD,
    OPTIMIZER,
    OTHER,
    PARTS,
    STRAGGLERS,
    Breakdown,
    Profile,
    break_down,
    mean_of,
    profile_of,
)
from raypar.train.spans import Span

# One step of a second: data, forward, backward, optimizer, one after the other.
ALONE: list[Span] = [
    ("step", 0.0, 1.0),
    ("data", 0.0, 0.1),
    ("forward", 0.1, 0.4),
    ("backward", 0.4, 0.8),
    ("optimizer", 0.85, 0.95),
]


def only(*ranks: list[Span], matches: bool = True) -> list[Breakdown]:
    """Of each rank's only step."""
    return [own for (own,) in break_down(ranks, matches=matches)]


def parts(own: Breakdown) -> dict[str, float]:
    return {part: round(seconds, 9) for part, seconds in own.parts.items() if seconds > 1e-12}


def recorded(spans: list[Span], **changes: Any) -> dict[str, Any]:
    return {
        "spans": [list(span) for span in spans],
        "step_times_s": [0.9, 0.9],
        "profiled_step_times_s": [1.0],
        "shares_clock": True,
        "peak_flops": 1e9,
        **changes,
    }


def test_a_rank_alone_spends_its_step_on_what_is_marked() -> None:
    (own,) = only(ALONE)
    assert parts(own) == {DATA_WAIT: 0.1, FORWARD: 0.3, BACKWARD: 0.4, OPTIMIZER: 0.1, OTHER: 0.1}
    assert (own.step_s, own.hidden_s, own.hidden_share) == (1.0, 0.0, None)


def test_what_is_waited_for_a_collective_is_taken_from_the_part_it_lies_in() -> None:
    (own,) = only([*ALONE, ("gloo:all_reduce", 0.7, 0.8), ("wait", 0.7, 0.8)])
    assert parts(own)[BACKWARD] == 0.3
    assert parts(own)[COMMUNICATION] == 0.1
    assert own.hidden_share == 0.0


def test_a_collective_while_the_rank_works_is_hidden() -> None:
    (own,) = only([*ALONE, ("gloo:all_reduce", 0.5, 0.7)])
    assert parts(own)[BACKWARD] == 0.4
    assert COMMUNICATION not in parts(own)
    assert own.hidden_s == pytest.approx(0.2)
    assert own.hidden_share == 1.0


def test_a_collective_that_outlasts_the_work_is_hidden_in_part() -> None:
    (own,) = only([*ALONE, ("gloo:all_reduce", 0.5, 0.8), ("wait", 0.7, 0.8)])
    assert own.hidden_s == pytest.approx(0.2)
    assert own.parts[COMMUNICATION] == pytest.approx(0.1)
    assert own.hidden_share == pytest.approx(2 / 3)


def test_two_collectives_at_once_are_hidden_once() -> None:
    (own,) = only([*ALONE, ("gloo:all_reduce", 0.5, 0.7), ("gloo:all_reduce", 0.6, 0.75)])
    assert own.hidden_s == pytest.approx(0.25)


def test_who_comes_first_waits_for_who_comes_last_and_both_for_the_data() -> None:
    first = [*ALONE, ("gloo:all_reduce", 0.5, 0.8), ("wait", 0.5, 0.8)]
    last = [*ALONE, ("gloo:all_reduce", 0.7, 0.8), ("wait", 0.7, 0.8)]
    early, late = only(first, last)
    assert early.parts[STRAGGLERS] == pytest.approx(0.2)
    assert early.parts[COMMUNICATION] == pytest.approx(0.1)
    assert early.waits_for == {1: pytest.approx(0.2)}
    assert late.parts[STRAGGLERS] == 0.0
    assert late.parts[COMMUNICATION] == pytest.approx(0.1)
    assert not late.waits_for


def test_a_straggler_that_nobody_has_to_wait_for_costs_nothing_and_hides_no_communication() -> None:
    first = [*ALONE, ("gloo:all_reduce", 0.45, 0.75)]
    last = [*ALONE, ("gloo:all_reduce", 0.7, 0.75)]
    early, late = only(first, last)
    assert early.parts[STRAGGLERS] == 0.0
    assert early.hidden_s == pytest.approx(0.05)
    assert late.hidden_s == pytest.approx(0.05)


def test_while_another_collective_moves_data_waiting_is_communication() -> None:
    a = [*ALONE, ("gloo:all_reduce", 0.5, 0.7), ("gloo:broadcast", 0.5, 0.8), ("wait", 0.5, 0.8)]
    b = [*ALONE, ("gloo:all_reduce", 0.5, 0.7), ("gloo:broadcast", 0.75, 0.8), ("wait", 0.5, 0.7)]
    early, _ = only(a, b)
    assert early.parts[COMMUNICATION] == pytest.approx(0.25)
    assert early.parts[STRAGGLERS] == pytest.approx(0.05)


def test_the_last_of_three_is_named() -> None:
    ranks = [[*ALONE, ("gloo:all_reduce", at, 0.8), ("wait", at, 0.8)] for at in (0.5, 0.75, 0.6)]
    assert [set(own.waits_for) for own in only(*ranks)] == [{1}, set(), {1}]


def test_the_kth_collective_of_a_name_is_matched_with_the_kth() -> None:
    a = [*ALONE, ("gloo:all_reduce", 0.45, 0.55), ("gloo:all_reduce", 0.6, 0.8), ("wait", 0.6, 0.8)]
    b = [*ALONE, ("gloo:all_reduce", 0.5, 0.55), ("gloo:all_reduce", 0.7, 0.8), ("wait", 0.7, 0.8)]
    early, _ = only(a, b)
    assert early.parts[STRAGGLERS] == pytest.approx(0.1)


@pytest.mark.parametrize("matches", [True, False])
def test_collectives_that_cannot_be_matched_are_communication(matches: bool) -> None:
    a = [*ALONE, ("gloo:all_reduce", 0.5, 0.8), ("wait", 0.5, 0.8)]
    more = [("gloo:all_reduce", 0.1, 0.2)] if matches else []
    b = [*ALONE, *more, ("gloo:all_reduce", 0.7, 0.8), ("wait", 0.7, 0.8)]
    early, _ = only(a, b, matches=matches)
    assert early.parts[STRAGGLERS] == 0.0
    assert early.parts[COMMUNICATION] == pytest.approx(0.3)


def test_clocks_that_disagree_complete_no_collective_after_its_end() -> None:
    a = [*ALONE, ("gloo:all_reduce", 0.5, 0.6), ("wait", 0.5, 0.6)]
    b = [*ALONE, ("gloo:all_reduce", 0.9, 1.0), ("wait", 0.9, 1.0)]
    early, _ = only(a, b)
    assert early.parts[STRAGGLERS] == pytest.approx(0.1)
    assert early.parts[COMMUNICATION] == 0.0


@pytest.mark.parametrize("name", ["gloo:recv", "gloo:send", "ncclDevKernel_SendRecv"])
def test_waiting_for_a_message_is_the_bubble(name: str) -> None:
    (own,) = only([*ALONE, (name, 0.1, 0.3), ("wait", 0.1, 0.3)])
    assert parts(own) == {DATA_WAIT: 0.1, FORWARD: 0.1, BACKWARD: 0.4, OPTIMIZER: 0.1, OTHER: 0.1, BUBBLE: 0.2}


def test_messages_under_way_are_no_hidden_communication() -> None:
    (own,) = only([*ALONE, ("gloo:send", 0.1, 0.8)])
    assert own.hidden_s == 0.0


def test_a_collective_beside_a_message_is_communication() -> None:
    (own,) = only([*ALONE, ("gloo:recv", 0.4, 0.8), ("gloo:all_reduce", 0.5, 0.8), ("wait", 0.4, 0.8)])
    assert own.parts[BUBBLE] == pytest.approx(0.1)
    assert own.parts[COMMUNICATION] == pytest.approx(0.3)


def test_a_call_that_starts_a_communication_is_part_of_it() -> None:
    (own,) = only([*ALONE, ("wait", 0.5, 0.52), ("gloo:all_reduce", 0.52, 0.7)])
    assert own.parts[COMMUNICATION] == pytest.approx(0.02)
    assert own.hidden_s == pytest.approx(0.18)


def test_copies_before_and_after_a_communication_are_other_work() -> None:
    (own,) = only([("step", 0.0, 1.0), ("combine", 0.0, 0.6), ("gloo:gather", 0.1, 0.5), ("wait", 0.1, 0.5)])
    assert parts(own) == {COMMUNICATION: 0.4, OTHER: 0.6}


def test_a_collective_across_two_steps_counts_in_each_for_its_part() -> None:
    spans: list[Span] = [("step", 0.0, 1.0), ("step", 1.0, 2.0), ("gloo:all_reduce", 0.8, 1.5), ("wait", 0.9, 1.5)]
    ((first, second),) = break_down([spans])
    assert (first.hidden_s, first.parts[COMMUNICATION]) == (pytest.approx(0.1), pytest.approx(0.1))
    assert (second.hidden_s, second.parts[COMMUNICATION]) == (0.0, pytest.approx(0.5))


def test_a_rank_without_a_step_has_no_breakdown() -> None:
    assert break_down([[]]) == [[]]


TIMES = st.tuples(st.floats(0, 3), st.floats(0, 1)).map(lambda t: (t[0], t[0] + t[1]))
SPANS = st.lists(
    st.tuples(st.sampled_from(["gloo:all_reduce", "gloo:broadcast", "gloo:recv", "wait"]), TIMES).map(
        lambda s: (s[0], *s[1])
    ),
    max_size=12,
)


@st.composite
def steps(draw: st.DrawFn) -> list[Span]:
    """Three steps of a second, each cut into marks that don't overlap."""
    spans: list[Span] = []
    for step in range(3):
        spans.append(("step", float(step), step + 1.0))
        cuts = sorted(draw(st.lists(st.floats(step, step + 1), min_size=5, max_size=5)))
        names = ["data", "forward", "backward", "combine", "optimizer"]
        spans += [(name, a, b) for name, a, b in zip(names, cuts, cuts[1:], strict=False)]
    return spans


@given(st.lists(st.tuples(steps(), SPANS), min_size=1, max_size=3))
def test_the_parts_add_up_to_the_step_whatever_happens(ranks: list[tuple[list[Span], list[Span]]]) -> None:
    for own in break_down([[*marks, *others] for marks, others in ranks]):
        for step in own:
            assert sum(step.parts.values()) == pytest.approx(step.step_s, abs=1e-9)
            assert all(seconds >= -1e-9 for seconds in step.parts.values())
            assert 0 <= step.hidden_s <= step.step_s + 1e-9
            assert sum(step.waits_for.values()) == pytest.approx(step.parts[STRAGGLERS])


@given(st.lists(st.tuples(steps(), SPANS), min_size=2, max_size=3))
def test_the_mean_of_steps_adds_up_as_well(ranks: list[tuple[list[Span], list[Span]]]) -> None:
    for own in break_down([[*marks, *others] for marks, others in ranks]):
        mean = mean_of(own)
        assert sum(mean.parts.values()) == pytest.approx(mean.step_s)


@given(steps(), SPANS, st.floats(-5, 5))
def test_the_zero_of_time_does_not_matter(marks: list[Span], others: list[Span], shift_s: float) -> None:
    there = [(name, a + shift_s, b + shift_s) for name, a, b in (*marks, *others)]
    for here, moved in zip(break_down([[*marks, *others]])[0], break_down([there])[0], strict=True):
        assert all(here.parts[part] == pytest.approx(moved.parts[part], abs=1e-9) for part in PARTS)


def test_a_profile_leaves_out_the_fastest_and_the_slowest_quarter_of_the_steps() -> None:
    ends = [0.0, 1.0, 3.0, 13.0, 13.1]  # steps of 1, 2, 10 and 0.1 s
    spans: list[Span] = [("step", a, b) for a, b in itertools.pairwise(ends)]
    profile = profile_of([recorded(spans)], {"batch_size": 8, "strategy": "ddp"})
    assert profile is not None
    assert profile.num_steps == 2
    assert profile.ranks[0].step_s == pytest.approx(1.5)


def test_of_a_training_that_averages_now_and_then_whole_periods_count() -> None:
    ends = [0.0, 9.0, 10.0, 11.0, 19.0, 20.0, 21.0, 29.0]  # steps of 9, 1, 1, 8, 1, 1, 8 s
    spans: list[Span] = [("step", a, b) for a, b in itertools.pairwise(ends)]
    profile = profile_of([recorded(spans)], {"batch_size": 8, "strategy": "local_sgd", "sync_every": 3})
    assert profile is not None
    assert profile.num_steps == 6
    assert profile.ranks[0].step_s == pytest.approx(20 / 6)


def test_a_profile_tells_its_overhead_and_the_utilisation_of_all_workers() -> None:
    ranks = [recorded(ALONE, flop_per_sample=1e7), recorded(ALONE, step_times_s=[0.8, 0.8], peak_flops=3e9)]
    profile = profile_of(ranks, {"batch_size": 36, "strategy": "ddp"})
    assert profile is not None
    assert profile.step_s == 0.9  # the slowest rank's
    assert profile.overhead == pytest.approx(1 / 9)
    assert profile.utilisation == pytest.approx(36 * 1e7 / 0.9 / 4e9)


def test_a_network_that_cannot_be_counted_has_no_utilisation() -> None:
    profile = profile_of([recorded(ALONE, flop_per_sample=None)], {"batch_size": 36})
    assert profile is not None
    assert profile.utilisation is None
    assert "profile/model_flop_utilisation" not in profile.metrics()


def test_ranks_of_a_mesh_are_not_matched() -> None:
    a = [*ALONE, ("gloo:all_reduce", 0.5, 0.8), ("wait", 0.5, 0.8)]
    b = [*ALONE, ("gloo:all_reduce", 0.7, 0.8), ("wait", 0.7, 0.8)]
    profile = profile_of([recorded(a), recorded(b)], {"batch_size": 8, "strategy": "hybrid"})
    assert profile is not None
    assert not profile.matches_collectives
    assert profile.mean.parts[STRAGGLERS] == 0.0


def test_a_profile_is_the_same_after_json() -> None:
    a = [*ALONE, ("gloo:all_reduce", 0.5, 0.8), ("wait", 0.5, 0.8)]
    b = [*ALONE, ("gloo:all_reduce", 0.7, 0.8), ("wait", 0.7, 0.8)]
    profile = profile_of([recorded(a, flop_per_sample=10), recorded(b)], {"batch_size": 8})
    assert profile is not None
    assert profile.ranks[0].waits_for
    assert Profile.from_dict(json.loads(json.dumps(profile.to_dict()))) == profile


@pytest.mark.parametrize("raw", [{}, {"ranks": []}, {"ranks": [{"parts": 1}]}, {"recorded": []}, {"ranks": 3}])
def test_what_is_no_profile_is_none(raw: dict[str, Any]) -> None:
    assert Profile.from_dict(raw) is None


def test_steps_that_were_not_recorded_are_no_profile() -> None:
    assert profile_of([recorded([])], {"batch_size": 8}) is None


def test_metrics_are_in_a_section_of_their_own_and_name_their_units() -> None:
    profile = profile_of([recorded(ALONE, flop_per_sample=10)], {"batch_size": 8})
    assert profile is not None
    metrics = profile.metrics()
    assert all(key.startswith("profile/") for key in metrics)
    assert metrics["profile/backward_s"] == pytest.approx(0.4)
    assert sum(metrics[f"profile/{part}_s"] for part in PARTS) == pytest.approx(metrics["profile/step_s"])
