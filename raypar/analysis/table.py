"""Tables of measurements from other sources for `raypar model fit`: which columns count, and how they are read.

A column's role follows from its name and unit (``GPUs``, ``images/sec``, ``time (ms)``), or is given. If a table has
two possible readings that would give different speedups, it is refused and both readings are shown: a throughput that
falls with more workers may be per worker or a total, a time that hardly falls may be from strong or weak scaling, and
``1.100`` may be one thousand one hundred. Times, throughputs, speedups and efficiencies in one table are checked
against each other, which often leaves one reading.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from typing import NamedTuple

from raypar import units
from raypar.analysis.cells import CellParser, decimal_of
from raypar.analysis.columns import EXTREMES, MEASURED, REPEATS, SPREADS, Role, TableColumn, is_noun, role_of, words_of
from raypar.analysis.laws import Scaling
from raypar.analysis.scaling import Measurement, Runs
from raypar.analysis.sheet import EXAMPLE, TOO_LARGE, Line, Sheet, read_sheet
from raypar.errors import Mistake, RayparError

MAX_MISTAKES = 20  # reported one by one
MAX_SHOWN = 60  # characters of a cell
MAX_COUNTS = 200  # so that the laws are fitted within seconds
# If no speedup exceeds this, N times as many workers may have done N times the work: that is perfect scaling at most.
MAX_DOUBTED = 1.1
MAX_DISAGREEMENT = 0.05  # of two columns' speedups, which may be rounded
_NAMED = (Role.TIME, Role.THROUGHPUT)  # have an option
_MINUTES = re.compile(r"[\[(/]\s*min")

# By worker count, values of one measured column.
_Values = Mapping[int, Sequence[float]]


@dataclass(frozen=True)
class Asked:
    """The user's answers to ambiguities of a table.

    Attributes:
        columns: names of columns by their roles.
        decimal: decimal separator, "." or ","; None: inferred from the numbers.
        is_of_each: whether a throughput is per worker; None: inferred from the column's name or the numbers.
        scaling: quantity that grows with the workers; None: nothing, unless the times are ambiguous.
        ignored: names of columns that are left out.
        skips_missing: leave out lines without a worker count or a measured value.
    """

    columns: Mapping[Role, str] = field(default_factory=dict)
    decimal: str | None = None
    is_of_each: bool | None = None
    scaling: Scaling | None = None
    ignored: Sequence[str] = ()
    skips_missing: bool = False


class TableRun(NamedTuple):
    """Line of a table that counts.

    Attributes:
        label: of its group.
        values: seconds, or work per second of all workers; one for each repeat.
    """

    line: Line
    label: str
    num_workers: int
    values: tuple[float, ...]


@dataclass(frozen=True)
class Table:
    """Runs in a file.

    Attributes:
        runs: one entry for each group, by its label; without grouping, a single entry with an empty label.
        scaling: quantity that grows with the workers.
        reading: a sentence on how the columns were interpreted.
        measured: name of the column that counts.
        lines: the lines that count, in order.
        decimal: decimal separator of its numbers.
    """

    runs: Mapping[str, Runs]
    scaling: Scaling
    reading: str
    measured: str
    lines: Sequence[TableRun]
    decimal: str


class _Family(NamedTuple):
    """Columns of one measured quantity; several are repeats, as in ``time_1``, ``time_2``."""

    columns: tuple[TableColumn, ...]
    parser: CellParser

    @property
    def column(self) -> TableColumn:
        return self.columns[0]

    @property
    def exponents(self) -> tuple[int, ...]:
        """Powers of the worker count by which a value may be multiplied: 1 for values of each worker."""
        if self.column.role is Role.SPEEDUP:
            return (0,)
        if self.parser.is_of_each is not None:
            return (int(self.parser.is_of_each),)
        return (0, 1)


class _Disagreement(NamedTuple):
    """Worker count with different speedups by the first measured column and by another."""

    size: float
    num_workers: int
    first: float
    second: float
    other: int


class _Columns(NamedTuple):
    """Columns that count: of workers, of what was measured (the first is used, the others check it), to group by."""

    workers: CellParser
    measured: Sequence[_Family]
    by: Sequence[int]


def read_table(path: Path, by: Sequence[str] = (), asked: Asked | None = None) -> Table:
    """Read the runs in a file: CSV (any separator), a spreadsheet (.xlsx), a Markdown table or Parquet.

    The first line names the columns. Lines with the same worker count are repeats. Empty lines and lines that start
    with ``#`` are skipped. Worker counts may also be side by side, one column for each.

    Args:
        by: names of columns whose values distinguish runs.
        asked: the user's answers to ambiguities.

    Raises:
        RayparError: the file can't be read, has mistakes (all are listed), or has two readings (both are shown).
    """
    return table_of(read_sheet(path), path, by, asked)


def table_of(sheet: Sheet, path: Path, by: Sequence[str] = (), asked: Asked | None = None) -> Table:
    """Return the runs of a sheet; see `read_table`."""
    asked = asked or Asked()
    columns = _columns_of(path, sheet, by, asked)
    groups, lines = _groups_of(path, sheet, columns, asked)
    if not groups:
        raise RayparError(f"{path}: the table has a head and no runs below it", hint=EXAMPLE)
    if (num_counts := sum(len(families[0]) for families in groups.values())) > MAX_COUNTS:
        raise RayparError(f"{path}: the table has {num_counts:,} worker counts, over {MAX_COUNTS}", hint=TOO_LARGE)
    exponent = _settled(path, columns.measured, groups, asked)
    main = columns.measured[0]
    checks = [
        family.column.name
        for i, family in enumerate(columns.measured)
        if i and any(sum(map(bool, of[i].values())) > 1 for of in groups.values())
    ]
    is_time = main.column.role is Role.TIME
    scaling = Scaling.WEAK if is_time and exponent else Scaling.STRONG
    unit = f"total {main.column.name}" if exponent else main.column.name
    of_ratios = {Role.TIME: "", Role.SPEEDUP: "as given", Role.EFFICIENCY: "eff. × workers"}

    def of_all(num_workers: int, values: Sequence[float]) -> tuple[float, ...]:
        return tuple(value * (num_workers if exponent and not is_time else 1) for value in values)

    runs = {
        label: Runs(
            {n: of_all(n, values) for n, values in of.items()},
            Measurement.TIME if is_time else Measurement.THROUGHPUT,
            unit=of_ratios.get(main.column.role, unit),
        )
        for label, (of, *_) in groups.items()
    }
    return Table(
        runs,
        asked.scaling or scaling,
        _reading(path, sheet, columns, exponent, checks, asked),
        main.column.name,
        [run._replace(values=of_all(run.num_workers, run.values)) for run in lines],
        main.parser.decimal,
    )


def _groups_of(
    path: Path, sheet: Sheet, columns: _Columns, asked: Asked
) -> tuple[dict[str, list[dict[int, list[float]]]], list[TableRun]]:
    """Return the values of each measured family by worker count, by group; and the lines that count.

    Raises:
        RayparError: lines have mistakes.
    """
    head, mistakes = sheet.head, list[Mistake]()
    groups: dict[str, list[dict[int, list[float]]]] = {}
    read: list[TableRun] = []
    for line in sheet.lines:
        if any(line.cells[len(head.cells) :]):
            num_cells = max(i for i, cell in enumerate(line.cells, 1) if cell)
            problem = f"has {num_cells} cells, the head {len(head.cells)}"
            hint = "write numbers with a point, such as 12.5, and name every column"
            mistakes.append(Mistake(f"line {line.number}", _clipped(",".join(line.cells[:num_cells])), problem, hint))
            continue
        num_workers, each = 0, list[list[float]]()
        cell = line.cells[columns.workers.column.index]
        if asked.skips_missing and not (cell and any(line.cells[c.index] for c in columns.measured[0].columns)):
            continue
        try:
            num_workers = columns.workers.workers(cell)
        except ValueError as error:  # its arguments are problem and hint
            mistakes.append(Mistake(f"line {line.number}, {columns.workers.column.name}", _clipped(cell), *error.args))
        for i, family in enumerate(columns.measured):
            values, wrong = _values_of(line, family)
            each.append(values)
            if i == 0:
                mistakes += wrong
        if num_workers and each[0]:
            label = " ".join(f"{head.cells[i]}={line.cells[i]}" for i in columns.by)
            of = groups.setdefault(label, [{} for _ in columns.measured])
            for values, by_count in zip(each, of, strict=True):
                by_count.setdefault(num_workers, []).extend(values)
            read.append(TableRun(line, label, num_workers, tuple(each[0])))
    free = {i for i, name in enumerate(head.cells) if (c := role_of(i, name)) is not None and c.role in MEASURED}
    free |= {i for i, name in enumerate(head.cells) if name.lower() in REPEATS or SPREADS & set(words_of(name))}
    used = {c.index for family in columns.measured for c in family.columns}
    free |= {i for i, name in enumerate(head.cells) if name in asked.ignored}
    how = (
        "leave it out with --ignore {0}, or judge runs by it: --metric {0}"
        if asked.skips_missing
        else "delete the column"
    )
    mistakes += _mixed_columns(head.cells, read, how, free | used | {columns.workers.column.index, *columns.by})
    mistakes += _mixed_nodes(sheet, columns.workers.column)
    if mistakes:
        raise _error(path, mistakes)
    return groups, read


def _values_of(line: Line, family: _Family) -> tuple[list[float], list[Mistake]]:
    """Return a line's values, and what is wrong with it; repeats may be missing, but not all."""
    values, mistakes = list[float](), list[Mistake]()
    cells = [(column, line.cells[column.index]) for column in family.columns]
    for column, cell in [(c, cell) for c, cell in cells if cell] or cells[:1]:
        try:
            values.append(family.parser.value(cell))
        except ValueError as error:
            mistakes.append(Mistake(f"line {line.number}, {column.name}", _clipped(cell), *error.args))
    return values, mistakes


