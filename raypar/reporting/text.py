"""Text for terminals and files: safe characters, wrapped lines, tables, the console."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich.box import Box
from rich.cells import cell_len
from rich.console import Console
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from raypar import units
from raypar.errors import RayparError
from raypar.signals import EXIT_NOBODY_READS, Interrupted, discard

# C0 except tab and line feed, DEL and C1. They include the first byte of every escape sequence.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_STAND_INS = str.maketrans({"×": "x", "–": "-", "±": "+/-", "→": "->", "µ": "u", "─": "-", "…": "...", "∞": "inf"})
MIN_WIDTH = 20  # cells of a paragraph, even on a narrower console
GAP = 2  # cells between the columns of a table; reduced to one if that makes it fit


def ascii_fallback(text: str, encoding: str) -> str:
    """Return the text unchanged if it can be encoded, else with plain substitutes for missing characters.

    A substitute may be longer than the original: ``+/-`` takes two more cells than ``±``.
    """
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(_STAND_INS).encode(encoding, errors="replace").decode(encoding)
    return text


def as_utf8(text: str) -> str:
    """Return the text with a question mark for each lone surrogate, which UTF-8 can't encode."""
    return text.encode("utf-8", "replace").decode()


def strip_control(text: str) -> str:
    """Return the text with a question mark for each character that would control a terminal."""
    return _CONTROL.sub("?", text)


_NBSP = "\N{NO-BREAK SPACE}"
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:%|s|ms|µs|us|min|h|samples/s|workers?)(?:\W|$))")
_INTERVAL = re.compile(r" \[[^\s\[\]]*\d[^\s\[\]]*, [^\s\[\]]+\]")


def no_break_values(text: str) -> str:
    """Return the text with no-break spaces within values: ``93 %``, ``0.96 s``, ``1.87× [1.80, 1.95]``."""
    return _INTERVAL.sub(lambda match: match[0].replace(" ", _NBSP), _BEFORE_UNIT.sub(_NBSP, text))


def wrap(text: str, width: int) -> list[str]:
    """Return lines of at most `width` cells; a value stays with its unit and its interval.

    A word longer than a line gets its own line, unbroken.
    """
    lines: list[str] = []
    for word in filter(None, no_break_values(" ".join(text.split())).split(" ")):
        if lines and cell_len(lines[-1]) + 1 + cell_len(word) <= width:
            lines[-1] += " " + word
        else:
            lines.append(word)
    return [line.replace(_NBSP, " ") for line in lines]


def wrap_hanging(text: str, width: int, indent: int = 0) -> list[str]:
    """Return the lines of a paragraph for a console of this width, with two more cells of indent after the first."""
    lines = wrap(text, max(MIN_WIDTH, width - indent - 2))
    return [" " * (indent + 2 * bool(i)) + line for i, line in enumerate(lines)]


def print_line(console: Console, text: str, style: str = "") -> None:
    """Print a text without wrapping it, such as a path or command to copy."""
    console.print(Text(ascii_fallback(text, console.encoding), style=style), highlight=False, soft_wrap=True)


