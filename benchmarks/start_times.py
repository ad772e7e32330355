"""How long `raypar --help`, `raypar list` and `raypar report` take, from start to end, on a small stored study.

The store is that of tests/golden: 7 trials in an embedded MLflow database. Every measurement is a process of its own,
in random order in every round, after one that is not counted. `--other PATH` measures another checkout of raypar beside
this one, with the same Python and packages; ratios (this / other) are taken round by round.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import time
from functools import partial
from pathlib import Path

from common import FOLDER, Figure, begin, interleaved, parser_for, scratch, tell, times

from raypar import units

STORE = FOLDER.parent / "tests" / "golden" / "store.tar.gz"
COMMANDS = (("--help",), ("list",), ("report", "digits"))
RUN = "from raypar.cli import main; main()"


def start(checkout: Path, args: tuple[str, ...], folder: Path) -> float:
    """Seconds that a command takes."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "COLUMNS": "80"}
    environment.pop("MLFLOW_TRACKING_URI", None)
    begun_s = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", RUN, *args], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    time_s = time.perf_counter() - begun_s
    if done.returncode:
        raise SystemExit(
            f"raypar {' '.join(args)} of {checkout} ended with exit code {done.returncode}:\n{done.stderr}"
        )
    return time_s


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--other", type=Path, metavar="PATH", help="another checkout of raypar, its root")
    parser.add_argument("--rounds", type=int, default=11, help="[default: %(default)s]")
    args = begin(parser)
    checkouts = {"this": FOLDER.parent}
    if args.other:
        if not (args.other / "raypar" / "cli").is_dir():
            parser.error(f"--other {args.other}: there is no raypar/cli in it")
        checkouts["other"] = args.other.resolve()
    with scratch() as folder:
        with tarfile.open(STORE) as tar:
            tar.extractall(folder, filter="data")
        variants = {
            f"{name}: raypar {' '.join(command)}": partial(start, checkout, command, folder)
            for command in COMMANDS
            for name, checkout in checkouts.items()
        }
        for variant in variants.values():
            variant()
        times_s = interleaved(variants, 2 if args.quick else args.rounds)
    for command in COMMANDS:
        words = " ".join(command)
        taken = [times_s[f"{name}: raypar {words}"] for name in checkouts]
        for name, values in zip(checkouts, taken, strict=True):
            suffix = f", {name}" if len(checkouts) > 1 else ""
            tell(f"raypar {words}{suffix}", Figure.of(values).show(units.seconds))
        if len(taken) == 2:
            tell(f"raypar {words}, this / other", Figure.ratio(*taken).show(times))


if __name__ == "__main__":
    main()
