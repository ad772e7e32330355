"""Verdicts: what the numbers say in a few sentences, break-even points included.

Only speedups whose interval lies on one side of 1 count as known. Between the nearest two on different sides the
crossing is placed by a line through log(value) and log(speedup): a speedup that follows a power of the value is met
exactly, and the two values are told with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import TypeAlias

from raypar import units
from raypar.analysis.points import PointAnalysis, differences, ratio_of, same_work
from raypar.analysis.question import PointKey, PointSamples, Question, point_key
from raypar.analysis.stats import Estimate, median_estimate
from raypar.study.space import Value
from raypar.study.trial import gain, point_label

# What is spent on a training, so that one asks from where on it pays; an optimizer or a learning rate is not.
RESOURCES = frozenset(
    {
        "num_workers",
        "device",
        "cpus_per_worker",
        "cpu_affinity",
        "nodes",
        "node_label",
        "num_threads",
        "num_loader_workers",
        "loader",
        "precision",
        "compile",
        "channels_last",
    }
)
MAX_LINES = 3
MAX_NAMED = 3  # settings of the other hyperparameters that a line tells one by one

Curve: TypeAlias = Sequence[tuple[float, Estimate]]


class CrossingKind(StrEnum):
    """In the order in which they are told."""

    STARTS = "starts to pay"
    STOPS = "stops paying"
    NEVER = "never paid"
    ALWAYS = "always paid"
    UNCLEAR = "can't be told"


@dataclass(frozen=True)
class Crossing:
    """What one curve of speedups says.

    Attributes:
        first: the smallest value on the curve.
        last: the largest.
        between: the nearest values whose speedups are clearly on different sides of 1, where there is one crossing.
        at: about where it is; None where there is none, or no logarithm of the values.
        why: what keeps it unclear.
    """

    kind: CrossingKind
    first: float
    last: float
    between: tuple[float, float] | None = None
    at: float | None = None
    why: str = ""


@dataclass(frozen=True)
class BreakEven:
    """A crossing and whose it is.

    Attributes:
        who: the compared part of the points (``num_workers=2``).
        key: the hyperparameter along which the curve runs.
        rest: the other hyperparameters, fixed along it.
    """

    who: Mapping[str, Value]
    key: str
    rest: Mapping[str, Value]
    crossing: Crossing


def crossing_of(curve: Curve) -> Crossing:
    """Where a curve, two points or more in the order of their values, crosses 1."""
    first, last = curve[0][0], curve[-1][0]
    sides = [_side(speedup) for _, speedup in curve]
    clear = [i for i, side in enumerate(sides) if side]
    changes = [(i, j) for i, j in pairwise(clear) if sides[i] != sides[j]]
    if not changes and len(clear) == len(curve):
        return Crossing(CrossingKind.ALWAYS if sides[0] > 0 else CrossingKind.NEVER, first, last)
    if len(changes) == 1:
        below, above = changes[0]
        # What is not clear by itself, beyond the two, has to lie at least on the side that it should.
        beyond = [*curve[:below], *curve[above + 1 :]]
        wanted = [sides[below]] * below + [sides[above]] * (len(curve) - above - 1)
        if all((s.value - 1) * side > 0 for (_, s), side in zip(beyond, wanted, strict=True)):
            outcome = CrossingKind.STARTS if sides[above] > 0 else CrossingKind.STOPS
            between = curve[below][0], curve[above][0]
            return Crossing(outcome, first, last, between, _interpolated(curve[below], curve[above]))
    if all(speedup.low is None for _, speedup in curve):
        why = "one trial each has no interval"
    elif changes:
        why = "the speedups go up and down"
    else:
        why = f"{len(curve) - len(clear)} of {len(curve)} speedups can't be told from 1×"
    return Crossing(CrossingKind.UNCLEAR, first, last, why=why)


def break_evens(question: Question, points: Sequence[PointAnalysis]) -> tuple[BreakEven, ...]:
    """A crossing for every curve that the points make: along each number that they share with their baseline."""
    compared = [(p.point, p.speedup) for p in points if p.speedup is not None and not p.is_baseline]
    found: list[BreakEven] = []
    for key in question.other_keys():
        curves: dict[PointKey, list[tuple[float, Estimate]]] = {}
        fixed: dict[PointKey, Mapping[str, Value]] = {}
        for point, speedup in compared:
            value = point.get(key)
            if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
                others = {k: v for k, v in point.items() if k != key}
                fixed[point_key(others)] = others
                curves.setdefault(point_key(others), []).append((value, speedup))
        for name, curve in curves.items():
            if len(curve) > 1:
                who = {k: v for k, v in fixed[name].items() if k in question.compared_keys()}
                rest = {k: v for k, v in fixed[name].items() if k not in who}
                crossing = crossing_of(sorted(curve, key=lambda entry: entry[0]))
                found.append(BreakEven(who, key, rest, crossing))
    return tuple(found)


def break_even_lines(question: Question, points: Sequence[PointAnalysis]) -> list[str]:
    """At most `MAX_LINES` sentences; crossings come first.

    Each is about one comparison along one hyperparameter, or about all that came out alike, without a crossing.
    There are none where something else is compared than `RESOURCES`.
    """
    if not RESOURCES.issuperset(question.compared_keys()):
        return []
    comparisons: dict[tuple[str, PointKey], list[BreakEven]] = {}
    for found in break_evens(question, points):
        comparisons.setdefault((found.key, point_key(found.who)), []).append(found)
    groups: dict[tuple[str, CrossingKind | PointKey], list[BreakEven]] = {}
    for (key, who), own in comparisons.items():
        outcomes = {b.crossing.kind for b in own}
        alike = outcomes.pop() if len(outcomes) == 1 and own[0].crossing.between is None else who
        groups.setdefault((key, alike), []).extend(own)
    order = list(CrossingKind)
    ranked = sorted(groups.values(), key=lambda group: min(order.index(b.crossing.kind) for b in group))
    return [_line(group) for group in ranked[:MAX_LINES]]


def _side(speedup: Estimate) -> int:
    """1 where it is clearly faster than its baseline, -1 where clearly slower, 0 where that can't be told."""
    if not speedup.excludes(1.0):
        return 0
    return 1 if speedup.value > 1 else -1


