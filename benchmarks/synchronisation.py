"""Cost of synchronising two workers: all-reduce (ddp) against gather and broadcast.

`fashion_mlp` on one worker and on two, with either strategy, one thread each: with the whole training set as a batch,
as in "Parallelising deep networks with MPI and GPUs", and with 500 images. A step's synchronisation costs the time that
it takes beyond half of one worker's step. Every round measures all variants in random order.
"""

from __future__ import annotations

import statistics
from functools import partial
from pathlib import Path

from common import Figure, begin, interleaved, local_trial, parser_for, print_row, scratch, times

from raypar import units
from raypar.study.trial import gang_step_times_s

VARIANTS = {"1 worker": (1, "ddp"), "ddp": (2, "ddp"), "gather_broadcast": (2, "gather_broadcast")}
# batch size, epochs: enough for a second or more
CASES = ((50_000, 20), (500, 4))


def step_time_s(folder: Path, num_workers: int, strategy: str, batch_size: int, epochs: int) -> float:
    """Return the median step time of a trial, of the slowest rank."""
    config = {
        "num_workers": num_workers,
        "strategy": strategy,
        "batch_size": batch_size,
        "epochs": epochs,
        "eval_every_steps": epochs * -(-50_000 // batch_size),  # once, at the end
        "num_warmup_steps": 2,
        "keep_model": False,
        "device": "cpu",
    }
    result = local_trial("fashion_mlp", config, folder)
    return statistics.median(gang_step_times_s(result))


def main() -> None:
    args = begin(parser_for(__doc__, rounds=5, has_data=True))
    with scratch() as folder:
        for batch_size, epochs in CASES:
            num_epochs = 2 if args.quick else epochs
            steps_s = interleaved(
                {name: partial(step_time_s, folder, *how, batch_size, num_epochs) for name, how in VARIANTS.items()},
                args.rounds,
            )
            one_worker_s = steps_s.pop("1 worker")
            print_row(f"batch {batch_size}, 1 worker: a step", Figure.of(one_worker_s).show(units.seconds))
            for name, two_workers_s in steps_s.items():
                prefix = f"batch {batch_size}, 2 workers, {name}"
                print_row(f"{prefix}: speedup", Figure.ratio(one_worker_s, two_workers_s).show(times))
                cost_s = [step_s - one_s / 2 for step_s, one_s in zip(two_workers_s, one_worker_s, strict=True)]
                print_row(f"{prefix}: synchronisation a step", Figure.of(cost_s).show(_signed))
            print(flush=True)


def _signed(seconds: float) -> str:
    return f"-{units.seconds(-seconds)}" if seconds < 0 else units.seconds(seconds)


if __name__ == "__main__":
    main()
