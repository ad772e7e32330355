"""Recovery time after faults, each injected into a real study while a trial is in mid-epoch.

A study's trials stop in their first epoch, one after the other; a fault hits each, then it continues. Measured are the
time until raypar reports the fault (in a line about the trial, or by ending), and until a trial trains again: by then
the failed trial has been repeated, if it is at all, and the next one is in mid-epoch. If the study ends, the time of
`raypar store resume` counts too. Finally the store is searched for finished trials that are missing or stored twice.

Faults of the store are in `store_faults.py`. Needs two cores. Uses real processes, a private Ray, and for the lost node
a cluster of three nodes on this machine; times are wall-clock.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from common import begin, parser_for, progress, scratch
from faultlab import Faulty, kill, kill_rank, next_held, wait_until
from study_process import describe, finished, num_duplicates, output, print_fault, print_header, results, start

LIMIT_S = 300.0
END_LIMIT_S = 120.0


@dataclass(frozen=True)
class Held:
    """A trial in mid-epoch.

    Attributes:
        study: its study.
        raypar: process id of `raypar`.
        lr: its learning rate, by which the study tells its trials apart.
        rank: process id of its last rank.
    """

    study: Faulty
    raypar: int
    lr: str
    rank: int


Fault = Callable[[Held], None]


def act(name: str) -> Fault:
    """Return the fault of a trial whose code misbehaves (see `faultlab.STUDY`)."""
    return lambda held: held.study.go(held.lr, name)


def end(victim: str) -> Fault:
    """Return the fault that kills one of `faultlab.VICTIMS`."""

    def fault(held: Held) -> None:
        kill(held.raypar, victim)
        held.study.go(held.lr)

    return fault


def end_rank(held: Held) -> None:
    kill_rank(held.rank)
    held.study.go(held.lr)


def hang_rank(held: Held) -> None:
    os.kill(held.rank, signal.SIGSTOP)
    held.study.go(held.lr)


def send(number: int) -> Fault:
    """Return the fault that sends `raypar` a signal."""
    return lambda held: os.kill(held.raypar, number)


SURVIVED: dict[str, Fault] = {
    "rank killed in mid-epoch": end_rank,
    "rank hangs (--trial-timeout 10)": hang_rank,
    "code raises": act("raise"),
    "code asks for too much memory": act("ask for too much"),
    "Tune's trainable killed": end("Tune trainable"),
    "fork server killed": end("fork server"),
    "gang's worker killed": end("gang worker"),
    "broker killed": end("broker"),
}
ENDING: dict[str, Fault] = {
    "Ctrl-C": send(signal.SIGINT),
    "raypar killed (SIGKILL)": send(signal.SIGKILL),
    "Ray's head killed": end("Ray's head"),
    "Ray's raylet killed": end("raylet"),
}
NODE_LOST = "node lost (of a cluster of three)"
# The phase of a study in which Ctrl-C arrives, by raypar's output or a process it has started.
PHASES = {
    "Ctrl-C while Ray starts": "gcs_server",
    "Ctrl-C while a gang starts": "starting a gang",
    "Ctrl-C while the report is made": "[3/3]",
}


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="only faults with this in their name")
    args = begin(parser)
    print_header()

    def chosen(names: Sequence[str], num_quick: int) -> list[str]:
        return [name for name in list(names)[: num_quick if args.quick else None] if args.only in name]

    if names := chosen(list(SURVIVED), 2):
        with scratch() as folder:
            survive(folder, names)
    for names, num_quick, case in (
        ([NODE_LOST], 0, lose_node),
        (list(ENDING), 1, end_and_resume),
        (list(PHASES), 0, interrupt),
    ):
        for name in chosen(names, num_quick):
            progress(name)
            with scratch() as folder:
                case(folder, name)


def survive(folder: Path, names: Sequence[str]) -> None:
    """Inject faults that a study survives into the trials of one study, in turn."""
    study = Faulty(folder, len(names) + 1)
    times_s: dict[str, tuple[str, float, float]] = {}  # by learning rate: fault, noticed, recovered
    with study.running(start(folder, "study", "faulty.py", "--trial-timeout", "10")) as process:
        lr, rank = next_held(study, process)
        for name in names:
            progress(name)
            num_chars = len(output(folder))
            begun_s = time.monotonic()
            SURVIVED[name](Held(study, process.pid, lr, rank))
            noticed_s = time_of_report(folder, num_chars, lr, process) - begun_s
            hit_lr = lr
            lr, rank = next_held(study, process, LIMIT_S)
            times_s[hit_lr] = name, noticed_s, time.monotonic() - begun_s
        study.go(lr)
        process.wait(LIMIT_S)
    by_lr = {str(result.spec.config["lr"]): result for result in results(folder, "faulty")}
    duplicates = num_duplicates(folder)
    for hit_lr, (name, noticed_s, recovered_s) in times_s.items():
        print_fault(name, describe(by_lr.get(hit_lr)), noticed_s, recovered_s, int(hit_lr not in by_lr), duplicates)
    assert lr in by_lr, "the last trial, which no fault hit, is not in the store"


def end_and_resume(folder: Path, name: str) -> None:
    """Inject a fault that ends the study, and resume it."""
    study = Faulty(folder, 3)
    with study.running(start(folder, "study", "faulty.py")) as process:
        first, _ = next_held(study, process)
        study.go(first)
        second, rank = next_held(study, process)
        begun_s = time.monotonic()
        ENDING[name](Held(study, process.pid, second, rank))
        try:
            outcome = f"exit {process.wait(END_LIMIT_S)}"
        except subprocess.TimeoutExpired:
            process.kill()
            outcome = f"DOES NOT END in {END_LIMIT_S:.0f} s"
        noticed_s = time.monotonic() - begun_s
    study.hold_no_more()
    study.go(second)
    num_kept = len(finished(folder))  # the held trial may have finished after all
    with study.running(start(folder, "store", "resume", "faulty")) as process:
        is_done = wait_until(lambda: len(finished(folder)) > num_kept or process.poll() is not None, LIMIT_S)
        assert is_done, output(folder)
        recovered_s = time.monotonic() - begun_s
        assert process.wait(LIMIT_S) == 0, output(folder)
    is_repeated = study.starts().count(first) > 1
    outcome += "; resumed, " + ("a finished trial was run again" if is_repeated else "missing trials ran")
    print_fault(name, outcome, noticed_s, recovered_s, 3 - len(finished(folder)), num_duplicates(folder))


def lose_node(folder: Path, name: str) -> None:
    """Kill a cluster's node with all its processes; its trial moves to the other nodes."""
    from ray.cluster_utils import Cluster

    os.environ["RAY_AUTH_MODE"] = "disabled"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    study = Faulty(folder, 2)
    try:
        nodes = [cluster.add_node(num_cpus=1, labels={"raypar-machine": f"machine{i + 1}"}) for i in range(3)]
        raylets = {node.all_processes["raylet"][0].process.pid: node for node in nodes}
        with study.running(start(folder, "study", "faulty.py", "--address", cluster.address)) as process:
            first, rank = next_held(study, process, LIMIT_S)
            num_chars = len(output(folder))
            begun_s = time.monotonic()
            (node,) = [raylets[parent.pid] for parent in psutil.Process(rank).parents() if parent.pid in raylets]
            cluster.remove_node(node, allow_graceful=False)
            study.go(first)
            noticed_s = time_of_report(folder, num_chars, first, process) - begun_s
            second, _ = next_held(study, process, LIMIT_S)
            recovered_s = time.monotonic() - begun_s
            study.go(second)
            process.wait(LIMIT_S)
    finally:
        cluster.shutdown()
        del os.environ["RAY_AUTH_MODE"]
    by_lr = {str(result.spec.config["lr"]): result for result in results(folder, "faulty")}
    print_fault(name, describe(by_lr.get(first)), noticed_s, recovered_s, 2 - len(by_lr), num_duplicates(folder))


