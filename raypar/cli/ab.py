"""Command that runs a study under two revisions of its code and compares them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raypar.cli import common
from raypar.cli.flags import flags_of
from raypar.cli.study import options_here, run, show_plan
from raypar.cli.verbs import UsageError, usage_message
from raypar.errors import RayparError, check_for_training
from raypar.execution.flags import all_flags
from raypar.signals import handle_signals

if TYPE_CHECKING:
    from rich.console import Console

    from raypar.execution.results import ExecutionOutcome
    from raypar.reporting.ab import AbView
    from raypar.study.loader import LoadedStudy

EXIT_TRIALS_FAILED = 4
DEFAULTS = {"until": "settled", "margin": 0.02, "max_repeats": 100, "budget": 600.0}  # flags of the study
USAGE = "write `raypar ab A B -- study FILE`, with a revision (main, HEAD~3, .) for A and for B"


def ab(
    context: typer.Context,
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="A [B] -- study FILE [FLAGS]",
            help="Two git revisions, or `.` for the working tree; then `study` with its flags. (default of B: `.`, or "
            "A with --patch or --env)",
        ),
    ],
    patch: Annotated[Path | None, typer.Option(metavar="FILE", help="Apply this patch to B.")] = None,
    env: Annotated[
        Path | None,
        typer.Option(metavar="VENV", help="Run B in this virtual environment, with the same Python and Ray."),
    ] = None,
    link: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="Link this folder, which git ignores, into both."),
    ] = None,
    fail_if_slower: common.FailIfSlower = None,
    inconclusive: common.Inconclusive = None,
    markdown: Annotated[
        Path | None, common.output(metavar="FILE", help="Write the verdict for a pull request; -: print it.")
    ] = None,
    html: common.ComparisonHtml = None,
    as_json: common.AsJson = False,
) -> None:
    """Run a study under two revisions of its code and compare.

    Each revision has its own checkout and warm workers. Trials alternate between the two on this machine. The exit code
    is 4 if trials failed.

    Example:  raypar ab main HEAD --fail-if-slower 5% -- study studies/batch_size.py --set epochs=1
    """
    allowed = common.allowed_share(fail_if_slower, inconclusive)
    to_stdout = markdown is not None and str(markdown) == "-"
    common.check_json_alone(as_json, {"--markdown -": to_stdout})
    a, b, study_words = split_words(words)
    if b is None:
        b = a if patch is not None or env is not None else "."
    values = study_values(study_words, context.find_root().command)
    if refused := [each.word for each in all_flags() if values[each.name] and not each.is_compared]:
        problem = f"{refused[0]}: `raypar ab` runs on this machine and keeps no model"
        raise RayparError(problem, hint="leave it out, or compare two studies with `raypar store compare`")
    check_for_training("the trials run here")
    from raypar.execution.revisions import StudyRequest, comparison
    from raypar.reporting.text import check_file

    for path in (None if to_stdout else markdown, html):
        if path is not None:
            check_file(path)
    common.set_data_dir(values["data_dir"])
    flags = flags_of({**values, **{name: DEFAULTS[name] for name in DEFAULTS if values[name] is None}})
    request, options = StudyRequest(Path(values["target"]), flags), options_here(flags, allowed_share=allowed)
    compared = comparison(a, b, request, patch=patch, env=env, links=link or ())
    with common.document_alone(is_asked=to_stdout), handle_signals(), compared as made:
        options = replace(options, revisions=made.revisions)
        for notice in made.notices:
            common.say(common.stdout(), notice)
        if flags.dry_run:
            show_plan(made.loaded, options)
            return
        name, code = made.loaded.study.name, 0
        outcome = run(
            made.loaded,
            options,
            lambda console, outcome: announce(console, view_of(outcome, name, allowed, inconclusive)),
        )
        if outcome.num_done:
            view = view_of(outcome, name, allowed, inconclusive)
            code = view.exit_code
            if html is not None:
                write_page(view, outcome, made.loaded, options.command, html)
            publish(view, outcome, markdown, shlex.join(options.command), as_json=as_json)
    if outcome.interrupted_by is not None or outcome.broke_off:
        common.exit_as(outcome)
    if code:
        raise typer.Exit(code)


def publish(view: AbView, outcome: ExecutionOutcome, markdown: Path | None, command: str, *, as_json: bool) -> None:
    """Write or print the verdict as Markdown, and print it as JSON, as asked."""
    from raypar.reporting.ab import ab_markdown
    from raypar.reporting.text import write_text
    from raypar.reporting.view import StudyView

    if markdown is not None:
        text = ab_markdown(view, StudyView(outcome.analysis), command)
        if str(markdown) == "-":
            common.print_text(text)
        else:
            write_text(markdown, text)
    if as_json:
        common.print_json(view)


def write_page(
    view: AbView, outcome: ExecutionOutcome, loaded: LoadedStudy, command: Sequence[str], path: Path
) -> None:
    """Write the comparison as HTML."""
    from raypar.provenance import provenance
    from raypar.reporting.comparison_page import ab_page
    from raypar.reporting.html import Origin
    from raypar.reporting.text import write_text

    origin = Origin(provenance(loaded.path, command), study_source=loaded.source)
    write_text(path, ab_page(view, outcome.analysis, tuple(outcome.results.values()), origin))


def announce(console: Console, view: AbView) -> None:
    """Print the verdict, which precedes the study's report."""
    from raypar.reporting.ab import print_verdict

    print_verdict(console, view)


def view_of(outcome: ExecutionOutcome, study: str, allowed: float | None, inconclusive: str | None) -> AbView:
    """Return the comparison of both revisions, with the exit code of a comparison that ran to its end."""
    from raypar.analysis.ab import compare_revisions
    from raypar.reporting.ab import AbView

    compared = compare_revisions(outcome.analysis.evidence)
    code = 0 if allowed is None else common.gate_code(compared.gate(allowed), inconclusive)
    if outcome.failures:
        code = EXIT_TRIALS_FAILED
    return AbView(compared, study, allowed, code, len(outcome.failures))


def split_words(words: Sequence[str]) -> tuple[str, str | None, list[str]]:
    """Return A, B (None: not given) and the words after ``study``. Raises RayparError for other words."""
    for number in (1, 2):
        if words[number : number + 1] == ["study"]:
            a, *b = words[:number]
            return a, b[0] if b else None, list(words[number + 1 :])
    raise RayparError(f"raypar ab {shlex.join(words)}: no `study` after one or two revisions", hint=USAGE)


def study_values(words: Sequence[str], verbs: Any) -> dict[str, Any]:
    """Parse the words after ``raypar study``. Raises RayparError with that command's message."""
    try:
        values: dict[str, Any] = verbs.commands["study"].make_context("raypar study", list(words)).params
    except UsageError as error:
        message, _, hint = usage_message(error, ["study", *words]).partition("\n  → ")
        raise RayparError(message, hint=hint) from None
    return values
