"""Mistakes in a command line itself are told as all others are: one message, with the value and the way out."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from raypar.errors import EXIT_BAD_INPUT, shortened

# Typer has its own click, or takes the one that is installed, and exports neither's UsageError.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


class Verbs(TyperGroup):
    """The group of all commands."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        if not standalone_mode or not words:  # no word: the help
            return super().main(words, prog_name, complete_var, standalone_mode, windows_expand_args, **extra)
        try:
            Path.cwd()
            code = super().main(words, prog_name, complete_var, False, windows_expand_args, **extra)
        except FileNotFoundError:
            typer.echo("error: the folder that you are in is gone\n  → cd to one that is there", err=True)
            sys.exit(EXIT_BAD_INPUT)
        except _UsageError as error:
            typer.echo(f"error: {told(error, words)}", err=True)
            sys.exit(EXIT_BAD_INPUT)
        except typer.Abort:
            sys.exit(1)
        sys.exit(code if isinstance(code, int) else 0)


def told(error: Any, words: Sequence[str]) -> str:
    """What is wrong, and where the right way is told."""
    context, parameter = error.ctx, getattr(error, "param", None)
    verb = [word for word in words[:1] if not word.startswith("-")]
    command = context.command_path if context is not None else " ".join(["raypar", *verb])
    way_out = f"`{command} --help` shows how"
    message = error.format_message().rstrip(".")
    if parameter is not None and (given := list(_given(parameter.opts, words))) and error.message:
        problem = error.message.removeprefix("Input ").partition(", unable to")[0].rstrip(".")
        message = f"{parameter.opts[0]} {shortened(given[-1])}: {problem}"
        about = " ".join(str(getattr(parameter, "help", None) or "").split()).rstrip(".")
        way_out = f"{about}; {way_out}" if about else way_out
    elif (close := getattr(error, "possibilities", None)) and " (" in message:
        message, way_out = message.partition(" (")[0], f"did you mean {' or '.join(sorted(close))}? {way_out}"
    return f"{message}\n  → {way_out}"


def _given(flags: Sequence[str], words: Sequence[str]) -> Iterator[str]:
    """The values of an option in a command line."""
    for word, after in zip(words, [*words[1:], ""], strict=True):
        flag, equals, value = word.partition("=")
        if flag in flags:
            yield value if equals else after
