"""A cluster on paper: trials take the time that they are said to take, and `decide` says where they run."""

import heapq
import itertools
from dataclasses import dataclass, field, replace

from raypar.run.placement import Node, NodeAssignment, needed, shares
from raypar.run.scheduler import GangPhase, GangState, SchedulingPolicy, Waiting, decide
from raypar.study.trial import Placement


def workers(count, cpus=1, nodes="pack", label=None):
    return Placement(count, cpus, "cpu", nodes, label)


def cluster(*cpus):
    """Nodes with so many CPUs, each a machine."""
    return tuple(Node(f"n{i}", f"m{i}", {"CPU": count}) for i, count in enumerate(cpus))


def rules(max_trials=None, *, owns_cluster=True, max_parked=4):
    return SchedulingPolicy(max_trials, lambda p: {"CPU": 0.001 if owns_cluster else p.cpus_per_worker}, max_parked)


@dataclass(frozen=True)
class Job:
    """A trial: `takes_s` in truth; `expected_s` is estimated beforehand."""

    placement: Placement
    takes_s: float
    expected_s: float | None = None


@dataclass
class Ran:
    job: Job
    nth: int
    on: NodeAssignment
    begun_s: float
    ended_s: float


@dataclass
class Simulated:
    """What came of it."""

    ran: list[Ran] = field(default_factory=list)
    num_gang_starts: int = 0
    waited: list[int] = field(default_factory=list)


def simulate(jobs, nodes, how, *, start_s=0.0, joins=None):
    """Run the jobs to their end. Gangs take `start_s` to start; nodes join at the times said."""
    outcome, now_s, ids, ties = Simulated(), 0.0, itertools.count(1), itertools.count()
    nodes = list(nodes)
    queue = list(enumerate(jobs))
    gangs = {}
    ends_at = {}
    events = [(when_s, next(ties), "join", "") for when_s in sorted(joins or {})]
    while True:
        for gang_id, when_s in ends_at.items():
            has_estimate = gangs[gang_id].ends_in_s is not None
            gangs[gang_id] = replace(gangs[gang_id], ends_in_s=max(0.0, when_s - now_s) if has_estimate else None)
        waiting = [Waiting(job.placement, job.expected_s) for _, job in queue]
        plan = decide(waiting, list(gangs.values()), nodes, how)
        for i, gang_id in plan.starts:
            nth, job = queue[i]
            assert gangs[gang_id].phase is GangPhase.IDLE and gangs[gang_id].placement == job.placement
            gangs[gang_id] = replace(gangs[gang_id], phase=GangPhase.BUSY, last_used_s=now_s, ends_in_s=job.expected_s)
            ends_at[gang_id] = now_s + job.takes_s
            outcome.ran.append(Ran(job, nth, gangs[gang_id].nodes, now_s, now_s + job.takes_s))
            heapq.heappush(events, (now_s + job.takes_s, next(ties), "end", gang_id))
        queue = [entry for i, entry in enumerate(queue) if i not in {i for i, _ in plan.starts}]
        for gang_id in plan.closes:
            assert gangs.pop(gang_id).phase is GangPhase.IDLE
        for placement, on in plan.opens:
            gang_id = str(next(ids))
            gangs[gang_id] = GangState(gang_id, placement, GangPhase.STARTING, on, now_s)
            outcome.num_gang_starts += 1
            heapq.heappush(events, (now_s + start_s, next(ties), "ready", gang_id))
        if plan.closes:
            continue  # they are gone now
        if not events:
            outcome.waited = [nth for nth, _ in queue]
            return outcome
        now_s, _, what, gang_id = heapq.heappop(events)
        if what == "join":
            nodes.extend((joins or {})[now_s])
        else:
            gangs[gang_id] = replace(gangs[gang_id], phase=GangPhase.IDLE, last_used_s=now_s, ends_in_s=None)
            ends_at.pop(gang_id, None)


def bound_s(jobs, nodes, how):
    """No schedule is shorter: all that the jobs hold (alone: whole machines) over all there is, or the longest job."""
    if how.exclusive:
        used = [len(on_empty(job.placement, nodes)) * job.takes_s for job in jobs]
        return max(sum(used) / len({node.machine for node in nodes}), max(job.takes_s for job in jobs))
    cpus = sum(job.placement.num_cpus * job.takes_s for job in jobs)
    return max(cpus / sum(node.has["CPU"] for node in nodes), max(job.takes_s for job in jobs))


def on_empty(placement, nodes):
    """Where a gang lies on a cluster that has nothing else to do; empty: it doesn't fit."""
    counts = shares(placement, needed(placement), [node.has for node in nodes]) or ()
    return {node.id: count for node, count in zip(nodes, counts, strict=False) if count}
