"""Verbs, groups of verbs, and messages for command lines that can't be parsed."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command_from_info
from typer.models import CommandInfo

from raypar.cli.common import OUTPUT, Debug, document_alone, report_errors
from raypar.errors import EXIT_BAD_INPUT, closest, odd_characters, shortened
from raypar.reporting.text import MIN_WIDTH
from raypar.signals import EXIT_NOBODY_READS

# Typer bundles click or uses the installed one, and exports neither's UsageError.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]
NO_WORDS = "NoArgsIsHelpError"  # the UsageError of a group without a word, after it has printed its help
_UNKNOWN = re.compile(r"No such (?P<what>command|option):? '?(?P<word>[^\s'=]+)'?")
DASHES = tuple("\N{HYPHEN}\N{NON-BREAKING HYPHEN}\N{FIGURE DASH}\N{EN DASH}\N{EM DASH}\N{MINUS SIGN}")

# Current commands by their former names.
MOVED = {
    "attach": "cluster attach",
    "compare": "store compare",
    "delete": "store delete",
    "export": "store export",
    "fit": "model fit",
    "fit-batch": "model fit-batch",
    "generate": "model generate",
    "node-command": "cluster add-node",
    "predict": "model predict",
    "profile": "model profile",
    "rename": "store rename",
    "resume": "store resume",
    "show": "store show",
    "stop": "cluster stop",
    "sync": "store sync",
    "work": "model work",
    "workloads": "model list",
}


class PlainFlags:
    """Mixin for a command: flags, which take no value, show no type."""

    def get_params(self, context: Any) -> list[Any]:
        params: list[Any] = super().get_params(context)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class _Loaded:
    """Attribute of a `Verb` that comes from its function, which is imported on the first access."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, verb: Verb, _: type) -> Any:
        verb.load()
        return verb.__dict__[self._name]

    def __set__(self, verb: Verb, value: object) -> None:
        verb.__dict__[self._name] = value


class Verb(PlainFlags, TyperCommand):
    """Command whose function is imported when its options or its own help are needed.

    Until then, `help` is the function's place below `raypar.cli`: ``module:function``.
    """

    params, callback, help, epilog = _Loaded(), _Loaded(), _Loaded(), _Loaded()
    _is_loaded = False

    def load(self) -> None:
        """Take the options and the help from the command's function: the end of its docstring has the examples."""
        if self._is_loaded:
            return
        self._is_loaded = True
        module, _, name = str(self.help).partition(":")
        function = getattr(importlib.import_module(f"raypar.cli.{module}"), name)
        details, _, example = (inspect.getdoc(function) or "").partition("\n\nExample")
        info = CommandInfo(name=self.name, callback=reported(function), cls=TyperCommand)
        made = get_command_from_info(info, pretty_exceptions_short=False, rich_markup_mode=self.rich_markup_mode)
        self.params, self.callback = made.params, made.callback
        paragraphs = [str(self.short_help), *(" ".join(part.split()) for part in details.split("\n\n")[1:])]
        self.help = "\n\n".join(paragraphs)
        self.epilog = f"Example{example}" if example else None

    def get_params(self, context: Any) -> list[Any]:
        params = super().get_params(context)
        params[-1].rich_help_panel = OUTPUT  # --help
        return params


def reported(function: Callable[..., None]) -> Callable[..., None]:
    """Return a command's function with --debug; its errors are reported in one message."""

    @functools.wraps(function)
    def reporting(*, debug: bool, **flags: Any) -> None:
        with report_errors(debug), document_alone(is_asked=flags.get("as_json", False)):
            function(**flags)

    signature = inspect.signature(function, eval_str=True)
    of_debug = inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Debug)
    reporting.__signature__ = signature.replace(parameters=[*signature.parameters.values(), of_debug])  # type: ignore[attr-defined]
    reporting.__annotations__ = {**function.__annotations__, "debug": Debug}
    return reporting


