"""The MLflow of a cluster: a server on its head that outlives whoever starts it, and asks for a user and a password.

``python -m raypar.track.shared_server`` starts it, unless it runs, on 127.0.0.1 only. All of it is in ``~/mlflow``,
which only its owner can look into: the database, files, users, log, and its process number
(``kill $(cat ~/mlflow/pid)`` ends it). The password is made up the first time, and is put where every client of MLflow
looks for it.
"""

from __future__ import annotations

import argparse
import configparser
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import psutil
from filelock import FileLock

from raypar.errors import RayparError, StoreError
from raypar.track.server import FIRST_PORT, HOST, SERVER_ENVIRONMENT, Server, allowed_hosts, answers, failure

DATABASE = "MLFLOW_BACKEND_STORE_URI"
USER, PASSWORD = CREDENTIALS = ("mlflow_tracking_username", "mlflow_tracking_password")
# A password is checked at each call, and takes a tenth of a second by design.
CHECKED_FOR_S = 60


def ensure_server(folder: Path, home: Path, *, port: int = FIRST_PORT) -> tuple[str, bool]:
    """The server's address, and whether it had to be started; it answers then.

    Its database is the one that MLFLOW_BACKEND_STORE_URI names, else ``folder``/mlflow.db.

    Args:
        folder: for all of it.
        home: credentials are in ``home``/.mlflow/credentials. A user and a password that are there are taken.

    Raises:
        StoreError: it doesn't start, or the port is another's.
    """
    if find_spec("flask_wtf") is None:
        raise StoreError("MLflow can't ask for a password here", hint="pip install 'raypar[cluster]'")
    _make_private(folder)
    with FileLock(folder / "lock"):
        if _is_ours(folder / "pid", port):
            return f"http://{HOST}:{port}", False
        if _is_taken(port):
            raise StoreError(f"Port {port} is another's", hint="end what listens there, or give --port")
        write_users(folder, home)
        return _start(folder, port).url, True


def _start(folder: Path, port: int) -> Server:
    command = [sys.executable, "-m", "mlflow", "server", "--app-name", "basic-auth", "--workers", "1"]
    command += ["--host", HOST, "--port", str(port), "--allowed-hosts", ",".join(allowed_hosts(HOST))]
    # Where `raypar ui` looks for them beside a database, should the folder be copied elsewhere.
    command += ["--artifacts-destination", str(folder / "mlartifacts")]
    # Not as arguments, which everyone on the machine can read.
    environment = {
        **os.environ,
        **SERVER_ENVIRONMENT,
        DATABASE: os.environ.get(DATABASE) or f"sqlite:///{folder}/mlflow.db",
        "MLFLOW_AUTH_CONFIG_PATH": str(folder / "users.ini"),
        "MLFLOW_FLASK_SERVER_SECRET_KEY": secrets.token_hex(32),
    }
    for name in ("MLFLOW_AUTH_ADMIN_USERNAME", "MLFLOW_AUTH_ADMIN_PASSWORD"):  # which would go before the file's
        environment.pop(name, None)
    with _opened(folder / "log", "w+b") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            umask=0o077,
        )
        server = Server(f"http://{HOST}:{port}", process)
        try:
            if not answers(server):
                raise failure(server, log)
            (folder / "pid").write_text(f"{process.pid}\n")
        except BaseException:
            server.stop()
            raise
    return server


def write_users(folder: Path, home: Path) -> None:
    """MLflow's file of who is its administrator, and the one that says so to clients, unless they are there."""
    credentials, users = home / ".mlflow" / "credentials", folder / "users.ini"
    known = _section(users)
    given = _section(credentials)
    has_given = all(given.get(key) for key in CREDENTIALS)
    if "admin_password" in known:  # MLflow goes by the one that it was started with first
        user, password = known["admin_username"], known["admin_password"]
    elif has_given:
        user, password = (given[key] for key in CREDENTIALS)
    else:
        user, password = "admin", secrets.token_urlsafe(24)
    if not known:
        who_is_it = {
            "default_permission": "READ",
            "database_uri": f"sqlite:///{folder}/users.db",
            "admin_username": user,
            "admin_password": password,
            "auth_cache_ttl_seconds": str(CHECKED_FOR_S),
        }
        _write_section(users, who_is_it)
    if not has_given:
        _make_private(credentials.parent)
        _write_section(credentials, dict(zip(CREDENTIALS, (user, password), strict=True)))


def _section(path: Path) -> dict[str, str]:
    found = configparser.ConfigParser()
    found.read(path)
    return dict(found["mlflow"]) if "mlflow" in found else {}


def _write_section(path: Path, values: Mapping[str, str]) -> None:
    section = configparser.ConfigParser()
    section["mlflow"] = {key: value.replace("%", "%%") for key, value in values.items()}
    with _opened(path, "w") as file:
        section.write(file)


def _opened(path: Path, mode: str) -> IO[Any]:
    """An empty file for its owner only, whatever it was before."""
    number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    os.fchmod(number, 0o600)
    return os.fdopen(number, mode)


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)


def _is_ours(pid_file: Path, port: int) -> bool:
    with suppress(OSError, ValueError, psutil.Error):
        command = psutil.Process(int(pid_file.read_text())).cmdline()
        return "mlflow" in command and str(port) in command and _is_taken(port)
    return False


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m raypar.track.shared_server", description=__doc__)
    parser.add_argument("--port", type=int, default=FIRST_PORT)
    port = parser.parse_args(arguments).port
    home = Path.home()
    try:
        url, is_new = ensure_server(home / "mlflow", home, port=port)
    except RayparError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"MLflow {'answers' if is_new else 'runs already'} at {url}; who may use it: {home}/.mlflow/credentials")
    return 0


if __name__ == "__main__":
    sys.exit(main())
