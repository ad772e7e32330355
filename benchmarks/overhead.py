"""What a trial costs beyond its training: empty trials in a warm gang, under torchrun, and as Ray's guide has it.

An empty trial imports torch, joins the others, does one all-reduce (where there are others) and reports. Three ways
are measured side by side, 1 and 2 workers: raypar's TuneRunner on a private Ray (a warm gang, each trial's ranks in
pristine processes), a loop of `torchrun --standalone`, and documented Tune + TorchTrainer (baselines/
documented_tune.py). The two Rays are up at the same time and wait while another's trial runs; who is next is random in
every round, and there is a pause before. In its turn raypar runs four trials, all of them counted: a study runs them
one after the other, too. A trial's time is from the moment at which the runner may go on from the last one to the
moment at which the driver has the next one's result. The first trial, which starts Ray's gang, is not counted.

Apart from that: what writing a trial's result into MLflow (the embedded SQLite store) takes.
"""

from __future__ import annotations

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
    answer,
    begin,
    empty_study,
    judge,
    parser_for,
    progress,
    run_on_ray,
    scratch,
    tell,
    times,
    wait_for_go,
)

from raypar import Study, units
from raypar.study.trial import TrialResult, TrialState
from raypar.units import counted

VARIANTS = ("raypar", "torchrun", "documented")
MAX_OVERHEAD_S = 0.2
MIN_AGAINST_TORCHRUN = 20.0
MIN_AGAINST_DOCUMENTED = 60.0
MAX_RECORD_S = 0.05
NUM_RECORDED, NUM_STEPS = 30, 2000
TRIALS_PER_TURN = {"raypar": 4, "torchrun": 1, "documented": 1}
PAUSE_S = 2.0  # what the last one has left behind may end


# ---- raypar's side, in a process of its own


def serve_raypar(num_workers: int, num_trials: int) -> None:
    """Run empty trials in one gang, one each time it is told to."""
    study = empty_study()
    begun_s = time.perf_counter()

    def listen(result: TrialResult) -> None:
        nonlocal begun_s
        seconds = time.perf_counter() - begun_s
        answer({"seconds": seconds, "sum": result.final["sum"], "pids": result.environment["pid"]})
        if not wait_for_go():
            raise SystemExit
        begun_s = time.perf_counter()

    point = {"num_workers": num_workers}
    run_on_ray(study, [study.trial(point, i, order=i) for i in range(num_trials)], listen)


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


def compare(num_workers: int, counts: dict[str, int], folder: Path) -> None:
    """Measure the variants in turns; `counts`: turns after the first trial of each."""
    scripts: dict[str, list[str | Path]] = {
        "raypar": [Path(__file__), "--serve"],
        "documented": [BASELINES / "documented_tune.py"],
    }
    who = counted(num_workers, "worker")
    children: dict[str, SteppedChild] = {}
    found: dict[str, list[float]] = {name: [] for name in counts}
    num_turns = dict.fromkeys(counts, 0)
    pids: set[int] = set()
    try:
        for name in counts:
            if name in scripts:
                progress(f"{who}: starting {name}")
                num_trials = 1 + counts[name] * TRIALS_PER_TURN[name] + 1  # it is left before the last one
                sizes = ["--num-workers", str(num_workers), "--num-trials", str(num_trials)]
                children[name] = SteppedChild([*scripts[name], *sizes], folder / f"{name}-{num_workers}.log")
                first = children[name].next_answer()
                tell(
                    f"{counted(num_workers, 'worker')}, {name}: start and first trial", units.seconds(first["seconds"])
                )
                pids.update(first.get("pids", ()))
        shuffled = random.Random(num_workers)
        for i in range(max(counts.values())):
            # Where a variant has fewer turns, they are spread over the rounds.
            names = [n for n, count in counts.items() if (i + 1) * count // max(counts.values()) > num_turns[n]]
            shuffled.shuffle(names)
            for name in names:
                time.sleep(PAUSE_S)
                num_turns[name] += 1
                for _ in range(TRIALS_PER_TURN[name]):
                    if name == "torchrun":
                        found[name].append(torchrun_trial(num_workers))
                        continue
                    got = children[name].step()
                    assert got["sum"] == num_workers, got
                    found[name].append(got["seconds"])
                    pids.update(got.get("pids", ()))
                progress(f"round {i + 1}: {name}: {found[name][-1]:.3f} s")
    finally:
        for child in children.values():
            child.__exit__()
    report(who, num_workers, found, len(pids))


def report(who: str, num_workers: int, found: dict[str, list[float]], num_processes: int) -> None:
    if "raypar" in found:
        warm = Figure.of(found["raypar"])
        judge(f"{who}, raypar, warm gang: per trial", warm, units.seconds, at_most=MAX_OVERHEAD_S)
        all_ranks = (len(found["raypar"]) + 1) * num_workers
        tell(f"{who}, raypar: processes for {all_ranks} ranks", f"{num_processes} (each pristine)")
    for name, bar in (("torchrun", MIN_AGAINST_TORCHRUN), ("documented", MIN_AGAINST_DOCUMENTED)):
        if name not in found:
            continue
        tell(f"{who}, {name}: per trial", Figure.of(found[name]).show(units.seconds))
        if "raypar" in found:
            # Each of the other's trials against raypar's median: there are fewer of them.
            ratio = Figure.of([seconds / warm.value for seconds in found[name]])
            judge(f"{who}, {name} / raypar", ratio, times, at_least=bar)
    print(flush=True)


# ---- writing results


def measure_recorder(num_trials: int) -> None:
    """`Recorder.record` of trials with three epochs and the raw times of 2 x 2,000 steps."""
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
        tell("MLflow: first use of a store (its schema)", units.seconds(time.perf_counter() - begun_s))
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
                environment={"node": ["node"] * 2, "cores": [[0], [1]], "num_threads": [1, 1]},
            )
            begun_s = time.perf_counter()
            recorder.record(result)
            seconds.append(time.perf_counter() - begun_s)
        assert recorder.close("finished") == 0, "the store did not take everything"
    judge("MLflow: Recorder.record, per trial", Figure.of(seconds[1:]), units.seconds, at_most=MAX_RECORD_S)


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--rounds", type=int, default=11, help="rounds after the first trial [default: 11]")
    parser.add_argument("--documented-trials", type=int, default=4, help="trials after the first [default: 4]")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--workers", nargs="+", type=int, default=(1, 2))
    for internal in ("--num-workers", "--num-trials"):
        parser.add_argument(internal, type=int, help="(internal)")
    parser.add_argument("--serve", action="store_true", help="(internal)")
    if "--serve" in sys.argv:
        args = parser.parse_args()
        serve_raypar(args.num_workers, args.num_trials)
        return
    args = begin(parser)
    counts = {"raypar": args.rounds, "torchrun": args.rounds, "documented": args.documented_trials}
    if args.quick:
        counts = {"raypar": 3, "torchrun": 2, "documented": 1}
    with scratch() as folder:
        for num_workers in args.workers:
            compare(num_workers, {name: counts[name] for name in VARIANTS if name in args.variants}, folder)
    measure_recorder(5 if args.quick else NUM_RECORDED)


if __name__ == "__main__":
    main()
