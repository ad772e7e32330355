"""A study's analysis in a terminal: a table of points, verdicts, scaling and effects, warnings.

The table fits 80 columns and reads the same without colour and in a pipe. Where it is too wide it says less, step by
step (`points.LAYOUTS`); where even that won't fit, each point becomes a few lines.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.text import Text

from raypar import units
from raypar.analysis.analyse import StudyAnalysis
from raypar.report.fit import details
from raypar.report.points import LAYOUTS, legend, point_columns
from raypar.report.profile import breakdown_section
from raypar.report.text import ascii_fallback, encoded, table_width, terminal_table, wrap_hanging
from raypar.study.trial import point_label


def print_report(analysis: StudyAnalysis, console: Console) -> None:
    """Print the report, fitted to the console's width and encoding."""
    for part in _parts(analysis, console.width, console.encoding):
        console.print(part)


def _parts(analysis: StudyAnalysis, width: int, encoding: str) -> Iterator[RenderableType]:
    def paragraph(text: str, indent: int = 0, style: str = "") -> Iterator[Text]:
        for line in wrap_hanging(ascii_fallback(text, encoding), width, indent):
            # Folded, where a path is longer than the line: rich would cut it.
            yield Text(line, style=style, overflow="fold")

    counts = f"{units.counted(len(analysis.points), 'point')}, {units.counted(analysis.num_trials, 'trial')}"
    yield from paragraph(f"{analysis.question.study_name or 'study'}: {counts}", style="bold")
    yield Text("")
    if analysis.points:
        yield from _points(analysis, width, encoding)
        yield Text("")
        yield from paragraph(legend(analysis), style="dim")
        yield Text("")
    for verdict in analysis.verdicts:
        yield from paragraph(verdict)
    for section in details(analysis).values():
        if section:
            yield Text("")
        for indent, line in section:
            yield from paragraph(line, indent)
    yield from breakdown_section(analysis.profiles, width, encoding)
    if analysis.warnings:
        yield Text("")
    for finding in analysis.warnings:
        yield from paragraph(f"Warning: {finding.detail}")
        yield from paragraph(f"→ {finding.advice}", 2)


def _points(analysis: StudyAnalysis, width: int, encoding: str) -> Iterator[RenderableType]:
    for layout in LAYOUTS:
        columns = point_columns(analysis, layout)
        if table_width(columns, encoding) <= width:
            yield terminal_table(columns, width, encoding, rule=True)
            return
    columns = [encoded(column, encoding) for column in point_columns(analysis, LAYOUTS[0])]
    for i, point in enumerate(analysis.points):
        if i:
            yield Text("")
        yield Text(ascii_fallback(point_label(point.point), encoding), style="bold", overflow="fold")
        for column in columns[max(1, len(analysis.question.space_keys)) :]:
            yield Text(f"  {column.head}: {column.cells[i]}", overflow="fold")
