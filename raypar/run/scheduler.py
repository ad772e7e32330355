"""Scheduling of a run: which queued trial starts where, and which gangs are started and closed for it.

By default a trial runs *exclusively*: it has its machines to itself, since trials on one machine share its memory bus,
caches and clocks even on separate cores. If a study sets the number of concurrent trials, they may share machines, but
never cores.

Trials start in order as resources become free. There is no barrier between blocks: all machines but the slowest would
be idle, and concurrent trials start within minutes of each other anyway. The first trial that has to wait, for example
for a gang over several machines, gets a *reservation*: the place that is expected to be ready first is kept for it.
Later trials may pass it only if they don't delay it (backfilling; Lifka, "The ANL/IBM SP scheduling system", 1995):
on other machines, or on the reserved ones if similar trials were short enough to end in time. So no trial starves.
A trial can move up only a bounded number of positions, so a drift over time affects all points of a block alike.

The start of a gang takes seconds of its machines' cores, so no exclusive trial runs there meanwhile. Afterwards the
gang stays parked. Three rules follow. A trial waits for an existing gang of its placement if that will be free sooner
than a new one would be ready. Gangs for later trials start *ahead* on machines that are idle for long enough. At the
beginning, when nothing is timed, one gang of each placement starts at once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from raypar.run.placement import FreeResources, Node, NodeAssignment, needed, num_machines, shares
from raypar.study.trial import Placement

LOOKAHEAD = 8  # trials per machine that may pass a waiting trial
SLACK = 0.1  # usual error of an estimate, as a share of a trial's time
MAX_STARTS = 2  # gangs that start on a machine at a time: one imports while the other waits for its machines
MIN_TRIALS = 2  # waiting trials per gang of a placement, if several gangs are started ahead
ROUNDING = 1e-6  # of sums of Ray's fractions of a CPU


@dataclass(frozen=True)
class Waiting:
    """A queued trial.

    Attributes:
        expected_s: seconds that similar trials took; None: none has ended.
        avoided: ids of nodes whose machines it must not use.
    """

    placement: Placement
    expected_s: float | None = None
    avoided: frozenset[str] = frozenset()

    def may_run_in(self, gang: GangState) -> bool:
        return gang.placement == self.placement and self.avoided.isdisjoint(gang.nodes)


class GangPhase(Enum):
    STARTING = "starting"
    IDLE = "idle"
    BUSY = "busy"
    RETURNING = "returning"  # its trial is over; it will be idle at once
    CLOSING = "closing"


@dataclass(eq=False)
class GangState:
    """State of a gang that decisions depend on."""

    id: str
    placement: Placement
    phase: GangPhase
    nodes: NodeAssignment  # of its workers; empty: Ray places it, and the nodes are not known yet
    last_used_s: float = 0.0  # on a clock that all gangs share
    # Expected seconds until its trial ends. For an overdue trial, the seconds since its expected end. None: unknown.
    ends_in_s: float | None = None
    busy_s: float = 0.0  # since its trial began


@dataclass(frozen=True)
class Decisions:
    """A round's outcome."""

    starts: tuple[tuple[int, str], ...] = ()  # each trial's position in the queue, and the gang that it starts in
    opens: tuple[tuple[Placement, NodeAssignment], ...] = ()  # gangs to start, each with its workers' nodes
    closes: tuple[str, ...] = ()  # gangs to close


@dataclass(frozen=True)
class SchedulingPolicy:
    """Rules for all trials of a run."""

    max_trials: int | None  # maximum at a time; None: every trial runs exclusively
    reserved: Callable[[Placement], Mapping[str, float]]  # resources that a gang's worker holds in Ray, busy or not
    max_parked: int  # maximum number of idle gangs on a machine where another is to start

    @property
    def exclusive(self) -> bool:
        """True if no two trials may run on one machine."""
        return self.max_trials is None


