"""Text for consoles and files that can't have every character, or mustn't."""

from __future__ import annotations

import re

# C0 but for tab and line feed, DEL and C1: the first byte of every escape sequence is among them.
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_STAND_INS = str.maketrans({"×": "x", "–": "-", "±": "+/-", "→": "->", "µ": "u", "─": "-", "…": "...", "∞": "inf"})


def encodable(text: str, encoding: str) -> str:
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


def harmless(text: str) -> str:
    """The text with a question mark for each character that would steer a terminal."""
    return _STEERING.sub("?", text)
