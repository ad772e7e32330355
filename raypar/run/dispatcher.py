"""State of a run's trials: queued, running in a gang, queued again after a failure, over.

`raypar.run.scheduler` decides which trial runs where; this module carries it out. Cores are leased per trial, so idle
gangs hold none.

All specs that are known in advance are queued at the start, since good scheduling needs several trials to choose from.
Each Tune trial is bound to the next spec to start. Nothing here blocks or calls Ray.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Protocol

from raypar.run.placement import num_machines, refusal
from raypar.run.pool import Gang, GangPolicy, Greeting, Pool, Turn
from raypar.run.ranks import NO_CONDITIONS, RankEnd, cause, trial_result
from raypar.run.runner import (
    ClusterChanged,
    Event,
    GangReady,
    GangStarting,
    Notice,
    StoppedPoints,
    TrialEnded,
    TrialReported,
    TrialRetried,
    TrialStarted,
    ends_training,
    is_retried,
)
from raypar.run.scheduler import SchedulingPolicy, Waiting, decide
from raypar.run.standstill import Standstill, explained
from raypar.study.conditions import Conditions
from raypar.study.trial import Failure, FailureKind, Placement, TrialResult, TrialSpec, point_label
from raypar.train.job import ARTIFACT_FOLDER, RunSettings
from raypar.train.position import Position

COME_BACK_S = 60.0  # how long a trial waits for lost nodes to return if no other place is left
LEASE_S = 60.0  # a Tune trainable that makes no call for this long counts as lost
GANG_START_S = 10.0  # assumed start-up time of a gang, before any has started
CORES_POLL_S = 5.0  # time between attempts to get cores that another study holds
NOT_KEPT = "{}: what it kept was not stored, {}; it is in {} on {}"
WAITING_FOR_CORES = "a trial waits for cores: {}"
HORIZON = 500  # maximum number of queued trials that a decision considers


class Timer(Protocol):
    def cancel(self) -> None: ...


class TrialPhase(Enum):
    QUEUED = "queued"
    RUNNING = "running"
    OVER = "over"


@dataclass(frozen=True)
class ArtifactPiece:
    """Part of a trial's artifacts, on its way to the driver.

    Attributes:
        content: reference to a `raypar.files.FilePiece`; empty: end of the artifacts.
    """

    identity: str
    attempt: int
    content: Sequence[Any]


@dataclass(eq=False)
class Attempt:
    """One attempt at a trial, running in a gang."""

    trial: Trial
    number: int  # from 1
    gang: Gang
    nth_in_gang: int
    started_at: float = field(default_factory=time.time)
    started_s: float = field(default_factory=time.monotonic)
    reports: list[Mapping[str, float]] = field(default_factory=list)
    goes_on_at: dict[int, bool] = field(default_factory=dict)  # by report: whether to continue, the same for every rank
    kill_requested: bool = False  # its ranks are to be killed
    ends: dict[int, RankEnd] = field(default_factory=dict)  # of the ranks that have ended
    failure: Failure | None = None  # why it failed, judging by the ranks that have ended
    timers: list[Timer] = field(default_factory=list)  # timers that would end it
    num_beside: int = 0  # maximum number of other trials on the cluster at the same time
    num_sharing: int = 0  # the same for trials on one of its machines
    num_sharing_network: int = 0  # the same for trials over several machines, if this one is too
    is_over: bool = False
    is_sending: bool = False  # rank 0 has succeeded, and its artifacts are on their way to the driver
    is_refused: bool = False  # the driver could not store them
    num_pieces: int = 0  # pieces that the driver has not accepted yet
    standstill: Standstill = field(init=False)

    def __post_init__(self) -> None:
        log_path = self.gang.turn.job.log_path(0) if self.gang.turn else ""
        self.standstill = Standstill(self.gang.placement.num_workers, str(log_path))

    @property
    def takes_artifacts(self) -> bool:
        """Return whether its artifacts are still needed."""
        return not (self.is_refused or self.kill_requested or self.is_over)

    @property
    def is_training(self) -> bool:
        """Return whether any of its ranks is still running."""
        return len(self.ends) + (self.is_sending and 0 not in self.ends) < self.gang.placement.num_workers

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_s

    def is_reported(self, index: int) -> bool:
        """Return whether rank 0 has made this report, or will make no more reports."""
        return len(self.reports) > index or 0 in self.ends or self.kill_requested or self.is_over

    def is_decided(self, index: int) -> bool:
        """Return whether Tune has decided on this report, or will never decide."""
        trial = self.trial
        return trial.num_decided > index or trial.stop_requested or trial.released or self.kill_requested

    def goes_on(self, index: int) -> bool:
        """Return whether the ranks continue after this report."""
        return self.goes_on_at.setdefault(index, not self.trial.stop_requested)

    def kill(self, failure: Failure | None = None) -> None:
        """Request that its ranks be killed. The failure is the reason, unless something else failed first."""
        if not self.is_over:
            self.failure = self.failure or failure
            self.kill_requested = True

    def end(self) -> None:
        self.is_over = True
        for timer in self.timers:
            timer.cancel()

    def conditions(self) -> Conditions:
        """Return where it ran, and what ran beside it."""
        nodes = tuple(self.gang.hostnames.values())
        if self.gang.is_local:
            return Conditions(node=nodes)
        return Conditions(
            node=nodes,
            gang=self.gang.id,
            nth_in_gang=self.nth_in_gang,
            num_beside=self.num_beside,
            num_sharing=self.num_sharing,
            num_sharing_network=self.num_sharing_network,
        )


@dataclass(eq=False)
class Trial:
    """A trial of the run, across all its attempts."""

    spec: TrialSpec
    uid: str = ""  # name of the Tune trial that is bound to it; empty: none yet
    phase: TrialPhase = TrialPhase.QUEUED
    num_attempts: int = 0
    attempt: Attempt | None = None  # the current one; None while the trial is queued
    num_decided: int = 0  # reports that Tune has decided on
    stop_requested: bool = False  # it is to end at its next report
    failed_on: set[str] = field(default_factory=set)  # machines whose GPU failed while it ran there
    released: bool = False  # Tune no longer needs it
    # Time of the last call of Tune's trainable for it; infinite during a call.
    followed_s: float = field(default_factory=time.monotonic)
    result: TrialResult | None = None

    @property
    def reports(self) -> list[Mapping[str, float]]:
        return self.attempt.reports if self.attempt else []

    def has_news(self, after: int) -> bool:
        return len(self.reports) > after or self.result is not None

    def unfollow(self) -> None:
        self.followed_s = time.monotonic()


@dataclass(frozen=True)
class DispatchConfig:
    """Configuration of a run."""

    workload: bytes
    settings: RunSettings
    gangs: GangPolicy
    max_retries: int
    in_lockstep: bool  # after each report a trial waits for Tune's decision (a scheduler decides on it)
    max_trials: int | None = None  # trials at a time; None: every trial has its machines to itself
    metric: str = ""  # the study's


class Dispatcher:
    """Runs the trials of a run to completion.

    Args:
        specs: trials that are known in advance; `define` adds others.
        call_later: calls a function after a number of seconds.
        on_change: called after changes that a caller may be waiting for.
    """

    def __init__(
        self,
        config: DispatchConfig,
        pool: Pool,
        specs: Sequence[TrialSpec],
        *,
        call_later: Callable[[float, Callable[[], None]], Timer],
        on_change: Callable[[], None],
    ) -> None:
        self._config, self._pool = config, pool
        self._call_later, self._on_change = call_later, on_change
        self._queue = [Trial(spec) for spec in specs]  # in their order
        self._unbound: list[str] = []  # Tune trials that run the next spec to start
        self._trials: dict[str, Trial] = {}  # by Tune trial
        self._stopped = StoppedPoints()
        self._walls_s: defaultdict[str, list[float]] = defaultdict(list)  # of the trials of a point that have ended
        self._first_gang_ready_s: float | None = None
        self._gang_starts_s: list[float] = []
        self._placeable_s: dict[Placement, float] = {}  # when it last had a place
        self._policy = SchedulingPolicy(config.max_trials, pool.reserved, config.gangs.max_parked)
        self._events: list[tuple[str, Event | ArtifactPiece]] = []
        self._num_forgotten = 0
        self._is_paused = False  # while another study holds cores of a trial
        self._last_wait = ""  # last message about waiting for cores of other studies
        self._notices: set[str] = set()  # notices of workers that were shown

    @property
    def num_slots(self) -> int:
        """Number of trials that can run at a time. A `ClusterChanged` event reports changes."""
        return self._config.max_trials or max(1, num_machines(self._pool.nodes))

    @property
    def gang_start_s(self) -> float:
        """Expected start-up time of a gang, in seconds."""
        return statistics.median(self._gang_starts_s or [GANG_START_S])

    def trial(self, uid: str) -> Trial | None:
        """Return the trial of a Tune trial; None if it is not bound to one, or both were dropped."""
        return self._trials.get(uid)

    def attempt(self, uid: str, number: int) -> Attempt | None:
        """Return a trial's attempt of this number; None if it is not the running one."""
        trial = self._trials.get(uid)
        attempt = trial.attempt if trial else None
        return attempt if attempt and attempt.number == number and not attempt.is_over else None

    # ---- events

    def has_events(self, after: int) -> bool:
        return self._num_forgotten + len(self._events) > after

    def events(self, after: int) -> list[tuple[str, Event | ArtifactPiece]]:
        """Return the events after the first `after`, and drop earlier ones."""
        del self._events[: after - self._num_forgotten]
        self._num_forgotten = after
        return list(self._events)

    def _tell(self, event: Event | ArtifactPiece, uid: str = "") -> None:
        self._events.append((uid, event))

    # ---- calls from Tune and the driver

    def define(self, uid: str, spec: TrialSpec | None) -> None:
        """Add a Tune trial. It runs the spec, or the next of the specs known in advance."""
        if spec is None:
            self._unbound.append(uid)
        else:
            self._trials[uid] = Trial(spec, uid)
            self._queue.append(self._trials[uid])
        self.dispatch()

    def follow(self, trial: Trial, after: int) -> None:
        """Note that Tune's trainable waits for news after the first `after` reports, and so has decided on those."""
        trial.num_decided = max(trial.num_decided, after)
        trial.followed_s = math.inf
        self._on_change()

    def release(self, uid: str, *, let_finish: bool) -> None:
        """End a trial that Tune no longer needs, unless it may finish or hasn't begun. Drop it once it is over."""
        trial = self._trials.get(uid)
        if trial is None:  # not bound yet: it stands for the next unbound trial
            trial = next((trial for trial in self._queue if not trial.uid), None)
            if uid not in self._unbound or trial is None:
                return
            self._unbound.remove(uid)
            trial.uid = uid
            self._trials[uid] = trial
        trial.released = True
        if trial.phase is TrialPhase.OVER:
            del self._trials[uid]
        elif not let_finish:
            self._stop(trial)
        self.dispatch()

    def check(self) -> None:
        """Stop trials whose Tune trainable was lost, and check which nodes have joined or were lost."""
        now_s = time.monotonic()
        for trial in list(self._trials.values()):
            if not trial.released and now_s - trial.followed_s > LEASE_S:
                self._stop(trial)
        self.dispatch()

    def close(self) -> None:
        """Stop running trials and close the gangs."""
        self._queue = [trial for trial in self._queue if trial.uid]  # Tune has not started the others yet
        self._pool.request_nodes(())
        for trial in list(self._trials.values()):
            self._stop(trial)
            if trial.attempt is not None:
                trial.attempt.kill()
        self._pool.close()
        self.dispatch()

    # ---- calls from gangs and ranks

    def worker_is_up(self, gang_id: str, greeting: Greeting) -> None:
        gang = self._pool.greet(gang_id, greeting)
        if gang.is_complete:
            now_s = time.monotonic()
            if self._first_gang_ready_s is None:
                self._first_gang_ready_s = now_s
            elif gang.started_s > self._first_gang_ready_s:  # earlier gangs also waited for the nodes' fork servers
                self._gang_starts_s.append(now_s - gang.started_s)
            self._tell(GangReady(gang.placement, now_s - gang.started_s))
            self._on_change()

    def worker_is_ready(self, gang_id: str, rank: int, master_address: tuple[str, int] | None) -> Gang:
        """Note that a worker is ready for its gang's next trial; rank 0 has chosen an address for it."""
        gang = self._pool.gangs[gang_id]
        gang.worker_is_ready(rank, master_address)
        self.dispatch()
        return gang

    def notify(self, text: str) -> None:
        """Show the user a notice once, even if several workers send it."""
        if text not in self._notices:
            self._notices.add(text)
            self._tell(Notice(text))
            self._on_change()

    def report(self, attempt: Attempt, metrics: Mapping[str, float]) -> None:
        """Record a report of rank 0 of a running trial."""
        attempt.reports.append(metrics)
        self._tell(TrialReported(attempt.trial.spec, metrics), attempt.trial.uid)
        if ends_training(attempt.trial.spec, metrics, self._config.metric):
            self._stop(attempt.trial)
        self._on_change()

    def send(self, attempt: Attempt, content: Sequence[Any]) -> None:
        """Send a piece of the artifacts of a trial whose rank 0 has ended (see `ArtifactPiece`)."""
        attempt.is_sending = True
        attempt.num_pieces += 1
        self._tell(ArtifactPiece(attempt.trial.spec.identity, attempt.number, content), attempt.trial.uid)
        self._on_change()

    def piece_taken(self, attempt: Attempt, problem: str) -> None:
        """Note that the driver accepted a piece, or can't store the artifacts (`problem`). The result stays."""
        attempt.num_pieces -= 1
        if problem and not attempt.is_refused:
            attempt.is_refused = True
            spec, folder = attempt.trial.spec, self._config.settings.log_dir
            node = attempt.gang.hostnames.get(0, "its node")
            self._tell(Notice(NOT_KEPT.format(spec.label, problem, folder / spec.identity / ARTIFACT_FOLDER, node)))
        self._on_change()

    def note_position(self, attempt: Attempt, rank: int, position: Position) -> None:
        """Note a rank's position. Kill the trial if its ranks are deadlocked."""
        if (failure := attempt.standstill.note(rank, position)) is not None and not attempt.kill_requested:
            attempt.kill(failure)
            self._on_change()

    def rank_ended(self, attempt: Attempt, rank: int, end: RankEnd) -> None:
        attempt.ends[rank] = end
        attempt.failure = cause(attempt.failure, end)
        if end.failure is not None or end.cores_held_by:
            attempt.kill()  # the peers may hang in a collective
        if len(attempt.ends) == attempt.gang.placement.num_workers:
            self._pool.release(attempt.gang)
            failure = explained(attempt.failure, attempt.ends)
            if any(end.cores_held_by for end in attempt.ends.values()) and not attempt.trial.stop_requested:
                self._wait_for_cores(attempt)
                return
            if attempt.trial.stop_requested and failure and failure.kind in (FailureKind.CRASH, FailureKind.PEER_LOST):
                failure = None  # killed because it didn't stop in time; an error in its code would be a failure
            self._retry_or_conclude(attempt.trial, failure)
        self.dispatch()

    def gang_ended(self, gang: Gang, reason: str, error: str) -> None:
        """Note the end of a gang that was closed, was lost or failed to start (the reason, and the whole error)."""
        trial = self._trials.get(gang.turn.job.uid) if gang.turn else None
        if trial is not None:
            self._pool.release(gang)
            failure = Failure(FailureKind.GANG_LOST, f"its gang was lost: {reason}", None, error)
            self._retry_or_conclude(trial, failure)
        elif not gang.num_turns and not gang.is_closing:
            # It never served a trial, so retrying forever would not help.
            same = (trial for trial in self._queue[:HORIZON] if trial.spec.placement == gang.placement)
            if (first := next(filter(self._bind, same), None)) is not None:
                self._queue.remove(first)
                first.num_attempts += 1
                failure = Failure(FailureKind.GANG_LOST, f"its gang did not start: {reason}", None, error)
                self._retry_or_conclude(first, failure)
        self.dispatch()

    # ---- inside

    def dispatch(self) -> None:
        """Start all trials and gangs that can be started."""
        if self._queue and not self._is_paused:
            self._dispatch()
        self._on_change()

    def _dispatch(self) -> None:
        if self._pool.refresh():
            self._tell(ClusterChanged(len(self._pool.nodes), self.num_slots))
        head = self._queue[:HORIZON]
        refused, lacking = self._refusals(dict.fromkeys(trial.spec.placement for trial in head))
        candidates = [trial for trial in head if self._failure_of(trial, refused) is None]
        for each in self._pool.gangs.values():
            self._expect_end(each)
        decisions = decide(
            [Waiting(t.spec.placement, self._expected_s(t.spec), self._avoided_nodes(t)) for t in candidates],
            list(self._pool.gangs.values()),
            self._pool.nodes,
            self._policy,
            gang_start_s=self.gang_start_s,
            is_short_of_memory=self._pool.is_short_of_memory,
        )
        gang_of = {candidates[i]: self._pool.gangs[gang_id] for i, gang_id in decisions.starts}
        is_turn = True  # no earlier trial waits; for later ones, nodes may have joined by then
        for trial in head:
            gang = gang_of.get(trial)
            failure = self._failure_of(trial, refused) if is_turn else None
            if gang is not None and (reason := self._pool.refusal(gang, trial.spec)) is not None:
                failure = Failure(FailureKind.REFUSED, reason)
            if (gang is None and failure is None) or not self._bind(trial):
                is_turn = False
            elif failure is not None:
                self._queue.remove(trial)
                self._conclude(trial, failure)
            elif gang is not None:
                self._start(trial, gang)
        for gang_id in decisions.closes:
            self._pool.gangs[gang_id].close()
        for placement, nodes in decisions.opens:
            self._tell(GangStarting(placement))
            self._pool.start(placement, nodes, self.gang_ended)
        for placement in self._pool.request_nodes(lacking):
            self._tell(Notice(f"{placement}: waiting for the cluster to add nodes"))

    def _failure_of(self, trial: Trial, refused: Mapping[Placement, Failure]) -> Failure | None:
        """Return why the next queued trial can't be started; None if it can."""
        return self._stopped.refusal(trial.spec) or refused.get(trial.spec.placement)

    def _refusals(self, placements: Collection[Placement]) -> tuple[dict[Placement, Failure], list[Placement]]:
        """Return why placements can't run here (lost nodes may come back), and the placements to add nodes for."""
        resources, labels = [node.has for node in self._pool.nodes], [node.labels for node in self._pool.nodes]
        refused: dict[Placement, Failure] = {}
        lacking: list[Placement] = []
        now_s, may_grow = time.monotonic(), self._pool.may_grow
        for placement in placements:
            reason = refusal(placement, resources, labels)
            last_s = self._placeable_s.get(placement)
            if reason is None:
                self._placeable_s[placement] = now_s
            elif may_grow:
                lacking.append(placement)
            elif last_s is None:
                refused[placement] = Failure(FailureKind.REFUSED, reason)
            elif now_s - last_s > COME_BACK_S:
                refused[placement] = Failure(FailureKind.GANG_LOST, f"nodes were lost: {reason}")
        return refused, lacking

    def _avoided_nodes(self, trial: Trial) -> frozenset[str]:
        """Return the nodes whose GPU failed under a trial; none if the other nodes could never hold it."""
        if not trial.failed_on:
            return frozenset()
        rest = [node for node in self._pool.nodes if node.machine not in trial.failed_on]
        if refusal(trial.spec.placement, [node.has for node in rest], [node.labels for node in rest]) is not None:
            return frozenset()
        return frozenset(node.id for node in self._pool.nodes if node.machine in trial.failed_on)

    def _bind(self, trial: Trial) -> bool:
        """Bind a Tune trial to it. Returns False if none is left."""
        if not trial.uid and self._unbound:
            trial.uid = self._unbound.pop(0)
            trial.unfollow()
        if trial.uid:
            self._trials[trial.uid] = trial
        return bool(trial.uid)

    def _expected_s(self, spec: TrialSpec) -> float | None:
        """Return the median seconds of the point's other repeats; None before the first has ended."""
        walls_s = self._walls_s.get(point_label(spec.point))
        return statistics.median(walls_s) if walls_s else None

    def _expect_end(self, gang: Gang) -> None:
        trial = self._trials.get(gang.turn.job.uid) if gang.turn else None
        expected_s = self._expected_s(trial.spec) if trial else None
        gang.ends_in_s, gang.busy_s = None, 0.0
        if trial is not None and trial.attempt is not None:
            gang.busy_s = trial.attempt.elapsed_s
            gang.ends_in_s = None if expected_s is None else abs(expected_s - gang.busy_s)

    def _start(self, trial: Trial, gang: Gang) -> None:
        """Start a queued trial in the gang if the cores that it needs are free."""
        cores = self._pool.lease(gang, trial.spec)
        if cores is None:
            return
        self._queue.remove(trial)
        trial.num_attempts += 1
        job = self._config.settings.job(trial.spec, trial.num_attempts, self._config.workload, trial.uid)
        to_lock = self._pool.to_lock(gang, None if self._policy.exclusive else cores)
        gang.begin(Turn(job, gang.master_address, cores, to_lock))
        trial.phase = TrialPhase.RUNNING
        trial.attempt = attempt = Attempt(trial, job.attempt, gang, gang.num_turns)
        self._note_company()
        self._tell(TrialStarted(trial.spec, job.attempt), trial.uid)
        limit_s = self._config.settings.trial_timeout_s
        if limit_s is not None:
            hung = Failure(FailureKind.HUNG, f"took longer than {limit_s:g} s", log_path=str(job.log_path(0)))
            self._kill_later(attempt, limit_s, hung)

    def _note_company(self) -> None:
        """Record in each running attempt which others run at the same time."""
        running = [trial.attempt for trial in self._trials.values() if trial.phase is TrialPhase.RUNNING]
        hosts = {attempt: set(attempt.gang.hosts.values()) for attempt in running if attempt}
        spread = [attempt for attempt, mine in hosts.items() if len(mine) > 1]
        for attempt, mine in hosts.items():
            num_sharing = sum(bool(mine & theirs) for theirs in hosts.values()) - 1
            attempt.num_beside = max(attempt.num_beside, len(hosts) - 1)
            attempt.num_sharing = max(attempt.num_sharing, num_sharing)
        for attempt in spread:
            attempt.num_sharing_network = max(attempt.num_sharing_network, len(spread) - 1)

    def _kill_later(self, attempt: Attempt, delay_s: float, failure: Failure | None = None) -> None:
        def kill() -> None:
            if attempt.is_training:
                attempt.kill(failure)
                self._on_change()

        attempt.timers.append(self._call_later(delay_s, kill))

    def _stop(self, trial: Trial) -> None:
        """End a trial at its next report; kill it if it doesn't get there in time."""
        if trial.phase is TrialPhase.OVER or trial.stop_requested:
            return
        trial.stop_requested = True
        if trial.attempt is None:
            self._queue.remove(trial)
            self._conclude(trial, None)
        else:
            self._kill_later(trial.attempt, self._config.settings.stop_grace_s)

    def _retry_or_conclude(self, trial: Trial, failure: Failure | None) -> None:
        """Queue a trial again after an attempt, or conclude it. `failure` is None if the attempt succeeded."""
        if trial.attempt is not None:
            trial.attempt.end()
        notice = self._stopped.note(trial.spec, failure, has_reported=bool(trial.reports))
        retried = failure is not None and is_retried(failure, trial.num_attempts, self._config.max_retries)
        is_over = trial.stop_requested or self._stopped.refusal(trial.spec) is not None
        if failure is not None and retried and not is_over:
            self._tell(TrialRetried(trial.spec, failure.message), trial.uid)
            if failure.kind is FailureKind.DEVICE and trial.attempt is not None:
                workers = trial.attempt.gang.workers
                on = [workers[failure.rank]] if failure.rank in workers else workers.values()
                trial.failed_on |= {worker.host for worker in on}
            trial.phase, trial.attempt = TrialPhase.QUEUED, None
            self._queue.insert(0, trial)
        else:
            self._conclude(trial, failure)
        if notice is not None:
            self._tell(Notice(notice))

    def _wait_for_cores(self, attempt: Attempt) -> None:
        """Retry a trial later that could not begin because other studies hold its cores."""
        trial, hostnames = attempt.trial, attempt.gang.hostnames
        attempt.end()
        trial.phase, trial.attempt, trial.num_attempts = TrialPhase.QUEUED, None, trial.num_attempts - 1
        held = (f"{end.cores_held_by} on {hostnames[rank]}" for rank, end in attempt.ends.items() if end.cores_held_by)
        if (text := WAITING_FOR_CORES.format(", ".join(dict.fromkeys(held)))) != self._last_wait:
            self._last_wait = text
            self._tell(Notice(text))
        self._queue.insert(0, trial)
        self._is_paused = True
        self._call_later(CORES_POLL_S, self._resume)

    def _resume(self) -> None:
        self._is_paused = False
        self.dispatch()

    def _conclude(self, trial: Trial, failure: Failure | None) -> None:
        """Build the result of a trial that is over."""
        attempt, ends = trial.attempt, trial.attempt.ends if trial.attempt else {}
        result = trial_result(
            trial.spec,
            ends,
            metric=self._config.metric,
            reports=trial.reports,
            attempts=max(1, trial.num_attempts),
            started_at=attempt.started_at if attempt else time.time(),
            conditions=attempt.conditions() if attempt else NO_CONDITIONS,
            failure=failure,
        )
        if attempt is not None:
            result = replace(result, wall_s=attempt.elapsed_s)
        trial.phase, trial.result = TrialPhase.OVER, result
        if result.is_complete and result.wall_s is not None:
            self._walls_s[point_label(trial.spec.point)].append(result.wall_s)
        self._tell(TrialEnded(result), trial.uid)
        if trial.released:
            del self._trials[trial.uid]
