"""Times by worker count from a CSV file that was made elsewhere: `read_table`.

One column says how many workers there were, one how long they took or how much they did in a second; the names are in
the first line. Lines with the same worker count are repeats. Other columns are left alone, and so are empty lines and
such as start with ``#``.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TypeAlias

from raypar import units
from raypar.errors import Mistake, RayparError

WORKER_COLUMNS = ("workers", "num_workers")
TIME_COLUMNS = ("time", "time_s", "seconds")
RATE_COLUMNS = ("throughput",)
DELIMITERS = ",;\t"
MAX_WORKERS = 1_000_000
# Seconds, or work per second, beyond which a number can only be a slip; ratios of two stay far within a float.
MIN_VALUE, MAX_VALUE = 1e-15, 1e15
MAX_TOLD = 20  # mistakes told one by one
EXAMPLE = "a table is, line by line: workers,time   1,100.5   2,52.1   4,28.7"

Line: TypeAlias = tuple[int, list[str]]  # its number, from 1, and its cells


class Quantity(StrEnum):
    """What was measured."""

    TIME = "time"  # seconds
    THROUGHPUT = "throughput"  # work per second, in whatever unit


@dataclass(frozen=True)
class Runs:
    """What was measured, by worker count: one value greater than 0 for each repeat, at least one."""

    values: Mapping[int, tuple[float, ...]]
    quantity: Quantity = Quantity.TIME


def read_table(path: Path) -> Runs:
    """The runs in a CSV file, in the order of its lines; cells are parted by commas, semicolons or tabs.

    Raises:
        RayparError: the file can't be read, or has mistakes; all of them are told.
    """
    lines = _lines(path)
    if not lines:
        raise RayparError(f"{path}: the table is empty", hint=EXAMPLE)
    head_line, head = lines[0]
    workers_at, value_at, mistakes = _columns(head_line, head)
    if workers_at is None or value_at is None:
        raise _told(path, mistakes)
    quantity = Quantity.THROUGHPUT if _plain(head[value_at]) in RATE_COLUMNS else Quantity.TIME
    values: dict[int, list[float]] = {}
    for number, cells in lines[1:]:
        workers = _workers(number, head[workers_at], _cell(cells, workers_at), mistakes)
        value = _value(number, head[value_at], _cell(cells, value_at), mistakes)
        if workers is not None and value is not None:
            values.setdefault(workers, []).append(value)
    if mistakes:
        raise _told(path, mistakes)
    if not values:
        raise RayparError(f"{path}: the table has a head and no runs below it", hint=EXAMPLE)
    return Runs({workers: tuple(repeats) for workers, repeats in values.items()}, quantity)


def _lines(path: Path) -> list[Line]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise RayparError(f"{path}: there is no such file", hint="name a CSV file") from None
    except IsADirectoryError:
        raise RayparError(f"{path}: is a folder", hint="name a CSV file") from None
    except OSError as error:
        raise RayparError(f"{path}: can't be read: {error.strerror}", hint="name a file that you may read") from None
    except UnicodeDecodeError as error:
        message = f"{path}: is not text in UTF-8, at byte {error.start}"
        raise RayparError(message, hint="save the table as CSV in UTF-8") from None
    # Line by line: a quote that is never closed would swallow all that follows, line numbers included.
    rows = [(i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip() and not line.startswith("#")]
    if not rows:
        return []
    delimiter = max(DELIMITERS, key=rows[0][1].count)
    try:
        lines = [(i, [cell.strip() for cell in next(csv.reader([line], delimiter=delimiter))]) for i, line in rows]
    except csv.Error as error:
        raise RayparError(f"{path}: is no CSV file: {error}", hint=EXAMPLE) from None
    return [(i, cells) for i, cells in lines if any(cells)]


def _columns(number: int, head: Sequence[str]) -> tuple[int | None, int | None, list[Mistake]]:
    """Where worker counts and values are; None, with a mistake, for what can't be told."""
    mistakes: list[Mistake] = []
    places: list[int | None] = []
    wanted = (("how many workers", WORKER_COLUMNS), ("how long they took", (*TIME_COLUMNS, *RATE_COLUMNS)))
    for what, names in wanted:
        found = [i for i, name in enumerate(head) if _plain(name) in names]
        places.append(found[0] if len(found) == 1 else None)
        if len(found) > 1:
            several = ",".join(head[i] for i in found)
            hint = "keep one of them, or give the others another name"
            mistakes.append(Mistake(f"line {number}, head", several, f"{len(found)} columns say {what}", hint))
        elif not found:
            hint = f"name a column {' or '.join(names)}"
            mistakes.append(Mistake(f"line {number}, head", ",".join(head), f"no column says {what}", hint))
    return places[0], places[1], mistakes


def _plain(name: str) -> str:
    return name.strip().lower()


def _cell(cells: Sequence[str], at: int) -> str:
    return cells[at] if at < len(cells) else ""


def _workers(line: int, column: str, cell: str, mistakes: list[Mistake]) -> int | None:
    number = _number(cell)
    # Tools that know one kind of number write 4 workers as 4.0.
    if number is not None and number.is_integer() and 1 <= number <= MAX_WORKERS:
        return int(number)
    problem = f"is no whole number from 1 to {MAX_WORKERS:,}" if cell else "is missing"
    mistakes.append(Mistake(f"line {line}, {column}", cell, problem, "write the worker count, such as 4"))
    return None


def _value(line: int, column: str, cell: str, mistakes: list[Mistake]) -> float | None:
    number = _number(cell)
    if number is not None and MIN_VALUE <= number <= MAX_VALUE:
        return number
    if not cell:
        problem, hint = "is missing", "leave out the line of a run that failed"
    elif number is None:
        problem, hint = "is no number", "write it without a unit and with a point, such as 12.5"
    elif number <= 0:
        problem, hint = "is not greater than 0", "leave out the line of a run that failed"
    else:
        problem, hint = f"is not within {MIN_VALUE:g} to {MAX_VALUE:g}", "write times in seconds"
    mistakes.append(Mistake(f"line {line}, {column}", cell, problem, hint))
    return None


def _number(cell: str) -> float | None:
    """The number in a cell; None for words, infinity and NaN among them, and for Python's own ``1_000``."""
    try:
        number = float(cell)
    except ValueError:
        return None
    return number if math.isfinite(number) and "_" not in cell else None


def _told(path: Path, mistakes: Iterable[Mistake]) -> RayparError:
    every = list(mistakes)
    head = f"{path}: " + ("1 mistake in the table" if len(every) == 1 else f"{len(every)} mistakes in the table")
    lines = [head, *(f"  {mistake}" for mistake in every[:MAX_TOLD])]
    if more := units.and_more(len(every) - MAX_TOLD):
        lines.append(f" {more}")
    return RayparError("\n".join(lines))
