"""Sentences in lines: `wrapped`."""

from __future__ import annotations

from rich.cells import cell_len

_UNITS = ("%", "s", "ms", "µs", "us", "min", "h", "samples/s", "worker", "workers")


def wrapped(text: str, width: int) -> list[str]:
    """Lines of at most `width` cells; a value stays with its unit and its interval, which is in one piece.

    A word that is longer than a line has a line of its own, unbroken.
    """
    lines: list[str] = []
    for piece in _pieces(text):
        if lines and cell_len(lines[-1]) + 1 + cell_len(piece) <= width:
            lines[-1] += " " + piece
        else:
            lines.append(piece)
    return lines


def _pieces(text: str) -> list[str]:
    """Words, save that ``1.87× [1.80, 1.95]`` is one, and so are ``93 %`` and ``0.96 s``."""
    pieces: list[str] = []
    for word in text.split():
        before = pieces[-1] if pieces else ""
        is_in_brackets = before.rfind("[") > before.rfind("]")
        is_unit = before[-1:].isdigit() and word.rstrip(".,;:)") in _UNITS
        is_interval = word.startswith("[") and before.endswith(("×", "x", "%", *_UNITS))
        if is_in_brackets or is_unit or is_interval:
            pieces[-1] += " " + word
        else:
            pieces.append(word)
    return pieces


def hanging(text: str, width: int, indent: str = "  ") -> list[str]:
    """The text in lines for a console of this width, those after the first indented."""
    lines = wrapped(text, max(20, width - 1 - len(indent)))
    return [indent * bool(i) + line for i, line in enumerate(lines)]
