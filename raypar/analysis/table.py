"""Tables of measurements from other sources for `raypar model fit`: roles and units of columns, notation of numbers.

A column's role follows from its name and unit (``GPUs``, ``images/sec``, ``time (ms)``), or is given. If a table has
two possible readings that would give different speedups, it is refused and both readings are shown: a throughput that
falls with more workers may be per worker or a total, a time that hardly falls may be from strong or weak scaling, and
``1.100`` may be one thousand one hundred.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

from raypar import units
from raypar.analysis.laws import Scaling
from raypar.analysis.scaling import Measurement, Runs
from raypar.errors import Mistake, RayparError

DELIMITERS = ",;\t"
MAX_WORKERS = 1_000_000
# In seconds, or work per second. Numbers outside are surely mistakes.
MIN_VALUE, MAX_VALUE = 1e-15, 1e15
MAX_MISTAKES = 20  # reported one by one
MAX_SHOWN = 60  # characters of a cell
# Limits of a table, so that its laws are fitted within seconds.
MAX_BYTES, MAX_LINES, MAX_COUNTS = 5_000_000, 5_000, 200
TOO_LARGE = "keep some repeats of some worker counts: a few dozen lines fit a law as well"
EXAMPLE = "a table is, line by line: workers,time   1,100.5   2,52.1   4,28.7"
# If no speedup exceeds this, N times as many workers may have done N times the work: that is perfect scaling at most.
MAX_DOUBTED = 1.1

# Columns that distinguish repeats of one run.
REPEATS = ("repeat", "rep", "run", "trial", "block", "iteration", "seed", "timestamp", "date")
WORKERS = {"worker", "gpu", "cpu", "device", "accelerator", "process", "proc", "rank", "core", "thread", "node"}
WORKERS |= {"replica", "tpu", "npu"}
COUNTS = {"num", "number", "no", "nr", "nb", "n", "count", "of", "total"}
GLUED = {f"n{noun}{s}" for noun in WORKERS for s in ("", "s")} | {"np"}  # "ngpus"
SECONDS = {"ns": 1e-9, **dict.fromkeys(("us", "µs", "usec", "microsecond", "microseconds"), 1e-6)}
SECONDS |= dict.fromkeys(("ms", "msec", "millis", "millisecond", "milliseconds"), 1e-3)
SECONDS |= dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1.0)
SECONDS |= dict.fromkeys(("min", "mins", "minute", "minutes"), 60.0)
SECONDS |= dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), units.HOUR_S)
NO_NAMES = {"s", "us", "min", "h"}  # units that alone are not the name of a time
TIMES = {"time", "times", "duration", "elapsed", "runtime", "walltime", "wallclock", "wall", "latency", "makespan"}
RATES = {"throughput", "fps", "ips", "qps", "rps", "tps", "flops", "gflops", "tflops", "bandwidth"}
TOTALS = {"total", "global", "aggregate", "aggregated", "overall", "all", "cluster", "system", "combined"}
NO_TIMES = {"start", "started", "end", "ended", "finish", "finished", "date"}  # "start_time"
SPREADS = {"std", "stdev", "stddev", "sd", "sem", "var", "variance", "err", "error", "ci", "cv", "low", "high"}


class Role(StrEnum):
    """Role of a column. If a table has several measured roles, the first one counts: the others follow from it."""

    WORKERS = "workers"
    TIME = "time"
    THROUGHPUT = "throughput"
    SPEEDUP = "speedup"
    EFFICIENCY = "efficiency"


@dataclass(frozen=True)
class TableColumn:
    """Column with a role.

    Attributes:
        index: from 0.
        name: as in the header.
        unit_s: unit of a time, in seconds.
        unit: name of that unit; empty if the column's name has none, which means seconds.
        is_of_each: whether a rate is per worker; None if the name doesn't show it.
    """

    index: int
    name: str
    role: Role
    unit_s: float = 1.0
    unit: str = ""
    is_of_each: bool | None = None


@dataclass(frozen=True)
class Asked:
    """The user's answers to ambiguities of a table.

    Attributes:
        columns: names of columns by their roles.
        decimal: decimal separator, "." or ","; None: inferred from the numbers.
        is_of_each: whether a throughput is per worker; None: inferred from the column's name or the numbers.
        scaling: quantity that grows with the workers; None: nothing, unless the times are ambiguous.
    """

    columns: Mapping[Role, str] = field(default_factory=dict)
    decimal: str | None = None
    is_of_each: bool | None = None
    scaling: Scaling | None = None


@dataclass(frozen=True)
class Table:
    """Runs in a file.

    Attributes:
        runs: one entry for each group, by its label; without grouping, a single entry with an empty label.
        scaling: quantity that grows with the workers.
        reading: a sentence on how the columns were interpreted.
    """

    runs: Mapping[str, Runs]
    scaling: Scaling
    reading: str


class _Line(NamedTuple):
    """Line of a table: its number (from 1) and a cell for each column."""

    number: int
    cells: list[str]


class _Columns(NamedTuple):
    """Columns of a table that count: of workers, of what was measured, and those to group by."""

    workers: TableColumn
    measured: TableColumn
    by: list[int]


def role_of(index: int, name: str) -> TableColumn | None:
    """Return the role that a column's name and unit imply; None if there is none."""
    words = _words(name)
    pairs = list(pairwise(words))
    is_of_each = True if any(a == "per" and _noun(b) for a, b in pairs) else False if TOTALS & set(words) else None
    kept = [w for w in words if w not in COUNTS]
    if (GLUED & set(words) and len(kept) == 1) or kept == ["world", "size"]:
        return TableColumn(index, name, Role.WORKERS)
    # "gpu" alone may be a column with the GPU's name.
    if len(kept) == 1 and _noun(kept[0]) and (kept[0].endswith("s") or len(words) > 1):
        return TableColumn(index, name, Role.WORKERS)
    if SPREADS & set(words):
        return None
    if "speedup" in words or ("speed", "up") in pairs:
        return TableColumn(index, name, Role.SPEEDUP, is_of_each=False)
    if {"efficiency", "eff"} & set(words):
        return TableColumn(index, name, Role.EFFICIENCY, is_of_each=True)
    if RATES & set(words) or any(a == "per" and b in SECONDS and words[0] not in TIMES for a, b in pairs):
        return TableColumn(index, name, Role.THROUGHPUT, is_of_each=is_of_each)
    # "gpu_hours" and "cpu_time" are sums over workers.
    is_summed = any(_noun(w) and ("per", w) not in pairs for w in words)
    at = next((i for i, w in enumerate(words) if w in TIMES), 0)
    is_unit = bool(words) and words[0] in SECONDS and (words[0] not in NO_NAMES or "per" in words)
    if is_summed or NO_TIMES & set(words) or not (is_unit or (words and words[at] in TIMES)):
        return None
    unit = words[0] if is_unit else next((w for w in reversed(words[at:]) if w in SECONDS), "")  # "min time": a minimum
    return TableColumn(index, name, Role.TIME, SECONDS.get(unit, 1.0), unit)


