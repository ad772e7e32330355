"""The MLflow that a cluster's head starts: on this machine only, for those with its password."""

from __future__ import annotations

import base64
import configparser
import contextlib
import http.client
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from commands import Cli
from telling import until

from raypar.run.ranks import is_running
from raypar.track.server import free_port


def status(port: int, *, host: str = "localhost", login: str = "") -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    headers = {"Host": host}
    if login:
        headers["Authorization"] = "Basic " + base64.b64encode(login.encode()).decode()
    try:
        connection.request("GET", "/ajax-api/2.0/mlflow/experiments/search?max_results=1", headers=headers)
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.mlflow
def test_a_heads_mlflow_outlives_its_start_and_asks_for_a_password_that_nobody_else_can_read(tmp_path: Path) -> None:
    pytest.importorskip("flask_wtf", reason="MLflow asks for passwords with raypar[cluster]")
    home, stranger, port = tmp_path / "home", tmp_path / "stranger", free_port(23700)
    home.mkdir()
    stranger.mkdir()
    kept = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW_")}

    def start() -> str:
        command = [sys.executable, "-m", "raypar.track.server", "--port", str(port)]
        environment = {**kept, "HOME": str(home)}
        return subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True, timeout=150
        ).stdout

    pid_file = home / "mlflow" / "pid"
    try:
        assert start().startswith(f"MLflow answers at http://127.0.0.1:{port}; ")
        pid = int(pid_file.read_text())
        assert start().startswith(f"MLflow runs already at http://127.0.0.1:{port}; ")
        assert int(pid_file.read_text()) == pid

        credentials = configparser.ConfigParser()
        credentials.read(home / ".mlflow" / "credentials")
        user, password = credentials["mlflow"].values()
        assert status(port) == 401
        assert status(port, login=f"{user}:{password[:-1]}") == 401
        assert status(port, login=f"{user}:{password}") == 200
        assert status(port, login=f"{user}:{password}", host="10.evil.example") == 403
        for folder in (home / "mlflow", home / ".mlflow"):
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        started = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        assert password not in str([process.cmdline() for process in started])
        sockets = [c.laddr.ip for p in started for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN]
        assert set(sockets) == {"127.0.0.1"}

        cli = Cli(tmp_path)
        address = ("--tracking-uri", f"http://127.0.0.1:{port}")
        bare = {f"MLFLOW_TRACKING_{name}": "" for name in ("USERNAME", "PASSWORD")}
        refused = cli.run("list", *address, HOME=str(stranger), **bare)
        assert refused.returncode != 0 and "asks for a user and a password" in refused.stderr
        assert cli.run("list", *address, HOME=str(home), **bare).returncode == 0

        os.kill(pid, signal.SIGTERM)  # as `kill $(cat ~/mlflow/pid)` does
        until(lambda: not any(is_running(process.pid) for process in started), "the server's end")
    finally:
        if pid_file.exists():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int(pid_file.read_text()), signal.SIGKILL)
