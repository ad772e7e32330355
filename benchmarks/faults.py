"""What a fault costs: each is done to a real study while a trial is in mid-epoch, and the time to recover is taken.

A study's trials are held in their first epoch, one after the other. To each something is done; then it is let go. Taken
are the time until raypar says so (in a line about the trial, or by ending), and until a trial trains again: the failed
one has been done again by then, where it is, and the next one is in mid-epoch. Where the study ends, `raypar resume`
goes on, and its time counts. At last the store is asked which finished trials it lacks, and which it has twice.

What befalls the store is in ``store_faults.py``. Needs two cores. Real processes, a private Ray, for a lost node a
cluster of three on this machine; nothing is timed but by the wall's clock.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from common import begin, parser_for, progress, scratch
from driven import finished, head_of_table, num_doubled, outcome, results, row, said, start, wait_for

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from faultlab import Faulty, kill, kill_rank, next_held

LIMIT_S = 300.0
END_LIMIT_S = 120.0


@dataclass(frozen=True)
class Held:
    """A trial in mid-epoch: of raypar's process, by its learning rate; and the process of its last rank."""

    study: Faulty
    raypar: int
    lr: str
    rank: int


Act = Callable[[Held], None]


@dataclass(frozen=True)
class Fault:
    """Something that is done to a trial in mid-epoch."""

    name: str
    act: Act


def tell(what: str) -> Act:
    return lambda held: held.study.go(held.lr, what)


def end(victim: str) -> Act:
    def act(held: Held) -> None:
        kill(held.raypar, victim)
        held.study.go(held.lr)

    return act


def end_rank(held: Held) -> None:
    kill_rank(held.rank)
    held.study.go(held.lr)


def stop_rank(held: Held) -> None:
    """It stays as it is, and hangs."""
    os.kill(held.rank, signal.SIGSTOP)
    held.study.go(held.lr)


def send(number: int) -> Act:
    return lambda held: os.kill(held.raypar, number)


OUTLIVED = (
    Fault("rank killed in mid-epoch", end_rank),
    Fault("rank hangs (--trial-timeout 10)", stop_rank),
    Fault("code raises", tell("raise")),
    Fault("code asks for too much memory", tell("ask for too much")),
    Fault("Tune's trainable killed", end("Tune trainable")),
    Fault("fork server killed", end("fork server")),
    Fault("gang's worker killed", end("gang worker")),
    Fault("gang's controller killed", end("gang controller")),
    Fault("broker killed", end("broker")),
)
ENDING = (
    Fault("Ctrl-C", send(signal.SIGINT)),
    Fault("raypar killed (SIGKILL)", send(signal.SIGKILL)),
    Fault("Ray's head killed", end("Ray's head")),
    Fault("Ray's raylet killed", end("raylet")),
)
NODE_LOST = "node lost (of a cluster of three)"
# In which phase of a study Ctrl-C comes, by what raypar has said, or started.
PHASES = {
    "Ctrl-C while Ray starts": "gcs_server",
    "Ctrl-C while a gang starts": "starting a gang",
    "Ctrl-C while the report is made": "[3/3]",
}


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="faults that have this in their name")
    args = begin(parser)
    head_of_table()
    in_one_study = [fault for fault in OUTLIVED[: 2 if args.quick else None] if args.only in fault.name]
    if in_one_study:
        with scratch() as folder:
            outlived(folder, in_one_study)
    if args.only in NODE_LOST and not args.quick:
        with scratch() as folder:
            node_lost(folder)
    for fault in ENDING[: 1 if args.quick else None]:
        if args.only in fault.name:
            with scratch() as folder:
                ending(folder, fault)
    for name, sign in PHASES.items() if not args.quick else ():
        if args.only in name:
            with scratch() as folder:
                interrupted(folder, name, sign)


def outlived(folder: Path, faults: Sequence[Fault]) -> None:
    """Faults that a study outlives, done to one study's trials in turn."""
    study = Faulty(folder, len(faults) + 1)
    taken: dict[str, tuple[Fault, float, float]] = {}
    with study.running(start(folder, "study", "faulty.py", "--trial-timeout", "10")) as process:
        lr, rank = next_held(study, process)
        for fault in faults:
            progress(fault.name)
            heard = len(said(folder))
            begun_s = time.monotonic()
            fault.act(Held(study, process.pid, lr, rank))
            noticed_s = until_told(folder, heard, lr, process) - begun_s
            its_lr = lr
            lr, rank = next_held(study, process, LIMIT_S)
            taken[its_lr] = fault, noticed_s, time.monotonic() - begun_s
        study.go(lr)
        process.wait(LIMIT_S)
    found = {str(result.spec.config["lr"]): result for result in results(folder, "faulty")}
    doubled = num_doubled(folder, "faulty")
    for its_lr, (fault, noticed_s, recovered_s) in taken.items():
        row(fault.name, outcome(found.get(its_lr)), noticed_s, recovered_s, its_lr not in found, doubled)
    assert found.keys() >= {lr}, "the last trial, to which nothing was done, is not in the store"


