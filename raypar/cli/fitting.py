"""The command that fits the laws of scaling to a study, or to times from elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from raypar.cli.common import say, stdout, told, uri_of
from raypar.cli.options import Debug, TrackingUri
from raypar.errors import RayparError


def fit(
    source: Annotated[
        str,
        typer.Argument(
            metavar="STUDY|FILE", help="A study, or a CSV file with columns workers and time (or throughput)."
        ),
    ],
    scaling: Annotated[
        Literal["strong", "weak"] | None,
        typer.Option(
            help="Of a file: strong, the same work for all; weak, N workers do N times as much. (default: strong)"
        ),
    ] = None,
    baseline: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Compare with N workers. (default: the study's own, or the fewest)"),
    ] = None,
    tracking_uri: TrackingUri = None,
    debug: Debug = False,
) -> None:
    """Fit the laws of scaling (Amdahl, Gustafson, Gunther) to a study, or to any times by worker count."""
    with told(debug):
        if source.lower().endswith(".csv") or Path(source).is_file():
            _fit_file(Path(source), scaling or "strong", baseline)
        elif scaling is not None:
            hint = "leave it out: a study that fixes per_worker_batch_size scales weakly, any other strongly"
            raise RayparError(f"--scaling {scaling} is for files, and `{source}` is none", hint=hint)
        else:
            _fit_study(source, tracking_uri, baseline)


def _fit_file(path: Path, scaling: str, baseline: int | None) -> None:
    from raypar.analysis.laws import Scaling
    from raypar.analysis.scaling import analyse_scaling, read_table
    from raypar.report.fit import print_scaling

    print_scaling(stdout(), analyse_scaling(read_table(path), Scaling(scaling), baseline))


def _fit_study(name: str, tracking_uri: str | None, baseline: int | None) -> None:
    from raypar.analysis.scaling import groups_in
    from raypar.execution.stored import read_study
    from raypar.report.fit import print_groups

    study = read_study(name, uri_of(tracking_uri), Path.cwd())
    groups = groups_in(study.question, study.results, baseline)
    if not groups:
        hint = "sweep num_workers, say with --set num_workers=1,2,4"
        raise RayparError(f"study `{name}` has no finished trials that differ only in num_workers", hint=hint)
    print_groups(stdout(), name, groups)
    if aside := study.last_asked.sentence():
        say(stdout(), aside)
