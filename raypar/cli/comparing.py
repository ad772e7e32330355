"""The command that puts two studies side by side, and says by its exit code whether the second is slower."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from raypar.cli.common import EXIT_FAILED, stdout, told, uri_of
from raypar.cli.options import Debug, TrackingUri
from raypar.errors import RayparError


def compare(
    a: Annotated[str, typer.Argument(metavar="A", help="The study that is the reference.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The study that is held against it.")],
    baseline_uri: Annotated[
        str | None, typer.Option(metavar="URI", help="The MLflow store of A. (default: that of B)")
    ] = None,
    fail_if_slower: Annotated[
        str | None,
        typer.Option(
            metavar="PERCENT",
            help="5%: exit code 1 if B is slower at some point by more than that, beyond the noise: the whole interval "
            "of B/A lies above 1.05.",
        ),
    ] = None,
    tracking_uri: TrackingUri = None,
    debug: Debug = False,
) -> None:
    """Put two studies side by side: other machines, versions or branches.

    Points with the same values are compared, as independent samples; what else differs is told.
    """
    with told(debug):
        allowed = None if fail_if_slower is None else share_of(fail_if_slower)
        from raypar.analysis.compare import Gate, Side
        from raypar.analysis.compare import compare as compared
        from raypar.execution.stored import read_study
        from raypar.masking import masked
        from raypar.report.compare import print_comparison, print_gate

        uris = [baseline_uri or uri_of(tracking_uri), uri_of(tracking_uri)]
        if a == b and uris[0] == uris[1]:
            hint = "name two studies, or give the store of A with --baseline-uri"
            raise RayparError(f"`{a}` is compared with itself", hint=hint)
        studies = [read_study(name, uri, Path.cwd()) for name, uri in zip((a, b), uris, strict=True)]
        sides = [Side(study.question, study.results, study.origin) for study in studies]
        comparison = compared(sides[0], sides[1])
        places = (masked(uris[0]), masked(uris[1])) if uris[0] != uris[1] else ("", "")
        print_comparison(stdout(), comparison, places)
        if allowed is None:
            return
        if not any(point.ratio for point in comparison.matched):
            raise RayparError(
                f"--fail-if-slower {fail_if_slower}: no point has a time in both studies, so there is nothing to judge",
                hint="run both studies with the same swept values and the same config",
            )
        print_gate(stdout(), comparison, allowed)
        if comparison.gate(allowed)[Gate.SLOWER]:
            raise typer.Exit(EXIT_FAILED)


def share_of(text: str) -> float:
    """0.05 of ``5%``. Raises RayparError for what is no percentage of 0 or more."""
    number, sign, rest = text.strip().partition("%")
    try:
        percent = float(number)
    except ValueError:
        percent = math.nan
    if not sign or rest or "_" in number or not 0 <= percent < math.inf:
        raise RayparError(
            f"--fail-if-slower {text}: must be a percentage of 0 or more", hint="write --fail-if-slower 5%"
        )
    return percent / 100
