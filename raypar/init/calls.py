"""Places of calls in a script, which is read, not run."""

from __future__ import annotations

import ast
from collections.abc import Collection
from pathlib import Path


def lines_of_calls(path: Path, names: Collection[str]) -> tuple[int, ...]:
    """Return the lines that call one of these functions or classes; none if the file can't be read.

    Args:
        names: without modules: ``AdamW`` for ``torch.optim.AdamW(…)``.
    """
    try:
        tree = ast.parse(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, SyntaxError):
        return ()
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return tuple(sorted({call.lineno for call in calls if _called(call.func) in names}))


def _called(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
