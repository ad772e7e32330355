"""Overhead of a command as a trial: a torchrun script under raypar, in forks and in new processes, and by hand.

These run in turns, in random order, on as many cores as there are workers, with one thread each, after a first trial
that starts Ray and its gang and is not counted. A trial's time under raypar is from the permission to continue to the
result's arrival at the driver, by hand from the start to the end of torchrun. The script calls `raypar.step` after
every step and prints a line of JSON after each epoch, by hand too.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import random
import subprocess
import sys
import time
from pathlib import Path

from common import (
    BASELINES,
    Figure,
    SteppedChild,
    begin,
    parser_for,
    print_bar,
    print_row,
    progress,
    run_on_ray,
    scratch,
    send_result,
    times,
    wait_for_go,
)

from raypar import Study, Workload, units
from raypar.study.trial import TrialResult, TrialSpec
from raypar.train.affinity import allowed_cores, pin

SCRIPT = BASELINES / "torchrun_train.py"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
EPOCHS = 20
FORKS, NEW, BY_HAND = "forks", "new processes", "by hand"
MAX_RATIO, MAX_EXTRA_S = 1.05, 0.3  # of new processes
MAX_BEYOND_S = 0.5  # of a trial in forks, beyond its training
PAUSE_S = 1.0  # for processes of the previous variant to end


def serve(num_workers: int, *, fresh: bool) -> None:
    """Run trials of the script in one gang, one per request."""
    words = [*TORCHRUN, "{num_workers}", str(SCRIPT), "--epochs", "{epochs}"]
    workload = Workload.from_command(words, fresh_process=fresh)
    study = Study(workload=workload, name="benchmark", config={"epochs": EPOCHS, "device": "cpu"})

    def listen(result: TrialResult, time_s: float) -> None:
        (step_times_s,) = result.step_times_s
        beyond_s = time_s - (result.train_time_s or math.nan)
        send_result({"seconds": time_s, "beyond_s": beyond_s, "steps": len(step_times_s)})

    numbers = itertools.count()

    def next_trial() -> list[TrialSpec]:
        i = next(numbers)
        return [study.trial({"num_workers": num_workers}, i, order=i)]

    run_on_ray(study, next_trial(), listen, preload=("torch",), more=lambda: next_trial() if wait_for_go() else [])


def by_hand(num_workers: int) -> float:
    cores = allowed_cores()[:num_workers]
    begun_s = time.perf_counter()
    subprocess.run(
        [*TORCHRUN, str(num_workers), str(SCRIPT), "--epochs", str(EPOCHS)],
        check=True,
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: pin(cores),
    )
    return time.perf_counter() - begun_s


def compare(num_workers: int, num_rounds: int, folder: Path) -> None:
    prefix = units.counted(num_workers, "worker")
    sizes = ["--num-workers", str(num_workers)]
    times_s: dict[str, list[float]] = {FORKS: [], NEW: [], BY_HAND: []}
    beyond_s: dict[str, list[float]] = {FORKS: [], NEW: []}
    shuffled = random.Random(num_workers)
    with contextlib.ExitStack() as stack:
        children = {}
        for name, flags in ((FORKS, ()), (NEW, ("--fresh",))):
            words = [Path(__file__), "--serve", *sizes, *flags]
            children[name] = stack.enter_context(contextlib.closing(SteppedChild(words, folder / f"{name}.log")))
            children[name].next_result()
        by_hand(num_workers)
        for i in range(num_rounds):
            for name in shuffled.sample(list(times_s), len(times_s)):
                time.sleep(PAUSE_S)
                if name == BY_HAND:
                    times_s[name].append(by_hand(num_workers))
                    continue
                (result,) = children[name].step()
                assert result["steps"] == EPOCHS * 64 // num_workers - 1, result
                times_s[name].append(result["seconds"])
                beyond_s[name].append(result["beyond_s"])
            progress(f"round {i + 1}: " + ", ".join(f"{name} {values[-1]:.2f} s" for name, values in times_s.items()))
    for name, values in times_s.items():
        print_row(f"{prefix}, {name}: wall time of a trial", Figure.of(values).show(units.seconds))
    for name in (FORKS, NEW):
        print_row(f"{prefix}, {name} / by hand", Figure.ratio(times_s[name], times_s[BY_HAND]).show(times))
    pairs = zip(times_s[NEW], times_s[BY_HAND], strict=True)
    over = Figure.of([(mine - MAX_EXTRA_S) / hand for mine, hand in pairs])
    print_bar(f"{prefix}, {NEW}: (raypar - {MAX_EXTRA_S} s) / by hand", over, times, at_most=MAX_RATIO)
    print_row(f"{prefix}, {NEW}: a trial beyond its training", Figure.of(beyond_s[NEW]).show(units.seconds))
    beyond = Figure.of(beyond_s[FORKS])
    print_bar(f"{prefix}, {FORKS}: a trial beyond its training", beyond, units.seconds, at_most=MAX_BEYOND_S)


def main() -> None:
    parser = parser_for(__doc__, rounds=11, quick_rounds=2)
    parser.add_argument("--workers", nargs="+", type=int, default=(1, 2))
    parser.add_argument("--num-workers", type=int, help="(internal)")
    for internal in ("--serve", "--fresh"):
        parser.add_argument(internal, action="store_true", help="(internal)")
    if "--serve" in sys.argv:
        args = parser.parse_args()
        serve(args.num_workers, fresh=args.fresh)
        return
    args = begin(parser)
    with scratch() as folder:
        for num_workers in args.workers:
            compare(num_workers, args.rounds, folder)


if __name__ == "__main__":
    main()
