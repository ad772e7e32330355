"""Command that fits scaling laws."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from raypar.cli import common
from raypar.errors import RayparError

if TYPE_CHECKING:
    from raypar.analysis.table import Asked

_of_file = partial(typer.Option, rich_help_panel="For a table")
# Why a study needs no such flag.
FILE_ONLY = {
    "--scaling": "a study that fixes per_worker_batch_size scales weakly, any other strongly",
    "--by": "each group of points that differ only in num_workers is fitted separately",
}


def fit(
    source: Annotated[
        str,
        typer.Argument(
            metavar="STUDY|FILE",
            help="Study, or table (CSV, .xlsx, Markdown) of worker counts and times or throughputs.",
            autocompletion=common.complete_study,
        ),
    ],
    baseline: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Compare with N workers. (default: the study's baseline, or the fewest)"),
    ] = None,
    scaling: Annotated[
        Literal["strong", "weak"] | None,
        _of_file(
            help="strong: the same work for any number of workers; weak: N workers do N times as much. "
            "(default: strong, unless the times may be either)"
        ),
    ] = None,
    by: Annotated[
        list[str] | None,
        _of_file(metavar="COLUMN", help="Fit the runs of each value of this column separately."),
    ] = None,
    workers_column: Annotated[
        str | None, _of_file(metavar="COLUMN", help="Column with the number of workers. (default: by its name)")
    ] = None,
    time_column: Annotated[
        str | None, _of_file(metavar="COLUMN", help="Column with the times. (default: by its name and unit)")
    ] = None,
    throughput_column: Annotated[
        str | None, _of_file(metavar="COLUMN", help="Column with the throughputs. (default: by its name and unit)")
    ] = None,
    throughput_of: Annotated[
        Literal["all", "worker"] | None,
        _of_file(help="Throughput of one worker, or of all. (default: by the column's name, else all)"),
    ] = None,
    decimal: Annotated[
        Literal[".", ","] | None,
        _of_file(help="Decimal separator. (default: that of the numbers)"),
    ] = None,
    tracking_uri: common.TrackingUri = None,
    as_json: common.AsJson = False,
) -> None:
    """Fit scaling laws to a study or a table.

    The laws are Amdahl's, Gustafson's and Gunther's. The answer also shows where to stop.

    Examples:  raypar model fit strong_scaling    raypar model fit times.csv --scaling weak
    """
    from raypar.analysis.columns import Role
    from raypar.analysis.laws import Scaling
    from raypar.analysis.table import Asked

    if common.is_table(source):
        columns = {Role.WORKERS: workers_column, Role.TIME: time_column, Role.THROUGHPUT: throughput_column}
        asked = Asked(
            {role: name for role, name in columns.items() if name is not None},
            decimal,
            None if throughput_of is None else throughput_of == "worker",
            None if scaling is None else Scaling(scaling),
        )
        _fit_file(source, by or (), asked, baseline, as_json=as_json)
        return
    of_files = {
        "--scaling": scaling,
        "--by": by[0] if by else None,
        "--workers-column": workers_column,
        "--time-column": time_column,
        "--throughput-column": throughput_column,
        "--throughput-of": throughput_of,
        "--decimal": decimal,
    }
    for flag, value in of_files.items():
        if value is not None:
            hint = f"leave it out: {FILE_ONLY.get(flag, 'a study has this information')}"
            raise RayparError(f"{flag} {value} is for files, and `{source}` is a study", hint=hint)
    _fit_study(source, baseline, common.uri_of(tracking_uri), as_json=as_json)


def _fit_file(source: str, by: Sequence[str], asked: Asked, baseline: int | None, *, as_json: bool) -> None:
    """Print the scaling laws of a table."""
    from raypar.analysis.table import read_table
    from raypar.reporting.fit import FitView, print_fit

    view = FitView.of_table(source, read_table(Path(source), by, asked), baseline)
    if as_json:
        common.print_json(view)
    else:
        print_fit(common.stdout(), view)


def _fit_study(name: str, baseline: int | None, tracking_uri: str, *, as_json: bool) -> None:
    """Print the scaling laws of a stored study."""
    from raypar.analysis.scaling import worker_groups
    from raypar.execution.stored import read_study
    from raypar.reporting.fit import FitView, print_fit

    study = read_study(name, tracking_uri, Path.cwd())
    groups = worker_groups(study.question, study.analysis.evidence.points, baseline)
    if not groups:
        hint = "sweep num_workers, for example with --set num_workers=1,2,4"
        raise RayparError(f"study `{name}` has no finished trials that differ only in num_workers", hint=hint)
    view = FitView.of_study(name, groups, study.analysis.verdict.doubt, study.analysis.evidence.excluded)
    if as_json:
        common.print_json(view)
    else:
        print_fit(common.stdout(), view)
