"""Scheduling of a run: which queued trial starts where, and which gangs are started and closed for it.

A trial runs *exclusively* where it has its machines to itself: one trial at a time on a machine, since trials on one
machine share its memory bus, caches and clocks even where they share no cores. Where a study says how many trials may
run side by side, they may share machines, though never cores.

Trials start in their order as far as resources are free. Blocks are not waited for: a barrier after each would leave
every machine but the slowest idle, and what runs side by side was started within minutes. The first trial that has to
wait, a gang over several machines maybe, gets a *reservation*: the place that is expected to be free first is kept for
it. Others pass it only where they don't delay it (backfilling; Lifka, "The ANL/IBM SP scheduling system", 1995): on
other machines, or on its own if trials alike have been short enough to be over in time. So nobody waits for ever. How
far they may come from is bounded, so that a drift meets all points of a block alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from raypar.run.placement import FreeResources, Node, NodeAssignment, num_machines
from raypar.study.trial import Placement

LOOKAHEAD = 8  # trials per machine that may come after one that has to wait, and start before it
ROUNDING = 1e-6  # of sums of Ray's fractions of a CPU


@dataclass(frozen=True)
class Waiting:
    """A queued trial; `expected_s` is how long trials alike took, None where none has ended."""

    placement: Placement
    expected_s: float | None = None


class GangPhase(Enum):
    STARTING = "starting"
    IDLE = "idle"
    BUSY = "busy"
    RETURNING = "returning"  # its trial is over; it will be idle at once
    CLOSING = "closing"


@dataclass(eq=False)
class GangState:
    """State of a gang, as far as decisions go by it."""

    id: str
    placement: Placement
    phase: GangPhase
    nodes: NodeAssignment  # of its workers; empty for one that Ray places, and that has not said where
    last_used_s: float = 0.0  # of a clock that all gangs share
    ends_in_s: float | None = None  # until its trial will be over, going by trials alike; None: unknown


@dataclass(frozen=True)
class Decisions:
    """A round's outcome."""

    starts: tuple[tuple[int, str], ...] = ()  # each trial's position in the queue, and the gang that it starts in
    opens: tuple[tuple[Placement, NodeAssignment], ...] = ()  # gangs to start, each with its workers' nodes
    closes: tuple[str, ...] = ()  # gangs to close


@dataclass(frozen=True)
class SchedulingPolicy:
    """Rules for all trials of a run."""

    max_trials: int | None  # at most so many at a time; None: every trial runs exclusively
    reserved: Callable[[Placement], Mapping[str, float]]  # what a gang's worker holds in Ray, busy or not
    max_parked: int  # so many idle gangs may be on a machine when another is to start there

    @property
    def exclusive(self) -> bool:
        """True where no two trials run on one machine."""
        return self.max_trials is None


def decide(
    queue: Sequence[Waiting],
    gangs: Sequence[GangState],
    nodes: Sequence[Node],
    policy: SchedulingPolicy,
    *,
    is_short_of_memory: bool = False,
) -> Decisions:
    """Decide what to do now; see the module. What has to wait for a gang's end is decided at the next call."""
    this_round = _Round(queue, gangs, nodes, policy)
    this_round.match()
    return this_round.decisions(is_short_of_memory)


