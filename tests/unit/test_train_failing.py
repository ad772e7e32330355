"""Failures have kinds: the code's own errors, memory that ran out, a lost peer."""

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


def raised(call):
    with pytest.raises(Exception) as caught:  # noqa: PT011
        call()
    return caught.value


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:4"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        *((lambda make=make: make(FAR_TOO_MUCH), FailureKind.OUT_OF_MEMORY) for make in (torch.empty, np.empty, bytes)),
        (ValueError("gloo"), FailureKind.ERROR),
        (RuntimeError("mat1 and mat2 shapes"), FailureKind.ERROR),
        (KeyError("memory"), FailureKind.ERROR),
        (RuntimeError(GLOO), FailureKind.PEER_LOST),
        (DistBackendError("NCCL error: remote process exited or there was a network error"), FailureKind.PEER_LOST),
        (RuntimeError("DataLoader worker (pid 31) is killed by signal: Killed. "), FailureKind.CRASH),
    ],
    ids=str,
)
def test_an_exception_has_a_kind(error, kind):
    assert failure_kind(error if isinstance(error, Exception) else raised(error)) is kind


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


@pytest.mark.parametrize("kind", FailureKind)
def test_failures_that_another_attempt_may_not_repeat_are_retried(kind):
    is_final = kind in (FailureKind.ERROR, FailureKind.OUT_OF_MEMORY, FailureKind.REFUSED)
    assert is_retried(Failure(kind, ""), attempt=1, max_retries=1) is not is_final
    assert not is_retried(Failure(kind, ""), attempt=2, max_retries=1)


def test_the_kernels_count_of_memory_kills_does_not_fall():
    before = num_memory_kills()
    assert 0 <= before <= num_memory_kills()