def _interpolated(left: tuple[float, Estimate], right: tuple[float, Estimate]) -> float | None:
    (x0, s0), (x1, s1) = left, right
    if x0 <= 0 or s0.value <= 0 or s1.value <= 0:
        return None
    y0, y1 = math.log(s0.value), math.log(s1.value)
    return math.exp(math.log(x0) + math.log(x1 / x0) * y0 / (y0 - y1))


def _line(group: Sequence[BreakEven]) -> str:
    """One sentence about comparisons along a key, for every setting of the rest."""
    key = group[0].key
    names = list(dict.fromkeys(_name(b.who) for b in group))
    name, many = _list(names), len(names) > 1 or names[0].endswith("workers")
    by_outcome = {o: [b for b in group if b.crossing.kind is o] for o in CrossingKind}
    if by_outcome[CrossingKind.UNCLEAR] == list(group):
        why = f": {group[0].crossing.why}" if len(group) == 1 else ""
        return f"The study can't tell at which {key} {name} {'start' if many else 'starts'} to pay{_for(group)}{why}."
    parts = []
    for outcome, own in by_outcome.items():
        if own:
            parts.append(_told(outcome, key, own, many=many, is_only=len(own) == len(group)))
    return f"{name} {'; '.join(parts)}."


def _name(who: Mapping[str, Value]) -> str:
    workers = who.get("num_workers")
    return units.counted(workers, "worker") if len(who) == 1 and isinstance(workers, int) else point_label(who)


def _told(outcome: CrossingKind, key: str, own: Sequence[BreakEven], *, many: bool, is_only: bool) -> str:
    num_settings = len({point_key(b.rest) for b in own})
    where = _for(own)
    if is_only and num_settings > MAX_NAMED:
        where = f", whatever {' and '.join(own[0].rest)} ({num_settings} settings)"
    match outcome:
        case CrossingKind.STARTS | CrossingKind.STOPS:
            does = {
                CrossingKind.STARTS: ("starts to pay", "start to pay"),
                CrossingKind.STOPS: ("stops paying", "stop paying"),
            }
            return f"{does[outcome][many]} {_list(_place(b) + _for([b]) for b in own)}"
        case CrossingKind.NEVER:
            return f"never paid up to {key}={units.value_of(min(b.crossing.last for b in own))}{where}"
        case CrossingKind.ALWAYS:
            return f"paid from {key}={units.value_of(max(b.crossing.first for b in own))}, the smallest, on{where}"
        case CrossingKind.UNCLEAR:
            return f"can't be told{where}"


def _place(found: BreakEven) -> str:
    crossing = found.crossing
    assert crossing.between is not None
    low, high = map(units.value_of, crossing.between)
    if crossing.at is None:
        return f"between {found.key}={low} and {high}"
    return f"at about {found.key}={_about(crossing.at, crossing.between)} (between {low} and {high})"


def _about(at: float, between: tuple[float, float]) -> str:
    """With two digits, or as many more as it takes to stay between the two values."""
    for digits in range(2, 16):
        rounded = float(f"{at:.{digits}g}")
        if between[0] < rounded < between[1]:
            return f"{rounded:.0f}" if rounded.is_integer() else f"{rounded:g}"
    return f"{at:g}"


def _for(group: Sequence[BreakEven]) -> str:
    """`` for num_samples=20000 or num_samples=60000``; nothing where nothing else is swept."""
    labels = dict.fromkeys(point_label(b.rest) for b in group if b.rest)
    return f" for {_list(labels, 'or')}" if labels else ""


def _list(texts: Iterable[str], word: str = "and") -> str:
    return units.listed(texts, MAX_NAMED, word=word)


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
