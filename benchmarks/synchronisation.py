"""What it costs to bring two workers to the same weights: all-reduce (ddp) against gather and broadcast.

`fashion_mlp` on one worker and on two, with either strategy, one thread each: with the whole training set as a batch,
as "Parallelising deep networks with MPI and GPUs" has it, and with 500 images. The cost of a step's synchronisation is
what the step takes beyond half of the one worker's. Every round measures all of them in random order.
"""

from __future__ import annotations

import statistics
from functools import partial
from pathlib import Path

from common import Figure, begin, interleaved, local_trial, parser_for, scratch, tell, times

from raypar import units

WAYS = {"1 worker": (1, "ddp"), "ddp": (2, "ddp"), "gather_broadcast": (2, "gather_broadcast")}
# batch size, epochs: enough for a second or more
CASES = ((50_000, 20), (500, 4))


def step_time_s(folder: Path, num_workers: int, strategy: str, batch_size: int, epochs: int) -> float:
    """The median step of a trial, slowest rank."""
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
    return statistics.median(result.gang_step_times_s)


def main() -> None:
    parser = parser_for(__doc__, has_data=True)
    parser.add_argument("--rounds", type=int, default=5, help="[default: 5]")
    args = begin(parser)
    num_rounds = 1 if args.quick else args.rounds
    with scratch() as folder:
        for batch_size, epochs in CASES:
            found = interleaved(
                {
                    way: partial(step_time_s, folder, *how, batch_size, 2 if args.quick else epochs)
                    for way, how in WAYS.items()
                },
                num_rounds,
            )
            alone = found["1 worker"]
            tell(f"batch {batch_size}, 1 worker: a step", Figure.of(alone).show(units.seconds))
            for way in ("ddp", "gather_broadcast"):
                own = found[way]
                tell(f"batch {batch_size}, 2 workers, {way}: speedup", Figure.ratio(alone, own).show(times))
                cost = [step - one / 2 for step, one in zip(own, alone, strict=True)]
                tell(f"batch {batch_size}, 2 workers, {way}: synchronisation a step", Figure.of(cost).show(_signed))
            print(flush=True)


def _signed(seconds: float) -> str:
    return f"-{units.seconds(-seconds)}" if seconds < 0 else units.seconds(seconds)


if __name__ == "__main__":
    main()
