"""The console that commands write to: text of others' making can't steer the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.segment import Segment

from raypar.report.plain import harmless


class TerminalConsole(Console):
    """A console whose own colours and cursor moves work, and no others'; it reads no markup out of names."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, **options})

    def render(self, *args: Any, **kwargs: Any) -> Iterable[Segment]:
        for segment in super().render(*args, **kwargs):
            # Its control segments hold moves and no text.
            yield segment if segment.control else Segment(harmless(segment.text), segment.style)
