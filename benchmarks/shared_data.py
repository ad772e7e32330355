"""Shared data: training time of a trial, and its time beyond training, with shared data and with its own.

Trials of `mnist_mlp` (on the data in RAYPAR_DATA_DIR, or in the cache) on one worker, one after another, in random
order within each pair. The first two pairs, whose trials load the data in any case, are not counted.
"""

from __future__ import annotations

import random
from dataclasses import replace

from common import Figure, begin, parser_for, print_row, scratch, times

from raypar import Study, grid, units
from raypar.run.local import LocalRunner
from raypar.run.runner import Event, TrialEnded
from raypar.study.trial import TrialResult
from raypar.train.affinity import host_cores
from raypar.train.job import RunSettings
from raypar.workloads import mnist_mlp

NUM_UNCOUNTED = 2


def main() -> None:
    args = begin(parser_for(__doc__, rounds=90, quick_rounds=3))
    train_s: dict[bool, list[float]] = {True: [], False: []}
    beyond_s: dict[bool, list[float]] = {True: [], False: []}
    shuffled = random.Random(0)
    with scratch() as folder, LocalRunner(RunSettings(folder), host_cores()) as runner:
        for i in range(args.rounds + NUM_UNCOUNTED):
            for is_shared in shuffled.sample([True, False], 2):
                result = run(runner, i, is_shared=is_shared)
                train_time_s = result.train_time_s or 0.0
                if i >= NUM_UNCOUNTED:
                    train_s[is_shared].append(train_time_s)
                    beyond_s[is_shared].append((result.wall_s or 0.0) - train_time_s - (result.eval_time_s or 0.0))
    for name, seconds in (("training", train_s), ("beyond training and evaluation", beyond_s)):
        for is_shared in (True, False):
            title = f"{name}, {'shared' if is_shared else 'own'} data"
            print_row(title, Figure.of(seconds[is_shared]).show(units.seconds))
        print_row(f"{name}, shared / own", Figure.ratio(seconds[True], seconds[False]).show(times))


def run(runner: LocalRunner, number: int, *, is_shared: bool) -> TrialResult:
    """Run a trial."""
    study = Study(
        workload=replace(mnist_mlp, share_data=is_shared),
        name="shared",
        space={"num_workers": grid(1)},
        config={"epochs": 1, "device": "cpu", "batch_size": 128},
        num_repeats=1,
    )
    results: list[TrialResult] = []

    def listen(event: Event) -> None:
        if isinstance(event, TrialEnded):
            results.append(event.result)

    runner.run(study, [study.trial({"num_workers": 1}, number, order=number)], listen)
    (result,) = results
    assert result.failure is None, result.failure
    return result


if __name__ == "__main__":
    main()
