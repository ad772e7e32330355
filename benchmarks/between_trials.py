"""Time from the end of a trial's last evaluation to the first warm-up step of the next trial in the same gang.

A study of `mnist_mlp` (on the data in RAYPAR_DATA_DIR, or in the cache) as a user runs it, with raypar's time marks.
The first trials don't count: they load the data.
"""

from __future__ import annotations

import json

from common import Figure, begin, parser_for, print_bar, print_row, progress, run_raypar, scratch

from raypar import units
from raypar.trace import VARIABLE

MAX_S = {1: 0.06}
NUM_FIRST = 3  # trials
STUDY = '''"""Short trials, one after another."""
from raypar import Study, grid
from raypar.workloads import mnist_mlp as workload
study = Study(
    workload=workload,
    name="between",
    space={{"lr": grid(0.05, 0.1)}},
    num_repeats={num_repeats},
    config={{"epochs": 1, "batch_size": 256, "device": "cpu", "num_workers": {num_workers}}},
)
'''


def gaps_s(num_workers: int, num_trials: int) -> list[float]:
    with scratch() as folder:
        (folder / "between.py").write_text(STUDY.format(num_repeats=num_trials // 2, num_workers=num_workers))
        trace = folder / "trace"
        run_raypar(folder, "study", "between.py", **{VARIABLE: str(trace)})
        marks = sorted((json.loads(line) for line in trace.read_text().splitlines()), key=lambda mark: mark["at"])
    return between(marks)[NUM_FIRST:]


def between(marks: list[dict[str, object]]) -> list[float]:
    """Return the seconds from each rank's last evaluation to the next trial's first step, on the slowest rank."""
    seconds: list[float] = []
    evaluated_at = None
    for mark in marks:
        at = float(str(mark["at"]))
        if mark["what"] == "rank: evaluated":
            evaluated_at, is_first = at, True
        elif mark["what"] == "rank: first step" and evaluated_at is not None:
            if is_first:
                seconds.append(at - evaluated_at)
            seconds[-1], is_first = at - evaluated_at, False
    return seconds


def main() -> None:
    parser = parser_for(__doc__, needs_mnist=True)
    parser.add_argument("--trials", type=int, default=40, help="of each study [default: %(default)s]")
    args = begin(parser)
    for num_workers in (1, 2):
        seconds = gaps_s(num_workers, 8 if args.quick else args.trials)
        title = f"{units.counted(num_workers, 'worker')}: last evaluation to first step"
        if (most_s := MAX_S.get(num_workers)) is not None:
            print_bar(title, Figure.of(seconds), units.seconds, at_most=most_s)
        else:
            print_row(title, Figure.of(seconds).show(units.seconds))
        progress(f"{len(seconds)} of them")


if __name__ == "__main__":
    main()
