"""Files with tables, read into lines of cells: CSV of any dialect, Markdown, spreadsheets, Parquet.

A wide table, with a column (or a row of heads) for each worker count, becomes one with a line for each.
"""

from __future__ import annotations

import datetime
import io
import re
import warnings
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from raypar.analysis.cells import Exact
from raypar.analysis.columns import COUNTS, MEASURED, Role, is_noun, is_plural, role_of, words_of
from raypar.errors import RayparError

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped,unused-ignore]

# By precedence: a decimal comma is in as many lines as the semicolon between cells.
DELIMITERS = "|\t;,"
# Limits of a table, so that its laws are fitted within seconds.
MAX_BYTES, MAX_LINES = 5_000_000, 5_000
TOO_LARGE = "keep some repeats of some worker counts: a few dozen lines fit a law as well"
EXAMPLE = "a table is, line by line: workers,time   1,100.5   2,52.1   4,28.7"
HINT = "name a CSV file, a spreadsheet (.xlsx) or a Markdown table"
WORKERS_NAME, LABEL_NAME = "workers", "row"

_BOXES = str.maketrans("│┃║", "|||")
_COUNT = re.compile(r"(?<![^\W_])(\d+)[ _-]*[x×]?[ _-]*([^\W\d_]+)|(?<![^\W\d_])([^\W\d_]+) *= *(\d+)")


class Line(NamedTuple):
    """Line of a table: its number (from 1) and a cell for each column."""

    number: int
    cells: list[str]


class Sheet(NamedTuple):
    """Table of a file.

    Attributes:
        head: names of the columns.
        lines: those that are not empty, with at least as many cells.
        delimiter: what separates the cells; empty if the file has typed cells.
        is_wide: whether the file has its worker counts side by side.
    """

    head: Line
    lines: list[Line]
    delimiter: str
    is_wide: bool = False


