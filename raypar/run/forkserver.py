"""Main functions of a fork server, and of the ranks that it (or a fresh interpreter) becomes."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import shutil
import signal
import socket
import sys
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle
from pathlib import Path

from raypar.trace import mark


def serve() -> None:
    """Run a fork server: import, then fork on request until the owner has ended. Arguments: see `ForkServer`.

    A client sends a number of descriptors, and these, for each rank (0: is it ready?). The answers are pairs: a pid and
    None for a new rank, a pid and an exit code for one that has ended.
    """
    mark("fork server: starts")
    listener, owner = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    for name in sys.argv[3:]:
        # A module that can't be imported fails in the trial that needs it.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    mark("fork server: imported")
    gc.freeze()  # what is here stays: a fork's collector need not touch (and so copy) its pages
    child_ended, wake_up = os.pipe()
    os.set_blocking(wake_up, False)
    signal.set_wakeup_fd(wake_up, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    clients: list[Connection] = []
    owners: dict[int, Connection] = {}  # pid of a rank: who asked for it
    while True:
        readable = wait([listener, owner, child_ended, *clients])
        if owner in readable:
            for pid in owners:
                kill_group(pid)
            shutil.rmtree(Path(listener.getsockname()).parent, ignore_errors=True)  # its owner may have been killed
            os._exit(0)
        if child_ended in readable:
            os.read(child_ended, 4096)
            _send_exit_codes(owners)
        if listener in readable:
            clients.append(Connection(listener.accept()[0].detach()))
        for client in [client for client in clients if client in readable]:
            try:
                fds = [recv_handle(client) for _ in range(client.recv())]
            except (EOFError, OSError):
                for pid in [pid for pid, owner_of in owners.items() if owner_of is client]:
                    kill_group(pid)
                    owners.pop(pid)
                clients.remove(client)
                client.close()
                continue
            if not fds:
                client.send((0, None))
            elif pid := os.fork():
                owners[pid] = client
                client.send((pid, None))
                for fd in fds:
                    os.close(fd)
            else:
                _become_rank(fds, (listener.fileno(), owner, child_ended, wake_up, *(c.fileno() for c in clients)))


def spawned_main() -> None:
    """Run a rank in a fresh interpreter. Arguments: the connection's descriptor, and rank 0's listening socket."""
    _die_with_parent()
    _run_rank(*map(int, sys.argv[1:]))


def _become_rank(fds: list[int], server_fds: tuple[int, ...]) -> None:
    try:
        signal.set_wakeup_fd(-1)
        for fd in server_fds:
            os.close(fd)
        _die_with_parent()
        os.setpgid(0, 0)  # a group of its own: loader processes can be ended with the rank
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        connection, log, *listen = fds
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        _run_rank(connection, *listen)
    finally:
        os._exit(70)


def _run_rank(connection_fd: int, listen_fd: int | None = None) -> None:
    from raypar.train.worker import main

    main(Connection(connection_fd), listen_fd)
    os._exit(0)  # no finalizers: there is nothing to save, and the next trial waits


def _send_exit_codes(owners: dict[int, Connection]) -> None:
    with contextlib.suppress(ChildProcessError):  # there is none left
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if (client := owners.pop(ended[0], None)) is not None:
                with contextlib.suppress(OSError):
                    client.send((ended[0], os.waitstatus_to_exitcode(ended[1])))


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
