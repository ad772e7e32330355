"""Tables as people have them (`tests/tablelab`): read right by `raypar model fit`, or refused with the fix.

Each table is a file that the command reads in a process of its own; its speedups and what it measured with the fewest
workers are compared with figures computed by hand. The refusal of a table with two readings has to name the fix, and
with the options that it names, the numbers have to be right.
"""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
from collections.abc import Sequence
from pathlib import Path

from common import RAYPAR, begin, parser_for, print_bar, print_row, scratch, user_environment
from tablelab import TABLES, PeopleTable

from raypar.errors import EXIT_BAD_INPUT

MIN_KINDS, MIN_SHARE = 10, 0.9  # 27 of 30
TOLERANCE = 1e-3  # of a mean or a median of repeats
RIGHT, REFUSED, WRONG, NEEDLESS, UNCLEAR = "right", "refused with the fix", "WRONG", "refused needlessly", "UNCLEAR"


def fit(path: Path, options: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run `raypar model fit` to its end."""
    command = [*RAYPAR, "model", "fit", path.name, "--json", *options]
    return subprocess.run(
        command,
        cwd=path.parent,
        env={**user_environment(), "COLUMNS": "1000"},
        text=True,
        capture_output=True,
        check=False,
    )


def is_right(table: PeopleTable, output: str) -> bool:
    """Return whether the shown speedups, and what was measured first, are right."""
    (group,) = json.loads(output)["groups"]
    shown = {point["num_workers"]: point for point in group["points"]}
    first = shown.pop(group["baseline"])["measured"]["value"]
    return (
        shown.keys() == table.speedups.keys()
        and all(math.isclose(shown[n]["speedup"]["value"], s, rel_tol=TOLERANCE) for n, s in table.speedups.items())
        and (table.first is None or math.isclose(first, table.first, rel_tol=TOLERANCE))
    )


def judged(table: PeopleTable, folder: Path) -> str:
    """Return what became of a table."""
    path = table.write(folder)
    done = fit(path, ())
    if not table.words:
        if done.returncode == 0:
            return RIGHT if is_right(table, done.stdout) else WRONG
        return NEEDLESS if done.returncode == EXIT_BAD_INPUT else UNCLEAR
    if done.returncode == 0:
        return WRONG
    if done.returncode != EXIT_BAD_INPUT or not all(word in done.stderr for word in table.words):
        return UNCLEAR
    if not table.options:
        return REFUSED
    fixed = fit(path, table.options)
    return REFUSED if fixed.returncode == 0 and is_right(table, fixed.stdout) else UNCLEAR


def main() -> None:
    args = begin(parser_for(__doc__))
    tables = [t for t in TABLES if not t.needs_openpyxl or importlib.util.find_spec("openpyxl")]
    if len(tables) < len(TABLES):
        print(f"NOTE: without openpyxl, {len(TABLES) - len(tables)} spreadsheets are left out")
    verdicts = list[str]()
    for table in tables[:: 6 if args.quick else 1]:
        with scratch() as folder:
            verdicts.append(judged(table, folder))
        print_row(f"{table.kind}: {table.name}", verdicts[-1])
    num, kinds = len(verdicts), {table.kind for table in tables}
    good = sum(verdict in (RIGHT, REFUSED) for verdict in verdicts)
    print_bar(f"right, or refused with the fix, of {num}", good, "{:.0f}".format, at_least=math.ceil(MIN_SHARE * num))
    print_bar("refused needlessly", verdicts.count(NEEDLESS), "{:.0f}".format)
    print_bar("wrong numbers", verdicts.count(WRONG), "{:.0f}".format, at_most=0)
    print_bar("kinds of tables", len(kinds), "{:.0f}".format, at_least=MIN_KINDS)


if __name__ == "__main__":
    main()