# ---- readings


def _settled(path: Path, measured: Sequence[_Family], groups: Mapping[str, Sequence[_Values]], asked: Asked) -> int:
    """Return the power of the worker count by which values of the first column are to be multiplied.

    Raises:
        RayparError: two readings are possible, or the columns contradict each other; both readings are shown.
    """
    main = measured[0]
    of_main = [ratio for of in groups.values() for ratio in _ratios(of[0], main)]
    powers = product(*(_exponents(family, asked) for family in measured))
    disagreements = {exponents: _disagreement(groups, measured, exponents) for exponents in powers}
    possible = {exponents[0] for exponents, disagreement in disagreements.items() if disagreement is None}
    if not possible:
        closest = min(each for each in disagreements.values() if each is not None)
        raise _contradictory(path, main.column, closest, measured[closest.other].column)
    is_flat = bool(of_main) and max(speedup for _, _, speedup in of_main) <= MAX_DOUBTED
    if len(possible) == 1 or not is_flat:
        return min(possible)
    readings = ("of all workers together", "of each worker")
    hint = "say which: --throughput-of all, or --throughput-of worker"
    if main.column.role is Role.TIME:
        readings = ("strong scaling, the same work for all", "weak scaling, N workers do N times as much")
        hint = "say which: --scaling strong, or --scaling weak"
    shown = [of_main[0], of_main[-1]] if len(of_main) > 1 else of_main
    texts = [f"  {reading}: {_shown(shown, exponent)}" for exponent, reading in enumerate(readings)]
    raise RayparError("\n".join([f"{path}: `{main.column.name}` has two readings", *texts]), hint=hint)


