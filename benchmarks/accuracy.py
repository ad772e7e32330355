"""Whether the workloads learn what they should, with their defaults, on the whole of their data sets.

Nothing is timed here; the losses don't depend on the number of workers, so there are as many as cores (at most 2).
`--only NAME` runs one of them, `--quick` a small part of each. All of them take about half an hour on two cores; a
workload whose data is not to be had is left out, and said to be.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from pathlib import Path

from common import begin, local_trial, parser_for, scratch, tell

from raypar import units, workloads
from raypar.errors import DataError
from raypar.study.options import resolve
from raypar.study.trial import TrialResult
from raypar.study.workload import Config
from raypar.train.affinity import allowed_cores

QUICK_SAMPLES = 2_048
IRIS_SEEDS = range(5)
MIN_OVER_MAJORITY = 1.25  # "well over": a quarter more than whoever always says the most frequent class

Run = Callable[..., TrialResult]  # of a workload's name, a config, and maybe a seed or more of the config


def judged(what: str, value: float, bar: float) -> None:
    reached = "reached" if value >= bar else "NOT REACHED"
    tell(what, f"{100 * value:.2f} %   bar ≥ {100 * bar:.1f} %: {reached}")


def best_accuracy(run: Run, name: str, bar: float, config: Mapping[str, object]) -> None:
    result = run(name, config)
    accuracies = [report["accuracy"] for report in result.reports]
    for epoch, accuracy in enumerate(accuracies, 1):
        tell(f"{name}: accuracy after epoch {epoch}", f"{100 * accuracy:.2f} %")
    judged(f"{name}: best of {units.counted(len(accuracies), 'epoch')}", max(accuracies), bar)


def iris(run: Run) -> None:
    """With five seeds for weights and order; and, since one split of thirty flowers says little, with five splits."""
    for what, key in (("seeds", "seed"), ("splits", "split_seed")):
        finals = [run("iris", {}, **{key: number}).final["accuracy"] for number in IRIS_SEEDS]
        tell(f"iris: accuracy by {what[:-1]}", ", ".join(f"{100 * value:.1f} %" for value in finals))
        judged(f"iris: mean of {len(finals)} {what}", statistics.mean(finals), 0.96)


def tweets(run: Run) -> None:
    result = run("tweets", {})
    config = result.spec.config
    data = workloads.tweets.data
    assert data is not None
    val = data(config).val
    assert val is not None
    counts = val.targets.bincount()
    share = float(counts.max() / counts.sum())
    f1 = 2 * share / (1 + share) / len(counts)  # of the one class that is ever said; the others' are 0
    for key, majority in (("accuracy", share), ("macro_f1", f1)):
        best = max(report[key] for report in result.reports)
        tell(f"tweets: {key} of the majority class", f"{100 * majority:.2f} %")
        judged(f"tweets: {key}, best of {len(result.reports)}", best, MIN_OVER_MAJORITY * majority)


def gpt2_code(run: Run) -> None:
    config = {"init": "scratch", "size": "tiny", "lr": 1e-3, "keep_model": False}
    losses = [report["val_loss"] for report in run("gpt2_code", config).reports]
    tell("gpt2_code, scratch, tiny: eval loss", " ".join(f"{loss:.3f}" for loss in losses))
    fell = "reached" if losses[-1] < losses[0] and min(losses[-2:]) == min(losses) else "NOT REACHED"
    tell("gpt2_code: eval loss falls over the training", f"{losses[0]:.3f} to {losses[-1]:.3f}   bar: {fell}")


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
    parser.add_argument("--only", choices=tuple(CASES), action="append", help="this workload alone; may be repeated")
    parser.add_argument("--seed", type=int, default=0, help="[default: 0]")
    args = begin(parser)
    num_workers = min(2, len(allowed_cores()))
    with scratch() as folder:

        def run(name: str, config: Config, seed: int = args.seed, **more: object) -> TrialResult:
            whole: dict[str, object] = {"num_workers": num_workers, "device": "cpu", **config, **more}
            if args.quick:
                whole |= {"epochs": 1} if name in ("iris", "gpt2_code") else {"epochs": 1, "num_samples": QUICK_SAMPLES}
            workload = getattr(workloads, name)
            workload.prepare(resolve(workload, whole))  # type: ignore[arg-type]
            result = local_trial(name, whole, Path(folder), repeat=seed)
            tell(f"{name}: training and evaluation", units.seconds(result.wall_s))
            return result

        for name in args.only or CASES:
            try:
                CASES[name](run)
            except DataError as error:
                tell(f"{name}: LEFT OUT", str(error))


if __name__ == "__main__":
    main()
