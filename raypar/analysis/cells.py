"""Numbers in the cells of a table: decimal and thousands separators, units, ``h:mm:ss``.

A cell is text. A number that a file stores as a number (a spreadsheet's) is an `Exact`, whose notation is known.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from raypar.analysis.columns import CLOCK_NAME, COUNTS, SECONDS, Role, TableColumn, is_noun, role_of, words_of
from raypar.errors import RayparError

MAX_WORKERS = 1_000_000
# In seconds, or work per second. Numbers outside are surely mistakes.
MIN_VALUE, MAX_VALUE = 1e-15, 1e15
MAX_CHARS = 60  # of a number
UNIT_S = SECONDS | {"m": 60.0, "d": 86400.0}  # in a cell, "5m 30s"
MANY = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9}

_GAPS = re.compile(r"(?<=\d)[ '’\u00a0\u2009\u202f](?=\d{3})")  # thousands separators, with either decimal separator
_PLAIN = r"[+-]?[\d.,]*\d[.,]?(?:[eE][+-]?\d+)?"
_START = re.compile(rf"({_PLAIN})\s*(\D*)")
_PART = re.compile(r"(\d(?:[\d.,]*\d)?(?:[eE][+-]?\d+)?)\s*([^\W\d_]+)")
_WITH_UNITS = re.compile(rf"(?:{_PART.pattern}[,\s]*)+")
# "2-01:02:03" is Slurm's notation of days, "2 days, 1:02:03" is Python's.
_CLOCK = re.compile(r"(?:(?:(\d+)(?:-| days?,? ))?(\d+):)?(\d+):(\d\d?(?:[.,]\d+)?)")
_SPREAD = re.compile(r"\s*(?:±|\+/-|\+-).*")  # "12.5 ± 0.3"


class Exact(str):
    """Number that a file stores as a number, written as Python does."""


def decimal_of(path: Path, cells: Sequence[str], delimiter: str) -> str:
    """Return the decimal separator of some numbers, "." or ",".

    Raises:
        RayparError: the numbers have two readings, or some have a decimal point and others a decimal comma.
    """
    texts = [cell for cell in cells if not isinstance(cell, Exact) and len(cell) <= MAX_CHARS]
    numbers = [match[1] for text in texts if (match := _START.match(_bare(text).rpartition(":")[2]))]
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
        other = "," if mark == "." else "."
        hint = f"say what separates decimals: --decimal {other} for the first, --decimal {mark} for the second"
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


def number_in(cell: str, decimal: str) -> float | None:
    """Return the number in a cell; None for words, including infinity and NaN, and for Python's ``1_000`` notation."""
    decimal = "." if isinstance(cell, Exact) else decimal
    mark = "," if decimal == "." else "."
    whole = rf"(\d*|\d{{1,3}}(\{mark}\d{{3}})+)"
    if not re.fullmatch(rf"[+-]?{whole}(\{decimal}\d*)?([eE][+-]?\d+)?", cell):
        return None
    try:
        number = float(cell.replace(mark, "").replace(decimal, "."))
    except ValueError:
        return None
    return number if math.isfinite(number) else None


