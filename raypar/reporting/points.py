"""Table of a study's points and its legend, for a terminal, a page and Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from raypar import units
from raypar.analysis.analyse import StudyAnalysis
from raypar.analysis.points import PointAnalysis
from raypar.analysis.question import TRAIN_TIME, point_key
from raypar.analysis.recommend import Decision
from raypar.analysis.stats import Estimate, Method
from raypar.reporting.text import Column, value_column
from raypar.study.price import price_text
from raypar.study.quantity import Quantity, View, of_view
from raypar.study.trial import STEPS, TrialState, point_label, timed_work


@dataclass(frozen=True)
class Layout:
    """Contents of a table of points."""

    is_brief: bool = True  # short heads, and the rarer quantities without intervals
    wrap_heads: bool = True  # break heads at their underscores
    bounds: bool = False  # intervals of time and metric as [low, high]
    major_bounds: bool = False  # intervals of the quantities that no terminal drops, although it is brief
    dropped: tuple[str, ...] = ()  # keys of quantities, or `_PLUS_MINUS` …


_PLUS_MINUS, _EFFICIENCY, _SPEEDUP_BOUNDS = "±% of time", "efficiency", "bounds of speedup"
FULL = Layout(is_brief=False, wrap_heads=False, bounds=True)


def layouts() -> list[Layout]:
    """Return the layouts for terminals, from the widest table to the narrowest that still answers the question."""
    rarest = list(reversed(_quantities()))
    minor, major = ([q.key for q in rarest if q.importance == importance] for importance in (0, 1))
    dropped = (*minor, _PLUS_MINUS, *major, _EFFICIENCY, _SPEEDUP_BOUNDS)
    widest = Layout(wrap_heads=False, bounds=True, major_bounds=True)
    wide = [replace(widest, major_bounds=False), Layout(bounds=True), Layout(wrap_heads=False)]
    return [widest, *wide] + [Layout(dropped=dropped[:n]) for n in range(len(dropped) + 1)]


def _quantities() -> list[Quantity]:
    """Return the quantities of points in column order; those that a summary omits come last."""
    return sorted(of_view(View.POINTS), key=lambda q: View.SUMMARY not in q.views)


def summary_layout() -> Layout:
    """Return the layout of Markdown."""
    return replace(FULL, dropped=tuple(q.key for q in _quantities() if View.SUMMARY not in q.views))


def point_columns(analysis: StudyAnalysis, layout: Layout = FULL, max_points: int | None = None) -> list[Column]:
    """Return the table's columns: swept values, time, speedup, efficiency, metric, the quantities of `View.POINTS`, n.

    Quantities that no point has are omitted, except for time. If no trial of a point finished, the outcome replaces the
    time: "diverged", "does not fit".
    """
    points = analysis.points[:max_points]
    columns = [value_column(key, [p.point.get(key) for p in points]) for key in analysis.question.space_keys]
    if layout.wrap_heads:
        columns = [replace(column, head=_wrapped_head(column.head)) for column in columns]
    columns = columns or [Column("point", [point_label(p.point) or "the only point" for p in points])]

    def add(head: str, of: Callable[[PointAnalysis], Estimate | None], show: Callable[[Estimate], str]) -> None:
        estimates = [of(p) for p in points]
        if any(estimates) or head == "time":
            cells = [show(e) if e else units.MISSING for e in estimates]
            if head == "time":
                cells = [cell if p.time_s else p.outcome or cell for p, cell in zip(points, cells, strict=True)]
            columns.append(Column(head, cells, True, [e.value if e else None for e in estimates]))

    brief, bounds = layout.is_brief, layout.bounds
    add("time", lambda p: p.time_s, partial(_time, layout=layout))
    if analysis.question.baseline:
        ratios = partial(_interval, units.ratio_interval, bounds=_SPEEDUP_BOUNDS not in layout.dropped)
        add("speedup", lambda p: p.speedup, lambda e: "baseline" if e.method is Method.REFERENCE else ratios(e))
    if _EFFICIENCY not in layout.dropped:
        percents = partial(_interval, units.percent_interval, bounds=not brief)
        # A baseline's is 100 % by definition.
        add("eff." if brief else "efficiency", lambda p: None if p.is_baseline else p.efficiency, percents)
    scores = analysis.question.judged_by.show_interval
    add(analysis.question.metric, lambda p: p.shown_metric, partial(_interval, scores, bounds=bounds))
    for q in _quantities():
        if q.key not in layout.dropped and (not brief or _differs(q, points)):
            head = q.head.replace("/", "\n/") if layout.wrap_heads else q.head
            has_bounds = not brief or (layout.major_bounds and q.importance > 1)
            add(head, partial(PointAnalysis.of, q=q), partial(_interval, q.interval, bounds=has_bounds))
    counts = [_counts(p, analysis, brief) for p in points]
    columns.append(Column("n", counts, True, [_num_timed(p, analysis) for p in points]))
    return columns


def _num_timed(point: PointAnalysis, analysis: StudyAnalysis) -> int:
    """Return the number of finished trials, which include those that ended at the target of a search."""
    at_target = point.time_s.num_samples if point.time_s and analysis.question.target is not None else 0
    return max(len(point.samples), at_target)


def _differs(q: Quantity, points: Sequence[PointAnalysis]) -> bool:
    """Return whether a quantity differs enough between points to be worth a column."""
    values = [estimate.value for p in points if (estimate := p.of(q))]
    return bool(values) and (q.min_ratio <= 1 or max(values) > q.min_ratio * min(values))


def estimates_of(analysis: StudyAnalysis, point: PointAnalysis) -> dict[str, Estimate | None]:
    """Return a point's estimates by name: the quantities that are stored and exported."""
    return {
        analysis.time_metric: point.time_s,
        "speedup": point.speedup,
        "efficiency": point.efficiency and replace(point.efficiency, low=None, high=None),  # the speedup has it
        analysis.question.metric: point.metric,
        **{q.key: point.of(q) for q in of_view(View.SUMMARY)},
    }


