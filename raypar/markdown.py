"""Markdown in which the texts of a study are harmless, wherever it is shown."""

from __future__ import annotations

import re

_TAG = re.compile(r"<(?=[A-Za-z/!?])")  # of HTML, and of links in angle brackets
# Addresses may begin on the next line. Relative ones have no colon before their first slash, and no entity or escape,
# which could hide one.
_WEB, _RELATIVE = r"(?>\s*)https?://", r"(?>\s*)(?:[^\s:&\\<>()]+[/?#)\s]|[/?#)])"
_LINK = re.compile(rf"\](?=\((?!{_WEB}|{_RELATIVE}))", re.IGNORECASE)
_LABEL = r"\[(?:\\.|[^\]\\])*\]"
_DEFINITION = re.compile(rf"^([\s>*+\d.)-]*{_LABEL})(?=:(?!{_WEB}))", re.IGNORECASE | re.MULTILINE)


def harmless(text: str) -> str:
    """Return Markdown without HTML, and without links to anything but http, https and relative addresses.

    Both are shown as they are written. The syntax is that of https://spec.commonmark.org/0.31.2/.
    """
    text = _TAG.sub("&lt;", text)
    return _DEFINITION.sub(r"\1\\", _LINK.sub("]\\\\", text))
