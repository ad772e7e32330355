"""Command line: the table of verbs.

A verb's module is imported when its options are needed, so that ``raypar --help`` is instant. Heavier imports happen
inside the verbs.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

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
def root(version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False) -> None:
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
    where: str,
    summary: str,
    *,
    name: str | None = None,
    panel: str | None = None,
    of: typer.Typer = app,
    passes_flags: bool = False,
) -> None:
    """Add a command.

    Args:
        where: place of its function in this package: ``module:function``.
        summary: line in the list of commands, and the first line of its help.
        name: its name; None: that of the function.
        panel: panel of the first screen.
        of: its group.
        passes_flags: it accepts any flags and passes them on to another command.
    """
    any_flags = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
    make = of.command(
        name or where.partition(":")[2],
        cls=Verb,
        help=where,
        short_help=summary,
        context_settings=any_flags if passes_flags else {},
        rich_help_panel=panel,
    )
    make(lambda: None)  # replaced when the function is imported


command(
    "demo:demo", "Show a finished study that ships with raypar; nothing is trained.", panel=START, passes_flags=True
)
command("init:init", "Write a study file for a training script.", panel=START)
command("study:study", "Run a study and report its answer.", panel=START)
command("study:plan", "Show what a study would run, and for how long.", panel=START)
command("store:doctor", "Check the installation, data, store and Ray, with fixes.", panel=START)

command("store:report", "Show the answer of a stored study.", panel=ANSWERS)
command("why:why", "Explain why a training takes as long as it does.", panel=ANSWERS)
command("improve:improve", "Find settings that make a script faster.", panel=ANSWERS)
command("recommend:recommend", "Recommend a configuration of a study, with the reason.", panel=ANSWERS)
command("ab:ab", "Run a study under two revisions of its code and compare.", panel=ANSWERS)

command("store:list_studies", "List the studies in the store.", name="list", panel=AROUND)
command("store:ui", "Show the studies in MLflow's UI, in the browser.", panel=AROUND)

store = group("store", "Show, compare, export, import, resume, rename or delete studies.")
command("store:show", "Show every trial of a study.", of=store)
command("store:compare", "Compare studies of two machines, versions or branches.", of=store)
command("store:export", "Write a study's trials, or a summary, into a file.", of=store)
command("imports:import_runs", "Import runs of MLflow or a table as a study.", name="import", of=store)
command("study:resume", "Run the missing trials of an interrupted study.", of=store)
command("store:rename", "Give a study another name.", of=store)
command("store:delete", "Delete a study.", of=store)
command("store:sync", "Upload results that are not in the store yet.", of=store)

cluster = group("cluster", "Use Slurm or Kubernetes; follow or stop a study; add a machine.")
command("slurm:slurm", "Run a study as a Slurm job.", of=cluster)
command("cluster:attach", "Follow a submitted study to its end.", of=cluster)
command("cluster:stop", "Stop a submitted study; its finished trials are kept.", of=cluster)
command("cluster:add_node", "Print the commands that add a machine to a cluster.", name="add-node", of=cluster)
command("kubernetes:kubernetes", "Print a study as a KubeRay job for Kubernetes.", of=cluster)

model = group("model", "List workloads; count, profile, fit, predict or sample networks.")
command("store:workloads", "List the workloads that ship with raypar, or show one.", name="list", of=model)
command("work:work", "Count a network's operations and its least training time.", of=model)
command("profile:profile", "Show what each worker spends a step's time on.", of=model)
command("fit_batch:fit_batch", "Find the largest batch that fits into memory.", name="fit-batch", of=model)
command("memory:memory", "Predict the memory of a worker.", of=model)
command("network:network", "Measure the network between workers.", of=model)
command("fit:fit", "Fit scaling laws to a study or a table.", of=model)
command("predict:predict", "Predict more workers or another network.", of=model)
command("layout:layout", "Find the fastest way to divide a step among workers.", of=model)
command("store:generate", "Generate text with the best model that a study kept.", of=model)


def main() -> None:
    try:
        try:
            app()
        finally:
            if is_closed(sys.stdout):
                discard(sys.stdout)  # writing its buffer at exit would fail
    except SystemExit as end:
        if isinstance(end.code, int) and end.code in (*EXIT_CODES, EXIT_BAD_INPUT):
            # Everything is cleaned up. Don't wait for libraries, for example for an import in a thread.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(end.code)
        raise
