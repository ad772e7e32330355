"""Where the wall time of a study goes: training, and everything else.

`raypar study` runs studies of 48 trials of one placement, as a user would, in an empty folder: `digits`, `mnist_mlp`
(on the data in RAYPAR_DATA_DIR, skipped without it) and a torchrun script, on 1 and 2 workers, with as many epochs as
take about 0.5, 1 and 5 s. The parts of a row add up to its wall time. Those of a trial come from the stored results,
those of the start and the end from the marks of its processes (RAYPAR_TRACE):

- train, evaluate: counted steps, and evaluations. For a script, its observed steps, warm-up included.
- data, warm-up: in the trial's ranks, once per trial.
- process: the rest of a trial: start of the ranks, process group, model, end of the ranks.
- between: from the end of a trial to the start of the next: hand-over, store, live view.
- command, plan, Ray, gang: before the first trial: Python and the command line; the study, its plan, checks and store;
  the start of Ray; the start of the first gang, up to the first trial.
- end: after the last trial: the last result, the end of Ray, the report.

`--trials 480 --seconds 1 --only digits` measures a long study.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass

from common import BASELINES, Figure, begin, parser_for, print_bar, print_row, progress, run_raypar, scratch, times
from study_process import results

from raypar import units
from raypar.study.trial import TrialResult
from raypar.trace import VARIABLE

WORKLOADS = {
    "digits": "from raypar.workloads import digits as workload",
    "mnist_mlp": "from raypar.workloads import mnist_mlp as workload",
    "torchrun script": f"""workload = Workload.from_command(
    "torchrun --standalone --nproc-per-node={{num_workers}} {BASELINES / "torchrun_train.py"} --epochs {{epochs}}")
import torch""",
}
STUDY = '''"""Trials of one placement."""
from raypar import Study, Workload, grid
{workload}
study = Study(
    workload=workload,
    name="overhead",
    space={{"num_workers": grid({num_workers})}},
    num_repeats={num_trials},
    config={{"epochs": {epochs}, "device": "cpu"}},
)
'''
MAX_RATIO, MAX_RATIO_LONG = 1.15, 1.10  # of 48 trials of about 2 s, and of 480 trials of about 1 s
STARTS = ("cli: starts", "ray: init", "ray: is up")


@dataclass(frozen=True)
class Split:
    """A study's wall time.

    Attributes:
        parts_s: in the order of the study; they add up to `wall_s`.
    """

    wall_s: float
    parts_s: dict[str, float]
    num_trials: int

    @property
    def ratio(self) -> float:
        return self.wall_s / (self.parts_s["train"] + self.parts_s["evaluate"])

    @property
    def per_trial_s(self) -> float:
        """Seconds of each trial that are neither training nor evaluation."""
        names = ("data", "warm-up", "process", "between")
        return sum(self.parts_s[name] for name in names) / self.num_trials


def run(workload: str, num_workers: int, num_trials: int, epochs: int) -> tuple[Split, list[TrialResult]]:
    """Run a study; return where its time went, and its results in the order of their start."""
    with scratch() as folder:
        text = STUDY.format(workload=WORKLOADS[workload], num_workers=num_workers, num_trials=num_trials, epochs=epochs)
        (folder / "overhead.py").write_text(text)
        trace = folder / "trace.jsonl"
        started_at = time.time()
        wall_s = run_raypar(folder, "study", "overhead.py", **{VARIABLE: str(trace)})
        events = [json.loads(line) for line in trace.read_text().splitlines()]
        found = sorted(results(folder, "overhead"), key=lambda result: result.started_at)
    assert len(found) == num_trials and not any(result.failure for result in found), found
    first = {event["what"]: event["at"] - started_at for event in reversed(events)}
    starts_s = [result.started_at - started_at for result in found]
    ends_s = [start_s + (result.wall_s or 0) for start_s, result in zip(starts_s, found, strict=True)]
    cli_s, init_s, up_s = (first[name] for name in STARTS)
    inside = {
        "data": sum(result.data_time_s or 0 for result in found),
        "warm-up": sum(result.warmup_s or 0 for result in found),
        "train": sum(result.train_time_s or 0 for result in found),
        "evaluate": sum(result.eval_time_s or 0 for result in found),
    }
    between_s = sum(start_s - end_s for start_s, end_s in zip(starts_s[1:], ends_s[:-1], strict=True))
    parts_s = {
        "command": cli_s,
        "plan": init_s - cli_s,
        "Ray": up_s - init_s,
        "gang": starts_s[0] - up_s,
        **inside,
        "process": ends_s[-1] - starts_s[0] - between_s - sum(inside.values()),
        "between": between_s,
        "end": wall_s - ends_s[-1],
    }
    return Split(wall_s, parts_s, num_trials), found


def epochs_for(workload: str, num_workers: int, seconds: float) -> int:
    """Return the number of epochs that take about as long, at least 1."""
    _, found = run(workload, num_workers, num_trials=3, epochs=2)
    of_epoch = Figure.of([((result.train_time_s or 0) + (result.eval_time_s or 0)) / 2 for result in found])
    return max(1, round(seconds / of_epoch.value))


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--only", choices=WORKLOADS, nargs="+", default=list(WORKLOADS), metavar="WORKLOAD")
    parser.add_argument("--workers", type=int, nargs="+", default=(1, 2), help="[default: 1 2]")
    parser.add_argument("--seconds", type=float, nargs="+", default=(0.5, 1.0, 5.0), help="[default: 0.5 1 5]")
    parser.add_argument("--trials", type=int, default=48, help="[default: %(default)s]")
    args = begin(parser)
    for workload in args.only:
        if workload == "mnist_mlp" and not os.environ.get("RAYPAR_DATA_DIR"):
            print_row(workload, "skipped: RAYPAR_DATA_DIR is not set")
            continue
        for num_workers in args.workers:
            for seconds in args.seconds:
                measure(workload, num_workers, seconds, 6 if args.quick else args.trials)


def measure(workload: str, num_workers: int, seconds: float, num_trials: int) -> None:
    """Run and print a study."""
    epochs = epochs_for(workload, num_workers, seconds)
    progress(f"{workload}, {num_workers} workers: {epochs} epochs")
    split, found = run(workload, num_workers, num_trials, epochs)
    of_trial = Figure.of([(result.train_time_s or 0) + (result.eval_time_s or 0) for result in found])
    title = f"{workload}, {units.counted(num_workers, 'worker')}, {num_trials} x {units.seconds(of_trial.value)}"
    print_row(title, ", ".join(f"{name} {part_s:.1f}" for name, part_s in split.parts_s.items()))
    print_row(f"{title}: beyond training, per trial", units.seconds(split.per_trial_s))
    if num_trials >= 480:
        print_bar(f"{title}: wall / training", split.ratio, times, at_most=MAX_RATIO_LONG)
    elif 1.5 <= of_trial.value <= 3:
        print_bar(f"{title}: wall / training", split.ratio, times, at_most=MAX_RATIO)
    else:
        print_row(f"{title}: wall / training", times(split.ratio))


if __name__ == "__main__":
    main()