@dataclass(frozen=True)
class CellParser:
    """Parser of a column's cells.

    Methods raise ValueError with the problem and the fix.

    Attributes:
        cells: all cells of the column: a unit or suffix in some must be in all.
        decimal: decimal separator, "." or ",".
    """

    column: TableColumn
    cells: Sequence[str]
    decimal: str

    @cached_property
    def suffixes(self) -> set[str]:
        """Texts behind the numbers, such as "img/s"."""
        matches = (_START.fullmatch(_bare(cell)) for cell in self.cells)
        return {match[2].strip() for match in matches if match}

    @property
    def unit(self) -> str:
        """Unit of a time."""
        return self.column.unit or ("the unit of each cell" if self._have_units else "s")

    @property
    def assumed(self) -> str:
        """A number such as 1.100, if nothing shows that its point separates decimals; empty if there is none."""
        texts = [] if any(isinstance(cell, Exact) for cell in self.cells) else list(map(_bare, self.cells))
        matches = [match[1] for text in texts if (match := _START.match(text)) and _shows(match[1])]
        return matches[0] if matches and self.decimal == "." and all(_shows(text) == "?" for text in matches) else ""

    @property
    def is_of_each(self) -> bool | None:
        """True for a rate per worker; None if neither the column's name nor its cells show it."""
        is_open = self.column.is_of_each is None and self.column.role is Role.THROUGHPUT and len(self.suffixes) == 1
        of_suffix = role_of(0, next(iter(self.suffixes))) if is_open else None
        return of_suffix.is_of_each if of_suffix else self.column.is_of_each

    def workers(self, cell: str) -> int:
        """Return a worker count: ``4``, ``4.0`` or ``4 GPUs``."""
        text = _bare(cell)
        if (match := _START.fullmatch(text)) and match[2] and len({_stem(s) for s in self.suffixes}) == 1:
            text = match[1] if all(map(is_noun, words_of(match[2]))) else text
        number = number_in(text, self.decimal)
        # Some tools write all numbers as floats: 4 workers as 4.0.
        if number is not None and number.is_integer() and 1 <= number <= MAX_WORKERS:
            if not isinstance(cell, Exact) and _shows(text) == "?" and number < 1000:
                raise ValueError("has two readings, with a mark between thousands or decimals", "write 1 or 1000")
            return int(number)
        problem = f"must be a whole number from 1 to {MAX_WORKERS:,}" if cell else "is missing"
        raise ValueError(problem, "write the worker count, such as 4")

    def value(self, cell: str) -> float:
        """Return a measured value: seconds, or a number greater than 0 in any unit."""
        if not cell:
            raise ValueError("is missing", "leave out the line of a run that failed")
        bare = _bare(cell)
        number = self._seconds(bare) if self.column.role is Role.TIME else self._ratio(bare)
        if number is None:
            raise ValueError("must be a number", "write it without a unit and with a point, such as 12.5")
        if number <= 0:
            raise ValueError("must be greater than 0", "leave out the line of a run that failed")
        if not MIN_VALUE <= number <= MAX_VALUE:
            raise ValueError(f"must be from {MIN_VALUE:g} to {MAX_VALUE:g}", "write times in seconds")
        return number

    def _ratio(self, cell: str) -> float | None:
        """Return the number of a rate, a speedup or an efficiency; None if there is none."""
        number = number_in(cell, self.decimal)
        match = _START.fullmatch(cell)
        if number is not None or match is None:
            if number is not None and "%" in self.suffixes:
                raise ValueError("has no %, others have", "write all with %, or none")
            return number
        number, suffix = number_in(match[1], self.decimal), match[2].strip()
        if number is None or len(self.suffixes) == 1:  # one unit
            return number
        if self.column.role is Role.SPEEDUP:
            return number if suffix in ("x", "×", "X") and "%" not in self.suffixes else None
        units = {name.removeprefix(_prefix(name)).strip() for name in self.suffixes}
        is_rate = self.column.role is Role.THROUGHPUT and len(units) == 1  # "900" and "1.2k", "1.2k img/s"
        return number * MANY[_prefix(suffix)] if is_rate else None

    # ---- times

    def _seconds(self, cell: str) -> float | None:
        if match := _CLOCK.fullmatch(cell):
            return self._clock(match)
        number = number_in(cell, self.decimal)
        if number is not None:
            if math.isnan(self.column.unit_s):
                raise ValueError(f"must be {self.column.unit}, the unit in the column's name", "write 90 s as 0:01:30")
            if self._have_units and not self.column.unit:
                raise ValueError("has no unit, others have", "write a unit in the column's name, such as time_s")
            return number * self.column.unit_s
        if not _WITH_UNITS.fullmatch(cell):
            return None
        parts = [(number_in(text, self.decimal), unit) for text, unit in _PART.findall(cell)]
        if any(value is None or unit not in UNIT_S for value, unit in parts):
            return None
        of_name = self.column.unit_s
        if len(parts) == 1 and self.column.unit and not math.isclose(UNIT_S[parts[0][1]], of_name):
            raise ValueError(f"is in {parts[0][1]}, the column's name has {self.column.unit}", "write one of them")
        return sum((value or 0.0) * UNIT_S[unit] for value, unit in parts)

    def _clock(self, match: re.Match[str]) -> float:
        days, hours, minutes, last = match.groups()
        tail = float(last.replace(",", "."))
        if tail >= 60 or (hours and int(minutes) >= 60):
            raise ValueError("is no time", "write h:mm:ss, such as 1:02:10")
        if hours:
            return (int(days or 0) * 24 + int(hours)) * 3600 + int(minutes) * 60 + tail
        if self._pair_s is None:
            readings = f"has two readings: {minutes} min {last} s, or {minutes} h {last} min"
            raise ValueError(readings, "write h:mm:ss, or name the column `time (m:ss)` or `time (h:mm)`")
        return (int(minutes) * 60 + tail) * self._pair_s

    @cached_property
    def _pair_s(self) -> float | None:
        """Seconds of the last part of ``1:30``; None if unknown."""
        if name := CLOCK_NAME.search(self.column.name.lower()):
            return 1.0 if name["seconds"] else 60.0
        # A column with 1:02:10 writes 59 min 30 s as 59:30; a fraction is one of seconds.
        clocks = [match for cell in self.cells if (match := _CLOCK.fullmatch(_bare(cell)))]
        return 1.0 if any(clock[2] or not clock[4].isdigit() for clock in clocks) else None

    @cached_property
    def _have_units(self) -> bool:
        return any(_WITH_UNITS.fullmatch(_bare(cell)) for cell in self.cells)


def _bare(cell: str) -> str:
    """Return a cell without its spread and the spaces in its number; empty if it is too long for a number."""
    if isinstance(cell, Exact):
        return cell
    return "" if len(cell) > MAX_CHARS else _GAPS.sub("", _SPREAD.sub("", cell))


def _stem(suffix: str) -> str:
    return " ".join(word.removesuffix("s") for word in words_of(suffix) if word not in COUNTS)


def _prefix(suffix: str) -> str:
    return suffix[:1] if suffix[:1] in MANY else ""
