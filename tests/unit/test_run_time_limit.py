"""What still starts in a run whose end is known in advance."""

import pytest
from results import make_result, make_spec

from raypar.errors import RayparError
from raypar.run.time_limit import TimeLimit, end_of_time

NOW = 1000.0


def in_time(left_s, expected_s, trials, begun=(), num_slots=1):
    """Return which of the trials, (name of the point, block), may start.

    Args:
        left_s: seconds until the end.
        expected_s: expected seconds by point.
        begun: blocks that have begun.
    """
    specs = [make_spec({"x": name}, repeat) for name, repeat in trials]
    limit = TimeLimit(NOW + left_s, lambda spec: expected_s.get(spec.point["x"]), lambda: NOW)
    for repeat in begun:
        limit.note_start(make_spec({"x": "begun"}, repeat))
    return [trial for trial, may in zip(trials, limit.in_time(specs, num_slots), strict=True) if may]


A0, B0, A1, B1 = ("a", 0), ("b", 0), ("a", 1), ("b", 1)
KNOWN = {"a": 10.0, "b": 20.0}


@pytest.mark.parametrize(
    ("left_s", "trials", "begun", "starting"),
    [
        (100.0, [A0, B0, A1, B1], [], [A0, B0, A1, B1]),
        (15.0, [A0, B0], [], [A0]),  # a first block may be longer than any job
        (15.0, [A1, B1], [0], []),  # no further block fits
        (30.0, [A1, B1], [0], [A1, B1]),
        (29.0, [A1, B1], [0], []),
        (15.0, [B0, A1, B1], [0], []),
        (25.0, [B0, A1, B1], [0], [B0]),  # the rest of a block that has begun
        (15.0, [A0, B0, A1], [0], [A0, A1]),  # the rest of a later block is short enough
        (5.0, [A0, B0], [], []),
        (0.0, [("new", 0)], [], []),
        (1.0, [("new", 0)], [], [("new", 0)]),  # of unknown length
        (15.0, [("new", 1), A1], [0], []),  # counts as the average
        (20.0, [("new", 1), A1], [0], [("new", 1), A1]),
    ],
)
def test_only_what_ends_in_time_starts(left_s, trials, begun, starting):
    assert in_time(left_s, KNOWN, trials, begun) == starting


def test_a_block_takes_less_time_on_several_machines():
    block = [("a", 1)] * 4
    assert in_time(20.0, KNOWN, block, [0], num_slots=1) == []
    assert in_time(20.0, KNOWN, block, [0], num_slots=2) == block
    assert in_time(9.0, KNOWN, block, [0], num_slots=8) == []


def test_the_end_is_that_of_the_environment():
    assert end_of_time({}) is None and end_of_time({"RAYPAR_ENDS_AT": "1e9"}) == 1e9
    with pytest.raises(RayparError, match="RAYPAR_ENDS_AT=soon: must be a Unix time"):
        end_of_time({"RAYPAR_ENDS_AT": "soon"})


def test_earlier_runs_tell_how_long_trials_take():
    from raypar.execution.prepare import walls_s

    results = [make_result({"x": "a"}, repeat, 1.0, wall_s=wall_s) for repeat, wall_s in enumerate((3.0, 9.0, 4.0))]
    assert list(walls_s(results).values()) == [4.0]
