"""MLflow servers: a web page over a store, which ends with this process, and the shared server on a cluster's head.

``python -m raypar.track.server`` starts the shared server on 127.0.0.1 unless it is running, and leaves it running. The
private folder ``~/mlflow`` has its database, files, log and process id; ``kill $(cat ~/mlflow/pid)`` ends it. The first
start generates a password in ``~/.mlflow/credentials``, from which MLflow's clients read it.
"""

from __future__ import annotations

import argparse
import configparser
import errno
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from ipaddress import ip_address
from pathlib import Path
from typing import IO

import psutil

from raypar.errors import RayparError, StoreError
from raypar.files import make_private_folder
from raypar.signals import handle_signals
from raypar.track.check import check_writable
from raypar.track.client import artifact_root, close_store, make_database, reachable
from raypar.track.one_time_link import APP_NAME, LOOPBACK, Access

HOST = "127.0.0.1"
EVERYWHERE = "0.0.0.0"
FIRST_PORT = 5000
START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 10.0

# Turns off what raypar doesn't use: by default, the server has 15 processes, takes 2.3 GB and is three times slower.
SERVER_ENVIRONMENT = {
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    # It and its child processes import nothing from the current folder, which may belong to another user.
    "PYTHONSAFEPATH": "1",
    # Without it, --allowed-hosts has no effect.
    "MLFLOW_SERVER_DISABLE_SECURITY_MIDDLEWARE": "false",
}
DATABASE = "MLFLOW_BACKEND_STORE_URI"
UVICORN = "MLFLOW_UVICORN_OPTS"
EXPOSED = "warning: --host {host}: {danger}; omit --host to keep it local, and connect from other machines with "
EXPOSED += "`ssh -L {port}:localhost:{port} {name}`"
WITHOUT_LINK = (
    "anyone who can reach port {port} of this machine can read, change and delete every run and file of the store "
    "without a password"
)
UNENCRYPTED = "link and pages are not encrypted: anyone listening on the network can use the link and read the store"


def home_url(server_url: str) -> str:
    """Return the page of a server to open. Without the parameter, MLflow shows an empty page for traces."""
    return f"{server_url.rstrip('/')}/?workflowType=machine_learning"


class Server:
    """Running MLflow server, whose process leads a group; a context manager that stops it."""

    def __init__(self, url: str, process: subprocess.Popen[bytes]) -> None:
        self.url = url
        self.pid = process.pid
        self._process = process

    def is_running(self) -> bool:
        return self._process.poll() is None

    def wait(self) -> int:
        """Wait until it ends; return its exit status."""
        return self._process.wait()

    def answers(self) -> bool:
        """Wait until it answers; return False if it ends first or takes longer than `START_TIMEOUT_S`."""
        until_s = time.monotonic() + START_TIMEOUT_S
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy for this machine
        while time.monotonic() < until_s and self.is_running():
            with suppress(OSError), opener.open(f"{self.url}/health", timeout=2) as answer:
                if answer.status == 200:
                    return True
            time.sleep(0.1)
        return False

    def stop(self) -> None:
        """End the whole process group and wait for it. Further calls do nothing."""
        # Its leader may have ended and left a worker on the port.
        with suppress(ProcessLookupError, PermissionError):  # the group has ended
            for signal_ in (signal.SIGTERM, signal.SIGKILL):
                os.killpg(self.pid, signal_)
                until_s = time.monotonic() + STOP_TIMEOUT_S
                while time.monotonic() < until_s:
                    self._process.poll()
                    os.killpg(self.pid, 0)
                    time.sleep(0.05)
        if self._process.poll() is None:
            self._process.wait(STOP_TIMEOUT_S)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _launch(
    host: str, port: int, arguments: Sequence[str], environment: Mapping[str, str], log: IO[bytes], folder: Path | None
) -> Server:
    """Start a server in the folder and return when it answers. Raises StoreError with the end of its log.

    Passwords have to be in the environment, because all users of the machine can read the arguments.
    """
    command = [sys.executable, "-m", "mlflow", "server", *arguments, "--workers", "1", "--host", host]
    command += ["--port", str(port), "--allowed-hosts", ",".join(allowed_hosts(host))]
    # By default, uvicorn imports from the current folder first.
    command += ["--uvicorn-opts", f"{os.environ.get(UVICORN, '')} --app-dir {os.devnull}".strip()]
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, **SERVER_ENVIRONMENT, **environment},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    server = Server(f"http://{HOST if host in (*LOOPBACK, EVERYWHERE) else host}:{port}", process)
    try:
        if not server.answers():
            outcome = f"did not answer within {START_TIMEOUT_S:.0f} s" if server.is_running() else "ended at once"
            log.seek(0)
            output = log.read().decode(errors="replace").strip().splitlines()[-3:]
            problem = "\n  ".join([f"MLflow's server {outcome}{':' * bool(output)}", *output])
            raise StoreError(problem, hint="`raypar doctor` checks the store")
    except BaseException:
        server.stop()
        raise
    return server


def start_server(
    tracking_uri: str, project_dir: Path, *, port: int = FIRST_PORT, host: str = HOST, access: Access | None = None
) -> Server:
    """Start a server over a store on the port, or the next free one; return when it answers.

    Args:
        access: secrets that the server asks for; None: everyone who can reach it may use it.

    Raises:
        StoreError: the store can't be used, or the server doesn't start.
    """
    # The server would retry for minutes, and then fail without a hint.
    check_writable(tracking_uri, project_dir)
    with reachable(tracking_uri):
        make_database(tracking_uri)
        close_store(tracking_uri, project_dir)
    port = free_port(port, host)
    arguments = ["--artifacts-destination", str(artifact_root(tracking_uri, project_dir))]
    environment = {DATABASE: tracking_uri}
    if access is not None:
        arguments += ["--app-name", APP_NAME]
        environment |= access.environment
    with tempfile.TemporaryFile() as log:
        return _launch(host, port, arguments, environment, log, None)


