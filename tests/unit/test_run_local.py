"""Trials without Ray, one after the other: which are started, retried and given up."""

from types import SimpleNamespace

import pytest
from stage import a_study

from raypar.run import local
from raypar.run.ranks import trial_result
from raypar.run.runner import Notice, TrialEnded, TrialStarted
from raypar.study.trial import Failure, FailureKind
from raypar.train.job import RunSettings


@pytest.mark.parametrize(
    ("failure", "starts", "num_attempts"),
    [
        (Failure(FailureKind.ERROR, "ValueError: no"), [0, 1], 1),
        (Failure(FailureKind.CRASH, "rank 0 ended with exit code 3"), [0, 0], 2),
        (Failure(FailureKind.CRASH, "rank 0 was killed by SIGKILL"), [0, 0, 0, 1, 1, 1, 2, 2, 2], 3),
    ],
)
def test_a_point_whose_first_attempts_fail_alike_is_given_up(monkeypatch, tmp_path, failure, starts, num_attempts):
    monkeypatch.setattr(
        local,
        "_LocalAttempt",
        lambda job, *_: SimpleNamespace(run=lambda: trial_result(job.spec, {}, failure=failure, attempts=job.attempt)),
    )
    study = a_study(space={}, baseline={}, num_repeats=3, max_retries=2)
    events = []
    local.LocalRunner(RunSettings(tmp_path, isolation="fresh"), ()).run(study, study.trials(), events.append)
    results = [event.result for event in events if isinstance(event, TrialEnded)]
    assert [event.spec.repeat for event in events if isinstance(event, TrialStarted)] == starts
    assert results[0].attempts == num_attempts and [r.spec for r in results] == list(study.trials())
    is_skipped = [r.failure.kind is FailureKind.SKIPPED for r in results]
    assert is_skipped == [repeat not in starts for repeat in range(3)]
    assert len([e for e in events if isinstance(e, Notice)]) == any(is_skipped)


def test_a_notice_of_the_fork_server_comes_before_the_first_trial(monkeypatch, tmp_path):
    client = SimpleNamespace(wait_until_ready=lambda: "a touched CUDA", close=lambda: None)
    monkeypatch.setattr(
        local, "ForkServer", SimpleNamespace(of=lambda _: SimpleNamespace(address="", close=lambda: None))
    )
    monkeypatch.setattr(local, "ForkClient", lambda _: client)
    monkeypatch.setattr(local, "_LocalAttempt", lambda job, *_: SimpleNamespace(run=lambda: trial_result(job.spec, {})))
    study, events = a_study(space={}, baseline={}, num_repeats=1), []
    with local.LocalRunner(RunSettings(tmp_path), ()) as runner:
        runner.run(study, study.trials(), events.append)
    assert events[0] == Notice("a touched CUDA") and isinstance(events[1], TrialStarted)
