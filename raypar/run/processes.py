"""Processes for ranks: forked from a warm server, or started as fresh interpreters; either way one per rank and trial.

The fork server is a single-threaded process that has imported torch (and what the study's files import) and does
nothing else. A fork of it has torch's 1-3 s of imports behind it, and is otherwise pristine: generators, default dtype,
threads, environment, working folder and memory are the server's, which no trial ever touched.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Protocol

from raypar.run.forkserver import kill_group, remove_socket
from raypar.signals import is_running

# The first optimizer imports torch._dynamo (1.6 s); DDP wants nn.parallel.
BASE_PRELOAD = ("torch", "torch.distributed", "torch._dynamo", "torch.nn.parallel", "raypar.train.loop")

CLOSE_GRACE_S = 1.0

# A rank keeps the memory that it frees (glibc; others ignore it). By default large tensors go back to the kernel and
# are paged in again, step by step: up to a third of a step's time, and how much of it is a matter of luck.
ALLOCATOR = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    "MALLOC_TOP_PAD_": str(64 * 2**20),
}


class RankProcess(Protocol):
    """A started rank. `connection` talks to `raypar.train.worker.main`; `was_killed` says whether `kill` ended it."""

    connection: Connection
    was_killed: bool

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
                [
                    sys.executable,
                    "-c",
                    "from raypar.run.forkserver import spawned_main; spawned_main()",
                    *map(str, fds),
                ],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **ALLOCATOR},
                start_new_session=True,
            )
        theirs.close()
        self.connection = Connection(ours.detach())
        self.was_killed = False

    def kill(self) -> None:
        self.was_killed = self.was_killed or is_running(self._process.pid)
        kill_group(self._process.pid)

    def join(self, timeout_s: float) -> int | None:
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        kill_group(self._process.pid)  # loader processes that outlived the rank
        return code


class ForkedRank:
    """A rank forked from a server."""

    def __init__(self, server: ForkClient, pid: int, connection: Connection) -> None:
        self._server, self.pid = server, pid
        self.connection = connection
        self.was_killed = False

    def kill(self) -> None:
        self.was_killed = self.was_killed or is_running(self.pid)
        kill_group(self.pid)

    def join(self, timeout_s: float) -> int | None:
        code = self._server.exit_code(self.pid, timeout_s)
        if code is not None:
            kill_group(self.pid)
        return code


class ForkClient:
    """A connection to a fork server on this machine. The ranks forked through it die with it."""

    def __init__(self, address: str) -> None:
        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        line.connect(address)
        self._line = Connection(line.detach())
        self._exit_codes: dict[int, int] = {}
        self.is_gone = False  # noticed that the server is

    def wait_until_ready(self) -> None:
        """Wait while the server is still importing; before the first fork.

        Raises:
            EOFError, OSError: the server is gone.
        """
        self._line.send_bytes(json.dumps("ready?").encode())
        self._line.recv_bytes()

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
                self.is_gone = True
                return -signal.SIGKILL  # the server's forks go with it
            self._exit_codes[message["pid"]] = message["exit_code"]
        return self._exit_codes.pop(pid)

    def close(self) -> None:
        self._line.close()


def answers(address: str) -> bool:
    """Whether a fork server is alive at this address."""
    try:
        ForkClient(address).close()
    except OSError:
        return False
    return True


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
            **ALLOCATOR,
            "PYTHONPATH": os.pathsep.join([*sys_path, os.environ.get("PYTHONPATH", "")]).strip(os.pathsep),
        }
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "from raypar.run.forkserver import serve; serve()",
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
        try:
            self._process.wait(CLOSE_GRACE_S)
        except subprocess.TimeoutExpired:  # still importing: it has forked nothing
            self._process.kill()
            self._process.wait()
        remove_socket(self.address)  # where the server was killed
