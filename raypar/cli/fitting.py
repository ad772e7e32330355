"""The command that fits the laws of scaling to times from elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from raypar.cli.common import stdout, told
from raypar.cli.options import Debug


def fit(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A CSV file with columns workers and time (or throughput).")
    ],
    scaling: Annotated[
        Literal["strong", "weak"],
        typer.Option(help="strong: the same work for all; weak: N workers do N times as much."),
    ] = "strong",
    baseline: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Compare with N workers. (default: the fewest)")
    ] = None,
    debug: Debug = False,
) -> None:
    """Fit the laws of scaling (Amdahl, Gustafson, Gunther) to times by worker count."""
    with told(debug):
        from raypar.analysis.laws import Scaling
        from raypar.analysis.scaling import analyse_scaling
        from raypar.analysis.table import read_table
        from raypar.report.laws import print_scaling

        print_scaling(stdout(), analyse_scaling(read_table(file), Scaling(scaling), baseline))
