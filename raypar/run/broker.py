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

import ray

from raypar.run.agent import AgentAddress, Message, Moved, News, Ready, Reported, Welcome
from raypar.run.dispatcher import ArtifactPiece, DispatchConfig, Dispatcher
from raypar.run.gang_pool import GangPool
from raypar.run.pool import Gang, Greeting
from raypar.run.runner import Event
from raypar.run.scheduler import GangPhase
from raypar.study.trial import TrialSpec
from raypar.trace import mark

POLL_S = 10.0  # timeout of a call that waits for news; the caller then repeats it
CHECK_S = 5.0
CLOSE_S = 10.0
MAX_PIECES = 4  # artifact pieces of a trial that may be in flight to the driver


class Broker:
    """Remote interface of a run's dispatcher."""

    def __init__(self, config: DispatchConfig) -> None:
        self._config = config
        self._changed = asyncio.Event()
        self._agents: dict[tuple[str, int], asyncio.Future[AgentAddress | None]] = {}  # by gang and number of the node
        # Importing TorchTrainer takes seconds, so it runs in parallel with the rest of the start.
        threading.Thread(target=_import_trainer, daemon=True).start()

    async def start(self, specs: tuple[TrialSpec, ...]) -> int:
        """Start gangs for the first specs while Tune is still starting.

        Returns:
            The number of trials that can run at a time. A `ClusterChanged` event reports changes.
        """
        self._run = [ray.put((self._config.settings, self._config.workload))]  # each worker fetches it once
        self._pool = self.make_pool()
        later = asyncio.get_running_loop().call_later
        self._dispatcher = Dispatcher(self._config, self._pool, specs, call_later=later, on_change=self._notify)
        self._checks = asyncio.ensure_future(self._check_regularly())
        self._dispatcher.dispatch()
        return self._dispatcher.num_slots

    def make_pool(self) -> GangPool:
        """Return the pool of the run's gangs."""
        return GangPool(self._config.settings, self._config.gangs)

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

    async def hello(self, gang_id: str, greeting: Greeting, agent: AgentAddress | None) -> Welcome:
        """Register a worker, and the agent that it owns for the other workers of its node."""
        context = greeting.context
        ready = self._agents.setdefault((gang_id, context.node_rank), asyncio.get_running_loop().create_future())
        if context.local_rank == 0:
            ready.set_result(agent)
        fork_address = await self._pool.fork_address(gang_id, greeting)
        self._dispatcher.worker_is_up(gang_id, greeting)
        reached_at = await ready if context.local_rank else None
        return Welcome(fork_address, reached_at, self._run)

    async def accept(self, gang_id: str, messages: Sequence[Message]) -> None:
        """Accept what an agent's ranks have done, in order."""
        if (gang := self._pool.gangs.get(gang_id)) is not None:
            with self._dispatcher.one_decision():
                for message in messages:
                    self._note(gang, message)

    async def news(self, gang_id: str, ranks: range, last: News) -> News:
        """Wait for and return what an agent doesn't know yet.

        Args:
            ranks: the agent's.
            last: all earlier news, without the turn.
        """
        gang = self._pool.gangs[gang_id]
        await self._until(lambda: self._has_news(gang, last))
        is_closing = gang.phase is GangPhase.CLOSING
        if gang.num_turns != last.number and gang.turn is not None:
            return News(gang.num_turns, gang.turn.of(ranks))
        if (running := self._dispatcher.attempt_in(gang, last.number)) is None:
            return replace(last, verdicts=(), is_closing=is_closing)
        verdicts = running.verdicts(len(last.verdicts), self._config.in_lockstep)
        return News(last.number, None, verdicts, running.rest, running.kill_requested, running.hangs, is_closing)

    async def wait_until_over(self, gang_id: str, turn: int) -> None:
        """Wait until the ends of all ranks of a gang's trial are known."""
        if (running := self._dispatcher.attempt_in(self._pool.gangs[gang_id], turn)) is not None:
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

    # ---- inside

    def _note(self, gang: Gang, message: Message) -> None:
        if isinstance(message, Ready):
            self._dispatcher.worker_is_ready(gang.id, message.rank, message.master_address)
        elif (running := self._dispatcher.attempt_in(gang, message.turn)) is None:
            return
        elif isinstance(message, Reported):
            self._dispatcher.rank_reported(running, message.rank, message.index, message.metrics, message.position)
        elif isinstance(message, Moved):
            self._dispatcher.note_position(running, message.rank, message.position)
        else:
            self._dispatcher.rank_ended(running, message.rank, message.end)

    def _has_news(self, gang: Gang, last: News) -> bool:
        if gang.phase is GangPhase.CLOSING or (gang.num_turns > last.number and gang.turn is not None):
            return True
        if (running := self._dispatcher.attempt_in(gang, last.number)) is None:
            return False
        return (
            running.kill_requested > last.is_killed
            or running.num_decided(self._config.in_lockstep) > len(last.verdicts)
            or running.rest != last.rest
        )

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
