"""All states of a run's trials, with simulated gangs and a simulated clock."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError
from ray.train import WorkerGroupError
from ray.train.v2._internal.exceptions import UserExceptionWithTraceback, WorkerHealthCheckFailedError
from results import make_result
from scheduled import cluster

from raypar.run import broker as module
from raypar.run import dispatcher
from raypar.run.agent import Ended, Moved, News, Ready, Reported
from raypar.run.dispatcher import (
    COME_BACK_S,
    CORES_POLL_S,
    GANG_START_S,
    LEASE_S,
    ArtifactPiece,
    DispatchConfig,
    Dispatcher,
)
from raypar.run.gang import loss_reason
from raypar.run.gang_pool import GangPool
from raypar.run.pool import MACHINE_LABEL, Gang, GangPolicy, Greeting, Pool
from raypar.run.ranks import RankEnd
from raypar.run.runner import (
    ClusterChanged,
    GangReady,
    GangStarting,
    Notice,
    OutOfTime,
    TrialEnded,
    TrialRetried,
    TrialStarted,
)
from raypar.run.scheduler import GangPhase, decide
from raypar.run.trials import TrialPhase
from raypar.study.trial import Failure, FailureKind, TrialState
from raypar.train.affinity import Core
from raypar.train.job import RankContext, RankOutcome, RunSettings
from raypar.train.position import Position

KILLED = Failure(FailureKind.KILLED, "rank 0 was killed by SIGKILL", 0)
HEALTH = WorkerHealthCheckFailedError("Worker info: …", ActorUnavailableError("it refused", None))
LOST = WorkerGroupError("[Rank 1 Error Snippet]: …", {0: HEALTH})
CLOCK = "raypar.run.dispatcher.time.monotonic"
FOUR_CPUS = cluster(4)
COMPANY = ("num_beside", "num_sharing", "num_sharing_network")
DONE = RankEnd(RankOutcome(train_time_s=1.0))


class PaperPool(GangPool):
    """A pool without Ray."""

    is_short_of_memory = may_grow = False

    def __init__(self, nodes):
        Pool.__init__(self, nodes, RunSettings(Path("/logs")), GangPolicy(True, 4))
        self.seen, self.requested, self.num_started = nodes, [], 0
        self.leaving = {}  # nodes that left on purpose, and how

    def departed(self, gang):
        return {node: self.leaving[node] for node in gang.nodes if node in self.leaving}

    def refresh(self):
        changed, self.seen = self.seen != self.nodes, self.nodes
        if changed:
            self.give_up_lost()
        return changed

    def request_nodes(self, placements):
        new = [placement for placement in placements if placement not in self.requested]
        self.requested = list(placements)
        return new

    def start(self, placement, nodes, on_end):
        self.num_started += 1
        return Pool.start(self, placement, nodes, on_end)


class Run:
    """A dispatcher with a pool and a clock. Times are seconds."""

    def __init__(
        self,
        specs=(),
        nodes=FOUR_CPUS,
        *,
        max_retries=1,
        in_lockstep=False,
        trial_timeout_s=None,
        num_cores=0,
        **settings,
    ):
        self.specs, self.pool = specs, PaperPool(nodes)
        self.now_s = 100.0
        self.near = frozenset()  # cores of the GPUs' NUMA node
        self.host_of = "m{0[1]}".format  # the machine whose cores a node has
        self.timers: dict[object, tuple[float, Callable[[], None]]] = {}  # when each is due
        settings = RunSettings(Path("/logs"), trial_timeout_s=trial_timeout_s, stop_grace_s=10.0, **settings)
        policy = GangPolicy(True, 4)
        self.config = DispatchConfig(b"", settings, policy, max_retries, in_lockstep, num_cores=num_cores)
        self.it = Dispatcher(self.config, self.pool, specs, call_later=self._call_later, on_change=lambda: None)
        self.it.dispatch()

    def _call_later(self, delay_s, call):
        key = object()
        self.timers[key] = (self.now_s + delay_s, call)
        return SimpleNamespace(cancel=lambda: self.timers.pop(key, None))

    def wait(self, seconds):
        self.now_s += seconds
        for key in [key for key, (due_s, _) in self.timers.items() if due_s <= self.now_s]:
            self.timers.pop(key)[1]()

    def define(self, *uids):
        for uid in uids:
            self.it.define(uid, None)

    def workers_come_up(self):
        """Make all starting gangs ready for their first trial."""
        for gang in [gang for gang in self.pool.gangs.values() if gang.phase is GangPhase.STARTING]:
            self.comes_up(gang)

    def comes_up(self, gang):
        size, on = gang.placement.num_workers, [n for n, count in gang.nodes.items() for _ in range(count)]
        for rank, node in enumerate(on):
            cores = tuple(Core(n, 0, n) for n in range(4))
            self.it.worker_is_up(
                gang.id,
                Greeting(node, self.host_of(node), node, RankContext(rank, size, rank, size, 0), cores, self.near),
            )
        self.workers_return(gang)

    def workers_return(self, gang):
        for rank in range(gang.placement.num_workers):
            self.it.worker_is_ready(gang.id, rank, ("host", 1) if rank == 0 else None)

    def running(self, uid):
        assert self.it.trials.get(uid).phase is TrialPhase.RUNNING
        return self.it.trials.get(uid).attempt

    def end(self, uid, *ends):
        """End the ranks in order, and make the gang ready for the next trial."""
        attempt = self.running(uid)
        for rank, end in enumerate(ends or [DONE] * attempt.gang.placement.num_workers):
            self.it.rank_ended(attempt, rank, end)
        self.workers_return(attempt.gang)

    def lose_gang(self, gang, error=LOST):
        del self.pool.gangs[gang.id]
        self.it.gang_ended(gang, loss_reason(error, gang.hostnames), str(error or ""))

    def of(self, kind):
        return [event for _, event in self.it.events.take(0) if isinstance(event, kind)]

    @property
    def results(self):
        return [event.result for event in self.of(TrialEnded)]

    @property
    def started(self):
        return [event.spec for event in self.of(TrialStarted)]


def test_a_notice_from_several_workers_is_shown_once():
    run = Run()
    for text in ("a touched CUDA", "a touched CUDA", "b touched CUDA"):
        run.it.notify(text)
    assert [notice.text for notice in run.of(Notice)] == ["a touched CUDA", "b touched CUDA"]


def specs(*num_workers, **config):
    points = [{"num_workers": count, "lr": i / 10, **config} for i, count in enumerate(num_workers)]
    return [make_result(point, 0, 1.0).spec for point in points]


def one_running(num_workers=1, stop_on_nan=True, **options):
    run = Run(specs(num_workers, stop_on_nan=stop_on_nan), **options)
    run.define("a")
    run.workers_come_up()
    return run


def test_trials_start_in_order_once_a_tune_trial_is_bound_to_them():
    trials = specs(1, 1, 1)
    run = Run(trials, cluster(4, 4))
    assert [gang.nodes for gang in run.pool.gangs.values()] == [{"n1": 1}, {"n0": 1}]  # before Tune has a trial
    run.workers_come_up()
    assert len(run.of(GangStarting)) == len(run.of(GangReady)) == 2 and not run.started
    run.define("a")
    assert run.started == trials[:1]
    run.define("b", "c")
    assert run.started == trials[:2]
    run.end("b")
    assert run.started == trials and run.running("c").conditions.nth_in_gang == 2
    assert [r.spec for r in run.results] == [trials[1]]
    assert run.results[0].state is TrialState.FINISHED and run.results[0].conditions.num_beside == 1


def test_trials_start_before_tunes_if_they_leave_the_driver_cores():
    trials = specs(1, 1, 1)
    run = Run(trials, num_cores=4)
    run.workers_come_up()
    assert run.started == trials[:1] and not run.it.trials.bound()
    run.define("a")  # Tune has begun its first trial
    assert run.it.trials.of_tune("a") is run.it.trials.get("ahead-1")
    run.end("ahead-1")
    assert run.started == trials[:2]  # while the driver stores the first result
    run.end("ahead-2")
    run.end("ahead-3")
    assert [result.spec for result in run.results] == trials
    assert run.it.release("a", let_finish=False) == "ahead-1" and run.it.trials.of_tune("a") is None
    run.define("b", "c")
    assert run.it.trials.of_tune("b").result is run.results[1]
    assert [run.it.release(each, let_finish=False) for each in "bc"] == ["ahead-2", "ahead-3"]
    assert not run.it.trials.begun()


def test_trials_added_later_start_ahead_as_well():
    first, second = specs(1, 1)
    run = Run([first], num_cores=4)
    run.workers_come_up()
    run.end("ahead-1")
    run.define("a")
    run.it.release("a", let_finish=False)
    run.it.add([second])
    assert run.started == [first, second]


def test_a_trial_on_all_cores_waits_for_the_driver():
    trials = specs(4, 4)
    run = Run(trials, num_cores=4)
    run.workers_come_up()
    assert not run.started
    run.define("a")
    run.end("a")
    assert run.started == trials[:1]
    run.define("b")
    assert run.started == trials


def test_a_trial_that_started_ahead_is_retried_and_stopped_like_others():
    run = Run(specs(1, 1), num_cores=4)
    run.workers_come_up()
    run.end("ahead-1", RankEnd(failure=KILLED))
    assert len(run.of(TrialRetried)) == 1 and run.running("ahead-1").number == 2
    run.it.close()
    assert run.running("ahead-1").kill_requested
    run.end("ahead-1", RankEnd(failure=KILLED, was_killed=True))
    assert len(run.results) == 1 and len(run.started) == 2


@pytest.mark.parametrize(("num_spread", "num_sharing_network"), [(1, 0), (2, 1)])
def test_trials_over_several_machines_share_the_network_with_each_other(num_spread, num_sharing_network):
    run = Run([*specs(*[2] * num_spread, nodes=2), *specs(1)], cluster(4, 4, 4, 4, 4))
    run.workers_come_up()
    run.define(*"abc"[: num_spread + 1])
    spread, single = run.running("a").conditions, run.running("abc"[num_spread]).conditions
    assert [getattr(spread, key) for key in COMPANY] == [num_spread, 0, num_sharing_network]
    assert [getattr(single, key) for key in COMPANY] == [num_spread, 0, 0]


def test_expected_gang_start_comes_from_gangs_started_after_the_first(monkeypatch):
    run = Run(specs(1, 1), cluster(1, 1))
    monkeypatch.setattr(CLOCK, lambda: run.now_s)
    for gang in run.pool.gangs.values():
        gang.started_s = run.now_s
    run.now_s += 60.0  # the nodes' fork servers were starting as well
    run.workers_come_up()
    assert run.it.durations.gang_start_s == GANG_START_S
    for gang in list(run.pool.gangs.values()):
        run.lose_gang(gang)
    for gang in run.pool.gangs.values():
        gang.started_s = run.now_s + 1.0
    run.now_s += 4.0
    run.workers_come_up()
    assert run.it.durations.gang_start_s == 3.0
    assert [event.seconds for event in run.of(GangReady)] == [60.0, 60.0, 3.0, 3.0]


@pytest.mark.parametrize(
    ("near", "allowed", "cores"),
    [
        (frozenset(), None, {0: (0,), 1: (1,)}),
        (frozenset({2, 3}), None, {0: (2,), 1: (3,)}),
        (frozenset(), [Core(1, 0, 1), Core(3, 0, 3)], {0: (1,), 1: (3,)}),
    ],
    ids=["any", "near the GPU", "of the study"],
)
def test_a_turn_has_the_trial_and_the_cores_of_each_rank(near, allowed, cores):
    run = Run(specs(2))
    run.near, run.pool._policy = near, GangPolicy(True, 4, cores=allowed)
    run.define("a")
    run.workers_come_up()
    turn = run.running("a").gang.turn
    assert (turn.spec, turn.attempt, turn.uid) == (run.specs[0], 1, "a")
    assert (turn.master_address, turn.cores) == (("host", 1), cores)


def test_a_trial_that_can_never_run_is_refused_at_its_turn():
    trials = specs(1, 9, 9)
    run = Run(trials)
    run.define("a", "b")
    assert not run.results  # the first trial waits for its gang
    run.workers_come_up()
    assert run.started == trials[:1]
    (result,) = run.results
    assert (result.spec, result.state, result.attempts) == (trials[1], TrialState.FAILED, 1)
    assert result.failure == Failure(FailureKind.REFUSED, "needs 9 CPUs in one gang, the cluster has 4")


def test_a_trial_on_missing_cores_is_refused():
    run = Run(specs(1, cpu_affinity=(1, 4000)))
    run.define("a")
    run.workers_come_up()
    assert run.results[0].failure == Failure(FailureKind.REFUSED, "there is no core 4000: the machine's are 0-3")


def test_a_trial_waits_a_while_for_lost_nodes(monkeypatch):
    run = Run(specs(4))
    monkeypatch.setattr(CLOCK, lambda: run.now_s)
    run.define("a")
    for nodes, seconds in [(cluster(2), COME_BACK_S), (cluster(2, 4), 0.0), (cluster(2), COME_BACK_S)]:
        run.pool.nodes = nodes
        run.wait(seconds)
        run.it.check()
        assert not run.results
    run.wait(1.0)
    run.it.check()
    reason = "nodes were lost: needs 4 CPUs in one gang, the cluster has 2"
    assert run.results[0].failure == Failure(FailureKind.GANG_LOST, reason)
    assert [(e.num_nodes, e.num_slots) for e in run.of(ClusterChanged)] == [(1, 1), (2, 2), (1, 1)]


def test_nodes_are_requested_from_a_growing_cluster_while_needed():
    run = Run()
    run.pool.may_grow = True
    run.it.define("a", specs(9)[0])
    run.it.dispatch()
    assert len(run.of(Notice)) == 1 and run.pool.requested == [specs(9)[0].placement]
    run.pool.nodes = cluster(4, 16)
    run.it.check()
    assert not run.pool.requested and not run.results


UNAVAILABLE = str(ActorUnavailableError("it refused", None))
REASON = f"its gang was lost: n0: ActorUnavailableError: {UNAVAILABLE}"
GANG_LOST = Failure(FailureKind.GANG_LOST, REASON, None, str(LOST))


@pytest.mark.parametrize("failure", [KILLED, GANG_LOST])
def test_a_crashed_trial_is_retried_first_up_to_its_last_attempt(failure):
    run = Run(specs(1, 1), max_retries=1)
    run.define("a", "b")
    for number in (1, 2):
        run.workers_come_up()
        attempt = run.running("a")
        run.it.report(attempt, {"epoch": 1})
        assert attempt.number == number
        if failure is GANG_LOST:
            run.lose_gang(attempt.gang)
        else:
            run.end("a", RankEnd(failure=KILLED))
        assert attempt.is_over
    assert [event.spec for event in run.of(TrialRetried)] == [run.specs[0]]
    result = run.results[0]
    assert (result.spec, result.attempts, len(result.reports), result.failure) == (run.specs[0], 2, 1, failure)
    run.workers_come_up()
    assert run.running("b").number == 1


PEER_LOST = Failure(FailureKind.PEER_LOST, "RuntimeError: gloo: Connection closed by peer", 0, "its traceback")


@pytest.mark.parametrize("failure", [GANG_LOST, KILLED, PEER_LOST])
def test_preempted_attempts_are_retried_without_counting_as_failures(failure):
    run = Run(specs(1), max_retries=1)
    run.define("a")

    def lose(*, with_notice):
        run.workers_come_up()
        run.pool.leaving = {"n0": "was preempted"} if with_notice else {}
        gang = run.running("a").gang
        if failure is GANG_LOST:
            run.lose_gang(gang)
        else:
            run.end("a", RankEnd(failure=failure))

    for with_notice in (True, False, True, True):
        lose(with_notice=with_notice)
    assert [event.reason for event in run.of(TrialRetried)] == [
        *("node n0 was preempted", failure.message, "node n0 was preempted", "node n0 was preempted")
    ]
    run.workers_come_up()
    run.end("a")
    result = run.results[0]
    assert (result.attempts, result.failure, result.state) == (5, None, TrialState.FINISHED)
    assert result.conditions.preempted == ("node n0 was preempted",) * 3


def test_failures_count_beside_preemptions():
    run = Run(specs(1), max_retries=1)
    run.define("a")
    for leaving in ({"n0": "was preempted"}, {}, {"n0": "was stopped"}, {}):
        run.workers_come_up()
        run.pool.leaving = leaving
        run.end("a", RankEnd(failure=KILLED))
    assert len(run.of(TrialRetried)) == 3
    assert (run.results[0].failure, run.results[0].attempts) == (KILLED, 4)


def test_a_trial_is_not_preempted_without_end():
    run = Run(specs(1), max_retries=1)
    run.define("a")
    run.pool.leaving = {"n0": "was preempted"}
    most = FailureKind.PREEMPTED.traits.own_retries
    for _ in range(most + 1):
        run.workers_come_up()
        run.end("a", RankEnd(failure=KILLED))
    details = "rank 0 was killed by SIGKILL"
    assert run.results[0].failure == Failure(FailureKind.PREEMPTED, "node n0 was preempted", 0, details)
    assert run.results[0].attempts == most + 1


@pytest.mark.parametrize("kind", [FailureKind.ERROR, FailureKind.CRASH, FailureKind.HUNG, FailureKind.OUT_OF_MEMORY])
def test_what_a_node_that_leaves_does_not_explain_stays_a_failure(kind):
    run = Run(specs(1), max_retries=0)
    run.define("a")
    run.workers_come_up()
    run.pool.leaving = {"n0": "was preempted"}
    failure = Failure(kind, "no", 0)
    run.end("a", RankEnd(failure=failure))
    assert run.results[0].failure == failure and not run.results[0].conditions.preempted


def test_a_gang_on_a_node_that_leaves_ends_with_its_trial_and_takes_no_other():
    run = Run(specs(1, 1, 1), cluster(4, 4))
    run.define("a", "b", "c")
    run.workers_come_up()
    first, second = run.running("a").gang, run.running("b").gang
    leaving = run.pool.nodes[[node.id for node in run.pool.nodes].index(*first.nodes)]
    run.pool.nodes = tuple(node for node in run.pool.nodes if node is not leaving)
    run.it.check()
    assert run.running("a").gang is first  # goes on while the node lives
    run.end("a")
    assert first.phase is GangPhase.CLOSING and len(run.started) == 2
    run.end("b")
    assert run.running("c").gang is second
    assert [(e.num_nodes, e.num_slots) for e in run.of(ClusterChanged)] == [(1, 1)]


ECC = Failure(FailureKind.DEVICE, "AcceleratorError: CUDA error: uncorrectable ECC error encountered", 1)


def test_after_a_gpu_failure_a_trial_is_retried_on_another_machine_if_one_can_hold_it():
    run = Run(specs(2, 2), cluster(2, 2), max_retries=2)
    run.define("a", "b")
    run.workers_come_up()
    first, second = run.running("a").gang, run.running("b").gang
    run.end("a", RankEnd(), RankEnd(failure=ECC))
    assert first.phase is GangPhase.IDLE and run.it.trials.get("a").phase is TrialPhase.QUEUED
    run.end("b")
    assert run.running("a").gang is second
    run.end("a", RankEnd(), RankEnd(failure=ECC))
    run.workers_come_up()
    assert run.running("a").gang in (first, second)  # no other machine is left
    run.end("a")
    assert run.results[-1].attempts == 3 and len(run.of(TrialRetried)) == 2


@pytest.mark.parametrize(("rank", "nodes"), [(0, {"n1": 1, "n2": 1}), (1, {"n0": 1, "n2": 1})])
def test_after_a_gpu_failure_in_a_gang_only_the_failed_machine_is_avoided(rank, nodes):
    run = Run(specs(2, nodes=2), cluster(1, 1))
    run.define("a")
    run.workers_come_up()
    gang = run.running("a").gang
    assert {gang.workers[i].node_id for i in (0, 1)} == {"n0", "n1"}
    machine = gang.workers[rank].node_id
    run.pool.nodes = cluster(1, 1, 1)
    run.end("a", *(RankEnd(failure=replace(ECC, rank=i)) if i == rank else RankEnd() for i in (0, 1)))
    run.workers_come_up()
    again = run.running("a").gang
    assert machine not in again.nodes and set(again.nodes) == set(nodes)


def test_a_trial_waits_for_cores_of_another_study_without_using_an_attempt():
    run = one_running(num_workers=2, nodes=cluster(2))
    gang, other = run.running("a").gang, "study `b` (process 7)"
    for _ in range(2):
        run.end("a", RankEnd(cores_held_by=other), RankEnd(failure=KILLED, was_killed=True))
        assert gang.turn is None and run.it.trials.get("a").phase is TrialPhase.QUEUED
        run.it.check()
        assert gang.turn is None
        run.wait(CORES_POLL_S)
        assert run.running("a").number == 1 and gang.turn.cores == {0: (0,), 1: (1,)}
    assert [event.text for event in run.of(Notice)] == [f"a trial waits for cores: {other} on n0"]
    run.end("a")
    assert (run.results[0].attempts, run.results[0].state) == (1, TrialState.FINISHED)
    assert not run.of(TrialRetried)


def test_a_trial_stopped_while_it_waits_for_cores_is_over():
    run = one_running()
    run.it.release("a", let_finish=False)
    run.end("a", RankEnd(cores_held_by="study `b` (process 7)"))
    assert run.results[0].state is TrialState.FAILED and not run.of(Notice)


def test_a_run_ends_when_no_further_trial_ends_before_its_machines_are_needed_back(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("raypar.run.time_limit.time.time", lambda: now[0])
    trials = [make_result({"num_workers": 1}, repeat, 1.0).spec for repeat in range(2)]
    run = Run(trials, ends_at=1030.0, expected_s={trials[0].point_name: 31.0})
    assert [event.left_s for event in run.of(OutOfTime)] == [30.0] and not run.pool.gangs
    run.it.check()
    assert len(run.of(OutOfTime)) == 1
    run = Run(trials, ends_at=1030.0)  # unknown durations
    run.define("a", "b")
    run.workers_come_up()
    now[0] = 1031.0
    run.it.check()
    assert not run.of(OutOfTime)  # one is running
    run.end("a")
    assert run.started == trials[:1] and len(run.of(OutOfTime)) == 1


def test_workers_in_two_pods_of_a_machine_get_different_cores():
    run = Run(specs(2, 1), cluster(1, 1))
    run.host_of = lambda node: "one machine"
    run.define("a", "b")
    run.workers_come_up()
    gang = run.running("a").gang
    assert set(gang.nodes) == {"n0", "n1"} and gang.turn.cores == {0: (0,), 1: (1,)}


def test_on_a_cluster_the_first_rank_of_each_machine_locks_cores_for_all():
    run = one_running(num_workers=3, nodes=cluster(2, 1))
    gang, pool = run.running("a").gang, run.pool
    assert pool.to_lock(gang, gang.turn.cores) == {}  # the driver has locked its own machine
    pool._policy = GangPolicy(False, 4)
    assert [gang.hosts[rank] for rank in range(3)] == ["m0", "m0", "m1"]
    assert pool.to_lock(gang, None) == {0: (0, 1, 2, 3), 2: (0, 1, 2, 3)}
    assert pool.to_lock(gang, gang.turn.cores) == {0: (0, 1), 2: (0,)}
    assert pool.to_lock(gang, {}) == {0: (), 2: ()}
    pool.nodes = [replace(node, labels={MACHINE_LABEL: node.machine}) for node in pool.nodes]
    assert pool.to_lock(gang, gang.turn.cores) == {}


def test_the_reason_of_a_lost_gang_names_every_node():
    killed = "The actor died unexpectedly.\n\tclass_name: W\n\tpid: 7\nIts process has died.\n" + "Exit detail. " * 60
    died = WorkerHealthCheckFailedError("Worker info: …", RayActorError(None, killed))
    own = UserExceptionWithTraceback(RuntimeError("the fork server has ended"), "Traceback …")
    error = WorkerGroupError("…", {0: own, 1: died, 2: died, 3: died})
    whole = f"RayActorError: The actor died unexpectedly. Its process has died. {'Exit detail. ' * 60}".strip()
    nodes = {0: "node0", 1: "node1", 2: "node2", 3: "node2"}
    assert loss_reason(error, nodes) == f"node0: RuntimeError: the fork server has ended; node1, node2: {whole}"
    assert loss_reason(error, {}).startswith("a node: RuntimeError: ")
    assert loss_reason(OSError("no\nspace"), {}) == "OSError: no space"
    assert loss_reason(None, {}) == "its workers have left"


def test_an_error_in_the_code_is_not_retried_and_kills_the_peers():
    run = one_running(2)
    attempt, error = run.running("a"), Failure(FailureKind.ERROR, "ValueError: no", 1)
    run.it.rank_ended(attempt, 1, RankEnd(failure=error))
    assert attempt.kill_requested and not run.results  # they may hang in a collective
    run.it.rank_ended(attempt, 0, RankEnd(failure=KILLED, was_killed=True))
    assert run.results[0].failure == error and not run.of(TrialRetried)
    assert run.it.trials.attempt("a", 1) is None  # late messages are ignored


def test_a_gang_that_never_started_fails_its_trial_unless_it_was_closed():
    run = Run(specs(1), max_retries=1)
    run.define("a")
    (gang,) = run.pool.gangs.values()
    gang.close()
    run.lose_gang(gang)
    assert not run.of(TrialRetried) and run.pool.num_started == 2
    for _ in range(2):
        (gang,) = run.pool.gangs.values()
        run.lose_gang(gang, OSError("no"))
    assert run.results[0].failure == Failure(FailureKind.GANG_LOST, "its gang did not start: OSError: no", None, "no")
    assert run.results[0].attempts == 2 and not run.pool.gangs


@pytest.mark.parametrize("num_up", [0, 1])
def test_a_gang_starting_on_a_lost_node_delays_no_trial(num_up, monkeypatch):
    freed = []
    monkeypatch.setattr("ray.util.remove_placement_group", freed.append)
    run = Run(specs(2), cluster(1, 1, 1), max_retries=0)
    run.define("a")
    (lost,) = run.pool.gangs.values()
    gone, *others = lost.nodes
    for node in others[:num_up]:
        run.it.worker_is_up(
            lost.id, Greeting(node, "", node, RankContext(1, 2, 0, 1, 1), (), placement_group="its group")
        )
    run.pool.nodes = [node for node in run.pool.nodes if node.id != gone]
    run.it.check()
    assert lost.phase is GangPhase.CLOSING and freed == ["its group"] * num_up
    _, new = run.pool.gangs.values()
    assert gone not in new.nodes
    run.comes_up(new)
    assert run.it.trials.get("a").phase is TrialPhase.RUNNING
    run.lose_gang(lost, OSError("no such node"))  # a minute later
    run.end("a")
    assert [result.state for result in run.results] == [TrialState.FINISHED] and not run.of(TrialRetried)


@pytest.mark.parametrize(("error", "is_closing"), [(LOST, False), (LOST, True), (None, True)])
def test_a_lost_gang_frees_its_place_even_while_it_closes(error, is_closing, monkeypatch):
    freed = []
    monkeypatch.setattr("ray.util.remove_placement_group", freed.append)
    run = one_running()
    gang = run.running("a").gang
    gang.workers[0] = replace(gang.workers[0], placement_group="its group")
    gang.is_closing = is_closing
    run.pool._ended(gang, error, run.it.gang_ended)
    assert freed == (["its group"] if error else []) and gang.id not in run.pool.gangs


def test_a_nodes_dead_agent_is_replaced_once_for_all_workers(monkeypatch):
    async def die():
        await asyncio.sleep(0)  # both workers have asked it
        raise ActorDiedError

    async def answer():
        return "new server"

    agents = [SimpleNamespace(address=SimpleNamespace(remote=call)) for call in (die, answer)]
    actor_class = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda _: agents.pop(0)))
    monkeypatch.setattr("ray.remote", lambda **_: lambda _: actor_class)
    run = Run(specs(2))
    run.pool._agents = {}
    (gang_id,) = run.pool.gangs
    greetings = [Greeting("0" * 56, "m0", "n0", RankContext(rank, 2, rank, 2, 0), ()) for rank in range(2)]

    async def addresses():
        return await asyncio.gather(*(run.pool.fork_address(gang_id, greeting) for greeting in greetings))

    assert asyncio.run(addresses()) == ["new server"] * 2 and not agents


def test_a_deadlocked_trial_is_killed_and_not_retried():
    run = one_running(num_workers=2)
    attempt = run.running("a")
    run.it.note_position(attempt, 1, Position({"0": 10}, is_out=True))
    assert not attempt.kill_requested
    run.it.note_position(attempt, 0, Position({"0": 11}, stands_s=20.0, operation="backward"))
    assert attempt.kill_requested
    killed = RankEnd(failure=KILLED, was_killed=True)
    run.end("a", killed, killed)
    (result,) = run.results
    assert result.failure.kind is FailureKind.ERROR and result.failure.log_path.endswith("attempt1-rank0.log")
    assert result.failure.message.startswith("uneven numbers of batches per rank: rank 0 in backward waits for rank 1")


def test_a_connection_lost_to_a_finished_rank_is_not_retried():
    run = one_running(num_workers=2)
    lost = Failure(FailureKind.PEER_LOST, "RuntimeError: Connection closed by peer", 1)
    left = RankEnd(RankOutcome(), position=Position({"0": 20}, is_out=True, has_left=True))
    run.end("a", left, RankEnd(failure=lost, position=Position({"0": 21})))
    assert run.results[0].failure.message.startswith("uneven numbers of batches per rank: rank 1 was still in a step")
    assert not run.of(TrialRetried)


def test_a_trial_over_its_time_limit_is_killed_as_hung():
    run = one_running(trial_timeout_s=5.0, max_retries=0)
    attempt = run.running("a")
    for is_killed in (False, True):
        run.wait(4.9)
        assert attempt.kill_requested is is_killed
    assert attempt.hangs
    run.end("a", RankEnd(failure=replace(KILLED, traceback="NCCL's RAS, …"), was_killed=True))
    log = f"/logs/{run.specs[0].identity}/attempt1-rank0.log"
    # With the end of the log, where NCCL says which ranks wait.
    assert run.results[0].failure == Failure(FailureKind.HUNG, "took longer than 5 s", None, "NCCL's RAS, …", log)


def test_a_trial_that_is_killed_for_a_failure_does_not_hang():
    run = one_running(num_workers=2, trial_timeout_s=5.0, max_retries=0)
    attempt = run.running("a")
    run.it.rank_ended(attempt, 1, RankEnd(failure=KILLED))
    run.wait(6.0)
    assert attempt.kill_requested and not attempt.hangs


def test_a_stopped_trial_ends_at_its_next_report_or_is_killed():
    run = one_running()
    attempt = run.running("a")
    assert attempt.continues(0)
    run.it.release("a", let_finish=False)
    assert attempt.continues(0)  # every rank gets the same answer
    assert not attempt.continues(1)
    for is_killed in (False, True):
        run.wait(9.9)
        assert attempt.kill_requested is is_killed
    run.end("a", RankEnd(RankOutcome(stopped=True), failure=KILLED, was_killed=True))
    assert (run.results[0].state, run.results[0].failure) == (TrialState.STOPPED, None)
    assert run.it.trials.get("a") is None and run.of(TrialRetried) == []


@pytest.mark.parametrize("end", ["timeout", "stop"])
def test_a_trained_trial_is_not_killed_while_it_sends_artifacts(end):
    run = one_running(2, trial_timeout_s=5.0, max_retries=0)
    attempt = run.running("a")
    run.it.rank_ended(attempt, 1, DONE)
    run.it.send(attempt, ["reference"])
    if end == "stop":
        run.it.release("a", let_finish=False)
    run.wait(100.0)
    assert attempt.takes_artifacts and not run.results
    run.it.rank_ended(attempt, 0, DONE)
    assert run.results[0].state is TrialState.FINISHED
    kinds = [type(event) for _, event in run.it.events.take(0)]
    assert kinds[-2:] == [ArtifactPiece, TrialEnded]


def test_artifacts_of_a_failing_trial_are_not_accepted():
    run = one_running(2, trial_timeout_s=5.0, max_retries=0)
    attempt = run.running("a")
    run.it.send(attempt, ["reference"])
    run.wait(5.0)  # rank 1 hangs
    assert attempt.kill_requested and not attempt.takes_artifacts


def test_artifacts_that_the_driver_cant_store_cost_one_notice_and_no_result():
    run = one_running()
    attempt = run.running("a")
    for _ in range(2):
        run.it.send(attempt, ["reference"])
    for problem in ("OSError: no space", "ValueError: no further pieces are accepted"):
        run.it.piece_taken(attempt, problem)
    assert not attempt.takes_artifacts and attempt.artifacts.num_pieces == 0
    run.end("a")
    (notice,) = run.of(Notice)
    (result,) = run.results
    folder = f"/logs/{result.spec.identity}/artifacts"
    text = f"its artifacts were not stored, OSError: no space; they are in {folder} on n0"
    assert notice.text == f"{result.spec.label}: {text}"
    assert result.state is TrialState.FINISHED


def broker_of(run):
    """Return a broker over `run`, in the running event loop."""
    broker = module.Broker(run.config)
    broker._dispatcher, broker._pool, run.it._on_change = run.it, run.pool, broker._notify
    return broker


async def settled(task):
    """Return whether a task has ended once the event loop has run what was ready."""
    for _ in range(5):
        await asyncio.sleep(0)
    return task.done()


def test_a_worker_without_a_fork_server_waits_for_the_ends_of_its_peers(monkeypatch):
    monkeypatch.setattr(module, "_import_trainer", lambda: None)
    run = one_running(2)
    gang = run.running("a").gang

    async def end_one_after_the_other():
        broker = broker_of(run)
        killed = RankEnd(failure=KILLED)
        await broker.accept(gang.id, [Ended(1, 0, killed)])
        wait = asyncio.ensure_future(broker.wait_until_over(gang.id, 1))
        assert not await settled(wait)
        await broker.accept(gang.id, [Ended(1, 1, killed)])
        assert await settled(wait)
        await broker.wait_until_over(gang.id, 7)  # a trial that is not known

    asyncio.run(end_one_after_the_other())


def test_the_end_of_a_trial_and_the_next_one_take_one_decision(monkeypatch):
    monkeypatch.setattr(module, "_import_trainer", lambda: None)
    run, decisions = Run(specs(2, 2)), []
    run.define("a", "b")
    run.workers_come_up()
    (gang,) = run.pool.gangs.values()

    def counted(*args, **kwargs):
        decisions.append(args)
        return decide(*args, **kwargs)

    async def next_trial():
        broker = broker_of(run)
        await broker.accept(gang.id, [Ended(1, 1, DONE), Ready(1)])
        assert not decisions and not run.results  # the gang is not complete
        await broker.accept(gang.id, [Ended(1, 0, DONE), Ready(0, ("host", 1))])
        return await broker.news(gang.id, range(1, 2), News(1))

    monkeypatch.setattr(dispatcher, "decide", counted)
    news = asyncio.run(next_trial())
    assert (news.number, news.turn.spec) == (2, run.specs[1]) and len(run.results) == 1 and len(decisions) == 1
    assert news.turn.cores == {1: gang.turn.cores[1]}  # of the agent's ranks only


def test_news_of_a_trial_come_when_there_are_some(monkeypatch):
    monkeypatch.setattr(module, "_import_trainer", lambda: None)
    run = one_running(2)
    gang, attempt = run.running("a").gang, run.running("a")
    moves = Position({"0": 5})

    async def told(broker, known, *messages):
        """Return the news that these messages make; None: there are none."""
        asked = asyncio.ensure_future(broker.news(gang.id, range(2), known))
        assert not await settled(asked)
        await broker.accept(gang.id, messages)
        return asked.result() if await settled(asked) else asked.cancel() and None

    async def follow():
        broker = broker_of(run)
        assert (await broker.news(gang.id, range(2), News(0))).turn == gang.turn
        assert await told(broker, News(1), Reported(1, 1, 0, None, moves), Moved(1, 1, moves)) is None
        assert (await told(broker, News(1), Reported(1, 0, 0, {"epoch": 1}, moves))).verdicts == (True,)
        known = News(1, verdicts=(True,))
        assert await told(broker, known, Ended(1, 0, DONE)) is None
        news = await told(broker, known, Reported(1, 1, 1, None, moves))  # rank 0 makes no such report
        assert news == News(1, rest=True) and not attempt.kill_requested
        assert (
            await told(broker, replace(known, rest=True), Ended(2, 1, DONE), Ended(1, 1, RankEnd(failure=ECC)))
        ) is None
        assert run.it.trials.get("a").phase is TrialPhase.QUEUED  # all its ranks have ended
        gang.close()
        assert (await broker.news(gang.id, range(2), known)).is_closing

    asyncio.run(follow())


def test_a_worker_sends_the_next_piece_after_the_driver_has_taken_one(monkeypatch):
    monkeypatch.setattr(module, "_import_trainer", lambda: None)
    run = one_running()

    async def send_all():
        broker = broker_of(run)

        async def is_sent(piece):
            sent = asyncio.ensure_future(broker.send("a", 1, piece))
            return sent, await settled(sent)

        for piece in range(module.MAX_PIECES - 1):
            assert await broker.send("a", 1, [piece])
        sent, is_done = await is_sent(["one too many"])
        assert not is_done
        await broker.piece_taken("a", 1, "")
        assert await settled(sent) and sent.result()
        end, is_done = await is_sent([])
        for _ in range(module.MAX_PIECES):
            assert not await settled(end)
            await broker.piece_taken("a", 1, "")
        assert await settled(end) and end.result()
        sent, _ = await is_sent(["of the next"])
        await broker.piece_taken("a", 1, "OSError: no space")
        assert not await broker.send("a", 1, ["more"]) and not await broker.send("b", 1, ["of another"])

    asyncio.run(send_all())
    assert run.it.trials.attempt("a", 1).artifacts.num_pieces == 0


@pytest.mark.parametrize("in_lockstep", [False, True])
def test_a_trial_with_a_loss_that_is_not_finite_stops_on_every_rank(in_lockstep):
    run = one_running(2, in_lockstep=in_lockstep)
    attempt = run.running("a")
    run.it.report(attempt, {"train_loss": 1.0})
    attempt.trial.follow(1)
    assert attempt.verdicts(0, in_lockstep) == (True,)
    assert not attempt.is_reported(1)  # rank 1 is there first, and waits for rank 0
    run.it.report(attempt, {"train_loss": math.nan})
    assert attempt.is_reported(1) and attempt.verdicts(0, in_lockstep) == (True, False)
    # Rank 1, without such a report, waited for rank 0 and was killed.
    run.end("a", RankEnd(RankOutcome(stopped=True)), RankEnd(failure=KILLED, was_killed=True))
    (result,) = run.results
    assert (result.state, result.failure, result.attempts) == (TrialState.DIVERGED, None, 1)
    assert not run.of(TrialRetried)


def test_with_stop_on_nan_off_a_diverged_trial_continues():
    run = one_running(1, stop_on_nan=False)
    attempt = run.running("a")
    for i in range(2):
        run.it.report(attempt, {"loss": math.nan})
        assert attempt.continues(i)
    run.end("a")
    assert [result.state for result in run.results] == [TrialState.DIVERGED]


def test_in_lockstep_a_rank_waits_for_tunes_decision():
    run = one_running(in_lockstep=True)
    trial, attempt = run.it.trials.get("a"), run.running("a")
    run.it.report(attempt, {"epoch": 1})
    trial.follow(0)
    assert trial.has_news(0) and attempt.num_decided(in_lockstep=True) == 0
    trial.follow(1)
    run.it.report(attempt, {"epoch": 2})
    assert attempt.verdicts(0, in_lockstep=True) == (True,)
    run.it.release("a", let_finish=True)
    assert attempt.verdicts(1, in_lockstep=True) == (True,)  # without Tune
    run.end("a")
    assert run.results[0].state is TrialState.FINISHED and run.it.trials.get("a") is None


def test_a_trial_runs_although_its_tune_trial_was_lost():
    trials = specs(1, 1)
    run = Run(trials)
    run.define("a", "lost")
    run.it.release("unheard of", let_finish=False)
    run.it.release("lost", let_finish=True)
    assert not run.results
    run.workers_come_up()
    assert run.started == [trials[0]]
    run.end("lost")
    run.end("a")
    assert [(result.spec, result.state) for result in run.results] == [(spec, TrialState.FINISHED) for spec in trials]
    assert run.it.trials.get("lost") is None


def test_a_trial_stopped_before_its_turn_ends_alone():
    trials = specs(1, 1)
    run = Run(trials)
    run.define("a", "stopped")
    run.it.release("stopped", let_finish=False)
    stopped = Failure(FailureKind.CRASH, "was stopped before it had a result")
    assert [(r.spec, r.failure) for r in run.results] == [(trials[0], stopped)]
    run.workers_come_up()
    assert run.started == [trials[1]]


def test_a_trial_without_a_follower_is_stopped(monkeypatch):
    run = one_running()
    monkeypatch.setattr(CLOCK, lambda: run.now_s)
    trial = run.it.trials.get("a")
    trial.follow(0)
    run.wait(LEASE_S * 2)
    run.it.check()
    assert not trial.stop_requested
    trial.unfollow()
    run.wait(LEASE_S + 1)
    run.it.check()
    assert trial.stop_requested


def test_closing_kills_running_trials_and_starts_no_others():
    run = Run(specs(1, 1))
    run.define("a", "b")
    run.workers_come_up()
    attempt = run.running("a")
    run.it.close()
    assert attempt.kill_requested
    assert [gang.is_closing for gang in run.pool.gangs.values()] == [True]
    run.end("a", RankEnd(failure=KILLED, was_killed=True))
    run.define("c")
    assert attempt.gang.phase is GangPhase.CLOSING and len(run.started) == 1
    assert [result.state for result in run.results] == [TrialState.FAILED]


def test_events_keep_their_order_until_acknowledged():
    run = one_running(trial_timeout_s=5.0)
    attempt = run.running("a")
    run.end("a")
    run.wait(5.0)
    assert not attempt.kill_requested  # it ended in time
    events = run.it.events.take(0)
    assert [type(e) for _, e in events] == [GangStarting, GangReady, TrialStarted, TrialEnded]
    assert [uid for uid, _ in events] == ["", "", "a", "a"]
    assert run.it.events.take(3) == events[3:] and run.it.events.has_more(3)
    assert not run.it.events.has_more(4) and run.it.events.take(4) == []


def test_a_gang_of_fresh_interpreters_serves_once():
    gang = Gang("1", specs(1)[0].placement, GangPhase.STARTING, {"n0": 1}, serves_once=True)
    gang.worker_is_ready(0, ("host", 1))
    gang.begin(object())
    assert gang.phase is GangPhase.BUSY
    gang.end_turn()
    assert gang.phase is GangPhase.CLOSING


RAISED, EXITED = Failure(FailureKind.ERROR, "ValueError: no such act\nat 0", 0), Failure(FailureKind.CRASH, "", 0)
ALIKE = "the first 2 attempts at its point failed with the same error: "


def repeats(num, *num_workers):
    """Specs of some points, block by block."""
    return [make_result({"num_workers": n}, repeat, 1.0).spec for repeat in range(num) for n in num_workers]


def test_a_point_whose_first_trials_raise_one_error_stops():
    run = Run(repeats(4, 1, 2))
    run.define(*"abcdefgh")
    run.workers_come_up()
    for uid in "abcd":
        run.end(uid, RankEnd(failure=RAISED)) if uid in "ac" else run.end(uid)
    assert [e.text for e in run.of(Notice)] == [
        "num_workers=1 stopped: its first 2 attempts failed with the same error: ValueError: no such act"
    ]
    run.end("f")
    run.end("h")
    assert run.started == [spec for i, spec in enumerate(run.specs) if i not in (4, 6)]
    skipped = [result for result in run.results if result.spec in (run.specs[4], run.specs[6])]
    assert [r.failure for r in skipped] == 2 * [
        Failure(FailureKind.SKIPPED, f"not run: {ALIKE}ValueError: no such act")
    ]
    assert all(r.state is TrialState.FAILED and r.started_at > 0 for r in skipped) and len(run.results) == 8


@pytest.mark.parametrize(
    ("messages", "num_attempts", "kind", "has_reported"),
    [
        (["rank 0 ended with exit code 3", "rank 1 ended with exit code 3"], 2, FailureKind.CRASH, False),
        (["rank 0 ended with exit code 3"] * 4, 4, FailureKind.CRASH, True),
        (["rank 0 ended with exit code 3", "rank 0 ended with exit code 4"] * 2, 4, FailureKind.CRASH, False),
        ([f"DataLoader worker (pid {n}) exited unexpectedly" for n in range(2)], 2, FailureKind.CRASH, False),
        (["rank 0 was killed by SIGKILL"] * 4, 4, FailureKind.KILLED, False),
    ],
)
def test_a_crash_that_repeats_before_any_report_is_retried_once(messages, num_attempts, kind, has_reported):
    run = one_running(max_retries=3)
    for message in messages:
        if has_reported:
            run.it.report(run.running("a"), {"epoch": 1.0})
        run.end("a", RankEnd(failure=Failure(kind, message, 0)))
    (result,) = run.results
    assert result.attempts == num_attempts and len(run.of(TrialRetried)) == num_attempts - 1
    assert (result.failure.message, len(run.of(Notice))) == (messages[-1], num_attempts == 2)


def test_a_trial_running_when_its_point_stops_keeps_its_own_failure():
    run = Run(repeats(3, 1), cluster(1, 1, 1))
    run.define(*"abc")
    run.workers_come_up()
    for uid in "abca":  # the first trial is running again when the second ends
        run.end(uid, RankEnd(failure=replace(EXITED, message="rank 0 ended with exit code 3")))
    assert len(run.of(TrialRetried)) == 1 and len(run.of(Notice)) == 1
    assert [(r.spec.repeat, r.attempts, r.failure.kind) for r in run.results] == [
        (1, 1, FailureKind.CRASH),
        (2, 1, FailureKind.CRASH),
        (0, 2, FailureKind.CRASH),
    ]


@pytest.mark.parametrize("other", [DONE, RankEnd(failure=replace(RAISED, message="ValueError: another"))])
def test_a_point_with_different_failures_continues(other):
    run = Run(repeats(4, 1))
    run.define(*"abcd")
    run.workers_come_up()
    for uid, end in zip("abcd", (RankEnd(failure=RAISED), other, *[RankEnd(failure=RAISED)] * 2), strict=True):
        run.end(uid, end)
    assert run.started == run.specs and not run.of(Notice)
