"""MLflow's web page over a store, in two processes that end with this one."""

from __future__ import annotations

import errno
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
from ipaddress import ip_address
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn
from urllib.parse import urlsplit

import psutil

from raypar.errors import StoreError
from raypar.masking import masked
from raypar.track.check import check_writable
from raypar.track.client import artifact_root

HOST = "127.0.0.1"
EVERYWHERE = "0.0.0.0"
FIRST_PORT = 5000
START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 10.0

# The default is 15 processes, 2.3 GB and calls three times as slow: what raypar doesn't use is left out.
SERVER_ENVIRONMENT = {
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    # What would open the door that --allowed-hosts shuts.
    "MLFLOW_SERVER_DISABLE_SECURITY_MIDDLEWARE": "false",
}
LOOPBACK = ("127.0.0.1", "localhost")
EXPOSED = (
    "warning: --host {host}: whoever reaches port {port} of this machine can read, change and delete every run and "
    "file of the store, without a password; leave --host out to keep it to this machine, and come from elsewhere by "
    "`ssh -L {port}:localhost:{port} {name}`"
)


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


def start_server(tracking_uri: str, project_dir: Path, *, port: int = FIRST_PORT, host: str = HOST) -> Server:
    """Starts a server over a store, for this machine only unless another host is given, on the port or the next free
    one; returns when it answers.

    Raises:
        StoreError: if the store has a server already or can't be used, or the server doesn't start.
    """
    if urlsplit(tracking_uri).scheme in ("http", "https"):
        raise StoreError(f"{masked(tracking_uri)} is a server already", hint="open it in a browser")
    # The server itself would try for minutes, and then fail without a word on the way out.
    check_writable(tracking_uri, project_dir)
    root = artifact_root(tracking_uri, project_dir)
    port = free_port(port, host)
    command = [sys.executable, "-m", "mlflow", "server"]
    command += ["--artifacts-destination", str(root), "--workers", "1", "--host", host, "--port", str(port)]
    command += ["--allowed-hosts", ",".join(allowed_hosts(host))]
    # Where it says why it failed; without a name, so that nothing is left of it.
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            # Not as an argument, which everyone on the machine can read: it may hold a password.
            env={**os.environ, **SERVER_ENVIRONMENT, "MLFLOW_BACKEND_STORE_URI": tracking_uri},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        server = Server(f"http://{HOST if host in (*LOOPBACK, EVERYWHERE) else host}:{port}", process)
        try:
            if not answers(server):
                raise failure(server, log)
        except BaseException:
            server.stop()
            raise
    return server


def serve(
    tracking_uri: str,
    project_dir: Path,
    *,
    port: int = FIRST_PORT,
    host: str = HOST,
    announce: Callable[[str], None] = print,
    warn: Callable[[str], None] = print,
) -> None:
    """Starts a server, announces its page, and stays until Ctrl-C, SIGTERM or the server's own end. Warns of a host
    that lets others in.

    Raises:
        StoreError: as `start_server` does.
    """

    def end(_signal: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    previous: Any = signal.signal(signal.SIGTERM, end)
    try:
        with start_server(tracking_uri, project_dir, port=port, host=host) as server:
            if not is_loopback(host):
                warn(EXPOSED.format(host=host, port=urlsplit(server.url).port, name=socket.gethostname()))
            announce(server.home_url)
            server.wait()
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, previous)


def is_loopback(host: str) -> bool:
    """Whether a server that listens there can be reached from this machine alone."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def allowed_hosts(host: str) -> tuple[str, ...]:
    """What a browser may call a server that listens on `host`, as MLflow matches it: patterns, the port included.

    MLflow's own list goes by patterns such as ``10.*``, which a name like ``10.evil.example`` matches too: whoever owns
    it can have it mean this machine, and a page of theirs could then read the store.
    """
    names = [*LOOPBACK]
    if host == EVERYWHERE:
        of_interfaces = (address.address for own in psutil.net_if_addrs().values() for address in own)
        names += [socket.gethostname(), socket.getfqdn(), *(name for name in of_interfaces if _is_ipv4(name))]
    elif not is_loopback(host):
        names.append(host)
    own = [name for name in dict.fromkeys(names) if not set(name) & set("*?[],")]
    asked_for = os.environ.get("MLFLOW_SERVER_ALLOWED_HOSTS", "")
    return (*own, *(f"{name}:*" for name in own), *(name for name in asked_for.split(",") if name))


def _is_ipv4(text: str) -> bool:
    try:
        return ip_address(text).version == 4
    except ValueError:
        return False


def free_port(first: int = FIRST_PORT, host: str = HOST) -> int:
    """The first port from `first` on that nobody listens on.

    Raises:
        StoreError: if none of the next hundred is free, or the host is none of this machine's.
    """
    for port in range(first, min(first + 100, 65536)):
        with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does: not put off by TIME_WAIT
            try:
                probe.bind((host, port))
            except OSError as error:
                if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                    hint = "127.0.0.1 is for this machine only, 0.0.0.0 for every network that it is in"
                    raise StoreError(f"--host {host}: is no address of this machine", hint=hint) from None
                continue
            return port
    raise StoreError(f"No port from {first} on is free", hint="choose another one with --port")


def answers(server: Server) -> bool:
    """Whether it answers in time; waits for it, or for its end."""
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


def failure(server: Server, log: Any) -> StoreError:
    """What to tell of a server that doesn't answer. `log` is a file of bytes, with what it has said."""
    ended = not server.is_running()
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines()
    said = "\n  ".join(lines[-3:])
    how = "ended at once" if ended else f"did not answer within {START_TIMEOUT_S:.0f} s"
    return StoreError(
        f"MLflow's server {how}" + (f":\n  {said}" if said else ""), hint="`raypar doctor` checks the store"
    )