def _exponents(family: _Family, asked: Asked) -> tuple[int, ...]:
    if family.column.role is Role.TIME and asked.scaling is not None:
        return (int(asked.scaling is Scaling.WEAK),)
    if family.column.role is Role.THROUGHPUT and asked.is_of_each is not None:
        return (int(asked.is_of_each),)
    return family.exponents


def _ratios(of: _Values, family: _Family) -> list[tuple[int, int, float]]:
    """Return (fewest workers, more workers, speedup) for every larger count, assuming equal work."""
    medians = {n: median(values) for n, values in sorted(of.items()) if values}
    base = next(iter(medians), 0)
    is_time = family.column.role is Role.TIME
    return [(base, n, medians[base] / m if is_time else m / medians[base]) for n, m in medians.items() if n != base]


def _disagreement(
    groups: Mapping[str, Sequence[_Values]], measured: Sequence[_Family], exponents: Sequence[int]
) -> _Disagreement | None:
    """Return where another column's speedup differs most from the first one's; None if all agree."""
    worst: _Disagreement | None = None
    for of, i in product(groups.values(), range(1, len(measured))):
        both = of[0].keys() & {n for n, values in of[i].items() if values}
        pairs = [_ratios({n: of[j][n] for n in both}, measured[j]) for j in (0, i)]
        for (base, n, first), (_, _, second) in zip(*pairs, strict=True):
            a, b = first * (n / base) ** exponents[0], second * (n / base) ** exponents[i]
            size = abs(math.log(a / b))
            if size > (worst.size if worst else math.log1p(MAX_DISAGREEMENT)):
                worst = _Disagreement(size, n, a, b, i)
    return worst


