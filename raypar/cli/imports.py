"""Command that imports runs which raypar did not make."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from raypar.cli import common
from raypar.errors import RayparError
from raypar.signals import handle_signals
from raypar.units import counted


def import_runs(
    source: Annotated[
        str, typer.Argument(metavar="EXPERIMENT|FILE", help="MLflow experiment, or table (CSV, .xlsx …).")
    ],
    study: Annotated[
        str | None, typer.Option("--as", metavar="STUDY", help="Name of the study. (default: the source's, imported)")
    ] = None,
    workers: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Parameter with the number of workers. (default: by its name)")
    ] = None,
    time: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN", help="Metric with the time; run_duration_s is the whole run. (default: by name and unit)"
        ),
    ] = None,
    throughput: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Metric with the throughput. (default: by name and unit)")
    ] = None,
    throughput_of: Annotated[
        Literal["all", "worker"] | None,
        typer.Option(help="Throughput of one worker, or of all. (default: by its name)"),
    ] = None,
    by: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN", help="Parameter that makes another point, such as batch_size.")
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN", help="Parameter that does not matter, such as output_dir.")
    ] = None,
    metric: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Metric that runs are judged by, such as val_accuracy.")
    ] = None,
    mode: Annotated[Literal["max", "min"] | None, typer.Option(help="Better metric. (default: by its name)")] = None,
    scaling: Annotated[
        Literal["strong", "weak"] | None,
        typer.Option(
            help="Work of more workers: the same, or N times as much. (default: strong, unless it may be either)"
        ),
    ] = None,
    decimal: Annotated[Literal[".", ","] | None, typer.Option(help="Decimal separator of a file.")] = None,
    from_uri: Annotated[
        str | None, common.where("--from", metavar="URI", help="Store of the experiment. (default: --tracking-uri)")
    ] = None,
    tracking_uri: common.TrackingUri = None,
) -> None:
    """Import runs of MLflow or a table as a study.

    `report`, `recommend`, `model fit` and `model predict` read the study. Equal work and isolation of the runs are
    marked as unknown.

    Example:  raypar store import my_experiment --workers n_gpus --time epoch_time_s
    """
    from raypar.analysis.columns import Role
    from raypar.analysis.laws import Scaling
    from raypar.analysis.table import Asked
    from raypar.execution.imports import ImportRequest, import_of, read_source, store_import
    from raypar.execution.machine import alone
    from raypar.study.study import name_problem

    uri = common.uri_of(tracking_uri)
    is_file = common.is_table(source)
    if is_file and from_uri is not None:
        raise RayparError(f"--from {from_uri} is for experiments, and {source} is a file", hint="leave it out")
    name = study or f"{Path(source).stem if is_file else source}_imported"
    if wrong := name_problem(name):
        raise RayparError(f"{name!r}: the name of a study {wrong}", hint="choose another: --as STUDY")
    columns = {Role.WORKERS: workers, Role.TIME: time, Role.THROUGHPUT: throughput}
    asked = Asked(
        {role: column for role, column in columns.items() if column is not None},
        decimal,
        None if throughput_of is None else throughput_of == "worker",
        None if scaling is None else Scaling(scaling),
        ignored=ignore or (),
    )
    of = None if is_file else common.uri_of(from_uri or tracking_uri)
    request = ImportRequest(source, name, asked, by or (), metric or "", mode or "", of)
    made = import_of(request, read_source(request))
    with handle_signals(), alone(name, common.own_command(), uri, Path.cwd()):
        store = common.store_of(uri)
        if store.experiment_id(name) is not None or store.executions(name):
            hint = f"choose another name: --as STUDY, or `raypar store delete {name}` first"
            raise RayparError(f"a study or an experiment `{name}` already exists", hint=hint)
        common.say(common.stdout(), made.reading)
        num_left = store_import(made, request, common.own_command(), uri, Path.cwd())
    excluded = f"; {counted(made.num_excluded, 'run')} excluded" if made.num_excluded else ""
    points = counted(len(made.question.points), "point")
    common.say(common.stdout(), f"imported {counted(len(made.results), 'run')} of {points} as study `{name}`{excluded}")
    if num_left:
        common.say(
            common.stdout(), f"  {counted(num_left, 'record')} not in the store yet; `raypar store sync` uploads"
        )
    common.say(common.stdout(), f"  → `raypar report {name}`")
