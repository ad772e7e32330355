"""What listens does so on this machine only, wants a token, and no secret gets out."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
from commands import Cli, runs_of
from telling import until

from raypar.track.server import free_port, start_server
from raypar.track.store import default_tracking_uri

RAY = Path(sys.executable).with_name("ray")
RAY_AUTH = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
TOKEN = "a-token-of-the-cluster-and-of-nobody-else"
GOOD = """
from raypar import Study, grid
from raypar.workloads import digits

study = Study(workload=digits, space={"lr": grid(0.1, 0.2)}, num_repeats=1, config={"epochs": 1})
"""


def listening(pids: list[int]) -> dict[str, str]:
    """Address of every listening socket of the processes: whose it is."""
    found = {}
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    found[f"{connection.laddr.ip}:{connection.laddr.port}"] = process.name()
    return found


# ---- Ray's doors


@pytest.mark.ray
def test_all_of_a_private_ray_listens_on_this_machine_only_and_has_the_path_of_its_token(fork_address: str) -> None:
    import ray

    @ray.remote(num_cpus=0)
    def environment() -> dict[str, str]:
        return dict(os.environ)

    seen = ray.get(environment.remote())
    children = psutil.Process().children(recursive=True)
    sockets = listening([os.getpid(), *(child.pid for child in children)])
    assert {"gcs_server", "raylet"} <= set(sockets.values())
    loopback = [at for at in sockets if at.removeprefix("::ffff:").startswith("127.0.0.1:")]
    assert sorted(loopback) == sorted(sockets)
    path = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
    token = path.read_text()
    assert len(token) == 64 and path.stat().st_mode & 0o077 == 0 == path.parent.stat().st_mode & 0o077
    assert {name: seen.get(name) for name in RAY_AUTH} == {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": None,
        "RAY_AUTH_TOKEN_PATH": str(path),
    }
    assert token not in {*seen.values(), *os.environ.values()}
    assert not [child for child in children if token in " ".join(cmdline(child.pid))]


def cmdline(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a cluster that asks for a token."""
    folder = tmp_path_factory.mktemp("head")
    port = free_port(23100)
    kept = {key: value for key, value in os.environ.items() if key not in (*RAY_AUTH, "RAY_ADDRESS")}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                *(RAY, "start", "--head", "--block", "--node-ip-address=127.0.0.1", "--num-cpus=1"),
                *(f"--port={port}", f"--ray-client-server-port={free_port(23200)}", "--include-dashboard=false"),
                *("--disable-usage-stats", "--object-store-memory=100000000"),
            ],
            env={**kept, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    children: list[psutil.Process] = []
    try:
        until(
            lambda: b"Ray runtime started" in (folder / "log").read_bytes() or process.poll() is not None,
            lambda: (folder / "log").read_text(),
            120,
        )
        assert process.poll() is None, (folder / "log").read_text()
        children = psutil.Process(process.pid).children(recursive=True)
        yield f"127.0.0.1:{port}"
    finally:
        for own in [*children, psutil.Process(process.pid)]:
            with contextlib.suppress(psutil.Error):
                own.kill()
        process.wait()


REFUSED = (
    ({}, ("asks for a token, and you have given none", "RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token")),
    ({"RAY_AUTH_TOKEN": "wrong-" * 4}, ("doesn't take the token from RAY_AUTH_TOKEN", "ray get-auth-token")),
    ({"RAY_AUTH_MODE": "token"}, ("RAY_AUTH_MODE=token asks for a token, and there is none",)),
    ({"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": TOKEN}, ("leave RAY_AUTH_MODE=disabled out",)),
)


@pytest.mark.ray
def test_who_has_not_the_clusters_token_is_told_so_and_who_has_it_gets_in(
    head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in RAY_AUTH:
        monkeypatch.delenv(name, raising=False)
    cli = Cli(tmp_path)
    cli.write("good.py", GOOD)
    home = {"HOME": str(tmp_path / "home")}
    for environment, told in REFUSED:
        done = cli.run("study", "good.py", "--address", head, **home, **environment)
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert f"error: --address {head}" in done.stderr and "Traceback" not in done.stderr
        for part in told:
            assert part in done.stderr
        assert TOKEN not in done.stderr and "wrong-wrong" not in done.stderr
    assert not (tmp_path / "mlflow.db").exists()
    path = tmp_path / "home" / ".ray" / "auth_token"
    path.parent.mkdir(parents=True)
    path.write_text(TOKEN)
    done = cli.run("plan", "good.py", "--address", head, **home)
    assert done.returncode == 0, done.stderr
    assert "2 trials" in done.stdout and TOKEN not in done.stdout + done.stderr


# ---- MLflow's door


def status(url: str, host: str) -> int:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=30)
    try:
        connection.request("GET", "/ajax-api/2.0/mlflow/experiments/search?max_results=1", headers={"Host": host})
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.mlflow
def test_mlflows_page_answers_to_this_machines_names_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_SERVER_DISABLE_SECURITY_MIDDLEWARE", "true")
    monkeypatch.delenv("MLFLOW_SERVER_ALLOWED_HOSTS", raising=False)
    with start_server(default_tracking_uri(tmp_path), tmp_path, port=23300) as server:
        port = urlsplit(server.url).port
        for host in (f"127.0.0.1:{port}", "localhost:8080", "localhost"):
            assert status(server.url, host) == 200, host
        for host in ("10.evil.example", f"10.evil.example:{port}", "192.168.evil.example", "evil.example"):
            assert status(server.url, host) == 403, host
        group = [p.pid for p in psutil.Process(server.pid).children(recursive=True)]
        sockets = listening([server.pid, *group])
        assert f"127.0.0.1:{port}" in sockets
        assert all(at.startswith("127.0.0.1:") for at in sockets)


@pytest.mark.mlflow
def test_a_page_for_others_is_announced_with_what_it_exposes(tmp_path: Path) -> None:
    cli = Cli(tmp_path)
    process = cli.start("ui", "--host", "0.0.0.0", "--port", "23400")
    try:
        until(
            lambda: "workflowType" in (tmp_path / "stdout").read_text() or process.poll() is not None,
            lambda: (tmp_path / "stderr").read_text(),
            120,
        )
        url = (tmp_path / "stdout").read_text().strip()
        told = (tmp_path / "stderr").read_text()
        port = urlsplit(url).port
        assert told.startswith("warning: --host 0.0.0.0: ") and f"port {port}" in told and "without a password" in told
        assert status(url, f"{socket.gethostname()}:{port}") == 200
        assert status(url, "10.evil.example") == 403
    finally:
        process.terminate()
        process.wait(30)
    cli.wait_for_its_processes()


# ---- secrets

SECRET = "hf_planted0123456789"
PASSWORD = "p1anted-passw0rd"
LEAKY = """
import os

from raypar import Study, Workload, grid


def model(config):
    from torch import nn

    return nn.Linear(4, 2)


def data(config):
    import torch

    from raypar import Data, Split

    assert os.environ["HF_TOKEN"].startswith("hf_planted"), "a trial's code has what its user has"
    if config["leaks"]:
        raise ValueError(f"401 for {os.environ['HF_TOKEN']} at {os.environ['DATA_URL']}")
    inputs = torch.randn(64, 4)
    split = Split(inputs, (inputs.sum(1) > 0).long())
    return Data(train=split, val=split)


workload = Workload(name="leaky", model=model, data=data, options={"leaks": False})
study = Study(workload=workload, space={"leaks": grid(False, True)}, num_repeats=1, config={"epochs": 1})
"""


class Watch:
    """Looks at the command lines of all processes, over and over, for what must not be seen."""

    def __init__(self, *secrets: str) -> None:
        self._secrets = secrets
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.seen: list[str] = []
        self.num_looks = 0

    def _look(self) -> None:
        while not self._is_over.wait(0.02):  # some time for what is looked at
            for entry in Path("/proc").glob("[0-9]*"):
                text = " ".join(cmdline(int(entry.name)))
                self.seen += [text for secret in self._secrets if secret in text]
            self.num_looks += 1

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()


def files_with(folder: Path, *secrets: str) -> list[str]:
    found = []
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # sockets
            if path.is_file() and any(secret.encode() in path.read_bytes() for secret in secrets):
                found.append(str(path))
    return found


@pytest.mark.ray
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(
    "way",
    [
        pytest.param(("--isolation", "warm"), id="warm"),
        pytest.param(("--isolation", "fresh"), id="fresh"),
        pytest.param(("--no-ray",), id="no-ray"),
    ],
)
def test_a_secret_of_the_environment_stays_there(
    way: tuple[str, ...], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cli = Cli(tmp_path)
    cli.write("leaky.py", LEAKY)
    # A short path: sockets lie in it.
    ray_folder = Path(tmp_path_factory.mktemp("r", numbered=True))
    environment = {"HF_TOKEN": SECRET, "DATA_URL": f"http://me:{PASSWORD}@nowhere:1/data"}
    if len(str(ray_folder)) < 36:
        environment["RAY_TMPDIR"] = str(ray_folder)
    with Watch(SECRET, PASSWORD) as watch:
        done = cli.run("study", "leaky.py", *way, **environment)
    assert done.returncode == 1, done.stderr
    said = done.stdout + done.stderr
    assert re.search(r"401 for \*\*\* at http://me:\*\*\*@nowhere:1/data", said.replace("\n", " ")), said
    assert SECRET not in said and PASSWORD not in said
    states = sorted(run.data.tags["raypar.state"] for run in runs_of(tmp_path, "leaky", "trial"))
    assert states == ["failed", "finished"]  # the one that finished had its token
    assert watch.num_looks and watch.seen == []
    assert files_with(tmp_path, SECRET, PASSWORD) == []
    assert files_with(ray_folder, SECRET, PASSWORD) == []
    report = cli.run("report", "leaky", "--html", "report.html")
    shown = cli.run("show", "leaky")
    assert report.returncode == shown.returncode == 0, report.stderr + shown.stderr
    assert files_with(tmp_path, SECRET, PASSWORD) == []
    assert not re.search(f"{SECRET}|{PASSWORD}", report.stdout + shown.stdout)
    cli.wait_for_its_processes()
