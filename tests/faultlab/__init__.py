"""Studies whose trials wait in mid-epoch to have something done to them, and what can be done.

Every trial's first attempt stops in its fourth training step: its last rank says in a file that it is there (the other
one waits for it in an all-reduce), and goes on when it is told to, having done what it was told. Tests and benchmarks
drive such a study from outside, as a process of its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from raypar.run.ranks import is_running

STUDY = """
from dataclasses import replace
from pathlib import Path

from raypar import Study, grid
from raypar.workloads import digits

FOLDER = Path(__file__).parent
FILL_BYTES = 64 * 2**20


def model(config):
    import os
    from raypar.workloads.digits import build

    lr, rank, last = config["lr"], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) - 1
    if rank == 0:
        with (FOLDER / "starts").open("a") as file:
            file.write(f"{lr}\\n")
    net, steps = build(config), []

    def wait(module, _):
        steps.append(1)
        if module.training and len(steps) == 4 and rank == last:
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
    taken = []
    while act == "take too much":
        taken.append(b"1" * FILL_BYTES)


study = Study(
    workload=replace(digits, name="faulty", model=model),
    space={"lr": grid(*(n / 100 for n in range(1, NUM_TRIALS + 1)))},
    num_repeats=1,
    max_retries=1,
    config={"epochs": 2, "batch_size": 256, "hidden_size": 16, "num_workers": 2, "num_warmup_steps": 1},
)
"""
MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")
ROOM_BYTES = 512 * 2**20  # what a rank that is to be out of memory may take on top of what it has


class Faulty:
    """A study in a folder, its trials held one after the other."""

    def __init__(self, folder: Path, num_trials: int) -> None:
        self.folder = folder
        (folder / "faulty.py").write_text(STUDY.replace("NUM_TRIALS", str(num_trials)))
        (folder / "starts").touch()
        (folder / "holds").touch()
        self._told: set[str] = set()

    def starts(self) -> list[str]:
        """The learning rate of every attempt, in their order."""
        return (self.folder / "starts").read_text().split()

    def held(self) -> tuple[str, int] | None:
        """The trial that waits and was not told to go on: its learning rate, and its last rank's process."""
        for path in self.folder.glob("held-*"):
            lr = path.name.removeprefix("held-")
            if lr not in self._told:
                return lr, int(path.read_text())
        return None

    def prepare_go(self, lr: str, act: str = "") -> None:
        """What `go` needs room on the disk for."""
        (self.folder / f"going-{lr}").write_text(act or "go on")

    def go(self, lr: str, act: str = "") -> None:
        """Let a trial that waits go on; act: what it does first (see `STUDY`)."""
        self._told.add(lr)
        draft = self.folder / f"going-{lr}"
        if not draft.exists():
            self.prepare_go(lr, act)
        draft.rename(self.folder / f"go-{lr}")

    @contextlib.contextmanager
    def running(self, process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
        """The study's process, which does not outlive the block."""
        with process:
            try:
                yield process
            finally:
                if process.poll() is None:
                    process.kill()

    def hold_no_more(self) -> None:
        """Later trials don't wait."""
        (self.folder / "holds").unlink(missing_ok=True)


def next_held(study: Faulty, process: subprocess.Popen[str], limit_s: float = 200.0) -> tuple[str, int]:
    """Wait for the next trial that waits; its learning rate, and its last rank's process."""
    give_up_s = time.monotonic() + limit_s
    while (held := study.held()) is None:
        code = process.poll()
        if code is not None or time.monotonic() > give_up_s:
            said = [(study.folder / name).read_text() for name in ("stdout", "stderr")]
            raise AssertionError(f"no trial in mid-epoch (exit code {code}):\n{said[0]}{said[1]}")
        time.sleep(0.02)
    return held


def find(parent: int, word: str) -> psutil.Process:
    """The descendant with the word in its command line; the youngest of several, though not what one of them has
    forked: that has its parent's command line.

    Raises:
        LookupError: there is none.
    """
    found = {}
    for process in psutil.Process(parent).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any(word in part for part in process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found[process.pid] = (process.create_time(), process.ppid(), process)
    own = [(created, process) for created, ppid, process in found.values() if ppid not in found]
    if not own:
        raise LookupError(f"no process with {word} in its command line")
    return max(own, key=lambda each: each[0])[1]


# What can be killed of a study in Ray, and how it shows up among the descendants of `raypar`.
VICTIMS = {
    "gang worker": "RayTrainWorker",
    "gang controller": "TrainController",
    "fork server": "raypar.run.forkserver import serve",
    "Tune trainable": "ray::ResourceTrainable",
    "broker": "ray::Broker",
    "Ray's head": "gcs_server",
    "raylet": "raylet/raylet",
}


def kill(parent: int, victim: str) -> int:
    """Kill one of `VICTIMS`; its process id. Returns when it is gone. Raises LookupError where there is none."""
    process = find(parent, VICTIMS[victim])
    process.kill()
    until_gone(process.pid)
    return process.pid


def until_gone(pid: int, limit_s: float = 30.0) -> None:
    give_up_s = time.monotonic() + limit_s
    while is_running(pid):
        if time.monotonic() > give_up_s:
            raise TimeoutError(f"process {pid} does not end")
        time.sleep(0.01)


def kill_rank(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    until_gone(pid)


@contextlib.contextmanager
def memory_group() -> Iterator[Callable[[int], None]]:
    """A group of processes of little memory inside of this process's own: gives what puts a process into it.

    Raises:
        OSError: none can be made here.
    """
    own = next(
        (line.split(":", 2)[2] for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line), ""
    )
    if not own or not (MEMORY_GROUPS / "memory.limit_in_bytes").exists():
        raise OSError("no memory groups (version 1) that could be written")
    group = MEMORY_GROUPS / own.lstrip("/") / f"raypar-faults-{os.getpid()}"
    group.mkdir()
    members: list[int] = []

    def join(pid: int) -> None:
        members.append(pid)
        (group / "memory.limit_in_bytes").write_text(str(ROOM_BYTES))
        (group / "cgroup.procs").write_text(str(pid))

    try:
        yield join
    finally:
        for pid in members:
            kill_rank(pid)
        group.rmdir()