def ending(folder: Path, fault: Fault) -> None:
    """A fault that ends a study, which then goes on."""
    study = Faulty(folder, 3)
    progress(fault.name)
    with study.running(start(folder, "study", "faulty.py")) as process:
        first, _ = next_held(study, process)
        study.go(first)
        second, rank = next_held(study, process)
        begun_s = time.monotonic()
        fault.act(Held(study, process.pid, second, rank))
        try:
            ended = f"exit {process.wait(END_LIMIT_S)}"
        except subprocess.TimeoutExpired:
            process.kill()
            ended = f"DOES NOT END in {END_LIMIT_S:.0f} s"
        noticed_s = time.monotonic() - begun_s
    study.hold_no_more()
    study.go(second)
    kept = len(finished(folder))  # the one that was held may have come to its end after all
    with study.running(start(folder, "resume", "faulty")) as process:
        assert wait_for(lambda: len(finished(folder)) > kept or process.poll() is not None, LIMIT_S), said(folder)
        recovered_s = time.monotonic() - begun_s
        assert process.wait(LIMIT_S) == 0, said(folder)
    found = finished(folder)
    again = study.starts().count(first) > 1
    what = f"{ended}; resumed, " + ("a finished trial was run again" if again else "what was missing ran")
    row(fault.name, what, noticed_s, recovered_s, 3 - len(found), num_doubled(folder, "faulty"))


def node_lost(folder: Path) -> None:
    """A node of a cluster is killed with all that runs on it; its trial goes to those that are left."""
    from ray.cluster_utils import Cluster

    progress(NODE_LOST)
    os.environ["RAY_AUTH_MODE"] = "disabled"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    study = Faulty(folder, 2)
    try:
        nodes = [cluster.add_node(num_cpus=1, labels={"raypar-machine": f"machine{i + 1}"}) for i in range(3)]
        raylets = {node.all_processes["raylet"][0].process.pid: node for node in nodes}
        with study.running(start(folder, "study", "faulty.py", "--address", cluster.address)) as process:
            first, rank = next_held(study, process, LIMIT_S)
            heard = len(said(folder))
            begun_s = time.monotonic()
            (its_node,) = [raylets[each.pid] for each in psutil.Process(rank).parents() if each.pid in raylets]
            cluster.remove_node(its_node, allow_graceful=False)
            study.go(first)
            noticed_s = until_told(folder, heard, first, process) - begun_s
            second, _ = next_held(study, process, LIMIT_S)
            recovered_s = time.monotonic() - begun_s
            study.go(second)
            process.wait(LIMIT_S)
    finally:
        cluster.shutdown()
        del os.environ["RAY_AUTH_MODE"]
    found = {str(result.spec.config["lr"]): result for result in results(folder, "faulty")}
    doubled = num_doubled(folder, "faulty")
    row(NODE_LOST, outcome(found.get(first)), noticed_s, recovered_s, 2 - len(found), doubled)


def interrupted(folder: Path, name: str, sign: str) -> None:
    """Ctrl-C where no trial is in mid-epoch; the study then goes on."""
    progress(name)
    study = Faulty(folder, 3)
    study.hold_no_more()
    with study.running(start(folder, "study", "faulty.py")) as process:
        own = psutil.Process(process.pid)
        assert wait_for(
            lambda: process.poll() is not None or sign in said(folder) or has_started(own, sign), LIMIT_S
        ), said(folder)
        begun_s = time.monotonic()
        process.send_signal(signal.SIGINT)
        code = process.wait(END_LIMIT_S)
        noticed_s = time.monotonic() - begun_s
    kept = len(finished(folder))
    with study.running(start(folder, "study", "faulty.py")) as process:
        assert process.wait(LIMIT_S) == 0, said(folder)
        recovered_s = time.monotonic() - begun_s
    num_again = len(study.starts()) - len(set(study.starts()))
    what = f"exit {code}, {kept} kept; {num_again} begun again"
    row(name, what, noticed_s, recovered_s, 3 - len(finished(folder)), num_doubled(folder, "faulty"))


def has_started(process: psutil.Process, name: str) -> bool:
    with contextlib.suppress(psutil.Error):
        return any(name in child.name() for child in process.children(recursive=True))
    return False


def until_told(folder: Path, heard: int, lr: str, process: subprocess.Popen[str]) -> float:
    """When raypar first says something of the trial, after so many characters; of monotonic seconds."""
    wait_for(lambda: f"lr={lr}" in said(folder)[heard:] or process.poll() is not None, LIMIT_S)
    return time.monotonic()


if __name__ == "__main__":
    main()
