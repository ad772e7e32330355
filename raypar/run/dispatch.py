"""What is under way: trials, the gangs that run them, and who waits for either.

Which trial runs where, `raypar.run.schedule` decides; here it is done, and trials are tried again or concluded. Cores
are leased for the time of a trial, so that parked gangs hold none.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from raypar.run.attempt import Attempt, note_company
from raypar.run.events import ClusterChanged, Event, GangStarting, Notice, TrialRetried, TrialStarted
from raypar.run.gangs import Gang, GangPolicy, GangPool
from raypar.run.line import Line
from raypar.run.room import num_machines
from raypar.run.runner import RunSettings, is_retried
from raypar.study.trial import Failure, FailureKind, TrialSpec

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
            log_path = str(self.config.settings.log_path(run.spec, run.number, 0))
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
