"""The MLflow of a cluster's head: `mlflow server --app-name basic-auth`, with a password made up the first time.

``python -m raypar.track.shared_server`` starts it, unless it runs, on 127.0.0.1 only, and leaves it running. All of it
is in ``~/mlflow``, which only its owner can look into: the database, files, users, log, and its process number
(``kill $(cat ~/mlflow/pid)`` ends it). MLflow's clients find the password in ``~/.mlflow/credentials``.
"""

from __future__ import annotations

import argparse
import configparser
import os
import secrets
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import psutil

from raypar.errors import RayparError, StoreError
from raypar.track.server import FIRST_PORT, HOST, SERVER_ENVIRONMENT, Server, allowed_hosts, answers, failure, free_port

# A password check takes a tenth of a second by design, at each call unless it is cached.
AUTH_CONFIG = "[mlflow]\ndefault_permission = READ\ndatabase_uri = sqlite:///users.db\nauth_cache_ttl_seconds = 60\n"
DATABASE = "MLFLOW_BACKEND_STORE_URI"


def ensure_server(home: Path, *, port: int = FIRST_PORT) -> bool:
    """Start the server in ``home``/mlflow unless it runs; return whether it had to be started.

    Its database is the one that MLFLOW_BACKEND_STORE_URI names, else ``home``/mlflow/mlflow.db.

    Raises:
        StoreError: it doesn't start, the port is taken by another program, or the password is lost.
    """
    if find_spec("flask_wtf") is None:
        raise StoreError("MLflow can't ask for a password here", hint="pip install 'raypar[cluster]'")
    folder = home / "mlflow"
    _make_private(folder)
    with suppress(OSError, ValueError, psutil.Error):
        command = psutil.Process(int((folder / "pid").read_text())).cmdline()
        if "mlflow" in command and str(port) in command:
            return False
    if free_port(port) != port:
        raise StoreError(f"port {port} is taken by another program", hint="end it, or give --port")
    user, password = credentials(home)
    (folder / "auth.ini").write_text(AUTH_CONFIG)
    command = [sys.executable, "-m", "mlflow", "server", "--app-name", "basic-auth", "--workers", "1"]
    command += ["--host", HOST, "--port", str(port), "--allowed-hosts", ",".join(allowed_hosts(HOST))]
    # Where `raypar ui` looks for them beside a database, should the folder be copied elsewhere.
    command += ["--artifacts-destination", str(folder / "mlartifacts")]
    # Not as arguments, which everyone on the machine can read.
    environment = {
        **os.environ,
        **SERVER_ENVIRONMENT,
        DATABASE: os.environ.get(DATABASE) or f"sqlite:///{folder}/mlflow.db",
        "MLFLOW_AUTH_CONFIG_PATH": str(folder / "auth.ini"),
        "MLFLOW_AUTH_ADMIN_USERNAME": user,
        "MLFLOW_AUTH_ADMIN_PASSWORD": password,
        "MLFLOW_FLASK_SERVER_SECRET_KEY": secrets.token_hex(32),
    }
    with (folder / "log").open("w+b") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        server = Server(f"http://{HOST}:{port}", process)
        try:
            if not answers(server):
                raise failure(server, log)
            (folder / "pid").write_text(f"{process.pid}\n")
        except BaseException:
            server.stop()
            raise
    return True


def credentials(home: Path) -> tuple[str, str]:
    """Return user and password of ``home``/.mlflow/credentials; make them up where there are none.

    Raises:
        StoreError: there are none, but users that have been made with them.
    """
    path = home / ".mlflow" / "credentials"
    file = configparser.ConfigParser()  # as MLflow's clients read it
    file.read(path)
    keys = ("mlflow_tracking_username", "mlflow_tracking_password")
    user, password = (file.get("mlflow", key, fallback="") for key in keys)
    if user and password:
        return user, password
    if (users := home / "mlflow" / "users.db").exists():
        raise StoreError(f"{path}: the password of {users} is lost", hint=f"to start anew: rm {users}")
    user, password = "admin", secrets.token_urlsafe(24)
    _make_private(path.parent)
    path.touch()
    path.chmod(0o600)
    path.write_text(f"[mlflow]\nmlflow_tracking_username = {user}\nmlflow_tracking_password = {password}\n")
    return user, password


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m raypar.track.shared_server", description=__doc__)
    parser.add_argument("--port", type=int, default=FIRST_PORT)
    port = parser.parse_args(arguments).port
    try:
        is_new = ensure_server(Path.home(), port=port)
    except RayparError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    how = "answers" if is_new else "runs already"
    print(f"MLflow {how} at http://{HOST}:{port}; who may use it: {Path.home()}/.mlflow/credentials")
    return 0


if __name__ == "__main__":
    sys.exit(main())
