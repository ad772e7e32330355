"""An agent and the workers of its node, over its socket, with a broker that a test plays."""

import queue
import stat
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import AuthenticationError
from pathlib import Path
from types import SimpleNamespace

import pytest
from results import make_spec

from raypar.run import agent as module
from raypar.run.agent import Agent, KillOrder, Moved, News, Ready, agent_at, serve_node
from raypar.run.pool import Turn
from raypar.train.position import Position

TURN = Turn(make_spec({}, 0), 1, "a", ("host", 1), {2: (0,), 3: (1,)})
LIMIT_S = 60.0


class PlayedBroker:
    """A broker whose calls wait until the test answers them."""

    def __init__(self):
        self.told, self.asked = queue.SimpleQueue(), queue.SimpleQueue()
        self.accept = SimpleNamespace(remote=lambda gang_id, messages: self._open(self.told, messages))
        self.news = SimpleNamespace(remote=lambda gang_id, ranks, known: self._open(self.asked, known))

    @staticmethod
    def _open(calls, content):
        answer = Future()
        calls.put((content, answer))
        return answer

    def answer(self, news):
        """Answer the open call for news; return what the agent knew."""
        known, answer = self.asked.get(timeout=LIMIT_S)
        answer.set_result(news)
        return known


@pytest.fixture
def broker(monkeypatch):
    monkeypatch.setattr(module, "ray", SimpleNamespace(get=lambda answer: answer.result(LIMIT_S)))
    return PlayedBroker()


@pytest.fixture
def calls():
    with ThreadPoolExecutor() as executor:
        yield executor.submit


@pytest.fixture(params=["its own worker", "another worker"])
def agent(request, broker):
    """The agent of ranks 2 and 3, as a worker sees it."""
    agent = Agent(broker, "1", range(2, 4))
    yield agent if request.param == "its own worker" else agent_at(serve_node(agent))
    broker.answer(News(0, is_closing=True))


def test_a_worker_waits_for_the_next_trial(agent, broker, calls):
    waiting = calls(agent.next_turn, 0)
    broker.answer(News(1, TURN))
    assert waiting.result(LIMIT_S) == TURN == agent.next_turn(0)
    waiting = calls(agent.next_turn, 1)
    assert broker.answer(News(1, is_closing=True)) == News(1)
    assert waiting.result(LIMIT_S) is None
    broker.asked.put((None, Future()))  # for the fixture: the agent asks no more


def test_every_rank_gets_the_verdict_on_its_report(agent, broker, calls):
    broker.answer(News(1, TURN))
    assert agent.next_turn(0) == TURN
    early, late, beyond = (calls(agent.verdict, 1, index) for index in (0, 1, 2))
    broker.answer(News(1, verdicts=(True,)))
    assert early.result(LIMIT_S) is True and agent.verdict(1, 0) is True
    assert broker.answer(News(1, verdicts=(False,))) == News(1, verdicts=(True,))
    assert late.result(LIMIT_S) is False
    broker.answer(News(1, rest=True))  # rank 0 has ended
    assert beyond.result(LIMIT_S) is True


def test_no_rank_waits_for_a_report_of_a_trial_that_is_killed_or_over(agent, broker, calls):
    broker.answer(News(1, TURN))
    assert agent.next_turn(0) == TURN
    waiting, killed = calls(agent.verdict, 1, 0), calls(agent.wait_for_kill, 1)
    broker.answer(News(1, is_killed=True, hangs=True))
    assert killed.result(LIMIT_S) == KillOrder(hangs=True) and waiting.result(LIMIT_S) is False
    broker.answer(News(2, replace(TURN, attempt=2)))
    assert agent.next_turn(1).attempt == 2
    assert agent.wait_for_kill(1) is None and agent.verdict(1, 0) is False


def test_what_happens_during_a_call_to_the_broker_goes_along_with_the_next(broker, calls):
    agent = Agent(broker, "1", range(2, 4))
    address = serve_node(agent)
    first = calls(agent.send, Ready(2))
    messages, answer = broker.told.get(timeout=LIMIT_S)
    assert messages == [Ready(2)]
    moved = [Moved(1, rank, Position({"0": rank})) for rank in range(3, 6)]
    for message in moved:
        agent_at(address).send(message)  # returns at once: the first call takes it along
    answer.set_result(None)
    messages, answer = broker.told.get(timeout=LIMIT_S)
    assert messages == moved and not first.done()
    answer.set_result(None)
    first.result(LIMIT_S)
    broker.answer(News(0, is_closing=True))


def test_workers_learn_that_the_broker_is_lost(agent, broker, calls):
    waiting = calls(agent.next_turn, 0)
    _, answer = broker.asked.get(timeout=LIMIT_S)
    answer.set_exception(ConnectionError("the broker has died"))
    with pytest.raises(ConnectionError, match="the broker has died"):
        waiting.result(LIMIT_S)
    broker.asked.put((None, Future()))


def test_only_workers_with_the_key_reach_an_agent(broker):
    agent = Agent(broker, "1", range(2))
    address = serve_node(agent)
    with pytest.raises(AuthenticationError):
        agent_at(replace(address, key=b"guessed"))
    assert stat.S_IMODE(Path(address.path).parent.stat().st_mode) == 0o700
    broker.answer(News(0, is_closing=True))
