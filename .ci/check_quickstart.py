"""Run the quick start as a user would, in an empty folder.

It must print the speedup, report that the question is settled or what the budget has left open, and leave no process.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import psutil

STUDY = Path(__file__).resolve().parents[1] / "studies" / "quickstart.py"
TIMEOUT_S = 300
GRACE_S = 15  # for processes to end
MARK = "RAYPAR_QUICKSTART_CHECK"


def marked_processes(mark: str) -> dict[int, str]:
    """Return the command line of every process that inherited the mark, by process id, even if its parent has ended."""
    processes = psutil.process_iter(["environ", "cmdline"])
    return {p.pid: " ".join(p.info["cmdline"] or ()) for p in processes if (p.info["environ"] or {}).get(MARK) == mark}


def main() -> int:
    mark = uuid.uuid4().hex
    raypar = Path(sys.executable).with_name("raypar")
    with tempfile.TemporaryDirectory(prefix="raypar-quickstart-") as folder:
        begun_s = time.monotonic()
        done = subprocess.run(
            [raypar, "study", STUDY],
            cwd=folder,
            env={**os.environ, MARK: mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        time_s = time.monotonic() - begun_s
        print(done.stdout)
        problems = []
        if done.returncode:
            problems.append(f"raypar study ended with exit code {done.returncode}")
        if not re.search(r"\bspeedup\b", done.stdout, re.IGNORECASE):
            problems.append("the output has no speedup table")
        status = r"(settled|not settled \((maximum of repeats|budget spent|disturbed)\))"
        if not re.search(rf"^quickstart: .*, {status}, ", done.stdout, re.MULTILINE):
            problems.append("the report's first line does not name why the study stopped")
        if "Traceback" in done.stdout:
            problems.append("the output has a traceback")
        until_s = time.monotonic() + GRACE_S
        while (left := marked_processes(mark)) and time.monotonic() < until_s:
            time.sleep(0.2)
        problems += [f"process {pid} is still running: {command}" for pid, command in left.items()]
    for problem in problems:
        print(f"quick start: {problem}", file=sys.stderr)
    if not problems:
        print(f"quick start: passed, {time_s:.0f} s")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
