"""Overhead of a trial: empty trials in a warm gang, under torchrun, and as in Ray's guide.

An empty trial imports torch, joins the process group, does one all-reduce (if there are several workers) and reports.
Three variants are measured side by side, with 1 and 2 workers: raypar's TuneRunner on a private Ray (a warm gang, each
trial's ranks in pristine processes), a loop of `torchrun --standalone`, and documented Tune + TorchTrainer (baselines/
documented_tune.py). Both Rays stay up and idle while another variant runs; every round takes the variants in random
order, with a pause before each. raypar runs four trials per turn and all count, since a study also runs them back to
back. A trial's time is from the runner's permission to continue to the result's arrival at the driver. The first
trial, which starts Ray and its gang, is not counted. `--other PATH` measures the raypar of another checkout in the same
turns, to show whether a change made trials slower.

Separately: the time to write a trial's result to MLflow (the embedded SQLite store).
"""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import time
import uuid
from pathlib import Path

from common import (
    BASELINES,
    Figure,
    SteppedChild,
    begin,
    empty_study,
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

from raypar import Study, units
from raypar.study.conditions import Conditions
from raypar.study.trial import TrialResult, TrialSpec, TrialState

VARIANTS = ("raypar", "torchrun", "documented")
OTHER = "other"  # the raypar of another checkout
CONTINUOUS = ("raypar", OTHER)
MAX_OVERHEAD_S = {1: 0.05, 2: 0.08}  # by number of workers
MIN_AGAINST_TORCHRUN = {1: 50.0, 2: 30.0}
MIN_AGAINST_DOCUMENTED = 60.0
MAX_AGAINST_OTHER = 1.05
MAX_RECORD_S = 0.05
NUM_RECORDED, NUM_STEPS = 30, 2000
TRIALS_PER_TURN = dict.fromkeys(CONTINUOUS, 4)
PAUSE_S = 2.0  # for processes of the previous variant to end


# ---- raypar's trials, in a child process


def serve_raypar(num_workers: int, num_trials: int) -> None:
    """Run empty trials in one gang: one, then `num_trials` per request."""
    study, point, numbers = empty_study(), {"num_workers": num_workers}, itertools.count()

    def listen(result: TrialResult, time_s: float) -> None:
        send_result({"seconds": time_s, "sum": result.final["sum"], "pids": result.conditions.of_ranks("pid")})

    def trials(count: int) -> list[TrialSpec]:
        return [study.trial(point, i, order=i) for i in itertools.islice(numbers, count)]

    run_on_ray(study, trials(1), listen, more=lambda: trials(num_trials) if wait_for_go() else [])


# ---- the comparison


def torchrun_trial(num_workers: int) -> float:
    begun_s = time.perf_counter()
    subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(num_workers), str(BASELINES / "torchrun_noop.py")),
        ],
        check=True,
        capture_output=True,
    )
    return time.perf_counter() - begun_s


