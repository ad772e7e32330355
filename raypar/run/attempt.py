"""One attempt at a trial, as the broker keeps it."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from raypar.run.gangs import Gang
from raypar.run.supervise import RankEnd
from raypar.study.trial import Failure, FailureKind, TrialResult, TrialSpec, point_label
from raypar.train.job import merge


@dataclass(eq=False)
class Attempt:
    """A trial's `number`-th attempt: queued, then running in a gang, then over with a result or a next attempt.

    Attributes:
        uid: what Tune calls the trial; empty while none of Tune's carries it.
        cores: of each rank, while it runs.
        verdicts: of report i: go on? The same for every rank.
        decided: the last report that Tune has decided on.
        stop_wanted: it is to end at its next report.
        kill: its ranks are to be killed.
        ends: of the ranks that have ended.
        timers: what would end it later.
        num_beside: other trials that ran on the cluster meanwhile, at most at a time.
        num_sharing: of those on one of its machines, at most at a time.
        followed_s: when Tune's trainable last asked for it; infinite while it is asking.
    """

    uid: str
    spec: TrialSpec
    number: int = 1
    gang: Gang | None = None
    nth_in_gang: int = 0
    cores: dict[int, tuple[int, ...]] = field(default_factory=dict)
    started_at: float = 0.0
    started_s: float = 0.0
    reports: list[Mapping[str, float]] = field(default_factory=list)
    verdicts: dict[int, bool] = field(default_factory=dict)
    decided: int = -1
    stop_wanted: bool = False
    kill: bool = False
    ends: dict[int, RankEnd] = field(default_factory=dict)
    first_failure: Failure | None = None
    timers: list[asyncio.TimerHandle] = field(default_factory=list)
    num_beside: int = 0
    num_sharing: int = 0
    followed_s: float = field(default_factory=time.monotonic)
    result: TrialResult | None = None
    artifacts: bytes = b""

    @property
    def is_running(self) -> bool:
        """Whether some of its ranks have not ended."""
        return self.result is None and self.gang is not None and len(self.ends) < self.gang.placement.num_workers

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_s

    def begin(self, gang: Gang, cores: dict[int, tuple[int, ...]]) -> None:
        """It runs in this gang from now on."""
        self.gang, self.cores, self.nth_in_gang = gang, cores, gang.num_turns
        self.started_at, self.started_s = time.time(), time.monotonic()

    def give_up(self) -> None:
        """It is over; nothing later is to end it."""
        for timer in self.timers:
            timer.cancel()
        self.timers = []

    def conclude(self, failure: Failure | None) -> None:
        """It is over, and the last one: make the trial's result."""
        self.give_up()
        environment: dict[str, Any] = {}
        if self.gang is not None:
            environment["node"] = [self.gang.workers[rank].hostname for rank in sorted(self.gang.workers)]
            environment |= {"gang": self.gang.id, "nth_in_gang": self.nth_in_gang}
            environment |= {"num_beside": self.num_beside, "num_sharing": self.num_sharing}
        outcomes = {rank: end.outcome for rank, end in self.ends.items() if end.outcome is not None}
        self.artifacts = next((outcome.artifacts for outcome in outcomes.values() if outcome.artifacts), b"")
        if failure is None and not outcomes:
            failure = Failure(FailureKind.CRASH, "was stopped before it had a result")
        result = merge(
            self.spec,
            outcomes,
            tuple(self.reports),
            attempts=self.number,
            started_at=self.started_at,
            environment=environment,
            failure=failure,
        )
        self.result = replace(result, wall_s=time.monotonic() - self.started_s) if self.started_s else result


def note_company(running: Sequence[Attempt]) -> None:
    """These run at the same time."""
    hosts = [set(run.gang.hosts.values()) if run.gang is not None else set() for run in running]
    for i, run in enumerate(running):
        sharing = sum(bool(hosts[i] & other) for k, other in enumerate(hosts) if k != i)
        run.num_beside = max(run.num_beside, len(running) - 1)
        run.num_sharing = max(run.num_sharing, sharing)


class Took:
    """How long trials took, to tell how long others alike will take."""

    def __init__(self) -> None:
        self._walls_s: dict[str, list[float]] = {}

    def note(self, result: TrialResult) -> None:
        if result.is_complete and result.wall_s is not None:
            self._walls_s.setdefault(point_label(result.spec.point), []).append(result.wall_s)

    def expected_s(self, spec: TrialSpec) -> float | None:
        """Seconds that the point's other repeats took; None before the first has ended."""
        walls_s = self._walls_s.get(point_label(spec.point))
        return statistics.median(walls_s) if walls_s else None
