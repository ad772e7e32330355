"""Deadlocked ranks are found, and slow ones are not."""

import re

import pytest

from raypar.run.ranks import RankEnd
from raypar.run.standstill import GLOO_MISMATCH, Standstill, explained
from raypar.study.trial import Failure, FailureKind
from raypar.train.position import Position


def at(count, **state):
    """Return a position after this number of operations of the default group."""
    return Position({"0": count}, **state)


def stands(count, operation="backward", seconds=20.0):
    return at(count, stands_s=seconds, operation=operation, place=f"{operation}.py:7")


LEFT = {"is_out": True, "has_left": True}
WAITS = {"is_out": True}
HOPELESS = {
    "a rank has left": (
        [at(20, **LEFT), stands(21)],
        r"rank 1 in backward \(backward.py:7\) waits for rank 0, which has left",
    ),
    "a rank waits for rank 0": (
        [stands(11), at(10, **WAITS)],
        "rank 0 in backward .* rank 1, which waits for its report",
    ),
    "one of many has left": (
        [at(8), stands(11), at(10, **LEFT)],
        "rank 1 in .* waits for rank 2, which has left its loop",
    ),
    "on a GPU": ([at(20, **LEFT), stands(21, "")], "rank 1 .* waits for rank 0"),
    "in different operations": (
        [stands(11, "barrier", 46), stands(11, "backward", 50)],
        "rank 0 in barrier .* and rank 1 in backward .* wait for each other",
    ),
}
# A single rank may take any time: it evaluates, saves a model or downloads.
FINE = {
    "nobody is known": [],
    "the rest is unknown": [stands(11)],
    "rank 0 saves a model": [stands(20), at(20, **LEFT)],
    "rank 0 evaluates before its report": [at(20), at(20, **WAITS)],
    "rank 0 has not stood for long": [stands(11, seconds=19.0), at(10, **WAITS)],
    "rank 0 will report and release rank 1": [at(10), at(10, **WAITS), stands(11)],
    "one is slow and the others wait": [stands(11), at(10)],
    "one operation takes long": [stands(11, seconds=300), stands(11, seconds=300)],
    "different ones take a while": [stands(11, "barrier"), stands(11)],
    "a pipeline": [stands(11, "send", 300), stands(11, "recv", 300)],
    "one stands elsewhere": [stands(11, "", 300), stands(11, seconds=300)],
    "one is behind and outside of torch": [stands(10, "", 300), stands(11, seconds=300)],
    "groups of other ranks": [at(3, **LEFT), Position({"1": 5}, stands_s=60, operation="barrier")],
}


def noted(positions):
    """Return the failure after the last position of each rank."""
    standstill, failure = Standstill(len(positions), "log"), None
    for rank, position in enumerate(positions):
        failure = standstill.note(rank, position)
    return failure


@pytest.mark.parametrize("name", HOPELESS)
def test_deadlocked_ranks_are_named_with_cause_and_fix(name):
    positions, text = HOPELESS[name]
    failure = noted(positions)
    assert re.match(
        f"uneven numbers of batches per rank: {text}.*DistributedSampler, drop_last=True.*join\\.Join$", failure.message
    )
    assert failure.kind is FailureKind.ERROR  # a retry would fail too


@pytest.mark.parametrize("name", FINE)
def test_ranks_that_may_continue_are_not_reported(name):
    assert noted(FINE[name]) is None


def test_a_rank_that_moves_again_is_not_reported():
    standstill = Standstill(2, "log")
    standstill.note(0, stands(11))
    standstill.note(0, at(12))
    assert standstill.note(1, at(10, **WAITS)) is None
    assert standstill.note(0, stands(12)) is not None


LOST = Failure(FailureKind.PEER_LOST, "RuntimeError: gloo: Connection closed by peer", 1, "its traceback", "its log")
ABORTED = Failure(
    FailureKind.CRASH, "rank 1 was killed by SIGABRT", 1, f"gloo::EnforceNotMet {GLOO_MISMATCH}", "its log"
)


@pytest.mark.parametrize(
    ("failure", "first", "second", "text"),
    [
        (LOST, at(20, **LEFT), at(21), "rank 1 was still in a step, .* when rank 0 left its loop"),
        (LOST, at(20, **LEFT), at(20), ""),  # both are at the end of the last operation
        (LOST, at(20, **WAITS), at(21), ""),  # rank 0 was killed
        (LOST, Position(), at(21), ""),
        (ABORTED, at(21), at(21), "rank 1 was in another collective operation than the rest"),
    ],
)
def test_a_lost_connection_to_a_finished_rank_is_explained(failure, first, second, text):
    ends = {0: RankEnd(position=first), 1: RankEnd(failure=failure, position=second)}
    answer = explained(failure, ends)
    if text:
        assert re.match(f"uneven numbers of batches per rank: {text}", answer.message)
        assert (answer.kind, answer.rank, answer.log_path) == (FailureKind.ERROR, 1, "its log")
        assert answer.traceback == failure.traceback
    else:
        assert answer is failure
    assert explained(None, ends) is None