class _Round:
    """One decision, from the first trial of the queue to the last that may start."""

    def __init__(
        self, queue: Sequence[Waiting], gangs: Sequence[GangState], nodes: Sequence[Node], policy: SchedulingPolicy
    ) -> None:
        self._queue, self._nodes, self._policy, self._all_gangs = queue, nodes, policy, gangs
        self._gangs = [gang for gang in gangs if gang.phase is not GangPhase.CLOSING]
        # What has a place for a while: placement, nodes, the seconds until it leaves it.
        self._held: list[tuple[Placement, NodeAssignment, float | None]] = []
        self._available = {gang.id: gang for gang in self._gangs if gang.phase is not GangPhase.BUSY}
        self._starts: list[tuple[int, str]] = []
        self._to_open: list[tuple[Placement, NodeAssignment]] = []
        self._num_active = len(self._gangs) - len(self._available)
        for gang in self._gangs:
            if gang.phase in (GangPhase.BUSY, GangPhase.STARTING):
                self._held.append((gang.placement, gang.nodes, gang.ends_in_s))
        self._reservation: tuple[Placement, NodeAssignment] | None = None
        self._ready_s = 0.0

    def match(self) -> None:
        """Give the trials places, in their order."""
        free, last = self._free(), len(self._queue)
        stuck: set[tuple[Placement, bool]] = set()
        for i, trial in enumerate(self._queue):
            if i > last or (self._policy.max_trials is not None and self._num_active >= self._policy.max_trials):
                return
            takes_s = math.inf if trial.expected_s is None else trial.expected_s
            is_short = self._reservation is not None and takes_s <= self._ready_s
            if (trial.placement, is_short) in stuck:
                continue
            unreserved = self._free(but_for_reservation=True) if self._reservation else free
            if self._place(i, trial, unreserved) or (is_short and self._place(i, trial, self._free(), only_idle=True)):
                free = self._free()
                continue
            stuck.add((trial.placement, is_short))
            if self._reservation is None and self._reserve(trial):
                last = i + LOOKAHEAD * max(1, num_machines(self._nodes))
                stuck = {(trial.placement, False)}

    def _place(self, i: int, trial: Waiting, free: FreeResources, *, only_idle: bool = False) -> bool:
        """Give the trial a place now, in a gang that is there or one to be started. False where there is none."""
        phases = (GangPhase.IDLE,) if only_idle else (GangPhase.IDLE, GangPhase.RETURNING, GangPhase.STARTING)
        alike = [gang for gang in self._available.values() if gang.placement == trial.placement]
        # One that is starting has its place already.
        places = (
            gang
            for phase in phases
            for gang in alike
            if gang.phase is phase and (phase is GangPhase.STARTING or free.has(gang.placement, gang.nodes))
        )
        gang = next(places, None)
        nodes = gang.nodes if gang else None if only_idle else free.find(trial.placement)
        if nodes is None:
            return False
        if gang is None:
            self._to_open.append((trial.placement, nodes))
        else:
            del self._available[gang.id]
            if gang.phase is GangPhase.IDLE:
                self._starts.append((i, gang.id))
        if gang is None or gang.phase is not GangPhase.STARTING:
            self._held.append((trial.placement, nodes, trial.expected_s))
        self._num_active += 1
        return True

    def _reserve(self, trial: Waiting) -> bool:
        """Keep the place that is free first. False for a trial that doesn't even fit on the empty cluster: it waits for
        nodes."""
        leaving = sorted(self._held, key=lambda held: math.inf if held[2] is None else held[2])
        gangs = [gang.nodes for gang in self._gangs if gang.placement == trial.placement]
        for num_gone in range(len(leaving) + 1):
            free = FreeResources(self._nodes, self._policy.exclusive)
            for placement, nodes, _ in leaving[num_gone:]:
                free.take(placement, nodes)
            warm = next((nodes for nodes in gangs if free.has(trial.placement, nodes)), None)
            place = warm or free.find(trial.placement)
            if place is not None:
                self._reservation = (trial.placement, place)
                ends_in_s = [held[2] for held in leaving[:num_gone]]
                # Where it is unknown when it will be free, it may be at once: nobody is short enough.
                self._ready_s = max((s or 0.0 for s in ends_in_s), default=0.0) if None not in ends_in_s else 0.0
                return True
        return False

    def _free(self, *, but_for_reservation: bool = False) -> FreeResources:
        free = FreeResources(self._nodes, self._policy.exclusive)
        for placement, nodes, _ in self._held:
            free.take(placement, nodes)
        if but_for_reservation and self._reservation:
            free.take(*self._reservation)
        return free

    def decisions(self, is_short_of_memory: bool) -> Decisions:
        """Return the trials and the gangs to start that have what they need, and the idle gangs to close for others."""
        machine_of = {node.id: node.machine for node in self._nodes}
        left = {node.id: dict(node.has) for node in self._nodes}  # for gangs
        coming = {node.id: dict(node.has) for node in self._nodes}  # with what closing gangs leave
        for gang in self._all_gangs:
            self._take(left, gang.placement, gang.nodes)
            if gang.phase is not GangPhase.CLOSING:
                self._take(coming, gang.placement, gang.nodes)
        idle = sorted(
            (gang for gang in self._available.values() if gang.phase in (GangPhase.IDLE, GangPhase.RETURNING)),
            key=lambda gang: (-self._next_use(gang.placement), gang.last_used_s),
        )
        opens: list[tuple[Placement, NodeAssignment]] = []
        closes: list[str] = []

        def close(gang: GangState) -> None:
            idle.remove(gang)
            closes.append(gang.id)
            self._take(coming, gang.placement, gang.nodes, -1)

        for placement, nodes in self._to_open:
            self._take(coming, placement, nodes)
            machines = {machine_of[node_id] for node_id in nodes}
            near = [gang for gang in idle if machines & {machine_of.get(node_id) for node_id in gang.nodes}]
            if near and (is_short_of_memory or len(near) >= self._policy.max_parked):
                close(near.pop(0))
            for gang in near:
                if any(_is_over(coming[node_id]) for node_id in set(nodes) & set(gang.nodes)):
                    close(gang)
            self._take(left, placement, nodes)
            if any(_is_over(left[node_id]) for node_id in nodes):
                self._take(left, placement, nodes, -1)  # not before those are gone
            else:
                opens.append((placement, nodes))
        return Decisions(tuple(self._starts), tuple(opens), tuple(closes))

    def _take(
        self, left: dict[str, dict[str, float]], placement: Placement, nodes: NodeAssignment, times: int = 1
    ) -> None:
        for node_id, count in nodes.items():
            for kind, amount in self._policy.reserved(placement).items() if node_id in left else ():
                left[node_id][kind] = left[node_id].get(kind, 0) - amount * count * times

    def _next_use(self, placement: Placement) -> float:
        """Return the position in the queue of the first trial of the placement; infinity where there is none."""
        return next((i for i, trial in enumerate(self._queue) if trial.placement == placement), math.inf)


def _is_over(left: Mapping[str, float]) -> bool:
    return any(amount < -ROUNDING for amount in left.values())
