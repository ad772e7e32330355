"""Searches: trials per minute of raypar, of Ray Tune, and of Optuna in one process.

The same search five times: 100 trials of `mnist_mlp` (on the data in RAYPAR_DATA_DIR, or in the cache), 1 to 4 epochs
of batch 256, by Optuna's TPE with successive halving, one worker and one core per trial, two trials at a time with
raypar (with a Ray of its own, or with ``--no-ray``) and Ray Tune, which has its defaults or ``reuse_actors``. Optuna
in one process has one at a time. Rounds interleave them, each as a process in an empty folder. A rate is that of
epochs, since pruning differs: from the start of the second trial to the last end ("running"), and from start to end of
the process. With ``--one-core``, all processes of each have one core, and one trial at a time. With ``--only-optuna``,
raypar without Ray is compared with Optuna alone.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from common import BASELINES, Figure, begin, parser_for, print_bar, print_row, progress, run_raypar, scratch, times
from study_process import results

from raypar.study.options import resolve
from raypar.workloads import mnist_mlp

MIN_AGAINST_TUNE, MIN_AGAINST_OPTUNA, MIN_AGAINST_OPTUNA_ON_ONE_CORE, MAX_WALL = 3.0, 1.7, 1.0, 2.0
MIN_WALL_WITHOUT_RAY = 1.0
STUDY = '''"""A search."""
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search.optuna import OptunaSearch
from raypar import Study, loguniform, randint
from raypar.workloads import mnist_mlp as workload
study = Study(
    workload=workload,
    name="search",
    space={{"lr": loguniform(0.01, 1.0), "hidden_size": randint(32, 257)}},
    num_trials={num_trials},
    config={{"epochs": 4, "batch_size": 256, "device": "cpu", "num_workers": 1}},
    searcher=OptunaSearch(seed=0),
    scheduler=ASHAScheduler(max_t=4, grace_period=1, reduction_factor=4),
    max_concurrent_trials={num_concurrent},
)
'''
Trials = Sequence[Sequence[float]]  # start, end, epochs of each


def by_raypar(num_trials: int, num_concurrent: int, *flags: str) -> Trials:
    with scratch() as folder:
        (folder / "search.py").write_text(STUDY.format(num_trials=num_trials, num_concurrent=num_concurrent))
        run_raypar(folder, "study", "search.py", *flags)
        return [[r.started_at, r.started_at + (r.wall_s or 0.0), len(r.reports)] for r in results(folder, "search")]


def by_baseline(name: str, num_trials: int, num_concurrent: int) -> Trials:
    config = {**resolve(mnist_mlp, {"batch_size": 256, "device": "cpu"}), "device": "cpu"}
    plain = {key: value for key, value in config.items() if isinstance(value, (str, int, float, bool, type(None)))}
    command = [sys.executable, BASELINES / "search_baselines.py", "--by", name, "--trials", num_trials]
    command += ["--config", json.dumps(plain), "--concurrent", num_concurrent]
    environment = {**os.environ, "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1", "OMP_NUM_THREADS": "1"}
    with scratch() as folder:
        done = subprocess.run(
            [*map(str, command)], cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    line = next(line for line in done.stdout.splitlines() if line.startswith("@@"))
    return list(json.loads(line.removeprefix("@@")))


def main() -> None:
    parser = parser_for(__doc__, rounds=3, needs_mnist=True)
    parser.add_argument("--trials", type=int, default=100, help="[default: %(default)s]")
    parser.add_argument("--at-a-time", type=int, default=2, help="[default: %(default)s]")
    parser.add_argument("--one-core", action="store_true")
    parser.add_argument("--only-optuna", action="store_true")
    args = begin(parser)
    if args.one_core:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        args.at_a_time = 1
    num_trials = 12 if args.quick else args.trials
    ways: dict[str, Callable[[], Trials]] = {
        "raypar": lambda: by_raypar(num_trials, args.at_a_time),
        "raypar without Ray": lambda: by_raypar(num_trials, args.at_a_time, "--no-ray"),
        "Ray Tune": lambda: by_baseline("tune", num_trials, args.at_a_time),
        "Ray Tune with kept actors": lambda: by_baseline("tune with kept actors", num_trials, args.at_a_time),
        "Optuna": lambda: by_baseline("optuna", num_trials, 1),
    }
    if args.only_optuna:
        ways = {name: ways[name] for name in ("raypar without Ray", "Optuna")}
    running: dict[str, list[float]] = {name: [] for name in ways}
    whole: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(args.rounds):
        for name in random.Random(i).sample(list(ways), len(ways)):
            begun_s = time.perf_counter()
            trials = sorted(ways[name]())
            wall_s = time.perf_counter() - begun_s
            epochs = sum(epochs for _, _, epochs in trials)
            first = trials[0]
            span_s = max(end for _, end, _ in trials) - first[1]
            running[name].append((epochs - first[2]) / span_s * 60)
            whole[name].append(epochs / wall_s * 60)
            rate = 60 * (len(trials) - 1) / span_s
            progress(f"round {i + 1}: {name}: {epochs:.0f} epochs, {wall_s:.1f} s, {rate:.0f} trials per minute")
    for name in ways:
        print_row(f"{name}: epochs per minute once running", Figure.of(running[name]).show("{:.0f}".format))
        print_row(f"{name}: epochs per minute, command to prompt", Figure.of(whole[name]).show("{:.0f}".format))
    for title, rates, bar in (
        ("raypar without Ray / Optuna, once running", running, None),
        ("raypar without Ray / Optuna, command to prompt", whole, MIN_WALL_WITHOUT_RAY),
    ):
        figure = Figure.ratio(rates["raypar without Ray"], rates["Optuna"])
        if bar is None:
            print_row(title, figure.show(times))
        else:
            print_bar(title, figure, times, at_least=bar)
    if args.only_optuna:
        return
    print_bar(
        "raypar / Ray Tune, once running",
        Figure.ratio(running["raypar"], running["Ray Tune"]),
        times,
        at_least=MIN_AGAINST_TUNE,
    )
    kept = Figure.ratio(running["raypar"], running["Ray Tune with kept actors"])
    print_row("raypar / Ray Tune with kept actors, once running", kept.show(times))
    print_bar(
        "raypar / Optuna, once running",
        Figure.ratio(running["raypar"], running["Optuna"]),
        times,
        at_least=MIN_AGAINST_OPTUNA if args.at_a_time > 1 else MIN_AGAINST_OPTUNA_ON_ONE_CORE,
    )
    print_bar(
        "Optuna / raypar, command to prompt", Figure.ratio(whole["Optuna"], whole["raypar"]), times, at_most=MAX_WALL
    )


if __name__ == "__main__":
    main()
