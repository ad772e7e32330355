"""State of a run's trials: queued, running in a gang, retried, concluded.

Which trial runs where, `raypar.run.scheduler` decides; here it is done, and trials are tried again or concluded. Cores
are leased for the time of a trial, so that parked gangs hold none.

What is known beforehand stands here from the start, and each Tune trial carries the one whose turn it is: who is to
choose well has to see more than one.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from raypar.run.cluster import may_grow
from raypar.run.gang_pool import Gang, GangPolicy, GangPool
from raypar.run.placement import On, num_machines, refusal
from raypar.run.ranks import RankEnd, trial_result
from raypar.run.runner import ClusterChanged, Event, GangStarting, Notice, TrialRetried, TrialStarted, is_retried
from raypar.run.scheduler import Waiting, decide
from raypar.study.trial import Failure, FailureKind, Placement, TrialResult, TrialSpec, point_label
from raypar.train.job import RunSettings, TrialJob


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
        self.artifacts = b"".join(end.outcome.artifacts for end in self.ends.values() if end.outcome)
        result = trial_result(
            self.spec,
            self.ends,
            reports=self.reports,
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


LOOK_S = 5.0  # how often to look whether others have added nodes
LEASE_S = 60.0  # a trial whose Tune trainable asks nothing for so long has lost it
CLOSE_S = 10.0


@dataclass(frozen=True)
class DispatchConfig:
    """What is the same for all trials of a run.

    Attributes:
        in_lockstep: after each report a trial waits for Tune's decision (a scheduler decides on it).
        max_trials: so many at a time; None: every trial has its machines to itself.
    """

    workload: bytes
    settings: RunSettings
    policy: GangPolicy
    max_retries: int
    in_lockstep: bool
    max_trials: int | None = None


class Dispatcher:
    """Brings trials to their end, on one event loop: no method is interrupted between two awaits.

    Attributes:
        pool: the gangs; from `start` on, as is `line`.
        line: the trials that wait.
        runs: by Tune's trial; a later attempt in the place of the one before.
        news: what has happened and was not told yet.
        orphans: Tune's trials that are gone, whose runs go on to their end.
    """

    def __init__(self, config: DispatchConfig) -> None:
        self.config = config
        self.runs: dict[str, Attempt] = {}
        self.news: list[Event] = []
        self.orphans: set[str] = set()
        self._changed = asyncio.Condition()

    async def start(self, specs: tuple[TrialSpec, ...]) -> None:
        """Make ready, and start gangs for the first of the specs."""
        self.pool = GangPool(self.config.settings, self.config.policy, self._gang_ended)
        self.line = Line(self.config.max_trials, specs)
        self._housekeeper = asyncio.ensure_future(self._keep_house())
        await self.wake()

    @property
    def num_slots(self) -> int:
        """How many trials can run at a time; `ClusterChanged` tells when that changes."""
        return self.config.max_trials or max(1, num_machines(self.pool.nodes))

    def attempt(self, uid: str, number: int) -> Attempt | None:
        """A trial's attempt of this number, None where it is not the present one."""
        run = self.runs.get(uid)
        return run if run is not None and run.number == number else None

    async def stop(self, uid: str) -> None:
        """End a trial at its next report; kill it where it doesn't get there in time."""
        run = self.runs.get(uid)
        if run is None and (run := self.line.given_to(uid)) is not None:
            self.runs[uid] = run
        if run is None or run.result is not None:
            return
        run.stop_wanted = True
        if run.gang is None:
            self.line.remove(run)
            run.conclude(None)
        else:
            grace_s = self.config.settings.stop_grace_s
            run.timers.append(asyncio.get_running_loop().call_later(grace_s, self._kill_soon, run))
        await self.wake()

    async def close(self) -> None:
        """Stop what runs and let the gangs go."""
        self._housekeeper.cancel()
        self.line.close()
        self.pool.ask_for_nodes(())
        for run in list(self.runs.values()):
            await self.stop(run.uid)
            self._kill_soon(run)
        for gang in self.pool.gangs.values():
            gang.is_closing = True
        await self.wake()
        await self.until(lambda: not self.pool.gangs, CLOSE_S)

    def retry_or_conclude(self, run: Attempt, failure: Failure | None) -> None:
        """An attempt is over: do the trial again, or let that be its end. The failure: None where there was none."""
        if failure is not None and not run.stop_wanted and is_retried(failure, run.number, self.config.max_retries):
            run.give_up()
            self.news.append(TrialRetried(run.spec, failure.message))
            again = Attempt(run.uid, run.spec, run.number + 1, followed_s=run.followed_s)
            self.runs[run.uid] = again
            self.line.add(again, first=True)
        else:
            run.conclude(failure)
            if run.result is not None:
                self.line.took.note(run.result)

    async def wake(self) -> None:
        """Something has changed for those that wait for a place, or for news."""
        self._pump()
        await self.tell()

    async def tell(self) -> None:
        """Something has changed for those that wait for news."""
        async with self._changed:
            self._changed.notify_all()

    async def until(self, condition: Callable[[], bool], timeout_s: float | None = None) -> None:
        """Wait for the condition, which is looked at whenever something has changed; no longer than the timeout."""
        async with self._changed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait_for(condition), timeout_s)

    # ---- inside

    def _pump(self) -> None:
        """Start what can be started."""
        if self.line.is_empty:
            return
        self._look()
        steps = self.line.steps(self.pool)
        for run, failure in steps.refused:
            self.runs[run.uid] = run
            self.line.remove(run)
            run.conclude(failure)
        for run, gang in steps.starts:
            self.runs[run.uid] = run
            if (cores := self.pool.lease(gang, run.spec)) is not None:
                self.line.remove(run)
                self._start_run(run, gang, cores)
        for gang_id in steps.closes:
            self.pool.gangs[gang_id].is_closing = True
        for placement, on in steps.opens:
            self.news.append(GangStarting(placement))
            self.pool.start(placement, on)
        for placement in self.pool.ask_for_nodes(steps.lack_nodes):
            self.news.append(Notice(f"{placement}: waiting for the cluster to add nodes"))

    def _look(self) -> None:
        """See which nodes there are, and tell where they are others than before."""
        if self.pool.look():
            self.news.append(ClusterChanged(len(self.pool.nodes), self.num_slots))

    def _start_run(self, run: Attempt, gang: Gang, cores: dict[int, tuple[int, ...]]) -> None:
        gang.current = run
        gang.num_turns += 1
        run.begin(gang, cores)
        note_company([gang.current for gang in self.pool.gangs.values() if gang.current is not None])
        self.news.append(TrialStarted(run.spec, run.number))
        limit_s = self.config.settings.trial_timeout_s
        if limit_s is not None:
            job = TrialJob(run.spec, run.number, b"", self.config.settings)
            log_path = str(job.log_path(0))
            failure = Failure(FailureKind.HUNG, f"took longer than {limit_s:g} s", log_path=log_path)
            run.timers.append(asyncio.get_running_loop().call_later(limit_s, self._kill_soon, run, failure))

    async def _gang_ended(self, gang: Gang, error: str) -> None:
        run: Attempt | None = gang.current
        if run is not None and run.result is None:
            self.pool.release(gang, run.cores)
            self.retry_or_conclude(
                run, Failure(FailureKind.GANG_LOST, f"its gang was lost: {_cut(error)}", None, error)
            )
        elif not gang.num_turns and not gang.is_closing:
            # It never served anybody: to try again for ever would help nobody.
            first = self.line.first_of(gang.placement)
            if first is not None:
                self.runs[first.uid] = first
                self.line.remove(first)
                failure = Failure(FailureKind.GANG_LOST, f"its gang did not start: {error[:2000]}")
                self.retry_or_conclude(first, failure)
        await self.wake()

    def _kill_soon(self, run: Attempt, failure: Failure | None = None) -> None:
        if run.is_running:
            run.first_failure = run.first_failure or failure
            run.kill = True
            self._waking = asyncio.ensure_future(self.wake())

    async def _keep_house(self) -> None:
        """Stop trials whose Tune trainable was lost, which can't say goodbye, and whose driver didn't notice. See which
        nodes have joined or were lost."""
        while True:
            await asyncio.sleep(LOOK_S)
            if not self.config.policy.owns_cluster:
                await self.wake()
            for run in list(self.runs.values()):
                lease_s = time.monotonic() - run.followed_s
                if run.result is None and lease_s > LEASE_S and run.uid not in self.orphans:
                    await self.stop(run.uid)


def _cut(error: str) -> str:
    """Ray's errors go on for many lines, most of them about where to look."""
    return error.partition("\n")[0][:500]
