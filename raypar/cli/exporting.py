"""The command that writes a study into a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from raypar.cli.common import say, stdout, told, uri_of
from raypar.cli.options import Debug, StudyName, TrackingUri


def export(
    name: StudyName,
    path: Annotated[
        Path, typer.Argument(metavar="FILE", help="All trials as .csv, .json or .parquet; a summary as .md.")
    ],
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")] = False,
    tracking_uri: TrackingUri = None,
    debug: Debug = False,
) -> None:
    """Write a study's trials into a file for other programs, or a summary for a paper or a pull request.

    A table has a row per trial; units stand in the columns' names. A .json also has the reports and the time of every
    step.
    """
    with told(debug):
        from raypar.execution.stored import read_study
        from raypar.report.export import MARKDOWN, check_path, markdown_of, write, write_text

        check_path(path, force=force)
        study = read_study(name, uri_of(tracking_uri), Path.cwd())
        if path.suffix.lower() == MARKDOWN:
            write_text(path, markdown_of(study.analysis, study.origin, study.description))
            say(stdout(), f"wrote a summary of {name} to {path}")
            return
        write(path, study.question, study.results, lambda identity: study.store.step_times(name, identity))
        say(stdout(), f"wrote the {len(study.results)} trials of {name} to {path}")
