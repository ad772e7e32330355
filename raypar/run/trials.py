"""Trials of a run, and the attempts at them."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol

from raypar.run.pool import Gang
from raypar.run.ranks import RankEnd
from raypar.run.standstill import Standstill
from raypar.study.conditions import Conditions
from raypar.study.trial import Failure, TrialResult, TrialSpec
from raypar.train.position import Position


class Timer(Protocol):
    def cancel(self) -> None: ...


class TrialPhase(Enum):
    QUEUED = "queued"
    RUNNING = "running"
    OVER = "over"


@dataclass(eq=False)
class Trial:
    """A trial of the run, across all its attempts."""

    spec: TrialSpec
    uid: str = ""  # its name in the run: that of its Tune trial, unless it began before; empty: it has not begun
    tune_id: str = ""  # the Tune trial that is bound to it; empty: none yet
    phase: TrialPhase = TrialPhase.QUEUED
    num_attempts: int = 0
    attempt: Attempt | None = None  # the current one; None while the trial is queued
    num_decided: int = 0  # reports that Tune has decided on
    stop_requested: bool = False  # it ends at its next report
    failed_on: set[str] = field(default_factory=set)  # machines whose GPU failed while it ran there
    preempted: list[str] = field(default_factory=list)  # of each attempt that it was lost with: its nodes, and how
    released: bool = False  # Tune no longer needs it
    # Time of the last call of Tune's trainable for it; infinite during a call.
    followed_s: float = field(default_factory=time.monotonic)
    result: TrialResult | None = None

    @property
    def reports(self) -> list[Mapping[str, float]]:
        return self.attempt.reports if self.attempt else []

    def has_news(self, after: int) -> bool:
        return len(self.reports) > after or self.result is not None

    def follow(self, after: int) -> None:
        """Note that Tune's trainable waits for news after the first `after` reports, and so has decided on those."""
        self.num_decided = max(self.num_decided, after)
        self.followed_s = float("inf")

    def unfollow(self) -> None:
        self.followed_s = time.monotonic()


@dataclass
class Artifacts:
    """Artifacts of a trial on their way to the driver."""

    is_sending: bool = False  # rank 0 has succeeded and sends them
    is_refused: bool = False  # the driver can't store them
    num_pieces: int = 0  # pieces that the driver has not accepted yet


@dataclass(eq=False)
class Attempt:
    """One attempt at a trial, running in a gang."""

    trial: Trial
    number: int  # from 1
    gang: Gang
    log_path: str = ""  # of its first rank
    started_at: float = field(default_factory=time.time)
    started_s: float = field(default_factory=time.monotonic)
    reports: list[Mapping[str, float]] = field(default_factory=list)
    awaiting: dict[int, tuple[int, Position]] = field(
        default_factory=dict
    )  # ranks at a report that rank 0 has not made
    answers: dict[int, bool] = field(default_factory=dict)  # by report: whether to continue, the same for every rank
    kill_requested: bool = False  # its ranks are to be killed
    hangs: bool = False  # that is why
    ends: dict[int, RankEnd] = field(default_factory=dict)  # of the ranks that have ended
    failure: Failure | None = None  # why it failed, judging by the ranks that have ended
    timers: list[Timer] = field(default_factory=list)  # timers that would end it
    is_over: bool = False
    artifacts: Artifacts = field(default_factory=Artifacts)
    conditions: Conditions = field(init=False)  # where it runs, and how many trials run beside it
    standstill: Standstill = field(init=False)

    def __post_init__(self) -> None:
        gang = self.gang
        self.conditions = Conditions(node=tuple(gang.hostnames.values()))
        if not gang.is_local:
            self.conditions = replace(self.conditions, gang=gang.id, nth_in_gang=gang.num_turns)
        self.standstill = Standstill(gang.placement.num_workers, self.log_path)

    @property
    def takes_artifacts(self) -> bool:
        """Return whether its artifacts are still needed."""
        return not (self.artifacts.is_refused or self.kill_requested or self.is_over)

    @property
    def is_training(self) -> bool:
        """Return whether any of its ranks is still running."""
        return len(self.ends) + (self.artifacts.is_sending and 0 not in self.ends) < self.gang.placement.num_workers

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_s

    def is_reported(self, index: int) -> bool:
        """Return whether rank 0 has made this report, or will make no more reports."""
        return len(self.reports) > index or 0 in self.ends or self.kill_requested or self.is_over

    def num_decided(self, in_lockstep: bool) -> int:
        """Return the number of reports with a verdict: with a scheduler (`in_lockstep`), Tune decides on each."""
        trial = self.trial
        if in_lockstep and not (trial.stop_requested or trial.released or self.kill_requested):
            return min(trial.num_decided, len(self.reports))
        return len(self.reports)

    def verdicts(self, first: int, in_lockstep: bool) -> tuple[bool, ...]:
        """Return the verdicts on the reports from index `first` on."""
        return tuple(map(self.continues, range(first, self.num_decided(in_lockstep))))

    @property
    def rest(self) -> bool | None:
        """Return whether ranks continue that wait for a report which rank 0 won't make; None: none waits, or it may."""
        return not self.trial.stop_requested if 0 in self.ends and self.awaiting else None

    def continues(self, index: int) -> bool:
        """Return whether the ranks continue after this report."""
        return self.answers.setdefault(index, not self.trial.stop_requested)

    def kill(self, failure: Failure | None = None) -> None:
        """Request that its ranks be killed. The failure, a hang, is the reason, unless something else failed first."""
        if not self.is_over:
            self.hangs = self.hangs or (failure is not None and not self.kill_requested)
            self.failure = self.failure or failure
            self.kill_requested = True

    def end(self) -> None:
        self.is_over = True
        for timer in self.timers:
            timer.cancel()

    def expect_end(self, expected_s: float | None) -> None:
        """Tell its gang when it is expected to end. `expected_s`: seconds that similar trials took; None: unknown."""
        self.gang.busy_s = self.elapsed_s
        self.gang.ends_in_s = None if expected_s is None else abs(expected_s - self.gang.busy_s)