def _words(name: str) -> list[str]:
    """Return the words of a column's name in lower case; a slash becomes "per"."""
    parted = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name)
    return re.findall(r"[^\W\d_]+", parted.replace("/", " per ").replace("#", " num ").lower())


def _noun(word: str) -> bool:
    return word in WORKERS or word.removesuffix("es") in WORKERS or word.removesuffix("s") in WORKERS


def read_table(path: Path, by: Sequence[str] = (), asked: Asked | None = None) -> Table:
    """Read the runs in a CSV file; cells are separated by commas, semicolons, tabs or spaces.

    The first line names the columns. Lines with the same worker count are repeats. Empty lines and lines that start
    with ``#`` are skipped.

    Args:
        by: names of columns whose values distinguish runs.
        asked: the user's answers to ambiguities.

    Raises:
        RayparError: the file can't be read, has mistakes (all are listed), or has two readings (both are shown).
    """
    asked = asked or Asked()
    (head, *lines), delimiter = _rows(path)
    columns = _columns_of(path, head, by, asked.columns)
    cells = [_bare(columns.measured, line.cells[columns.measured.index]) for line in lines]
    decimal = asked.decimal or _decimal_of(path, cells, delimiter)
    groups = _groups_of(path, head, lines, columns, decimal)
    if not groups:
        raise RayparError(f"{path}: the table has a head and no runs below it", hint=EXAMPLE)
    if (num_counts := sum(map(len, groups.values()))) > MAX_COUNTS:
        raise RayparError(f"{path}: the table has {num_counts:,} worker counts, over {MAX_COUNTS}", hint=TOO_LARGE)
    measured, scaling = _settled(path, columns.measured, groups, asked)
    quantity = Measurement.TIME if measured.role is Role.TIME else Measurement.THROUGHPUT
    unit = f"total {measured.name}" if measured.is_of_each else measured.name
    of_ratios = {Role.TIME: "", Role.SPEEDUP: "as given", Role.EFFICIENCY: "eff. × workers"}
    runs = {
        label: Runs(
            {n: tuple(v * (n if measured.is_of_each else 1) for v in values) for n, values in of.items()},
            quantity,
            unit=of_ratios.get(measured.role, unit),
        )
        for label, of in groups.items()
    }
    return Table(runs, scaling, _reading(path, columns.workers, measured, decimal))


