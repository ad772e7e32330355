"""Command line: verbs only. Heavy imports happen inside the commands, so that help is instant."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from raypar.cli.ab import ab
from raypar.cli.cluster import add_node, attach, stop
from raypar.cli.common import Debug, document_alone, report_errors
from raypar.cli.demo import demo
from raypar.cli.fit_batch import fit_batch
from raypar.cli.init import init
from raypar.cli.predict import fit, predict, work
from raypar.cli.profile import profile
from raypar.cli.recommend import recommend
from raypar.cli.store import (
    compare,
    delete,
    doctor,
    export,
    generate,
    list_studies,
    rename,
    report,
    show,
    sync,
    ui,
    workloads,
)
from raypar.cli.study import plan, resume, study
from raypar.cli.verbs import Verb, Verbs
from raypar.errors import EXIT_BAD_INPUT
from raypar.signals import EXIT_CODES, discard, is_closed

START, ANSWERS, AROUND, GROUPS = "Start", "Answers", "Look around", "Groups"

app = typer.Typer(
    name="raypar",
    cls=Verbs,
    help="Declare a training study, run it on warm gangs, learn what parallelism bought.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Show the version and leave.")] = False) -> None:
    if version:
        from raypar import __version__

        typer.echo(f"raypar {__version__}")
        raise typer.Exit


def group(name: str, summary: str) -> typer.Typer:
    """Add a group of commands."""
    made = typer.Typer(name=name, cls=Verbs, help=summary, no_args_is_help=True)
    app.add_typer(made, rich_help_panel=GROUPS)
    return made


def command(
    function: Callable[..., None],
    epilog: str | None = None,
    name: str | None = None,
    *,
    panel: str | None = None,
    of: typer.Typer = app,
    passes_flags: bool = False,
) -> None:
    """Add a command with --debug, whose errors are reported in one message.

    Args:
        panel: of the first screen.
        of: its group.
        passes_flags: to another command: it takes any.
    """

    @functools.wraps(function)
    def reported(*, debug: bool, **flags: Any) -> None:
        with report_errors(debug), document_alone(is_asked=flags.get("as_json", False)):
            function(**flags)

    signature = inspect.signature(function, eval_str=True)
    of_debug = inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Debug)
    reported.__signature__ = signature.replace(parameters=[*signature.parameters.values(), of_debug])  # type: ignore[attr-defined]
    reported.__annotations__ = {**function.__annotations__, "debug": Debug}
    taken = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
    settings = taken if passes_flags else {}
    of.command(name, cls=Verb, epilog=epilog, context_settings=settings, rich_help_panel=panel)(reported)


command(
    demo,
    "Examples:  raypar demo    raypar demo recommend --target accuracy=0.95    raypar demo ui",
    panel=START,
    passes_flags=True,
)
command(init, "Examples:  raypar init    raypar init train.py && raypar study train_study.py", panel=START)
command(
    study,
    "Example:  raypar study studies/batch_size.py --data-dir data --set epochs=1 --repeats 5",
    panel=START,
)
command(plan, "Example:  raypar plan studies/batch_size.py --set num_workers=1,2,4", panel=START)
command(doctor, panel=START)

command(report, "Example:  raypar report batch_size --html report.html --open", panel=ANSWERS)
command(
    recommend,
    "Example:  raypar recommend strong_scaling --target accuracy=0.97 --min-efficiency 0.7",
    panel=ANSWERS,
)
command(compare, "Example:  raypar compare main_branch my_branch --fail-if-slower 5%", panel=ANSWERS)
command(
    ab,
    "Example:  raypar ab main HEAD --fail-if-slower 5% -- study studies/batch_size.py --set epochs=1",
    panel=ANSWERS,
)
command(fit, "Examples:  raypar fit strong_scaling    raypar fit times.csv --scaling weak", panel=ANSWERS)

command(list_studies, name="list", panel=AROUND)
command(ui, "Examples:  raypar ui    raypar ui batch_size --port 5050", panel=AROUND)

store = group("store", "Show, export, resume, rename, delete or upload stored studies.")
command(show, "Example:  raypar store show batch_size", of=store)
command(
    export,
    "Examples:  raypar store export batch_size trials.csv    raypar store export batch_size summary.md --force",
    of=store,
)
command(resume, "Example:  raypar store resume batch_size", of=store)
command(rename, "Example:  raypar store rename batch_size batch_size_old", of=store)
command(delete, "Example:  raypar store delete batch_size", of=store)
command(sync, of=store)

cluster = group("cluster", "Follow or stop a study on a cluster, or add a machine to one.")
command(attach, "Example:  raypar cluster attach batch_size --address http://127.0.0.1:8265", of=cluster)
command(stop, "Example:  raypar cluster stop batch_size --address http://127.0.0.1:8265", of=cluster)
command(
    add_node,
    "Example:  raypar cluster add-node >add-node.sh    # and there: bash add-node.sh",
    name="add-node",
    of=cluster,
)

model = group("model", "List workloads; count, profile, predict or sample their networks.")
command(workloads, "Example:  raypar model list mnist_cnn", name="list", of=model)
command(work, "Example:  raypar model work resnet --set architecture=resnet50 --set image_size=224", of=model)
command(profile, "Example:  raypar model profile studies/strong_scaling.py --set num_workers=2", of=model)
command(
    fit_batch,
    "Example:  raypar model fit-batch studies/strong_scaling.py --max-memory 2GB",
    name="fit-batch",
    of=model,
)
command(
    predict,
    "Example:  raypar model predict strong_scaling --workers 1024 --nodes-of 8 --network 100Gbit",
    of=model,
)
command(
    generate,
    'Example:  raypar model generate gpt2_finetune --prompt "Write a function to add two numbers."',
    of=model,
)


def main() -> None:
    try:
        try:
            app()
        finally:
            if is_closed(sys.stdout):
                discard(sys.stdout)  # what is in its buffer would be written at the end, with an error
    except SystemExit as end:
        if isinstance(end.code, int) and end.code in (*EXIT_CODES, EXIT_BAD_INPUT):
            # Everything is put away: what libraries still do (an import in a thread, say) is not waited for.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(end.code)
        raise
