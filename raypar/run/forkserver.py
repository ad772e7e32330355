"""Main functions of a fork server, and of the ranks that it (or a fresh interpreter) becomes."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import socket
import sys
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path

from raypar.trace import mark


def serve() -> None:
    """Run a fork server: import, then fork on request until the owner has ended. Arguments: see `ForkServer`."""
    mark("fork server: starts")
    listener = socket.socket(fileno=int(sys.argv[1]))
    owner = int(sys.argv[2])
    for name in sys.argv[3:]:
        # A module that can't be imported fails in the trial that needs it.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    mark("fork server: imported")
    import gc

    gc.freeze()  # what is here stays: a fork's collector need not touch (and so copy) its pages
    child_ended, wake_up = os.pipe()
    os.set_blocking(wake_up, False)
    signal.set_wakeup_fd(wake_up, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    clients: dict[int, Connection] = {}
    owners: dict[int, Connection] = {}  # pid of a rank: who asked for it
    while True:
        readable, _, _ = select.select([listener.fileno(), owner, child_ended, *clients], [], [])
        if owner in readable:
            for pid in owners:
                kill_group(pid)
            remove_socket(listener.getsockname())
            os._exit(0)
        if child_ended in readable:
            os.read(child_ended, 4096)
            _send_exit_codes(owners)
        if listener.fileno() in readable:
            accepted, _ = listener.accept()
            client = Connection(accepted.detach())
            clients[client.fileno()] = client
        for fd in [fd for fd in readable if fd in clients]:
            client = clients[fd]
            try:
                request = json.loads(client.recv_bytes())
                if request == "ready?":
                    client.send_bytes(json.dumps("ready").encode())
                    continue
                fds = [recv_handle(client) for _ in range(request["num_fds"])]
            except (EOFError, OSError):
                for pid in [pid for pid, owner_of in owners.items() if owner_of is client]:
                    kill_group(pid)
                    owners.pop(pid)
                clients.pop(fd)
                client.close()
                continue
            pid = os.fork()
            if pid == 0:
                try:
                    signal.set_wakeup_fd(-1)
                    for other in (listener.fileno(), owner, child_ended, wake_up, *clients):
                        os.close(other)
                    _become_rank(fds)
                finally:
                    os._exit(70)
            for handed in fds:
                os.close(handed)
            owners[pid] = client
            client.send_bytes(json.dumps({"forked": pid}).encode())


def spawned_main() -> None:
    """Run a rank in a fresh interpreter. Arguments: the connection's descriptor, and rank 0's listening socket."""
    _die_with_parent()
    _run_rank(*map(int, sys.argv[1:]))


def _become_rank(fds: list[int]) -> None:
    _die_with_parent()
    os.setpgid(0, 0)  # a group of its own: loader processes can be ended with the rank
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    connection, log, *listen = fds
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    _run_rank(connection, *listen)


def _run_rank(connection_fd: int, listen_fd: int | None = None) -> None:
    from raypar.train.worker import main

    main(Connection(connection_fd), listen_fd)
    os._exit(0)  # no finalizers: there is nothing to save, and the next trial waits


def _send_exit_codes(owners: dict[int, Connection]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        client = owners.pop(pid, None)
        if client is not None:
            with contextlib.suppress(OSError):
                client.send_bytes(json.dumps({"pid": pid, "exit_code": os.waitstatus_to_exitcode(status)}).encode())


def remove_socket(address: str) -> None:
    """Remove a fork server's socket and the folder that it is alone in."""
    with contextlib.suppress(OSError):
        Path(address).unlink()
        Path(address).parent.rmdir()


def _die_with_parent() -> None:
    if sys.platform == "linux":
        import ctypes

        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def kill_group(pid: int) -> None:
    """End a process and every process of its group; harmless where there is none."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
