"""Run time of `raypar --help`, `list`, `report` and the demo's views, from process start to end, on small studies.

The store is that of tests/golden: 7 trials in an embedded MLflow database. Every measurement is a process, in random
order within each round, after an uncounted one, which also writes the bytecode that an installed raypar has.
`--other PATH` also measures another checkout of raypar, with the same Python and packages; ratios (this / other) are
taken round by round. The demo's views run where importing torch or Ray raises, as on a machine that has neither.
"""

from __future__ import annotations

import os
import tarfile
from functools import partial
from pathlib import Path

from common import FOLDER, Figure, begin, interleaved, parser_for, print_bar, print_row, run_raypar, scratch, times

from raypar import units

STORE = FOLDER.parent / "tests" / "golden" / "store.tar.gz"
COMMANDS = (("--help",), ("list",), ("report", "digits"))
DEMO = (("demo",), *(("demo", view) for view in ("recommend", "fit", "predict", "show")))
ABSENT = ("torch", "torchvision", "ray")  # for the demo
BARS_S = {("--help",): 0.5, **dict.fromkeys(DEMO, 2.0)}


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
        (absent := folder / "absent").mkdir()
        for name in ABSENT:
            (absent / f"{name}.py").write_text(f"raise ImportError('no {name} here')\n")
        variants = {
            f"{name}: raypar {' '.join(command)}": partial(
                run_raypar,
                folder,
                *command,
                PYTHONPATH=os.pathsep.join([str(checkout), *([str(absent)] if command in DEMO else [])]),
                XDG_CACHE_HOME=str(folder / "cache"),
                COLUMNS="80",
                PYTHONDONTWRITEBYTECODE="",
            )
            for command in (*COMMANDS, *DEMO)
            for name, checkout in checkouts.items()
        }
        for variant in variants.values():
            variant()
        times_s = interleaved(variants, args.rounds)
    for command in (*COMMANDS, *DEMO):
        title = f"raypar {' '.join(command)}"
        measured_s = [times_s[f"{name}: {title}"] for name in checkouts]
        for name, values in zip(checkouts, measured_s, strict=True):
            suffix = f", {name}" if len(checkouts) > 1 else ""
            print_bar(f"{title}{suffix}", Figure.of(values), units.seconds, at_most=BARS_S.get(command))
        if len(measured_s) == 2:
            print_row(f"{title}, this / other", Figure.ratio(*measured_s).show(times))


if __name__ == "__main__":
    main()