def _contradictory(path: Path, main: TableColumn, at: _Disagreement, other: TableColumn) -> RayparError:
    """Return the error for columns with different speedups in every reading, of which the closest is shown."""
    named = [f'--{c.role}-column "{c.name}"' for c in (main, other) if c.role in _NAMED]
    speedups = f"{units.ratio(at.first)} by one, {units.ratio(at.second)} by the other"
    problem = f"`{main.name}` and `{other.name}` contradict each other: with {at.num_workers} workers {speedups}"
    return RayparError(f"{path}: {problem}", hint=f"name the one that counts: {' or '.join(named)}")


def _shown(ratios: Sequence[tuple[int, int, float]], exponent: int) -> str:
    each = []
    for base, num_workers, speedup in ratios:
        ratio = speedup * (num_workers / base) ** exponent
        share = units.percent(ratio * base / num_workers)
        each.append(f"{units.ratio(ratio)} with {num_workers} workers ({share} efficient)")
    return ", ".join(each)


def _reading(path: Path, sheet: Sheet, columns: _Columns, exponent: int, checks: Sequence[str], asked: Asked) -> str:
    main = columns.measured[0]
    weak = " (weak scaling)" if exponent else ""
    what = {
        Role.TIME: f"time in {main.parser.unit}{weak}",
        Role.THROUGHPUT: f"throughput of {'each worker' if exponent else 'all workers together'}",
    }.get(main.column.role, str(main.column.role))
    workers = "side by side" if sheet.is_wide else f"from `{columns.workers.column.name}`"
    names = f"`{main.column.name}`{units.and_more(len(main.columns) - 1)}"
    checked = ", which agrees with " + " and ".join(f"`{name}`" for name in checks) if checks else ""
    commas = ", with decimal commas" if main.parser.decimal == "," else ""
    if main.parser.assumed:
        commas = f", with decimal points ({main.parser.assumed} is below 1,000)"
    is_shown = main.column.role is Role.TIME or asked.scaling is not None  # rates of both kinds look alike
    assumed = "" if is_shown else ", taken as strong scaling (--scaling weak: N workers did N times the work)"
    return f"Read {path.name}: workers {workers}, {what} from {names}{commas}{checked}{assumed}."


# ---- columns


