"""Trials without Ray: their fork servers and ranks, and Ctrl-C."""

import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from stage import a_study

from raypar import choice
from raypar.errors import BrokeOff, StoreError
from raypar.run import local
from raypar.run.ranks import ForkServer, ForkServerLost, RankEnd
from raypar.run.runner import Notice, TrialEnded, TrialStarted
from raypar.study.study import Study
from raypar.study.trial import Failure, FailureKind, TrialState
from raypar.train.affinity import Core, host_cores
from raypar.train.job import RankOutcome, RunSettings
from raypar.workloads import WORKLOADS

DONE = RankEnd(RankOutcome())
KILLED = Failure(FailureKind.KILLED, "rank 0 was killed by SIGKILL")


class Process:
    """Stands in for a rank."""

    def __init__(self):
        self.is_killed = threading.Event()

    def kill(self):
        self.is_killed.set()


def played(monkeypatch, run):
    """Replace the ranks by `run`, which takes a job and a process and returns the rank's end."""
    monkeypatch.setattr(local, "start_rank", lambda job, turn, context, forks, listen: (Process(), context))
    monkeypatch.setattr(local, "supervise", lambda process, job, *_: run(job, process))
    monkeypatch.setattr(local, "await_end", lambda *_: 0)


def test_a_notice_of_the_fork_server_comes_once_before_the_first_trial(monkeypatch, tmp_path):
    client = SimpleNamespace(wait_until_ready=lambda: "a touched CUDA", close=lambda: None)
    monkeypatch.setattr(local, "ForkAgent", lambda _: SimpleNamespace(address=lambda: "there", close=lambda: None))
    monkeypatch.setattr(local, "ForkClient", lambda _: client)
    played(monkeypatch, lambda *_: DONE)
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


def test_a_killed_fork_server_is_replaced(monkeypatch, tmp_path, servers):
    def run(job, _):
        if job.attempt == 1:
            kill(servers[-1])
        fails = job.attempt == 1 and job.spec.repeat == 0  # the other ends as its server is killed
        return RankEnd(failure=KILLED) if fails else DONE

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


def test_a_trial_without_a_fork_server_is_retried(monkeypatch, tmp_path, servers):
    monkeypatch.setattr(local.LocalRunner, "_fork_address", lambda *_: str(tmp_path / "no server"))
    study, events = a_study(space={}, baseline={}, num_repeats=1, max_retries=1), []
    local.LocalRunner(RunSettings(tmp_path), host_cores()).run(study, study.trials(), events.append)
    result = events[-1].result
    assert result.attempts == 2 and result.failure.kind is FailureKind.GANG_LOST
    assert result.failure.message.startswith("no rank was started: the fork server")


def test_a_fork_server_that_never_starts_ends_the_study(monkeypatch, tmp_path, servers):
    def die():
        kill(servers[-1])
        raise ForkServerLost

    monkeypatch.setattr(local, "ForkClient", lambda _: SimpleNamespace(wait_until_ready=die, close=lambda: None))
    study = a_study(space={}, baseline={}, num_repeats=1)
    refused = pytest.raises(BrokeOff, match="imports extension and starts ranks ended 5 times in a row")
    with local.LocalRunner(RunSettings(tmp_path, preload=("extension",)), ()) as runner, refused:
        runner.run(study, study.trials(), [].append)
    assert len(servers) == 5


