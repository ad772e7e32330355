"""Command line: verbs only. Heavy imports happen inside the commands, so that help is instant."""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from raypar.cli.ab import ab
from raypar.cli.cluster import attach, node_command, stop
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
from raypar.errors import EXIT_BAD_INPUT, closest, odd_characters, shortened
from raypar.reporting.text import MIN_WIDTH
from raypar.signals import EXIT_CODES, EXIT_NOBODY_READS, discard, is_closed

# Typer has its own click, or takes the one that is installed, and exports neither's UsageError.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]
_UNKNOWN = re.compile(r"No such (?P<what>command|option):? '?(?P<word>[^\s'=]+)'?")


DASHES = tuple("\N{HYPHEN}\N{NON-BREAKING HYPHEN}\N{FIGURE DASH}\N{EN DASH}\N{EM DASH}\N{MINUS SIGN}")


class PlainFlags:
    """Part of a command that shows no type for its flags, which take no value."""

    def get_params(self, context: Any) -> list[Any]:
        params: list[Any] = super().get_params(context)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class Verb(PlainFlags, TyperCommand):
    """One command."""


class Verbs(PlainFlags, TyperGroup):
    """Group of all commands."""

    def main(self, args: Sequence[str] | None = None, *others: Any, **flags: Any) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        columns = os.environ.get("COLUMNS", "")
        if not columns.isdecimal() or int(columns) < MIN_WIDTH:  # 0: unknown; rich would print nothing
            os.environ.pop("COLUMNS", None)
        if not flags.get("standalone_mode", True) or not words:  # no word: the help
            return super().main(words, *others, **flags)
        try:
            Path.cwd()
            code = super().main(words, *others, **{**flags, "standalone_mode": False})
        except FileNotFoundError:
            typer.echo("error: the current folder was removed\n  → cd to another one", err=True)
            sys.exit(EXIT_BAD_INPUT)
        except UsageError as error:
            typer.echo(f"error: {usage_message(error, words)}", err=True)
            sys.exit(EXIT_BAD_INPUT)
        except typer.Abort:
            sys.exit(1)
        except SystemExit as end:  # of click or rich, whose help nobody reads any more
            sys.exit(EXIT_NOBODY_READS if end.code == 1 else end.code)
        sys.exit(code if isinstance(code, int) else 0)


def usage_message(error: Any, words: Sequence[str]) -> str:
    """Return what is wrong with the flags, and the fix."""
    context, parameter = error.ctx, getattr(error, "param", None)
    verb = [word for word in words[:1] if not word.startswith("-")]
    command = context.command_path if context is not None else " ".join(["raypar", *verb])
    hint = f"`{command} --help` shows how"
    message = error.format_message().rstrip(".")
    if parameter is not None and (given := list(_given(parameter.opts, words))) and error.message:
        problem = error.message.removeprefix("Input ").partition(", unable to")[0].rstrip(".")
        message = f"{parameter.opts[0]} {shortened(given[-1])}: {problem}"
        about = " ".join(str(getattr(parameter, "help", None) or "").split()).rstrip(".")
        hint = f"{about}; {hint}" if about else hint
    elif context is not None and (match := _UNKNOWN.match(message)):
        message, word = match.group(0), match["word"].lstrip("-")
        if match["what"] == "command":
            names = {name: name for name in context.command.list_commands(context)}
        else:
            names = _flags_of(context.command, context)
        if close := closest(word, names):
            hint = f"did you mean {' or '.join(names[name] for name in close)}?{odd_characters(word, close[0])} {hint}"
        elif verb == ["ab"]:
            of_study = _flags_of(context.find_root().command.commands["study"], context)
            if close := closest(word, of_study):
                hint = f"flags of the study follow it: `raypar ab A B -- study FILE {of_study[close[0]]} …`"
    elif context is not None and (dashed := [word for word in words if word.startswith(DASHES)]):
        word, names = dashed[0].lstrip("".join(("-", *DASHES))).partition("=")[0], _flags_of(context.command, context)
        close = closest(word, names)
        meant = f"did you mean {names[close[0]]}?" if close else "a flag begins with two hyphens"
        hint = f"{meant}{odd_characters(dashed[0], '')} {hint}"
    return f"{message}\n  → {hint}"


def _flags_of(command: Any, context: Any) -> dict[str, str]:
    """Return the long flags of a command, by their names without dashes."""
    flags = (flag for param in command.get_params(context) for flag in (*param.opts, *param.secondary_opts))
    return {flag.lstrip("-"): flag for flag in flags if flag.startswith("--")}


def _given(flags: Sequence[str], words: Sequence[str]) -> Iterator[str]:
    """Yield the values of an option in a command line."""
    for word, after in zip(words, [*words[1:], ""], strict=True):
        flag, equals, value = word.partition("=")
        if flag in flags:
            yield value if equals else after


app = typer.Typer(
    name="raypar",
    cls=Verbs,
    help="Declare a training study, run it on warm Ray Train gangs, and learn what parallelism bought.",
    epilog="Examples:  raypar study studies/quickstart.py    raypar report quickstart    raypar ui",
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


def command(
    function: Callable[..., None], epilog: str | None = None, name: str | None = None, *, passes_flags: bool = False
) -> None:
    """Add a command with --debug, whose errors are reported in one message.

    Args:
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
    app.command(name, cls=Verb, epilog=epilog, context_settings=settings)(reported)


command(init, "Examples:  raypar init    raypar init train.py && raypar study train_study.py")
command(study, "Example:  raypar study studies/batch_size.py --data-dir data --set epochs=1 --repeats 5")
command(plan, "Example:  raypar plan studies/batch_size.py --set num_workers=1,2,4")
command(resume, "Example:  raypar resume batch_size")
command(attach, "Example:  raypar attach batch_size --address http://127.0.0.1:8265")
command(stop, "Example:  raypar stop batch_size --address http://127.0.0.1:8265")
command(
    node_command, "Example:  raypar node-command >add-node.sh    # and there: bash add-node.sh", name="node-command"
)
command(list_studies, name="list")
command(show)
command(report)
command(export, "Examples:  raypar export batch_size trials.csv    raypar export batch_size summary.md --force")
command(delete, "Example:  raypar delete batch_size")
command(rename, "Example:  raypar rename batch_size batch_size_old")
command(compare, "Example:  raypar compare main_branch my_branch --fail-if-slower 5%")
command(ab, "Example:  raypar ab main HEAD --fail-if-slower 5% -- study studies/batch_size.py --set epochs=1")
command(workloads, "Example:  raypar workloads mnist_cnn")
command(generate, 'Example:  raypar generate gpt2_finetune --prompt "Write a function to add two numbers."')
command(fit, "Examples:  raypar fit strong_scaling    raypar fit times.csv --scaling weak")
command(predict, "Example:  raypar predict strong_scaling --workers 1024 --nodes-of 8 --network 100Gbit")
command(recommend, "Example:  raypar recommend strong_scaling --target accuracy=0.97 --min-efficiency 0.7")
command(profile, "Example:  raypar profile studies/strong_scaling.py --set num_workers=2")
command(fit_batch, "Example:  raypar fit-batch studies/strong_scaling.py --max-memory 2GB", name="fit-batch")
command(work, "Example:  raypar work resnet --set architecture=resnet50 --set image_size=224")
command(sync)
command(ui, "Examples:  raypar ui    raypar ui batch_size --port 5050")
command(doctor)
command(
    demo, "Examples:  raypar demo    raypar demo recommend --target accuracy=0.95    raypar demo ui", passes_flags=True
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