def decide(
    queue: Sequence[Waiting],
    gangs: Sequence[GangState],
    nodes: Sequence[Node],
    policy: SchedulingPolicy,
    *,
    gang_start_s: float = 0.0,
    is_short_of_memory: bool = False,
) -> Decisions:
    """Decide what starts and closes now (see the module). The next call decides what waits for a gang's end.

    Args:
        gang_start_s: expected seconds until a new gang can run a trial.
    """
    this_round = _Round(queue, gangs, nodes, policy, gang_start_s)
    this_round.match()
    if not is_short_of_memory:
        this_round.start_ahead()
    return this_round.decisions(is_short_of_memory)


@dataclass(frozen=True)
class _Held:
    """A place that is taken for a while."""

    placement: Placement
    nodes: NodeAssignment
    ends_in_s: float | None
    busy_s: float

    @property
    def likely_s(self) -> float:
        """Return the seconds until it is free. For a trial of unknown length, that is its time so far."""
        return self.busy_s if self.ends_in_s is None else self.ends_in_s


class _Round:
    """One decision, from the first trial of the queue to the last that may start."""

    def __init__(
        self,
        queue: Sequence[Waiting],
        gangs: Sequence[GangState],
        nodes: Sequence[Node],
        policy: SchedulingPolicy,
        gang_start_s: float,
    ) -> None:
        self._queue, self._nodes, self._policy, self._all_gangs = queue, nodes, policy, gangs
        self._gang_start_s = gang_start_s
        self._machine_of = {node.id: node.machine for node in nodes}
        self._gangs = [gang for gang in gangs if gang.phase is not GangPhase.CLOSING]
        self._available = {gang.id: gang for gang in self._gangs if gang.phase is not GangPhase.BUSY}
        self._num_active = len(self._gangs) - len(self._available)
        self._awaited: list[GangState] = []  # kept for trials until their machines are free
        self._last = len(queue)  # the last trial that may start before those that wait
        self._held: list[_Held] = []
        self._free = FreeResources(nodes, policy.exclusive)
        self._unreserved = FreeResources(nodes, policy.exclusive)
        for gang in self._gangs:
            if gang.phase in (GangPhase.BUSY, GangPhase.STARTING):
                self._hold(gang.placement, gang.nodes, gang.ends_in_s, gang.busy_s)
        self._starts: list[tuple[int, str]] = []
        self._to_open: list[tuple[Placement, NodeAssignment]] = []
        self._ahead: list[tuple[Placement, NodeAssignment]] = []  # to open if that delays no trial
        self._without_place: list[Placement] = []
        self._reservation: tuple[Placement, NodeAssignment] | None = None
        self._ready_s = 0.0

    # ---- places for trials

    def match(self) -> None:
        """Assign places to the trials, in order."""
        stuck: set[tuple[Placement, frozenset[str], bool, bool]] = set()
        for i, trial in enumerate(self._queue):
            if i > self._last or (self._policy.max_trials is not None and self._num_active >= self._policy.max_trials):
                return
            takes_s = math.inf if trial.expected_s is None else trial.expected_s
            kind = (
                trial.placement,
                trial.avoided,
                self._is_over_in_time(takes_s),
                self._reservation is not None and self._gang_start_s + takes_s <= self._ready_s,
            )
            if kind not in stuck and self._place(i, trial, in_time=kind[2], in_time_if_started=kind[3]):
                continue
            stuck.add(kind)
            self._without_place.append(trial.placement)
            if self._reservation is None and self._reserve(trial):
                self._note_waiting(i)
                stuck = {(trial.placement, trial.avoided, False, False)}

    def _is_over_in_time(self, takes_s: float) -> bool:
        """Return whether work of `takes_s` seconds delays the trial with the reservation by at most `SLACK`."""
        return self._reservation is not None and takes_s * (1 - SLACK) <= self._ready_s

    def _place(self, i: int, trial: Waiting, *, in_time: bool, in_time_if_started: bool) -> bool:
        """Place the trial in an existing gang or one to be started. Returns False if there is no place.

        Args:
            in_time: it may use the place that is reserved for another trial.
            in_time_if_started: it may use that place even if a gang must be started there first.
        """
        alike = [gang for gang in self._available.values() if trial.may_run_in(gang)]
        gang = self._soonest(alike, self._unreserved)
        if gang is None and in_time:
            gang = self._soonest(alike, self._free)
        if gang is None and (coming := self._gang_that_comes_free(trial)) is not None:
            if coming.id in self._available:
                return False  # its machines may be used meanwhile, like those of any reservation
            self._awaited.append(coming)
            ends_in_s = next(held.ends_in_s for held in self._held if held.nodes is coming.nodes)
            self._hold(trial.placement, coming.nodes, _sum(ends_in_s, trial.expected_s))
            self._note_waiting(i)
            return True
        if gang is None:
            nodes = self._free_for(trial, with_reserved=in_time_if_started).find(trial.placement)
            if nodes is None:
                return False
            self._to_open.append((trial.placement, nodes))
            self._hold(trial.placement, nodes, _sum(self._gang_start_s, trial.expected_s))
        else:
            del self._available[gang.id]
            if gang.phase is GangPhase.IDLE:
                self._starts.append((i, gang.id))
            if gang.phase is not GangPhase.STARTING:
                self._hold(trial.placement, gang.nodes, trial.expected_s)
        self._num_active += 1
        return True

    def _soonest(self, gangs: Sequence[GangState], free: FreeResources) -> GangState | None:
        """Return the gang that can run a trial soonest. A starting gang already has its place."""
        places = (
            gang
            for phase in (GangPhase.IDLE, GangPhase.RETURNING, GangPhase.STARTING)
            for gang in gangs
            if gang.phase is phase and (phase is GangPhase.STARTING or free.has(gang.placement, gang.nodes))
        )
        return next(places, None)

    def _free_for(self, trial: Waiting, *, with_reserved: bool) -> FreeResources:
        """Return the free resources of the nodes that the trial may use."""
        if not trial.avoided:
            return self._free if with_reserved else self._unreserved
        free = FreeResources(self._nodes_for(trial), self._policy.exclusive)
        kept = [] if with_reserved or self._reservation is None else [self._reservation]
        for placement, nodes in [*((held.placement, held.nodes) for held in self._held), *kept]:
            free.take(placement, nodes)
        return free

    def _nodes_for(self, trial: Waiting) -> list[Node]:
        return [node for node in self._nodes if node.id not in trial.avoided]

    def _gang_that_comes_free(self, trial: Waiting) -> GangState | None:
        """Return a gang whose machines are expected to be free before a new one could run a trial."""
        kept = self._machines(self._reservation[1]) if self._reservation else set[str]()
        for gang in self._gangs:
            machines = self._machines(gang.nodes)
            if (
                not trial.may_run_in(gang)
                or gang.phase is GangPhase.STARTING
                or gang in self._awaited
                or kept & machines
            ):
                continue
            until_s = [held.likely_s for held in self._held if machines & self._machines(held.nodes)]
            if until_s and max(until_s) < self._gang_start_s:
                return gang
        return None

    def _note_waiting(self, i: int) -> None:
        """Limit which later trials may start before a waiting trial."""
        self._last = min(self._last, i + LOOKAHEAD * max(1, num_machines(self._nodes)))

    def _hold(self, placement: Placement, nodes: NodeAssignment, ends_in_s: float | None, busy_s: float = 0.0) -> None:
        self._held.append(_Held(placement, nodes, ends_in_s, busy_s))
        for free in (self._free, self._unreserved):
            free.take(placement, nodes)

    def _reserve(self, trial: Waiting) -> bool:
        """Reserve the place that is free first. Returns False if the trial has to wait for nodes to join."""
        leaving = sorted(self._held, key=lambda held: (held.ends_in_s is None, held.likely_s))
        gangs = [gang.nodes for gang in self._gangs if trial.may_run_in(gang)]
        place, ready_s = None, 0.0
        for num_gone in range(len(leaving) + 1):
            free_s = max((held.likely_s for held in leaving[:num_gone]), default=0.0)
            if place is not None and free_s > ready_s + self._gang_start_s:
                break  # a new gang is ready sooner
            free = FreeResources(self._nodes_for(trial), self._policy.exclusive)
            for held in leaving[num_gone:]:
                free.take(held.placement, held.nodes)
            warm = next((nodes for nodes in gangs if free.has(trial.placement, nodes)), None)
            new = free.find(trial.placement) if warm is None and place is None else None
            if warm is not None or new is not None:
                place, ready_s = warm or new, free_s
                # If the time is unknown, the place may be free at once, so no trial is short enough to pass.
                self._ready_s = 0.0 if any(held.ends_in_s is None for held in leaving[:num_gone]) else free_s
            if warm is not None:
                break
        if place is None:
            return False
        self._reservation = (trial.placement, place)
        self._unreserved.take(trial.placement, place)
        return True

    # ---- gangs for trials that come later

    def start_ahead(self) -> None:
        """Start gangs for trials without a place, on machines where that delays no trial.

        First one gang of each placement, then more if several of its trials could run side by side. Only gangs that
        hold next to nothing while parked: others would hold what earlier trials need.
        """
        if not self._policy.exclusive:
            return
        num_gangs = Counter([gang.placement for gang in self._gangs] + [placement for placement, _ in self._to_open])
        num_waiting = Counter(filter(self._is_parked_for_nothing, self._without_place))
        for placement in num_waiting:
            if not num_gangs[placement] and self._open_ahead(placement, is_first=True):
                num_gangs[placement] += 1
        most = self._most_side_by_side()
        for placement, count in num_waiting.items():
            while (
                0 < num_gangs[placement] < most[placement]
                and count >= MIN_TRIALS * (num_gangs[placement] + 1)
                and self._open_ahead(placement, is_first=False)
            ):
                num_gangs[placement] += 1

    def _is_parked_for_nothing(self, placement: Placement) -> bool:
        reserved = self._policy.reserved(placement)
        return all(reserved.get(kind, 0) < amount for kind, amount in needed(placement).items())

    def _open_ahead(self, placement: Placement, *, is_first: bool) -> bool:
        """Start a gang on idle machines or, at the beginning of the run, where other gangs are starting too."""
        opens = [*self._to_open, *self._ahead]
        all_gangs = [(gang.placement, gang.nodes) for gang in self._gangs] + opens
        num_parked = Counter(machine for _, nodes in all_gangs for machine in self._machines(nodes))
        alike = {machine for other, nodes in all_gangs if other == placement for machine in self._machines(nodes)}
        idle = self._idle_machines(placement) - {m for _, nodes in opens for m in self._machines(nodes)}
        beside = (
            set()
            if self._gangs
            else self._machines_with_starts([self._machines(nodes) for _, nodes in opens], is_first)
        )
        for usable in (idle, idle | beside):
            free = FreeResources(self._nodes, self._policy.exclusive)
            for node in self._nodes:
                is_full = num_parked[node.machine] >= self._policy.max_parked
                if node.machine not in usable - alike or is_full:
                    free.take(placement, {node.id: 0})
            if (nodes := free.find(placement)) is not None:
                self._ahead.append((placement, nodes))
                return True
        return False

    def _idle_machines(self, placement: Placement) -> set[str]:
        """Return the machines that are idle and will stay so until a gang of the placement has started there."""
        machines = set(self._machine_of.values()) - {m for held in self._held for m in self._machines(held.nodes)}
        if self._reservation is None:
            return machines
        kept_for, nodes = self._reservation
        is_warm = any(gang.placement == kept_for for gang in self._gangs)
        if placement == kept_for or not is_warm or self._is_over_in_time(self._gang_start_s):
            return machines
        return machines - self._machines(nodes)

    @staticmethod
    def _machines_with_starts(opens: Sequence[set[str]], is_first: bool) -> set[str]:
        """Return the machines where one more gang may start beside those that start there now.

        Args:
            opens: the machines of each gang that starts now.
            is_first: there is no gang of its placement yet. Further gangs must not delay those that start now: they
                may only use machines that are ready sooner than others of the same gang.
        """
        num_starts = Counter(machine for machines in opens for machine in machines)
        if is_first:
            return {machine for machine, count in num_starts.items() if count < MAX_STARTS}
        slowest = {m: max(num_starts[n] for machines in opens if m in machines for n in machines) for m in num_starts}
        return {machine for machine, count in num_starts.items() if count < slowest[machine]}

    def _most_side_by_side(self) -> Counter[Placement]:
        """Return the maximum number of concurrent trials of each placement, if trials run in rounds that each fill the
        machines."""
        empty = [node.has for node in self._nodes]
        rest = [trial.placement for trial in self._queue[: self._last + 1]]
        num_needed = {p: sum(1 for count in shares(p, needed(p), empty) or () if count) for p in set(rest)}
        rest = [placement for placement in rest if num_needed[placement]]
        most = Counter[Placement]()
        while rest:
            num_left, now, later = len(set(self._machine_of.values())), Counter[Placement](), list[Placement]()
            for placement in rest:
                if num_needed[placement] <= num_left:
                    num_left -= num_needed[placement]
                    now[placement] += 1
                else:
                    later.append(placement)
            if not now:
                break  # nodes share machines: it needs more of these than there are
            most |= now
            rest = later
        return most

    def _machines(self, nodes: NodeAssignment) -> set[str]:
        return {self._machine_of[node_id] for node_id in nodes if node_id in self._machine_of}

    # ---- gangs to start and to close

    def decisions(self, is_short_of_memory: bool) -> Decisions:
        """Return the trials and gangs that can start now, and the idle gangs to close for others."""
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
            machines = self._machines(nodes)
            near = [gang for gang in idle if machines & self._machines(gang.nodes)]
            if near and is_short_of_memory:
                close(near.pop(0))
            for machine in machines:
                parked = [gang for gang in near if machine in self._machines(gang.nodes)]
                if len(parked) >= self._policy.max_parked:
                    near.remove(parked[0])
                    close(parked[0])
            for gang in near:
                if any(_is_over(coming[node_id]) for node_id in set(nodes) & set(gang.nodes)):
                    close(gang)
            self._take(left, placement, nodes)
            if any(_is_over(left[node_id]) for node_id in nodes):
                self._take(left, placement, nodes, -1)  # not before those are gone
            else:
                opens.append((placement, nodes))
        for placement, nodes in self._ahead:
            self._take(left, placement, nodes)
            if not any(_is_over(left[node_id]) for node_id in nodes):
                opens.append((placement, nodes))
        return Decisions(tuple(self._starts), tuple(opens), tuple(closes))

    def _take(
        self, left: dict[str, dict[str, float]], placement: Placement, nodes: NodeAssignment, times: int = 1
    ) -> None:
        for node_id, count in nodes.items():
            for kind, amount in self._policy.reserved(placement).items() if node_id in left else ():
                left[node_id][kind] = left[node_id].get(kind, 0) - amount * count * times

    def _next_use(self, placement: Placement) -> float:
        """Return the queue position of the first trial of the placement; infinity if there is none."""
        return next((i for i, trial in enumerate(self._queue) if trial.placement == placement), math.inf)


def _sum(*seconds: float | None) -> float | None:
    return None if None in seconds else sum(s or 0.0 for s in seconds)


def _is_over(left: Mapping[str, float]) -> bool:
    return any(amount < -ROUNDING for amount in left.values())
