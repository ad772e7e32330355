"""Recovery from faults of the store, each injected while a trial is in mid-epoch.

As in `faults.py`, trials stop in their first epoch; here they run without Ray, which plays no part. "Noticed" is the
time until raypar reports the fault. "Recovered" is the time until the next trial trains or, if that has to wait for the
user's fix, from the fix until `raypar store sync` or `raypar store resume` is done. Finally the store is searched for
finished trials that are missing or stored twice.

Needs two cores, and root for the full disk, which is a small one mounted for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from common import begin, parser_for, progress, run_raypar, scratch
from faultlab import Faulty, damaged, fill_disk, locked_database, next_held, small_disk
from study_process import finished, num_duplicates, output, print_fault, print_header, start

from raypar.track.journal import journal_paths
from raypar.track.server import free_port, start_server
from raypar.track.store import default_tracking_uri

LIMIT_S = 300.0
NUM_TRIALS = 3


def main() -> None:
    parser = parser_for(__doc__)
    args = begin(parser)
    print_header()
    for name, case in list(CASES.items())[: 1 if args.quick else None]:
        progress(name)
        with scratch() as folder:
            case(name, folder)


@contextlib.contextmanager
def second_held(folder: Path, *flags: str) -> Iterator[tuple[Faulty, subprocess.Popen[str], str]]:
    """Yield a study whose first trial is done, its process, and the learning rate of its second, held trial."""
    study = Faulty(folder, NUM_TRIALS)
    with study.running(start(folder, "study", "faulty.py", "--no-ray", *flags)) as process:
        study.go(next_held(study, process)[0])
        yield study, process, next_held(study, process)[0]


def kill_server(name: str, folder: Path) -> None:
    """Kill MLflow's server in mid-study, start it again after the study, and sync."""
    database, port = default_tracking_uri(folder), free_port(25_000)
    with (
        start_server(database, folder, port=port) as server,
        second_held(folder, "--tracking-uri", url := server.url) as (study, process, second),
    ):
        begun_s = time.monotonic()
        os.killpg(server.pid, signal.SIGKILL)
        study.go(second)
        third, _ = next_held(study, process, LIMIT_S)
        recovered_s = time.monotonic() - begun_s
        study.go(third)
        process.wait(LIMIT_S)
    is_reported = "not in the store yet" in output(folder)
    with start_server(database, folder, port=port):
        sync_s = run_raypar(folder, "store", "sync", "--tracking-uri", url)
    outcome = f"finished; sync in {sync_s:.1f} s" if is_reported else "finished, WAITING RECORDS NOT REPORTED"
    print_outcome(name, outcome, recovered_s, folder)


def lock_database(name: str, folder: Path) -> None:
    """Lock the database from another process, until the study's end."""
    with second_held(folder) as (study, process, second), locked_database(folder):
        begun_s = time.monotonic()
        study.go(second)
        third, _ = next_held(study, process, LIMIT_S)
        recovered_s = time.monotonic() - begun_s
        study.go(third)
        assert process.wait(LIMIT_S) == 0, output(folder)
    sync_s = run_raypar(folder, "store", "sync")
    print_outcome(name, f"finished; sync in {sync_s:.1f} s", recovered_s, folder)


def damage_journal(name: str, folder: Path) -> None:
    """Damage a journalled result that the locked store doesn't have: its trial is run again."""
    with second_held(folder) as (study, process, second), locked_database(folder):
        study.hold_no_more()
        study.go(second)
        assert process.wait(LIMIT_S) == 0, output(folder)
    (journal,) = journal_paths(folder)
    lines = journal.read_bytes().splitlines(keepends=True)
    last = max(i for i, line in enumerate(lines) if json.loads(line)["kind"] == "trial")
    lines[last] = damaged(lines[last])
    journal.write_bytes(b"".join(lines))
    begun_s = time.monotonic()
    run_raypar(folder, "store", "sync")
    num_kept = len(finished(folder))
    run_raypar(folder, "store", "resume", "faulty")
    print_outcome(name, f"{num_kept} of {NUM_TRIALS} kept; resumed", time.monotonic() - begun_s, folder)


def fill_store(name: str, folder: Path) -> None:
    """Fill the disk before a trial ends, then free it and resume."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(small_disk(folder))
        except OSError as error:
            print(f"{name}: SKIPPED, {error}")
            return
        with second_held(folder) as (study, process, second):
            study.prepare_go(second)
            filler = fill_disk(folder)
            begun_s = time.monotonic()
            study.go(second)
            exit_code = process.wait(LIMIT_S)
            noticed_s = time.monotonic() - begun_s
        filler.unlink()
        study.hold_no_more()
        recovered_s = run_raypar(folder, "store", "resume", "faulty")
        print_outcome(name, f"exit {exit_code}; resumed", recovered_s, folder, noticed_s)


CASES: dict[str, Callable[[str, Path], None]] = {
    "MLflow's server killed, to the end": kill_server,
    "database locked, to the end": lock_database,
    "line of the journal damaged": damage_journal,
    "disk full": fill_store,
}


def print_outcome(name: str, outcome: str, recovered_s: float, folder: Path, noticed_s: float | None = None) -> None:
    num_lost = NUM_TRIALS - len(finished(folder))
    print_fault(name, outcome, noticed_s, recovered_s, num_lost, num_duplicates(folder))


if __name__ == "__main__":
    main()
