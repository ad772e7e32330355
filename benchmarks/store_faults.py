"""What befalls the store of a study, while a trial is in mid-epoch, and what it takes to have everything in it again.

As in ``faults.py`` trials are held in their first epoch; here they run without Ray, which has no part in it. Noticed is
when raypar says so; recovered, when the next trial trains, or, where that has to wait for whoever mends it, from then
until `raypar sync` or `raypar resume` is done. At last the store is asked which finished trials it lacks, and which it
has twice.

Needs two cores; for the full disk root, since a small one is mounted.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from common import begin, parser_for, progress, scratch
from driven import RAYPAR, finished, head_of_table, num_doubled, row, said, start

from raypar.track.journal import journal_paths
from raypar.track.server import Server, free_port, start_server
from raypar.track.store import default_tracking_uri

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from faultlab import Faulty, next_held

LIMIT_S = 300.0
DISK_BYTES = 16 * 2**20
NUM_TRIALS = 3


def main() -> None:
    parser = parser_for(__doc__)
    args = begin(parser)
    head_of_table()
    for name, case in list(CASES.items())[: 1 if args.quick else None]:
        progress(name)
        with scratch() as folder:
            case(name, folder)


@contextlib.contextmanager
def second_held(folder: Path, *flags: str) -> Iterator[tuple[Faulty, subprocess.Popen[str], str]]:
    """A study whose first trial is done and whose second waits in mid-epoch: its learning rate stands last."""
    study = Faulty(folder, NUM_TRIALS)
    with study.running(start(folder, "study", "faulty.py", "--no-ray", *flags)) as process:
        study.go(next_held(study, process)[0])
        yield study, process, next_held(study, process)[0]


@contextlib.contextmanager
def database_locked(folder: Path) -> Iterator[None]:
    """By another connection than raypar's."""
    with contextlib.closing(sqlite3.connect(folder / "mlflow.db", timeout=60, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        yield
        other.execute("ROLLBACK")


def without_server(name: str, folder: Path) -> None:
    """MLflow's server is killed in mid-study and is away to its end; later it is back, and gets what waits."""
    database, port = default_tracking_uri(folder), free_port(25_000)
    with (
        start_server(database, folder, port=port) as server,
        second_held(folder, "--tracking-uri", url := server.url) as (study, process, second),
    ):
        begun_s = time.monotonic()
        end_server(server)
        study.go(second)
        third, _ = next_held(study, process, LIMIT_S)
        recovered_s = time.monotonic() - begun_s
        study.go(third)
        process.wait(LIMIT_S)
    told = "wait on disk" in said(folder)
    with start_server(database, folder, port=port):
        mended_s = raypar(folder, "sync", "--tracking-uri", url)
    what = f"finished; sync in {mended_s:.1f} s" if told else "finished, and did not say what waits"
    in_the_end(name, what, recovered_s, folder)


def end_server(server: Server) -> None:
    """With all its processes, without a word."""
    os.killpg(server.pid, signal.SIGKILL)


def locked(name: str, folder: Path) -> None:
    """Another process locks the database, to the study's end."""
    with second_held(folder) as (study, process, second), database_locked(folder):
        begun_s = time.monotonic()
        study.go(second)
        third, _ = next_held(study, process, LIMIT_S)
        recovered_s = time.monotonic() - begun_s
        study.go(third)
        assert process.wait(LIMIT_S) == 0, said(folder)
    mended_s = raypar(folder, "sync")
    in_the_end(name, f"finished; sync in {mended_s:.1f} s", recovered_s, folder)


def damaged(name: str, folder: Path) -> None:
    """The store is away, and a line of the journal that has the results is damaged: its trial is run again."""
    with second_held(folder) as (study, process, second), database_locked(folder):
        study.hold_no_more()
        study.go(second)
        assert process.wait(LIMIT_S) == 0, said(folder)
    (journal,) = journal_paths(folder)
    lines = journal.read_bytes().splitlines(keepends=True)
    last = max(i for i, line in enumerate(lines) if json.loads(line)["kind"] == "trial")
    lines[last] = b'{"kind": "trial", \xff' + lines[last][40:]
    journal.write_bytes(b"".join(lines))
    begun_s = time.monotonic()
    raypar(folder, "sync")
    kept = len(finished(folder))
    raypar(folder, "resume", "faulty")
    in_the_end(name, f"{kept} of {NUM_TRIALS} kept; resumed", time.monotonic() - begun_s, folder)


def full(name: str, folder: Path) -> None:
    """The disk is full when a trial ends; there is room again, and the study goes on."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        print(f"{name}: not done, a small disk can't be mounted here (that needs root)")
        return
    try:
        filler = folder / "filler"
        with second_held(folder) as (study, process, second):
            study.prepare_go(second)
            with filler.open("wb") as file, contextlib.suppress(OSError):
                while True:
                    os.write(file.fileno(), b"0" * 4096)
            begun_s = time.monotonic()
            study.go(second)
            code = process.wait(LIMIT_S)
            noticed_s = time.monotonic() - begun_s
        filler.unlink()
        study.hold_no_more()
        begun_s = time.monotonic()
        raypar(folder, "resume", "faulty")
        recovered_s = time.monotonic() - begun_s
        in_the_end(name, f"exit {code}; resumed", recovered_s, folder, noticed_s)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


CASES: dict[str, Callable[[str, Path], None]] = {
    "MLflow's server killed, to the end": without_server,
    "database locked, to the end": locked,
    "line of the journal damaged": damaged,
    "disk full": full,
}


def raypar(folder: Path, *arguments: str) -> float:
    """How long it takes."""
    begun_s = time.monotonic()
    done = subprocess.run([RAYPAR, *arguments], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return time.monotonic() - begun_s


def in_the_end(name: str, what: str, recovered_s: float, folder: Path, noticed_s: float | None = None) -> None:
    row(name, what, noticed_s, recovered_s, NUM_TRIALS - len(finished(folder)), num_doubled(folder, "faulty"))


if __name__ == "__main__":
    main()
