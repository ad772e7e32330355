"""Helpers that run studies in this process, the command line in a folder, and a Ray cluster's head."""

import contextlib
import os
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from mlflow import MlflowClient
from recording import runs

from raypar.run.runner import Event, TrialEnded
from raypar.track.server import free_port
from raypar.track.store import Store, default_tracking_uri
from raypar.train.job import ARTIFACT_FOLDER, MODEL_FOLDER, RunSettings
from raypar.train.saved_model import WEIGHTS_FILE

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
PRELOAD = ("ray.train.torch", "torchvision")
MARK = "RAYPAR_TEST_MARK"
TIMEOUT_S = 200
RAY_AUTH = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")  # of the tests' own Ray
UNSET = ("MLFLOW_TRACKING_URI", "RAYPAR_DATA_DIR", "RAY_ADDRESS", *RAY_AUTH)


def digits_study(space, question="Does it train?", **fields):
    """Return a study file of `digits`; `space`: its source text, `fields`: other arguments of `Study`."""
    arguments = ", ".join(f"{key}={value!r}" for key, value in {"num_repeats": 1, **fields}.items())
    imports = "from raypar import Study, grid\nfrom raypar.workloads import digits\n"
    return f'"""{question}"""\n{imports}study = Study(workload=digits, space={space}, {arguments})\n'


@dataclass
class RunEvents:
    """Events of a run, in order."""

    events: list[Event] = field(default_factory=list)

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def results(self):
        return [event.result for event in self.of(TrialEnded)]

    def result(self, spec):
        """Return the result of a trial that ended once."""
        (result,) = [result for result in self.results if result.spec == spec]
        return result

    def about(self, spec):
        return [event for event in self.events if getattr(getattr(event, "result", event), "spec", None) == spec]


def settings_at(folder, **changes):
    """Return settings with logs below the folder, for ranks that import the loops of these tests."""
    return RunSettings(**{"log_dir": folder / "logs", "sys_path": (str(HERE),), "preload": PRELOAD, **changes})


def run(runner, study, specs, more=None):
    run_events = RunEvents()
    runner.run(study, specs, run_events.events.append, more)
    return run_events


def losses(result):
    """Return the losses of every report, exact to the last bit."""
    return [float(report[key]).hex() for report in result.reports for key in ("train_loss", "val_loss")]


def weights_path(folder, spec):
    """Return the file of a trial's weights, by the settings of `settings_at`."""
    return folder / "logs" / spec.identity / ARTIFACT_FOLDER / MODEL_FOLDER / WEIGHTS_FILE


def until(condition, what, limit_s=60.0):
    """Wait for a condition."""
    give_up_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < give_up_s, f"timed out waiting for {what if isinstance(what, str) else what()}"
        time.sleep(0.05)


def environment(**changes):
    """Return this process's environment without the variables of the tests."""
    return {**{key: value for key, value in os.environ.items() if key not in UNSET}, **changes}


@dataclass(frozen=True)
class Cli:
    """`raypar` as a user runs it in a folder, with its output in a pipe."""

    folder: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def run(self, *arguments, **changes):
        """Run a command to its end, with changes to its environment."""
        # Only the test itself is limited.
        return subprocess.run([BIN / "raypar", *arguments], capture_output=True, **self.how(**changes))

    def done(self, *arguments, **changes):
        """Run a command that must succeed without output on standard error; return its output."""
        done = self.run(*arguments, **changes)
        assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
        return done.stdout

    def start(self, *arguments, program=BIN / "raypar"):
        """Start a command in a new session, with its output in the files ``stdout`` and ``stderr``."""
        with (self.folder / "stdout").open("w") as stdout, (self.folder / "stderr").open("w") as stderr:
            how = {**self.how(), "stdout": stdout, "stderr": stderr, "start_new_session": True}
            return subprocess.Popen([program, *arguments], **how)

    def how(self, **changes):
        env = environment(**{MARK: self.mark, "COLUMNS": "120"}, **changes)
        return {"cwd": self.folder, "env": env, "stdin": subprocess.DEVNULL, "text": True}

    def output(self):
        """Return both outputs of the command that was started."""
        return (self.folder / "stdout").read_text() + (self.folder / "stderr").read_text()

    def wait(self, process, condition, limit_s=TIMEOUT_S):
        """Wait for a condition while a command runs."""
        until(lambda: condition() or process.poll() is not None, self.output, limit_s)
        assert process.poll() is None, self.output()

    def wait_for_its_processes(self):
        until(lambda: not self.processes(), lambda: f"the end of {self.processes()}", 30)

    def processes(self):
        """Return the command line of every process started from here, whatever its parent is now."""
        started = [p for p in psutil.process_iter(["environ"]) if (p.info["environ"] or {}).get(MARK) == self.mark]
        return {process.pid: command_line(process) for process in started}

    def write(self, name, text):
        (self.folder / name).write_text(text)


def command_line(process):
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def results_of(folder, study="faulty", uri=""):
    """Return the stored results of a study that varies lr, by lr."""
    results = Store(uri or default_tracking_uri(folder), folder).results(study)
    by_lr = {str(result.spec.config["lr"]): result for result in results}
    assert len(by_lr) == len(results)
    return by_lr


def finished(folder, study="faulty", uri=""):
    return sorted(lr for lr, result in results_of(folder, study, uri).items() if result.is_complete)


def client_of(folder):
    return MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")


def runs_of(folder, study, kind):
    """Return a study's runs of a kind, such as "trial", read through MLflow."""
    return runs(f"sqlite:///{folder / 'mlflow.db'}", study, kind)


def report_in(output):
    """Return the report in an output: the lines from its title on, without hints after it."""
    lines = output.splitlines()
    first = next(i for i, line in enumerate(lines) if " points, " in line or " point, " in line)
    return "\n".join(line for line in lines[first:] if not line.startswith(("`raypar ui`", "interrupted;")))


@contextlib.contextmanager
def ray_head(folder, *flags, **changes):
    """Start a cluster of one node, without a token by default; yield its address and its first process."""
    log, port = folder / "ray.log", free_port(24_100)
    command = [BIN / "ray", "start", "--head", "--block", "--node-ip-address=127.0.0.1"]
    command += [f"--port={port}", "--num-cpus=2", "--disable-usage-stats", "--object-store-memory=100000000", *flags]
    with log.open("wb") as out:
        env = environment(PATH=f"{BIN}:{os.environ['PATH']}", **{"RAY_AUTH_MODE": "disabled", **changes})
        head = psutil.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
    processes = [head]
    try:
        until(lambda: b"Ray runtime started" in log.read_bytes() or head.poll() is not None, log.read_text, 120)
        assert head.poll() is None, log.read_text()
        processes += head.children(recursive=True)
        yield f"127.0.0.1:{port}", head
    finally:
        with contextlib.suppress(psutil.Error):
            processes += head.children(recursive=True)
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        head.wait()


def listening(first):
    """Return the address of every socket on which a process or a descendant listens, and the process's name."""
    sockets = {}
    for process in (first, *first.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    address = connection.laddr.ip.removeprefix("::ffff:")
                    sockets[f"{address}:{connection.laddr.port}"] = process.name()
    return sockets
