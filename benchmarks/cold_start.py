"""From `raypar study FILE` to the first training step, where nothing is warm.

A tiny study on 2 workers (`digits`) runs as a process of its own in an empty folder: a new private Ray, a new store, a
new gang. The processes mark what they reach (RAYPAR_TRACE); shown are the medians of when each mark is first reached
after the start of the process, and what lies between them. Things go on side by side (Ray starts while the fork
server imports torch), so what lies between two marks is not always what the second one names.

In turns with it, as a measure of how fast this machine is at the moment: `import torch` in a new interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from common import LOG_TAIL_CHARS, Figure, begin, interleaved, judge, parser_for, scratch, tell, times

from raypar import units

MAX_COLD_START_S = 12.0
TRACE_VARIABLE = "RAYPAR_TRACE"
START, FIRST_STEP, END = "raypar study: process is started", "rank: first step", "raypar study: process has ended"
STUDY = '''"""A trial on two workers."""
from raypar import Study, grid
from raypar.workloads import digits

study = Study(workload=digits, space={"num_workers": grid(2)}, num_repeats=1, config={"epochs": 1})
'''


def run_study(num_workers: int) -> dict[str, float]:
    """Seconds from the start of the process to each mark."""
    with scratch() as folder:
        (folder / "tiny.py").write_text(STUDY.replace("grid(2)", f"grid({num_workers})"))
        trace = folder / "trace.jsonl"
        environment = {key: value for key, value in os.environ.items() if key != "MLFLOW_TRACKING_URI"}
        command = [sys.executable, "-c", "from raypar.cli import main; main()", "study", "tiny.py"]
        started_at = time.time()
        done = subprocess.run(
            command,
            cwd=folder,
            env={**environment, TRACE_VARIABLE: str(trace)},
            capture_output=True,
            text=True,
            check=False,
        )
        ended_at = time.time()
        if done.returncode:
            logs = "".join(path.read_text(errors="replace") for path in Path(folder).glob(".raypar/logs/driver.log"))
            said = (done.stdout + done.stderr + logs)[-LOG_TAIL_CHARS:]
            raise SystemExit(f"raypar study ended with exit code {done.returncode}:\n{said}")
        marks: dict[str, float] = {}
        for line in trace.read_text().splitlines():
            found = json.loads(line)
            what, at_s = found["what"], found["at"] - started_at
            # Of a rank's marks, the slowest rank's: the step needs them all.
            marks[what] = max(at_s, marks.get(what, 0.0)) if what.startswith("rank:") else marks.get(what, at_s)
    return {START: 0.0, **marks, END: ended_at - started_at}


def import_torch() -> float:
    begun_s = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - begun_s


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="[default: 7]")
    parser.add_argument("--workers", type=int, default=2, help="[default: 2]")
    args = begin(parser)
    runs: list[dict[str, float]] = []

    def raypar_study() -> float:
        runs.append(run_study(args.workers))
        return runs[-1][FIRST_STEP]

    found = interleaved({"raypar": raypar_study, "import torch": import_torch}, 1 if args.quick else args.rounds)
    whats = {what for run in runs for what in run}
    timeline = {what: Figure.of([run[what] for run in runs if what in run]) for what in whats}
    before_s = 0.0
    for what, figure in sorted(timeline.items(), key=lambda item: item[1].value):
        tell(f"{what:<48} + {units.seconds(figure.value - before_s)}", figure.show(units.seconds))
        before_s = figure.value
    print()
    tell("import torch", Figure.of(found["import torch"]).show(units.seconds))
    tell("first step / import torch", Figure.ratio(found["raypar"], found["import torch"]).show(times))
    judge("raypar study to the first step", Figure.of(found["raypar"]), units.seconds, at_most=MAX_COLD_START_S)


if __name__ == "__main__":
    main()
