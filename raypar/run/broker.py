"""The broker: an actor that brings a study's trials and gangs together.

Tune's trials ask it how they are going (`follow`), gangs' workers ask it for work (`hello`, `next_turn`,
`report`, `finish`), the driver defines trials, hears what happens (`news`) and takes results (`take`). What is done
about it all, `raypar.run.dispatcher` knows.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from raypar.run.dispatcher import Attempt, DispatchConfig, Dispatcher
from raypar.run.gang import Greeting, Turn
from raypar.run.ranks import RankEnd, cause
from raypar.run.runner import Event, GangReady, TrialReported
from raypar.study.trial import FailureKind, TrialResult, TrialSpec
from raypar.trace import mark
from raypar.train.job import TrialJob

POLL_S = 10.0  # how long a question waits for news before it is asked anew


class Broker:
    """See the module. Every method runs on one event loop, so that none is interrupted between two awaits."""

    def __init__(self, config: DispatchConfig) -> None:
        self._config = config
        self._dispatcher = Dispatcher(config)
        self._num_told = 0
        # Importing TorchTrainer takes seconds: alongside what else starts, not after it.
        threading.Thread(target=_import_trainer, daemon=True).start()

    async def start(self, specs: tuple[TrialSpec, ...]) -> int:
        """Make ready, and start gangs for the first of the specs while Tune is still starting.

        Returns how many trials can run at a time; `ClusterChanged` tells when that changes.
        """
        await self._dispatcher.start(specs)
        return self._dispatcher.num_slots

    # ---- for the driver and Tune's trials

    async def define(self, uid: str, spec: TrialSpec | None) -> None:
        """Say that there is a Tune trial `uid`, and what it is to do. None: the next of the specs from the start."""
        if spec is None:
            self._dispatcher.line.add_carrier(uid)
        else:
            run = self._dispatcher.runs[uid] = Attempt(uid, spec)
            self._dispatcher.line.add(run)
        await self._dispatcher.wake()

    async def follow(self, uid: str, after: int) -> tuple[list[Mapping[str, float]], str | None]:
        """The reports after the first `after`, and the final state where the trial is over; waits for either.

        Asking with a larger `after` says that Tune wants the trial to go on past the reports before.
        """
        await self._dispatcher.until(lambda: uid in self._dispatcher.runs, POLL_S)
        run = self._dispatcher.runs.get(uid)
        if run is None:
            return [], None
        run.decided = max(run.decided, after - 1)
        await self._dispatcher.tell()
        run.followed_s = float("inf")

        def has_news() -> bool:
            now = self._dispatcher.runs.get(uid)  # a later attempt, maybe; none where the driver has taken the result
            return now is None or len(now.reports) > after or now.result is not None

        await self._dispatcher.until(has_news, POLL_S)
        run = self._dispatcher.runs.get(uid, run)
        run.followed_s = time.monotonic()
        return run.reports[after:], run.result.state.value if run.result else None

    async def stop(self, uid: str) -> None:
        """End a trial at its next report; kill it where it doesn't get there in time."""
        await self._dispatcher.stop(uid)

    async def run_on(self, uid: str) -> None:
        """The trial's Tune trainable is gone: what runs does so to its end without. Returns when it is over."""
        run = self._dispatcher.runs.get(uid)
        if run is None or run.gang is None:  # it has not begun: whoever waits here may be what it waits for
            return
        self._dispatcher.orphans.add(uid)
        await self._dispatcher.wake()
        await self._dispatcher.until(lambda: self._dispatcher.runs[uid].result is not None)

    async def take(self, uid: str) -> tuple[TrialResult, bytes, int]:
        """A trial's result, once it is over, its artifacts if those are shipped, and how many news there were before;
        the broker forgets the trial."""
        await self._dispatcher.until(lambda: self._dispatcher.runs[uid].result is not None)
        run = self._dispatcher.runs.pop(uid)
        assert run.result is not None
        return run.result, run.artifacts, self._num_told + len(self._dispatcher.news)

    async def news(self) -> list[Event]:
        """What has happened since it was last asked; waits for something, though not for ever."""
        await self._dispatcher.until(lambda: bool(self._dispatcher.news), POLL_S)
        told, self._dispatcher.news = self._dispatcher.news, []
        self._num_told += len(told)
        return told

    async def close(self) -> None:
        """Stop what runs and let the gangs go."""
        await self._dispatcher.close()

    # ---- for the gangs' workers

    async def hello(self, gang_id: str, greeting: Greeting) -> str:
        """A worker is up. Returns its node's fork server's address (empty where ranks are fresh interpreters)."""
        gang = self._dispatcher.pool.gangs[gang_id]
        address = await self._dispatcher.pool.greet(gang, greeting)
        if len(gang.workers) == gang.placement.num_workers:
            mark("broker: gang is ready")
            self._dispatcher.news.append(GangReady(gang.placement, time.monotonic() - gang.started_s))
        return address

    async def next_turn(
        self, gang_id: str, rank: int, turn: int, master_address: tuple[str, int] | None
    ) -> Turn | None:
        """What a worker is to do next; waits for it. None: nothing more, leave."""
        gang = self._dispatcher.pool.gangs[gang_id]
        if master_address is not None:
            gang.master_address = master_address
        self._dispatcher.pool.ready(gang, rank)
        await self._dispatcher.wake()
        await self._dispatcher.until(lambda: gang.num_turns > turn or (gang.is_closing and gang.current is None))
        if gang.num_turns <= turn:
            return None
        gang.waiting.discard(rank)
        run: Attempt = gang.current
        job = TrialJob(run.spec, run.number, self._config.workload, self._config.settings, run.uid)
        return Turn(job, gang.master_address, run.cores)

    async def report(self, uid: str, attempt: int, rank: int, index: int, metrics: Mapping[str, float] | None) -> bool:
        """A rank's report. The answer (go on?) is the same for every rank: the first one to ask fixes it."""
        run = self._dispatcher.attempt(uid, attempt)
        if run is None:
            return False
        if rank == 0 and metrics is not None:
            run.reports.append(metrics)
            self._dispatcher.news.append(TrialReported(run.spec, metrics))
            await self._dispatcher.tell()
        if self._config.in_lockstep:
            await self._dispatcher.until(
                lambda: run.decided >= index or run.stop_wanted or run.kill or uid in self._dispatcher.orphans
            )
        return run.verdicts.setdefault(index, not run.stop_wanted)

    async def wait_for_kill(self, uid: str, attempt: int) -> bool:
        """True when a rank has to be killed, False when its trial is over without."""
        run = self._dispatcher.attempt(uid, attempt)
        if run is None:
            return False
        await self._dispatcher.until(lambda: run.kill or run.gang is None or run.result is not None)
        return run.kill

    async def finish(self, uid: str, attempt: int, rank: int, end: RankEnd) -> None:
        """A rank has ended."""
        run = self._dispatcher.attempt(uid, attempt)
        if run is None or run.gang is None:
            return
        run.ends[rank] = end
        run.first_failure = cause(run.first_failure, end)
        if end.failure is not None:
            run.kill = True  # the peers may hang in a collective
        if len(run.ends) == run.gang.placement.num_workers:
            self._dispatcher.pool.release(run.gang, run.cores)
            # A rank that was killed because it didn't stop in time is no failure; its error would be one.
            why = run.first_failure
            killed = run.stop_wanted and why is not None and why.kind in (FailureKind.CRASH, FailureKind.PEER_LOST)
            self._dispatcher.retry_or_conclude(run, None if killed else why)
        await self._dispatcher.wake()


def _import_trainer() -> None:
    import ray.train.torch  # noqa: F401

    mark("broker: TorchTrainer imported")
