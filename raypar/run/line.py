"""The trials that wait, in their order; what is to be done about them now is asked of `raypar.run.schedule`.

What is known beforehand stands here from the start, and each Tune trial carries the one whose turn it is: who is to
choose well has to see more than one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from raypar.run.attempt import Attempt, Took
from raypar.run.capacity import refusal
from raypar.run.cluster import may_grow
from raypar.run.gangs import Gang, GangPool
from raypar.run.room import On
from raypar.run.schedule import Waiting, decide
from raypar.study.trial import Failure, FailureKind, Placement, TrialSpec

COME_BACK_S = 60.0  # a trial that lost nodes have left no place for waits so long for them
HORIZON = 500  # so many of those that wait are looked at, however many there are


@dataclass
class Steps:
    """What to do now.

    Attributes:
        starts: trials that have a gang; Tune's carry them.
        refused: trials that can't run, and why.
        opens: gangs to start, each with its workers' nodes.
        closes: gangs to let go.
        lack_nodes: placements of waiting trials that nodes have to be added for.
    """

    starts: list[tuple[Attempt, Gang]] = field(default_factory=list)
    refused: list[tuple[Attempt, Failure]] = field(default_factory=list)
    opens: Sequence[tuple[Placement, On]] = ()
    closes: Sequence[str] = ()
    lack_nodes: list[Placement] = field(default_factory=list)


class Line:
    """See the module.

    Args:
        max_trials: so many at a time; None: every trial has its machines to itself.
        specs: what is known beforehand.
    """

    def __init__(self, max_trials: int | None, specs: Sequence[TrialSpec]) -> None:
        self.took = Took()
        self._max_trials = max_trials
        self._runs = [Attempt("", spec) for spec in specs]
        self._carriers: list[str] = []  # Tune trials that carry none yet
        self._placeable_s: dict[Placement, float] = {}  # when there was last a place for it

    @property
    def is_empty(self) -> bool:
        return not self._runs

    def add(self, run: Attempt, *, first: bool = False) -> None:
        self._runs.insert(0 if first else len(self._runs), run)

    def add_carrier(self, uid: str) -> None:
        """There is a Tune trial that carries whatever comes next."""
        self._carriers.append(uid)

    def remove(self, run: Attempt) -> None:
        self._runs.remove(run)

    def first_of(self, placement: Placement) -> Attempt | None:
        return next((run for run in self._runs if run.spec.placement == placement and self._carry(run)), None)

    def given_to(self, uid: str) -> Attempt | None:
        """The trial that Tune's `uid`, which is to end before its turn, would have carried; it stays in the line."""
        run = next((run for run in self._runs if not run.uid), None)
        if uid in self._carriers and run is not None:
            self._carriers.remove(uid)
            self._carriers.insert(0, uid)
            self._carry(run)
            return run
        return None

    def close(self) -> None:
        """Nothing starts any more but what Tune's trials carry already."""
        self._runs = [run for run in self._runs if run.uid]

    def steps(self, pool: GangPool) -> Steps:
        """What to do now with these gangs; who gets a gang, or is refused, is carried from now on."""
        found = Steps()
        near = self._runs[:HORIZON]
        refused = self._refused(near, pool, found)
        queue = [run for run in near if run.spec.placement not in refused]
        plan = decide(
            [Waiting(run.spec.placement, self.took.expected_s(run.spec)) for run in queue],
            pool.standings(self._ends_in_s),
            pool.nodes,
            pool.rules(self._max_trials),
            is_short_of_memory=pool.is_short_of_memory,
        )
        found.opens, found.closes = plan.opens, plan.closes
        gang_of = {id(queue[i]): pool.gangs[gang_id] for i, gang_id in plan.starts}
        is_turn = True  # nobody before it waits
        for run in near:
            gang = gang_of.get(id(run))
            failure: Failure | None = None
            if gang is not None and (why_not := pool.refusal(gang, run.spec)) is not None:
                failure = Failure(FailureKind.REFUSED, why_not)
            elif gang is None and is_turn:
                failure = refused.get(run.spec.placement)
            if (gang is None and failure is None) or not self._carry(run):
                is_turn = False
            elif failure is not None:
                found.refused.append((run, failure))
            elif gang is not None:
                found.starts.append((run, gang))
        return found

    def _refused(self, runs: Sequence[Attempt], pool: GangPool, found: Steps) -> dict[Placement, Failure]:
        """The placements that can't run on these nodes, and why; none where nodes may be added, or may come back."""
        has, labels = [node.has for node in pool.nodes], [node.labels for node in pool.nodes]
        refused, now_s = {}, time.monotonic()
        for placement in dict.fromkeys(run.spec.placement for run in runs):
            why_not = refusal(placement, has, labels)
            last_s = self._placeable_s.get(placement)
            if why_not is None:
                self._placeable_s[placement] = now_s
            elif may_grow():
                found.lack_nodes.append(placement)
            elif last_s is None:
                refused[placement] = Failure(FailureKind.REFUSED, why_not)
            elif now_s - last_s > COME_BACK_S:
                refused[placement] = Failure(FailureKind.GANG_LOST, f"nodes were lost: {why_not}")
        return refused

    def _carry(self, run: Attempt) -> bool:
        """Let a Tune trial carry it. False where all have something to carry."""
        if not run.uid and self._carriers:
            run.uid = self._carriers.pop(0)
            run.followed_s = time.monotonic()
        return bool(run.uid)

    def _ends_in_s(self, gang: Gang) -> float | None:
        run: Attempt | None = gang.current
        expected_s = self.took.expected_s(run.spec) if run is not None else None
        return None if run is None or expected_s is None else max(0.0, expected_s - run.elapsed_s)
