"""Study inside a Slurm job: Ray on the job's nodes, and the study as a child process.

The batch script of `raypar cluster slurm` becomes `main` on the first node. It starts `serve` on every node by
``srun``, whose input reaches all of them and carries the token and the head's address, so no file on the shared file
system does. Their reports come back on its output. The end of that input ends Ray on all nodes, also if this process is
killed. If the first node is lost, another ends the job, since Slurm would keep it.
Nothing has a fixed port or path, so jobs can share nodes.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from raypar import units
from raypar.errors import ClusterError
from raypar.files import open_private
from raypar.run.auth import MODE, TOKEN, TOKEN_PATH
from raypar.run.cluster import TRAIN_ENVIRONMENT
from raypar.run.jobs import SUBMITTED_AS, TALLY
from raypar.run.private_ray import DEFAULTS, RAY_SOCKET_LENGTH
from raypar.run.time_limit import ENDS_AT
from raypar.scratch import make_folder, remove_folder
from raypar.signals import OUT_OF_TIME, end_descendants

STOPPED_BY_TIME = 128 + OUT_OF_TIME  # exit code of a study that stops before `ENDS_AT`
STOPPED = 143  # exit code of a study that SIGTERM ended
START_TIMEOUT_S = 300.0
END_TIMEOUT_S = 30.0
POLL_S = 0.2
CHECK_S = 5.0  # between questions whether the first node is lost
RUNNING = "RUNNING"  # Slurm's state of a job
END = "end"  # last line for the nodes
EARLY_S = 90.0  # Slurm may send the signal a minute early
SLURM_TIMEOUT_S = 60.0
NUM_LOG_LINES = 20
STORE_SHARE = 0.3  # of the memory, as Ray's default
MIN_STORE_BYTES = 80 * 2**20  # Ray's minimum is 75 MiB
REPORT = "raypar-node "  # prefix of a node's report on its standard output
_OF_TASK = ("SLURM_", "PMI_", "PMIX_")  # a trial is no task of srun, and libraries would take it for one
_OF_JOB = ("SLURM_JOB_", "SLURM_CLUSTER_NAME")
PYTHON = (sys.executable, "-P")  # without the current folder in front of the installed modules


@dataclass(frozen=True)
class Job:
    """Slurm job that this process runs in.

    Attributes:
        file: its batch file.
        lead_s: time before its end at which it stops.
        continues: it goes back into the queue when its time is over.
    """

    file: Path
    lead_s: float
    continues: bool
    variables: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    @property
    def id(self) -> str:
        return self.variables["SLURM_JOB_ID"]

    @property
    def num_nodes(self) -> int:
        return int(self.variables["SLURM_JOB_NUM_NODES"])

    @property
    def cpus_per_node(self) -> int:
        """CPUs that the job has on each node, at least."""
        if given := self.variables.get("SLURM_CPUS_PER_TASK"):
            return int(given)
        return min(int(part.partition("(")[0]) for part in self.variables["SLURM_JOB_CPUS_PER_NODE"].split(","))

    def end(self) -> float | None:
        """Return the Unix time at which Slurm ends the job, which may change; None: never, or no answer."""
        printed = _asked("squeue", "--noheader", f"--job={self.id}", "--format=%e")
        if not printed:  # a busy controller; newer Slurms tell every job its first end
            return float(self.variables["SLURM_JOB_END_TIME"]) if "SLURM_JOB_END_TIME" in self.variables else None
        with contextlib.suppress(ValueError):
            return datetime.fromisoformat(printed).timestamp()
        return None

    def is_running(self) -> bool:
        """Return False if the job was cancelled meanwhile; a requeued job would come back to life."""
        return _asked("squeue", "--noheader", f"--job={self.id}", "--format=%T") == RUNNING

    def address(self) -> str:
        """Return the address of this node, the first, towards the others."""
        names = _hostnames(self.variables["SLURM_JOB_NODELIST"])
        return address_towards(_address_of(names[-1])) if len(names) > 1 else "127.0.0.1"


def _asked(*command: str) -> str:
    """Return what one of Slurm's commands prints, whatever format the user prefers; empty if it fails."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("SQUEUE_")}
    environment = {**kept, "SLURM_TIME_FORMAT": "standard"}
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=SLURM_TIMEOUT_S, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else ""
    return ""


