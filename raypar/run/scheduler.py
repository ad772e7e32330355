"""Which waiting trial runs where, which gangs are started for it, and which make way: decided from what there is.

A trial is *alone* where it has its machines to itself: one trial at a time on a machine, since trials on one machine
share its memory bus, caches and clocks even where they share no cores. Where a study says how many trials may run side
by side, they may share machines, though never cores.

Trials start in their order as far as there is room. Blocks are not waited for: a barrier after each would leave every
machine but the slowest idle, and what runs side by side was started within minutes. The first trial that finds no
room, a gang over several machines maybe, gets a *reservation*: the place that is expected to be free first is kept for
it. Others pass it only where they don't delay it (backfilling; Lifka, "The ANL/IBM SP scheduling system", 1995): on
other machines, or on its own if trials alike have been short enough to be over in time. So nobody waits for ever. How
far they may come from is bounded, so that a drift meets all points of a block alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from raypar.run.placement import Node, On, Room, num_machines
from raypar.study.trial import Placement

LOOKAHEAD = 8  # trials per machine that may come after one that finds no room, and start before it
ROUNDING = 1e-6  # of sums of Ray's fractions of a CPU


@dataclass(frozen=True)
class Waiting:
    """A trial that waits; `expected_s` is how long trials alike took, None where none has ended."""

    placement: Placement
    expected_s: float | None = None


class Phase(Enum):
    STARTING = "starting"
    BUSY = "busy"
    RETURNING = "returning"  # its trial is over; it will be idle at once
    IDLE = "idle"
    CLOSING = "closing"


@dataclass(frozen=True)
class Standing:
    """How a gang stands.

    Attributes:
        on: its workers; empty for one that Ray places, and that has not said where.
        last_used_s: of a clock that all gangs share.
        ends_in_s: when its trial will be over, going by trials alike; None where nothing tells.
    """

    id: str
    placement: Placement
    phase: Phase
    on: On
    last_used_s: float = 0.0
    ends_in_s: float | None = None


@dataclass(frozen=True)
class Plan:
    """What to do now.

    Attributes:
        starts: the position in the queue of each trial that starts, and the gang that it starts in.
        opens: gangs to start, each with its workers' nodes.
        closes: gangs to let go.
    """

    starts: tuple[tuple[int, str], ...] = ()
    opens: tuple[tuple[Placement, On], ...] = ()
    closes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rules:
    """What holds for all trials of a run.

    Attributes:
        alone: no two trials on one machine.
        max_trials: at most so many at a time; None: as many as there is room for.
        reserved: what a worker of a gang holds in Ray, whether the gang is busy or not.
        max_parked: so many idle gangs may be on a machine when another is to start there.
    """

    alone: bool
    max_trials: int | None
    reserved: Callable[[Placement], Mapping[str, float]]
    max_parked: int


def decide(
    queue: Sequence[Waiting],
    gangs: Sequence[Standing],
    nodes: Sequence[Node],
    rules: Rules,
    *,
    is_short_of_memory: bool = False,
) -> Plan:
    """See the module. What can't be decided yet (a gang that has to end first) is, when it is asked again."""
    return _Round(queue, gangs, nodes, rules, is_short_of_memory).plan()


