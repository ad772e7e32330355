"""Simulated cluster on which trials take given times and `decide` places them."""

import itertools
import math
import statistics
from collections import defaultdict
from dataclasses import dataclass, field, replace

from raypar.run.placement import Node, NodeAssignment, needed, shares
from raypar.run.scheduler import GangPhase, GangState, SchedulingPolicy, Waiting, decide
from raypar.study.trial import Placement

CHECK_S = 5.0  # maximum time between two decisions


def workers(count, cpus=1, nodes="pack", label=None):
    return Placement(count, cpus, "cpu", nodes, label)


def cluster(*cpus):
    """Return a node for each number of CPUs, each on its own machine."""
    return tuple(Node(f"n{i}", f"m{i}", {"CPU": count}) for i, count in enumerate(cpus))


def rules(max_trials=None, *, owns_cluster=True, max_parked=4):
    return SchedulingPolicy(max_trials, lambda p: {"CPU": 0.001 if owns_cluster else p.cpus_per_worker}, max_parked)


@dataclass(frozen=True)
class Job:
    """A trial that takes `takes_s`. `expected_s` is a given estimate; otherwise ended jobs of its point give one."""

    placement: Placement
    takes_s: float
    expected_s: float | None = None
    point: str = ""


@dataclass
class Ran:
    job: Job
    nth: int
    gang_id: str
    on: NodeAssignment
    begun_s: float
    ended_s: float


@dataclass
class Started:
    """The start of a gang."""

    gang_id: str
    placement: Placement
    on: NodeAssignment
    begun_s: float
    num_starting: int  # gangs of the placement that were starting then, itself among them
    num_waiting: int  # trials of the placement
    ended_s: float = math.inf


@dataclass
class Simulated:
    """Outcome of a simulation."""

    ran: list[Ran] = field(default_factory=list)
    gang_starts: list[Started] = field(default_factory=list)
    waited: list[int] = field(default_factory=list)

    @property
    def makespan_s(self):
        return max(ran.ended_s for ran in self.ran)


def simulate(jobs, nodes, how, *, start_s=0.0, joins=None):
    """Run the jobs to their end.

    Args:
        start_s: seconds that a gang takes to start; twice as long where two start on one machine, and so on.
        joins: nodes that join, by time.
    """
    simulation = _Simulation(jobs, nodes, how, start_s, joins or {})
    while simulation.act():
        pass
    return simulation.outcome


class _Simulation:
    def __init__(self, jobs, nodes, how, start_s, joins):
        self.outcome, self._now_s, self._numbers = Simulated(), 0.0, itertools.count(1)
        self._nodes, self._how, self._start_s = list(nodes), how, start_s
        self._queue = list(enumerate(jobs))
        self._gangs = {}
        self._running = {}  # by gang
        self._starting = {}  # by gang: the start, and the seconds of it that are left
        self._joins = sorted(joins.items())
        self._walls_s = defaultdict(list)  # by point

    def act(self):
        """Carry out the decisions, then let time pass until the next event. Returns False at the end."""
        for gang_id, gang in self._gangs.items():
            ran = self._running.get(gang_id)
            busy_s = self._now_s - ran.begun_s if ran else 0.0
            self._gangs[gang_id] = replace(gang, ends_in_s=self._ends_in_s(gang_id), busy_s=busy_s)
        waiting = [Waiting(job.placement, self._expected_s(job)) for _, job in self._queue]
        decisions = decide(waiting, list(self._gangs.values()), self._nodes, self._how, gang_start_s=self._start_s)
        for i, gang_id in decisions.starts:
            self._start(*self._queue[i], gang_id)
        self._queue = [entry for i, entry in enumerate(self._queue) if i not in {i for i, _ in decisions.starts}]
        for gang_id in decisions.closes:
            assert self._gangs.pop(gang_id).phase is GangPhase.IDLE
        for placement, on in decisions.opens:
            gang_id = str(next(self._numbers))
            self._gangs[gang_id] = GangState(gang_id, placement, GangPhase.STARTING, on, self._now_s)
            num_starting = sum(start.placement == placement for start, _ in self._starting.values()) + 1
            num_waiting = sum(job.placement == placement for _, job in self._queue)
            start = Started(gang_id, placement, on, self._now_s, num_starting, num_waiting)
            self._starting[gang_id] = [start, self._start_s]
            self.outcome.gang_starts.append(start)
        return bool(decisions.closes) or self._pass_time()  # closed gangs end at once

    def _start(self, nth, job, gang_id):
        gang = self._gangs[gang_id]
        assert gang.phase is GangPhase.IDLE and gang.placement == job.placement
        self._gangs[gang_id] = replace(gang, phase=GangPhase.BUSY, last_used_s=self._now_s)
        ran = Ran(job, nth, gang_id, gang.nodes, self._now_s, self._now_s + job.takes_s)
        self._running[gang_id] = ran
        self.outcome.ran.append(ran)

    def _pass_time(self):
        """Let time pass until the next event. Returns False if there is none."""
        rates = {gang_id: 1 / self._num_starts_beside(start.on) for gang_id, (start, _) in self._starting.items()}
        events = [(ran.ended_s, "ended", gang_id) for gang_id, ran in self._running.items()]
        events += [(self._now_s + left_s / rates[id_], "ready", id_) for id_, (_, left_s) in self._starting.items()]
        events += [(at_s, "joined", "") for at_s, _ in self._joins[:1]]
        if not events:
            self.outcome.waited = [nth for nth, _ in self._queue]
            return False
        if self._queue and (self._running or self._starting):
            events.append((self._now_s + CHECK_S, "to be checked", ""))  # as the broker does
        at_s, what, gang_id = min(events)
        for id_, rate in rates.items():
            self._starting[id_][1] -= (at_s - self._now_s) * rate
        self._now_s = at_s
        if what == "joined":
            self._nodes.extend(self._joins.pop(0)[1])
        elif what != "to be checked":
            if what == "ready":
                self._starting.pop(gang_id)[0].ended_s = at_s
            else:
                job = self._running.pop(gang_id).job
                self._walls_s[job.point].append(job.takes_s)
            self._gangs[gang_id] = replace(self._gangs[gang_id], phase=GangPhase.IDLE, last_used_s=at_s)
        return True

    def _num_starts_beside(self, on):
        return max(sum(node_id in start.on for start, _ in self._starting.values()) for node_id in on)

    def _expected_s(self, job):
        walls_s = self._walls_s.get(job.point) if job.point else None
        return statistics.median(walls_s) if walls_s else job.expected_s

    def _ends_in_s(self, gang_id):
        ran = self._running.get(gang_id)
        expected_s = self._expected_s(ran.job) if ran else None
        return None if expected_s is None else abs(expected_s - (self._now_s - ran.begun_s))


def bound_s(jobs, nodes, how):
    """Return a lower bound: CPU seconds (exclusive: machine seconds) over those of the cluster, or the longest job."""
    if how.exclusive:
        used = [len(on_empty(job.placement, nodes)) * job.takes_s for job in jobs]
        return max(sum(used) / len({node.machine for node in nodes}), max(job.takes_s for job in jobs))
    cpus = sum(job.placement.num_cpus * job.takes_s for job in jobs)
    return max(cpus / sum(node.has["CPU"] for node in nodes), max(job.takes_s for job in jobs))


def on_empty(placement, nodes):
    """Return a gang's nodes on an idle cluster; empty: it doesn't fit."""
    counts = shares(placement, needed(placement), [node.has for node in nodes]) or ()
    return {node.id: count for node, count in zip(nodes, counts, strict=False) if count}
