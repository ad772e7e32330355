"""What the numbers say, in a few sentences. What the intervals can't separate is called a tie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from raypar import units
from raypar.analysis.breakeven import break_even_lines
from raypar.analysis.points import PointAnalysis, differences, ratio_of, same_work
from raypar.analysis.question import PointKey, PointSamples, Question, point_key
from raypar.analysis.stats import Estimate, median_estimate
from raypar.study.space import Value
from raypar.study.trial import gain, point_label

MAX_SPEEDUP_LINES = 4


def verdicts(question: Question, gathered: Sequence[PointSamples], points: Sequence[PointAnalysis]) -> tuple[str, ...]:
    """At most nine sentences: speedups first, where they start to pay, then the fastest point, then the best one.

    Args:
        gathered: the trials of each point.
        points: the numbers of each point, in the same order.
    """
    if not any(p.num_finished for p in points):
        return ("No trial finished: there is nothing to compare.",)
    return (
        *_speedups(question, points),
        *break_even_lines(question, points),
        *_fastest(gathered, points),
        *_best(question, gathered, points),
    )


def _speedups(question: Question, points: Sequence[PointAnalysis]) -> list[str]:
    compared = [(p, p.speedup) for p in points if p.speedup is not None and not p.is_baseline]
    if len(compared) <= MAX_SPEEDUP_LINES:
        return [_one_speedup(question, p, s) for p, s in compared]
    groups: dict[PointKey, list[tuple[PointAnalysis, Estimate]]] = {}
    for p, s in compared:
        groups.setdefault(point_key(_part(p.point, question.compared_keys())), []).append((p, s))
    if len(groups) <= MAX_SPEEDUP_LINES:
        return [_group_speedup(question, group) for group in groups.values()]
    ends = (max(compared, key=_speedup_value), min(compared, key=_speedup_value))
    lines = [_one_speedup(question, p, s) for p, s in ends]
    return [f"Of {len(compared)} points, the most: {lines[0]}", f"The least: {lines[1]}"]


def _one_speedup(question: Question, point: PointAnalysis, speedup: Estimate) -> str:
    who, base = _who(question, point.point)
    at = _at(question, point.point)
    shown = units.ratio_interval(speedup.value, speedup.low, speedup.high)
    if speedup.low is None:
        return f"{who} {shown} as fast as {base}{at}, by one trial each: no interval."
    if not speedup.excludes(1.0):
        return f"{who} {shown} as fast as {base}{at}: that can't be told from 1×."
    return f"{who} {shown} as fast as {base}{at}{_efficiency(point)}."


def _group_speedup(question: Question, group: Sequence[tuple[PointAnalysis, Estimate]]) -> str:
    best, worst = max(group, key=_speedup_value), min(group, key=_speedup_value)
    if len(group) == 1:
        return _one_speedup(question, *best)
    who, base = _who(question, best[0].point)
    shown = units.ratio_interval(best[1].value, best[1].low, best[1].high)
    text = (
        f"{who} from {units.ratio(worst[1].value)}{_at(question, worst[0].point)} to {shown} as fast as {base}"
        f"{_at(question, best[0].point)}{_efficiency(best[0])}"
    )
    if best[1].low is None:
        return text + ", by one trial each: no intervals."
    if tied := sum(not s.excludes(1.0) for _, s in group):
        text += f"; {tied} of {units.counted(len(group), 'point')} can't be told from 1×"
    return text + "."


def _fastest(gathered: Sequence[PointSamples], points: Sequence[PointAnalysis]) -> list[str]:
    """Which point trains fastest: by time where all did the same work, by throughput otherwise."""
    both = [(g, p, p.time_s) for g, p in zip(gathered, points, strict=True)]
    timed = [(g, p, t) for g, p, t in both if t is not None]
    if len(timed) < 2:
        return []
    works = [s.num_samples for g, _, _ in timed for s in g.samples.values()]
    if all(same_work(works[0], work) for work in works):
        timed.sort(key=lambda entry: entry[2].value)
        _, first, time_s = timed[0]
        shown = units.seconds_interval(time_s.value, time_s.low, time_s.high)
    elif all(p.throughput for _, p, _ in timed):
        timed.sort(key=lambda entry: -entry[1].throughput.value if entry[1].throughput else 0.0)
        _, first, _ = timed[0]
        rate = first.throughput
        shown = units.rate_interval(rate.value, rate.low, rate.high) if rate else units.MISSING
    else:
        return []
    name, leads = point_label(first.point), [ratio_of(g, timed[0][0]) for g, _, _ in timed[1:]]
    second = point_label(timed[1][1].point)
    lead = leads[0]
    if lead is None or lead.low is None:
        return [f"{name} was the fastest ({shown}), by one trial: no interval tells it from {second}."]
    if lead.excludes(1.0):
        return [
            f"{name} is the fastest: {shown}, {units.ratio_interval(lead.value, lead.low, lead.high)} as fast as "
            f"the next, {second}."
        ]
    tied = sum(other is not None and not other.excludes(1.0) for other in leads)
    more = f" (nor from {tied - 1} more)" if tied > 1 else ""
    return [f"Can't tell {name} from {second} as the fastest{more}: their intervals overlap."]


def _best(question: Question, gathered: Sequence[PointSamples], points: Sequence[PointAnalysis]) -> list[str]:
    """Which point has the best metric."""
    both = [(g, p, p.metric) for g, p in zip(gathered, points, strict=True)]
    scored = [(g, p, m) for g, p, m in both if m is not None]
    if len(scored) < 2:
        return []
    scored.sort(key=lambda entry: gain(question.mode, entry[2].value), reverse=True)
    best, first, metric = scored[0]
    shown = units.score_interval(question.metric, metric.value, metric.low, metric.high)
    text = f"Best {question.metric}: {shown} at {point_label(first.point)}"
    if metric.low is None:
        return [text + ", by one trial: no interval."]
    if all(not any(differences(g, best)) for g, _, _ in scored[1:]):
        return [f"{question.metric}: {shown}, the same at all {len(scored)} points."]
    tied = [p for g, p, _ in scored[1:] if not _is_worse(differences(g, best))]
    if not tied:
        return [text + "."]
    if len(tied) == 1:
        return [f"{text}; {point_label(tied[0].point)} can't be told from it."]
    return [f"{text}; {len(tied)} of {len(scored) - 1} others can't be told from it."]


def _is_worse(changes: Sequence[float]) -> bool:
    return len(changes) > 1 and median_estimate(changes, log_scale=False).excludes(0.0)


def _who(question: Question, point: Mapping[str, Value]) -> tuple[str, str]:
    """``("2 workers train", "1")``, or in terms of whatever the baseline names."""
    keys = question.compared_keys()
    if keys == ("num_workers",):
        workers = point["num_workers"]
        plural = "1 worker trains" if workers == 1 else f"{workers} workers train"
        return plural, str(question.baseline["num_workers"])
    return f"{point_label(_part(point, keys))} trains", point_label(_part(question.baseline_of(point), keys))


def _at(question: Question, point: Mapping[str, Value]) -> str:
    rest = _part(point, question.other_keys())
    return f" at {point_label(rest)}" if rest else ""


def _efficiency(point: PointAnalysis) -> str:
    return f" (efficiency {units.percent(point.efficiency.value)})" if point.efficiency else ""


def _part(point: Mapping[str, Value], keys: Sequence[str]) -> dict[str, Value]:
    return {k: point[k] for k in keys if k in point}


def _speedup_value(entry: tuple[PointAnalysis, Estimate]) -> float:
    return entry[1].value
