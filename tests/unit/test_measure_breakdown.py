"""Breakdown of a step's time: every part by itself, and nothing counted twice or lost."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypar.measure.breakdown import break_down, profile_of
from raypar.measure.spans import RecordedSteps
from raypar.study.profile import (
    BACKWARD,
    BUBBLE,
    COMMUNICATION,
    DATA_WAIT,
    FORWARD,
    OPTIMIZER,
    OTHER,
    PARTS,
    STRAGGLERS,
    Profile,
    mean_of,
)

REDUCE, GATHER = "gloo:all_reduce", "gloo:gather"
# One step of a second: data, forward, backward, optimizer, one after the other.
MARKS = [("data", 0.0, 0.1), ("forward", 0.1, 0.4), ("backward", 0.4, 0.8), ("optimizer", 0.85, 0.95)]
ALONE = [("step", 0.0, 1.0), *MARKS]


def recorded(spans, **changes):
    times = {"step_times_s": [0.9, 0.9], "profiled_step_times_s": [1.0]}
    return RecordedSteps(**{"spans": spans, **times, "shares_clock": True, "peak_flops": 1e9, **changes})


def reducing(start, end, wait=None, name=REDUCE):
    """A step with a collective that the rank waits for from its start on, or from `wait` on."""
    return [*ALONE, (name, start, end), ("wait", start if wait is None else wait, end)]


MOVING = [*ALONE, (REDUCE, 0.5, 0.7)]
COPIES = [("step", 0.0, 1.0), ("combine", 0.0, 0.6), (GATHER, 0.1, 0.5), ("wait", 0.1, 0.5)]
WHILE_MOVING = [
    [*MOVING, ("gloo:broadcast", 0.5, 0.8), ("wait", 0.5, 0.8)],
    [*MOVING, ("gloo:broadcast", 0.75, 0.8), ("wait", 0.5, 0.7)],
]
SECOND = [[*reducing(0.6, 0.8), (REDUCE, 0.45, 0.55)], [*reducing(0.7, 0.8), (REDUCE, 0.5, 0.55)]]
UNEQUAL = [reducing(0.5, 0.8), [*reducing(0.7, 0.8), (REDUCE, 0.1, 0.2)]]
BESIDE = [[*reducing(0.5, 0.8, wait=0.4), ("gloo:recv", 0.4, 0.8)]]
NOT_WAITED_FOR = [[*ALONE, (REDUCE, 0.45, 0.75)], [*ALONE, (REDUCE, 0.7, 0.75)]]
PARTS_ALONE = {DATA_WAIT: 0.1, FORWARD: 0.3, BACKWARD: 0.4, OPTIMIZER: 0.1, OTHER: 0.1}
BUBBLES = ("gloo:recv", "gloo:send", "ncclDevKernel_SendRecv")

# Spans of the ranks in a step; for the first rank, the expected parts of its time, hidden communication, and whom
# it waited for.
CASES = {
    "alone": ([ALONE], PARTS_ALONE, 0, {}),
    "waiting is taken from the part it lies in": ([reducing(0.7, 0.8)], {BACKWARD: 0.3, COMMUNICATION: 0.1}, 0, {}),
    "hidden while it works": ([MOVING], {BACKWARD: 0.4, COMMUNICATION: 0}, 0.2, {}),
    "hidden in part": ([reducing(0.5, 0.8, wait=0.7)], {COMMUNICATION: 0.1}, 0.2, {}),
    "two at once are hidden once": ([[*MOVING, (REDUCE, 0.6, 0.75)]], {}, 0.25, {}),
    "first": ([reducing(0.5, 0.8), reducing(0.7, 0.8)], {STRAGGLERS: 0.2, COMMUNICATION: 0.1}, 0, {1: 0.2}),
    "last": ([reducing(0.7, 0.8), reducing(0.5, 0.8)], {STRAGGLERS: 0, COMMUNICATION: 0.1}, 0, {}),
    "a straggler that nobody waits for": (NOT_WAITED_FOR, {STRAGGLERS: 0}, 0.05, {}),
    "while another moves data": (WHILE_MOVING, {COMMUNICATION: 0.25, STRAGGLERS: 0.05}, 0, {1: 0.05}),
    "the last of three": ([reducing(0.5, 0.8), reducing(0.75, 0.8), reducing(0.6, 0.8)], {}, 0, {1: 0.25}),
    "the k-th of a name is matched with the k-th": (SECOND, {STRAGGLERS: 0.1}, 0.05, {1: 0.1}),
    "unequal numbers can't be matched": (UNEQUAL, {STRAGGLERS: 0, COMMUNICATION: 0.3}, 0, {}),
    "clocks that disagree": ([reducing(0.5, 0.6), reducing(0.9, 1)], {STRAGGLERS: 0.1, COMMUNICATION: 0}, 0, {1: 0.1}),
    **{name: ([reducing(0.1, 0.3, name=name)], {**PARTS_ALONE, FORWARD: 0.1, BUBBLE: 0.2}, 0, {}) for name in BUBBLES},
    "messages are no hidden communication": ([[*ALONE, ("gloo:send", 0.1, 0.8)]], {}, 0, {}),
    "a collective beside a message": (BESIDE, {BUBBLE: 0.1, COMMUNICATION: 0.3}, 0, {}),
    "a call that starts it": ([[*ALONE, ("wait", 0.5, 0.52), (REDUCE, 0.52, 0.7)]], {COMMUNICATION: 0.02}, 0.18, {}),
    "copies are other work": ([COPIES], {COMMUNICATION: 0.4, OTHER: 0.6}, 0, {}),
}


@pytest.mark.parametrize(("ranks", "expected", "hidden_s", "waits_for"), CASES.values(), ids=CASES)
def test_a_steps_time_goes_where_it_was_spent(ranks, expected, hidden_s, waits_for):
    (first,), *_ = break_down(ranks)
    assert {part: first.parts[part] for part in expected} == pytest.approx(expected)
    assert sum(first.parts.values()) == pytest.approx(first.step_s) == pytest.approx(1.0)
    assert first.hidden_s == pytest.approx(hidden_s)
    assert first.waits_for == pytest.approx(waits_for)
    communication_s = hidden_s + first.parts[COMMUNICATION]
    assert first.hidden_share == (pytest.approx(hidden_s / communication_s) if communication_s else None)


def test_a_collective_across_two_steps_counts_in_each_for_its_part():
    spans = [("step", 0.0, 1.0), ("step", 1.0, 2.0), ("gloo:all_reduce", 0.8, 1.5), ("wait", 0.9, 1.5)]
    ((first, second),) = break_down([spans])
    assert (first.hidden_s, first.parts[COMMUNICATION]) == (pytest.approx(0.1), pytest.approx(0.1))
    assert (second.hidden_s, second.parts[COMMUNICATION]) == (0.0, pytest.approx(0.5))


def test_a_rank_without_a_step_has_no_breakdown():
    assert break_down([[]]) == [[]]
    assert profile_of([recorded([])], {"batch_size": 8}) is None


TIMES = st.tuples(st.floats(0, 3), st.floats(0, 1)).map(lambda t: (t[0], t[0] + t[1]))
NAMES = st.sampled_from(["gloo:all_reduce", "gloo:broadcast", "gloo:recv", "wait"])
SPANS = st.lists(st.tuples(NAMES, TIMES).map(lambda s: (s[0], *s[1])), max_size=12)


@st.composite
def steps(draw):
    """Three steps of a second, each cut into marks that don't overlap."""
    spans = [("step", float(step), step + 1.0) for step in range(3)]
    for step in range(3):
        cuts = sorted(draw(st.lists(st.floats(step, step + 1), min_size=5, max_size=5)))
        spans += zip(["data", "forward", "backward", "combine"], cuts, cuts[1:], strict=False)
    return spans


