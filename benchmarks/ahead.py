"""Work ahead during a trial: its training time with and without.

Ahead means that the process of the next trial is forked and sleeps, and that the next trial begins while the driver
stores the previous result. Studies of `mnist_mlp` (on the data in RAYPAR_DATA_DIR, or in the cache) on one worker run
one after another on one private Ray, each with or without, in random order within each round. Each study has a gang,
and its first trial does not count. The interval is Student's, of the rounds' differences of the mean logarithm.

Besides, from the times of the trials: the time between the end of a trial and the start of the next.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import begin, parser_for, print_row, progress, scratch
from scipy import stats

from raypar import Study, grid, units
from raypar.run.cluster import this_machine
from raypar.run.private_ray import private_ray
from raypar.run.ranks import ForkServer
from raypar.run.runner import Event, TrialEnded
from raypar.run.tune import Ahead, TuneRunner
from raypar.study.trial import TrialResult
from raypar.train.affinity import allowed_cores, topology
from raypar.train.job import RunSettings
from raypar.workloads import mnist_mlp

CONFIDENCE = 0.9


def main() -> None:
    parser = parser_for(__doc__, rounds=16, quick_rounds=2, needs_mnist=True)
    parser.add_argument("--trials", type=int, default=13, help="of each study [default: %(default)s]")
    args = begin(parser)
    study = Study(
        workload=mnist_mlp,
        name="ahead",
        space={"num_workers": grid(1)},
        config={"epochs": 1, "device": "cpu"},
        num_repeats=args.trials,
    )
    logs: dict[bool, list[float]] = {True: [], False: []}
    gaps_s: dict[bool, list[float]] = {True: [], False: []}
    cores, shuffled = topology(allowed_cores()[:1]), random.Random(0)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(scratch())
        server = stack.enter_context(contextlib.closing(ForkServer.of(RunSettings(folder).revision())))
        own_ray = stack.enter_context(private_ray(this_machine()))
        how: dict[str, Any] = {"owns_cluster": True, "fork_addresses": {"": server.address}}
        how |= {"cores": cores, "own_ray": own_ray}
        ahead = Ahead(len(allowed_cores()), lambda: None)
        for i in range(args.rounds):
            for is_ahead in shuffled.sample([True, False], 2):
                settings = RunSettings(folder / f"{i}{is_ahead}")
                runner = TuneRunner(settings, **how, forks_ahead=is_ahead, ahead=ahead if is_ahead else None)
                results = run(runner, study, folder)
                logs[is_ahead].append(statistics.fmean(math.log(each.train_time_s or 0) for each in results[1:]))
                gaps_s[is_ahead] += gaps(results)
            progress(f"round {i + 1}: {logs[True][-1] - logs[False][-1]:+.1%}")
    for is_ahead in (False, True):
        name = "ahead" if is_ahead else "one after the other"
        print_row(f"{name}: training time", units.seconds(math.exp(statistics.fmean(logs[is_ahead]))))
        print_row(f"{name}: between two trials", units.seconds(statistics.median(gaps_s[is_ahead])))
    changes = [a - b for a, b in zip(logs[True], logs[False], strict=True)]
    center = statistics.fmean(changes)
    low, high = map(math.exp, stats.t.interval(CONFIDENCE, len(changes) - 1, center, stats.sem(changes)))
    print_row("training time, ahead / not, 90 % interval", f"{math.exp(center):.4f}  [{low:.4f}, {high:.4f}]")


def run(runner: TuneRunner, study: Study, folder: Path) -> list[TrialResult]:
    """Run the study's trials; return their results in order."""
    results: list[TrialResult] = []

    def listen(event: Event) -> None:
        if isinstance(event, TrialEnded):
            assert event.result.failure is None, event.result.failure
            results.append(event.result)
            (folder / "stored").write_text(event.result.to_json())

    runner.run(study, study.trials(), listen)
    return sorted(results, key=lambda result: result.started_at)


def gaps(results: Sequence[TrialResult]) -> list[float]:
    """Return the seconds between the end of each trial and the start of the next."""
    pairs = itertools.pairwise(results)
    return [after.started_at - before.started_at - (before.wall_s or 0) for before, after in pairs]


if __name__ == "__main__":
    main()