def note_company(attempts: Collection[Attempt]) -> None:
    """Record in each running attempt how many others run at the same time, and share machines or the network."""
    hosts = {
        attempt: set(attempt.gang.hosts.values())
        for attempt in attempts
        if not attempt.gang.is_local or len(attempts) > 1
    }
    num_spread = sum(len(mine) > 1 for mine in hosts.values())
    for attempt, mine in hosts.items():
        before, num_sharing = attempt.conditions, sum(bool(mine & theirs) for theirs in hosts.values()) - 1
        attempt.conditions = replace(
            before,
            num_beside=max(before.num_beside or 0, len(hosts) - 1),
            num_sharing=max(before.num_sharing or 0, num_sharing),
            num_sharing_network=max(before.num_sharing_network or 0, num_spread - 1 if len(mine) > 1 else 0),
        )


class Trials:
    """Trials of a run: those that are queued, in their order, and those that are bound to Tune trials.

    Args:
        specs: trials that are known in advance. Each Tune trial without a spec is bound to one of them: to one that has
            begun without a Tune trial, or else to the next one to begin.
    """

    def __init__(self, specs: Sequence[TrialSpec]) -> None:
        self.queue = [*map(Trial, specs)]
        self._begun: dict[str, Trial] = {}  # and not dropped, by uid
        self._unbound: list[str] = []  # Tune trials without a spec
        self._bound: dict[str, Trial] = {}  # by Tune trial
        self._num_ahead = 0  # trials that have begun without a Tune trial

    def add(self, specs: Sequence[TrialSpec]) -> None:
        """Add trials that Tune will define later."""
        self.queue += map(Trial, specs)

    def get(self, uid: str) -> Trial | None:
        """Return a trial that has begun, or that is bound; None if there is none, or it was dropped."""
        return self._begun.get(uid)

    def of_tune(self, tune_id: str) -> Trial | None:
        """Return the trial of a Tune trial; None if it is not bound to one, or both were dropped."""
        return self._bound.get(tune_id)

    def attempt(self, uid: str, number: int) -> Attempt | None:
        """Return a trial's attempt of this number; None if it is not the running one."""
        trial = self._begun.get(uid)
        attempt = trial.attempt if trial else None
        return attempt if attempt and attempt.number == number and not attempt.is_over else None

    def bound(self) -> list[Trial]:
        return list(self._bound.values())

    def begun(self) -> list[Trial]:
        """Return the trials that have begun or are bound."""
        return list(self._begun.values())

    def running(self) -> list[Attempt]:
        trials = self._begun.values()
        return [trial.attempt for trial in trials if trial.attempt and trial.phase is TrialPhase.RUNNING]

    def define(self, tune_id: str, spec: TrialSpec | None) -> None:
        """Add a Tune trial with its spec; None: one of those known in advance."""
        if spec is not None:
            self.queue.append(Trial(spec))
            self._bind(self.queue[-1], tune_id)
        elif (ahead := next((trial for trial in self._begun.values() if not trial.tune_id), None)) is not None:
            self._bind(ahead, tune_id)
        else:
            self._unbound.append(tune_id)

    def begin(self, trial: Trial) -> None:
        """Note that a trial begins, and bind a Tune trial to it if one is left."""
        if not trial.tune_id and self._unbound:
            self._bind(trial, self._unbound.pop(0))
        elif not trial.uid:
            self._num_ahead += 1
            trial.uid = f"ahead-{self._num_ahead}"
            self._begun[trial.uid] = trial

    def may_bind(self, trial: Trial) -> bool:
        """Return whether the trial is bound, or a Tune trial is left for it."""
        return bool(trial.tune_id or self._unbound)

    def bind_next(self, tune_id: str) -> Trial | None:
        """Bind this Tune trial to the next queued trial without one; None: it is unknown, or no such trial is left."""
        trial = next((trial for trial in self.queue if not trial.tune_id), None)
        if trial is not None and tune_id in self._unbound:
            self._unbound.remove(tune_id)
            self._bind(trial, tune_id)
            return trial
        return None

    def _bind(self, trial: Trial, tune_id: str) -> None:
        trial.tune_id, trial.uid = tune_id, trial.uid or tune_id
        trial.unfollow()
        self._bound[tune_id] = self._begun[trial.uid] = trial

    def requeue(self, trial: Trial) -> None:
        """Queue a trial again, as the first."""
        trial.phase, trial.attempt = TrialPhase.QUEUED, None
        self.queue.insert(0, trial)

    def drop(self, trial: Trial) -> None:
        del self._bound[trial.tune_id], self._begun[trial.uid]