def compare(num_workers: int, counts: dict[str, int], folder: Path, other: Path | None) -> None:
    """Measure the variants in turns.

    Args:
        num_workers: of each trial.
        counts: the turns of each variant after its first trial.
        folder: for log files.
        other: the checkout of variant "other".
    """
    scripts: dict[str, list[str | Path]] = {
        "raypar": [Path(__file__), "--serve"],
        "documented": [BASELINES / "documented_tune.py"],
        OTHER: [Path(__file__), "--serve"],
    }
    prefix = units.counted(num_workers, "worker")
    children: dict[str, SteppedChild] = {}
    times_s: dict[str, list[float]] = {name: [] for name in counts}
    num_turns = dict.fromkeys(counts, 0)
    pids: set[int] = set()
    try:
        for name in counts:
            if name in scripts:
                progress(f"{prefix}: starting {name}")
                # Trials of a turn run one after another, as in a study. The first one also waits for the driver.
                num_trials = 1 + TRIALS_PER_TURN[name] if name in CONTINUOUS else counts[name] + 2
                sizes = ["--num-workers", str(num_workers), "--num-trials", str(num_trials)]
                log_path = folder / f"{name}-{num_workers}.log"
                checkout = other if name == OTHER else None
                children[name] = SteppedChild([*scripts[name], *sizes], log_path, checkout)
                first = children[name].next_result()
                print_row(f"{prefix}, {name}: start and first trial", units.seconds(first["seconds"]))
                if name == "raypar":
                    pids.update(first["pids"])
        shuffled = random.Random(num_workers)
        for i in range(max(counts.values())):
            # A variant with fewer turns has them spread over the rounds.
            names = [n for n, count in counts.items() if (i + 1) * count // max(counts.values()) > num_turns[n]]
            shuffled.shuffle(names)
            for name in names:
                time.sleep(PAUSE_S)
                num_turns[name] += 1
                if name == "torchrun":
                    times_s[name].append(torchrun_trial(num_workers))
                elif name in CONTINUOUS:
                    waited, *results = children[name].step(1 + TRIALS_PER_TURN[name])
                    times_s[name] += [result["seconds"] for result in results]
                    assert all(result["sum"] == num_workers for result in (waited, *results))
                    if name == "raypar":
                        pids.update(*(result["pids"] for result in (waited, *results)))
                else:
                    (result,) = children[name].step()
                    assert result["sum"] == num_workers, result
                    times_s[name].append(result["seconds"])
                progress(f"round {i + 1}: {name}: {times_s[name][-1]:.3f} s")
    finally:
        for child in children.values():
            child.close()
    report(prefix, num_workers, times_s, len(pids))


def report(prefix: str, num_workers: int, times_s: dict[str, list[float]], num_processes: int) -> None:
    if "raypar" in times_s:
        warm = Figure.of(times_s["raypar"])
        at_most = MAX_OVERHEAD_S.get(num_workers)
        print_bar(f"{prefix}, raypar, warm gang: per trial", warm, units.seconds, at_most=at_most)
        num_ranks = (len(times_s["raypar"]) + 1) * num_workers
        print_row(f"{prefix}, raypar: processes for {num_ranks} ranks", str(num_processes))
    if OTHER in times_s:
        print_row(f"{prefix}, other checkout: per trial", Figure.of(times_s[OTHER]).show(units.seconds))
        ratio = Figure.of([mine / others for mine, others in zip(times_s["raypar"], times_s[OTHER], strict=True)])
        print_bar(f"{prefix}, raypar / other checkout", ratio, times, at_most=MAX_AGAINST_OTHER)
    of_torchrun = MIN_AGAINST_TORCHRUN.get(num_workers)
    for name, bar in (("torchrun", of_torchrun), ("documented", MIN_AGAINST_DOCUMENTED)):
        if name not in times_s:
            continue
        print_row(f"{prefix}, {name}: per trial", Figure.of(times_s[name]).show(units.seconds))
        if "raypar" in times_s:
            # Against raypar's median, since the baselines have fewer trials.
            ratio = Figure.of([time_s / warm.value for time_s in times_s[name]])
            print_bar(f"{prefix}, {name} / raypar", ratio, times, at_least=bar)
    print(flush=True)


# ---- writing results


def measure_recorder(num_trials: int) -> None:
    """Time `Recorder.record` for trials with three epochs and the raw times of 2 x 2,000 steps."""
    from raypar.track.recorder import Execution, Recorder
    from raypar.track.store import default_tracking_uri
    from raypar.workloads import mnist_mlp

    study = Study(workload=mnist_mlp, config={"num_workers": 2}, name="benchmark")
    epoch = {"train_loss": 0.3, "val_loss": 0.2, "accuracy": 0.94, "train_time_s": 1.5, "eval_time_s": 0.1}
    with scratch() as folder:
        execution = Execution(uid=uuid.uuid4().hex, study=study.name, started_at=time.time())
        recorder = Recorder(execution, tracking_uri=default_tracking_uri(folder), project_dir=folder)
        begun_s = time.perf_counter()
        recorder.start()
        print_row("MLflow: first use of a store (its schema)", units.seconds(time.perf_counter() - begun_s))
        seconds = []
        for i in range(num_trials + 1):
            result = TrialResult(
                spec=study.trial({}, i, order=i),
                state=TrialState.FINISHED,
                started_at=time.time(),
                wall_s=5.0,
                train_time_s=4.5,
                eval_time_s=0.3,
                throughput_samples_per_s=40_000.0,
                reports=tuple({"epoch": float(n), **epoch} for n in (1, 2, 3)),
                step_times_s=((0.0015,) * NUM_STEPS,) * 2,
                conditions=Conditions.from_stored({"node": ["node"] * 2, "cores": [[0], [1]], "num_threads": [1, 1]}),
            )
            begun_s = time.perf_counter()
            recorder.record(result)
            seconds.append(time.perf_counter() - begun_s)
        assert recorder.close("finished") == 0, "some records did not reach the store"
    print_bar("MLflow: Recorder.record, per trial", Figure.of(seconds[1:]), units.seconds, at_most=MAX_RECORD_S)


def main() -> None:
    parser = parser_for(__doc__, rounds=11, quick_rounds=3)
    parser.add_argument("--documented-trials", type=int, default=4, help="after the first [default: %(default)s]")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--workers", nargs="+", type=int, default=(1, 2))
    parser.add_argument(
        "--other", type=Path, metavar="PATH", help="another checkout of raypar, measured beside this one"
    )
    for internal in ("--num-workers", "--num-trials"):
        parser.add_argument(internal, type=int, help="(internal)")
    parser.add_argument("--serve", action="store_true", help="(internal)")
    if "--serve" in sys.argv:
        args = parser.parse_args()
        serve_raypar(args.num_workers, args.num_trials)
        return
    args = begin(parser)
    counts = {"raypar": args.rounds, OTHER: args.rounds, "torchrun": args.rounds, "documented": args.documented_trials}
    variants = [*args.variants, *([OTHER] if args.other else [])]
    if args.quick:
        counts |= {"torchrun": 2, "documented": 1}
    with scratch() as folder:
        for num_workers in args.workers:
            compare(num_workers, {name: counts[name] for name in counts if name in variants}, folder, args.other)
    measure_recorder(5 if args.quick else NUM_RECORDED)


if __name__ == "__main__":
    main()