def standing_of(analysis: StudyAnalysis, point: PointAnalysis) -> str:
    """Return ``recommended``, ``leading`` if the choice is still open, or empty text."""
    advice = analysis.verdict.recommendation
    if advice is None or advice.chosen is None or point_key(advice.chosen.point) != point_key(point.point):
        return ""
    return "leading" if advice.decision is Decision.UNCLEAR else "recommended"


def _wrapped_head(key: str) -> str:
    """Return the key on two lines, with the longer one as short as possible."""
    words = key.split("_")
    splits = [("_".join(words[:i]) + "_", "_".join(words[i:])) for i in range(1, len(words))]
    return "\n".join(min(splits, key=lambda pair: max(map(len, pair)), default=(key,)))


def _interval(show: Callable[[units.Interval], str], e: Estimate, *, bounds: bool) -> str:
    return show(e if bounds else replace(e, low=None, high=None))


def _time(time_s: Estimate, layout: Layout) -> str:
    spread = units.plus_minus(time_s) if _PLUS_MINUS not in layout.dropped and not layout.bounds else ""
    return f"{units.seconds_interval(time_s, bounds=layout.bounds)} {spread}".rstrip()


def _counts(point: PointAnalysis, analysis: StudyAnalysis, is_brief: bool) -> str:
    """Return ``3``, or ``2/3`` if trials failed, were stopped or have not run yet."""
    num_finished, planned = _num_timed(point, analysis), max(analysis.question.num_repeats or 0, len(point.results))
    if num_finished == planned:
        return str(planned)
    return f"{num_finished}{'/' if is_brief else ' of '}{planned}"


def timed_part(time_metric: str) -> str:
    """Return the part of a trial that its time covers."""
    return "the training steps alone" if time_metric == TRAIN_TIME else "the whole trial, from launch to exit"


