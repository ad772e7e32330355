"""The broker actor: the calls with which driver, Tune's trials and gangs' workers reach a run's dispatcher.

Every method runs on one event loop, so that none is interrupted between two awaits. State is kept, and changed, by
`raypar.run.dispatcher`; here is what waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from raypar.run.dispatcher import ArtifactPiece, DispatchConfig, Dispatcher
from raypar.run.gang_pool import GangPool
from raypar.run.pool import Greeting, Turn
from raypar.run.ranks import RankEnd
from raypar.run.runner import Event
from raypar.run.scheduler import GangPhase
from raypar.study.trial import TrialSpec
from raypar.trace import mark
from raypar.train.position import Position

POLL_S = 10.0  # how long a question waits for news before it is asked anew
CHECK_S = 5.0
CLOSE_S = 10.0
MAX_PIECES = 4  # of a trial's artifacts, on their way to the driver


class Broker:
    """See the module."""

    def __init__(self, config: DispatchConfig) -> None:
        self._config = config
        self._changed = asyncio.Event()
        # Importing TorchTrainer takes seconds: alongside what else starts, not after it.
        threading.Thread(target=_import_trainer, daemon=True).start()

    async def start(self, specs: tuple[TrialSpec, ...]) -> int:
        """Start gangs for the first of the specs while Tune is still starting.

        Returns how many trials can run at a time; `ClusterChanged` tells when that changes.
        """
        self._pool = GangPool(self._config.settings, self._config.gangs)
        later = asyncio.get_running_loop().call_later
        self._dispatcher = Dispatcher(self._config, self._pool, specs, call_later=later, on_change=self._notify)
        self._checks = asyncio.ensure_future(self._check_regularly())
        self._dispatcher.dispatch()
        return self._dispatcher.num_slots

    # ---- for the driver and Tune's trials

    async def define(self, uid: str, spec: TrialSpec | None) -> None:
        """Add the Tune trial `uid`; it runs the spec, or the next of those from the start."""
        self._dispatcher.define(uid, spec)

    async def follow(self, uid: str, after: int) -> tuple[list[Mapping[str, float]], str | None]:
        """Return the reports after the first `after`, and the final state where the trial is over; wait for either.

        Asking with a larger `after` says that Tune wants the trial to go on past the reports before.
        """
        await self._until(lambda: self._dispatcher.trial(uid) is not None, POLL_S)
        if (trial := self._dispatcher.trial(uid)) is None:
            return [], None
        self._dispatcher.follow(trial, after)
        await self._until(lambda: trial.has_news(after), POLL_S)
        trial.unfollow()
        return trial.reports[after:], trial.result.state.value if trial.result else None

    async def release(self, uid: str, *, let_finish: bool) -> None:
        """Tune has done with a trial: end it, unless it may finish what it has begun."""
        self._dispatcher.release(uid, let_finish=let_finish)

    async def events(self, after: int) -> list[tuple[str, Event | ArtifactPiece]]:
        """Wait for events after the first `after`; return them with their Tune trials (or ""). Forget those before."""
        await self._until(lambda: self._dispatcher.has_events(after), POLL_S)
        return self._dispatcher.events(after)

    async def piece_taken(self, uid: str, attempt: int, problem: str) -> None:
        """The driver has taken a piece of a trial's artifacts, or will take no more (the problem; empty: none)."""
        if (running := self._dispatcher.attempt(uid, attempt)) is not None:
            self._dispatcher.piece_taken(running, problem)

    async def close(self) -> None:
        """Stop what runs and close the gangs."""
        self._checks.cancel()
        self._dispatcher.close()
        await self._until(lambda: not self._pool.gangs, CLOSE_S)

    # ---- for the gangs' workers

    async def hello(self, gang_id: str, greeting: Greeting) -> str:
        """A worker is up. Returns its node's fork server's address (empty where ranks are fresh interpreters)."""
        address = await self._pool.fork_address(gang_id, greeting)
        self._dispatcher.worker_is_up(gang_id, greeting)
        return address

    async def next_turn(
        self, gang_id: str, rank: int, num_turns: int, master_address: tuple[str, int] | None
    ) -> Turn | None:
        """Wait for a worker's next trial, after so many. None: nothing more, leave."""
        gang = self._dispatcher.worker_is_ready(gang_id, rank, master_address)
        await self._until(lambda: gang.num_turns > num_turns or gang.phase is GangPhase.CLOSING)
        return gang.turn if gang.num_turns > num_turns else None

    async def note_position(self, uid: str, attempt: int, rank: int, position: Position) -> None:
        """A rank stands, has moved again, or has left its loop."""
        if (running := self._dispatcher.attempt(uid, attempt)) is not None:
            self._dispatcher.note_position(running, rank, position)

    async def report(
        self,
        uid: str,
        attempt: int,
        rank: int,
        index: int,
        metrics: Mapping[str, float] | None,
        position: Position,
    ) -> bool:
        """Take a rank's report. The answer (go on?) is the same for every rank, and depends on rank 0's report."""
        if (running := self._dispatcher.attempt(uid, attempt)) is None:
            return False
        if rank == 0 and metrics is not None:
            self._dispatcher.report(running, metrics)
        if not running.is_reported(index):
            self._dispatcher.note_position(running, rank, replace(position, is_out=True))
            await self._until(lambda: running.is_reported(index))
        self._dispatcher.note_position(running, rank, position)
        if self._config.in_lockstep:
            await self._until(lambda: running.is_decided(index))
        return running.goes_on(index)

    async def wait_for_kill(self, uid: str, attempt: int) -> bool:
        """Return True when a rank has to be killed, False when its trial is over without."""
        if (running := self._dispatcher.attempt(uid, attempt)) is None:
            return False
        await self._until(lambda: running.kill_requested or running.is_over)
        return running.kill_requested

    async def notify(self, text: str) -> None:
        """A worker has something for the user to read."""
        self._dispatcher.notify(text)

    async def send(self, uid: str, attempt: int, piece: Sequence[Any]) -> bool:
        """Pass a piece of a trial's artifacts on to the driver, and wait until there is room for the next.

        Args:
            piece: a reference to it; empty: that was all, and the driver has it when this returns.

        Returns:
            False where no more is taken.
        """
        running = self._dispatcher.attempt(uid, attempt)
        if running is None or not running.takes_artifacts:
            return False
        self._dispatcher.send(running, piece)
        max_sent = MAX_PIECES - 1 if piece else 0
        await self._until(lambda: running.num_pieces <= max_sent or not running.takes_artifacts)
        return running.takes_artifacts

    async def finish(self, uid: str, attempt: int, rank: int, end: RankEnd) -> None:
        """A rank has ended."""
        if (running := self._dispatcher.attempt(uid, attempt)) is not None:
            self._dispatcher.rank_ended(running, rank, end)

    # ---- inside

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(self, condition: Callable[[], bool], timeout_s: float | None = None) -> None:
        """Wait for the condition, which is looked at whenever something has changed; no longer than the timeout."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not condition():
                    await self._changed.wait()

    async def _check_regularly(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            self._dispatcher.check()


def _import_trainer() -> None:
    import ray.train.torch  # noqa: F401

    mark("broker: TorchTrainer imported")