def _groups_of(
    path: Path, head: _Line, lines: Sequence[_Line], columns: _Columns, decimal: str
) -> dict[str, dict[int, list[float]]]:
    """Return the measured values by group and worker count.

    Raises:
        RayparError: lines have mistakes.
    """
    workers, measured, by = columns
    mistakes: list[Mistake] = []
    groups: dict[str, dict[int, list[float]]] = {}
    read: list[tuple[_Line, str, int]] = []
    for line in lines:
        if any(line.cells[len(head.cells) :]):
            num_cells = max(i for i, cell in enumerate(line.cells, 1) if cell)
            problem = f"has {num_cells} cells, the head {len(head.cells)}"
            hint = "write numbers with a point, such as 12.5, and name every column"
            mistakes.append(Mistake(f"line {line.number}", _clipped(",".join(line.cells[:num_cells])), problem, hint))
            continue
        numbers: list[float] = []
        for column, parse in ((workers, _workers), (measured, _value)):
            cell = line.cells[column.index]
            try:
                numbers.append(parse(_bare(column, cell), decimal))
            except ValueError as error:  # its arguments are problem and hint
                mistakes.append(Mistake(f"line {line.number}, {column.name}", _clipped(cell), *error.args))
        if len(numbers) == 2:
            label = " ".join(f"{head.cells[i]}={line.cells[i]}" for i in by)
            groups.setdefault(label, {}).setdefault(int(numbers[0]), []).append(numbers[1] * measured.unit_s)
            read.append((line, label, int(numbers[0])))
    has_role = {c.index for i, name in enumerate(head.cells) if (c := role_of(i, name)) is not None}
    has_role |= {i for i, name in enumerate(head.cells) if name.lower() in REPEATS or SPREADS & set(_words(name))}
    mistakes += _mixed_columns(head.cells, read, has_role | {workers.index, measured.index, *by})
    if mistakes:
        raise _error(path, mistakes)
    return groups


