"""Run time of `raypar list` and `raypar report` on a store of 10,000 trials.

One trial of `digits` is run; all other results are derived from it, and raypar's recorder writes them to an embedded
MLflow database and its folder: files one by one, rows in bulk (`store_rows.py`). The trials belong to a study of 5,000
(500 points, 10 repeats), a search of 2,500 (random points, each run once) and five studies of 500. With --hard there is
one study of 10,000 (1,000 points, 10 repeats); with --remote the commands read the store through an MLflow server on
this machine. Every command is a process, in random order within each round, together with a bare `import mlflow`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from common import (
    Figure,
    begin,
    interleaved,
    local_trial,
    parser_for,
    print_bar,
    print_row,
    progress,
    run_raypar,
    scratch,
    times,
)
from store_rows import RowWriter

from raypar import Study, grid, units
from raypar.analysis.analyse import pair_speedups
from raypar.analysis.question import question_of, question_to_dict
from raypar.study.conditions import Conditions
from raypar.study.space import loguniform, randint
from raypar.study.trial import TrialResult, TrialSpec
from raypar.track.recorder import Execution, Recorder
from raypar.track.server import start_server
from raypar.workloads import digits

MAX_LIST_S = 2.0
MAX_REPORT_S = 15.0
MAX_PAGE_BYTES = 2e6
NUM_SMALL, NUM_REPEATS = 5, 10
IMPORTING = "python -c 'import mlflow'"
QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true"}


def main() -> None:
    parser = parser_for(__doc__, rounds=3)
    parser.add_argument("--hard", action="store_true", help="all trials in one study")
    parser.add_argument("--remote", action="store_true", help="read the store through an MLflow server")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="build the store there, or reuse it")
    args = begin(parser)
    num_trials = 1000 if args.quick else 10_000
    with contextlib.ExitStack() as stack:
        project: Path = args.keep or stack.enter_context(scratch())
        studies = [_grid_study("one", num_trials)] if args.hard else _studies(num_trials)
        if not (project / "mlflow.db").exists():
            project.mkdir(parents=True, exist_ok=True)
            build(project, studies)
        uri = _uri(project)
        if args.remote:
            uri = stack.enter_context(start_server(uri, project)).url
        measure(project, uri, studies, args.rounds)


def _uri(project: Path) -> str:
    return f"sqlite:///{project.resolve()}/mlflow.db"


# ---- the store


def _studies(num_trials: int) -> list[Study]:
    small = [_grid_study(f"small_{i}", num_trials // 4 // NUM_SMALL, (1, 2)) for i in range(NUM_SMALL)]
    return [_grid_study("grid", num_trials // 2), _search_study("search", num_trials // 4), *small]


def _grid_study(name: str, num_trials: int, workers: Sequence[int] = (1, 2, 4, 8)) -> Study:
    """Return a study of points in three hyperparameters, 10 repeats each, with one worker as the baseline."""
    batch_sizes = (32, 64, 128, 256, 512)
    num_rates = max(1, num_trials // NUM_REPEATS // len(workers) // len(batch_sizes))
    rates = [0.001 * 1.02**i for i in range(num_rates)]
    return Study(
        workload=digits,
        name=name,
        space={
            "num_workers": grid(*workers),
            "batch_size": grid(*batch_sizes),
            "lr": grid(*(float(f"{rate:.4g}") for rate in rates)),
        },
        baseline={"num_workers": 1},
        num_repeats=NUM_REPEATS,
    )


def _search_study(name: str, num_trials: int) -> Study:
    return Study(
        workload=digits,
        name=name,
        space={"lr": loguniform(1e-4, 1.0), "hidden_size": randint(8, 512), "batch_size": randint(8, 512)},
        num_trials=num_trials,
    )


def _specs(study: Study) -> Sequence[TrialSpec]:
    if not study.is_search:
        return study.trials()
    rng = random.Random(0)
    assert study.num_trials is not None
    points = [
        {
            "lr": 10 ** rng.uniform(-4, 0),
            "hidden_size": rng.randrange(8, 512),
            "batch_size": rng.randrange(8, 512),
        }
        for _ in range(study.num_trials)
    ]
    return [study.trial(point, 0, order=i) for i, point in enumerate(points)]


def build(project: Path, studies: Sequence[Study]) -> None:
    """Write every trial of the studies into ``mlflow.db`` and ``mlartifacts`` of the folder."""
    begun_s = time.perf_counter()
    real = local_trial("digits", {"epochs": 3, "num_workers": 1}, project / "log")
    writer = RowWriter(_uri(project), project)
    count = 0
    for study in studies:
        results = [_varied(real, spec) for spec in _specs(study)]
        _record(project, writer, study, results)
        count += len(results)
        progress(f"{study.name}: {len(results)} trials")
    num_bytes = (project / "mlflow.db").stat().st_size
    print_row(
        "trials; building the store; its database",
        f"{count}; {time.perf_counter() - begun_s:.0f} s; {units.size(num_bytes)}",
    )


def _record(project: Path, writer: RowWriter, study: Study, results: Sequence[TrialResult]) -> None:
    """Record results as an execution of the study does."""
    question = json.dumps(question_to_dict(question_of(study)), separators=(",", ":"))
    execution = Execution(
        f"{study.name}-1",
        study.name,
        started_at=results[0].started_at,
        params={"workload": study.workload.name, "num_repeats": str(study.num_repeats)},
        tags={"raypar.question": question, "host": "here", "cores": "2"},
        description="How large can a store be?",
        study_source="# generated\n",
    )
    recorder = Recorder(execution, tracking_uri=_uri(project), project_dir=project, writer=writer)
    recorder.start()
    for result in results:
        recorder.record(result)
    speedups = pair_speedups(question_of(study), results)
    recorder.record_trial_metrics({identity: {"speedup": speedup} for identity, speedup in speedups.items()})
    if recorder.close("finished"):
        raise SystemExit(f"{study.name} was not recorded: {recorder.outage}")
    writer.flush()


def _varied(real: TrialResult, spec: TrialSpec) -> TrialResult:
    """Return a plausible result of another trial: times and scores depend on its point, with noise."""
    noise = random.Random(spec.identity)
    workers, batch, rate = (spec.config[key] for key in ("num_workers", "batch_size", "lr"))
    assert isinstance(workers, int) and isinstance(batch, int) and isinstance(rate, float)
    factor = (0.1 + 0.9 / workers + 4 / batch) * math.exp(noise.gauss(0, 0.05))
    score = min(1.0, max(0.0, 0.97 - 0.04 * abs(math.log10(rate / 0.02)) + noise.gauss(0, 0.004)))
    steps = tuple(
        tuple(t * factor * math.exp(noise.gauss(0, 0.1)) for t in real.step_times_s[0]) for _ in range(workers)
    )
    assert real.train_time_s is not None and real.wall_s is not None and real.throughput_samples_per_s is not None
    reports = tuple(
        {**report, "accuracy": score * (1 - 0.2 / (i + 1)), "train_time_s": report["train_time_s"] * factor}
        for i, report in enumerate(real.reports)
    )
    shares = {key: [0.01 + 0.01 * noise.random()] * workers for key in ("cpu_wait_share", "foreign_cpu_share")}
    return replace(
        real,
        spec=spec,
        started_at=1.75e9 + 5.0 * spec.order,
        wall_s=real.wall_s + real.train_time_s * (factor - 1),
        train_time_s=real.train_time_s * factor,
        throughput_samples_per_s=real.throughput_samples_per_s / factor,
        reports=reports,
        step_times_s=steps,
        conditions=Conditions.from_stored(
            {**real.conditions.to_stored(), **shares, "cores": [[core] for core in range(workers)]}
        ),
    )


# ---- the commands


def measure(project: Path, uri: str, studies: Sequence[Study], num_rounds: int) -> None:
    """Time the commands in rounds and print them next to their bars."""
    page = project / "page.html"
    widest = studies[0].name
    reports = [f"report {study.name}" for study in studies[:2]]
    variants: dict[str, Callable[[], float]] = {IMPORTING: partial(_import_mlflow, project)}
    for words in ("list", *reports, f"report {widest} --html {page.name}"):
        arguments = (*words.split(), "--tracking-uri", uri)
        variants[f"raypar {words}"] = partial(run_raypar, project, *arguments, **QUIET)
    times_s = interleaved(variants, num_rounds)
    bars = {"raypar list": MAX_LIST_S, **{f"raypar {report}": MAX_REPORT_S for report in reports}}
    for name, values in times_s.items():
        if name in bars:
            print_bar(name, Figure.of(values), _seconds, at_most=bars[name])
        else:
            print_row(name, Figure.of(values).show(_seconds))
        if name != IMPORTING:
            print_row("    / import mlflow", Figure.ratio(values, times_s[IMPORTING]).show(times))
    print_bar(f"size of the page of {widest}", page.stat().st_size, units.size, at_most=MAX_PAGE_BYTES)


def _import_mlflow(project: Path) -> float:
    begun_s = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import mlflow"], cwd=project, env={**os.environ, **QUIET}, check=True)
    return time.perf_counter() - begun_s


def _seconds(value: float) -> str:
    return f"{value:.2f} s"


if __name__ == "__main__":
    main()