def interrupt(folder: Path, name: str) -> None:
    """Send Ctrl-C while no trial is in mid-epoch, and run the study again."""
    sign = PHASES[name]
    study = Faulty(folder, 3)
    study.hold_no_more()
    with study.running(start(folder, "study", "faulty.py")) as process:
        assert wait_until(
            lambda: process.poll() is not None or sign in output(folder) or has_child(process.pid, sign), LIMIT_S
        ), output(folder)
        begun_s = time.monotonic()
        process.send_signal(signal.SIGINT)
        exit_code = process.wait(END_LIMIT_S)
        noticed_s = time.monotonic() - begun_s
    num_kept = len(finished(folder))
    with study.running(start(folder, "study", "faulty.py")) as process:
        assert process.wait(LIMIT_S) == 0, output(folder)
        recovered_s = time.monotonic() - begun_s
    num_again = len(study.starts()) - len(set(study.starts()))
    outcome = f"exit {exit_code}, {num_kept} kept; {num_again} started again"
    print_fault(name, outcome, noticed_s, recovered_s, 3 - len(finished(folder)), num_duplicates(folder))


def has_child(pid: int, name: str) -> bool:
    """Return True if a descendant of the process has this in its name."""
    with contextlib.suppress(psutil.Error):
        return any(name in child.name() for child in psutil.Process(pid).children(recursive=True))
    return False


def time_of_report(folder: Path, num_chars: int, lr: str, process: subprocess.Popen[str]) -> float:
    """Wait until raypar reports on the trial, past its first `num_chars`, or ends; return the monotonic time."""
    wait_until(lambda: f"lr={lr}" in output(folder)[num_chars:] or process.poll() is not None, LIMIT_S)
    return time.monotonic()


if __name__ == "__main__":
    main()