def _settled(
    path: Path, measured: TableColumn, groups: Mapping[str, Mapping[int, Sequence[float]]], asked: Asked
) -> tuple[TableColumn, Scaling]:
    """Return the measured column and the kind of scaling, with every ambiguity resolved.

    Raises:
        RayparError: two readings are possible; both are shown.
    """
    is_time, is_rate = measured.role is Role.TIME, measured.role is Role.THROUGHPUT
    of_each = asked.is_of_each if is_rate and asked.is_of_each is not None else measured.is_of_each
    is_open = of_each is None if is_rate else is_time and not asked.scaling
    ratios = [ratio for of in groups.values() for ratio in _ratios(of, is_time=is_time)]
    if is_open and ratios and max(speedup for _, _, speedup in ratios) <= MAX_DOUBTED:
        readings = ("of all workers together", "of each worker")
        hint = "say which: --throughput-of all, or --throughput-of worker"
        if is_time:
            readings = ("strong scaling, the same work for all", "weak scaling, N workers do N times as much")
            hint = "say which: --scaling strong, or --scaling weak"
        shown = [ratios[0], ratios[-1]] if len(ratios) > 1 else ratios
        texts = []
        for reading, is_second in zip(readings, (False, True), strict=True):
            each = []
            for base, num_workers, speedup in shown:
                times = num_workers / base if is_second else 1.0
                share = units.percent(speedup * times * base / num_workers)
                each.append(f"{units.ratio(speedup * times)} with {num_workers} workers ({share} efficient)")
            texts.append(f"  {reading}: {', '.join(each)}")
        raise RayparError("\n".join([f"{path}: `{measured.name}` has two readings", *texts]), hint=hint)
    return replace(measured, is_of_each=bool(of_each)), asked.scaling or Scaling.STRONG


def _ratios(of: Mapping[int, Sequence[float]], *, is_time: bool) -> list[tuple[int, int, float]]:
    """Return (fewest workers, more workers, speedup) for every larger count, assuming equal work."""
    base, *others = sorted(of)
    medians = {n: median(values) for n, values in of.items()}
    return [(base, n, medians[base] / medians[n] if is_time else medians[n] / medians[base]) for n in others]


def _reading(path: Path, workers: TableColumn, measured: TableColumn, decimal: str) -> str:
    what = {
        Role.TIME: f"time in {measured.unit or 's'}",
        Role.THROUGHPUT: f"throughput of {'each worker' if measured.is_of_each else 'all workers together'}",
    }.get(measured.role, str(measured.role))
    commas = ", with decimal commas" if decimal == "," else ""
    return f"Read {path.name}: workers from `{workers.name}`, {what} from `{measured.name}`{commas}."


def _columns_of(path: Path, head: _Line, by: Sequence[str], given: Mapping[Role, str]) -> _Columns:
    """Return the columns that count.

    Raises:
        RayparError: a column is missing, or several could be meant.
    """
    names, mistakes = [name.lower() for name in head.cells], list[Mistake]()
    roles = [column for i, name in enumerate(head.cells) if (column := role_of(i, name)) is not None]
    chosen: dict[Role, TableColumn] = {}
    for role, name in given.items():
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

    def of(*allowed: Role) -> list[TableColumn]:
        return [chosen[role] for role in allowed if role in chosen] or [c for c in free if c.role in allowed]

    counted = of(Role.WORKERS)
    candidates = of(Role.TIME, Role.THROUGHPUT) or of(Role.SPEEDUP) or of(Role.EFFICIENCY)
    for what, matches, flags in (
        ("how many workers", counted, "--workers-column COLUMN"),
        ("how long they took", candidates, "--time-column COLUMN or --throughput-column COLUMN"),
    ):
        if len(matches) != 1:
            shown = ",".join(c.name for c in matches) or ",".join(head.cells)
            problem = f"{len(matches)} columns give {what}" if matches else f"no column gives {what}"
            mistakes.append(Mistake(f"line {head.number}, head", shown, problem, f"name it: {flags}"))
    taken = {c.index for c in (*counted[:1], *candidates[:1])}
    others = [name for i, name in enumerate(names) if i not in taken]
    for name in by:
        if name.lower() not in others:
            problem = "no such column" if name.lower() not in names else "is what was measured"
            hint = f"columns to group by: {', '.join(others)}" if others else "leave out --by"
            mistakes.append(Mistake("--by", name, problem, hint))
    if mistakes:
        raise _error(path, mistakes)
    return _Columns(counted[0], candidates[0], [names.index(name.lower()) for name in by])


