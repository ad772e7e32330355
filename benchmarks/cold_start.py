"""Time from `raypar study FILE` to the first training step, from a cold start.

A tiny study on 2 workers (`digits`) runs as a process in an empty folder: new private Ray, new store, new gang. Its
processes mark the points they reach (RAYPAR_TRACE); a row shows the median time from the start of the process to a
mark, and in its title the time since the mark before. Processes run concurrently (Ray starts while the fork server
imports torch), so the time before a mark is not always spent on what the mark names.

For scale, `import torch` in a new interpreter is timed in the same rounds. `--other PATH` measures another checkout of
raypar in the same rounds, to show whether a change made the start slower.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from common import FOLDER, Figure, begin, interleaved, parser_for, print_bar, print_row, run_raypar, scratch, times

from raypar import units

MAX_COLD_START_S = 12.0
MAX_AGAINST_OTHER = 0.75
TRACE_VARIABLE = "RAYPAR_TRACE"
START, FIRST_STEP, END = "raypar study: process is started", "rank: first step", "raypar study: process has ended"
STUDY = '''"""A trial on several workers."""
from raypar import Study, grid
from raypar.workloads import digits

study = Study(workload=digits, space={{"num_workers": grid({num_workers})}}, num_repeats=1, config={{"epochs": 1}})
'''


def run_study(num_workers: int, checkout: Path) -> dict[str, float]:
    """Return the seconds from the start of the process to each mark, with the raypar of a checkout."""
    with scratch() as folder:
        (folder / "tiny.py").write_text(STUDY.format(num_workers=num_workers))
        trace = folder / "trace.jsonl"
        started_at = time.time()
        end_s = run_raypar(folder, "study", "tiny.py", PYTHONPATH=str(checkout), **{TRACE_VARIABLE: str(trace)})
        marks: dict[str, float] = {}
        for line in trace.read_text().splitlines():
            event = json.loads(line)
            name, at_s = event["what"], event["at"] - started_at
            # The slowest rank counts, since a step needs all ranks; of other marks, the first.
            marks[name] = max(at_s, marks.get(name, 0.0)) if name.startswith("rank:") else marks.get(name, at_s)
    return {START: 0.0, **marks, END: end_s}


def import_torch() -> float:
    begun_s = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - begun_s


def main() -> None:
    parser = parser_for(__doc__, rounds=7)
    parser.add_argument("--workers", type=int, default=2, help="[default: 2]")
    parser.add_argument("--other", type=Path, metavar="PATH", help="root of another checkout of raypar")
    args = begin(parser)
    runs: list[dict[str, float]] = []

    def first_step() -> float:
        runs.append(run_study(args.workers, FOLDER.parent))
        return runs[-1][FIRST_STEP]

    variants: dict[str, Callable[[], float]] = {"raypar": first_step, "import torch": import_torch}
    if args.other:
        variants["other"] = lambda: run_study(args.workers, args.other.resolve())[FIRST_STEP]
    times_s = interleaved(variants, args.rounds)
    names = {name for run in runs for name in run}
    timeline = {name: Figure.of([run[name] for run in runs if name in run]) for name in names}
    before_s = 0.0
    for name, figure in sorted(timeline.items(), key=lambda item: item[1].value):
        print_row(f"{name:<48} + {units.seconds(figure.value - before_s)}", figure.show(units.seconds))
        before_s = figure.value
    print()
    print_row("import torch", Figure.of(times_s["import torch"]).show(units.seconds))
    print_row("first step / import torch", Figure.ratio(times_s["raypar"], times_s["import torch"]).show(times))
    print_bar("raypar study to the first step", Figure.of(times_s["raypar"]), units.seconds, at_most=MAX_COLD_START_S)
    if args.other:
        print_row("other checkout to the first step", Figure.of(times_s["other"]).show(units.seconds))
        ratio = Figure.ratio(times_s["raypar"], times_s["other"])
        print_bar("this / other", ratio, times, at_most=MAX_AGAINST_OTHER)


if __name__ == "__main__":
    main()
