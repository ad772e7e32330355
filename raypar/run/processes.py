"""Processes for ranks: forked from a warm server, or started as fresh interpreters; either way one per rank and trial.

The fork server is a single-threaded process that has imported torch (and what the study's files import) and does
nothing else. A fork of it has torch's 1-3 s of imports behind it, and is otherwise pristine: generators, default dtype,
threads, environment, working folder and memory are the server's, which no trial ever touched.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Protocol

from raypar.trace import mark

# The first optimizer imports torch._dynamo (1.6 s); DDP wants nn.parallel.
BASE_PRELOAD = ("torch", "torch.distributed", "torch._dynamo", "torch.nn.parallel", "raypar.train.loop")


class RankProcess(Protocol):
    """A started rank. `connection` talks to `raypar.train.worker.main`."""

    connection: Connection

    def kill(self) -> None:
        """End the rank and every process that it started; harmless where it has ended."""
        ...

    def join(self, timeout_s: float) -> int | None:
        """Wait for its end; the exit code (negative: a signal), or None after the time-out."""
        ...


class SpawnedRank:
    """A rank in a fresh interpreter: what a fork is compared with, and the way where forking is unsafe."""

    def __init__(self, log_path: Path, listen: socket.socket | None = None) -> None:
        ours, theirs = socket.socketpair()
        fds = [theirs.fileno(), *([listen.fileno()] if listen else [])]
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", "from raypar.run.processes import spawned_main; spawned_main()", *map(str, fds)],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        theirs.close()
        self.connection = Connection(ours.detach())

    def kill(self) -> None:
        _kill_group(self._process.pid)

    def join(self, timeout_s: float) -> int | None:
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        _kill_group(self._process.pid)  # loader processes that outlived the rank
        return code


class ForkedRank:
    """A rank forked from a server."""

    def __init__(self, server: ForkClient, pid: int, connection: Connection) -> None:
        self._server, self.pid = server, pid
        self.connection = connection

    def kill(self) -> None:
        _kill_group(self.pid)

    def join(self, timeout_s: float) -> int | None:
        code = self._server.exit_code(self.pid, timeout_s)
        if code is not None:
            _kill_group(self.pid)
        return code


class ForkClient:
    """A connection to a fork server on this machine. The ranks forked through it die with it."""

    def __init__(self, address: str) -> None:
        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        line.connect(address)
        self._line = Connection(line.detach())
        self._exit_codes: dict[int, int] = {}

    def fork(self, log_path: Path, listen: socket.socket | None = None) -> ForkedRank:
        """Start a rank; waits while the server is still importing.

        Raises:
            EOFError, OSError: the server is gone.
        """
        ours, theirs = socket.socketpair()
        with theirs, log_path.open("ab") as log:
            fds = [theirs.fileno(), log.fileno(), *([listen.fileno()] if listen else [])]
            self._line.send_bytes(json.dumps({"num_fds": len(fds)}).encode())
            for fd in fds:
                send_handle(self._line, fd, 0)
            while True:
                message = json.loads(self._line.recv_bytes())
                if "forked" in message:
                    return ForkedRank(self, message["forked"], Connection(ours.detach()))
                self._exit_codes[message["pid"]] = message["exit_code"]

    def exit_code(self, pid: int, timeout_s: float) -> int | None:
        while pid not in self._exit_codes:
            if not wait([self._line], timeout_s):
                return None
            try:
                message = json.loads(self._line.recv_bytes())
            except (EOFError, OSError):
                return -signal.SIGKILL  # the server is gone, and its forks with it
            self._exit_codes[message["pid"]] = message["exit_code"]
        return self._exit_codes.pop(pid)

    def close(self) -> None:
        self._line.close()


class ForkServer:
    """Owns a fork server process: the server ends with its owner, and the forks with the server."""

    def __init__(self, preload: tuple[str, ...] = (), sys_path: tuple[str, ...] = ()) -> None:
        # Mode 0700: nobody else can ask for a fork.
        self.address = str(Path(tempfile.mkdtemp(prefix="raypar-")) / "fork")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(self.address)
        listener.listen(64)
        self._owner_end, server_end = os.pipe()[::-1]
        environment = {
            **os.environ,
            # OpenBLAS starts threads on import otherwise, and a fork of several threads is not pristine.
            "OPENBLAS_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([*sys_path, os.environ.get("PYTHONPATH", "")]).strip(os.pathsep),
        }
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "from raypar.run.processes import serve; serve()",
                str(listener.fileno()),
                str(server_end),
                *BASE_PRELOAD,
                *preload,
            ],
            pass_fds=(listener.fileno(), server_end),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        listener.close()
        os.close(server_end)

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        os.close(self._owner_end)
        self._process.wait()
        _remove_socket(self.address)  # where the server was killed


def serve() -> None:
    """The fork server's main: import, then fork on request until the owner is gone. Arguments: see `ForkServer`."""
    mark("fork server: starts")
    listener = socket.socket(fileno=int(sys.argv[1]))
    owner = int(sys.argv[2])
    for name in sys.argv[3:]:
        # A module that can't be imported will say so in the trial that needs it.
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
                _kill_group(pid)
            _remove_socket(listener.getsockname())
            os._exit(0)
        if child_ended in readable:
            os.read(child_ended, 4096)
            _tell_ended(owners)
        if listener.fileno() in readable:
            line, _ = listener.accept()
            client = Connection(line.detach())
            clients[client.fileno()] = client
        for fd in [fd for fd in readable if fd in clients]:
            client = clients[fd]
            try:
                request = json.loads(client.recv_bytes())
                fds = [recv_handle(client) for _ in range(request["num_fds"])]
            except (EOFError, OSError):
                for pid in [pid for pid, asker in owners.items() if asker is client]:
                    _kill_group(pid)
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
    """A fresh interpreter's main. Arguments: the connection's descriptor, and rank 0's listening socket."""
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


def _tell_ended(owners: dict[int, Connection]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        asker = owners.pop(pid, None)
        if asker is not None:
            with contextlib.suppress(OSError):
                asker.send_bytes(json.dumps({"pid": pid, "exit_code": os.waitstatus_to_exitcode(status)}).encode())


def _remove_socket(address: str) -> None:
    with contextlib.suppress(OSError):
        Path(address).unlink()
        Path(address).parent.rmdir()


def _die_with_parent() -> None:
    if sys.platform == "linux":
        import ctypes

        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _kill_group(pid: int) -> None:
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