def _hostnames(nodes: str) -> list[str]:
    """Return the names in Slurm's list of nodes, such as ``gpu[1-4,7]``."""
    return _asked("scontrol", "show", "hostnames", nodes).split() if nodes else []


def _address_of(node: str) -> str:
    """Return the host name or address by which Slurm reaches a node."""
    words = _asked("scontrol", "show", "node", node).split()
    return next((word.removeprefix("NodeAddr=") for word in words if word.startswith("NodeAddr=")), node)


def address_towards(host: str) -> str:
    """Return this machine's address on the way to a host, by the kernel's routes. Raises OSError."""
    kind, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(kind, socket.SOCK_DGRAM) as way:
        way.connect(address)  # sends nothing
        return str(way.getsockname()[0])


# ---- on each node


def store_bytes(variables: Mapping[str, str], num_cpus: int, num_gpus: int, machine_bytes: float, free: float) -> int:
    """Return the size of a node's object store: a share of the job's memory there, not of the node's.

    Args:
        variables: Slurm's, with the job's memory per node, CPU or GPU in MiB.
        machine_bytes: memory of the node.
        free: free bytes in /dev/shm.
    """
    memory = machine_bytes
    for name, num in (("NODE", 1), ("CPU", num_cpus), ("GPU", num_gpus)):
        given = variables.get(f"SLURM_MEM_PER_{name}", "")
        if given.isdigit() and int(given) * num:  # 0: all of the node's
            memory = min(memory, float(given) * num * 2**20)
            break
    return max(MIN_STORE_BYTES, int(min(STORE_SHARE * memory, 0.9 * free)))


def num_gpus_of(variables: Mapping[str, str]) -> int:
    """Return the number of GPUs that the job has on this node."""
    for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS"):
        if name in variables:
            return len([each for each in variables[name].split(",") if each.strip() not in ("", "-1", "NoDevFiles")])
    return 0


def ray_command(address: str, folder: Path, variables: Mapping[str, str]) -> list[str]:
    """Return the command that starts Ray on this node with the job's CPUs, GPUs and memory.

    Args:
        address: ``host:port`` of the head; without a port, this node is the head.
    """
    import psutil

    num_cpus = min(len(os.sched_getaffinity(0)), int(variables.get("SLURM_CPUS_ON_NODE") or sys.maxsize))
    num_gpus = num_gpus_of(variables)
    shared = os.statvfs("/dev/shm")
    free = float(shared.f_bavail * shared.f_frsize)
    store = store_bytes(variables, num_cpus, num_gpus, psutil.virtual_memory().total, free)
    host, _, port = address.partition(":")
    role = [f"--address={address}", f"--node-ip-address={address_towards(host)}"]
    if not port:
        role = ["--head", f"--node-ip-address={host}", "--port=0", "--include-dashboard=false"]
        if importlib.util.find_spec("grpc"):  # Ray then also serves clients, by default on port 10001
            role += [f"--ray-client-server-port={_free_port()}"]
    words = [*PYTHON, "-m", "ray.scripts.scripts", "start", *role, "--block", f"--temp-dir={folder / 'ray'}"]
    words += [f"--num-cpus={num_cpus}", f"--num-gpus={num_gpus}", f"--object-store-memory={store}"]
    words += ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0", "--disable-usage-stats"]
    return [*words, f"--labels=host={variables.get('SLURMD_NODENAME') or socket.gethostname()}"]


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


def serve(source: IO[str], reports: IO[str], variables: Mapping[str, str]) -> int:
    """Run Ray on this node until the input ends or SIGTERM arrives; return the exit code.

    Args:
        source: a line with the token, then one with the head's address; for the head, its own without a port.
        reports: for reports.
    """
    name, is_head = variables.get("SLURMD_NODENAME") or socket.gethostname(), variables.get("SLURM_NODEID") == "0"
    over, was_told, was_ended = threading.Event(), threading.Event(), threading.Event()

    def end(*_: object) -> None:
        was_ended.set()
        over.set()

    signal.signal(signal.SIGTERM, end)

    def tell(**report: object) -> None:
        with contextlib.suppress(OSError):
            print(REPORT + json.dumps({"node": name, **report}), file=reports, flush=True)

    def wait_for_the_end() -> None:
        if END in map(str.strip, source):
            was_told.set()
        over.set()

    token = source.readline().strip()
    for line in iter(source.readline, ""):
        kind, _, address = line.strip().partition(" ")
        if kind == ("first" if is_head else "head"):
            break
    else:
        return 0
    threading.Thread(target=wait_for_the_end, daemon=True).start()
    try:
        folder = private_folder(token, variables)
        try:
            code = _run_ray(ray_command(address, folder, variables), folder, over, tell, variables)
        finally:
            end_descendants()
            remove_folder(folder)
        end_without_first_node(variables["SLURM_JOB_ID"], name, was_told, was_ended)
        return code
    except OSError as error:
        tell(ended=1, log=[str(error)])
        return 1


