"""Growth of trial time and driver memory over a thousand trials.

A study as a user runs it, in a process: empty trials on one worker, each a point of its own, of a grid with a baseline
or (``--search``) drawn one by one. The driver keeps all results, writes them to the store and shows the leading point.
Times from one trial's start to the next, and the driver's memory (RSS; PSS, which divides shared pages among processes)
are compared between the first and the last hundred trials, without the very first.
"""

from __future__ import annotations

import bisect
import itertools
import time

import psutil
from common import Figure, begin, parser_for, print_bar, print_row, progress, scratch, times
from study_process import output, results, start

from raypar import units

MAX_SLOWDOWN = 1.1
MAX_GROWTH_BYTES = 30e6
SAMPLE_S = 0.5
STUDY = '''"""Empty trials."""
import ray.train
from raypar import Study, Workload, grid, uniform

def loop(config):
    ray.train.report({{"score": config["x"]}})

study = Study(
    workload=Workload.from_train_loop(loop, options={{"x": 0.0}}),
    name="many",
    metric="score",
    config={{"num_workers": 1, "device": "cpu"}},
    {space}
)
'''
GRID = 'space={{"x": grid(*map(float, range({count})))}}, num_repeats=1, baseline={{"x": 0.0}},'
SEARCH = 'space={{"x": uniform(0.0, 1.0)}}, num_trials={count},'


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--trials", type=int, default=1000, help="[default: %(default)s]")
    parser.add_argument("--search", action="store_true", help="points are drawn one by one")
    args = begin(parser)
    count = 40 if args.quick else args.trials
    span = min(100, (count - 1) // 2)
    space = (SEARCH if args.search else GRID).format(count=count)
    memory: list[tuple[float, float, float]] = []  # Unix time, RSS and PSS in bytes
    with scratch() as folder:
        (folder / "many.py").write_text(STUDY.format(space=space))
        process = start(folder, "study", "many.py")
        driver = psutil.Process(process.pid)
        while process.poll() is None:
            try:
                now = driver.memory_full_info()
            except psutil.Error:  # it has just ended
                break
            memory.append((time.time(), now.rss, getattr(now, "pss", now.uss)))
            if len(memory) % 60 == 0:
                progress(f"{units.seconds(len(memory) * SAMPLE_S)}, {units.size(now.rss)}")
            time.sleep(SAMPLE_S)
        if process.wait():
            raise SystemExit(output(folder)[-3000:])
        trials = sorted(results(folder, "many"), key=lambda result: result.started_at)
    assert len(trials) == count
    assert len({result.conditions.gang for result in trials}) == 1, "more than one gang"
    starts = [result.started_at for result in trials]
    seconds = [after - before for before, after in itertools.pairwise(starts)]
    early, late = Figure.of(seconds[1 : 1 + span]), Figure.of(seconds[-span:])
    print_row(f"start to start, first {span}", early.show(units.seconds))
    print_row(f"start to start, last {span}", late.show(units.seconds))
    relative = Figure.of([time_s / early.value for time_s in seconds[-span:]])
    print_bar("time per trial, last / first", relative, times, at_most=MAX_SLOWDOWN)
    at = [moment for moment, _, _ in memory]
    for i, name in ((1, "RSS"), (2, "PSS")):
        values = [memory[min(bisect.bisect(at, moment), len(memory) - 1)][i] for moment in starts]
        before = Figure.of(values[1 : 1 + span])
        print_row(f"driver's {name}, first {span}", before.show(units.size))
        growth = Figure.of([value - before.value for value in values[-span:]])
        print_bar(f"driver's {name}: growth to the last {span}", growth, units.size, at_most=MAX_GROWTH_BYTES)


if __name__ == "__main__":
    main()
