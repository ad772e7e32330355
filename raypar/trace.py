"""Time marks across processes: with ``RAYPAR_TRACE=FILE``, each mark appends a JSON line to the file."""

from __future__ import annotations

import json
import os
import time

VARIABLE = "RAYPAR_TRACE"


def mark(what: str) -> None:
    """Append ``{"at": <Unix time>, "pid": …, "what": …}`` to the trace file, if one is set."""
    path = os.environ.get(VARIABLE)
    if path:
        line = json.dumps({"at": time.time(), "pid": os.getpid(), "what": what}) + "\n"
        with open(path, "a", encoding="utf-8") as file:  # noqa: PTH123 - one write call: lines stay whole
            file.write(line)
