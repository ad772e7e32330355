"""Command-line options for run flags, generated from `raypar.execution.flags.RunFlags`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, get_args, get_origin

import typer

from raypar.execution.flags import Flag, RunFlags, all_flags


def option(name: str) -> Any:
    """Return Typer's option for a run flag."""
    return _option({each.name: each for each in all_flags()}[name])


def _option(flag: Flag) -> Any:
    return typer.Option(flag.word, metavar=flag.metavar, help=flag.help, rich_help_panel=flag.panel)


def takes(*order: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command run flags, which it receives as its parameter `flags`.

    Args:
        order: names of run flags and of the command's own options, in the order of ``--help``: after its arguments
            and before its other options. Empty: all run flags.
    """
    flags = {each.name: each for each in all_flags()}

    def with_flags(command: Callable[..., None]) -> Callable[..., None]:
        given = inspect.signature(command, eval_str=True).parameters.values()
        of_command = {each.name: each.replace(kind=each.KEYWORD_ONLY) for each in given if each.name != "flags"}
        parameters = {name: each for name, each in of_command.items() if each.default is each.empty}
        parameters |= {
            name: of_command[name] if name in of_command else _parameter(flags[name]) for name in order or flags
        }
        parameters |= of_command

        @functools.wraps(command)
        def taking(**values: Any) -> None:
            ours = {name: values.pop(name) for name in of_command}
            command(**ours, flags=flags_of(values))

        taking.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
        taking.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
        return taking

    return with_flags


def flags_of(values: Mapping[str, object]) -> RunFlags:
    """Return the run flags among the options of a command line, by name. None: not given."""
    given: dict[str, Any] = {}
    for each in all_flags():
        value = values.get(each.name)
        if value is not None and value is not False:
            value = value if each.given is None else each.given
            given[each.name] = tuple(value) if isinstance(value, list) else value
    return RunFlags(**given)


def words_of(flags: RunFlags, *, without: str = "") -> list[str]:
    """Return the words of a command line with these flags. `without`: name of a flag to leave out."""
    words: list[str] = []
    for flag in all_flags():
        value = getattr(flags, flag.name)
        if flag.name != without and value != flag.default:
            is_switch = value is True or flag.given is not None
            for each in value if isinstance(value, tuple) else [value]:
                words += [flag.word] if is_switch else [flag.word, str(each)]
    return words


def _parameter(flag: Flag) -> inspect.Parameter:
    kind: Any = flag.type
    default: object = flag.default
    if flag.given is not None:
        kind, default = bool, False
    elif get_origin(flag.type) is tuple:
        kind, default = list[str] | None, None
    elif kinds := get_args(flag.type):  # the first is the type on a command line
        kind = kinds[0] | None
    annotation = Annotated[kind, _option(flag)]
    return inspect.Parameter(flag.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
