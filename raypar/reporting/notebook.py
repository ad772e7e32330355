"""Output in a notebook's cell: coloured text as HTML, with plain text for notebooks that show no HTML."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group

from raypar.reporting.text import TerminalConsole

COLUMNS = 100
PERIOD_S = 1.0  # between two drawings of a live display
_PAGE = '<pre style="line-height: 1.25; white-space: pre">{code}</pre>'


def open_notebook() -> Any:
    """Return the module ``IPython`` in a notebook or its shell; None elsewhere."""
    module = sys.modules.get("IPython")
    return module if module is not None and module.get_ipython() is not None else None


@dataclass(frozen=True)
class Printed:
    """A printed text, for a cell or a terminal."""

    text: str
    html: str

    @classmethod
    def of(cls, prints: Callable[[Console], object]) -> Printed:
        """Return what a function prints on a console."""
        console = TerminalConsole(
            file=io.StringIO(), width=COLUMNS, record=True, color_system="truecolor", force_jupyter=False
        )
        prints(console)
        return cls(console.export_text(clear=False), console.export_html(inline_styles=True, code_format=_PAGE))

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return {"text/plain": self.text, "text/html": self.html}


class CellDisplay:
    """Live display in a cell, see `raypar.reporting.live.Display`; it is drawn by `refresh`, without a thread."""

    widths: Sequence[int] = ()

    def __init__(self, notebook: Any, render: Callable[[], Group]) -> None:
        self._notebook, self._render = notebook, render
        self._handle: Any = None
        self._drawn_s = -PERIOD_S

    def start(self, refresh: bool = False) -> None:
        self._handle = self._notebook.display.display(self._shown(), display_id=True)

    def refresh(self) -> None:
        """Draw again, unless that was done a moment ago."""
        if self._handle is not None and time.monotonic() - self._drawn_s >= PERIOD_S:
            self._handle.update(self._shown())

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.update(Printed("", ""))

    def _shown(self) -> Printed:
        self._drawn_s = time.monotonic()
        return Printed.of(lambda console: console.print(self._render()))