def end_without_first_node(job_id: str, name: str, was_told: threading.Event, was_ended: threading.Event) -> None:
    """Have Slurm end a job that has lost its first node: with ``--no-kill`` it would keep the other nodes, idle.

    Args:
        name: this node's.
        was_told: the first node has said that the job ends.
        was_ended: Slurm ends this process.
    """
    while not was_told.wait(CHECK_S if not was_ended.is_set() else POLL_S):
        words = (word.partition("=") for word in _asked("scontrol", "show", "job", job_id).split())
        job = {key: value for key, _, value in words}
        if job.get("JobState", "" if was_ended.is_set() else RUNNING) != RUNNING:
            return
        nodes = _hostnames(job.get("NodeList", ""))
        if nodes and job["BatchHost"] not in nodes:
            if name == nodes[0]:
                ending = ["scontrol", "requeue"] if job["Requeue"] == "1" else ["scancel"]
                _asked(*ending, job_id)
            return


def private_folder(token: str, variables: Mapping[str, str]) -> Path:
    """Make a folder of this node that only this user can read, with the token and a folder for temporary files.

    It is in TMPDIR, unless that is in the home, which nodes share, or too long for the paths of Ray's sockets.
    """
    parent = Path(variables.get("RAY_TMPDIR") or variables.get("TMPDIR") or "/tmp")
    if parent.is_relative_to(Path.home()) or not os.access(parent, os.W_OK):
        parent = Path("/tmp")
    folder = make_folder(parent, socket=RAY_SOCKET_LENGTH)
    (folder / "tmp").mkdir()
    with os.fdopen(open_private(folder / "token", os.O_EXCL), "w") as file:
        file.write(token)
    return folder


def _run_ray(
    command: Sequence[str],
    folder: Path,
    over: threading.Event,
    tell: Callable[..., None],
    variables: Mapping[str, str],
) -> int:
    """Run Ray on this node until it is over, and report when it is up and if it ends by itself.

    If it ends before it is up, it is started once more.
    """
    import psutil

    environment = ray_environment(variables, folder)
    for may_start_again in (True, False):  # Ray gives up after 30 s, and a busy node may take longer
        with (folder / "log").open("wb") as log:
            ray = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        written, is_up = folder / "ray" / "ray_current_cluster", False  # by `ray start`, at its end
        while ray.poll() is None and not over.wait(POLL_S):
            if not is_up and written.exists() and (address := written.read_text().strip()):
                is_up = True
                tell(up=address)
        if is_up or over.is_set() or not may_start_again:
            break
        end_descendants()
    if over.is_set():
        # The raylet's agents outlive it for some seconds, as nobody's children.
        family: list[psutil.Process] = []
        with contextlib.suppress(psutil.Error):  # it has just ended
            family = psutil.Process(ray.pid).children(recursive=True)
        ray.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            ray.wait(END_TIMEOUT_S / 2)
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.kill()
        return 0
    lines = (folder / "log").read_text(errors="replace").splitlines()
    tell(ended=ray.returncode, log=lines[-NUM_LOG_LINES:])
    return 1


