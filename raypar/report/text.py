"""Text for terminals and files: safe characters, wrapped lines, the console."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.segment import Segment

# C0 but for tab and line feed, DEL and C1: the first byte of every escape sequence is among them.
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_STAND_INS = str.maketrans({"×": "x", "–": "-", "±": "+/-", "→": "->", "µ": "u", "─": "-", "…": "...", "∞": "inf"})


def ascii_fallback(text: str, encoding: str) -> str:
    """The text as this encoding can have it: unchanged, or with plain stand-ins for what it lacks.

    A stand-in may be longer than what it stands for, by two cells for ``±``.
    """
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(_STAND_INS).encode(encoding, errors="replace").decode(encoding)
    return text


def as_utf8(text: str) -> str:
    """The text as UTF-8 can have it: a lone surrogate becomes a question mark."""
    return text.encode("utf-8", "replace").decode()


def strip_control(text: str) -> str:
    """The text with a question mark for each character that would steer a terminal."""
    return _STEERING.sub("?", text)


_NBSP = "\N{NO-BREAK SPACE}"
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:%|s|ms|µs|us|min|h|samples/s|workers?)(?:\W|$))")
_INTERVAL = re.compile(r" \[[^\s\[\]]*\d[^\s\[\]]*, [^\s\[\]]+\]")


def no_break_values(text: str) -> str:
    """Return the text with no-break spaces within values: ``93 %``, ``0.96 s``, ``1.87× [1.80, 1.95]``."""
    return _INTERVAL.sub(lambda match: match[0].replace(" ", _NBSP), _BEFORE_UNIT.sub(_NBSP, text))


def wrap(text: str, width: int) -> list[str]:
    """Return lines of at most `width` cells; a value stays with its unit and its interval.

    A word that is longer than a line has a line of its own, unbroken.
    """
    lines: list[str] = []
    for word in filter(None, no_break_values(" ".join(text.split())).split(" ")):
        if lines and cell_len(lines[-1]) + 1 + cell_len(word) <= width:
            lines[-1] += " " + word
        else:
            lines.append(word)
    return [line.replace(_NBSP, " ") for line in lines]


def wrap_hanging(text: str, width: int, indent: str = "  ") -> list[str]:
    """The text in lines for a console of this width, those after the first indented."""
    lines = wrap(text, max(20, width - 1 - len(indent)))
    return [indent * bool(i) + line for i, line in enumerate(lines)]


class TerminalConsole(Console):
    """A console whose own colours and cursor moves work, and no others'; it reads no markup out of names."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, **options})

    def render(self, *args: Any, **kwargs: Any) -> Iterable[Segment]:
        for segment in super().render(*args, **kwargs):
            # Its control segments hold moves and no text.
            yield segment if segment.control else Segment(strip_control(segment.text), segment.style)