def _columns_of(path: Path, sheet: Sheet, by: Sequence[str], asked: Asked) -> _Columns:
    """Return the columns that count.

    Raises:
        RayparError: a column is missing, or several could be meant.
    """
    head, mistakes = sheet.head, list[Mistake]()
    names = [name.lower() for name in head.cells]
    roles = [c for i, name in enumerate(head.cells) if (c := role_of(i, name)) and name not in asked.ignored]
    chosen: dict[Role, TableColumn] = {}
    for role, name in asked.columns.items():
        same = [i for i, other in enumerate(names) if other == name.lower()]
        if len(same) == 1:
            by_name = next((c for c in roles if c.index == same[0] and c.role is role), None)
            chosen[role] = by_name or TableColumn(same[0], head.cells[same[0]], role)
        else:
            problem = "several columns" if same else "no such column"
            mistakes.append(Mistake(f"--{role}-column", name, problem, f"columns: {', '.join(head.cells)}"))
    if mistakes:
        raise _error(path, mistakes)
    free = [c for c in roles if c.index not in {other.index for other in chosen.values()}]

    given = chosen.get(Role.WORKERS)
    counted = [given] if given else _counting(sheet, [c for c in free if c.role is Role.WORKERS])
    measurable = [chosen[role] for role in MEASURED if role in chosen] or [c for c in free if c.role in MEASURED]
    candidates, families = _measured(measurable)
    for what, matches, flags in (
        ("how many workers", counted, "--workers-column COLUMN"),
        ("how long they took", candidates, "--time-column COLUMN or --throughput-column COLUMN"),
    ):
        if len(matches) != 1:
            shown = ",".join(c.name for c in matches) or ",".join(head.cells)
            problem = f"{len(matches)} columns give {what}" if matches else f"no column gives {what}"
            has_names = any(char.isalpha() for char in shown)
            hint = f"name it: {flags}" if has_names else "write names above the columns, such as workers,time"
            mistakes.append(Mistake(f"line {head.number}, head", shown, problem, hint))
    taken = {c.index for c in counted[:1]} | {c.index for family in families for c in family}
    others = [name for i, name in enumerate(names) if i not in taken]
    for name in by:
        if name.lower() not in others:
            problem = "no such column" if name.lower() not in names else "is what was measured"
            hint = f"columns to group by: {', '.join(others)}" if others else "leave out --by"
            mistakes.append(Mistake("--by", name, problem, hint))
    if mistakes:
        raise _error(path, mistakes)
    all_cells = [[line.cells[c.index] for line in sheet.lines for c in family] for family in families]
    decimal = asked.decimal or decimal_of(path, [cell for cells in all_cells for cell in cells], sheet.delimiter)
    workers = CellParser(counted[0], [line.cells[counted[0].index] for line in sheet.lines], decimal)
    measured = [
        _Family(family, CellParser(family[0], cells, decimal))
        for family, cells in zip(families, all_cells, strict=True)
    ]
    return _Columns(workers, measured, [names.index(name.lower()) for name in by])


def _measured(columns: Sequence[TableColumn]) -> tuple[Sequence[TableColumn], list[tuple[TableColumn, ...]]]:
    """Return the columns of which one has to be chosen, and all families, the one that counts first.

    A role is of use if one family has it, or two rates, one of each worker and one of all.
    """
    by_role = {role: _families([c for c in columns if c.role is role]) for role in MEASURED}
    first = next((families for families in by_role.values() if families), [])
    useful = [each for each in by_role.values() if len({bool(f[0].is_of_each) for f in each}) == len(each)]
    candidates = [family[0] for family in first]
    return candidates[:1] if first in useful else candidates, [family for each in useful for family in each]


def _families(columns: Sequence[TableColumn]) -> list[tuple[TableColumn, ...]]:
    """Return the columns of one role, with repeats together; minima and percentiles only if there is nothing else."""
    # Beside a maximum, "time_min" is a minimum, not in minutes.
    if any({"max", "maximum"} & set(words) and "min" not in words for words in (words_of(c.name) for c in columns)):
        columns = [
            replace(c, unit="", unit_s=1.0) if c.unit == "min" and not _MINUTES.search(c.name) else c for c in columns
        ]
    extremes = [c for c in columns if EXTREMES & (set(words_of(c.name)) - {c.unit})]
    families: dict[str, list[TableColumn]] = {}
    for column in [c for c in columns if c not in extremes] or columns:
        families.setdefault(_without_repeat(column.name), []).append(column)
    divided = list[tuple[TableColumn, ...]]()
    for family in families.values():
        numbers = [int("".join(re.findall(r"\d+", c.name)) or 0) for c in family]
        are_repeats = numbers in ([0] * len(family), list(range(len(family))), list(range(1, len(family) + 1)))
        divided += [tuple(family)] if are_repeats else [(c,) for c in family]
    return divided


