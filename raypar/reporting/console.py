"""A study's report in a terminal: the question and its answer, the recommended point, a table, caveats.

`print_report` fits a small study into 25 lines of 80 columns, and reads the same without colour and in a pipe;
``verbose`` adds further findings. A table that is too wide drops details step by step (`points.layouts`). If even the
narrowest one does not fit, each point becomes a few lines.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.text import Text

from raypar import units
from raypar.analysis.analyse import StudyAnalysis
from raypar.reporting.documents import OUTCOMES, Spread
from raypar.reporting.fit import details, scaling_entry
from raypar.reporting.points import brief_legend, layouts, legend, point_columns
from raypar.reporting.profile import breakdown_section
from raypar.reporting.recommend import recommendation_entry, recommended_lines
from raypar.reporting.sentences import caveats_line, comparison_columns, header, headline, importance_line
from raypar.reporting.text import (
    Column,
    ascii_fallback,
    encoded,
    fits_at_words,
    table_width,
    terminal_table,
    wrap_hanging,
)
from raypar.study.quantity import View, of_view
from raypar.study.trial import point_label

if TYPE_CHECKING:
    from raypar.analysis.verdict import BaselineComparison
    from raypar.reporting.documents import ComparisonEntry, ReportDocument

MAX_POINTS = 12
MAX_COMPARISONS = 6


def print_report(analysis: StudyAnalysis, console: Console, *, verbose: bool = False) -> None:
    """Print the report, adapted to the console's width and encoding."""
    for part in _parts(analysis, console.width, console.encoding, verbose=verbose):
        console.print(part)


def _parts(analysis: StudyAnalysis, width: int, encoding: str, *, verbose: bool) -> Iterator[RenderableType]:
    def paragraph(text: str, indent: int = 0, style: str = "") -> Iterator[Text]:
        for line in wrap_hanging(ascii_fallback(text, encoding), width, indent):
            # A path longer than the line is folded; otherwise rich would cut it.
            yield Text(line, style=style, overflow="fold")

    name = analysis.question.study_name or "study"
    yield from paragraph(header(analysis), style="dim")
    yield Text("")
    yield from paragraph(headline(analysis.verdict), style="bold")
    if verbose or len(analysis.verdict.comparisons) <= MAX_COMPARISONS:  # the table also has the speedups
        columns = [Column("", [" "] * len(analysis.verdict.comparisons)), *comparison_columns(analysis.verdict)]
        if fits_at_words(columns, width, encoding):
            yield terminal_table(columns, width, encoding, heads=False)
        else:
            for cells in zip(*(column.cells for column in columns), strict=True):
                yield from paragraph(" ".join(cells), 2)
    verdict = analysis.verdict
    for line in filter(None, (*recommended_lines(verdict), verdict.final_test, importance_line(analysis))):
        yield from paragraph(line)
    if analysis.points:
        yield Text("")
        shown = analysis if verbose else replace(analysis, points=analysis.points[:MAX_POINTS])
        yield from _points(shown, width, encoding)
        if (more := len(analysis.points) - len(shown.points)) > 0:
            yield from paragraph(f"... and {units.counted(more, 'more point')}")
        yield from paragraph(legend(analysis) if verbose else brief_legend(analysis), style="dim")
    if not verbose:
        yield Text("")
        if caveats := caveats_line(analysis):
            yield from paragraph(caveats)
        yield from paragraph(f"More: raypar report {name} --verbose | --open | raypar ui", style="dim")
        return
    yield Text("")
    for statement in analysis.statements:
        yield from paragraph(statement)
    for section in details(analysis).values():
        if section:
            yield Text("")
        for indented, line in section:
            yield from paragraph(line, indented)
    yield from breakdown_section(analysis.profiles, width, encoding)
    if analysis.warnings:
        yield Text("")
    for finding in analysis.warnings:
        yield from paragraph(f"Warning: {finding.detail}")
        yield from paragraph(f"→ {finding.advice}", 2)


def _points(analysis: StudyAnalysis, width: int, encoding: str) -> Iterator[RenderableType]:
    every = layouts()
    for layout in every:
        columns = point_columns(analysis, layout)
        if table_width(columns, encoding) <= width:
            yield terminal_table(columns, width, encoding, rule=True)
            return
    columns = [encoded(column, encoding) for column in point_columns(analysis, every[0])]
    for i, point in enumerate(analysis.points):
        if i:
            yield Text("")
        yield Text(ascii_fallback(point_label(point.point), encoding), style="bold", overflow="fold")
        for column in columns[max(1, len(analysis.question.space_keys)) :]:
            yield Text(f"  {column.head}: {column.cells[i]}", overflow="fold")


def report_document(analysis: StudyAnalysis) -> ReportDocument:
    """Return the content of `print_report` as a document, including the verbose parts."""
    question, verdict = analysis.question, analysis.verdict
    # The answer of a search names the leading point; a search does not look for the fastest one.
    advice = verdict.recommendation if not question.is_search else None
    return {
        "schema": 1,
        "kind": "report",
        "study": question.study_name,
        "scope": analysis.scope or None,
        "question": verdict.question or None,
        "answer": verdict.answer,
        "recommended": " ".join(recommended_lines(verdict)) or None,
        "status": verdict.status or None,
        "doubt": verdict.doubt or None,
        "final_test": verdict.final_test or None,
        "workload": question.workload or None,
        "swept": question.space_keys,
        "baseline": question.baseline,
        "metric": question.metric,
        "mode": question.mode,
        "metric_unit": question.unit or None,
        "time_metric": analysis.time_metric,
        "energy_source": analysis.energy_source or None,
        "price_per_node_hour": question.price_per_node_hour,
        "num_trials": analysis.num_trials,
        "num_by_state": analysis.num_by_state,
        "wall_s": analysis.wall_s,
        "comparisons": list(map(_comparison_entry, verdict.comparisons)),
        "recommendation": recommendation_entry(advice) if advice else None,
        "importances": analysis.importances,
        "points": [
            {
                "point": p.point,
                "num_workers": p.num_workers,
                "is_baseline": p.is_baseline,
                "num_trials": len(p.results),
                "num_finished": len(p.samples),
                "outcome": p.outcome,
                "time_s": p.time_s,
                "speedup": p.speedup,
                "efficiency": p.efficiency,
                "metric": p.metric,
                "quantities": Spread({q.key: p.of(q) for q in of_view(View.POINTS)}),
                "step_time_median_s": p.step_time_median_s,
                "step_time_p95_s": p.step_time_p95_s,
            }
            for p in analysis.points
        ],
        "caveats": [
            {"check": w.check, "summary": w.subject, "detail": w.detail, "advice": w.advice} for w in analysis.warnings
        ],
        "statements": analysis.statements,
        "scaling": [scaling_entry(group, group.analysis) for group in analysis.worker_groups],
        "effects": analysis.effects,
        "target": analysis.target,
        "batches": analysis.batches,
        "breakdowns": [
            {
                "point": point,
                "num_steps": profile.num_steps,
                "step_s": profile.step_s,
                "overhead": profile.overhead,
                "parts_s": profile.mean.parts,
                "hidden_communication_s": profile.mean.hidden_s,
                "utilisation": profile.utilisation,
            }
            for point, profile in analysis.profiles
        ],
    }


def _comparison_entry(c: BaselineComparison) -> ComparisonEntry:
    return {
        "point": c.point.point,
        "compared": c.who,
        "baseline": c.base,
        "setting": c.setting or None,
        "outcome": OUTCOMES[c.outcome],
        "speedup": c.point.speedup,
        "efficiency": c.point.efficiency,
    }
