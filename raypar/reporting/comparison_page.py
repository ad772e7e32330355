"""Comparisons as one self-contained HTML file: of two studies, and of two revisions of the code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from raypar import units
from raypar.analysis.analyse import StudyAnalysis
from raypar.analysis.comparison import TIME_RATIO, Comparison, Gate, Outcome
from raypar.analysis.question import current_results
from raypar.reporting import vega
from raypar.reporting.ab import AbView, ab_columns
from raypar.reporting.compare import CompareView, GateView, compare_columns, legend_of
from raypar.reporting.figures import figures_of
from raypar.reporting.html import Origin, drawings_of, page_of, provenance_lines, table_of, trials_table
from raypar.reporting.vega import Figure, OmittedFigure, Row, bounds, layers, nominal, quantity
from raypar.study.metric import Metric
from raypar.study.space import Value
from raypar.study.trial import TrialResult, latest, point_label

MAX_ROWS = 20
LOG_FROM = 4  # ratio of the largest and the smallest value
TIME_STYLES = {Outcome.FASTER: ("#0072B2", "triangle-left"), Outcome.SLOWER: ("#D55E00", "triangle-right")}
METRIC_STYLES = {Outcome.LOWER: ("#0072B2", "triangle-left"), Outcome.HIGHER: ("#D55E00", "triangle-right")}
# Figures of a study that say nothing about two revisions, or repeat the comparison.
REPEATED = ("speedup", "efficiency", "pareto", "heat_map", "metric_heat_map", "main_effect", "goodput")
Compared = Sequence[tuple[dict[str, Value], Comparison]]


def compare_page(view: CompareView) -> str:
    """Return the comparison of two studies as HTML; takes a few seconds."""
    comparison, stores = view.comparison, view.stores if len(set(view.stores)) > 1 else ("", "")
    a, b = (f"{name} ({at})" if at else name for name, at in zip(comparison.names, stores, strict=True))
    points = table_of("all-points", list(compare_columns(comparison, is_wide=True))) if comparison.matched else None
    figures = (
        _times([(dict(p.point), p.time) for p in comparison.matched], comparison.allowed_share),
        _metrics([(dict(p.point), p.metric) for p in comparison.matched], comparison.judged_by),
    )
    lines = [*_passes(view.gate), *view.gate_lines[:-1], *view.claims]
    return _page(
        f"A: {a}, the reference. B: {b}.",
        lines,
        (view.gate, view.gate_lines[-1:]),
        caveats=[*view.doubts, *([view.limitation] if comparison.matched else [])],
        header=f"Comparison of two studies, {units.counted(len(comparison.matched), 'common point')}",
        points=points and replace(points, notes=[legend_of(comparison)]),
        figures=figures,
        notes=view.notes,
        trials=None,
        provenance=list(_origins(view)),
        study_source=None,
    )


def ab_page(view: AbView, analysis: StudyAnalysis, results: Sequence[TrialResult], origin: Origin) -> str:
    """Return the comparison of two revisions as HTML; takes a few seconds.

    Args:
        results: the study's trials, in any order. Trials of other settings are excluded.
    """
    comparison, trials = view.comparison, latest(current_results(analysis.question, results).results)
    points = table_of("all-points", list(ab_columns(comparison)))
    of_study = [f for f in figures_of(analysis, trials) if isinstance(f, Figure) and f.key not in REPEATED]
    return _page(
        f"A: {view.a}, the reference. B: {view.b}.",
        view.lines,
        (view.gate, view.gate_lines),
        caveats=[f"{w.detail.removesuffix('.')}. {w.advice}" for w in analysis.warnings],
        header=f"Comparison of two revisions, {units.counted(len(trials), 'trial')}",
        points=replace(points, notes=[LEGEND.format(_margin(comparison.margin))]),
        figures=(
            _times([(dict(p.point), p.time) for p in comparison.points], view.allowed_share, comparison.margin),
            _metrics([(dict(p.point), p.metric) for p in comparison.points], analysis.question.judged_by),
            *of_study,
        ),
        notes=[],
        trials=trials_table(analysis, trials),
        provenance=provenance_lines(origin.tags, trials),
        study_source=origin.study_source,
    )


LEGEND = (
    "B/A: how many times as long B takes, from the pairs of each block, with an interval. All intervals hold together "
    "with 95 % confidence, also after repeated looks. A difference below {} does not matter. Pairs: those compared."
)


def _passes(gate: GateView | None) -> list[str]:
    """Return the result of ``--fail-if-slower`` in one sentence; none without it."""
    if gate is None:
        return []
    limit = f"{_margin(gate.allowed_share)} slower"
    sentences = {
        Gate.PASSED: f"B is at most {limit}.",
        Gate.FAILED: f"B fails: it may be at most {limit}.",
        Gate.INCONCLUSIVE: f"Inconclusive: B may be more than {limit}.",
    }
    return [sentences[gate.result]]


def _margin(share: float) -> str:
    return f"{100 * share:.4g} %"


def _page(
    compared: str,
    lines: Sequence[str],
    gate: tuple[GateView | None, Sequence[str]],
    *,
    figures: Sequence[Figure | OmittedFigure],
    **values: Any,
) -> str:
    """Return the page.

    Args:
        compared: names of A and B.
        lines: verdict; the first line is the page's heading.
        gate: result of ``--fail-if-slower``, and sentences about it.
    """
    tables = [values["points"], values["trials"]]
    return page_of(
        "comparison.html.jinja",
        headline=f"{compared} {lines[0]}",
        compared=compared,
        lines=lines,
        gate=gate[0].result.value if gate[0] else "",
        gate_lines=gate[1],
        figures=drawings_of(figures[:2]),
        more_figures=drawings_of(figures[2:]),
        omitted=[figure for figure in figures if isinstance(figure, OmittedFigure)],
        is_repeated=False,
        styles=[table.style for table in tables if table],
        **values,
    )


def _times(points: Compared, allowed_share: float | None, margin: float | None = None) -> Figure | OmittedFigure:
    """Return B's time over A's at each point, with the limit of ``--fail-if-slower`` or the margin."""
    title = "Time of B over that of A"
    timed = [(point, c, c.estimate) for point, c in points if c.estimate is not None][:MAX_ROWS]
    if not timed:
        return OmittedFigure(title, "no point has a time in both")
    rows: list[Row] = [
        {"point": point_label(point), **bounds(e), "shown": units.ratio_interval(e), "outcome": str(c.outcome)}
        for point, c, e in timed
    ]
    limits = [1 + allowed_share] if allowed_share is not None else [1 + margin, 1 / (1 + margin)] if margin else []
    rows, _ = vega.within(rows, trials=[{"value": each} for each in (1.0, *limits)], log=True)
    ends = [*limits, 1.0, *(row[end] for row in rows for end in ("value_low", "value_high"))]
    is_log = max(ends) > LOG_FROM * min(ends)
    margin_of_axis = (max(ends) / min(ends)) ** 0.05
    scale = {"domain": [min(ends) / margin_of_axis, max(ends) * margin_of_axis], "nice": False}
    x = quantity("value", "B/A", log2=is_log, axis={"format": "~g"}, scale=scale)
    caption = "Estimates with their intervals; at the dotted line, both take equally long."
    if limits:
        which = "The dashed line is the limit" if allowed_share is not None else "Dashed lines are the margin"
        caption += f" {which} of {_margin(limits[0] - 1)}."
    return _forest("times_ratio", title, caption, rows, x, TIME_STYLES, TIME_RATIO.neutral, limits)


def _metrics(points: Compared, metric: Metric) -> Figure | OmittedFigure:
    """Return B's metric minus A's at each point."""
    title, factor = f"{metric.name} of B minus that of A", metric.per_cent or 1.0
    changes = [(point, c, c.estimate) for point, c in points if c.estimate is not None][:MAX_ROWS]
    if all(c.outcome is Outcome.EQUAL for _, c, _ in changes):
        return OmittedFigure(title, "it is equal in all pairs" if changes else "no point has it in both")
    rows: list[Row] = [
        {"point": point_label(point), **{key: factor * value for key, value in bounds(e).items()}}
        | {"shown": f"{factor * e.value:+.4g}", "outcome": str(c.outcome)}
        for point, c, e in changes
    ]
    x = quantity("value", "B-A, percentage points" if metric.per_cent else "B-A")
    caption = "Estimates with their intervals; at the dotted line, both are equal."
    return _forest("metric_change", title, caption, rows, x, METRIC_STYLES, 0.0, [])


def _forest(
    key: str,
    title: str,
    caption: str,
    rows: Sequence[Row],
    x: vega.Spec,
    styles: dict[Outcome, tuple[str, str]],
    neutral: float,
    limits: Sequence[float],
) -> Figure:
    """Return a figure with a row for each point: its value with its interval, in the style of its outcome."""
    y = nominal("point", sort=None)
    named = {row["outcome"]: styles.get(Outcome(row["outcome"]), vega.PLAIN) for row in rows}
    colour, shape = vega.styled("outcome", named)
    spec = layers(
        rows,
        vega.reference_layer(at=(neutral,), x=x),
        *([vega.reference_layer(at=limits, dash=(6, 3), x=x)] if limits else []),
        *vega.interval_layers(rows, "x", x, y, color=colour),
        vega.median_layer(x, y, color=colour, shape=shape, tooltip=vega.tooltip(point="point", shown="value")),
        height=max(80, 30 * len(rows)),
    )
    return Figure(key, title, caption, spec)


def _origins(view: CompareView) -> Iterator[tuple[str, str]]:
    comparison = view.comparison
    for letter, name, store in zip("AB", comparison.names, view.stores, strict=True):
        yield letter, ", ".join(filter(None, (name, store)))
    for key, (a, b) in comparison.origins.items():
        yield key, f"{', '.join(a) or 'unknown'} → {', '.join(b) or 'unknown'}"
