"""What NCCL's RAS says about a hanging gang is in its log. There is no GPU here: a simulated server stands for NCCL."""

import contextlib
import os
import socket
import threading
from types import SimpleNamespace

import pytest
from results import make_spec

from raypar.run import gang
from raypar.run.agent import KillOrder
from raypar.run.nccl_ras import ADDRESS, HEAD, listening, note_status, status
from raypar.run.ranks import RankEnd
from raypar.train.job import RankContext, RunSettings

ANSWER = "NCCL version 2.28.9\n\nJob summary\n===========\n\n#0-0 (ab12) MISMATCH\n  Rank 1 has launched 41 of 42\n"
RANK_0 = RankContext(0, 2, 0, 2, 0)


class StandIn:
    """Server that answers one client as NCCL does, up to the `silent_after`-th request."""

    def __init__(self, address=("127.0.0.1", 0), silent_after=3, cut=None):
        self.requests, self._silent_after, self._answer = [], silent_after, ANSWER[:cut]
        self._is_cut = cut is not None
        self._socket = socket.socket()
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):  # as NCCL does
            self._socket.setsockopt(socket.SOL_SOCKET, option, 1)
        self._socket.bind(address)
        self._socket.listen()
        self._done = threading.Event()
        self.address = "{}:{}".format(*self._socket.getsockname())
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._done.set()
        self._socket.close()
        self._thread.join()

    def _serve(self):
        with contextlib.suppress(OSError):
            self._socket.settimeout(30)
            client, _ = self._socket.accept()
            with client, client.makefile("rw") as lines:
                for line in lines:
                    self.requests.append(line.rstrip("\n"))
                    if len(self.requests) > self._silent_after:
                        break
                    word = line.split()[0].upper()
                    lines.write({"CLIENT": "SERVER PROTOCOL 2\n", "TIMEOUT": "OK\n", "VERBOSE": self._answer}[word])
                    lines.flush()
                    if word == "VERBOSE" and not self._is_cut:
                        return
                self._done.wait(30)


def test_the_status_is_asked_for_as_nccls_own_client_does():
    with StandIn() as nccl:
        assert status(nccl.address) == ANSWER.strip()
        assert nccl.requests == ["CLIENT PROTOCOL 2", "TIMEOUT 1", "VERBOSE STATUS"]


@pytest.mark.parametrize("silent_after", [0, 1, 2])
def test_a_process_that_does_not_answer_has_no_status(silent_after):
    with StandIn(silent_after=silent_after) as nccl:
        assert status(nccl.address, limit_s=0.2) == ""


def test_an_answer_that_is_cut_short_is_kept():
    with StandIn(cut=40) as nccl:
        assert status(nccl.address, limit_s=0.5) == ANSWER[:40].strip()


def test_without_nccl_there_is_no_status(tmp_path):
    with listening(RANK_0, "cuda", {}) as context:
        assert status(context.environment[ADDRESS]) == ""  # reserved, and nobody listens
        note_status(context, {}, tmp_path / "log")
    assert status("nonsense") == status(":0") == "" and not (tmp_path / "log").exists()


def test_every_rank_has_a_port_on_which_nccl_can_listen():
    with listening(RANK_0, "cuda", {}) as one, listening(RANK_0, "cuda", {}) as other:
        addresses = [each.environment[ADDRESS] for each in (one, other)]
        assert len({*addresses}) == 2 and all(address.startswith("127.0.0.1:") for address in addresses)
        with StandIn(("127.0.0.1", int(addresses[0].partition(":")[2]))):
            assert status(addresses[0]) == ANSWER.strip()


@pytest.mark.parametrize(
    ("device", "environment"), [("cpu", {}), ("cuda", {ADDRESS: "10.0.0.1:9"}), ("cuda", {"NCCL_RAS_ENABLE": "0"})]
)
def test_ranks_without_nccls_ras_or_with_the_users_address_get_none(device, environment):
    with listening(RANK_0, device, environment) as context:
        assert context is RANK_0


class Process:
    def __init__(self):
        self.killed = threading.Event()

    def kill(self):
        self.killed.set()


def killed_rank(monkeypatch, tmp_path, context, *, hangs, device="cuda"):
    """Run a rank that waits until it is killed; return its log, which is empty without a status."""
    process, job = Process(), RunSettings(tmp_path).job(make_spec({}, device=device), 1, b"")
    job.folder.mkdir(parents=True)
    agent = SimpleNamespace(wait_for_kill=lambda _: KillOrder(hangs))

    def supervise(*_):
        assert process.killed.wait(30)
        return RankEnd()

    monkeypatch.setattr(gang, "supervise", supervise)
    gang._supervised(process, agent, 1, job, context)
    log = job.log_path(context.rank)
    return log.read_text() if log.exists() else ""


@pytest.mark.parametrize(
    ("hangs", "device", "is_asked"), [(True, "cuda", True), (False, "cuda", False), (True, "cpu", False)]
)
def test_a_rank_is_killed_after_nccl_has_said_why_it_hangs(monkeypatch, tmp_path, hangs, device, is_asked):
    monkeypatch.delenv(ADDRESS, raising=False)
    with StandIn() as nccl:
        context = RankContext(0, 2, 0, 2, 0, environment={ADDRESS: nccl.address})
        log = killed_rank(monkeypatch, tmp_path, context, hangs=hangs, device=device)
    assert log == (f"\n{HEAD}\n{ANSWER.strip()}\n" if is_asked else "")
    assert bool(nccl.requests) == is_asked


def test_a_users_address_is_asked_too(monkeypatch, tmp_path):
    with StandIn() as nccl:
        monkeypatch.setitem(os.environ, ADDRESS, nccl.address)
        assert ANSWER.strip() in killed_rank(monkeypatch, tmp_path, RANK_0, hangs=True)
