"""Runs that raypar did not make, from an MLflow experiment or a table, as a study in the store.

The columns are those of `raypar.analysis.table`: a run's parameters and metrics are its cells. What raypar can't know
of such runs is marked as unknown: equal work, isolation, their machines and the order in which they ran.
"""

from __future__ import annotations

import json
import math
import shlex
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from raypar.analysis.analyse import StudyAnalysis, analyse
from raypar.analysis.cells import Exact, number_in
from raypar.analysis.columns import MEASURED, role_of
from raypar.analysis.laws import Scaling
from raypar.analysis.question import Question, point_key, question_to_dict
from raypar.analysis.scaling import Measurement
from raypar.analysis.sheet import Line, Sheet, read_sheet
from raypar.analysis.table import Asked, Table, table_of
from raypar.errors import RayparError, suggest
from raypar.execution.results import note_of, record_summary
from raypar.masking import masked
from raypar.study.conditions import IMPORTED, Conditions, RankConditions
from raypar.study.metric import Metric
from raypar.study.space import Value
from raypar.study.trial import TrialResult, TrialSpec, TrialState
from raypar.track.check import check_readable
from raypar.track.recorder import Execution, Recorder
from raypar.track.stored_runs import MlflowRuns, OtherRun

RUN, DURATION = "run", "run_duration_s"
FINISHED = "FINISHED"  # status of a run
UNKNOWN = "unknown"  # device of an imported trial
MIN_TIME_S = 60.0  # of the work that throughputs are turned into times for


@dataclass(frozen=True)
class ImportRequest:
    """Request to import runs as a study.

    Attributes:
        source: an MLflow experiment, or a table's file.
        study: name of the new study.
        asked: the user's answers on columns.
        by: further columns that distinguish points.
        metric: column that trials are judged by; empty: none.
        mode: "max" or "min"; empty: inferred from the metric's name.
        from_uri: store of the experiment; None: the source is a file.
    """

    source: str
    study: str
    asked: Asked
    by: Sequence[str] = ()
    metric: str = ""
    mode: str = ""
    from_uri: str | None = None


class Source(NamedTuple):
    """Lines of runs, and when each ran, by the number of its line; a file's lines have no times."""

    sheet: Sheet
    runs: Mapping[int, OtherRun]
    num_unfinished: int = 0


@dataclass(frozen=True)
class Import:
    """Trials made of other people's runs.

    Attributes:
        reading: how the columns were read, in a sentence.
        num_excluded: runs without a worker count or a measured value, or that did not finish.
    """

    question: Question
    results: Sequence[TrialResult]
    reading: str
    num_excluded: int
    params: Mapping[str, str] = field(default_factory=dict)  # columns with one value

    @property
    def analysis(self) -> StudyAnalysis:
        """Analysis of the trials."""
        return analyse(self.question, self.results)


def read_source(request: ImportRequest) -> Source:
    """Read the runs of an experiment or a file.

    Raises:
        RayparError: there is no such experiment or file, or it has no finished run.
        StoreError: the store can't be read.
    """
    if request.from_uri is None:
        return Source(read_sheet(Path(request.source)), {})
    store = MlflowRuns(request.from_uri)
    names = store.experiment_names() if check_readable(request.from_uri) else []
    if request.source not in names:
        hint = suggest(request.source, names) if names else "name the store of the experiment: --from URI"
        raise RayparError(f"no experiment `{request.source}` in {masked(request.from_uri)}", hint=hint)
    experiment_id = str(store.experiment_id(request.source))
    every = list(store.runs_of_others(experiment_id))
    runs = [run for run in every if run.status == FINISHED]
    if not runs:
        counts = "no finished run" if every else "no run"
        raise RayparError(f"experiment `{request.source}` has {counts}", hint="import another experiment")
    params = [*dict.fromkeys(key for run in runs for key in run.params)]
    metrics = [*dict.fromkeys(key for run in runs for key in run.metrics if _is_wanted(key, request))]
    columns = {name.lower() for name in request.asked.columns.values()}
    durations = [DURATION] if DURATION in columns else []
    head = [RUN, *params, *(name if name not in params else f"{name} (metric)" for name in metrics), *durations]
    lines = [
        Line(
            i,
            [
                run.name,
                *(run.params.get(name, "").strip() for name in params),
                *(_cell(run.metrics.get(name)) for name in metrics),
                *(_cell(run.ended_at and run.ended_at - run.started_at) for _ in durations),
            ],
        )
        for i, run in enumerate(runs, 1)
    ]
    return Source(Sheet(Line(0, head), lines, ""), dict(enumerate(runs, 1)), len(every) - len(runs))


def _is_wanted(metric: str, request: ImportRequest) -> bool:
    """Return whether a metric of MLflow may be a column: others vary between the repeats of a point."""
    columns = {name.lower() for name in (*request.asked.columns.values(), *request.by, request.metric)}
    column = role_of(0, metric)
    return metric.lower() in columns or (column is not None and column.role in MEASURED)


def _cell(value: float | None) -> str:
    return "" if value is None or not math.isfinite(value) else Exact(repr(float(value)))