def print_paragraph(console: Console, text: str, indent: int = 0) -> None:
    """Print a wrapped text."""
    for line in wrap_hanging(ascii_fallback(text, console.encoding), console.width, indent):
        console.print(Text(line), highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Column:
    """A column of a table in a terminal, a page or Markdown."""

    head: str  # may have several lines
    cells: Sequence[str]  # one for each row
    is_number: bool = False  # right-aligned
    sort: Sequence[float | None] = ()  # sort keys of the rows in a page; empty: the texts
    is_prose: bool = False  # wrapped first if space is short


def value_column(key: str, values: Sequence[object]) -> Column:
    """Return the column of a hyperparameter."""
    return Column(key, list(map(units.value_of, values)), all(isinstance(v, (int, float)) for v in values))


def terminal_table(
    columns: Sequence[Column],
    width: int,
    encoding: str,
    *,
    styles: Sequence[str] = (),
    rule: bool = False,
    heads: bool = True,
) -> Table:
    """Return a table that fits into `width` cells without truncation.

    Args:
        styles: one for each row.
        rule: draw a line below the heads.
        heads: show the heads.
    """
    columns = [encoded(column, encoding) for column in columns]
    num_lines = max(column.head.count("\n") for column in columns)
    blank, dash = "    \n", ascii_fallback("─", encoding)
    box = Box(f"{blank}{blank} {dash}{dash} \n{blank * 4}    ", ascii=True) if rule else None
    gap = GAP if _least_width(columns, GAP) <= width else 1
    # A box has a separate character between columns.
    table = Table(
        box=box,
        show_header=heads,
        show_edge=False,
        header_style="bold",
        pad_edge=False,
        padding=(0, gap - bool(rule), 0, 0),
    )
    for column, column_width in zip(columns, _widths(columns, width, gap), strict=True):
        head = Text("\n" * (num_lines - column.head.count("\n")) + column.head)
        justify: Literal["right", "left"] = "right" if column.is_number else "left"
        table.add_column(head, justify=justify, width=column_width, overflow="fold")
    rows = list(zip(*(column.cells for column in columns), strict=True))
    for cells, style in zip(rows, styles or [""] * len(rows), strict=True):
        # Text, not markup, which would read the brackets of an interval as a style.
        table.add_row(*map(Text, cells), style=style)
    return table


def print_table(console: Console, columns: Sequence[Column], styles: Sequence[str] = ()) -> None:
    """Print a table that fits the console."""
    console.print(terminal_table(columns, console.width, console.encoding, styles=styles))


def table_width(columns: Sequence[Column], encoding: str) -> int:
    """Return the width in cells of a table without wrapped lines."""
    return sum(_natural_width(encoded(column, encoding)) + GAP for column in columns) - GAP


def encoded(column: Column, encoding: str) -> Column:
    """Return the column in characters of the encoding, each cell on one line; values may contain line breaks."""
    cells = [ascii_fallback(" ".join(cell.split()) if "\n" in cell else cell, encoding) for cell in column.cells]
    return replace(column, head=ascii_fallback(column.head, encoding), cells=cells)


def fits_at_words(columns: Sequence[Column], width: int, encoding: str) -> bool:
    """Return whether a table fits if numbers are not wrapped, and prose is only wrapped between words."""
    return _least_width([encoded(column, encoding) for column in columns], GAP) <= width


def _least_width(columns: Sequence[Column], gap: int) -> int:
    widths = [_word_width(column) if column.is_prose else _natural_width(column) for column in columns]
    return sum(widths) + gap * (len(widths) - 1)


def _natural_width(column: Column) -> int:
    return max(map(cell_len, (*column.head.split("\n"), *column.cells)))


def _word_width(column: Column) -> int:
    return max(map(cell_len, " ".join((column.head, *column.cells)).split()), default=1)


def _widths(columns: Sequence[Column], width: int, gap: int) -> list[int]:
    """Return the widths of the columns: prose is narrowed first, then other cells at spaces, then single words."""
    widths = list(map(_natural_width, columns))
    words = list(map(_word_width, columns))
    prose = [word if c.is_prose else full for c, word, full in zip(columns, words, widths, strict=True)]
    for least in (prose, words, [1] * len(columns)):
        while sum(widths) + gap * (len(widths) - 1) > width:
            broad = [i for i, each in enumerate(widths) if each > least[i]]
            if not broad:
                break
            widths[max(broad, key=widths.__getitem__)] -= 1
    return widths


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a new file beside `path` that replaces it at the end, or is removed on an error.

    Raises:
        RayparError: the file can't be written.
    """
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=path.suffix)
        os.close(handle)
        try:
            yield Path(name)
            umask = os.umask(0)
            os.umask(umask)
            Path(name).chmod(0o666 & ~umask)  # as for any new file; only the owner can read a temporary one
            Path(name).replace(path)
        finally:
            Path(name).unlink(missing_ok=True)
    except OSError as error:
        raise unwritable(path, error) from None


def unwritable(path: Path, error: OSError) -> RayparError:
    """Return the error for a file that can't be written."""
    hint = "name a file in an existing folder that you may write to"
    return RayparError(f"{path}: can't be written: {error.strerror or error}", hint=hint)


def check_file(path: Path, *, force: bool = True) -> None:
    """Raise RayparError, before any work, if `replacing` can't write a file, or `force` is needed to replace one."""
    if path.is_dir():
        raise RayparError(f"{path}: is a folder", hint="name a file")
    _check_folder(path.parent, path)
    if path.exists() and not force:
        raise RayparError(f"{path}: already exists", hint="choose another name, or replace it with --force")


def check_folder(folder: Path) -> None:
    """Raise RayparError if files can't be written into a folder, which need not exist yet."""
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    _check_folder(there, folder)


def _check_folder(folder: Path, shown: Path) -> None:
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise unwritable(shown, error) from None


def write_text(path: Path, text: str) -> None:
    """Write a text, or raise RayparError; an existing file is replaced atomically."""
    with replacing(path) as there:
        there.write_text(text, encoding="utf-8")


class TerminalConsole(Console):
    """Console that keeps its own colours and cursor moves, strips other control characters and reads no markup."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, **options})

    def on_broken_pipe(self) -> None:
        """End the command quietly, as for a closed terminal; rich would end the process."""
        self.quiet = True
        discard(self.file)
        raise Interrupted(EXIT_NOBODY_READS - 128)

    def render(self, *args: Any, **kwargs: Any) -> Iterable[Segment]:
        for segment in super().render(*args, **kwargs):
            # rich's control segments contain cursor moves but no text.
            yield segment if segment.control else Segment(strip_control(segment.text), segment.style)
