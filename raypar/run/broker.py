"""The broker: an actor that owns a study's gangs and brings trials and gangs together.

Tune's trials ask it how they are going (`follow`), gangs' workers ask it for work (`hello`, `next_assignment`,
`report`, `finish`), the driver defines trials, hears what happens (`news`) and takes results (`take`). Which trial runs
where, `raypar.run.schedule` decides; cores are leased for the time of a trial, so that parked gangs hold none.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from raypar.run.attempt import Attempt, note_company
from raypar.run.events import (
    ClusterChanged,
    Event,
    GangReady,
    GangStarting,
    Notice,
    TrialReported,
    TrialRetried,
    TrialStarted,
)
from raypar.run.gang import Assignment, Greeting
from raypar.run.gangs import Gang, GangPolicy, GangPool
from raypar.run.line import Line
from raypar.run.runner import RunSettings, is_retried
from raypar.run.schedule import num_machines
from raypar.run.supervise import RankEnd, cause
from raypar.study.trial import Failure, FailureKind, TrialResult, TrialSpec
from raypar.trace import mark

POLL_S = 10.0  # how long a question waits for news before it is asked anew
LOOK_S = 5.0  # how often to look whether others have added nodes
LEASE_S = 60.0  # a trial whose Tune trainable asks nothing for so long has lost it
CLOSE_S = 10.0


@dataclass(frozen=True)
class BrokerConfig:
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


class Broker:
    """See the module. Every method runs on one event loop, so that none is interrupted between two awaits."""

    def __init__(self, config: BrokerConfig) -> None:
        self._config = config
        self._changed = asyncio.Condition()
        self._runs: dict[str, Attempt] = {}
        self._news: list[Event] = []
        self._num_told = 0
        self._orphans: set[str] = set()
        # Importing TorchTrainer takes seconds: alongside what else starts, not after it.
        threading.Thread(target=_import_trainer, daemon=True).start()

    async def start(self, specs: tuple[TrialSpec, ...]) -> int:
        """Make ready, and start gangs for the first of the specs while Tune is still starting.

        Returns how many trials can run at a time; `ClusterChanged` tells when that changes.
        """
        self._pool = GangPool(self._config.settings, self._config.policy, self._gang_ended)
        self._housekeeper = asyncio.ensure_future(self._keep_house())
        self._line = Line(self._config.max_trials, specs)
        await self._wake()
        return self._num_slots

    # ---- for the driver and Tune's trials

    async def define(self, uid: str, spec: TrialSpec | None) -> None:
        """Say that there is a Tune trial `uid`, and what it is to do. None: the next of the specs from the start."""
        if spec is None:
            self._line.add_carrier(uid)
        else:
            run = self._runs[uid] = Attempt(uid, spec)
            self._line.add(run)
        await self._wake()

    async def follow(self, uid: str, after: int) -> tuple[list[Mapping[str, float]], str | None]:
        """The reports after the first `after`, and the final state where the trial is over; waits for either.

        Asking with a larger `after` says that Tune wants the trial to go on past the reports before.
        """
        await self._until(lambda: uid in self._runs, POLL_S)
        run = self._runs.get(uid)
        if run is None:
            return [], None
        run.decided = max(run.decided, after - 1)
        await self._tell()
        run.followed_s = float("inf")

        def has_news() -> bool:
            now = self._runs.get(uid)  # a later attempt, maybe; none where the driver has taken the result
            return now is None or len(now.reports) > after or now.result is not None

        await self._until(has_news, POLL_S)
        run = self._runs.get(uid, run)
        run.followed_s = time.monotonic()
        return run.reports[after:], run.result.state.value if run.result else None

    async def stop(self, uid: str) -> None:
        """End a trial at its next report; kill it where it doesn't get there in time."""
        run = self._runs.get(uid)
        if run is None and (run := self._line.given_to(uid)) is not None:
            self._runs[uid] = run
        if run is None or run.result is not None:
            return
        run.stop_wanted = True
        if run.gang is None:
            self._line.remove(run)
            run.conclude(None)
        else:
            grace_s = self._config.settings.stop_grace_s
            run.timers.append(asyncio.get_running_loop().call_later(grace_s, self._kill_soon, run))
        await self._wake()

    async def run_on(self, uid: str) -> None:
        """The trial's Tune trainable is gone: what runs does so to its end without. Returns when it is over."""
        run = self._runs.get(uid)
        if run is None or run.gang is None:  # it has not begun: whoever waits here may be what it waits for
            return
        self._orphans.add(uid)
        await self._wake()
        await self._until(lambda: self._runs[uid].result is not None)

    async def take(self, uid: str) -> tuple[TrialResult, bytes, int]:
        """A trial's result, once it is over, its artifacts if those are shipped, and how many news there were before;
        the broker forgets the trial."""
        await self._until(lambda: self._runs[uid].result is not None)
        run = self._runs.pop(uid)
        assert run.result is not None
        return run.result, run.artifacts, self._num_told + len(self._news)

    async def news(self) -> list[Event]:
        """What has happened since it was last asked; waits for something, though not for ever."""
        await self._until(lambda: bool(self._news), POLL_S)
        told, self._news = self._news, []
        self._num_told += len(told)
        return told

    async def close(self) -> None:
        """Stop what runs and let the gangs go."""
        self._housekeeper.cancel()
        self._line.close()
        self._pool.ask_for_nodes(())
        for run in list(self._runs.values()):
            await self.stop(run.uid)
            self._kill_soon(run)
        for gang in self._pool.gangs.values():
            gang.is_closing = True
        await self._wake()
        await self._until(lambda: not self._pool.gangs, CLOSE_S)

    # ---- for the gangs' workers

    async def hello(self, gang_id: str, rank: int, greeting: Greeting) -> str:
        """A worker is up. Returns its node's fork server's address (empty where ranks are fresh interpreters)."""
        gang = self._pool.gangs[gang_id]
        address = await self._pool.greet(gang, rank, greeting)
        if len(gang.workers) == gang.placement.num_workers:
            mark("broker: gang is ready")
            self._news.append(GangReady(gang.placement, time.monotonic() - gang.started_s))
        return address

    async def next_assignment(
        self, gang_id: str, rank: int, turn: int, master_address: tuple[str, int] | None
    ) -> Assignment | None:
        """What a worker is to do next; waits for it. None: nothing more, leave."""
        gang = self._pool.gangs[gang_id]
        if master_address is not None:
            gang.master_address = master_address
        self._pool.ready(gang, rank)
        await self._wake()
        await self._until(lambda: gang.num_turns > turn or (gang.is_closing and gang.current is None))
        if gang.num_turns <= turn:
            return None
        gang.waiting.discard(rank)
        run: Attempt = gang.current
        settings = self._config.settings
        return Assignment(
            uid=run.uid,
            workload=self._config.workload,
            config=run.spec.config,
            seed=run.spec.seed,
            master_address=gang.master_address,
            cores=run.cores.get(rank, ()),
            environment=settings.environment,
            sys_path=settings.sys_path,
            log_path=str(settings.log_path(run.spec, run.number, rank)),
            artifact_dir=str(settings.artifact_dir(run.spec)),
            ships_artifacts=settings.ships_artifacts,
            num_profiled_steps=settings.profiled_steps(run.spec),
            only_profiles=settings.only_profiles,
            attempt=run.number,
        )

    async def report(self, uid: str, attempt: int, rank: int, index: int, metrics: Mapping[str, float] | None) -> bool:
        """A rank's report. The answer (go on?) is the same for every rank: the first one to ask fixes it."""
        run = self._attempt(uid, attempt)
        if run is None:
            return False
        if rank == 0 and metrics is not None:
            run.reports.append(metrics)
            self._news.append(TrialReported(run.spec, metrics))
            await self._tell()
        if self._config.in_lockstep:
            await self._until(lambda: run.decided >= index or run.stop_wanted or run.kill or uid in self._orphans)
        return run.verdicts.setdefault(index, not run.stop_wanted)

    async def wait_for_kill(self, uid: str, attempt: int) -> bool:
        """True when a rank has to be killed, False when its trial is over without."""
        run = self._attempt(uid, attempt)
        if run is None:
            return False
        await self._until(lambda: run.kill or run.gang is None or run.result is not None)
        return run.kill

    async def finish(self, gang_id: str, uid: str, attempt: int, rank: int, end: RankEnd) -> None:
        """A rank has ended."""
        run = self._attempt(uid, attempt)
        if run is None or run.gang is None:
            return
        run.ends[rank] = end
        run.first_failure = cause(run.first_failure, end)
        if end.failure is not None:
            run.kill = True  # the peers may hang in a collective
        if len(run.ends) == run.gang.placement.num_workers:
            self._pool.release(run.gang, run.cores)
            # A rank that was killed because it didn't stop in time is no failure; its error would be one.
            why = run.first_failure
            killed = run.stop_wanted and why is not None and why.kind in (FailureKind.CRASH, FailureKind.PEER_LOST)
            self._retry_or_conclude(run, None if killed else why)
        await self._wake()

    # ---- inside

    def _attempt(self, uid: str, attempt: int) -> Attempt | None:
        run = self._runs.get(uid)
        return run if run is not None and run.number == attempt else None

    def _retry_or_conclude(self, run: Attempt, failure: Failure | None) -> None:
        if failure is not None and not run.stop_wanted and is_retried(failure, run.number, self._config.max_retries):
            run.give_up()
            self._news.append(TrialRetried(run.spec, failure.message))
            again = Attempt(run.uid, run.spec, run.number + 1, followed_s=run.followed_s)
            self._runs[run.uid] = again
            self._line.add(again, first=True)
        else:
            run.conclude(failure)
            if run.result is not None:
                self._line.took.note(run.result)

    def _pump(self) -> None:
        """Start what can be started."""
        if self._line.is_empty:
            return
        self._look()
        steps = self._line.steps(self._pool)
        for run, failure in steps.refused:
            self._runs[run.uid] = run
            self._line.remove(run)
            run.conclude(failure)
        for run, gang in steps.starts:
            self._runs[run.uid] = run
            if (cores := self._pool.lease(gang, run.spec)) is not None:
                self._line.remove(run)
                self._start_run(run, gang, cores)
        for gang_id in steps.closes:
            self._pool.gangs[gang_id].is_closing = True
        for placement, on in steps.opens:
            self._news.append(GangStarting(placement))
            self._pool.start(placement, on)
        for placement in self._pool.ask_for_nodes(steps.lack_nodes):
            self._news.append(Notice(f"{placement}: waiting for the cluster to add nodes"))

    def _look(self) -> None:
        """See which nodes there are, and tell where they are others than before."""
        if self._pool.look():
            self._news.append(ClusterChanged(len(self._pool.nodes), self._num_slots))

    @property
    def _num_slots(self) -> int:
        return self._config.max_trials or max(1, num_machines(self._pool.nodes))

    def _start_run(self, run: Attempt, gang: Gang, cores: dict[int, tuple[int, ...]]) -> None:
        gang.current = run
        gang.num_turns += 1
        run.begin(gang, cores)
        note_company([gang.current for gang in self._pool.gangs.values() if gang.current is not None])
        self._news.append(TrialStarted(run.spec, run.number))
        limit_s = self._config.settings.trial_timeout_s
        if limit_s is not None:
            log_path = str(self._config.settings.log_path(run.spec, run.number, 0))
            failure = Failure(FailureKind.HUNG, f"took longer than {limit_s:g} s", log_path=log_path)
            run.timers.append(asyncio.get_running_loop().call_later(limit_s, self._kill_soon, run, failure))

    async def _gang_ended(self, gang: Gang, error: str) -> None:
        run: Attempt | None = gang.current
        if run is not None and run.result is None:
            self._pool.release(gang, run.cores)
            self._retry_or_conclude(
                run, Failure(FailureKind.GANG_LOST, f"its gang was lost: {_cut(error)}", None, error)
            )
        elif not gang.num_turns and not gang.is_closing:
            # It never served anybody: to try again for ever would help nobody.
            first = self._line.first_of(gang.placement)
            if first is not None:
                self._runs[first.uid] = first
                self._line.remove(first)
                failure = Failure(FailureKind.GANG_LOST, f"its gang did not start: {error[:2000]}")
                self._retry_or_conclude(first, failure)
        await self._wake()

    def _kill_soon(self, run: Attempt, failure: Failure | None = None) -> None:
        if run.is_running:
            run.first_failure = run.first_failure or failure
            run.kill = True
            self._waking = asyncio.ensure_future(self._wake())

    async def _keep_house(self) -> None:
        """Stop trials whose Tune trainable was lost, which can't say goodbye, and whose driver didn't notice. See which
        nodes have joined or were lost."""
        while True:
            await asyncio.sleep(LOOK_S)
            if not self._config.policy.owns_cluster:
                await self._wake()
            for run in list(self._runs.values()):
                lease_s = time.monotonic() - run.followed_s
                if run.result is None and lease_s > LEASE_S and run.uid not in self._orphans:
                    await self.stop(run.uid)

    async def _wake(self) -> None:
        """Something has changed for those that wait for a place, or for news."""
        self._pump()
        await self._tell()

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _until(self, condition: Callable[[], bool], timeout_s: float | None = None) -> None:
        async with self._changed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait_for(condition), timeout_s)


def _cut(error: str) -> str:
    """Ray's errors go on for many lines, most of them about where to look."""
    return error.partition("\n")[0][:500]


def _import_trainer() -> None:
    import ray.train.torch  # noqa: F401

    mark("broker: TorchTrainer imported")
