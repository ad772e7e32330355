"""Studies whose trials pause in mid-epoch for a fault, and the faults: killed processes, locked stores, full disks.

Every trial's first attempt pauses in its fourth training step, not counting the steps that check the model. Its last
rank writes a file and waits for another file (the other rank waits in an all-reduce), then continues or misbehaves.
"""

import contextlib
import os
import sqlite3
import subprocess
import time

import psutil

from raypar.signals import is_running
from raypar.train.model_check import MAX_PASSES

STUDY = """
from dataclasses import replace
from pathlib import Path

from raypar import Study, grid
from raypar.workloads import digits

FOLDER = Path(__file__).parent


def model(config):
    import os
    from raypar.workloads.digits import build

    lr, rank, last = config["lr"], int(os.environ["RANK"]), config["num_workers"] - 1
    if rank == 0 and os.environ["WORLD_SIZE"] != "1":  # else this is the check before anything starts
        with (FOLDER / "starts").open("a") as file:
            file.write(f"{lr}\\n")
    net, steps = build(config), []

    def wait(module, _):
        steps.extend([1] * module.training)
        if module.training and len(steps) == 4 + NUM_PASSES and rank == last:
            hold(lr)

    net.register_forward_pre_hook(wait)
    return net


def hold(lr):
    import os, time

    go, draft = FOLDER / f"go-{lr}", FOLDER / f"draft-{lr}"
    if go.exists() or not (FOLDER / "holds").exists():
        return
    draft.write_text(str(os.getpid()))
    draft.rename(FOLDER / f"held-{lr}")
    while not go.exists():
        time.sleep(0.02)
    act = go.read_text()
    if act == "raise":
        raise ValueError("no such luck")
    if act == "ask for too much":
        bytes(1 << 50)


study = Study(
    workload=replace(digits, name="faulty", model=model),
    space={"lr": grid(*(n / 100 for n in range(1, NUM_TRIALS + 1)))},
    num_repeats=1,
    max_retries=1,
    config={"epochs": 2, "batch_size": 256, "hidden_size": 16, "num_workers": 2, "num_warmup_steps": 1},
)
"""
POLL_S, KILL_LIMIT_S = 0.02, 30.0
DISK_BYTES = 16 * 2**20


class Faulty:
    """A study in a folder, `faulty.py`, whose trials pause one after the other."""

    def __init__(self, folder, num_trials):
        self.folder = folder
        (folder / "faulty.py").write_text(
            STUDY.replace("NUM_TRIALS", str(num_trials)).replace("NUM_PASSES", str(MAX_PASSES))
        )
        (folder / "starts").touch()
        (folder / "holds").touch()
        self._released: set[str] = set()

    def starts(self):
        """Return the learning rate of every attempt, in order."""
        return (self.folder / "starts").read_text().split()

    def held(self):
        """Return the held trial, if any: its learning rate and the process id of its last rank."""
        held = {path.name.removeprefix("held-"): path for path in self.folder.glob("held-*")}
        return next(((lr, int(path.read_text())) for lr, path in held.items() if lr not in self._released), None)

    def prepare_go(self, lr, act=""):
        """Write the file of `go`, for use before the disk is full."""
        (self.folder / f"going-{lr}").write_text(act or "go on")

    def go(self, lr, act=""):
        """Continue a held trial; act: ``raise``, ``ask for too much`` (memory), or nothing."""
        self._released.add(lr)
        draft = self.folder / f"going-{lr}"
        if not draft.exists():
            self.prepare_go(lr, act)
        draft.rename(self.folder / f"go-{lr}")

    @contextlib.contextmanager
    def running(self, process):
        """Kill the study's process at the end of the block if it is still running."""
        with process:
            try:
                yield process
            finally:
                process.kill()

    def hold_no_more(self):
        """Let later trials run without a pause."""
        (self.folder / "holds").unlink(missing_ok=True)


def next_held(study, process, limit_s=200.0):
    """Wait for the next held trial while its study runs; return what `Faulty.held` does."""
    wait_until(lambda: study.held() is not None or process.poll() is not None, limit_s)
    held = study.held()
    if held is None:
        output = "".join((study.folder / name).read_text() for name in ("stdout", "stderr"))
        raise AssertionError(f"no trial in mid-epoch (exit code {process.poll()}):\n{output}")
    return held


def wait_until(condition, limit_s):
    """Wait for a condition; return False if the limit is reached before."""
    until_s = time.monotonic() + limit_s
    while not (is_met := condition()) and time.monotonic() < until_s:
        time.sleep(POLL_S)
    return is_met


def find(parent, word):
    """Return the youngest descendant with a word in its command line; raise LookupError if there is none."""
    matches = {}
    for process in psutil.Process(parent).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any(word in part for part in process.cmdline()) and is_running(process.pid):
                matches[process.pid] = (process.ppid(), process)
    roots = [process for ppid, process in matches.values() if ppid not in matches]  # forks have its command line too
    if not roots:
        raise LookupError(f"no process with {word} in its command line")
    return max(roots, key=psutil.Process.create_time)


# Processes of a study in Ray, by a word of their command lines.
VICTIMS = {
    "gang worker": "RayTrainWorker",
    "fork server": "raypar.run.forkserver import serve",
    "Tune trainable": "ray::ResourceTrainable",
    "broker": "ray::Broker",
    "Ray's head": "gcs_server",
    "raylet": "raylet/raylet",
}


def kill(parent, victim):
    """Kill one of `VICTIMS` and wait for its end; return its process id."""
    process = find(parent, VICTIMS[victim])
    kill_rank(process.pid)
    return process.pid


def kill_rank(pid):
    """Kill a process if it is still running, and wait for its end."""
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).kill()
    if not wait_until(lambda: not is_running(pid), KILL_LIMIT_S):
        raise TimeoutError(f"process {pid} does not end")


@contextlib.contextmanager
def locked_database(folder):
    """Lock the folder's embedded MLflow database, as another process would."""
    with contextlib.closing(sqlite3.connect(folder / "mlflow.db", timeout=60, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        yield
        other.execute("ROLLBACK")


@contextlib.contextmanager
def small_disk(folder):
    """Mount a file system of `DISK_BYTES` on a folder; raise OSError if none can be mounted."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"a small file system can't be mounted here (needs root): {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill_disk(folder):
    """Fill the folder's file system; return the file to delete for room."""
    filler = folder / "filler"
    with filler.open("wb") as file, contextlib.suppress(OSError):
        while True:
            os.write(file.fileno(), b"0" * 4096)
    return filler


def damaged(line):
    """Return a line of a journal with a character that is not UTF-8."""
    return b'{"kind": "trial", \xff' + line[40:]
