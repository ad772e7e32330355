"""Studies that are submitted from outside to a cluster that asks for a token: they need nobody to look on."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from commands import UNSET, Cli, runs_of
from telling import until

from raypar.track.server import free_port

pytest.importorskip("aiohttp", reason="a dashboard needs raypar[client]")
BIN = Path(sys.executable).parent
TOKEN = "a-token-of-the-cluster-and-of-nobody-else"
STUDY = """
from dataclasses import replace
from pathlib import Path

from helpers import RATES
from raypar import Study, grid
from raypar.workloads import digits

epochs = int((Path(__file__).parent / "settings" / "epochs.txt").read_text())


def data(config):
    import time
    from pathlib import Path

    try:
        (Path.home() / "first").mkdir()
    except FileExistsError:
        (Path.home() / "second").touch()
        while not (Path.home() / "release").exists():
            time.sleep(0.1)
    return digits.data(config)


study = Study(
    workload=replace(digits, name="held", data=data),
    space={"lr": grid(*RATES)},
    num_repeats=1,
    config={"epochs": epochs},
)
"""


# Of one that has looked for jobs just before another client submitted one.
LATE = """
import sys
from pathlib import Path

from raypar.run.jobs import RunsAlready, connected

with connected(sys.argv[1], print) as jobs:
    jobs._client.list_jobs = lambda: []
    try:
        print(jobs.submit("rates", Path.cwd() / "settings", "true", {}))
    except RunsAlready as error:
        print("refused:", error)
"""


@dataclass(frozen=True)
class Head:
    """Of a cluster with a dashboard, whose user has a home of its own."""

    url: str
    home: Path
    process: psutil.Process

    def drivers(self) -> list[str]:
        """The command lines of the studies that run, and of what they have forked."""
        found = []
        for child in self.process.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                found.append(" ".join(child.cmdline()))
        return [line for line in found if "raypar" in line and "JobSupervisor" not in line]


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    home = tmp_path_factory.mktemp("home")
    folder = Path(tempfile.mkdtemp(prefix="r"))  # a short path: sockets lie in it
    ports = {name: free_port(first) for name, first in PORTS.items()}
    kept = {key: value for key, value in os.environ.items() if key not in UNSET}
    path = f"{BIN}:{os.environ['PATH']}"
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                *(BIN / "ray", "start", "--head", "--block", "--node-ip-address=127.0.0.1", "--num-cpus=2"),
                *(f"--{name}={port}" for name, port in ports.items()),
                *("--include-dashboard=true", "--dashboard-host=127.0.0.1", f"--temp-dir={folder}"),
                *("--disable-usage-stats", "--object-store-memory=100000000"),
            ],
            env={**kept, "HOME": str(home), "PATH": path, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    own = psutil.Process(process.pid)
    url = f"http://127.0.0.1:{ports['dashboard-port']}"
    try:
        until(
            lambda: b"Ray runtime started" in (home / "log").read_bytes() or process.poll() is not None,
            lambda: (home / "log").read_text(),
            120,
        )
        assert process.poll() is None, (home / "log").read_text()
        until(lambda: answers(url), lambda: "the dashboard", 60)
        yield Head(url, home, own)
    finally:
        for each in [*own.children(recursive=True), own]:
            with contextlib.suppress(psutil.Error):
                each.kill()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


PORTS = {
    "port": 24100,
    "ray-client-server-port": 24200,
    "dashboard-port": 24300,
    "dashboard-agent-listen-port": 24400,
}


def answers(url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/api/version", timeout=5).close()
    except urllib.error.HTTPError as error:
        return error.code == 401
    except OSError:
        return False
    return True


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    token = tmp_path / "home" / ".ray" / "auth_token"
    token.parent.mkdir(parents=True)
    token.write_text(TOKEN)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "mine").mkdir()
    return Cli(tmp_path / "mine")


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_a_submitted_study_needs_nobody_to_look_on_until_it_is_stopped_and_goes_on_when_submitted_again(
    head: Head, client: Cli
) -> None:
    client.write("rates.py", STUDY)
    client.write("helpers.py", "RATES = (0.1, 0.2)\n")
    (client.folder / "settings").mkdir()
    client.write("settings/epochs.txt", "1")
    submit = ("study", "rates.py", "--address", head.url, "--set", "batch_size=64")
    store = head.home / "raypar-studies" / "rates"
    stdout, stderr = client.folder / "stdout", client.folder / "stderr"

    def said() -> str:
        return stdout.read_text() + stderr.read_text()

    # The client is killed; the first trial ends, the second one starts.
    process = client.start(*submit)
    until(lambda: "is submitted with" in said() or process.poll() is not None, said, 60)
    process.kill()
    process.wait()
    client.wait_for_its_processes()
    until(lambda: (head.home / "second").exists(), said, 120)

    # Another one looks on, from the beginning, and is told how to come back.
    process = client.start("attach", "rates", "--address", head.url)
    until(lambda: "1/2" in said() or process.poll() is not None, said, 60)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130, said()
    assert f"`raypar attach rates --address {head.url}` shows it again" in said() and "Traceback" not in said()
    refused = client.run(*submit)
    assert refused.returncode == 2
    assert f"runs on this cluster already\n  → `raypar attach rates --address {head.url}`" in refused.stderr
    late = [sys.executable, "-c", LATE, head.url]
    own = {key: value for key, value in os.environ.items() if key not in UNSET}
    refused = subprocess.run(late, cwd=client.folder, env=own, capture_output=True, text=True, check=True, timeout=120)
    assert "refused: study `rates` runs on this cluster already" in refused.stdout
    refused = client.run("attach", "rate", "--address", head.url)
    assert refused.returncode == 2 and "did you mean 'rates'?" in refused.stderr
    refused = client.run("stop", "rates", "--address", head.url, HOME="/nowhere")
    assert refused.returncode == 2 and "asks for a token, and you have given none" in refused.stderr
    assert head.drivers() and not any(TOKEN in line for line in head.drivers())

    stopped = client.run("stop", "rates", "--address", head.url)
    assert (stopped.returncode, "study rates was stopped" in stopped.stderr) == (0, True), stopped.stderr
    assert "Partial: interrupted when 1 of 2 trials were done." in stopped.stdout
    assert f"`raypar {' '.join(submit)}` runs the rest" in stopped.stdout.replace("\n", " ")
    until(lambda: not head.drivers(), lambda: f"the end of {head.drivers()}", 60)
    assert [run.info.status for run in runs_of(store, "rates", "trial")].count("FINISHED") == 1

    # Only what is missing is run, and the client ends as the study does.
    (head.home / "release").touch()
    done = client.run(*submit)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 2 trials are in the store already" in done.stdout and "2 points, 2 trials" in done.stdout
    assert "job_manager" not in done.stdout + done.stderr and "Traceback" not in done.stdout + done.stderr
    finished = [run for run in runs_of(store, "rates", "trial") if run.info.status == "FINISHED"]
    assert sorted((run.data.params["lr"], run.data.params["epochs"]) for run in finished) == [
        ("0.1", "1"),
        ("0.2", "1"),
    ]
    assert TOKEN not in done.stdout + done.stderr
    # The client has neither a store nor anything else of it.
    assert {path.name for path in client.folder.iterdir()} == {
        *("rates.py", "helpers.py", "settings", "stdout", "stderr"),
    }