@given(st.lists(st.tuples(steps(), SPANS), min_size=1, max_size=3))
def test_the_parts_add_up_to_the_step_whatever_happens_and_so_do_their_means(ranks):
    for of_rank in break_down([[*marks, *others] for marks, others in ranks]):
        for step in [*of_rank, mean_of(of_rank)]:
            assert sum(step.parts.values()) == pytest.approx(step.step_s, abs=1e-9)
            assert all(seconds >= -1e-9 for seconds in step.parts.values())
            assert 0 <= step.hidden_s <= step.step_s + 1e-9
            assert sum(step.waits_for.values()) == pytest.approx(step.parts[STRAGGLERS])


@pytest.mark.parametrize(
    ("config", "durations", "num_steps", "step_s"),
    [
        # The fastest and the slowest quarter don't count.
        ({"strategy": "ddp"}, (1, 2, 10, 0.1), 2, 1.5),
        # With periodic averages, all steps of the last whole periods count.
        ({"strategy": "local_sgd", "sync_every": 3}, (9, 1, 1, 8, 1, 1, 8), 6, 20 / 6),
    ],
)
def test_a_profile_is_the_mean_of_typical_steps(config, durations, num_steps, step_s):
    spans = [("step", a, b) for a, b in itertools.pairwise(itertools.accumulate(durations, initial=0.0))]
    made = profile_of([recorded(spans)], {"batch_size": 8, **config})
    assert (made.num_steps, made.ranks[0].step_s) == (num_steps, pytest.approx(step_s))


def profile(*ranks, **config):
    return profile_of(ranks, {"batch_size": 36, **config})


def test_a_profile_has_its_overhead_and_the_utilisation_of_all_workers():
    of_two = profile(recorded(ALONE, flop_per_sample=1e7), recorded(ALONE, step_times_s=[0.8, 0.8], peak_flops=3e9))
    assert of_two.step_s == 0.9  # the slowest rank's
    assert of_two.overhead == pytest.approx(1 / 9)
    assert of_two.utilisation == pytest.approx(36 * 1e7 / 0.9 / 4e9)
    metrics = of_two.metrics()
    assert metrics["profile/model_flop_utilisation"] == of_two.utilisation
    assert metrics["profile/backward_s"] == pytest.approx(0.4)
    assert sum(metrics[f"profile/{part}_s"] for part in PARTS) == pytest.approx(metrics["profile/step_s"])
    # A network that can't be counted:
    assert "profile/model_flop_utilisation" not in profile(recorded(ALONE, flop_per_sample=None)).metrics()


def test_ranks_of_a_mesh_are_not_matched():
    ranks = [recorded(reducing(0.5, 0.8), flop_per_sample=10), recorded(reducing(0.7, 0.8))]
    mesh, matched = profile(*ranks, strategy="hybrid"), profile(*ranks)
    assert not mesh.matches_collectives and matched.matches_collectives
    assert mesh.ranks[0].parts[STRAGGLERS] == 0 and mesh.ranks[0].parts[COMMUNICATION] == pytest.approx(0.3)
    assert matched.ranks[0].waits_for and Profile.from_stored(json.loads(json.dumps(matched.to_stored()))) == matched


@pytest.mark.parametrize("raw", [{}, {"ranks": []}, {"ranks": [{"parts": 1}]}, {"recorded": []}, {"ranks": 3}])
def test_a_mapping_without_a_profile_gives_none(raw):
    assert Profile.from_stored(raw) is None