def ray_environment(variables: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return the environment of Ray's processes on this node, in a folder with the token."""
    kept = {key: value for key, value in variables.items() if key.startswith(_OF_JOB) or not key.startswith(_OF_TASK)}
    for name in (TOKEN, "RAY_ADDRESS", "RAY_TMPDIR"):
        kept.pop(name, None)
    token = {MODE: "token", TOKEN_PATH: str(folder / "token")}
    # Otherwise Ray takes half a minute to end.
    fast = {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}
    return {**DEFAULTS, **kept, **TRAIN_ENVIRONMENT, **token, **fast, "TMPDIR": str(folder / "tmp")}


# ---- on the first node


class JobNodes:
    """Ray on all nodes of a job, started by ``srun`` and stopped by the end of its input."""

    def __init__(self, job: Job) -> None:
        command = ["srun", "--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--mpi=none", f"--nodes={job.num_nodes}"]
        command += ["--ntasks-per-node=1", f"--cpus-per-task={job.cpus_per_node}"]
        self._job = job
        self._srun = subprocess.Popen(
            [*command, *PYTHON, "-m", "raypar.run.slurm", "node"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # signals to the batch step's group must not end it
        )
        self._reports: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def start(self, token: str, stop: Stop) -> str | None:
        """Start Ray on all nodes; return the head's address, or None if the job has to stop meanwhile.

        Raises:
            ClusterError: it doesn't start on one of them.
        """
        self._give(token)
        self._give(f"first {self._job.address()}")
        head, up, until_s = "", set[str](), time.monotonic() + START_TIMEOUT_S
        while len(up) < self._job.num_nodes:
            if stop.is_due():
                return None
            if time.monotonic() > until_s:
                missing = f"{len(up)} of {units.counted(self._job.num_nodes, 'node')} answered: {', '.join(sorted(up))}"
                raise ClusterError(f"Ray did not start within {START_TIMEOUT_S:g} s; {missing}")
            try:
                report = self._reports.get(timeout=POLL_S)
            except queue.Empty:
                continue
            if report is None:
                raise ClusterError("srun ended before Ray was up on all nodes")
            if "ended" in report:
                raise ClusterError(ended(report))
            up.add(report["node"])
            if not head:  # others start after the head
                head = report["up"]
                self._give(f"head {head}")
        return head

    def show_reports(self) -> None:
        """Print which nodes have lost their Ray."""
        with contextlib.suppress(queue.Empty):
            while (report := self._reports.get_nowait()) is not None:
                if "ended" in report:
                    say(ended(report))

    def end(self) -> None:
        """End Ray on all nodes, which then remove its files."""
        assert self._srun.stdin is not None
        self._give(END)
        with contextlib.suppress(OSError):
            self._srun.stdin.close()
        try:
            self._srun.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # a node was lost
            self._srun.kill()
            self._srun.wait()

    def _give(self, line: str) -> None:
        assert self._srun.stdin is not None
        with contextlib.suppress(OSError):  # it has ended, which its output shows
            print(line, file=self._srun.stdin, flush=True)

    def _listen(self) -> None:
        assert self._srun.stdout is not None
        for line in self._srun.stdout:
            if line.startswith(REPORT):
                self._reports.put(json.loads(line.removeprefix(REPORT)))
            else:
                print(line, end="", flush=True)
        self._reports.put(None)


def ended(report: Mapping[str, Any]) -> str:
    """Return the message for a Ray that has ended, with the end of its log."""
    log = "\n".join(f"  {line}" for line in report["log"])
    return f"Ray has ended on {report['node']} with exit code {report['ended']}. The end of its log:\n{log}"


class Stop:
    """Reason to stop: SIGTERM, or the job's end, `lead_s` before it. SIGUSR1 says that the end is near.

    Attributes:
        is_final: SIGTERM has arrived.
        at: Unix time at which the job stops; None: its end is unknown.
    """

    def __init__(self, job: Job) -> None:
        self._job, self.is_final, self._is_near = job, False, False
        signal.signal(signal.SIGTERM, self._handle)
        signal.signal(signal.SIGUSR1, self._handle)
        end = job.end()
        self.at = None if end is None else end - job.lead_s

    def is_due(self) -> bool:
        """Return whether the job has to stop now."""
        if self._is_near:
            self._is_near = False
            end, now = self._job.end(), time.time()  # the end may have changed
            at = now if end is None else end - self._job.lead_s
            self.at = at if at - now < EARLY_S else now  # sent for another reason, such as preemption
        return self.is_final or (self.at is not None and time.time() >= self.at)

    def _handle(self, number: int, _: object) -> None:
        if number == signal.SIGTERM:
            self.is_final = True
        else:
            self._is_near = True


def run_study(words: Sequence[str], address: str, folder: Path, nodes: JobNodes, job: Job, stop: Stop) -> int:
    """Run the study on the job's Ray until it ends or has to stop; return its exit code.

    Args:
        words: command line after `raypar`.
        folder: with the token.
    """
    environment = {**os.environ, MODE: "token", TOKEN_PATH: str(folder / "token"), "TMPDIR": str(folder / "tmp")}
    for name in (TOKEN, "RAY_ADDRESS"):
        environment.pop(name, None)
    environment |= {TALLY: str(folder / "tally"), SUBMITTED_AS: f"sbatch {job.file}", "PYTHONUNBUFFERED": "1"}
    environment.setdefault("COLUMNS", "120")
    if stop.at is not None:
        environment[ENDS_AT] = f"{stop.at:.0f}"
    command = [*PYTHON, "-c", "from raypar.cli.app import main; main()", *words]
    study = subprocess.Popen(
        [*command, "--address", address, "--min-nodes", str(job.num_nodes), "--exclusive"],  # the Ray is its own
        stdin=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
    )
    until_s: float | None = None
    while study.poll() is None:
        nodes.show_reports()
        if until_s is None and stop.is_due():
            study.terminate()
            until_s = time.monotonic() + max(job.lead_s - END_TIMEOUT_S, END_TIMEOUT_S)
        elif until_s is not None and time.monotonic() > until_s:
            study.kill()
        time.sleep(POLL_S)
    code: int = study.returncode
    return code if code >= 0 else 128 - code


def resubmit(job: Job) -> str:
    """Have Slurm run the job again; return what will happen, for a message."""
    asked = subprocess.run(["scontrol", "requeue", job.id], capture_output=True, text=True, check=False)
    if asked.returncode == 0:
        return f"job {job.id} is in the queue again, and continues by itself"
    # Some sites forbid it.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
    task = job.variables.get("SLURM_ARRAY_TASK_ID")
    array = [f"--array={task}"] if task else []
    command = ["sbatch", "--parsable", f"--dependency=afterany:{job.id}", *array, str(job.file)]
    submitted = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if submitted.returncode == 0:
        return f"job {submitted.stdout.strip().partition(';')[0]} continues by itself"
    reasons = "; ".join(" ".join(done.stderr.split()) for done in (asked, submitted))
    return f"Slurm accepts no job from here ({reasons}); run `sbatch {job.file}` to continue"


def say(text: str) -> None:
    print(text, flush=True)


def supervise(job: Job, words: Sequence[str]) -> int:
    """Run a study on a job's nodes; return the exit code of the job, which is the study's."""
    stop, token = Stop(job), secrets.token_hex(32)
    folder = private_folder(token, os.environ)
    try:
        nodes = JobNodes(job)
        try:
            address = nodes.start(token, stop)
            code = STOPPED if address is None else run_study(words, address, folder, nodes, job, stop)
        except ClusterError as error:
            say(str(error))
            return 1
        finally:
            nodes.end()
            end_descendants()
        num_finished = int((folder / "tally").read_text()) if (folder / "tally").exists() else 0
    finally:
        remove_folder(folder)
    was_stopped = code == STOPPED_BY_TIME or (code > 128 and stop.is_due())
    if was_stopped and not stop.is_final:
        if not job.continues:
            say(f"the job's time is over: run `sbatch {job.file}` to continue")
        elif not num_finished:
            say("the job's time is over, and no trial has finished in it: give it more time (--time); it ends here")
        elif job.is_running():
            say(f"the job's time is over: {resubmit(job)}")
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the batch script, or ``srun`` on a node, asks for."""
    parser = argparse.ArgumentParser(prog="python -m raypar.run.slurm", description=__doc__)
    roles = parser.add_subparsers(dest="role", required=True)
    roles.add_parser("node", help="run Ray on this node, for a job's first node")
    run = roles.add_parser("study", help="run a study on the nodes of this job")
    run.add_argument("--file", type=Path, required=True, help="the batch file, which continues the study")
    run.add_argument("--lead", type=float, required=True, metavar="SECONDS", help="stop so long before the job's end")
    run.add_argument("--until-done", action="store_true", help="go back into the queue when the time is over")
    run.add_argument("words", nargs=argparse.REMAINDER, help="words after `raypar study`")
    given = parser.parse_args(arguments)
    if given.role == "node":
        return serve(sys.stdin, sys.stdout, os.environ)
    words = given.words[1:] if given.words[:1] == ["--"] else given.words
    return supervise(Job(given.file, given.lead, given.until_done), ["study", *words])


if __name__ == "__main__":
    sys.exit(main())
