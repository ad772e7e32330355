"""Dispatcher of a run: starts its trials in gangs, and follows them to their ends.

`raypar.run.scheduler` decides which trial runs where. This module carries it out. Cores are leased per trial, so idle
gangs hold none.

All specs that are known in advance are queued at the start, since good scheduling needs several trials to choose from.
Nothing here blocks or calls Ray.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

from raypar.run.placement import num_machines, refusal
from raypar.run.pool import Gang, GangPolicy, Greeting, Pool, Turn
from raypar.run.ranks import NO_CONDITIONS, OF_LOST_RANKS, RankEnd, cause, trial_result
from raypar.run.runner import (
    ClusterChanged,
    Event,
    GangReady,
    GangStarting,
    Notice,
    OutOfTime,
    StoppedPoints,
    TrialEnded,
    TrialReported,
    TrialRetried,
    TrialStarted,
    ends_training,
    is_retried,
)
from raypar.run.scheduler import GangPhase, SchedulingPolicy, Waiting, decide
from raypar.run.standstill import explained
from raypar.run.time_limit import TimeLimit
from raypar.run.trials import Attempt, Timer, Trial, TrialPhase, Trials, note_company
from raypar.study.trial import Failure, FailureKind, Placement, TrialResult, TrialSpec
from raypar.train.job import ARTIFACT_FOLDER, RunSettings
from raypar.train.position import Position

COME_BACK_S = 60.0  # how long a trial waits for lost nodes to return if no other place is left
LEASE_S = 60.0  # a Tune trainable that makes no call for this long counts as lost
GANG_START_S = 10.0  # assumed start-up time of a gang, before any has started
CORES_POLL_S = 5.0  # time between attempts to get cores that another study holds
NOT_KEPT = "{}: its artifacts were not stored, {}; they are in {} on {}"
WAITING_FOR_CORES = "a trial waits for cores: {}"
OF_LOST_NODES = (FailureKind.GANG_LOST, FailureKind.KILLED, FailureKind.PEER_LOST)  # the loss of a node looks like it
HORIZON = 500  # maximum number of queued trials that a decision considers


@dataclass(frozen=True)
class ArtifactPiece:
    """Part of a trial's artifacts, on its way to the driver.

    Attributes:
        content: reference to a `raypar.files.FilePiece`; empty: end of the artifacts.
    """

    identity: str
    attempt: int
    content: Sequence[Any]


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
    num_cores: int = 0  # trials known in advance, on fewer cores, may begin before Tune has begun theirs


class EventLog:
    """Events for the driver, each with its trial's uid (or ""). They are kept until the driver has received them."""

    def __init__(self) -> None:
        self._events: list[tuple[str, Event | ArtifactPiece]] = []
        self._num_forgotten = 0

    def add(self, event: Event | ArtifactPiece, uid: str = "") -> None:
        self._events.append((uid, event))

    def has_more(self, after: int) -> bool:
        return self._num_forgotten + len(self._events) > after

    def take(self, after: int) -> list[tuple[str, Event | ArtifactPiece]]:
        """Return the events after the first `after`, and drop earlier ones."""
        del self._events[: after - self._num_forgotten]
        self._num_forgotten = after
        return list(self._events)


NOTHING_EARLIER: Mapping[str, float] = {}


class Durations:
    """Expected durations of trials and of gang starts, in seconds.

    Args:
        earlier_s: seconds that trials of earlier runs took, by point.
    """

    def __init__(self, earlier_s: Mapping[str, float] = NOTHING_EARLIER) -> None:
        self._walls_s: defaultdict[str, list[float]] = defaultdict(list)  # by point
        self._medians_s = dict(earlier_s)
        self._first_ready_s: float | None = None
        self._starts_s: list[float] = []

    @property
    def gang_start_s(self) -> float:
        return statistics.median(self._starts_s or [GANG_START_S])

    def note_ready(self, gang: Gang) -> float:
        """Note that a gang is ready; return how long its start took."""
        now_s = time.monotonic()
        if self._first_ready_s is None:
            self._first_ready_s = now_s
        elif gang.started_s > self._first_ready_s:  # earlier gangs also waited for the nodes' fork servers
            self._starts_s.append(now_s - gang.started_s)
        return now_s - gang.started_s

    def of_trial(self, spec: TrialSpec) -> float | None:
        """Return the median of the point's other repeats; None if none has ended, in this run or an earlier one."""
        return self._medians_s.get(spec.point_name)

    def note_end(self, result: TrialResult) -> None:
        if result.is_complete and result.wall_s is not None:
            walls_s = self._walls_s[result.spec.point_name]
            walls_s.append(result.wall_s)
            self._medians_s[result.spec.point_name] = statistics.median(walls_s)


