"""What two workers bring, and what raypar costs them against plain torchrun + DistributedDataParallel.

`mnist_cnn` with a global batch of 512, one thread per rank, each rank on a core of its own; the same model, bytes and
global batches for all. Measured are raypar (trials without Ray: the same ranks, the same timed region as with it) on
1 worker, on 2 workers, and on 1 worker with 2 threads (the same resources as 2 workers), and
baselines/torchrun_ddp.py on 2. Every measurement is a set of processes of its own, in random order in every round;
ratios are taken round by round.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

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

WORKLOAD, BATCH_SIZE = "mnist_cnn", 512
MIN_AGAINST_TORCHRUN, MIN_SPEEDUP = 0.97, 1.8
ONE, TWO, TWO_THREADS = "raypar, 1 worker × 1 thread", "raypar, 2 workers × 1 thread", "raypar, 1 worker × 2 threads"
TORCHRUN = "torchrun + DDP, 2 ranks × 1 thread"


def measure_raypar(num_workers: int, num_threads: int, num_samples: int, epochs: int) -> None:
    """In a child: one trial."""
    config: dict[str, Any] = {
        "batch_size": BATCH_SIZE,
        "num_workers": num_workers,
        "cpus_per_worker": num_threads,
        "num_samples": num_samples,
        "epochs": epochs,
        "device": "cpu",
    }
    with scratch() as folder:
        result = local_trial(WORKLOAD, config, folder)
    assert result.environment["num_threads"] == [num_threads] * num_workers
    answer({"samples_per_s": result.throughput_samples_per_s, "seconds": result.train_time_s})


def main() -> None:
    parser = parser_for(__doc__, needs_mnist=True)
    parser.add_argument("--rounds", type=int, default=7, help="[default: 7]")
    parser.add_argument("--num-samples", type=int, default=8_192, help="a multiple of 512 [default: 8192]")
    parser.add_argument("--epochs", type=int, default=2, help="[default: 2]")
    if "--measure" in sys.argv:
        parser.add_argument("--measure", nargs=2, type=int, metavar=("WORKERS", "THREADS"))
        args = parser.parse_args()
        measure_raypar(*args.measure, args.num_samples, args.epochs)
        return
    args = begin(parser)
    cores = allowed_cores()
    if len(cores) < 2:
        raise SystemExit("two workers need two cores")
    num_samples, epochs = (2_048, 1) if args.quick else (args.num_samples, args.epochs)
    sizes = ["--num-samples", str(num_samples), "--epochs", str(epochs)]

    def raypar_of(num_workers: int, num_threads: int) -> float:
        found = measured_in_child([Path(__file__), *sizes, "--measure", str(num_workers), str(num_threads)])
        return float(found["samples_per_s"])

    def torchrun() -> float:
        script = [BASELINES / "torchrun_ddp.py", WORKLOAD, "--batch-size", str(BATCH_SIZE), *sizes]
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        return float(measured_in_child([*torchrun, *script, "--cores", *map(str, cores[:2])])["samples_per_s"])

    found = interleaved(
        {
            ONE: lambda: raypar_of(1, 1),
            TWO: lambda: raypar_of(2, 1),
            TWO_THREADS: lambda: raypar_of(1, 2),
            TORCHRUN: torchrun,
        },
        1 if args.quick else args.rounds,
    )
    for name, values in found.items():
        tell(name, Figure.of(values).show(rate))
    judge(
        "2 workers, raypar / torchrun", Figure.ratio(found[TWO], found[TORCHRUN]), times, at_least=MIN_AGAINST_TORCHRUN
    )
    judge("speedup of 2 workers × 1 thread", Figure.ratio(found[TWO], found[ONE]), times, at_least=MIN_SPEEDUP)
    tell("speedup of 1 worker × 2 threads (the same 2 cores)", Figure.ratio(found[TWO_THREADS], found[ONE]).show(times))
    tell("2 workers × 1 thread / 1 worker × 2 threads", Figure.ratio(found[TWO], found[TWO_THREADS]).show(times))


if __name__ == "__main__":
    main()