def _without_repeat(name: str) -> str:
    """Return a column's name without the number of a repeat, which is behind the quantity: ``time_1 (s)``."""
    match = re.fullmatch(r"(.*?)[ _-]*(?:run|rep|repeat|trial|seed)?[ _#-]*\d+(\W.*)?", name.lower())
    return f"{match[1]}{match[2] or ''}" if match and role_of(0, match[1]) else name.lower()


def _counting(sheet: Sheet, columns: Sequence[TableColumn]) -> Sequence[TableColumn]:
    """Return the columns that may give the number of workers: one, if the others are constant or proportional to it."""
    if len(columns) < 2:
        return columns
    counts = {c.index: [line.cells[c.index] for line in sheet.lines] for c in columns}
    varying = [c for c in columns if len(set(counts[c.index])) > 1]
    if not varying or not all(cell.isdigit() and int(cell) for c in varying for cell in counts[c.index]):
        return varying or columns
    most = max(varying, key=lambda c: int(counts[c.index][0]))
    shares = [{int(a) / int(b) for a, b in zip(counts[most.index], counts[c.index], strict=True)} for c in varying]
    return [most] if all(len(share) == 1 for share in shares) else varying


def _mixed_nodes(sheet: Sheet, workers: TableColumn) -> Iterator[Mistake]:
    """Yield columns of workers per node that vary, if nodes are counted."""
    counted = set(words_of(workers.name))
    for i, name in enumerate(sheet.head.cells):
        per = [b for a, b in pairwise(words_of(name)) if a == "per" and is_noun(b)]
        is_each = any(b in counted or f"{b}s" in counted for b in per) and role_of(i, name) is None
        values = list(dict.fromkeys(line.cells[i] for line in sheet.lines))
        if is_each and len(values) > 1:
            problem = f"varies, so `{workers.name}` does not count the workers"
            hint = f"add a column with {workers.name} × {name}, and name it with --workers-column"
            yield Mistake(f"line {sheet.head.number}, {name}", _clipped(", ".join(values)), problem, hint)


def _mixed_columns(
    head: Sequence[str], lines: Sequence[TableRun], how: str, ignored: Collection[int]
) -> Iterator[Mistake]:
    """Yield columns with several values at one worker count of a group, whose lines are thus not repeats of one run."""
    for column in sorted(set(range(len(head))) - set(ignored)):
        first: dict[tuple[str, int], Line] = {}
        for line, label, num_workers, _ in lines:
            before, cell = first.setdefault((label, num_workers), line), line.cells[column]
            if before.cells[column] != cell:
                workers = units.counted(num_workers, "worker")
                other = _clipped(before.cells[column])
                problem = f"differs from {other!r} in line {before.number}, which has {workers} too"
                hint = f"fit each value on its own with --by {head[column]}, or {how.format(head[column])}"
                yield Mistake(f"line {line.number}, {head[column]}", _clipped(cell), problem, hint)
                break


def _clipped(cell: str) -> str:
    return cell if len(cell) <= MAX_SHOWN else f"{cell[:MAX_SHOWN]}…"


def _error(path: Path, mistakes: Sequence[Mistake]) -> RayparError:
    head = f"{path}: {units.counted(len(mistakes), 'mistake')} in the table"
    lines = [head, *(f"  {mistake}" for mistake in mistakes[:MAX_MISTAKES])]
    if more := units.and_more(len(mistakes) - MAX_MISTAKES):
        lines.append(f" {more}")
    return RayparError("\n".join(lines))