def _laps(analysis: StudyAnalysis) -> str:
    """Return the work between the reports of the user's training code: ``epochs 1 to 5``; empty for raypar's own."""
    works = {timed_work(r) for point in analysis.points for r in point.measured} - {*STEPS}
    return "".join(filter(None, works)) if analysis.time_metric == TRAIN_TIME else ""


def _estimates(analysis: StudyAnalysis) -> list[tuple[Estimate | None, Estimate | None]]:
    return [(p.time_s, p.speedup) for p in analysis.points] or [(None, None)]


def _level(estimates: Sequence[Estimate]) -> str:
    levels = {e.level for e in estimates if e.level}
    return "at least " * (len(levels) > 1) + units.level(min(levels))


def _methods(estimates: Sequence[Estimate]) -> str:
    return " or ".join(dict.fromkeys(e.method for e in estimates))


# Short and long form.
BY_BLOCK = "speedups: medians of ratios within blocks"
NOT_OF_TIMES = f"{BY_BLOCK}, which need not be the ratios of these times"
MIN_APART = 0.02  # visible difference between a speedup and the ratio of the times beside it


def _differs_from_times(analysis: StudyAnalysis) -> bool:
    """Return whether a speedup visibly differs from the ratio of the times in the table."""
    by_key = {point_key(p.point): p for p in analysis.points if p.time_s} if analysis.question.baseline else {}
    for p in by_key.values():
        base = by_key.get(point_key(analysis.question.baseline_of(p.point)))
        if base is None or base is p or not (p.speedup and p.time_s and base.time_s):
            continue
        is_paired = len(p.times.keys() & base.times.keys()) > 1
        if is_paired and abs(base.time_s.value / p.time_s.value / p.speedup.value - 1) > MIN_APART:
            return True
    return False


def brief_legend(analysis: StudyAnalysis) -> str:
    """Return a line on the times and intervals; empty without a finished trial."""
    counts = sorted({len(p.samples) for p in analysis.points if p.samples})
    repeats = f"{counts[0]} to {counts[-1]} repeats" if len(counts) > 1 else units.counted(sum(counts), "repeat")
    what = "training time" if analysis.time_metric == TRAIN_TIME else "time of the whole trial"
    what = f"time of {laps}" if (laps := _laps(analysis)) else what
    if not counts:
        return ""
    times, speedups = ([e for e in each if e and e.level] for each in zip(*_estimates(analysis), strict=True))
    intervals = ", 95 % CI" * bool(times) + " (of speedups: simultaneous)" * bool(speedups)
    text = f"Median {what}{intervals}, {repeats}"
    if _differs_from_times(analysis):
        text += f"; {BY_BLOCK}"
    if any(p.cost for p in analysis.points):
        text += f"; cost: {price_text(analysis.question.price_per_node_hour)} a node-hour"
    return text


def legend(analysis: StudyAnalysis) -> str:
    """Return the meaning of the columns and the basis of the intervals."""
    text = f"time: {_laps(analysis) or timed_part(analysis.time_metric)}, median"
    times, speedups = ([e for e in each if e and e.level] for each in zip(*_estimates(analysis), strict=True))
    if times:
        text += f" with its {_level(times)} interval ({_methods(times)})"
    if speedups:
        text += f"; speedup: simultaneous 95 % intervals, {_level(speedups)} each ({_methods(speedups)})"
        text += f"; {NOT_OF_TIMES}" * _differs_from_times(analysis)
    if any(len(p.samples) != max(analysis.question.num_repeats or 0, len(p.results)) for p in analysis.points):
        states = Counter(r.state for p in analysis.points for r in p.results if not r.is_measured)
        others = ", ".join(f"{states[state]} {state.said_of(states[state])}" for state in TrialState if states[state])
        text += "; n: finished of all" + (f" ({others}: not in the times)" if others else "")
    for q in _quantities():
        if q.legend and any(p.of(q) for p in analysis.points):
            price = price_text(analysis.question.price_per_node_hour)
            text += f"; {q.head}: {q.legend.format(price=price, energy_source=analysis.energy_source)}"
    return text + "."