def import_of(request: ImportRequest, source: Source) -> Import:
    """Return the trials of a source.

    Raises:
        RayparError: columns are missing, ambiguous or malformed.
    """
    sheet, path = source.sheet, Path(request.source)
    names = [name.lower() for name in sheet.head.cells]
    if request.metric and request.metric.lower() not in names:
        hint = suggest(request.metric, sheet.head.cells)
        raise RayparError(f"--metric {request.metric}: no such column", hint=hint)
    judged = sheet.head.cells[names.index(request.metric.lower())] if request.metric else ""
    metric = Metric(judged, request.mode) if judged else Metric("", "max")
    asked = replace(request.asked, ignored=(*request.asked.ignored, *filter(None, [judged])), skips_missing=True)
    table = table_of(sheet, path, request.by, asked)
    if len({run.num_workers for run in table.lines}) < 2:
        raise RayparError(f"{path}: all runs have the same number of workers", hint="name another column: --workers")
    results = _results(request, source, table, judged)
    question = Question(
        study_name=request.study,
        baseline={"num_workers": min(run.num_workers for run in table.lines)},
        space_keys=tuple(results[0].spec.point),
        metric=metric.name,
        mode=metric.mode,
        points=tuple({point_key(r.spec.point): r.spec.point for r in results}.values()),
        workload=path.stem,
        text=f"Do more workers pay off in the runs of {path.name}?",
    )
    cells = {name: {line.cells[i] for line in sheet.lines} for i, name in enumerate(sheet.head.cells)}
    return Import(
        question,
        results,
        table.reading,
        len(sheet.lines) - len(table.lines) + source.num_unfinished,
        {name: next(iter(values)) for name, values in cells.items() if len(values) == 1},
    )


def _is_time(table: Table) -> bool:
    return next(iter(table.runs.values())).quantity is Measurement.TIME


def _results(request: ImportRequest, source: Source, table: Table, judged: str) -> list[TrialResult]:
    """Return a trial for each value of a table's lines."""
    head = source.sheet.head.cells
    by = [i for name in request.by for i, other in enumerate(head) if other.lower() == name.lower()]
    is_weak = table.scaling is Scaling.WEAK
    # In weak scaling, N workers do N times the work: times of equal work are those of one worker's.
    work, covers = 0, f"`{table.measured}` over the number of workers" if is_weak else f"`{table.measured}`"
    if not _is_time(table):
        slowest = min(value for run in table.lines for value in run.values)
        work = 10 ** max(0, math.ceil(math.log10(MIN_TIME_S * slowest)))
        covers = f"{work:,} units at `{table.measured}`"
    fixed: dict[str, Value] = {"cpus_per_worker": 1, "device": UNKNOWN}
    if is_weak:
        fixed["per_worker_batch_size"] = UNKNOWN
    conditions = Conditions(ranks=(RankConditions(steps_from=IMPORTED, laps_cover=covers),))
    results = list[TrialResult]()
    for run, value in [(each, value) for each in table.lines for value in each.values]:
        point: dict[str, Value] = {"num_workers": run.num_workers, **{head[i]: _value(run.line.cells[i]) for i in by}}
        time_s = work / value if work else value / run.num_workers if is_weak else value
        # Each has a number of its own: no two of them are from one block.
        number, origin = len(results), source.runs.get(run.line.number)
        report = _report(judged, run.line.cells[head.index(judged)], table.decimal) if judged else {}
        results.append(
            TrialResult(
                TrialSpec(
                    request.study,
                    Path(request.source).stem,
                    point,
                    {**point, **fixed},
                    number,
                    number,
                    number,
                ),
                TrialState.FINISHED,
                started_at=origin.started_at if origin else 0.0,
                wall_s=origin.ended_at - origin.started_at if origin and origin.ended_at else None,
                train_time_s=time_s,
                throughput_samples_per_s=value if work else None,
                reports=(report,) if report else (),
                conditions=conditions,
            )
        )
    return results


def _value(cell: str) -> Value:
    """Return a parameter's number, or its text."""
    for kind in (int, float):
        try:
            return kind(cell)
        except ValueError:
            continue
    return str(cell)


def _report(name: str, cell: str, decimal: str) -> dict[str, float]:
    """Return a metric of a run; empty if it has none."""
    number = number_in(cell, decimal) if cell else None
    return {} if number is None else {name: number}


def store_import(made: Import, request: ImportRequest, command: Sequence[str], uri: str, folder: Path) -> int:
    """Write the trials to the store; return the number of records that are not in it yet.

    Raises:
        StoreError: neither the store nor the folder can be written.
    """
    question = made.question
    origin = request.source if request.from_uri is None else f"{request.source} in {masked(request.from_uri)}"
    execution = Execution(
        uid=uuid.uuid4().hex,
        study=request.study,
        started_at=time.time(),
        params={name: masked(value) for name, value in made.params.items()},
        tags={
            "command": masked(shlex.join(command)),
            "raypar.question": json.dumps(question_to_dict(question), separators=(",", ":")),
        },
        description=f"{question.text} Imported from {origin}. {made.reading}",
        answer=note_of(made.analysis),
        score=question.metric,
        mode=question.mode,
        compares=True,
    )
    recorder = Recorder(execution, tracking_uri=uri, project_dir=folder)
    recorder.start()
    try:
        for result in made.results:
            recorder.record(result)
        record_summary(recorder, lambda: made.analysis)
    except BaseException:
        recorder.close("failed")
        raise
    return recorder.close("finished")
