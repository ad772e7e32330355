"""Speedup of two workers, and raypar's throughput against plain torchrun + DistributedDataParallel.

`mnist_cnn` with a global batch of 512, one thread and one core per rank; the same model, bytes and global batches for
all. Measured are raypar (trials without Ray: the same ranks, the same timed region as with it) on 1 worker, on 2
workers, and on 1 worker with 2 threads (the same resources as 2 workers), and baselines/torchrun_ddp.py on 2. Every
measurement has its own processes, in random order within each round; ratios are taken round by round.
"""

from __future__ import annotations

from functools import partial

from common import BASELINES, FOLDER, Figure, begin, interleaved, parser_for, print_bar, print_row, run_child, times

from raypar import units
from raypar.train.affinity import allowed_cores

WORKLOAD, BATCH_SIZE = "mnist_cnn", 512
MIN_AGAINST_TORCHRUN, MIN_SPEEDUP = 0.97, 1.8
ONE, TWO, TWO_THREADS = "raypar, 1 worker × 1 thread", "raypar, 2 workers × 1 thread", "raypar, 1 worker × 2 threads"
TORCHRUN = "torchrun + DDP, 2 ranks × 1 thread"


def main() -> None:
    parser = parser_for(__doc__, rounds=7, needs_mnist=True)
    parser.add_argument("--num-samples", type=int, default=8_192, help="a multiple of 512 [default: %(default)s]")
    parser.add_argument("--epochs", type=int, default=2, help="[default: %(default)s]")
    args = begin(parser)
    cores = allowed_cores()
    if len(cores) < 2:
        raise SystemExit("two workers need two cores")
    num_samples, epochs = (2_048, 1) if args.quick else (args.num_samples, args.epochs)
    task = [WORKLOAD, *("--batch-size", BATCH_SIZE), *("--num-samples", num_samples), *("--epochs", epochs)]

    def samples_per_s(*command: object) -> float:
        return float(run_child([str(word) for word in command])["samples_per_s"])

    def raypar(num_workers: int, num_threads: int) -> float:
        sizes = "--num-workers", num_workers, "--num-threads", num_threads
        return samples_per_s(FOLDER / "raypar_trial.py", *task, *sizes)

    def torchrun() -> float:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
        return samples_per_s(*launcher, BASELINES / "torchrun_ddp.py", *task, "--cores", *cores[:2])

    rates = interleaved(
        {
            ONE: partial(raypar, 1, 1),
            TWO: partial(raypar, 2, 1),
            TWO_THREADS: partial(raypar, 1, 2),
            TORCHRUN: torchrun,
        },
        args.rounds,
    )
    for name, values in rates.items():
        print_row(name, Figure.of(values).show(units.rate))
    for title, above, below, bar in (
        ("2 workers, raypar / torchrun", TWO, TORCHRUN, MIN_AGAINST_TORCHRUN),
        ("speedup of 2 workers × 1 thread", TWO, ONE, MIN_SPEEDUP),
        ("speedup of 1 worker × 2 threads (the same 2 cores)", TWO_THREADS, ONE, None),
        ("2 workers × 1 thread / 1 worker × 2 threads", TWO, TWO_THREADS, None),
    ):
        ratio = Figure.ratio(rates[above], rates[below])
        if bar is None:
            print_row(title, ratio.show(times))
        else:
            print_bar(title, ratio, times, at_least=bar)


if __name__ == "__main__":
    main()
