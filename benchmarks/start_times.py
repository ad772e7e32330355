"""Run time of `raypar --help`, `raypar list` and `raypar report`, from process start to end, on a small stored study.

The store is that of tests/golden: 7 trials in an embedded MLflow database. Every measurement is a process, in random
order within each round, after an uncounted one, which also writes the bytecode that an installed raypar has.
`--other PATH` also measures another checkout of raypar, with the same Python and packages; ratios (this / other) are
taken round by round.
"""

from __future__ import annotations

import tarfile
from functools import partial
from pathlib import Path

from common import FOLDER, Figure, begin, interleaved, parser_for, print_row, run_raypar, scratch, times

from raypar import units

STORE = FOLDER.parent / "tests" / "golden" / "store.tar.gz"
COMMANDS = (("--help",), ("list",), ("report", "digits"))


def main() -> None:
    parser = parser_for(__doc__, rounds=11, quick_rounds=2)
    parser.add_argument("--other", type=Path, metavar="PATH", help="root of another checkout of raypar")
    args = begin(parser)
    checkouts = {"this": FOLDER.parent}
    if args.other:
        if not (args.other / "raypar" / "cli").is_dir():
            parser.error(f"--other {args.other} has no raypar/cli: give the root of a checkout")
        checkouts["other"] = args.other.resolve()
    with scratch() as folder:
        with tarfile.open(STORE) as tar:
            tar.extractall(folder, filter="data")
        variants = {
            f"{name}: raypar {' '.join(command)}": partial(
                run_raypar, folder, *command, PYTHONPATH=str(checkout), COLUMNS="80", PYTHONDONTWRITEBYTECODE=""
            )
            for command in COMMANDS
            for name, checkout in checkouts.items()
        }
        for variant in variants.values():
            variant()
        times_s = interleaved(variants, args.rounds)
    for command in COMMANDS:
        title = f"raypar {' '.join(command)}"
        measured_s = [times_s[f"{name}: {title}"] for name in checkouts]
        for name, values in zip(checkouts, measured_s, strict=True):
            suffix = f", {name}" if len(checkouts) > 1 else ""
            print_row(f"{title}{suffix}", Figure.of(values).show(units.seconds))
        if len(measured_s) == 2:
            print_row(f"{title}, this / other", Figure.ratio(*measured_s).show(times))


if __name__ == "__main__":
    main()
