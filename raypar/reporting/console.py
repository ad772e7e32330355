"""A study's report in a terminal: the question and its answer, the recommended point, a table, caveats.

`print_report` fits a small study into 25 lines of 80 columns, and reads the same without colour and in a pipe;
``verbose`` adds further findings. A table that is too wide drops details step by step (`points.layouts`). If even the
narrowest one does not fit, each point becomes a few lines.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.text import Text

from raypar import units
from raypar.analysis.analyse import StudyAnalysis
from raypar.reporting.points import layouts, point_columns
from raypar.reporting.profile import breakdown_section
from raypar.reporting.text import (
    Column,
    ascii_fallback,
    encoded,
    fits_at_words,
    table_width,
    terminal_table,
    wrap_hanging,
)
from raypar.reporting.view import StudyView
from raypar.study.trial import point_label

MAX_POINTS = 12
MAX_COMPARISONS = 6


def print_report(view: StudyView, console: Console, *, verbose: bool = False) -> None:
    """Print the report, adapted to the console's width and encoding."""
    for part in _parts(view, console.width, console.encoding, verbose=verbose):
        console.print(part)


def _parts(view: StudyView, width: int, encoding: str, *, verbose: bool) -> Iterator[RenderableType]:
    def paragraph(text: str, indent: int = 0, style: str = "") -> Iterator[Text]:
        for line in wrap_hanging(ascii_fallback(text, encoding), width, indent):
            # A path longer than the line is folded; otherwise rich would cut it.
            yield Text(line, style=style, overflow="fold")

    analysis = view.analysis
    yield from paragraph(view.header, style="dim")
    yield Text("")
    yield from paragraph(view.headline, style="bold")
    num_comparisons = len(analysis.verdict.comparisons)
    if verbose or num_comparisons <= MAX_COMPARISONS:  # the table also has the speedups
        columns = [Column("", [" "] * num_comparisons), *view.comparisons]
        if fits_at_words(columns, width, encoding):
            yield terminal_table(columns, width, encoding, heads=False)
        else:
            for cells in zip(*(column.cells for column in columns), strict=True):
                yield from paragraph(" ".join(cells), 2)
    for line in view.summary:
        yield from paragraph(line)
    if analysis.points:
        yield Text("")
        num_points = len(analysis.points) if verbose else min(len(analysis.points), MAX_POINTS)
        yield from _points(analysis, num_points, width, encoding)
        if more := len(analysis.points) - num_points:
            yield from paragraph(f"... and {units.counted(more, 'more point')}")
        yield from paragraph(view.legend if verbose else view.brief_legend, style="dim")
    if not verbose:
        yield Text("")
        for line in analysis.answers:
            yield from paragraph(line)
        if view.caveats:
            yield from paragraph(view.caveats)
        yield from paragraph(f"More: raypar report {view.name} --verbose | --open | raypar ui", style="dim")
        return
    if analysis.statements:
        yield Text("")
    for statement in analysis.statements:
        yield from paragraph(statement)
    for section in view.sections.values():
        yield Text("")
        for indented, line in section:
            yield from paragraph(line, indented)
    yield from breakdown_section(analysis.profiles, width, encoding)
    if analysis.warnings:
        yield Text("")
    for finding in analysis.warnings:
        yield from paragraph(f"Warning: {finding.detail}")
        yield from paragraph(f"→ {finding.advice}", 2)


def _points(analysis: StudyAnalysis, num_points: int, width: int, encoding: str) -> Iterator[RenderableType]:
    every = layouts()
    for layout in every:
        columns = point_columns(analysis, layout, num_points)
        if table_width(columns, encoding) <= width:
            yield terminal_table(columns, width, encoding, rule=True)
            return
    columns = [encoded(column, encoding) for column in point_columns(analysis, every[0], num_points)]
    for i, point in enumerate(analysis.points[:num_points]):
        if i:
            yield Text("")
        yield Text(ascii_fallback(point_label(point.point), encoding), style="bold", overflow="fold")
        for column in columns[max(1, len(analysis.question.space_keys)) :]:
            yield Text(f"  {column.head}: {column.cells[i]}", overflow="fold")