def serve(
    tracking_uri: str,
    project_dir: Path,
    *,
    port: int = FIRST_PORT,
    host: str = HOST,
    access: Access | None = None,
    announce: Callable[[str], None] = print,
    warn: Callable[[str], None] = print,
) -> None:
    """Start a server, announce its address, and wait for a signal or its end. Raises as `start_server`.

    Warns if other machines can reach the host.
    """
    with ExitStack() as stack:
        stack.enter_context(handle_signals())
        stack.enter_context(suppress(KeyboardInterrupt))
        server = stack.enter_context(start_server(tracking_uri, project_dir, port=port, host=host, access=access))
        port = int(server.url.rpartition(":")[2])
        if access is not None:
            stack.enter_context(access.shared_by_file(port))
        if not is_loopback(host):
            danger = WITHOUT_LINK.format(port=port) if access is None else UNENCRYPTED
            warn(EXPOSED.format(host=host, danger=danger, port=port, name=socket.gethostname()))
        announce(server.url)
        server.wait()


def ensure_shared_server(home: Path, *, port: int = FIRST_PORT) -> bool:
    """Start the shared server in ``home``/mlflow unless it is running; return True if it was started.

    Its database is MLFLOW_BACKEND_STORE_URI, else ``home``/mlflow/mlflow.db.

    Raises:
        StoreError: it doesn't start, or another program uses the port.
    """
    folder = home / "mlflow"
    make_private_folder(folder)
    with suppress(OSError, ValueError, psutil.Error):
        command = psutil.Process(int((folder / "pid").read_text())).cmdline()
        if "mlflow" in command and str(port) in command:
            return False
    if free_port(port) != port:
        raise StoreError(f"another program uses port {port}", hint="end it, or choose another port with --port")
    _, password = credentials(home)
    database = os.environ.get(DATABASE) or f"sqlite:///{folder}/mlflow.db"
    environment = {DATABASE: database, **Access(token="", key=password).environment}
    # Beside the database, where `raypar ui` finds them in a copy of the folder.
    arguments = ["--app-name", APP_NAME, "--artifacts-destination", str(folder / "mlartifacts")]
    with reachable(database):
        make_database(database)
    with (folder / "log").open("w+b") as log:
        server = _launch(HOST, port, arguments, environment, log, folder)
    (folder / "pid").write_text(f"{server.pid}\n")
    return True


def credentials(home: Path) -> tuple[str, str]:
    """Return user and password of ``home``/.mlflow/credentials, which are generated if missing."""
    path = home / ".mlflow" / "credentials"
    file = configparser.ConfigParser()  # as MLflow's clients read it
    file.read(path)
    keys = ("mlflow_tracking_username", "mlflow_tracking_password")
    user, password = (file.get("mlflow", key, fallback="") for key in keys)
    if user and password:
        return user, password
    user, password = "admin", secrets.token_urlsafe(24)
    make_private_folder(path.parent)
    path.touch()
    path.chmod(0o600)
    path.write_text(f"[mlflow]\nmlflow_tracking_username = {user}\nmlflow_tracking_password = {password}\n")
    return user, password


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach a server on this host."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def allowed_hosts(host: str) -> tuple[str, ...]:
    """Return the host names that browsers may use for a server on `host`, as MLflow's patterns with the port.

    MLflow's default patterns, such as ``10.*``, also match ``10.evil.example``: its owner can point that name to this
    machine, so that their page can read the store.
    """
    names = [*LOOPBACK] if host == EVERYWHERE or is_loopback(host) else [*LOOPBACK, host]
    if host == EVERYWHERE:
        interfaces = [a for addresses in psutil.net_if_addrs().values() for a in addresses]
        names += [socket.gethostname(), socket.getfqdn()]
        names += [a.address for a in interfaces if a.family is socket.AF_INET]
    literal = [name for name in dict.fromkeys(names) if not set(name) & set("*?[],")]
    from_user = os.environ.get("MLFLOW_SERVER_ALLOWED_HOSTS", "")
    return (*literal, *(f"{name}:*" for name in literal), *(name for name in from_user.split(",") if name))


def free_port(first: int = FIRST_PORT, host: str = HOST) -> int:
    """Return the first free port from `first` on.

    Raises:
        StoreError: none of the next hundred is free, or the host is not an address of this machine.
    """
    for port in range(first, min(first + 100, 65536)):
        with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does: ignores TIME_WAIT
            try:
                probe.bind((host, port))
            except OSError as error:
                if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                    hint = "use 127.0.0.1 for this machine only, or 0.0.0.0 for all its networks"
                    raise StoreError(f"--host {host}: not an address of this machine", hint=hint) from None
                continue
            return port
    raise StoreError(f"no free port from {first} on", hint="choose another one with --port")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``python -m raypar.track.server``; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m raypar.track.server", description=__doc__)
    parser.add_argument("--port", type=int, default=FIRST_PORT)
    port = parser.parse_args(arguments).port
    try:
        is_new = ensure_shared_server(Path.home(), port=port)
    except RayparError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    state = "runs" if is_new else "already runs"
    print(f"MLflow {state} at http://{HOST}:{port}; user and password: {Path.home()}/.mlflow/credentials")
    return 0


if __name__ == "__main__":
    sys.exit(main())
