"""Command that runs a study under two revisions of its code, and says which is faster."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raypar.cli import common
from raypar.cli.study import options_here, run, show_plan
from raypar.cli.verbs import UsageError, usage_message
from raypar.errors import RayparError, check_for_training
from raypar.execution.flags import RunFlags, all_flags
from raypar.signals import handle_signals

if TYPE_CHECKING:
    from rich.console import Console

    from raypar.execution.results import ExecutionOutcome
    from raypar.reporting.ab import AbView

EXIT_TRIALS_FAILED = 4
DEFAULTS = {"until": "settled", "margin": 0.02, "max_repeats": 100, "budget": 600.0}  # of flags of the study
USAGE = "write `raypar ab A B -- study FILE`, with a revision (main, HEAD~3, .) for A and for B"


def ab(
    context: typer.Context,
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="A [B] -- study FILE [FLAGS]",
            help="Two revisions as git names them, `.` for the working tree as it is; then `study` with its flags. "
            "(default of B: `.`, or A with --patch or --env)",
        ),
    ],
    patch: Annotated[Path | None, typer.Option(metavar="FILE", help="Apply this patch to B.")] = None,
    env: Annotated[
        Path | None,
        typer.Option(metavar="VENV", help="Run B in this virtual environment, of the same Python and Ray."),
    ] = None,
    link: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="Link this folder of the working tree, which git ignores, into both."),
    ] = None,
    fail_if_slower: common.FailIfSlower = None,
    inconclusive: common.Inconclusive = None,
    markdown: Annotated[
        Path | None, common.output(metavar="FILE", help="Write the verdict for a pull request; -: to standard output.")
    ] = None,
    as_json: common.AsJson = False,
) -> None:
    """Run a study under two revisions of its code and compare.

    Each revision has a checkout and warm workers of its own; its trials alternate with the other's on this machine.
    The exit code is 4 where trials failed.
    """
    allowed = common.allowed_share(fail_if_slower, inconclusive)
    to_stdout = markdown is not None and str(markdown) == "-"
    common.check_json_alone(as_json, {"--markdown -": to_stdout})
    a, b, study_words = split_words(words)
    if b is None:
        b = a if patch is not None or env is not None else "."
    values = study_values(study_words, context.find_root().command)
    if refused := [each.word for each in all_flags() if values[each.name] and not each.is_compared]:
        problem = f"{refused[0]}: `raypar ab` runs on this machine, and keeps no model"
        raise RayparError(problem, hint="leave it out, or compare two studies with `raypar compare`")
    check_for_training("the trials run here")
    from raypar.execution.revisions import StudyRequest, comparison
    from raypar.reporting.text import check_file, write_text

    if markdown is not None and not to_stdout:
        check_file(markdown)
    common.set_data_dir(values["data_dir"])
    flags = RunFlags.parsed({**values, **{name: DEFAULTS[name] for name in DEFAULTS if values[name] is None}})
    request, options = StudyRequest(values["file"], flags), options_here(flags, allowed_share=allowed)
    alone = common.document_alone(is_asked=to_stdout) if to_stdout else contextlib.nullcontext()
    with alone, handle_signals(), comparison(a, b, request, patch=patch, env=env, links=link or ()) as made:
        options = replace(options, revisions=made.revisions)
        for notice in made.notices:
            common.say(common.stdout(), notice)
        if flags.dry_run:
            show_plan(made.loaded, options)
            return
        name = made.loaded.study.name

        def announce(console: Console, outcome: ExecutionOutcome) -> None:
            """Print the verdict, which stands before the study's report."""
            from raypar.reporting.ab import print_verdict

            print_verdict(console, view_of(outcome, name, allowed, inconclusive))

        outcome = run(made.loaded, options, announce)
        code = 0
        if outcome.num_done:
            from raypar.reporting.ab import ab_markdown
            from raypar.reporting.view import StudyView

            view = view_of(outcome, name, allowed, inconclusive)
            code = view.exit_code
            if markdown is not None:
                text = ab_markdown(view, StudyView(outcome.analysis), shlex.join(options.command))
                if to_stdout:
                    common.print_text(text)
                else:
                    write_text(markdown, text)
            if as_json:
                common.print_json(view)
    if outcome.interrupted_by is not None or outcome.broke_off:
        common.exit_as(outcome)
    if code:
        raise typer.Exit(code)


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
    """Return A, B (None: not given) and what follows ``study``. Raises RayparError where it is otherwise."""
    for number in (1, 2):
        if words[number : number + 1] == ["study"]:
            a, *b = words[:number]
            return a, b[0] if b else None, list(words[number + 1 :])
    raise RayparError(f"raypar ab {shlex.join(words)}: no `study` after one or two revisions", hint=USAGE)


def study_values(words: Sequence[str], verbs: Any) -> dict[str, Any]:
    """Parse the options of ``raypar study``, one of the verbs; a mistake is reported as that command does."""
    try:
        values: dict[str, Any] = verbs.commands["study"].make_context("raypar study", list(words)).params
    except UsageError as error:
        message, _, hint = usage_message(error, ["study", *words]).partition("\n  → ")
        raise RayparError(message, hint=hint) from None
    return values