@pytest.fixture
def with_ctrl_c():
    """SIGINT raises KeyboardInterrupt, even where the parent ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("with_ctrl_c")
def test_ctrl_c_keeps_ended_trials_and_kills_the_running_one(monkeypatch, tmp_path):
    def run(job, process):
        if job.spec.repeat == 0:
            return DONE
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        assert process.is_killed.wait(60)
        return RankEnd(failure=KILLED, was_killed=True)

    played(monkeypatch, run)
    study, events = a_study(space={}, baseline={}, num_repeats=3, max_retries=1), []
    runner = local.LocalRunner(RunSettings(tmp_path, isolation="fresh", trial_timeout_s=3600.0), ())
    with pytest.raises(KeyboardInterrupt):
        runner.run(study, study.trials(), events.append)
    assert [(type(event), getattr(event, "result", event).spec.repeat) for event in events] == [
        (TrialStarted, 0),
        (TrialEnded, 0),
        (TrialStarted, 1),
    ]
    for timer in [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]:
        timer.join(60)
        assert not timer.is_alive()


WATCH = """
import os, sys

def watch():
    fd = os.open(PATH, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    sys.addaudithook(lambda event, args: event == "import" and os.write(fd, f"{args[0]}\\n".encode()))

os.register_at_fork(after_in_child=watch)
"""


@pytest.mark.parametrize("num_workers", [1, 2])
def test_the_second_trial_imports_nothing(tmp_path, num_workers):
    imported = tmp_path / "imported"
    (tmp_path / "watch.py").write_text(WATCH.replace("PATH", repr(str(imported))))
    preload = ("raypar.workloads.digits", "watch")
    settings, events = RunSettings(tmp_path, sys_path=(str(tmp_path),), preload=preload), []

    def listen(event):
        events.append(event)
        if isinstance(event, TrialStarted):
            imported.write_text("")

    config = {"epochs": 1, "num_samples": 64, "device": "cpu", "num_workers": num_workers}
    study = Study(workload=WORKLOADS["digits"], config=config, space={}, num_repeats=2, name="s")
    with local.LocalRunner(settings) as runner:
        runner.run(study, study.trials(), listen)
    assert [event.result.state for event in events if isinstance(event, TrialEnded)] == [TrialState.FINISHED] * 2
    assert imported.read_text().split() == []


TWO_CORES = (Core(0, 0, 0), Core(1, 0, 1))


def searched(monkeypatch, tmp_path, run, **changes):
    """Run a search of six trials, two at a time, with ranks replaced by `run`; return the results."""
    played(monkeypatch, run)
    fields = {"space": {"width": choice(4, 8)}, "baseline": {}, "num_trials": 6, "max_concurrent_trials": 2, **changes}
    events = []
    with local.LocalRunner(RunSettings(tmp_path, isolation="fresh"), TWO_CORES) as runner:
        runner.run(a_study(**fields), (), events.append)
    return [event.result for event in events if isinstance(event, TrialEnded)]


def test_a_search_runs_its_trials_at_a_time(monkeypatch, tmp_path):
    both = threading.Barrier(2)

    def run(*_):
        both.wait(60)  # fails unless another trial runs
        return DONE

    results = searched(monkeypatch, tmp_path, run)
    assert len({result.spec.identity for result in results}) == 6
    assert {result.state for result in results} == {TrialState.FINISHED}
    assert {result.conditions.num_beside for result in results} == {1}  # so that reports don't trust their times


def test_trials_of_a_search_never_share_cores(monkeypatch, tmp_path):
    lock = threading.Lock()

    def run(*_):
        assert lock.acquire(blocking=False)
        lock.release()
        return DONE

    results = searched(monkeypatch, tmp_path, run, config={"cpus_per_worker": 2})
    assert [result.state for result in results] == [TrialState.FINISHED] * 6


def test_an_error_of_the_listener_ends_a_search(monkeypatch, tmp_path):
    played(monkeypatch, lambda *_: DONE)
    fields = {"space": {"width": choice(4, 8)}, "baseline": {}, "num_trials": 6, "max_concurrent_trials": 2}

    def listen(event):
        if isinstance(event, TrialEnded):
            raise StoreError("no room")

    runner = local.LocalRunner(RunSettings(tmp_path, isolation="fresh"), TWO_CORES)
    with runner, pytest.raises(StoreError, match="no room"):
        runner.run(a_study(**fields), (), listen)
