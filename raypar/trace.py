"""Marks in time across processes: ``RAYPAR_TRACE=FILE`` makes each append a JSON line; otherwise nothing happens."""

from __future__ import annotations

import json
import os
import time

VARIABLE = "RAYPAR_TRACE"


def mark(what: str) -> None:
    """Append ``{"at": <Unix time>, "pid": …, "what": …}`` to the trace file, if there is one."""
    path = os.environ.get(VARIABLE)
    if path:
        line = json.dumps({"at": time.time(), "pid": os.getpid(), "what": what}) + "\n"
        with open(path, "a", encoding="utf-8") as file:  # noqa: PTH123 - one write call: lines stay whole
            file.write(line)
