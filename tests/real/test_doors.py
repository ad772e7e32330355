"""Every listening socket is local and requires a token or a password, and no secret leaks."""

import configparser
import contextlib
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import psutil
import pytest
import requests
from harness import RAY_AUTH, Cli, command_line, digits_study, environment, listening, ray_head, runs_of, until

from raypar.signals import is_running
from raypar.track.server import free_port, start_server
from raypar.track.store import default_tracking_uri

TOKEN = "a-token-of-the-cluster-and-of-nobody-else"
GOOD = digits_study('{"lr": grid(0.1, 0.2)}', config={"epochs": 1})


def status(url, host="localhost", login=None):
    """Return the status of MLflow's answer to a request for a host name."""
    page = f"{url}/ajax-api/2.0/mlflow/experiments/search?max_results=1"
    with requests.Session() as session:
        session.trust_env = False
        return session.get(page, headers={"Host": host}, auth=login, timeout=30).status_code


@pytest.mark.ray
def test_a_private_ray_listens_locally_and_gets_the_path_of_its_token(fork_address):
    import ray

    @ray.remote(num_cpus=0)
    def variables():
        return dict(os.environ)

    seen = ray.get(variables.remote())
    sockets = listening(psutil.Process())
    assert {"gcs_server", "raylet"} <= set(sockets.values())
    assert [at for at in sockets if not at.startswith("127.0.0.1:")] == []
    path = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
    token = path.read_text()
    assert len(token) == 64 and path.stat().st_mode & 0o077 == 0 == path.parent.stat().st_mode & 0o077
    assert [seen.get(name) for name in RAY_AUTH] == ["token", None, str(path)]
    assert token not in {*seen.values(), *os.environ.values()}
    assert not [p for p in psutil.Process().children(recursive=True) if token in command_line(p)]


REFUSED = (
    ({}, ("requires a token, and none was found", "RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token")),
    ({"RAY_AUTH_TOKEN": "wrong-" * 4}, ("rejects the token from RAY_AUTH_TOKEN", "ray get-auth-token")),
    ({"RAY_AUTH_MODE": "token"}, ("RAY_AUTH_MODE=token needs a token, and there is none",)),
    ({"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": TOKEN}, ("unset RAY_AUTH_MODE=disabled",)),
)


@pytest.mark.ray
def test_a_cluster_admits_only_those_with_its_token(cli, tmp_path):
    home = tmp_path / "home"
    cli.write("good.py", GOOD)
    with ray_head(tmp_path, "--include-dashboard=false", RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=TOKEN) as (address, _):
        for variables, words in REFUSED:
            done = cli.run("study", "good.py", "--address", address, HOME=str(home), **variables)
            assert (done.returncode, done.stdout) == (2, ""), done.stderr
            assert f"error: --address {address}" in done.stderr and "Traceback" not in done.stderr
            assert all(part in done.stderr for part in words), done.stderr
            assert TOKEN not in done.stderr and "wrong-wrong" not in done.stderr
        assert not (tmp_path / "mlflow.db").exists()
        (home / ".ray").mkdir(parents=True)
        (home / ".ray" / "auth_token").write_text(TOKEN)
        done = cli.run("plan", "good.py", "--address", address, HOME=str(home))
        assert done.returncode == 0, done.stderr
        assert "2 trials" in done.stdout and TOKEN not in done.stdout + done.stderr


@pytest.mark.mlflow
def test_mlflows_page_accepts_only_host_names_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_SERVER_DISABLE_SECURITY_MIDDLEWARE", "true")
    monkeypatch.delenv("MLFLOW_SERVER_ALLOWED_HOSTS", raising=False)
    with start_server(default_tracking_uri(tmp_path), tmp_path, port=23300) as server:
        port = urlsplit(server.url).port
        for host in (f"127.0.0.1:{port}", "localhost:8080", "localhost"):
            assert status(server.url, host) == 200, host
        for host in (f"10.evil.example:{port}", "192.168.evil.example", "evil.example"):
            assert status(server.url, host) == 403, host
        sockets = listening(psutil.Process(server.pid))
        assert f"127.0.0.1:{port}" in sockets and all(at.startswith("127.0.0.1:") for at in sockets)


@pytest.mark.mlflow
def test_a_page_admits_its_link_and_its_users_commands_and_warns_of_a_network(cli, tmp_path):
    with cli.start("ui", "--host", "0.0.0.0", "--port", "23400") as process, contextlib.ExitStack() as stack:
        stack.callback(process.terminate)
        cli.wait(process, lambda: "works once" in cli.output())
        link, warning = ((tmp_path / name).read_text().splitlines()[0] for name in ("stdout", "stderr"))
        server, port = link.partition("/?")[0], urlsplit(link).port
        assert warning.startswith("warning: --host 0.0.0.0: ") and "not encrypted" in warning
        page = f"{server}/ajax-api/2.0/mlflow/experiments/search?max_results=1"
        session, other = (stack.enter_context(requests.Session()) for _ in range(2))
        for each in (session, other):
            each.trust_env = False  # no proxy, no password of a .netrc
            each.headers["Host"] = f"{socket.gethostname()}:{port}"
            assert each.get(page).status_code == 401
            assert each.get(link).status_code == 200
        assert (session.get(page).status_code, other.get(page).status_code) == (200, 401)
        assert session.get(page, headers={"Host": "10.evil.example"}).status_code == 401
        (key,) = [cookie.value for cookie in session.cookies]
        started = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        lines = str(list(map(command_line, started)))
        assert key not in lines and parse_qs(urlsplit(link).query)["token"][0] not in lines

        assert cli.run("list", "--tracking-uri", server).returncode == 0
        stranger = cli.run("list", "--tracking-uri", server, HOME=str(tmp_path), XDG_CACHE_HOME=str(tmp_path))
        assert stranger.returncode == 2 and "asks for a user and a password" in stranger.stderr
    assert process.returncode == 0
    cli.wait_for_its_processes()


