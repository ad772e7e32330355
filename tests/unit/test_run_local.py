"""Trials without Ray, one after the other: which are started, retried and given up."""

import os
import signal
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from stage import a_study

from raypar.errors import BrokeOff
from raypar.run import local
from raypar.run.ranks import ForkClient, ForkServer, ForkServerLost, RankEnd, trial_result
from raypar.run.runner import Notice, TrialEnded, TrialStarted
from raypar.study.trial import Failure, FailureKind
from raypar.train.affinity import host_cores
from raypar.train.job import RankOutcome, RunSettings


@pytest.mark.parametrize(
    ("failure", "starts", "num_attempts"),
    [
        (Failure(FailureKind.ERROR, "ValueError: no"), [0, 1], 1),
        (Failure(FailureKind.CRASH, "rank 0 ended with exit code 3"), [0, 0], 2),
        (
            lambda n: Failure(FailureKind.CRASH, f"RuntimeError: DataLoader worker (pid {n}) exited unexpectedly"),
            [0, 0],
            2,
        ),
        (Failure(FailureKind.CRASH, "rank 0 was killed by SIGKILL"), [0, 0, 0, 1, 1, 1, 2, 2, 2], 3),
    ],
)
def test_a_point_whose_first_attempts_fail_alike_is_given_up(monkeypatch, tmp_path, failure, starts, num_attempts):
    def run(job, _):
        why = failure(job.attempt) if callable(failure) else failure
        return trial_result(job.spec, {}, failure=why, attempts=job.attempt)

    played(monkeypatch, run)
    study = a_study(space={}, baseline={}, num_repeats=3, max_retries=2)
    events = []
    local.LocalRunner(RunSettings(tmp_path, isolation="fresh"), ()).run(study, study.trials(), events.append)
    results = [event.result for event in events if isinstance(event, TrialEnded)]
    assert [event.spec.repeat for event in events if isinstance(event, TrialStarted)] == starts
    assert results[0].attempts == num_attempts and [r.spec for r in results] == list(study.trials())
    is_skipped = [r.failure.kind is FailureKind.SKIPPED for r in results]
    assert is_skipped == [repeat not in starts for repeat in range(3)]
    assert len([e for e in events if isinstance(e, Notice)]) == any(is_skipped)


def played(monkeypatch, run):
    """Replace the attempts by `run`, which gets a job and the address of the fork server."""
    monkeypatch.setattr(
        local,
        "_LocalAttempt",
        lambda job, metric, listener, address, cores: SimpleNamespace(run=partial(run, job, address)),
    )


def test_a_notice_of_the_fork_server_comes_before_the_first_trial_and_once(monkeypatch, tmp_path):
    client = SimpleNamespace(wait_until_ready=lambda: "a touched CUDA", close=lambda: None)
    monkeypatch.setattr(local, "ForkAgent", lambda _: SimpleNamespace(address=lambda: "", close=lambda: None))
    monkeypatch.setattr(local, "ForkClient", lambda _: client)
    played(monkeypatch, lambda job, _: trial_result(job.spec, {}))
    study, events = a_study(space={}, baseline={}, num_repeats=1), []
    with local.LocalRunner(RunSettings(tmp_path), ()) as runner:
        runner.run(study, study.trials(), events.append)
    assert events[0] == Notice("a touched CUDA") and isinstance(events[1], TrialStarted)
    assert events.count(events[0]) == 1


@pytest.fixture
def servers(monkeypatch):
    """The fork servers that were started, which import nothing."""
    started = []

    def start(revision):
        started.append(ForkServer(base_preload=()))
        return started[-1]

    monkeypatch.setattr(ForkServer, "of", start)
    return started


def kill(server):
    os.kill(server.pid, signal.SIGKILL)
    psutil.Process(server.pid).wait(60)


def test_a_fork_server_that_was_killed_in_or_between_trials_is_started_again(monkeypatch, tmp_path, servers):
    lost = Failure(FailureKind.CRASH, "rank 0 was killed by SIGKILL")

    def run(job, address):
        assert address == servers[-1].address
        ForkClient(address).close()
        if job.attempt == 1:
            kill(servers[-1])
        fails = job.attempt == 1 and job.spec.repeat == 0  # the other is over when its server is killed
        return trial_result(job.spec, {0: RankEnd(RankOutcome())}, failure=lost if fails else None)

    played(monkeypatch, run)
    study, events = a_study(space={}, baseline={}, num_repeats=3, max_retries=1), []
    with local.LocalRunner(RunSettings(tmp_path), ()) as runner:
        runner.run(study, study.trials(), events.append)
    assert [(e.spec.repeat, e.attempt) for e in events if isinstance(e, TrialStarted)] == [
        (0, 1),
        (0, 2),
        (1, 1),
        (2, 1),
    ]
    assert len(servers) == 3 and not any(Path(server.address).parent.exists() for server in servers)


def test_a_trial_whose_fork_server_ends_before_it_has_a_rank_is_tried_again(monkeypatch, tmp_path, servers):
    monkeypatch.setattr(local.LocalRunner, "_fork_address", lambda *_: str(tmp_path / "no server"))
    study, events = a_study(space={}, baseline={}, num_repeats=1, max_retries=1), []
    local.LocalRunner(RunSettings(tmp_path), host_cores()).run(study, study.trials(), events.append)
    result = events[-1].result
    assert result.attempts == 2 and result.failure.kind is FailureKind.GANG_LOST
    assert result.failure.message.startswith("no rank was started: the fork server")


def test_a_fork_server_that_never_is_ready_ends_the_study_with_a_message(monkeypatch, tmp_path, servers):
    def die():
        kill(servers[-1])
        raise ForkServerLost

    monkeypatch.setattr(local, "ForkClient", lambda _: SimpleNamespace(wait_until_ready=die, close=lambda: None))
    study = a_study(space={}, baseline={}, num_repeats=1)
    refused = pytest.raises(BrokeOff, match="imports extension and starts ranks ended 5 times in a row")
    with local.LocalRunner(RunSettings(tmp_path, preload=("extension",)), ()) as runner, refused:
        runner.run(study, study.trials(), [].append)
    assert len(servers) == 5
