"""Failures have kinds: the code's own errors, memory that ran out, a lost peer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from raypar.run.ranks import RankEnd, cause, num_memory_kills
from raypar.run.runner import is_retried
from raypar.study.trial import Failure, FailureKind
from raypar.train.worker import failure_kind

FAR_TOO_MUCH = 1 << 50


class DistBackendError(RuntimeError):
    """NCCL's, which is not built everywhere."""


def raised(call) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        call()
    return caught.value


@pytest.mark.parametrize(
    "call",
    [lambda: torch.empty(FAR_TOO_MUCH), lambda: np.empty(FAR_TOO_MUCH), lambda: bytes(FAR_TOO_MUCH)],
    ids=["torch", "numpy", "python"],
)
def test_an_allocation_that_is_refused_is_out_of_memory_and_not_tried_again(call):
    kind = failure_kind(raised(call))
    assert kind is FailureKind.OUT_OF_MEMORY
    assert not is_retried(Failure(kind, ""), attempt=1, max_retries=3)


@pytest.mark.parametrize("error", [ValueError("gloo"), RuntimeError("mat1 and mat2 shapes"), KeyError("memory")])
def test_what_the_code_raises_is_its_own_and_not_tried_again(error):
    kind = failure_kind(error)
    assert kind is FailureKind.ERROR
    assert not is_retried(Failure(kind, ""), attempt=1, max_retries=3)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:4"),
        DistBackendError("NCCL error: remote process exited or there was a network error"),
    ],
    ids=["gloo", "nccl"],
)
def test_a_lost_peer_is_not_the_codes_error(error):
    kind = failure_kind(error)
    assert kind is FailureKind.PEER_LOST
    assert is_retried(Failure(kind, ""), attempt=1, max_retries=1)
    assert not is_retried(Failure(kind, ""), attempt=2, max_retries=1)


def test_a_loader_that_was_killed_is_a_crash():
    died = RuntimeError("DataLoader worker (pid 31) is killed by signal: Killed. ")
    assert failure_kind(died) is FailureKind.CRASH


LOST, CRASH, ERROR = (Failure(kind, kind) for kind in (FailureKind.PEER_LOST, FailureKind.CRASH, FailureKind.ERROR))


@pytest.mark.parametrize(
    ("ends", "why"),
    [
        ([RankEnd(failure=ERROR), RankEnd(failure=LOST)], ERROR),
        ([RankEnd(failure=LOST), RankEnd(failure=ERROR)], ERROR),
        ([RankEnd(failure=LOST), RankEnd(failure=CRASH)], CRASH),
        ([RankEnd(failure=LOST), RankEnd(failure=CRASH, was_killed=True)], LOST),
        ([RankEnd(failure=ERROR), RankEnd(failure=CRASH, was_killed=True)], ERROR),
        ([RankEnd(failure=LOST), RankEnd()], LOST),
        ([RankEnd(), RankEnd()], None),
    ],
)
def test_the_rank_that_failed_by_itself_explains_the_trials_failure_whoever_is_heard_first(ends, why):
    failure = None
    for end in ends:
        failure = cause(failure, end)
    assert failure is why


@pytest.mark.parametrize(
    ("kind", "is_tried_again"),
    [
        (FailureKind.ERROR, False),
        (FailureKind.CRASH, True),
        (FailureKind.OUT_OF_MEMORY, False),
        (FailureKind.PEER_LOST, True),
        (FailureKind.HUNG, True),
        (FailureKind.GANG_LOST, True),
        (FailureKind.REFUSED, False),
    ],
)
def test_failures_that_another_attempt_may_not_repeat_are_retried(kind, is_tried_again):
    assert is_retried(Failure(kind, ""), attempt=1, max_retries=1) is is_tried_again
    assert not is_retried(Failure(kind, ""), attempt=2, max_retries=1)


def test_the_kernels_count_of_memory_kills_does_not_fall():
    before = num_memory_kills()
    assert 0 <= before <= num_memory_kills()
