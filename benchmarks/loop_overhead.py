"""What raypar's training loop costs against loops written by hand, in samples per second.

One worker, one thread, the same model and the same bytes. raypar's number is `throughput_samples_per_s` of a trial
without Ray: its clock, which it reads every step, its bookkeeping of losses, and its order of batches that doesn't
depend on the number of workers are all in it. Against it stand baselines/plain_loop.py (tensors in memory, no
bookkeeping at all) and baselines/torchvision_loop.py (torchvision's MNIST with transforms through torch's DataLoader).
Every measurement is a process of its own on one and the same core (the DataLoader's own processes may use all), more
than 2 s of steps after a warm-up, in random order in every round; ratios are taken round by round.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from common import (
    BASELINES,
    Figure,
    answer,
    begin,
    interleaved,
    judge,
    local_trial,
    measured_in_child,
    parser_for,
    rate,
    scratch,
    tell,
    times,
)

from raypar.train.affinity import allowed_cores

# workload, batch size, (training samples, epochs), the same with --quick, bar against the plain loop
CASES = (
    ("mnist_mlp", 64, (60_000, 6), (60_000, 1), 0.95),
    ("mnist_cnn", 64, (8_192, 1), (1_024, 1), 0.97),
    ("mnist_cnn", 512, (8_192, 1), (2_048, 1), 0.97),
)
MIN_AGAINST_TORCHVISION = 5.0
LOADER_WORKERS = (0, 4)


def measure_raypar(workload: str, batch_size: int, num_samples: int, epochs: int) -> None:
    """In a child: one trial on one core."""
    config = {"batch_size": batch_size, "num_samples": num_samples, "epochs": epochs, "device": "cpu"}
    with scratch() as folder:
        result = local_trial(workload, config, folder)
    assert result.environment["num_threads"] == [1]
    answer({"samples_per_s": result.throughput_samples_per_s, "seconds": result.train_time_s})


def compare(
    workload: str, batch_size: int, size: tuple[int, int], loader_size: tuple[int, int], bar: float, num_rounds: int
) -> None:
    core = allowed_cores()[0]  # where a trial without Ray puts its only rank

    def in_child(script: Path, num_samples: int, epochs: int, *more: str, on_core: bool = True) -> float:
        sizes = ["--batch-size", str(batch_size), "--num-samples", str(num_samples), "--epochs", str(epochs)]
        found = measured_in_child([script, workload, *sizes, *more], core if on_core else None)
        return float(found["samples_per_s"])

    def torchvision(num_loader_workers: int) -> float:
        more = ("--num-loader-workers", str(num_loader_workers))
        return in_child(BASELINES / "torchvision_loop.py", *loader_size, *more)

    variants: dict[str, Callable[[], float]] = {
        "raypar": lambda: in_child(Path(__file__), *size, "--measure", on_core=False),  # the trial takes its core
        "plain loop": lambda: in_child(BASELINES / "plain_loop.py", *size),
    }
    bars = {"plain loop": bar}
    if workload == "mnist_mlp":
        for n in LOADER_WORKERS:
            name = f"torchvision, {n} loader processes"
            variants[name], bars[name] = partial(torchvision, n), MIN_AGAINST_TORCHVISION
    found = interleaved(variants, num_rounds)
    who = f"{workload}, batch {batch_size}"
    for name, values in found.items():
        tell(f"{who}, {name}", Figure.of(values).show(rate))
    for name, least in bars.items():
        judge(f"{who}, raypar / {name}", Figure.ratio(found["raypar"], found[name]), times, at_least=least)
    print(flush=True)


def main() -> None:
    parser = parser_for(__doc__, needs_mnist=True)
    parser.add_argument("--rounds", type=int, default=7, help="[default: 7]")
    if "--measure" in sys.argv:
        parser.add_argument("workload")
        parser.add_argument("--measure", action="store_true")
        for name in ("--batch-size", "--num-samples", "--epochs"):
            parser.add_argument(name, type=int)
        args = parser.parse_args()
        measure_raypar(args.workload, args.batch_size, args.num_samples, args.epochs)
        return
    args = begin(parser)
    for workload, batch_size, size, quick_size, bar in CASES:
        chosen = quick_size if args.quick else size
        loader_size = (4_096, 1) if args.quick else (60_000, 1)
        compare(workload, batch_size, chosen, loader_size, bar, 1 if args.quick else args.rounds)


if __name__ == "__main__":
    main()
