"""Runs the quick start as a user would, in an empty folder: it tells the speedup and leaves no process behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

STUDY = Path(__file__).resolve().parents[1] / "studies" / "quickstart.py"
TIMEOUT_S = 300
GRACE_S = 15  # for processes that are on their way out
MARK = "RAYPAR_QUICKSTART_CHECK"


def marked_processes(mark: str) -> dict[int, str]:
    """Every process that inherited the mark in its environment, whoever is its parent by now."""
    wanted = f"{MARK}={mark}".encode()
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        except OSError:  # ended meanwhile, or another user's
            continue
    return found


def main() -> int:
    mark = uuid.uuid4().hex
    raypar = Path(sys.executable).with_name("raypar")
    with tempfile.TemporaryDirectory(prefix="raypar-quickstart-") as folder:
        began_s = time.monotonic()
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
        took_s = time.monotonic() - began_s
        print(done.stdout)
        problems = []
        if done.returncode:
            problems.append(f"raypar study ended with {done.returncode}")
        if not re.search(r"\bspeedup\b", done.stdout, re.IGNORECASE):
            problems.append("the output has no speedup table")
        if "Traceback" in done.stdout:
            problems.append("the output has a traceback")
        give_up_s = time.monotonic() + GRACE_S
        while (left := marked_processes(mark)) and time.monotonic() < give_up_s:
            time.sleep(0.2)
        problems += [f"process {pid} was left behind: {command}" for pid, command in left.items()]
    for problem in problems:
        print(f"quick start: {problem}", file=sys.stderr)
    if not problems:
        print(f"quick start: fine, {took_s:.0f} s")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
