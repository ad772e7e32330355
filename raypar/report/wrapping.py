"""Sentences in lines: `wrapped`, `hanging`; and what no line's end may part: `unbroken`."""

from __future__ import annotations

import re

from rich.cells import cell_len

_NBSP = "\N{NO-BREAK SPACE}"
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:%|s|ms|µs|us|min|h|samples/s|workers?)(?:\W|$))")
_INTERVAL = re.compile(r" \[[^\s\[\]]*\d[^\s\[\]]*, [^\s\[\]]+\]")


def unbroken(text: str) -> str:
    """Return the text with no-break spaces within values: ``93 %``, ``0.96 s``, ``1.87× [1.80, 1.95]``."""
    return _INTERVAL.sub(lambda match: match[0].replace(" ", _NBSP), _BEFORE_UNIT.sub(_NBSP, text))


def wrapped(text: str, width: int) -> list[str]:
    """Return lines of at most `width` cells; a value stays with its unit and its interval.

    A word that is longer than a line has a line of its own, unbroken.
    """
    lines: list[str] = []
    for word in filter(None, unbroken(" ".join(text.split())).split(" ")):
        if lines and cell_len(lines[-1]) + 1 + cell_len(word) <= width:
            lines[-1] += " " + word
        else:
            lines.append(word)
    return [line.replace(_NBSP, " ") for line in lines]


def hanging(text: str, width: int, indent: str = "  ") -> list[str]:
    """The text in lines for a console of this width, those after the first indented."""
    lines = wrapped(text, max(20, width - 1 - len(indent)))
    return [indent * bool(i) + line for i, line in enumerate(lines)]