class Places:
    """Placements that the nodes of a pool can hold."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._placeable_s: dict[Placement, float] = {}  # when it last had a place

    def refusals(self, placements: Collection[Placement]) -> tuple[dict[Placement, Failure], list[Placement]]:
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

    def machines(self, node_ids: Iterable[str]) -> set[str]:
        """Return the machines of these nodes, of those that are up."""
        ids = set(node_ids)
        return {node.machine for node in self._pool.nodes if node.id in ids}

    def avoided(self, trial: Trial) -> frozenset[str]:
        """Return the nodes whose GPU failed under a trial; none if the other nodes could never hold it."""
        if not trial.failed_on:
            return frozenset()
        nodes = self._pool.nodes
        avoided = frozenset(node.id for node in nodes if node.machine in trial.failed_on)
        rest = [node for node in nodes if node.id not in avoided]
        placement = trial.spec.placement
        if avoided and refusal(placement, [node.has for node in rest], [node.labels for node in rest]) is not None:
            return frozenset()
        return avoided


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
        self.trials, self.events, self.durations = Trials(specs), EventLog(), Durations(config.settings.expected_s)
        self._config, self._pool, self._places = config, pool, Places(pool)
        self._call_later, self._on_change = call_later, on_change
        self._stopped = StoppedPoints()
        self._policy = SchedulingPolicy(config.max_trials, pool.reserved, config.gangs.max_parked)
        ends_at = config.settings.ends_at
        self._limit = None if ends_at is None else TimeLimit(ends_at, self.durations.of_trial)
        self._is_out_of_time = False
        self._is_held = self._is_asked = False  # within `one_decision`, and asked there to decide
        self._is_paused = False  # while another study holds cores of a trial
        self._last_wait = ""  # last message about waiting for cores of other studies
        self._notices: set[str] = set()  # notices of workers that were shown

    @property
    def num_slots(self) -> int:
        """Number of trials that can run at a time. A `ClusterChanged` event reports changes."""
        return self._config.max_trials or max(1, num_machines(self._pool.nodes))

    # ---- calls from Tune and the driver

    def add(self, specs: Sequence[TrialSpec]) -> None:
        """Add trials that Tune will define later."""
        self.trials.add(specs)
        self.dispatch()

    def define(self, tune_id: str, spec: TrialSpec | None) -> None:
        """Add a Tune trial. It runs the spec, or one of the specs known in advance."""
        self.trials.define(tune_id, spec)
        self.dispatch()

    def release(self, tune_id: str, *, let_finish: bool) -> str:
        """End a trial that Tune no longer needs, unless it may finish. Drop it once it is over.

        Returns:
            The trial's uid; empty if there is none.
        """
        trial = self.trials.of_tune(tune_id) or self.trials.bind_next(tune_id)
        if trial is None:
            return ""
        trial.released = True
        if trial.phase is TrialPhase.OVER:
            self.trials.drop(trial)
        elif not let_finish:
            self._stop(trial)
        self.dispatch()
        return trial.uid

    def check(self) -> None:
        """Stop trials whose Tune trainable was lost, and check which nodes have joined or were lost."""
        self._look_at_nodes()
        now_s = time.monotonic()
        for trial in self.trials.bound():
            if not trial.released and now_s - trial.followed_s > LEASE_S:
                self._stop(trial)
        self.dispatch()

    def close(self) -> None:
        """Stop running trials and close the gangs."""
        begun = self.trials.begun()
        self.trials.queue = [trial for trial in self.trials.queue if trial in begun]
        self._pool.request_nodes(())
        for trial in begun:
            self._stop(trial)
            if trial.attempt is not None:
                trial.attempt.kill()
        self._pool.close()
        self.dispatch()

    # ---- calls from gangs and ranks

    def worker_is_up(self, gang_id: str, greeting: Greeting) -> None:
        gang = self._pool.greet(gang_id, greeting)
        if gang.is_complete:
            self.events.add(GangReady(gang.placement, self.durations.note_ready(gang)))
            self._on_change()

    def attempt_in(self, gang: Gang, turn: int) -> Attempt | None:
        """Return the attempt of a gang's trial number `turn` (from 1); None if it is not the running one."""
        if gang.turn is None or gang.num_turns != turn:
            return None
        return self.trials.attempt(gang.turn.uid, gang.turn.attempt)

    def worker_is_ready(self, gang_id: str, rank: int, master_address: tuple[str, int] | None) -> None:
        """Note that a worker is ready for its gang's next trial; rank 0 has chosen an address for it."""
        gang = self._pool.gangs[gang_id]
        gang.worker_is_ready(rank, master_address)
        if gang.phase is GangPhase.IDLE:
            self.dispatch()

    def notify(self, text: str) -> None:
        """Show the user a notice once, even if several workers send it."""
        if text not in self._notices:
            self._notices.add(text)
            self.events.add(Notice(text))
            self._on_change()

    def report(self, attempt: Attempt, metrics: Mapping[str, float]) -> None:
        """Record a report of rank 0 of a running trial."""
        attempt.reports.append(metrics)
        self.events.add(TrialReported(attempt.trial.spec, metrics), attempt.trial.uid)
        if ends_training(attempt.trial.spec, metrics, self._config.metric):
            self._stop(attempt.trial)
        self._on_change()

    def rank_reported(
        self, attempt: Attempt, rank: int, index: int, metrics: Mapping[str, float] | None, position: Position
    ) -> None:
        """Note that a rank waits at a report. The metrics are rank 0's, whose report the others wait for."""
        if rank == 0 and metrics is not None:
            self.report(attempt, metrics)
            for other in [other for other, (at, _) in attempt.awaiting.items() if at <= index]:
                self.note_position(attempt, other, attempt.awaiting.pop(other)[1])
        elif index >= len(attempt.reports):
            attempt.awaiting[rank] = index, position
            if 0 in attempt.ends:
                self._on_change()
            else:
                position = replace(position, is_out=True)
        self.note_position(attempt, rank, position)

    def send(self, attempt: Attempt, content: Sequence[Any]) -> None:
        """Send a piece of the artifacts of a trial whose rank 0 has ended (see `ArtifactPiece`)."""
        attempt.artifacts.is_sending = True
        attempt.artifacts.num_pieces += 1
        self.events.add(ArtifactPiece(attempt.trial.spec.identity, attempt.number, content), attempt.trial.uid)
        self._on_change()

    def piece_taken(self, attempt: Attempt, problem: str) -> None:
        """Note that the driver accepted a piece, or can't store the artifacts (`problem`). The result stays."""
        artifacts = attempt.artifacts
        artifacts.num_pieces -= 1
        if problem and not artifacts.is_refused:
            artifacts.is_refused = True
            spec, folder = attempt.trial.spec, self._config.settings.log_dir
            node = attempt.gang.hostnames.get(0, "its node")
            path = folder / spec.identity / ARTIFACT_FOLDER
            self.events.add(Notice(NOT_KEPT.format(spec.label, problem, path, node)))
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
            self._on_change()
        if rank == 0 and attempt.awaiting:
            for other, (_, position) in attempt.awaiting.items():
                self.note_position(attempt, other, position)
            self._on_change()
        if len(attempt.ends) == attempt.gang.placement.num_workers:
            self._pool.release(attempt.gang)
            failure, is_stopped = explained(attempt.failure, attempt.ends), attempt.trial.stop_requested
            if attempt.hangs and failure is not None and not failure.traceback:
                failure = replace(failure, traceback=_log_of(attempt.ends.get(failure.rank or 0)))
            if not is_stopped and any(end.cores_held_by for end in attempt.ends.values()):
                self._wait_for_cores(attempt)
                return
            if is_stopped and failure and failure.kind in OF_LOST_RANKS:
                failure = None  # killed because it didn't stop in time; an error in its code would be a failure
            self._retry_or_conclude(attempt.trial, self._explained_by_nodes(attempt.gang, failure))
            self.dispatch()

    def gang_ended(self, gang: Gang, reason: str, error: str) -> None:
        """Note the end of a gang that was closed, was lost or failed to start.

        Args:
            reason: why it was lost, in one line.
            error: the whole error.
        """
        self._look_at_nodes()
        trial = self.trials.get(gang.turn.uid) if gang.turn else None
        if trial is not None:
            self._pool.release(gang)
            failure = Failure(FailureKind.GANG_LOST, f"its gang was lost: {reason}", None, error)
            self._retry_or_conclude(trial, self._explained_by_nodes(gang, failure))
        elif not gang.num_turns and not gang.is_closing:
            # It never served a trial, so retrying forever would not help.
            same = (trial for trial in self.trials.queue[:HORIZON] if trial.spec.placement == gang.placement)
            if (first := next(filter(self._may_begin, same), None)) is not None:
                self.trials.begin(first)
                self.trials.queue.remove(first)
                first.num_attempts += 1
                failure = Failure(FailureKind.GANG_LOST, f"its gang did not start: {reason}", None, error)
                self._retry_or_conclude(first, self._explained_by_nodes(gang, failure))
        self.dispatch()

    # ---- inside

    def _look_at_nodes(self) -> None:
        if self._pool.refresh():
            self.events.add(ClusterChanged(len(self._pool.nodes), self.num_slots))

    @contextlib.contextmanager
    def one_decision(self) -> Iterator[None]:
        """Decide once, after the block, what starts, if anything in it asks for that."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
        if self._is_asked:
            self.dispatch()

    def dispatch(self) -> None:
        """Start all trials and gangs that can be started."""
        self._is_asked = self._is_held
        if self._is_held:
            return
        if self.trials.queue and not self._is_paused:
            self._dispatch()
        self._on_change()

    def _dispatch(self) -> None:
        head = self.trials.queue[:HORIZON]
        refused, lacking = self._places.refusals(dict.fromkeys(trial.spec.placement for trial in head))
        failures = {trial: self._stopped.refusal(trial.spec) or refused.get(trial.spec.placement) for trial in head}
        candidates = self._in_time([trial for trial, failure in failures.items() if failure is None])
        for attempt in self.trials.running():
            attempt.expect_end(self.durations.of_trial(attempt.trial.spec))
        decisions = decide(
            [Waiting(t.spec.placement, self.durations.of_trial(t.spec), self._places.avoided(t)) for t in candidates],
            list(self._pool.gangs.values()),
            self._pool.nodes,
            self._policy,
            gang_start_s=0.0 if self._config.gangs.is_local else self.durations.gang_start_s,
            is_short_of_memory=self._pool.is_short_of_memory,
        )
        gang_of = {candidates[i]: self._pool.gangs[gang_id] for i, gang_id in decisions.starts}
        is_turn = True  # no earlier trial waits; before a later trial's turn, nodes may join
        for trial, failure in failures.items():
            gang = gang_of.get(trial)
            if gang is not None and (reason := self._pool.refusal(gang, trial.spec)) is not None:
                failure = Failure(FailureKind.REFUSED, reason)
            elif not is_turn:
                failure = None
            if (gang is None and failure is None) or not self._may_begin(trial):
                is_turn = False
            elif failure is not None:
                self.trials.begin(trial)
                self.trials.queue.remove(trial)
                self._conclude(trial, failure)
            elif gang is not None:
                self._start(trial, gang)
        for gang_id in decisions.closes:
            self._pool.gangs[gang_id].close()
        for placement, nodes in decisions.opens:
            self.events.add(GangStarting(placement))
            self._pool.start(placement, nodes, self.gang_ended)
        for placement in self._pool.request_nodes(lacking):
            self.events.add(Notice(f"{placement}: waiting for the cluster to add nodes"))

    def _in_time(self, trials: list[Trial]) -> list[Trial]:
        """Return the trials that may start in view of the run's time limit."""
        if self._limit is None or not trials:
            return trials
        is_in_time = self._limit.in_time([trial.spec for trial in trials], self.num_slots)
        left = list(compress(trials, is_in_time))
        if not (left or self._is_out_of_time or self.trials.running()):
            self._is_out_of_time = True
            self.events.add(OutOfTime(self._limit.left_s))
        return left

    def _may_begin(self, trial: Trial) -> bool:
        """Return whether a trial has a Tune trial, or leaves the driver a core for what it has to do meanwhile."""
        return self.trials.may_bind(trial) or trial.spec.placement.num_cpus < self._config.num_cores

    def _start(self, trial: Trial, gang: Gang) -> None:
        """Start a queued trial in the gang if the cores that it needs are free."""
        cores = self._pool.lease(gang, trial.spec)
        if cores is None:
            return
        self.trials.begin(trial)
        self.trials.queue.remove(trial)
        trial.num_attempts += 1
        log_path = str(self._config.settings.log_path(trial.spec, trial.num_attempts))
        to_lock = self._pool.to_lock(gang, None if self._policy.exclusive else cores)
        if self._limit is not None:
            self._limit.note_start(trial.spec)
        gang.begin(Turn(trial.spec, trial.num_attempts, trial.uid, gang.master_address, cores, to_lock))
        trial.phase = TrialPhase.RUNNING
        trial.attempt = attempt = Attempt(trial, trial.num_attempts, gang, log_path)
        note_company(self.trials.running())
        self.events.add(TrialStarted(trial.spec, attempt.number), trial.uid)
        limit_s = self._config.settings.trial_timeout_s
        if limit_s is not None:
            hung = Failure(FailureKind.HUNG, f"took longer than {limit_s:g} s", log_path=log_path)
            self._kill_later(attempt, limit_s, hung)

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
            self.trials.queue.remove(trial)
            self._conclude(trial, None)
        else:
            self._kill_later(trial.attempt, self._config.settings.stop_grace_s)

    def _explained_by_nodes(self, gang: Gang, failure: Failure | None) -> Failure | None:
        """Return why an attempt failed: its nodes left on purpose, if that is why processes of it were lost."""
        if failure is None or failure.kind not in OF_LOST_NODES or not (ways := self._pool.departed(gang)):
            return failure
        text = ", ".join(f"node {name} {way}" for name, way in ways.items())
        details = f"{failure.message}\n{failure.traceback}".strip()
        return replace(failure, kind=FailureKind.PREEMPTED, message=text, traceback=details)

    def _retry_or_conclude(self, trial: Trial, failure: Failure | None) -> None:
        """Queue a trial again after an attempt, or conclude it. `failure` is None if the attempt succeeded."""
        if trial.attempt is not None:
            trial.attempt.end()
        notice = self._stopped.note(trial.spec, failure, has_reported=bool(trial.reports))
        num_counted = trial.num_attempts - len(trial.preempted)
        if failure is not None and failure.kind is FailureKind.PREEMPTED:
            trial.preempted.append(failure.message)
            num_counted = len(trial.preempted)
        retried = failure is not None and is_retried(failure, num_counted, self._config.max_retries)
        is_over = trial.stop_requested or self._stopped.refusal(trial.spec) is not None
        if failure is not None and retried and not is_over:
            self.events.add(TrialRetried(trial.spec, failure.message), trial.uid)
            if failure.kind is FailureKind.DEVICE and trial.attempt is not None:
                workers = trial.attempt.gang.workers
                on = [workers[failure.rank]] if failure.rank in workers else workers.values()
                trial.failed_on |= self._places.machines(worker.node_id for worker in on)
            self.trials.requeue(trial)
        else:
            self._conclude(trial, failure)
        if notice is not None:
            self.events.add(Notice(notice))

    def _wait_for_cores(self, attempt: Attempt) -> None:
        """Retry a trial later that could not begin because other studies hold its cores."""

        def resume() -> None:
            self._is_paused = False
            self.dispatch()

        trial, hostnames = attempt.trial, attempt.gang.hostnames
        attempt.end()
        trial.num_attempts -= 1
        held = (f"{end.cores_held_by} on {hostnames[rank]}" for rank, end in attempt.ends.items() if end.cores_held_by)
        if (text := WAITING_FOR_CORES.format(", ".join(dict.fromkeys(held)))) != self._last_wait:
            self._last_wait = text
            self.events.add(Notice(text))
        self.trials.requeue(trial)
        self._is_paused = True
        self._call_later(CORES_POLL_S, resume)

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
            conditions=attempt.conditions if attempt else NO_CONDITIONS,
            failure=failure,
        )
        if attempt is not None:
            conditions = replace(result.conditions, preempted=tuple(trial.preempted))
            result = replace(result, wall_s=attempt.elapsed_s, conditions=conditions)
        trial.phase, trial.result = TrialPhase.OVER, result
        self.durations.note_end(result)
        self.events.add(TrialEnded(result), trial.uid)
        if trial.released:
            self.trials.drop(trial)


def _log_of(end: RankEnd | None) -> str:
    """Return the end of the log of a rank that raypar has killed: what it, and NCCL's RAS, said last."""
    return end.failure.traceback if end is not None and end.failure is not None and end.was_killed else ""
