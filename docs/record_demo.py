"""Record raypar/demo.jsonl, the stored study of `raypar demo`: the quick start, on this machine, which has to be idle.

python docs/record_demo.py

The study runs as a user's does. Its journal is kept by a second link, since raypar removes it once the database has all
of it; then this machine's names and folders are replaced, and the page is left out, which can be made again.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from raypar.track.journal import journal_paths

ROOT = Path(__file__).resolve().parents[1]
STUDY = ROOT / "studies" / "quickstart.py"
DEMO = ROOT / "raypar" / "demo.jsonl"
HOST = "demo"


def recorded(folder: Path) -> str:
    """Run the study in a folder and return its journal."""
    command = [Path(sys.executable).with_name("raypar"), "study", str(STUDY), "--profile", *sys.argv[1:]]
    kept = folder / "journal"
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("RAYPAR_", "MLFLOW_"))}
    running = subprocess.Popen(command, cwd=folder, env={**environment, "PYTHONPATH": str(ROOT)})
    while running.poll() is None and not kept.exists():
        for path in journal_paths(folder):
            kept.hardlink_to(path)
        time.sleep(0.1)
    if running.wait() != 0:
        sys.exit(f"the study ended with exit code {running.returncode}")
    return kept.read_text(encoding="utf-8")


def without_machine(journal: str, folder: Path) -> str:
    """Replace the names of this machine and its folders."""
    first = json.loads(journal.partition("\n")[0])
    hosts = {first["tags"]["host"], os.uname().nodename}
    origin = subprocess.run(
        ["git", "remote", "get-url", "origin"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    folders = filter(None, (str(folder), str(ROOT), origin.stdout.strip()))
    for name, text in (*((name, "/project") for name in folders), *((host, HOST) for host in hosts)):
        journal = journal.replace(json.dumps(name)[1:-1], text)
    lines = [line for line in journal.splitlines(keepends=True) if json.loads(line)["kind"] != "artifact"]
    return re.sub(r'"node": ?\["[^"]*"', f'"node":["{HOST}"', "".join(lines))


def main() -> None:
    with TemporaryDirectory() as name:
        folder = Path(name).resolve()
        DEMO.write_text(without_machine(recorded(folder), folder), encoding="utf-8")


if __name__ == "__main__":
    main()
