"""The broker actor, through which the driver, Tune's trials and gang workers reach a run's dispatcher.

All methods run on one event loop, so a method is never interrupted between two awaits. `raypar.run.dispatcher` holds
the state. This module only waits for changes.
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

POLL_S = 10.0  # timeout of a call that waits for news; the caller then repeats it
CHECK_S = 5.0
CLOSE_S = 10.0
MAX_PIECES = 4  # artifact pieces of a trial that may be in flight to the driver


class Broker:
    """Remote interface of a run's dispatcher."""

    def __init__(self, config: DispatchConfig) -> None:
        self._config = config
        self._changed = asyncio.Event()
        # Importing TorchTrainer takes seconds, so it runs in parallel with the rest of the start.
        threading.Thread(target=_import_trainer, daemon=True).start()

    async def start(self, specs: tuple[TrialSpec, ...]) -> int:
        """Start gangs for the first specs while Tune is still starting.

        Returns:
            The number of trials that can run at a time. A `ClusterChanged` event reports changes.
        """
        self._pool = GangPool(self._config.settings, self._config.gangs)
        later = asyncio.get_running_loop().call_later
        self._dispatcher = Dispatcher(self._config, self._pool, specs, call_later=later, on_change=self._notify)
        self._checks = asyncio.ensure_future(self._check_regularly())
        self._dispatcher.dispatch()
        return self._dispatcher.num_slots

    # ---- for the driver and Tune's trials

    async def add(self, specs: tuple[TrialSpec, ...]) -> None:
        """Add specs to those of `start`."""
        self._dispatcher.add(specs)

    async def define(self, tune_id: str, spec: TrialSpec | None) -> None:
        """Add a Tune trial. It runs the spec, or one of those known in advance."""
        self._dispatcher.define(tune_id, spec)

    async def follow(self, tune_id: str, after: int) -> tuple[list[Mapping[str, float]], str | None]:
        """Wait for and return the reports after the first `after`, and the final state if the trial is over.

        A larger `after` means that Tune lets the trial continue past the earlier reports.
        """
        await self._until(lambda: self._dispatcher.trials.of_tune(tune_id) is not None, POLL_S)
        if (trial := self._dispatcher.trials.of_tune(tune_id)) is None:
            return [], None
        trial.follow(after)
        self._notify()
        await self._until(lambda: trial.has_news(after), POLL_S)
        trial.unfollow()
        return trial.reports[after:], trial.result.state.value if trial.result else None

    async def release(self, tune_id: str, *, let_finish: bool) -> str:
        """End a trial that Tune no longer needs, unless it may finish; return its uid (empty: there is none)."""
        return self._dispatcher.release(tune_id, let_finish=let_finish)

    async def events(self, after: int) -> list[tuple[str, Event | ArtifactPiece]]:
        """Wait for events after the first `after`; return them with their trials' uids (or ""). Drop earlier events."""
        await self._until(lambda: self._dispatcher.events.has_more(after), POLL_S)
        return self._dispatcher.events.take(after)

    async def piece_taken(self, uid: str, attempt: int, problem: str) -> None:
        """Note that the driver accepted a piece of a trial's artifacts (empty problem), or refuses further ones."""
        if (running := self._dispatcher.trials.attempt(uid, attempt)) is not None:
            self._dispatcher.piece_taken(running, problem)

    async def close(self) -> None:
        """Stop running trials and close the gangs."""
        self._checks.cancel()
        self._dispatcher.close()
        await self._until(lambda: not self._pool.gangs, CLOSE_S)

    # ---- for the gangs' workers

    async def hello(self, gang_id: str, greeting: Greeting) -> str:
        """Register a worker. Returns the address of its node's fork server (empty if ranks are fresh interpreters)."""
        address = await self._pool.fork_address(gang_id, greeting)
        self._dispatcher.worker_is_up(gang_id, greeting)
        return address

    async def next_turn(
        self,
        gang_id: str,
        rank: int,
        num_turns: int,
        master_address: tuple[str, int] | None,
        ended: tuple[str, int, RankEnd] | None,
    ) -> Turn | None:
        """Wait for a worker's next trial after `num_turns` trials. None: there are no more, so the worker leaves.

        Args:
            ended: its last trial's uid, attempt and end; None: this is its first turn.
        """
        with self._dispatcher.one_decision():
            if ended is not None:
                uid, attempt, end = ended
                self._finish(uid, attempt, rank, end)
            gang = self._dispatcher.worker_is_ready(gang_id, rank, master_address)
        await self._until(lambda: gang.num_turns > num_turns or gang.phase is GangPhase.CLOSING)
        return gang.turn if gang.num_turns > num_turns else None

    async def note_position(self, uid: str, attempt: int, rank: int, position: Position) -> None:
        """Note that a rank stands still, has moved again, or has left its loop."""
        if (running := self._dispatcher.trials.attempt(uid, attempt)) is not None:
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
        """Accept a rank's report. Returns whether to continue: the same for all ranks, decided on rank 0's report."""
        if (running := self._dispatcher.trials.attempt(uid, attempt)) is None:
            return False
        if rank == 0 and metrics is not None:
            self._dispatcher.report(running, metrics)
        if not running.is_reported(index):
            self._dispatcher.note_position(running, rank, replace(position, is_out=True))
            await self._until(lambda: running.is_reported(index))
        self._dispatcher.note_position(running, rank, position)
        if self._config.in_lockstep:
            await self._until(lambda: running.is_decided(index))
        return running.continues(index)

    async def wait_for_kill(self, uid: str, attempt: int) -> tuple[bool, bool]:
        """Return when a rank has to be killed, or its trial ends without that: whether it has to, and if it hangs."""
        if (running := self._dispatcher.trials.attempt(uid, attempt)) is None:
            return False, False
        await self._until(lambda: running.kill_requested or running.is_over)
        return running.kill_requested, running.hangs

    async def wait_until_over(self, uid: str, attempt: int) -> None:
        """Wait until the ends of all ranks of an attempt are known."""
        if (running := self._dispatcher.trials.attempt(uid, attempt)) is not None:
            await self._until(lambda: running.is_over)

    async def notify(self, text: str) -> None:
        """Show the user a notice from a worker."""
        self._dispatcher.notify(text)

    async def send(self, uid: str, attempt: int, piece: Sequence[Any]) -> bool:
        """Pass a piece of a trial's artifacts to the driver, and wait until there is room for the next.

        Args:
            piece: a reference to it; empty: end of the artifacts. The driver has them all when this returns.

        Returns:
            False if the driver refuses further pieces.
        """
        running = self._dispatcher.trials.attempt(uid, attempt)
        if running is None or not running.takes_artifacts:
            return False
        self._dispatcher.send(running, piece)
        max_sent = MAX_PIECES - 1 if piece else 0
        await self._until(lambda: running.artifacts.num_pieces <= max_sent or not running.takes_artifacts)
        return running.takes_artifacts

    async def finish(self, uid: str, attempt: int, rank: int, end: RankEnd) -> None:
        """Note the end of a rank."""
        self._finish(uid, attempt, rank, end)

    # ---- inside

    def _finish(self, uid: str, attempt: int, rank: int, end: RankEnd) -> None:
        if (running := self._dispatcher.trials.attempt(uid, attempt)) is not None:
            self._dispatcher.rank_ended(running, rank, end)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(self, condition: Callable[[], bool], timeout_s: float | None = None) -> None:
        """Wait for the condition, up to the timeout. It is checked after every change."""
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
