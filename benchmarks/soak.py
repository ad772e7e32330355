"""Soak test: a long study of short trials whose processes are killed at random.

`raypar study` runs many trials on a private Ray; every 20 to 40 seconds a rank, or a process that serves the trials, is
killed (drawn with a seed). At the end every trial must be in the store, finished, exactly once. The memory of the
driver and of Ray's head (gcs_server and raylet) is sampled throughout.

Needs two cores.
"""

from __future__ import annotations

import contextlib
import random
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
from common import Figure, begin, parser_for, print_bar, print_row, progress, scratch
from faultlab import VICTIMS, find, kill, kill_rank
from study_process import finished, num_duplicates, output, start

from raypar import units

STUDY = """
from raypar import Study, grid
from raypar.workloads import digits

study = Study(
    workload=digits,
    space={"lr": grid(*(n / 1000 for n in range(1, NUM_TRIALS + 1)))},
    num_repeats=1,
    max_retries=20,
    config={"epochs": EPOCHS, "batch_size": 64, "num_workers": 2},
)
"""
RANK = "rank"
SERVING = ("gang worker", "gang controller", "fork server", "Tune trainable", "broker")
HEAD = ("Ray's head", "raylet")
PAUSE_S = (20.0, 40.0)
SAMPLE_S = 1.0
MAX_GROWTH_BYTES = 50e6
DONE = re.compile(r"^\[ *(\d+)/\d+\]", re.MULTILINE)


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--trials", type=int, default=500, help="[default: %(default)s]")
    parser.add_argument(
        "--epochs", type=int, default=2, help="per trial, about half a second each on two cores [default: %(default)s]"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the kills [default: %(default)s]")
    args = begin(parser)
    num_trials = 40 if args.quick else args.trials
    with scratch() as folder:
        text = STUDY.replace("NUM_TRIALS", str(num_trials)).replace("EPOCHS", str(args.epochs))
        (folder / "soak.py").write_text(text)
        begun_s = time.monotonic()
        process = start(folder, "study", "soak.py")
        try:
            killed, memory = watch(folder, process, num_trials, random.Random(args.seed))
        finally:
            if process.poll() is None:
                process.kill()
        time_s = time.monotonic() - begun_s
        stored = finished(folder, "soak")
        num_lost, duplicates = num_trials - len(stored), num_duplicates(folder, "soak")
        exit_code = process.wait()
        print_row(f"{num_trials} trials", f"{units.seconds(time_s)}, exit code {exit_code}")
        print_row("killed", ", ".join(f"{name} {count}×" for name, count in sorted(killed.items())) or "nothing")
        print_row("trials repeated", str(sum(result.attempts > 1 for result in stored)))
        print_row("finished trials in the store; lost; duplicates", f"{len(stored)}; {num_lost}; {duplicates}")
        for name, values in memory.items():
            tenth = max(1, len(values) // 10)
            early, late = values[tenth : 2 * tenth] or values, values[-tenth:]
            print_row(f"{name}'s memory after a tenth", units.size(statistics.median(early)))
            growth = Figure.of([value - statistics.median(early) for value in late])
            print_bar(f"{name}: growth to the last tenth", growth, units.size, at_most=MAX_GROWTH_BYTES)
        is_complete = exit_code == 0 and not num_lost and not duplicates
        print("nothing lost" if is_complete else f"NOT COMPLETE:\n{output(folder)[-3000:]}", flush=True)
    sys.exit(not is_complete)


def watch(
    folder: Path, process: subprocess.Popen[str], num_trials: int, rng: random.Random
) -> tuple[Counter[str], dict[str, list[float]]]:
    """Kill processes and sample memory until the study ends.

    Args:
        folder: of the study.
        process: of `raypar study`.
        num_trials: of the study.
        rng: draws the time and victim of each kill.

    Returns:
        The number of kills by victim, and the resident bytes of the driver and Ray's head over time.
    """
    killed: Counter[str] = Counter()
    memory: dict[str, list[float]] = {"driver": [], "Ray's head": []}
    next_s, num_reported = time.monotonic() + rng.uniform(*PAUSE_S), 0
    driver = psutil.Process(process.pid)
    while process.poll() is None:
        time.sleep(SAMPLE_S)
        done = [int(number) for number in DONE.findall((folder / "stdout").read_text())]
        if done:  # before the first trial ends, everything still grows
            with contextlib.suppress(psutil.Error, LookupError):
                head = [find(process.pid, VICTIMS[name]).memory_info().rss for name in HEAD]
                memory["driver"].append(driver.memory_info().rss)
                memory["Ray's head"].append(sum(head))
        if done and done[-1] >= num_reported + num_trials // 10:
            num_reported = done[-1]
            progress(f"{num_reported} trials, {sum(killed.values())} kills")
        if time.monotonic() >= next_s and done:
            next_s = time.monotonic() + rng.uniform(*PAUSE_S)
            victim = rng.choice((RANK, *SERVING))
            with contextlib.suppress(psutil.Error, LookupError):  # the victim is being replaced, or no trial runs
                if victim == RANK:
                    kill_rank(find_rank(process.pid))
                else:
                    kill(process.pid, victim)
                killed[victim] += 1
    return killed, memory


def find_rank(driver: int) -> int:
    """Return the process id of a rank that runs.

    Raises:
        LookupError: no trial runs.
    """
    ranks = find(driver, VICTIMS["fork server"]).children()
    if not ranks:
        raise LookupError("no trial runs")
    return ranks[-1].pid


if __name__ == "__main__":
    main()
