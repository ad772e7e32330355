"""Throughput of raypar's training loop against hand-written loops.

One worker, one thread, the same model and the same bytes. raypar's figure is `throughput_samples_per_s` of a trial
without Ray, which includes its clock (read every step), its record of losses, and an order of batches that doesn't
depend on the number of workers. The baselines are baselines/plain_loop.py (tensors in memory, no bookkeeping at all)
and baselines/torchvision_loop.py (torchvision's MNIST with transforms through torch's DataLoader). Every measurement is
a process on one and the same core (loader processes may use all), more than 2 s of steps after a warm-up, in random
order within each round; ratios are taken round by round.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from common import BASELINES, FOLDER, Figure, begin, interleaved, parser_for, print_bar, print_row, run_child, times

from raypar import units
from raypar.train.affinity import allowed_cores

# workload, batch size, (training samples, epochs), the same with --quick, bar against the plain loop
CASES = (
    ("mnist_mlp", 64, (60_000, 6), (60_000, 1), 0.95),
    ("mnist_cnn", 64, (8_192, 1), (1_024, 1), 0.97),
    ("mnist_cnn", 512, (8_192, 1), (2_048, 1), 0.97),
)
MIN_AGAINST_TORCHVISION = 5.0
LOADER_WORKERS = (0, 4)


def samples_per_s(
    script: Path, workload: str, batch_size: int, size: tuple[int, int], *more: str, core: int | None = None
) -> float:
    num_samples, epochs = map(str, size)
    sizes = ["--batch-size", str(batch_size), "--num-samples", num_samples, "--epochs", epochs]
    return float(run_child([script, workload, *sizes, *more], core)["samples_per_s"])


def compare(
    workload: str, batch_size: int, size: tuple[int, int], loader_size: tuple[int, int], bar: float, num_rounds: int
) -> None:
    """Measure one workload and batch size with raypar and the baselines; sizes are (training samples, epochs)."""
    core = allowed_cores()[0]  # the core that a trial without Ray leases for its only rank
    task = workload, batch_size
    variants = {
        "raypar": partial(samples_per_s, FOLDER / "raypar_trial.py", *task, size),
        "plain loop": partial(samples_per_s, BASELINES / "plain_loop.py", *task, size, core=core),
    }
    bars = {"plain loop": bar}
    if workload == "mnist_mlp":
        script = BASELINES / "torchvision_loop.py"
        for n in LOADER_WORKERS:
            name, more = f"torchvision, {n} loader processes", ("--num-loader-workers", str(n))
            variants[name] = partial(samples_per_s, script, *task, loader_size, *more, core=core)
            bars[name] = MIN_AGAINST_TORCHVISION
    rates = interleaved(variants, num_rounds)
    prefix = f"{workload}, batch {batch_size}"
    for name, values in rates.items():
        print_row(f"{prefix}, {name}", Figure.of(values).show(units.rate))
    for name, least in bars.items():
        print_bar(f"{prefix}, raypar / {name}", Figure.ratio(rates["raypar"], rates[name]), times, at_least=least)


def main() -> None:
    args = begin(parser_for(__doc__, rounds=7, needs_mnist=True))
    loader_size = (4_096, 1) if args.quick else (60_000, 1)
    for workload, batch_size, size, quick_size, bar in CASES:
        compare(workload, batch_size, quick_size if args.quick else size, loader_size, bar, args.rounds)


if __name__ == "__main__":
    main()