def _mixed_columns(
    head: Sequence[str], lines: Sequence[tuple[_Line, str, int]], ignored: Collection[int]
) -> Iterator[Mistake]:
    """Yield columns with several values at one worker count of a group, whose lines are thus not repeats of one run."""
    for column in sorted(set(range(len(head))) - set(ignored)):
        first: dict[tuple[str, int], _Line] = {}
        for line, label, num_workers in lines:
            before, cell = first.setdefault((label, num_workers), line), line.cells[column]
            if before.cells[column] != cell:
                workers = units.counted(num_workers, "worker")
                other = _clipped(before.cells[column])
                problem = f"differs from {other!r} in line {before.number}, which has {workers} too"
                hint = f"fit each value on its own with --by {head[column]}, or delete the column"
                yield Mistake(f"line {line.number}, {head[column]}", _clipped(cell), problem, hint)
                break


def _rows(path: Path) -> tuple[list[_Line], str]:
    """Return the lines that are not empty, all with the same number of cells, and the delimiter.

    Raises:
        RayparError: the file can't be read or is empty.
    """
    import pandas as pd  # type: ignore[import-untyped,unused-ignore]

    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES or content.count(b"\n") > MAX_LINES:
            limits = f"{MAX_LINES:,} lines or {MAX_BYTES // 10**6} MB"
            raise RayparError(f"{path}: the table is longer than {limits}", hint=TOO_LARGE)
        text = content.decode("utf-8-sig")
    except FileNotFoundError:
        raise RayparError(f"{path}: there is no such file", hint="name a CSV file") from None
    except OSError as error:
        raise RayparError(f"{path}: can't be read: {error.strerror}", hint="name a CSV file") from None
    except UnicodeDecodeError as error:
        message = f"{path}: must be text in UTF-8, see byte {error.start}"
        raise RayparError(message, hint="save the table as CSV in UTF-8") from None
    numbered = [(i, line.rstrip("\r")) for i, line in enumerate(text.split("\n"), 1)]
    numbered = [(i, line) for i, line in numbered if line.strip() and not line.startswith("#")]
    lines = [line for _, line in numbered]
    if not lines:
        raise RayparError(f"{path}: the table is empty", hint=EXAMPLE)
    delimiter = max(DELIMITERS, key=lines[0].count)
    if delimiter not in lines[0]:
        delimiter = " "
    width = max(line.count(delimiter) for line in lines) + 1
    try:
        frame = pd.read_csv(
            io.StringIO("\n".join(lines)),
            sep=r"\s+" if delimiter == " " else delimiter,
            header=None,
            names=range(width),
            index_col=False,
            dtype=str,
            keep_default_na=False,
            skip_blank_lines=False,
            skipinitialspace=True,
        )
    except (ValueError, pd.errors.ParserError) as error:
        raise RayparError(f"{path}: is not a CSV file: {error}", hint=EXAMPLE) from None
    if len(frame) != len(numbered):
        raise RayparError(f"{path}: a quoted cell spans several lines", hint="write each cell in one line")
    cells = [[str(cell).strip() for cell in row] for row in frame.fillna("").to_numpy().tolist()]
    rows = [_Line(i, row) for (i, _), row in zip(numbered, cells, strict=True) if any(row)]
    if not rows:
        raise RayparError(f"{path}: the table is empty", hint=EXAMPLE)
    while not rows[0].cells[-1]:  # drop trailing header cells without a name
        rows[0].cells.pop()
    return rows, delimiter


# ---- numbers

_GAPS = re.compile(r"(?<=\d)[ '’\u00a0\u2009\u202f](?=\d{3})")  # thousands separators, with either decimal separator
_PLAIN = re.compile(r"[+-]?[\d.,]*\d[.,]?([eE][+-]?\d+)?")


