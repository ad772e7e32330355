"""MLflow's web page over a store, in two processes that end with this one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn
from urllib.parse import urlsplit

from raypar.errors import StoreError
from raypar.track.check import check_writable
from raypar.track.client import artifact_root, shown_uri

HOST = "127.0.0.1"
FIRST_PORT = 5000
START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 10.0

# The default is 15 processes, 2.3 GB and calls three times as slow: what raypar doesn't use is left out.
_ENVIRONMENT = {
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
}


def home_url(server_url: str) -> str:
    """A server's page to open. Without the parameter MLflow opens one for traces, which is empty."""
    return f"{server_url.rstrip('/')}/?workflowType=machine_learning"


class Server:
    """A running MLflow server; also a context manager that stops it.

    Attributes:
        url: where it answers.
        pid: its process, which leads a process group of its own.
    """

    def __init__(self, url: str, process: subprocess.Popen[bytes]) -> None:
        self.url = url
        self.pid = process.pid
        self._process = process

    @property
    def home_url(self) -> str:
        """The page to open."""
        return home_url(self.url)

    def is_running(self) -> bool:
        return self._process.poll() is None

    def wait(self) -> int:
        """Until it ends by itself; its exit status."""
        return self._process.wait()

    def stop(self) -> None:
        """Ends the whole process group and waits for it. Does nothing a second time."""
        # The group as a whole: its leader may be gone and have left a worker on the port.
        for signal_, timeout_s in ((signal.SIGTERM, STOP_TIMEOUT_S), (signal.SIGKILL, STOP_TIMEOUT_S)):
            try:
                os.killpg(self.pid, signal_)
            except (ProcessLookupError, PermissionError):
                break
            if self._is_gone_within(timeout_s):
                break
        if self._process.poll() is None:
            self._process.wait(STOP_TIMEOUT_S)

    def _is_gone_within(self, timeout_s: float) -> bool:
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            self._process.poll()
            try:
                os.killpg(self.pid, 0)
            except (ProcessLookupError, PermissionError):
                return True
            time.sleep(0.05)
        return False

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def start_server(tracking_uri: str, project_dir: Path, *, port: int = FIRST_PORT) -> Server:
    """Starts a server over a store, on this machine only, on the port or the next free one; returns when it answers.

    Raises:
        StoreError: if the store has a server already or can't be used, or the server doesn't start.
    """
    if urlsplit(tracking_uri).scheme in ("http", "https"):
        raise StoreError(f"{shown_uri(tracking_uri)} is a server already", hint="open it in a browser")
    # The server itself would try for minutes, and then fail without a word on the way out.
    check_writable(tracking_uri, project_dir)
    root = artifact_root(tracking_uri, project_dir)
    port = free_port(port)
    command = [sys.executable, "-m", "mlflow", "server"]
    command += ["--artifacts-destination", str(root), "--workers", "1", "--host", HOST, "--port", str(port)]
    # Where it says why it failed; without a name, so that nothing is left of it.
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            # Not as an argument, which everyone on the machine can read: it may hold a password.
            env={**os.environ, **_ENVIRONMENT, "MLFLOW_BACKEND_STORE_URI": tracking_uri},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        server = Server(f"http://{HOST}:{port}", process)
        try:
            if not _answers(server):
                raise _failed(server, log)
        except BaseException:
            server.stop()
            raise
    return server


def serve(
    tracking_uri: str, project_dir: Path, *, port: int = FIRST_PORT, announce: Callable[[str], None] = print
) -> None:
    """Starts a server, announces its page, and stays until Ctrl-C, SIGTERM or the server's own end.

    Raises:
        StoreError: as `start_server` does.
    """

    def end(_signal: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    previous: Any = signal.signal(signal.SIGTERM, end)
    try:
        with start_server(tracking_uri, project_dir, port=port) as server:
            announce(server.home_url)
            server.wait()
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, previous)


def free_port(first: int = FIRST_PORT) -> int:
    """The first port from `first` on that nobody listens on.

    Raises:
        StoreError: if none of the next hundred is free.
    """
    for port in range(first, min(first + 100, 65536)):
        with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does: not put off by TIME_WAIT
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return port
    raise StoreError(f"No port from {first} on is free", hint="choose another one with --port")


def _answers(server: Server) -> bool:
    until_s = time.monotonic() + START_TIMEOUT_S
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy for this machine
    while time.monotonic() < until_s and server.is_running():
        try:
            with opener.open(f"{server.url}/health", timeout=2) as answer:
                if answer.status == 200:
                    return True
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.1)
    return False


def _failed(server: Server, log: Any) -> StoreError:
    ended = not server.is_running()
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines()
    said = "\n  ".join(lines[-3:])
    how = "ended at once" if ended else f"did not answer within {START_TIMEOUT_S:.0f} s"
    return StoreError(
        f"MLflow's server {how}" + (f":\n  {said}" if said else ""), hint="`raypar doctor` checks the store"
    )
