"""Agent of a gang on one node: it speaks to the broker for all of the gang's ranks there.

The gang's first worker on a node owns the agent; the others call it over a socket that only their user can open. One
call at a time tells the broker what has happened since the last one, and one call waits for news. So the broker's work
and its open calls grow with the number of nodes, not of ranks.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.managers import BaseManager
from typing import Any, Protocol, TypeAlias

import ray

from raypar.run.pool import Turn
from raypar.run.ranks import RankEnd
from raypar.scratch import make_folder
from raypar.train.job import RunSettings
from raypar.train.position import Position

SOCKET = "agent"


# ---- what an agent tells the broker. `turn`: number of the gang's trial, from 1.


@dataclass(frozen=True)
class Ready:
    """A rank's worker is ready for the next trial. Rank 0 has chosen an address for it."""

    rank: int
    master_address: tuple[str, int] | None = None


@dataclass(frozen=True)
class Reported:
    """A rank waits at a report. Only rank 0's has metrics."""

    turn: int
    rank: int
    index: int
    metrics: Mapping[str, float] | None
    position: Position


@dataclass(frozen=True)
class Moved:
    """A rank stands still, has moved again, or has left its loop."""

    turn: int
    rank: int
    position: Position


@dataclass(frozen=True)
class Ended:
    """A rank has ended."""

    turn: int
    rank: int
    end: RankEnd


Message: TypeAlias = Ready | Reported | Moved | Ended


# ---- what the broker answers


@dataclass(frozen=True)
class AgentAddress:
    """Socket of an agent, and the key that its clients must have."""

    path: str
    key: bytes


@dataclass(frozen=True)
class Welcome:
    """Answer to a worker's greeting.

    Attributes:
        fork_address: address of its node's fork server; empty if ranks are fresh interpreters.
        agent: where the other workers of its node reach the agent; None: it owns the agent.
        run: a reference to the gang's `RunSettings` and pickled workload, in a list so that Ray doesn't resolve it.
    """

    fork_address: str
    agent: AgentAddress | None
    run: Sequence[Any]

    def settings_and_workload(self) -> tuple[RunSettings, bytes]:
        settings, workload = ray.get(self.run[0])
        return settings, workload


@dataclass(frozen=True)
class News:
    """News for an agent: what it doesn't know yet.

    Attributes:
        number: number of trials that the gang has begun.
        turn: the last one, with the cores of the agent's ranks, if it is new.
        verdicts: whether its ranks continue after each report, from the first report without a known verdict.
        rest: the same for all further reports; None: rank 0 may make some.
        is_killed: its ranks are to be killed.
        hangs: because they hang.
        is_closing: there are no more trials.
    """

    number: int
    turn: Turn | None = None
    verdicts: tuple[bool, ...] = ()
    rest: bool | None = None
    is_killed: bool = False
    hangs: bool = False
    is_closing: bool = False


@dataclass(frozen=True)
class KillOrder:
    """Order to kill the ranks of a trial. `hangs`: because they hang."""

    hangs: bool


class AgentCalls(Protocol):
    """Calls of a node's workers."""

    def send(self, *messages: Message) -> None:
        """Pass messages on to the broker."""
        ...

    def next_turn(self, after: int) -> Turn | None:
        """Wait for the trial after the first `after`. None: there are no more, so the worker leaves."""
        ...

    def verdict(self, turn: int, index: int) -> bool:
        """Wait for the broker's verdict on a report. Returns whether to continue: the same for all ranks."""
        ...

    def wait_for_kill(self, turn: int) -> KillOrder | None:
        """Wait until a trial's ranks are to be killed, or the next begins (None)."""
        ...


CALLS = ("send", "next_turn", "verdict", "wait_for_kill")


class Agent:
    """Implements `AgentCalls` for the workers of a node (see the module).

    Args:
        ranks: the gang's ranks on this node.
    """

    def __init__(self, broker: Any, gang_id: str, ranks: range) -> None:
        self._broker, self._gang_id, self._ranks = broker, gang_id, ranks
        self._changed = threading.Condition()
        self._news = News(0)  # all of it, as far as it is known
        self._error: Exception | None = None  # the broker is lost
        self._outbox: list[Message] = []
        self._is_sending = False
        threading.Thread(target=self._listen, daemon=True, name=f"agent-{gang_id}").start()

    def send(self, *messages: Message) -> None:
        # The thread that is sending takes along what others add meanwhile.
        with self._changed:
            self._outbox += messages
            if self._is_sending:
                return
            self._is_sending = True
        try:
            while batch := self._batch():
                ray.get(self._broker.accept.remote(self._gang_id, batch))
        except Exception as error:
            self._fail(error)
            raise

    def _batch(self) -> list[Message]:
        with self._changed:
            batch, self._outbox = self._outbox, []
            self._is_sending = bool(batch)
            return batch

    def next_turn(self, after: int) -> Turn | None:
        news = self._wait_for(lambda news: news.number > after or news.is_closing)
        return news.turn if news.number > after else None

    def verdict(self, turn: int, index: int) -> bool:
        def is_known(news: News) -> bool:
            return is_void(news) or len(news.verdicts) > index or news.rest is not None

        def is_void(news: News) -> bool:
            return news.number != turn or news.is_killed or news.is_closing

        news = self._wait_for(is_known)
        if len(news.verdicts) > index:
            return news.verdicts[index]
        return not is_void(news) and bool(news.rest)

    def wait_for_kill(self, turn: int) -> KillOrder | None:
        news = self._wait_for(lambda news: news.number != turn or news.is_killed or news.is_closing)
        return KillOrder(news.hangs) if news.number == turn and news.is_killed else None

    def _wait_for(self, condition: Callable[[News], bool]) -> News:
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or condition(self._news))
            if self._error is not None:
                raise self._error
            return self._news

    def _listen(self) -> None:
        try:
            while not self._news.is_closing:
                last = replace(self._news, turn=None)
                self._note(ray.get(self._broker.news.remote(self._gang_id, self._ranks, last)))
        except Exception as error:
            self._fail(error)

    def _note(self, news: News) -> None:
        with self._changed:
            if news.number == self._news.number:
                news = replace(news, turn=self._news.turn, verdicts=(*self._news.verdicts, *news.verdicts))
            self._news = news
            self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()


def serve_node(agent: Agent) -> AgentAddress:
    """Let the other workers of this node call the agent, until this process ends."""
    address = AgentAddress(str(make_folder(socket=len(SOCKET)) / SOCKET), secrets.token_bytes(32))
    server = _manager(address, lambda: agent).get_server()
    threading.Thread(target=server.serve_forever, daemon=True, name="agent-server").start()
    return address


def agent_at(address: AgentAddress) -> AgentCalls:
    """Return the agent of another worker of this node."""
    manager = _manager(address)
    manager.connect()
    agent: AgentCalls = manager.agent()
    return agent


def _manager(address: AgentAddress, get_agent: Callable[[], Agent] | None = None) -> Any:
    """Return a manager that shares an agent at the address, or that connects to one."""

    class AgentManager(BaseManager):
        pass

    AgentManager.register("agent", get_agent, exposed=CALLS)
    return AgentManager(address.path, address.key)