class Verbs(PlainFlags, TyperGroup):
    """Group of commands."""

    def get_params(self, context: Any) -> list[Any]:
        params = super().get_params(context)
        for param in params:
            if param.name == "show_completion":  # most users need --install-completion
                param.hidden = True
        return params

    def list_commands(self, context: Any) -> list[str]:
        """Return the names in the order of the help: groups follow verbs."""
        return sorted(self.commands, key=lambda name: isinstance(self.commands[name], Verbs))

    def walk(self) -> Iterator[tuple[tuple[str, ...], Verb]]:
        """Yield each verb with its words; verbs of groups come last."""
        for name in self.list_commands(None):
            command = self.commands[name]
            if isinstance(command, Verbs):
                yield from (((name, *words), verb) for words, verb in command.walk())
            elif isinstance(command, Verb):
                yield (name,), command

    def main(self, args: Sequence[str] | None = None, *others: Any, **flags: Any) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        columns = os.environ.get("COLUMNS", "")
        if not columns.isdecimal() or int(columns) < MIN_WIDTH:  # 0: unknown; rich would print nothing
            os.environ.pop("COLUMNS", None)
        if not flags.get("standalone_mode", True):
            return super().main(words, *others, **flags)
        try:
            Path.cwd()
            code = super().main(words, *others, **{**flags, "standalone_mode": False})
        except FileNotFoundError:
            typer.echo("error: the current folder was removed\n  → cd to another one", err=True)
            sys.exit(EXIT_BAD_INPUT)
        except UsageError as error:
            if type(error).__name__ != NO_WORDS:
                typer.echo(f"error: {usage_message(error, words)}", err=True)
            sys.exit(EXIT_BAD_INPUT)
        except typer.Abort:
            sys.exit(1)
        except SystemExit as end:  # by click or rich, for example if the reader of a help text has gone
            sys.exit(EXIT_NOBODY_READS if end.code == 1 else end.code)
        sys.exit(code if isinstance(code, int) else 0)


def usage_message(error: Any, words: Sequence[str]) -> str:
    """Return the message for faulty words or flags, with the fix."""
    context, parameter = error.ctx, getattr(error, "param", None)
    verb = [word for word in words[:1] if not word.startswith("-")]
    command = context.command_path if context is not None else " ".join(["raypar", *verb])
    hint = f"`{command} --help` shows how"
    message = error.format_message().rstrip(".")
    takes_command = context is not None and any(param.name == "target" for param in context.command.params)
    if parameter is not None and (given := list(_given(parameter.opts, words))) and error.message:
        problem = error.message.removeprefix("Input ").partition(", unable to")[0].rstrip(".")
        message = f"{parameter.opts[0]} {shortened(given[-1])}: {problem}"
        about = " ".join(str(getattr(parameter, "help", None) or "").split()).rstrip(".")
        hint = f"{about}; {hint}" if about else hint
    elif context is not None and (match := _UNKNOWN.match(message)):
        message, word = match.group(0), match["word"].lstrip("-")
        if match["what"] == "command" and context.parent is None and word in MOVED:
            return f"{command} {word} is now `{command} {MOVED[word]}`"
        names = _verbs_of(context) if match["what"] == "command" else _flags_of(context.command, context)
        if close := closest(word, names):
            meant = " or ".join(dict.fromkeys(names[name] for name in close))
            hint = f"did you mean {meant}?{odd_characters(word, close[0])} {hint}"
        elif verb == ["ab"]:
            of_study = _flags_of(context.find_root().command.commands["study"], context)
            if close := closest(word, of_study):
                hint = f"flags of the study follow it: `raypar ab A B -- study FILE {of_study[close[0]]} …`"
        elif takes_command:
            hint = f"--grid {word.replace('-', '_')}=VALUE sets an option of a script; {hint}"
    elif context is not None and (dashed := [word for word in words if word.startswith(DASHES)]):
        word, names = dashed[0].lstrip("".join(("-", *DASHES))).partition("=")[0], _flags_of(context.command, context)
        close = closest(word, names)
        meant = f"did you mean {names[close[0]]}?" if close else "a flag begins with two hyphens"
        hint = f"{meant}{odd_characters(dashed[0], '')} {hint}"
    elif takes_command and "extra argument" in message:
        hint = f"write a command line in quotes; {hint}"
    return f"{message}\n  → {hint}"


def _verbs_of(context: Any) -> dict[str, str]:
    """Return commands by their last word, and moved ones by their old word. The group of the context comes first."""
    root = context.find_root()
    places = {word: place.split() for word, place in MOVED.items()}
    places |= {words[-1]: list(words) for words, _ in reversed(list(root.command.walk()))}
    names = {word: f"`{' '.join([root.command_path, *place])}`" for word, place in places.items()}
    return names | {word: f"`{context.command_path} {word}`" for word in context.command.commands}


def _flags_of(command: Any, context: Any) -> dict[str, str]:
    """Return the long flags of a command by their names without dashes."""
    flags = (flag for param in command.get_params(context) for flag in (*param.opts, *param.secondary_opts))
    return {flag.lstrip("-"): flag for flag in flags if flag.startswith("--")}


def _given(flags: Sequence[str], words: Sequence[str]) -> Iterator[str]:
    """Yield the values of an option in a command line."""
    for word, after in zip(words, [*words[1:], ""], strict=True):
        flag, equals, value = word.partition("=")
        if flag in flags:
            yield value if equals else after
