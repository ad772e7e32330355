"""What a fault costs: each is done to a real study while a trial is in mid-epoch, and the time to recover is taken.

A study's trials are held in their first epoch, one after the other. To each something is done; then it is let go. Taken
are the time until raypar says so (in a line about the trial, or by ending), and until a trial trains again: the failed
one has been done again by then, where it is, and the next one is in mid-epoch. Where the study ends, `raypar resume`
goes on, and its time counts. At last the store is asked which finished trials it lacks, and which it has twice.

Needs two cores. Real processes, a private Ray, a real MLflow server; nothing is timed but by the wall's clock.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from common import begin, parser_for, progress, scratch
from driven import num_doubled, results, said, start, wait_for

from raypar import units
from raypar.study.trial import TrialResult, TrialState
from raypar.track.server import Server, free_port, start_server
from raypar.track.store import default_tracking_uri

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from faultlab import Faulty, kill, kill_rank, next_held

LIMIT_S = 300.0
END_LIMIT_S = 120.0
ROW = "{:<34} {:<34} {:>9} {:>9} {:>5} {:>8}"


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
NO_SERVER = "MLflow's server killed, to the end"


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="faults that have this in their name")
    args = begin(parser)
    print(ROW.format("fault", "what came of its trial", "noticed", "recovered", "lost", "doubled"), flush=True)
    in_one_study = [fault for fault in OUTLIVED[: 2 if args.quick else None] if args.only in fault.name]
    if in_one_study:
        with scratch() as folder:
            outlived(folder, in_one_study)
    for fault in ENDING[: 1 if args.quick else None]:
        if args.only in fault.name:
            with scratch() as folder:
                ending(folder, fault)
    if args.only in NO_SERVER:
        with scratch() as folder:
            without_server(folder)


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
    with study.running(start(folder, "resume", "faulty")) as process:
        assert wait_for(lambda: len(finished(folder)) > 1 or process.poll() is not None, LIMIT_S), said(folder)
        recovered_s = time.monotonic() - begun_s
        assert process.wait(LIMIT_S) == 0, said(folder)
    found = finished(folder)
    again = study.starts().count(first) > 1
    what = f"{ended}; resumed, " + ("a finished trial was run again" if again else "what was missing ran")
    row(fault.name, what, noticed_s, recovered_s, 3 - len(found), num_doubled(folder, "faulty"))


def without_server(folder: Path) -> None:
    """MLflow's server is killed in mid-study and is away to its end; later it is back, and gets what waits."""
    progress(NO_SERVER)
    study = Faulty(folder, 3)
    database, port = default_tracking_uri(folder), free_port(25_000)
    with start_server(database, folder, port=port) as server:
        url = server.url
        process = start(folder, "study", "faulty.py", "--tracking-uri", url)
        first, _ = next_held(study, process)
        study.go(first)
        second, _ = next_held(study, process)
        begun_s = time.monotonic()
        end_server(server)
        study.go(second)
        third, _ = next_held(study, process, LIMIT_S)
        recovered_s = time.monotonic() - begun_s
        study.go(third)
        process.wait(LIMIT_S)
    told = "wait on disk" in said(folder)
    with start_server(database, folder, port=port):
        sent = subprocess.run(
            [*_raypar("sync", "--tracking-uri", url)], cwd=folder, capture_output=True, text=True, check=False
        )
        assert sent.returncode == 0, sent.stdout + sent.stderr
    what = "finished; `raypar sync` brings it" if told else "finished, and did not say what waits"
    row(NO_SERVER, what, None, recovered_s, 3 - len(finished(folder)), num_doubled(folder, "faulty"))


def _raypar(*arguments: str) -> list[str]:
    return [str(Path(sys.executable).with_name("raypar")), *arguments]


def end_server(server: Server) -> None:
    """With all its processes, without a word."""
    os.killpg(server.pid, signal.SIGKILL)


def until_told(folder: Path, heard: int, lr: str, process: subprocess.Popen[str]) -> float:
    """When raypar first says something of the trial, after so many characters; of monotonic seconds."""
    wait_for(lambda: f"lr={lr}" in said(folder)[heard:] or process.poll() is not None, LIMIT_S)
    return time.monotonic()


def finished(folder: Path) -> list[TrialResult]:
    return [result for result in results(folder, "faulty") if result.state is TrialState.FINISHED]


def outcome(result: TrialResult | None) -> str:
    if result is None:
        return "nothing in the store"
    if result.failure is not None:
        return f"failed: {result.failure.kind.value}, not tried again"
    return "finished" if result.attempts == 1 else f"finished in attempt {result.attempts}"


def row(name: str, what: str, noticed_s: float | None, recovered_s: float, lost: int, doubled: int) -> None:
    noticed = "" if noticed_s is None else units.seconds(noticed_s)
    print(ROW.format(name, what, noticed, units.seconds(recovered_s), int(lost), doubled), flush=True)


if __name__ == "__main__":
    main()
