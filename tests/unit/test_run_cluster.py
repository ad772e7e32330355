"""Clusters that don't answer, and processes of a Ray that ended: the study ends with one message, and in time."""

import contextlib
import os
import socket
import subprocess
import sys
import time

import pytest

from raypar.errors import ClusterError
from raypar.run import auth, cluster, jobs
from raypar.run.cluster import joined_cluster, watch_of_cluster, watch_of_own
from raypar.signals import abort_reason, handle_signals


def a_process():
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


def work():
    for _ in range(6000):
        try:
            time.sleep(0.01)
        except Exception as error:
            raise AssertionError("what would tidy up caught it") from error


def test_a_head_that_is_killed_breaks_the_work_off_whatever_catches_exceptions():
    with a_process() as head, handle_signals():
        watch = watch_of_own({"gcs_server": head.pid})
        head.kill()
        with watch.watching(), pytest.raises(KeyboardInterrupt):
            work()
        reason = abort_reason()
    assert abort_reason() is None
    with handle_signals():
        assert abort_reason() is None  # none is left from an earlier loss
    assert isinstance(reason, ClusterError)
    assert reason.message == f"Ray was lost: its head, gcs_server ended (process {head.pid})"
    assert watch.lost


def test_a_head_that_lives_disturbs_nobody_and_one_that_ended_with_the_work_is_known():
    with a_process() as head:
        for is_lost in (False, True):
            watch = watch_of_own({"raylet": head.pid})
            with watch.watching():
                pass
            assert watch.lost is is_lost
            head.kill()
            head.wait()


def test_a_cluster_whose_head_does_not_listen_any_more_breaks_the_work_off_when_it_stays_away():
    with socket.create_server(("127.0.0.1", 0)) as head, handle_signals():
        address = f"127.0.0.1:{head.getsockname()[1]}"
        watch = watch_of_cluster(address, patience_s=0.2)
        with watch.watching():
            for _ in range(3):  # it is asked, and again
                head.accept()[0].close()
            head.close()
            with pytest.raises(KeyboardInterrupt, match=f"its head at {address} can't be reached any more"):
                work()
        assert watch.lost
    patient = watch_of_cluster(address, patience_s=3600.0)
    with patient.watching():
        pass
    assert not patient.lost


@contextlib.contextmanager
def black_hole(takes_connections):
    """The address of a host that says nothing: it accepts, or drops what would connect."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=50 if takes_connections else 0))
        address = server.getsockname()
        for _ in range(0 if takes_connections else 4):  # its queue is full: the kernel drops what comes
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(address)
        yield f"127.0.0.1:{address[1]}"


@pytest.mark.timeout(100)
@pytest.mark.parametrize("takes_connections", [True, False], ids=["accepts", "drops"])
@pytest.mark.parametrize("scheme", ["", "http://"])
def test_an_address_at_which_nothing_answers_is_given_up_soon(scheme, takes_connections, monkeypatch, tmp_path, capfd):
    for name in auth.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    limits_s = [*map(float, auth.FIRST_CONTACT.values()), cluster.CONNECT_TIMEOUT_S]
    assert sum(limits_s) + 1 <= 10 and jobs.CONNECT_TIMEOUT_S + jobs.ANSWER_TIMEOUT_S <= 10  # Ray connects twice
    for module, name in ((cluster, "CONNECT_TIMEOUT_S"), (jobs, "CONNECT_TIMEOUT_S"), (jobs, "ANSWER_TIMEOUT_S")):
        monkeypatch.setattr(module, name, 0.2)
    monkeypatch.setattr(auth, "FIRST_CONTACT", dict.fromkeys(auth.FIRST_CONTACT, "1"))
    with black_hole(takes_connections) as host_port:
        address = scheme + host_port
        connecting = jobs.connected(address, print) if scheme else joined_cluster(address)
        with pytest.raises(ClusterError) as refused, connecting:
            pass
    assert f"--address {address}: " in refused.value.message and refused.value.hint
    assert capfd.readouterr() == ("", "") and not auth.FIRST_CONTACT.keys() & os.environ.keys()


STUCK = """
import sys, time
from pathlib import Path
from raypar.cli.common import quiet
from raypar.run import cluster as head
from raypar.signals import handle_signals, uninterrupted

head.GRACE_S = 0.0
with handle_signals(), quiet(Path(sys.argv[2])):
    with head.watch_of_own({"gcs_server": int(sys.argv[1])}).watching(), uninterrupted():
        time.sleep(60)  # as a call that looks after no signal
"""


def test_work_that_cannot_be_broken_off_is_ended_with_the_message(tmp_path):
    with a_process() as head:
        head.kill()
        head.wait()
    command = [sys.executable, "-c", STUCK, str(head.pid), str(tmp_path / "log")]
    stuck = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert (stuck.returncode, stuck.stdout) == (1, "")
    assert stuck.stderr.startswith(f"error: Ray was lost: its head, gcs_server ended (process {head.pid})\n  → ")