def read_sheet(path: Path) -> Sheet:
    """Read a file's table.

    Raises:
        RayparError: the file can't be read, is too long, or has no table or several.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise RayparError(f"{path}: there is no such file", hint=HINT) from None
    except OSError as error:
        raise RayparError(f"{path}: can't be read: {error.strerror}", hint=HINT) from None
    typed = FRAMES.get(path.suffix.lower())
    if len(content) > MAX_BYTES or (typed is None and content.count(b"\n") > MAX_LINES):
        raise RayparError(
            f"{path}: the table is longer than {MAX_LINES:,} lines or {MAX_BYTES // 10**6} MB", hint=TOO_LARGE
        )
    rows, delimiter = _typed_rows(path, typed) if typed else _text_rows(path, content)
    while len(rows) > 1 and sum(map(bool, rows[0].cells)) == 1 < sum(map(bool, rows[1].cells)):
        del rows[0]  # a title
    if not rows:
        raise RayparError(f"{path}: the table is empty", hint=EXAMPLE)
    head, *lines = rows
    while not head.cells[-1]:  # trailing cells without a name
        head.cells.pop()
    return _long(path, Sheet(head, lines, delimiter))


# ---- files with typed cells


def _excel(path: Path) -> pd.DataFrame:
    import pandas as pd

    try:
        sheets = pd.read_excel(path, sheet_name=None, header=None, dtype=object)
    except ImportError:
        hint = "pip install 'raypar[excel]', or save it as CSV"
        raise RayparError(f"{path}: openpyxl, which reads it, is not installed", hint=hint) from None
    filled = {name: sheet for name, sheet in sheets.items() if sheet.notna().to_numpy().any()}
    if len(filled) > 1:
        problem = f"{path}: {len(filled)} of its sheets have cells: {', '.join(map(str, filled))}"
        raise RayparError(problem, hint="save the one with the table as CSV, or delete the others")
    return next(iter(filled.values()), pd.DataFrame())


def _parquet(path: Path) -> pd.DataFrame:
    import pandas as pd

    frame = pd.read_parquet(path)
    names = pd.DataFrame([list(frame.columns)], columns=frame.columns)
    return pd.concat([names, frame.astype(object)], ignore_index=True)


# By the end of a file's name: reader of a frame, whose first row has the names.
FRAMES: Mapping[str, Callable[[Path], pd.DataFrame]] = {".xlsx": _excel, ".xlsm": _excel, ".parquet": _parquet}
# Ends of names that mean a file, also if there is none.
SUFFIXES = (".csv", ".tsv", ".md", *FRAMES)


def _typed_rows(path: Path, read: Callable[[Path], pd.DataFrame]) -> tuple[list[Line], str]:
    import pandas as pd

    try:
        frame = read(path)
    except RayparError:
        raise
    except Exception as error:  # each reader has its own
        raise RayparError(f"{path}: can't be read: {error}", hint="save the table as CSV") from None
    if len(frame) > MAX_LINES:
        raise RayparError(f"{path}: the table is longer than {MAX_LINES:,} lines", hint=TOO_LARGE)
    values = frame.astype(object).where(pd.notna(frame), None).to_numpy().tolist()
    clocks = [value for row in values for value in row if isinstance(value, datetime.time)]
    # Spreadsheets read a typed 1:30 as a time of day. If no cell has seconds, it may have meant minutes and seconds.
    clock = "%H:%M:%S.%f" if any(time.second or time.microsecond for time in clocks) else "%H:%M"
    rows = [Line(i, [_cell(value, clock) for value in row]) for i, row in enumerate(values, 1)]
    return [row for row in rows if any(row.cells)], ""


def _cell(value: Any, clock: str) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, int | float):
        return Exact(int(value) if float(value).is_integer() else float(value))
    return value.strftime(clock) if isinstance(value, datetime.time) else str(value).strip()


# ---- text


def _text_rows(path: Path, content: bytes) -> tuple[list[Line], str]:
    import pandas as pd

    encoding = "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        message = f"{path}: must be text in UTF-8, see byte {error.start}"
        raise RayparError(message, hint="save the table as CSV in UTF-8") from None
    numbered, delimiter = _table_lines(path, text)
    lines = [line for _, line in numbered]
    separator, width = delimiter, max((line.count(delimiter) for line in lines), default=0) + 1
    if delimiter == " ":
        apart = [re.split(r"\s{2,}", line.strip()) for line in lines]
        width = len(apart[0])
        if width > 1 and all(len(cells) == width for cells in apart):  # names have single spaces
            separator, lines = "\t", ["\t".join(cells) for cells in apart]
        else:
            separator, width = r"\s+", max(len(line.split()) for line in lines)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # more cells than the lines have
            frame = pd.read_csv(
                io.StringIO("\n".join(lines)),
                sep=separator,
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
    except pd.errors.ParserWarning:
        frame = pd.DataFrame()
    if len(frame) != len(numbered):
        raise RayparError(f"{path}: a quoted cell spans several lines", hint="write each cell in one line")
    marks = "*` \t" if delimiter == "|" else None  # Markdown's bold and code
    cells = [[str(cell).strip(marks) for cell in row] for row in frame.fillna("").to_numpy().tolist()]
    return [Line(i, row) for (i, _), row in zip(numbered, cells, strict=True) if any(row)], delimiter


def _table_lines(path: Path, text: str) -> tuple[list[tuple[int, str]], str]:
    """Return a table's lines with their numbers, and what separates the cells.

    Raises:
        RayparError: there is no table, or several in a Markdown file.
    """
    numbered = [(i, line.translate(_BOXES).strip(" \r\f")) for i, line in enumerate(text.split("\n"), 1)]
    is_prose = path.suffix.lower() == ".md"
    if is_prose:
        numbered = [(i, line) for i, line in numbered if "|" in line]
    kept = [(i, line) for i, line in numbered if line.strip() and line[0] != "#" and line[:4] != "sep="]
    if not kept:
        raise RayparError(f"{path}: the table is empty", hint=EXAMPLE)
    delimiter = max(DELIMITERS, key=lambda mark: sum(mark in line for _, line in kept))
    if not any(delimiter in line for _, line in kept):
        delimiter = " "
    if not re.search(r"[^\W\d_]", re.sub(r"\d[eE][+-]?\d", "", kept[0][1])):  # no names: numpy writes "# workers time"
        above = [(i, line.lstrip("# ")) for i, line in numbered if line[:1] == "#" and i < kept[0][0]]
        kept = [*above[-1:], *kept]
    while len(kept) > 1 and delimiter not in kept[0][1] and delimiter in kept[1][1]:
        del kept[0]  # a title
    if delimiter == "|":
        # Rules have no letters or digits.
        kept = [(i, line.removeprefix("|").removesuffix("|")) for i, line in kept if re.search(r"\w", line)]
        gap = next((i for (last, _), (i, _) in pairwise(kept) if is_prose and i > last + 2), None)
        if gap is not None:
            raise RayparError(f"{path}: has a second table in line {gap}", hint="keep one table in the file")
    return kept, delimiter


# ---- wide tables


def _long(path: Path, sheet: Sheet) -> Sheet:
    """Return a sheet with a line for each run; the sheet itself if its worker counts are not side by side.

    Raises:
        RayparError: what was measured is not named.
    """
    head, lines = sheet.head, sheet.lines
    names = [name for name in head.cells if not name.isdigit()]
    # "1,100" may be a line of a table without a head: plain numbers are counts if a name beside them fits.
    has_corner = any(_measures(name) or any(map(is_plural, words_of(name))) for name in names)
    counts = {i: count for i, name in enumerate(head.cells) if (count := _count_in(name, plain=has_corner)) is not None}
    labels = [i for i in range(len(head.cells)) if i not in counts]
    if len({n for n, _ in counts.values()}) < 2 or len(labels) > 1 + len(counts):
        return sheet
    roles = [column for i in labels if (column := role_of(i, head.cells[i])) is not None]
    is_corner = len(labels) == 1 and all(column.role is Role.WORKERS for column in roles)
    if any(column.role is Role.WORKERS for column in roles) and not is_corner:
        return sheet
    if any(any(line.cells[len(head.cells) :]) for line in lines):
        return sheet  # reported for the line
    rests = {rest for _, rest in counts.values()}
    measure = next((rest for rest in rests if _measures(rest)), None) if len(rests) == 1 else None
    if is_corner and measure is None and any(_measures(line.cells[labels[0]]) for line in lines):
        return _turned(sheet, counts, labels[0])
    if measure is None:
        measure = next((column.name for column in roles if column.role in MEASURED), None)
    if measure is None or len(rests) > 1:
        shown = ", ".join(head.cells[i] for i in counts)
        hint = "write what was measured above the first column or in each name, such as img/s or time_s"
        raise RayparError(f"{path}: the columns {shown} are worker counts, but not of what", hint=hint)
    named = [LABEL_NAME if head.cells[i] in ("", measure) else head.cells[i] for i in labels]
    long = [
        Line(line.number, [*(line.cells[j] for j in labels), str(n), line.cells[i]])
        for line in lines
        for i, (n, _) in counts.items()
        if line.cells[i]
    ]
    return Sheet(Line(head.number, [*named, WORKERS_NAME, measure]), long, sheet.delimiter, is_wide=True)


def _turned(sheet: Sheet, counts: Mapping[int, tuple[int, str]], label: int) -> Sheet:
    """Return a sheet whose rows are columns."""
    names = [WORKERS_NAME, *(line.cells[label] for line in sheet.lines)]
    lines = [
        Line(sheet.head.number, [str(n), *(line.cells[i] for line in sheet.lines)]) for i, (n, _) in counts.items()
    ]
    return Sheet(Line(sheet.head.number, names), lines, sheet.delimiter, is_wide=True)


def _count_in(name: str, *, plain: bool) -> tuple[int, str] | None:
    """Return the worker count in a column's name, and the rest of the name; None if it has none.

    A number after one noun ("GPU 1") is an index.
    """
    if plain and re.fullmatch(r"\d{1,7}", name):
        return (int(name), "") if int(name) else None
    if match := re.fullmatch(r"(\d{1,7}) *[x×] *([^\W\d_]\w*)", name):  # "8x A100"
        return (int(match[1]), "" if is_noun(match[2].lower()) else match[2]) if int(match[1]) else None
    matches = [match for match in _COUNT.finditer(name) if is_noun(_noun_of(match)) or _noun_of(match) in ("n", "np")]
    if len(matches) != 1 or not (count := int(matches[0][1] or matches[0][4])):
        return None
    rest = f"{name[: matches[0].start()]} {name[matches[0].end() :]}".strip(" _-:,@()[]")
    return None if re.search(r"\d", rest) else (count, _without_links(rest))


def _noun_of(match: re.Match[str]) -> str:
    return str(match[2] or match[3]).lower()


def _without_links(name: str) -> str:
    """Return a name without "with" and the like around the count that was cut out."""
    words = name.split()
    links = {"with", "on", "for", "at", "using", *COUNTS}
    while words and words[-1].lower() in links:
        words.pop()
    while words and words[0].lower() in links:
        del words[0]
    return " ".join(words)


def _measures(name: str) -> bool:
    column = role_of(0, name)
    return column is not None and column.role in MEASURED
