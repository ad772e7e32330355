"""Accuracy of the workloads with their defaults, on their whole data sets.

Nothing is timed; losses don't depend on the number of workers, so all cores are used (at most 2). `--only NAME` runs
one workload, `--quick` a small part of each. All of them take about half an hour on two cores; workloads whose data is
missing are skipped.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from pathlib import Path

from common import begin, local_trial, parser_for, print_bar, print_row, scratch, workload_named

from raypar import units
from raypar.errors import DataError
from raypar.study.options import resolve
from raypar.study.trial import TrialResult
from raypar.study.workload import Config
from raypar.train.affinity import allowed_cores

QUICK_SAMPLES = 2_048
IRIS_SEEDS = range(5)
MIN_OVER_MAJORITY = 1.25  # times the score of always predicting the most frequent class

Run = Callable[..., TrialResult]  # (workload's name, config, seed, **more of the config)


def percent(value: float) -> str:
    return f"{100 * value:.2f} %"


def best_accuracy(run: Run, name: str, bar: float, config: Mapping[str, object]) -> None:
    """Compare the best epoch's accuracy with its bar."""
    accuracies = [report["accuracy"] for report in run(name, config).reports]
    for epoch, accuracy in enumerate(accuracies, 1):
        print_row(f"{name}: accuracy after epoch {epoch}", percent(accuracy))
    print_bar(f"{name}: best of {units.counted(len(accuracies), 'epoch')}", max(accuracies), percent, at_least=bar)


def iris(run: Run) -> None:
    """Average over five seeds of weights and order, and over five splits: one split of thirty flowers proves little."""
    for name, key in (("seed", "seed"), ("split", "split_seed")):
        finals = [run("iris", {}, **{key: number}).final["accuracy"] for number in IRIS_SEEDS]
        print_row(f"iris: accuracy by {name}", ", ".join(map(percent, finals)))
        print_bar(f"iris: mean of {len(finals)} {name}s", statistics.mean(finals), percent, at_least=0.96)


def tweets(run: Run) -> None:
    """Compare accuracy and macro-F1 with those of always predicting the most frequent class."""
    result = run("tweets", {})
    data = workload_named("tweets").data
    assert data is not None
    val = data(result.spec.config).val
    assert val is not None
    counts = val.targets.bincount()
    share = float(counts.max() / counts.sum())
    f1 = 2 * share / (1 + share) / len(counts)  # of the predicted class; that of all others is 0
    for key, majority in (("accuracy", share), ("macro_f1", f1)):
        best = max(report[key] for report in result.reports)
        print_row(f"tweets: {key} of the majority class", percent(majority))
        title = f"tweets: {key}, best of {len(result.reports)}"
        print_bar(title, best, percent, at_least=MIN_OVER_MAJORITY * majority)


def gpt2_code(run: Run) -> None:
    """Check that the evaluation loss of a small model falls."""
    config = {"init": "scratch", "size": "tiny", "lr": 1e-3, "keep_model": False}
    losses = [report["val_loss"] for report in run("gpt2_code", config).reports]
    print_row("gpt2_code, scratch, tiny: eval loss", " ".join(f"{loss:.3f}" for loss in losses))
    falls = "reached" if losses[-1] < losses[0] and min(losses[-2:]) == min(losses) else "NOT REACHED"
    print_row("gpt2_code: eval loss falls", f"{losses[0]:.3f} to {losses[-1]:.3f}   bar: {falls}")


CASES: Mapping[str, Callable[[Run], None]] = {
    "iris": iris,
    "mnist_mlp": lambda run: best_accuracy(run, "mnist_mlp", 0.97, {}),
    "fashion_mlp": lambda run: best_accuracy(run, "fashion_mlp", 0.85, {"keep_model": False}),
    "tweets": tweets,
    "gpt2_code": gpt2_code,
    "mnist_cnn": lambda run: best_accuracy(run, "mnist_cnn", 0.99, {}),
}


def main() -> None:
    parser = parser_for(__doc__, has_data=True)
    parser.add_argument("--only", choices=tuple(CASES), action="append", help="run this workload; repeatable")
    parser.add_argument("--seed", type=int, default=0, help="[default: 0]")
    args = begin(parser)
    num_workers = min(2, len(allowed_cores()))
    with scratch() as folder:

        def run(name: str, config: Config, seed: int = args.seed, **more: object) -> TrialResult:
            full_config: dict[str, object] = {"num_workers": num_workers, "device": "cpu", **config, **more}
            if args.quick:
                size = {} if name in ("iris", "gpt2_code") else {"num_samples": QUICK_SAMPLES}
                full_config |= {"epochs": 1, **size}
            workload = workload_named(name)
            workload.prepare(resolve(workload, full_config))  # type: ignore[arg-type]
            result = local_trial(name, full_config, Path(folder), repeat=seed)
            print_row(f"{name}: training and evaluation", units.seconds(result.wall_s))
            return result

        for name in args.only or CASES:
            try:
                CASES[name](run)
            except DataError as error:
                print_row(f"{name}: SKIPPED", str(error))


if __name__ == "__main__":
    main()
