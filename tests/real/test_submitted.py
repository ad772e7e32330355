"""Studies submitted to a cluster that requires a token run without their client."""

import re
import shutil
import signal
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import requests
from harness import Cli, command_line, ray_head, runs_of, until

from raypar.track.server import free_port

pytest.importorskip("aiohttp", reason="a dashboard needs raypar[client]")
RAYPAR = re.compile(r"\braypar[ .]")  # the program or a module of it, not a folder of that name
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

SCRIPT = """
from argparse import ArgumentParser

parser = ArgumentParser()
parser.add_argument("--x", type=int, default=1)
print("accuracy:", parser.parse_args().x / 10)
"""


@dataclass(frozen=True)
class Head:
    """Head of a cluster with a dashboard, whose user has a separate home."""

    url: str
    home: Path
    process: psutil.Process

    def drivers(self):
        """Return the command lines of the running studies and of their forks."""
        lines = map(command_line, self.process.children(recursive=True))
        return [line for line in lines if RAYPAR.search(line) and "JobSupervisor" not in line]


@pytest.fixture
def head(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    folder = Path(tempfile.mkdtemp(prefix="r"))  # a short path, for sockets
    port, agent = free_port(24300), free_port(24400)
    flags = ("--dashboard-host=127.0.0.1", f"--dashboard-port={port}", f"--dashboard-agent-listen-port={agent}")
    variables = {"HOME": str(home), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    url = f"http://127.0.0.1:{port}"

    def answers():
        try:
            return requests.get(f"{url}/api/version", timeout=5).status_code in (200, 401)
        except requests.RequestException:
            return False

    try:
        with ray_head(home, "--include-dashboard=true", f"--temp-dir={folder}", *flags, **variables) as (_, process):
            until(answers, "the dashboard")
            yield Head(url, home, process)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def client(tmp_path, monkeypatch):
    token = tmp_path / "home" / ".ray" / "auth_token"
    token.parent.mkdir(parents=True)
    token.write_text(TOKEN)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "mine").mkdir()
    return Cli(tmp_path / "mine")


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_a_submitted_study_runs_without_its_client_and_resumes_after_a_stop(head, client):
    client.write("rates.py", STUDY)
    client.write("helpers.py", "RATES = (0.1, 0.2)\n")
    (client.folder / "settings").mkdir()
    client.write("settings/epochs.txt", "1")
    submit = ("study", "rates.py", "--address", head.url, "--set", "batch_size=64")
    store = head.home / "raypar-studies" / "rates"

    # The client is killed; the first trial ends, the second one starts.
    with client.start(*submit) as process:
        until(lambda: "submitted study" in client.output() or process.poll() is not None, client.output, 60)
        process.kill()
    client.wait_for_its_processes()
    until((head.home / "second").exists, client.output, 120)

    # Another client follows it from the beginning, and detaches with a hint.
    with client.start("cluster", "attach", "rates", "--address", head.url) as process:
        client.wait(process, lambda: "1/2" in client.output())
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130, client.output()
    assert f"`raypar cluster attach rates --address {head.url}` follows it" in client.output()
    assert "detached: the study continues" in client.output()
    assert "Traceback" not in client.output()
    refused = client.run(*submit)
    assert refused.returncode == 2
    assert (
        f"is already running on this cluster\n  → `raypar cluster attach rates --address {head.url}`" in refused.stderr
    )
    refused = client.run("cluster", "attach", "rate", "--address", head.url)
    assert refused.returncode == 2 and "did you mean 'rates'?" in refused.stderr
    refused = client.run("cluster", "stop", "rates", "--address", head.url, HOME="/nowhere")
    assert refused.returncode == 2 and "requires a token, and none was found" in refused.stderr
    assert head.drivers() and not any(TOKEN in line for line in head.drivers())

    stopped = client.run("cluster", "stop", "rates", "--address", head.url)
    assert (stopped.returncode, "study rates was stopped" in stopped.stderr) == (0, True), stopped.stderr
    assert "Partial: interrupted when 1 of 2 trials were done." in stopped.stdout
    assert f"run `raypar {' '.join(submit)}` to continue" in stopped.stdout.replace("\n", " ")
    until(lambda: not head.drivers(), lambda: f"the end of {head.drivers()}", 60)
    assert [run.info.status for run in runs_of(store, "rates", "trial")].count("FINISHED") == 1

    # Only missing trials run, and the client has the study's exit code.
    (head.home / "release").touch()
    done = client.run(*submit)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert "1 of 2 trials are in the store already" in done.stdout and "2 points, 2 trials" in done.stdout
    assert not [word for word in ("job_manager", "Traceback", TOKEN) if word in output]
    finished = [run for run in runs_of(store, "rates", "trial") if run.info.status == "FINISHED"]
    assert sorted((run.data.params["lr"], run.data.params["epochs"]) for run in finished) == [
        ("0.1", "1"),
        ("0.2", "1"),
    ]
    # The study of a script goes there with it.
    client.write("script.py", SCRIPT)
    of_script = client.run("study", "script.py", "--address", head.url, "--grid", "x=1,2", "--repeats", "1")
    assert of_script.returncode == 0 and "2 points, 2 trials" in of_script.stdout, of_script.stdout + of_script.stderr

    # The client's folder has no store and no other new files.
    files = {"rates.py", "helpers.py", "settings", "stdout", "stderr", "script.py", ".script_study.py"}
    assert {path.name for path in client.folder.iterdir()} - {"__pycache__"} == files
