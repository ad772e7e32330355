"""A study's execution in a terminal: shown while it runs, told when it is over, and what its exit code says."""

from __future__ import annotations

import contextlib
import os
import shlex
from typing import TYPE_CHECKING, Any

import typer

from raypar.cli.common import EXIT_FAILED, charts_url, quiet, say
from raypar.errors import RayparError
from raypar.signals import uninterrupted

if TYPE_CHECKING:
    from rich.console import Console

    from raypar.execution.execute import Outcome
    from raypar.execution.options import Options
    from raypar.execution.plan import Plan
    from raypar.study.loader import LoadedStudy


def run(loaded: LoadedStudy, options: Options) -> None:
    """Execute it and tell what came of it.

    Raises:
        typer.Exit: with 128 + the signal's number where one came, with `EXIT_FAILED` where a trial failed.
        RayparError: what the study broke off for.
    """
    from raypar.analysis.question import question_of
    from raypar.execution.execute import check_can_train, execute
    from raypar.masking import masked
    from raypar.report.live import LiveView
    from raypar.run.runner import Notice
    from raypar.track.client import has_server

    check_can_train(options)
    with quiet(options.project_dir / ".raypar" / "logs" / "driver.log") as console:

        def view(made: Plan) -> LiveView:
            done = made.num_trials - made.num_missing
            if done:
                say(console, f"{done} of {made.num_trials} trials are in the store already and are not run again")
            question = question_of(made.study)
            return LiveView(console, made.num_trials, done=made.done, queued=made.missing, question=question)

        def notice(event: Any) -> None:
            if isinstance(event, Notice):
                say(console, event.text)

        outcome: Outcome = execute(loaded, options, view, notice)
        # Where the terminal was closed, there is nobody to tell.
        gone = contextlib.suppress(OSError) if outcome.was_interrupted else contextlib.nullcontext()
        with uninterrupted(), gone:
            tell(console, outcome, resume_command(loaded, options))
            if outcome.num_done and has_server(options.tracking_uri) and not outcome.num_unsent:
                with contextlib.suppress(RayparError):  # gone in this very moment: that costs a line
                    found = charts_url(options.tracking_uri, masked(options.tracking_uri), loaded.study.name)
                    say(console, "charts of {}: {}".format(*found or ("", "")))
    if outcome.interrupted_by is not None:
        raise typer.Exit(128 + outcome.interrupted_by)
    if outcome.broke_off:
        raise outcome.broke_off
    if outcome.num_failed:
        raise typer.Exit(EXIT_FAILED)


def tell(console: Console, outcome: Outcome, resume: str) -> None:
    """What came of an execution."""
    from raypar.report.console import print_report
    from raypar.report.listings import print_failures

    name = outcome.analysis.study_name
    if outcome.partial and outcome.num_done:
        say(console, outcome.partial)
    if outcome.num_done:
        print_report(outcome.analysis, console)
    if outcome.failures:
        print_failures(console, outcome.failures, outcome.log_dir)
    if outcome.num_unsent:
        say(console, f"the store took not all: {outcome.num_unsent} records wait on disk; `raypar sync` sends them")
    if outcome.was_interrupted and not outcome.num_done:
        say(console, f"interrupted before a trial had ended; `{resume}` runs them")
    elif outcome.was_interrupted and not outcome.partial:
        say(console, "interrupted when every trial was done")
    elif outcome.was_interrupted:
        say(console, f"interrupted; `{resume}` runs the rest")
    elif outcome.broke_off:
        say(console, f"broke off; `{resume}` runs the rest")
    if outcome.num_done:
        say(console, f"`raypar ui` shows the runs in MLflow, `raypar report {name}` this table again")


def resume_command(loaded: LoadedStudy, options: Options) -> str:
    """What goes on with a study in this folder, as a shell takes it; all other flags are stored with it."""
    from raypar.execution.options import is_in_folder, is_of_this_machine
    from raypar.masking import masked
    from raypar.run.jobs import SUBMITTED_AS
    from raypar.track.store import default_tracking_uri

    if submitted_as := os.environ.get(SUBMITTED_AS):
        return submitted_as
    words = ["raypar", "resume", loaded.study.name]
    if not is_in_folder(str(loaded.path), options.project_dir):
        words += ["--file", str(loaded.path)]
    if options.address is not None and not is_of_this_machine(options.address):
        words += ["--address", options.address]
    if options.tracking_uri != default_tracking_uri(options.project_dir):
        words += ["--tracking-uri", options.tracking_uri]
    return masked(shlex.join(words))