def _decimal_of(path: Path, cells: Sequence[str], delimiter: str) -> str:
    """Return the decimal separator of some numbers, "." or ",".

    Raises:
        RayparError: the numbers have two readings, or some have a decimal point and others a decimal comma.
    """
    numbers = [text for cell in cells if _PLAIN.fullmatch(text := _GAPS.sub("", cell))]
    by_mark: dict[str, list[str]] = {}
    for text in numbers:
        by_mark.setdefault(_shows(text), []).append(text)
    groups = by_mark.get("?", [])
    whole = [text for text in by_mark.get("", []) if "e" not in text.lower()]
    shown = {mark: by_mark[mark][0] for mark in ".," if mark in by_mark}
    if any(len(text) > 3 for text in whole):  # their thousands have no separator
        shown |= {("." if "." in text else ","): text for text in groups}
    if len(shown) > 1:
        problem = f"{shown['.']} has a decimal point, {shown[',']} a decimal comma"
        hint = "write all numbers alike, or say which: --decimal . or --decimal ,"
        raise RayparError(f"{path}: {problem}", hint=hint)
    # Three digits everywhere are decimals, unless the table looks as if it came from a decimal-comma locale.
    if not shown and groups and (whole or delimiter == ";" or any("," in text for text in groups)):
        text = groups[0]
        mark = "." if "." in text else ","
        readings = f"{text.replace(mark, '')}, with a mark between thousands, or {text.replace(mark, '.')}"
        hint = f"say what separates decimals: --decimal {',' if mark == '.' else '.'} for the first, --decimal {mark}"
        raise RayparError(f"{path}: {text} has two readings: {readings}", hint=hint)
    return next(iter(shown), ".")


def _shows(text: str) -> str:
    """Return the decimal separator that a number shows: "." or ",", "?" if ambiguous, empty for a whole number."""
    marks = re.sub(r"[^.,]", "", text)
    if not marks:
        return ""
    if len(set(marks)) > 1:
        return marks[-1]
    if len(marks) > 1:
        return "." if marks[0] == "," else ","
    return "?" if re.fullmatch(r"[+-]?[1-9]\d{0,2}[.,]\d{3}", text) else marks


def _bare(column: TableColumn, cell: str) -> str:
    """Return a cell without the optional unit of a speedup or an efficiency."""
    return cell.rstrip("%×xX ") if column.role in (Role.SPEEDUP, Role.EFFICIENCY) else cell


def _number(cell: str, decimal: str) -> float | None:
    """Return the number in a cell; None for words, including infinity and NaN, and for Python's ``1_000`` notation."""
    mark = "," if decimal == "." else "."
    text = _GAPS.sub("", cell)
    whole = rf"(\d*|\d{{1,3}}(\{mark}\d{{3}})+)"
    if not re.fullmatch(rf"[+-]?{whole}(\{decimal}\d*)?([eE][+-]?\d+)?", text):
        return None
    try:
        number = float(text.replace(mark, "").replace(decimal, "."))
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _workers(cell: str, decimal: str) -> float:
    number = _number(cell, decimal)
    # Some tools write all numbers as floats: 4 workers as 4.0.
    if number is not None and number.is_integer() and 1 <= number <= MAX_WORKERS:
        return number
    problem = f"must be a whole number from 1 to {MAX_WORKERS:,}" if cell else "is missing"
    raise ValueError(problem, "write the worker count, such as 4")


def _value(cell: str, decimal: str) -> float:
    number = _number(cell, decimal)
    if not cell:
        raise ValueError("is missing", "leave out the line of a run that failed")
    if number is None:
        raise ValueError("must be a number", "write it without a unit and with a point, such as 12.5")
    if number <= 0:
        raise ValueError("must be greater than 0", "leave out the line of a run that failed")
    if not MIN_VALUE <= number <= MAX_VALUE:
        raise ValueError(f"must be from {MIN_VALUE:g} to {MAX_VALUE:g}", "write times in seconds")
    return number


def _clipped(cell: str) -> str:
    return cell if len(cell) <= MAX_SHOWN else f"{cell[:MAX_SHOWN]}…"


def _error(path: Path, mistakes: Sequence[Mistake]) -> RayparError:
    head = f"{path}: {units.counted(len(mistakes), 'mistake')} in the table"
    lines = [head, *(f"  {mistake}" for mistake in mistakes[:MAX_MISTAKES])]
    if more := units.and_more(len(mistakes) - MAX_MISTAKES):
        lines.append(f" {more}")
    return RayparError("\n".join(lines))