class _Round:
    """One decision, from the first trial of the queue to the last that may start."""

    def __init__(
        self,
        queue: Sequence[Waiting],
        gangs: Sequence[Standing],
        nodes: Sequence[Node],
        rules: Rules,
        is_short_of_memory: bool,
    ) -> None:
        self._queue, self._nodes, self._rules, self._is_short_of_memory = queue, nodes, rules, is_short_of_memory
        self._gangs = [gang for gang in gangs if gang.phase is not Phase.CLOSING]
        self._all_gangs = gangs
        # What has a place for a while: placement, nodes, the seconds until it leaves it.
        self._held: list[tuple[Placement, On, float | None]] = []
        self._at_hand = {gang.id: gang for gang in self._gangs if gang.phase is not Phase.BUSY}
        self._starts: list[tuple[int, str]] = []
        self._to_open: list[tuple[Placement, On]] = []
        self._num_active = 0
        for gang in self._gangs:
            if gang.phase in (Phase.BUSY, Phase.STARTING):
                self._held.append((gang.placement, gang.on, gang.ends_in_s))
            self._num_active += gang.phase is Phase.BUSY
        self._reservation: tuple[Placement, On] | None = None
        self._ready_s = 0.0

    def plan(self) -> Plan:
        self._match()
        opens, closes = self._make_room()
        return Plan(tuple(self._starts), tuple(opens), tuple(closes))

    def _match(self) -> None:
        room, last = self._room(), len(self._queue)
        stuck: set[tuple[Placement, bool]] = set()
        for i, trial in enumerate(self._queue):
            if i > last or (self._rules.max_trials is not None and self._num_active >= self._rules.max_trials):
                return
            takes_s = math.inf if trial.expected_s is None else trial.expected_s
            is_short = self._reservation is not None and takes_s <= self._ready_s
            if (trial.placement, is_short) in stuck:
                continue
            beside = self._room(but_for_reservation=True) if self._reservation else room
            if self._place(i, trial, beside) or (is_short and self._place(i, trial, self._room(), only_idle=True)):
                room = self._room()
                continue
            stuck.add((trial.placement, is_short))
            if self._reservation is None and self._reserve(trial):
                last = i + LOOKAHEAD * max(1, num_machines(self._nodes))
                stuck = {(trial.placement, False)}

    def _place(self, i: int, trial: Waiting, room: Room, *, only_idle: bool = False) -> bool:
        """Whether the trial has a place now: in a gang at hand, or in one to be started."""
        order = (Phase.IDLE,) if only_idle else (Phase.IDLE, Phase.RETURNING, Phase.STARTING)
        for phase in order:
            for gang in self._at_hand.values():
                if gang.phase is not phase or gang.placement != trial.placement:
                    continue
                if phase is not Phase.STARTING:  # that one has its place already
                    if not room.has(gang.placement, gang.on):
                        continue
                    self._held.append((gang.placement, gang.on, trial.expected_s))
                if phase is Phase.IDLE:
                    self._starts.append((i, gang.id))
                del self._at_hand[gang.id]
                self._num_active += 1
                return True
        if only_idle or (on := room.find(trial.placement)) is None:
            return False
        self._to_open.append((trial.placement, on))
        self._held.append((trial.placement, on, trial.expected_s))
        self._num_active += 1
        return True

    def _reserve(self, trial: Waiting) -> bool:
        """Keep the place that is free first. False for a trial that even the empty cluster has no room for: it waits
        for nodes."""
        unknown = math.inf
        leaving = sorted(self._held, key=lambda held: unknown if held[2] is None else held[2])
        own = [gang.on for gang in self._gangs if gang.placement == trial.placement]
        for gone in range(len(leaving) + 1):
            room = Room(self._nodes, self._rules.alone)
            for placement, on, _ in leaving[gone:]:
                room.take(placement, on)
            place = next((on for on in own if room.has(trial.placement, on)), None) or room.find(trial.placement)
            if place is not None:
                self._reservation = (trial.placement, place)
                known = [held[2] for held in leaving[:gone]]
                # Where nothing tells when it will be free, it may be at once: nobody is short enough.
                self._ready_s = max((s for s in known if s is not None), default=0.0) if None not in known else 0.0
                return True
        return False

    def _room(self, *, but_for_reservation: bool = False) -> Room:
        room = Room(self._nodes, self._rules.alone)
        for placement, on, _ in self._held:
            room.take(placement, on)
        if but_for_reservation and self._reservation:
            room.take(*self._reservation)
        return room

    def _make_room(self) -> tuple[list[tuple[Placement, On]], list[str]]:
        """Which of the gangs to be started have what they need of Ray, and which idle ones are let go for them."""
        if not self._to_open:
            return [], []
        machine_of = {node.id: node.machine for node in self._nodes}
        left = {node.id: dict(node.has) for node in self._nodes}  # for gangs
        coming = {node.id: dict(node.has) for node in self._nodes}  # with what those leave that are on their way out
        for gang in self._all_gangs:
            self._take(left, gang.placement, gang.on)
            if gang.phase is not Phase.CLOSING:
                self._take(coming, gang.placement, gang.on)
        idle = sorted(
            (gang for gang in self._at_hand.values() if gang.phase in (Phase.IDLE, Phase.RETURNING)),
            key=lambda gang: (-self._next_use(gang.placement), gang.last_used_s),
        )
        opens: list[tuple[Placement, On]] = []
        closes: list[str] = []

        def close(gang: Standing) -> None:
            idle.remove(gang)
            closes.append(gang.id)
            self._take(coming, gang.placement, gang.on, -1)

        for placement, on in self._to_open:
            self._take(coming, placement, on)
            machines = {machine_of[node_id] for node_id in on}
            near = [gang for gang in idle if machines & {machine_of.get(node_id) for node_id in gang.on}]
            if near and (self._is_short_of_memory or len(near) >= self._rules.max_parked):
                close(near.pop(0))
            for gang in near:
                if any(_is_over(coming[node_id]) for node_id in set(on) & set(gang.on)):
                    close(gang)
            self._take(left, placement, on)
            if any(_is_over(left[node_id]) for node_id in on):
                self._take(left, placement, on, -1)  # not before those are gone
            else:
                opens.append((placement, on))
        return opens, closes

    def _take(self, left: dict[str, dict[str, float]], placement: Placement, on: On, times: int = 1) -> None:
        for node_id, count in on.items():
            for kind, amount in self._rules.reserved(placement).items() if node_id in left else ():
                left[node_id][kind] = left[node_id].get(kind, 0) - amount * count * times

    def _next_use(self, placement: Placement) -> float:
        """How far behind the first in the queue stands the first trial of the placement."""
        return next((i for i, trial in enumerate(self._queue) if trial.placement == placement), math.inf)


def _is_over(left: Mapping[str, float]) -> bool:
    return any(amount < -ROUNDING for amount in left.values())
