"""Whether a long study outlives what befalls it: short trials, and every so often something of it is killed.

`raypar study` runs so many trials on a private Ray; every 20 to 40 seconds a rank, or a process that serves the
trials, is killed (drawn with a seed). In the end every trial is to be in the store, finished, once. The memory of the
driver and of Ray's head (gcs_server and raylet) is looked at all along.

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
from common import Figure, begin, judge, parser_for, progress, scratch, tell
from driven import num_doubled, results, said, start

from raypar import units
from raypar.study.trial import TrialState

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from faultlab import VICTIMS, find, kill, kill_rank

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
LOOK_S = 1.0
MAX_GROWTH_BYTES = 50e6
LAST_LINE = re.compile(r"^\[ *(\d+)/\d+\]", re.MULTILINE)


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--trials", type=int, default=500, help="[default: 500]")
    parser.add_argument(
        "--epochs", type=int, default=2, help="of each trial, about half a second each on two cores [default: 2]"
    )
    parser.add_argument("--seed", type=int, default=0, help="of what is killed, and when [default: 0]")
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
        took_s = time.monotonic() - begun_s
        found = results(folder, "soak")
        finished = [result for result in found if result.state is TrialState.FINISHED]
        doubled = num_doubled(folder, "soak")
        code = process.wait()
        tell(f"{num_trials} trials", f"{units.seconds(took_s)}, exit code {code}")
        tell("killed", ", ".join(f"{name} {count}×" for name, count in sorted(killed.items())) or "nothing")
        tell("trials done again", str(sum(result.attempts > 1 for result in finished)))
        tell("finished trials in the store; lost; doubled", f"{len(finished)}; {num_trials - len(finished)}; {doubled}")
        for name, values in memory.items():
            tenth = max(1, len(values) // 10)
            early, late = values[tenth : 2 * tenth] or values, values[-tenth:]
            tell(f"{name}'s memory after a tenth", units.size(statistics.median(early)))
            growth = Figure.of([value - statistics.median(early) for value in late])
            judge(f"{name}: growth to the last tenth", growth, units.size, at_most=MAX_GROWTH_BYTES)
        is_whole = code == 0 and len(finished) == num_trials and not doubled
        print("nothing was lost" if is_whole else f"SOMETHING WAS LOST:\n{said(folder)[-3000:]}", flush=True)
    sys.exit(not is_whole)


def watch(
    folder: Path, process: subprocess.Popen[str], num_trials: int, drawn: random.Random
) -> tuple[Counter[str], dict[str, list[float]]]:
    """Kill and look, until the study is over: how often what was killed; the resident bytes of driver and head."""
    killed: Counter[str] = Counter()
    memory: dict[str, list[float]] = {"driver": [], "Ray's head": []}
    next_s, told = time.monotonic() + drawn.uniform(*PAUSE_S), 0
    driver = psutil.Process(process.pid)
    while process.poll() is None:
        time.sleep(LOOK_S)
        done = [int(number) for number in LAST_LINE.findall((folder / "stdout").read_text())]
        if done:  # before the first trial has ended, all of it is still growing
            with contextlib.suppress(psutil.Error, LookupError):
                head = [find(process.pid, VICTIMS[name]).memory_info().rss for name in HEAD]
                memory["driver"].append(driver.memory_info().rss)
                memory["Ray's head"].append(sum(head))
        if done and done[-1] >= told + num_trials // 10:
            told = done[-1]
            progress(f"{told} trials, {sum(killed.values())} kills")
        if time.monotonic() >= next_s and done:
            next_s = time.monotonic() + drawn.uniform(*PAUSE_S)
            victim = drawn.choice((RANK, *SERVING))
            with contextlib.suppress(psutil.Error, LookupError):  # it is just being replaced, or no trial runs
                if victim == RANK:
                    kill_rank(find_rank(process.pid))
                else:
                    kill(process.pid, victim)
                killed[victim] += 1
    return killed, memory


def find_rank(driver: int) -> int:
    """A process that a fork server has forked for a trial.

    Raises:
        LookupError: there is none now.
    """
    ranks = find(driver, VICTIMS["fork server"]).children()
    if not ranks:
        raise LookupError("no trial runs")
    return ranks[-1].pid


if __name__ == "__main__":
    main()