@pytest.mark.mlflow
def test_the_shared_server_keeps_running_and_asks_for_a_private_password(tmp_path):
    home, port = tmp_path / "home", free_port(23700)
    home.mkdir()
    url, pid_file = f"http://127.0.0.1:{port}", home / "mlflow" / "pid"

    def start():
        env = {key: value for key, value in environment(HOME=str(home)).items() if not key.startswith("MLFLOW_")}
        command = [sys.executable, "-m", "raypar.track.server", "--port", str(port)]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=150).stdout

    try:
        assert start().startswith(f"MLflow runs at {url}; ")
        pid = int(pid_file.read_text())
        assert start().startswith(f"MLflow already runs at {url}; ") and int(pid_file.read_text()) == pid

        credentials = configparser.ConfigParser()
        credentials.read(home / ".mlflow" / "credentials")
        user, password = credentials["mlflow"].values()
        assert status(url) == status(url, login=(user, password[:-1])) == 401
        assert status(url, login=(user, password)) == 200
        assert status(url, "10.evil.example", (user, password)) == 403
        for folder in (home / "mlflow", home / ".mlflow"):
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        started = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        assert password not in str(list(map(command_line, started)))
        assert {at.partition(":")[0] for at in listening(started[0])} == {"127.0.0.1"}

        cli, bare = Cli(tmp_path), {f"MLFLOW_TRACKING_{name}": "" for name in ("USERNAME", "PASSWORD")}
        refused = cli.run("list", "--tracking-uri", url, HOME=str(tmp_path / "stranger"), **bare)
        assert refused.returncode != 0 and "asks for a user and a password" in refused.stderr
        assert cli.run("list", "--tracking-uri", url, HOME=str(home), **bare).returncode == 0

        os.kill(pid, signal.SIGTERM)  # as `kill $(cat ~/mlflow/pid)` does
        until(lambda: not any(is_running(process.pid) for process in started), "the server's end")
    finally:
        with contextlib.suppress(OSError):
            os.killpg(int(pid_file.read_text()), signal.SIGKILL)


SECRET = "planted0123456789/abcdef"
PASSWORD = "p1anted-passw0rd"
LEAKY = """
import os
from dataclasses import replace

from raypar import Study, grid
from raypar.workloads import digits


def data(config):
    key = os.environ["AWS_SECRET_ACCESS_KEY"]
    assert key == os.environ["HF_TOKEN"] and key.startswith("planted"), "a trial's code has what its user has"
    if config["leaks"] and "MASTER_PORT" in os.environ:  # in a trial, not in the check before anything starts
        raise ValueError(f"401 for {key} at {os.environ['DATA_URL']}")
    return digits.data(config)


workload = replace(digits, name="leaky", data=data, options={**digits.options, "leaks": False})
study = Study(workload=workload, space={"leaks": grid(False, True)}, num_repeats=1, config={"epochs": 1})
"""


def files_with(folder, *secrets):
    """Return the files below the folder that contain one of the secrets; Ray may remove some meanwhile."""
    matches = []
    for path in (Path(parent, name) for parent, _, names in os.walk(folder) for name in names):
        with contextlib.suppress(OSError):  # sockets
            if path.is_file() and any(secret.encode() in path.read_bytes() for secret in secrets):
                matches.append(str(path))
    return matches


@pytest.mark.ray
@pytest.mark.parametrize("isolation", ["warm", "fresh"])
def test_secrets_in_the_environment_do_not_leak(isolation, cli, tmp_path):
    cli.write("leaky.py", LEAKY)
    address = f"http://me:{PASSWORD}@nowhere:1/data"
    is_over, leaks, sessions = threading.Event(), set(), {}

    def look(ray_folder):
        while not is_over.wait(0.02):  # leaves time for the study
            lines = map(command_line, psutil.process_iter())
            leaks.update(line for line in lines if SECRET in line or PASSWORD in line)
            leaks.update(files_with(ray_folder, SECRET, PASSWORD))
            with contextlib.suppress(OSError):
                sessions.update({path: stat.S_IMODE(path.stat().st_mode) for path in ray_folder.iterdir()})

    # A short path, for sockets.
    with tempfile.TemporaryDirectory(prefix="r") as ray_folder, ThreadPoolExecutor() as pool:
        variables = {"HF_TOKEN": SECRET, "AWS_SECRET_ACCESS_KEY": SECRET, "DATA_URL": address, "RAY_TMPDIR": ray_folder}
        looking = pool.submit(look, Path(ray_folder))
        try:
            done = cli.run("study", "leaky.py", "--isolation", isolation, **variables)
        finally:
            is_over.set()
        looking.result()
        left = list(Path(ray_folder).iterdir())
    assert done.returncode == 1, done.stderr
    output = done.stdout + done.stderr
    assert re.search(r"401 for \*\*\* at http://me:\*\*\*@nowhere:1/data", output.replace("\n", " ")), output
    states = sorted(run.data.tags["raypar.state"] for run in runs_of(tmp_path, "leaky", "trial"))
    assert states == ["failed", "finished"]  # the one that finished had its token
    assert leaks == set() and list(sessions.values()) == [0o700] and left == []
    output += cli.done("report", "leaky", "--html", "report.html") + cli.done("store", "show", "leaky")
    assert not re.search(f"{SECRET}|{PASSWORD}", output)
    assert files_with(tmp_path, SECRET, PASSWORD) == []
    cli.wait_for_its_processes()
