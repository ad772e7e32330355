"""Verdict of a study: its question, the answer, the comparisons behind it, and the recommended point.

A `Verdict` is made once and rendered by every view: terminal, page, Markdown, MLflow and `raypar recommend`. Its claims
come only from the simultaneous intervals of the study's `Family` and from the study's `Recommendation`.

Break-even: only speedups whose interval lies on one side of 1 are clear. The crossing is interpolated between the
nearest two on different sides, on a line through log(value) and log(speedup). This is exact for a speedup that follows
a power of the value. The report shows the two values as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from operator import itemgetter
from typing import TypeAlias

from raypar import units
from raypar.analysis.comparison import Comparison, Outcome
from raypar.analysis.pairwise import (
    Family,
    against_baseline,
    equivalent_metrics,
    metric_differences,
    same_work,
    worker_metrics,
)
from raypar.analysis.points import PointAnalysis
from raypar.analysis.question import PointKey, Question, point_key
from raypar.analysis.recommend import Recommendation
from raypar.analysis.stats import Estimate
from raypar.study.space import Value
from raypar.study.trial import TrialState, gain, point_label

Compared: TypeAlias = tuple[PointAnalysis, Estimate]  # a point and its speedup over its baseline

MAX_SPEEDUP_LINES = 4


@dataclass(frozen=True)
class BaselineComparison:
    """Comparison of a point with its baseline, and the words for both.

    Attributes:
        who: compared part of the point: ``2 workers``.
        base: compared part of its baseline: ``1``.
        setting: swept hyperparameters that both share: ``batch_size=96``; empty if there are none.
    """

    point: PointAnalysis
    who: str
    base: str
    setting: str
    comparison: Comparison

    @property
    def outcome(self) -> Outcome:
        return self.comparison.outcome


@dataclass(frozen=True)
class Verdict:
    """Verdict of a study.

    Attributes:
        question: first sentence of the study's description, as written; empty if it has none.
        answer: one or two sentences.
        comparisons: one for each point that has a speedup, in the order of the points.
        recommendation: None if no trial has a time, or for a single point.
        doubt: reason why times can't be trusted and are not compared; empty if they can be trusted.
        status: for a study that runs until it is settled: ``settled``, for example; empty for other studies.
        final_test: a sentence with the result on the test set; empty if no model was tested.
    """

    question: str
    answer: str
    comparisons: tuple[BaselineComparison, ...] = field(default=(), repr=False)
    recommendation: Recommendation | None = field(default=None, repr=False)
    doubt: str = ""
    status: str = ""
    final_test: str = ""


def verdict_of(
    question: Question,
    points: Sequence[PointAnalysis],
    family: Family,
    recommendation: Recommendation | None,
    doubt: str = "",
) -> Verdict:
    """Return the verdict of a study.

    Args:
        points: sorted by their values.
        recommendation: without constraints.
        doubt: as in `Verdict`.
    """
    comparisons = tuple(
        BaselineComparison(p, *_who(question, p.point), _setting(question, p.point), comparison)
        for p, ratio in _compared(points)
        for comparison in [against_baseline(question, ratio, doubt)]
    )
    if not any(p.samples for p in points):
        answer = nothing_to_compare(points)
    elif question.is_search:
        answer = _leading(question, points)
    elif doubt:
        answer = f"Inconclusive: {doubt}. Rerun it on an idle machine, with --fresh."
    elif len(comparisons) == 1:
        answer = _one_speedup(question, *next(iter(_compared(points))))
    elif comparisons:
        answer = _compared_answer(question, comparisons)
    elif len(points) == 1:
        answer = _only(question, points[0])
    else:
        answer = " ".join([*fastest_lines(points, family), *best_lines(question, points, family)])
    return Verdict(question.text, answer, comparisons, recommendation, doubt)


def nothing_to_compare(points: Sequence[PointAnalysis]) -> str:
    """Return the answer for a study without a finished trial."""
    outcomes = {p.outcome for p in points if p.results}
    what = f"Every trial {outcomes.pop()}" if outcomes == {TrialState.DIVERGED} else "No trial finished"
    return f"{what}: there is nothing to compare."


def _leading(question: Question, points: Sequence[PointAnalysis]) -> str:
    """Return the answer for a search. One trial per point confirms nothing."""
    scored = [(p, p.metric.value) for p in points if p.metric is not None and not p.unusable]
    if not scored:
        return f"No trial reported {question.metric}."
    best, value = max(scored, key=lambda entry: gain(question.mode, entry[1]))
    shown = f"{question.metric} {question.judged_by.show(value)}"
    return f"Leading: {shown} with {point_label(best.point)} (best of {len(scored)}, one trial each, unconfirmed)."


def _only(question: Question, point: PointAnalysis) -> str:
    """Return the time and the metric of a study's only point."""
    parts = [units.seconds_interval(point.time_s)] if point.time_s else []
    if point.metric:
        parts.append(f"{question.metric} {question.judged_by.show_interval(point.metric)}")
    return f"{f'{point_label(point.point)}: ' * bool(point.point)}{', '.join(parts)}."


def _compared_answer(question: Question, comparisons: Sequence[BaselineComparison]) -> str:
    """Summarise the outcomes of all comparisons in one sentence."""
    subjects = dict.fromkeys(c.who for c in comparisons)
    settings = dict.fromkeys(c.setting for c in comparisons)
    if len(subjects) == 1:
        return f"{_over_settings(question, comparisons)}."
    if len(settings) == 1:
        return f"{_over_subjects(comparisons)}."
    return f"{_counts(comparisons)}."


def _over_settings(question: Question, comparisons: Sequence[BaselineComparison]) -> str:
    """Name the settings in which one subject is faster than its baseline: ``2 workers are faster than 1 only at …``."""
    by_outcome, first = _by_outcome(comparisons), comparisons[0]
    rest = [key for key in question.space_keys if key not in question.baseline]
    is_are = "are" if first.who.endswith("workers") else "is"
    only = ""
    if by_outcome.keys() == {Outcome.FASTER, Outcome.SLOWER}:
        only, by_outcome = " only", {Outcome.FASTER: by_outcome[Outcome.FASTER]}
    clauses: list[str] = []
    for outcome, group in by_outcome.items():
        where = _where(group, comparisons, rest)
        if clauses:
            clauses.append(f"{outcome}{where}")
        elif outcome in (Outcome.FASTER, Outcome.SLOWER):
            clauses.append(f"{first.who} {is_are} {outcome} than {first.base}{only}{where}")
        else:
            clauses.append(f"{outcome.capitalize()}{where}: {first.who} against {first.base}")
    return "; ".join(clauses)


def _where(group: Sequence[BaselineComparison], every: Sequence[BaselineComparison], rest: Sequence[str]) -> str:
    """Return `` at batch_size=768``, `` at every batch_size``, `` from batch_size=256 on``."""
    if not every[0].setting:
        return ""
    if len(every) == 1:
        return f" at {every[0].setting}"
    if len(group) == len(every):
        return f" at every {rest[0]}" if len(rest) == 1 else f" in all {len(every)} settings"
    values = [c.point.point.get(rest[0]) for c in every]
    if len(rest) == 1 and len(group) > 1 and all(isinstance(v, (int, float)) for v in values):
        places = [every.index(c) for c in group]
        if places[-1] - places[0] == len(places) - 1:  # the points are in the order of their values
            if places[-1] == len(every) - 1:
                return f" from {group[0].setting} on"
            if places[0] == 0:
                return f" up to {group[-1].setting}"
    if len(group) <= MAX_NAMED:
        return " at " + units.listed((c.setting for c in group), MAX_NAMED, word="and")
    return f" in {len(group)} of {len(every)} settings"


def _over_subjects(comparisons: Sequence[BaselineComparison]) -> str:
    """Name the subjects by outcome: ``2, 4 and 8 workers are faster than 1; inconclusive: 16 workers``."""
    base, at = comparisons[0].base, f" at {comparisons[0].setting}" if comparisons[0].setting else ""
    clauses = []
    for outcome, group in _by_outcome(comparisons).items():
        names = _subjects(group) if len(group) <= MAX_NAMED + 1 else f"{len(group)} of {len(comparisons)}"
        is_are = "are" if len(group) > 1 or names.endswith("workers") else "is"
        if outcome in (Outcome.FASTER, Outcome.SLOWER):
            clauses.append(f"{names} {is_are} {outcome} than {base}")
        elif clauses:
            clauses.append(f"{outcome}: {names}")
        else:
            clauses.append(f"{outcome.capitalize()}: {names} against {base}")
    return "; ".join(clauses) + at


def _subjects(group: Sequence[BaselineComparison]) -> str:
    names = [c.who for c in group]
    if all(name.endswith(" workers") for name in names):
        names = [name.removesuffix(" workers") for name in names]
        return units.listed(names, len(names), word="and") + " workers"
    return units.listed(names, len(names), word="and")


def _counts(comparisons: Sequence[BaselineComparison]) -> str:
    """Return the number of comparisons with each outcome, and the largest speedup."""
    by_outcome = _by_outcome(comparisons)
    parts = [f"{len(group)} {outcome}" for outcome, group in by_outcome.items()]
    base = comparisons[0].base
    base += " worker" * (comparisons[0].who.endswith("workers") and base == "1")
    num = units.counted(len(comparisons), "comparison")
    text = f"Of {num} with {base}: {', '.join(parts)}"
    if len(by_outcome) == 1:
        text = f"All {num} with {base}: {next(iter(by_outcome))}"
    if faster := by_outcome.get(Outcome.FASTER):
        ratio, most = max(((c.point.speedup.value, c) for c in faster if c.point.speedup), key=itemgetter(0))
        text += f"; highest: {units.ratio(ratio)}, {most.who}{f' at {most.setting}' if most.setting else ''}"
    return text


def _by_outcome(comparisons: Sequence[BaselineComparison]) -> dict[Outcome, list[BaselineComparison]]:
    groups = {outcome: [c for c in comparisons if c.outcome is outcome] for outcome in Outcome}
    return {outcome: group for outcome, group in groups.items() if group}


# ---- statements


def statements(question: Question, points: Sequence[PointAnalysis], family: Family, doubt: str = "") -> tuple[str, ...]:
    """Return at most ten sentences: speedups, break-even points, the fastest point, the best, the metric by workers.

    Args:
        doubt: as in `Verdict`; if set, there are no sentences on times.
    """
    if not any(p.samples for p in points):
        return (nothing_to_compare(points),)
    on_times = [*_speedups(question, points), *break_even_lines(question, points), *fastest_lines(points, family)]
    return (
        *(on_times if not doubt else ()),
        *best_lines(question, points, family),
        *_over_workers(question, points, family),
    )


def _compared(points: Sequence[PointAnalysis]) -> list[Compared]:
    return [(p, p.speedup) for p in points if p.speedup is not None and not p.is_baseline]


def _speedups(question: Question, points: Sequence[PointAnalysis]) -> list[str]:
    compared = _compared(points)
    if len(compared) <= MAX_SPEEDUP_LINES:
        return [_one_speedup(question, *entry) for entry in compared]
    groups: dict[PointKey, list[Compared]] = {}
    for p, s in compared:
        groups.setdefault(point_key(_part(p.point, question.compared_keys())), []).append((p, s))
    if len(groups) <= MAX_SPEEDUP_LINES:
        return [_group_speedup(question, group) for group in groups.values()]
    most, least = (_one_speedup(question, *pick(compared, key=lambda entry: entry[1].value)) for pick in (max, min))
    return [f"Highest of {len(compared)} speedups: {most}", f"Lowest: {least}"]


def _one_speedup(question: Question, point: PointAnalysis, ratio: Estimate) -> str:
    who, base = _who(question, point.point)
    at, shown = _at(question, point.point), units.ratio_interval(ratio)
    match outcome := against_baseline(question, ratio).outcome:
        case Outcome.UNCONFIRMED:
            return f"{who} against {base}{at}: {shown} (1 trial each, unconfirmed)."
        case Outcome.INCONCLUSIVE:
            return f"{who} against {base}{at}: {shown}, inconclusive."
        case Outcome.EQUIVALENT:
            return f"{who} against {base}{at}: {shown}, equivalent within {units.percent(question.margin)}."
    verb = "are" if who.endswith("workers") else "is"
    return f"{who} {verb} {outcome} than {base}{at}: {shown}{_efficiency(point)}."


def _group_speedup(question: Question, group: Sequence[Compared]) -> str:
    if len(group) == 1:
        return _one_speedup(question, *group[0])
    (best, most), (worst, least) = (pick(group, key=lambda entry: entry[1].value) for pick in (max, min))
    who, base = _who(question, best.point)
    text = (
        f"{who} against {base}: from {units.ratio_interval(least)}{_at(question, worst.point)} "
        f"to {units.ratio_interval(most)}{_at(question, best.point)}{_efficiency(best)}"
    )
    if most.low is None:
        return text + " (1 trial each, unconfirmed)."
    if tied := sum(against_baseline(question, s).outcome is Outcome.INCONCLUSIVE for _, s in group):
        text += f"; {tied} of {units.counted(len(group), 'speedup')} inconclusive"
    return text + "."


def fastest_lines(points: Sequence[PointAnalysis], family: Family) -> list[str]:
    """Name the point that trains fastest: by time if all did the same work, by throughput otherwise.

    Points with a diverged trial are excluded.
    """
    timed = [p for p in points if p.time_s and not p.unusable]
    works = [s.num_samples for p in timed for s in p.samples.values()]
    is_equal_work = all(same_work(works[0], work) for work in works)
    if is_equal_work:
        rated = [(p.time_s.value, p, p.time_s) for p in timed if p.time_s]
    else:
        rated = [(-p.throughput.value, p, p.throughput) for p in timed if p.throughput]
    if len(timed) < 2 or len(rated) < len(timed):
        return []
    (_, first, best), *others = sorted(rated, key=lambda entry: entry[0])
    name = point_label(first.point)
    shown = units.seconds_interval(best) if is_equal_work else units.rate_interval(best)
    leads = [(p, lead) for _, p, _ in others if (lead := family.speedup(p, first)) is not None]
    outcomes = [(p, Comparison(lead).outcome) for p, lead in leads]
    if all(outcome is Outcome.UNCONFIRMED for _, outcome in outcomes):
        return [f"{name} leads: {shown} (1 trial, unconfirmed)."]
    tied = [p for p, outcome in outcomes if outcome is not Outcome.FASTER]
    if not tied and len(leads) == len(others):
        runner_up, lead = leads[0]
        ahead = f"{units.ratio_interval(lead)} against the next, {point_label(runner_up.point)}"
        return [f"{name} is the fastest: {shown}, {ahead}."]
    labels = [name, *(point_label(p.point) for p in tied)]
    return [f"The fastest is inconclusive: {units.listed(labels, MAX_NAMED, word='and')} are too close to call."]


def best_lines(question: Question, points: Sequence[PointAnalysis], family: Family) -> list[str]:
    """Name the point with the best metric, excluding points with a diverged trial."""
    scored = [(p, p.metric) for p in points if p.metric is not None and not p.unusable]
    if len(scored) < 2:
        return []
    (best, metric), *others = sorted(scored, key=lambda entry: gain(question.mode, entry[1].value), reverse=True)
    shown = question.judged_by.show_interval(metric)
    text = f"Best {question.metric}: {shown} at {point_label(best.point)}"
    if metric.low is None:
        return [text + " (1 trial, unconfirmed)."]
    if all(not any(metric_differences(p, best)) for p, _ in others):
        every = "both points" if len(scored) == 2 else f"all {len(scored)} points"
        return [f"{question.metric}: {shown}, the same at {every}."]
    tied = [p for p, _ in others if not family.compare_metrics(p, best).differs]
    equivalent = equivalent_metrics(question, [p for p, _ in scored], family, best)
    margin = question.judged_by.show_difference(question.judged_by.margin(metric.value))
    for words, group in (
        (f"equivalent within {margin} to", [p for p in tied if p in equivalent]),
        ("inconclusive against", [p for p in tied if p not in equivalent]),
    ):
        if group:
            named = point_label(group[0].point) if len(group) == 1 else f"{len(group)} of {len(others)} others"
            text += f", {words} {named}"
    return [text + "."]


def _over_workers(question: Question, points: Sequence[PointAnalysis], family: Family) -> list[str]:
    """Compare the metric between numbers of workers, unless it is identical at all points."""
    scored = [p for p in points if p.metric is not None]
    compared = worker_metrics(question, scored, family)
    if not compared or all(not any(metric_differences(scored[0], p)) for p in scored):
        return []
    name, judged_by = question.metric, question.judged_by
    margin = judged_by.show_difference(max(each.comparison.margin or 0.0 for each in compared))
    changes = [(each.comparison.estimate, each) for each in compared if each.comparison.differs]
    different = [(change, each) for change, each in changes if change is not None]
    if different:
        change, most = max(different, key=lambda entry: abs(entry[0].value))
        shown = f"{judged_by.show_change(change)} at {point_label(most.point.point)}"
        return [f"{name} differs between numbers of workers: {shown}, against {point_label(most.base.point)}."]
    if not all(each.comparison.is_settled for each in compared):
        return [f"{name} over numbers of workers is inconclusive: it may differ by more than {margin}."]
    return [f"{name} is equivalent within {margin} for all numbers of workers."]


def _who(question: Question, point: Mapping[str, Value]) -> tuple[str, str]:
    """Return ``("2 workers", "1")``, or the equivalent for the hyperparameters of the baseline."""
    keys = question.compared_keys()
    if keys == ("num_workers",):
        return _name({"num_workers": point["num_workers"]}), str(question.baseline["num_workers"])
    return point_label(_part(point, keys)), point_label(_part(question.baseline_of(point), keys))


def _at(question: Question, point: Mapping[str, Value]) -> str:
    setting = _setting(question, point)
    return f" at {setting}" if setting else ""


def _setting(question: Question, point: Mapping[str, Value]) -> str:
    rest = _part(point, [key for key in question.space_keys if key not in question.baseline])
    return point_label(rest) if rest else ""


def _efficiency(point: PointAnalysis) -> str:
    return f" (efficiency {units.percent(point.efficiency.value)})" if point.efficiency else ""


def _part(point: Mapping[str, Value], keys: Sequence[str]) -> dict[str, Value]:
    return {k: point[k] for k in keys if k in point}


# ---- break-even

# Resources, for which break-even is a sensible question; it isn't for an optimizer or a learning rate.
RESOURCES = frozenset(
    (
        *("num_workers", "device", "nodes", "node_label", "cpus_per_worker", "cpu_affinity", "num_threads"),
        *("loader", "num_loader_workers", "precision", "compile", "channels_last"),
    )
)
MAX_LINES = 3
MAX_NAMED = 3  # points, or settings of the other hyperparameters, that a line lists by name

Curve: TypeAlias = Sequence[tuple[float, Estimate]]


class CrossingKind(StrEnum):
    """Position of a curve of speedups relative to 1, in the order of reporting."""

    STARTS = "starts to pay"
    STOPS = "stops paying"
    NEVER = "never paid"
    ALWAYS = "always paid"
    UNCLEAR = "inconclusive"


@dataclass(frozen=True)
class Crossing:
    """Place where a curve of speedups crosses 1.

    Attributes:
        ends: smallest and largest value on the curve.
        between: nearest values whose speedups are clearly on different sides of 1, if there is exactly one crossing.
        at: approximate place; None if there is no crossing or the values have no logarithm.
        why: reason why it is inconclusive.
        who: compared part of the points (``num_workers=2``).
        key: hyperparameter along which the curve runs.
        rest: other hyperparameters, constant along the curve.
    """

    kind: CrossingKind
    ends: tuple[float, float]
    between: tuple[float, float] | None = None
    at: float | None = None
    why: str = ""
    who: Mapping[str, Value] = field(default_factory=dict)
    key: str = ""
    rest: Mapping[str, Value] = field(default_factory=dict)


def crossing_of(curve: Curve) -> Crossing:
    """Return the place where a curve of at least two points, sorted by value, crosses 1."""
    ends = curve[0][0], curve[-1][0]
    # 1 if clearly faster than the baseline, -1 if clearly slower, 0 otherwise.
    sides = [math.copysign(1, s.value - 1) if Comparison(s).differs else 0 for _, s in curve]
    clear = [i for i, side in enumerate(sides) if side]
    changes = [(i, j) for i, j in pairwise(clear) if sides[i] != sides[j]]
    if not changes and len(clear) == len(curve):
        return Crossing(CrossingKind.ALWAYS if sides[0] > 0 else CrossingKind.NEVER, ends)
    if len(changes) == 1:
        below, above = changes[0]
        # Unclear speedups beyond these two must at least lie on the expected side.
        beyond = [(s, sides[below]) for _, s in curve[:below]] + [(s, sides[above]) for _, s in curve[above + 1 :]]
        if all((s.value - 1) * side > 0 for s, side in beyond):
            kind = CrossingKind.STARTS if sides[above] > 0 else CrossingKind.STOPS
            between = curve[below][0], curve[above][0]
            return Crossing(kind, ends, between, _interpolated(curve[below], curve[above]))
    if all(s.low is None for _, s in curve):
        why = "one trial each has no interval"
    elif changes:
        why = "the speedups go up and down"
    else:
        num_open = len(curve) - len(clear)
        why = f"so {'is' if num_open == 1 else 'are'} {num_open} of {len(curve)} speedups"
    return Crossing(CrossingKind.UNCLEAR, ends, why=why)


def crossings_of(question: Question, points: Sequence[PointAnalysis]) -> list[Crossing]:
    """Return a crossing for every curve along a numeric hyperparameter that points share with their baseline."""
    crossings: list[Crossing] = []
    for key in question.space_keys:
        if key in question.baseline:
            continue
        curves: dict[PointKey, tuple[dict[str, Value], list[tuple[float, Estimate]]]] = {}
        for p, ratio in _compared(points):
            value = p.point.get(key)
            if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
                others = {k: v for k, v in p.point.items() if k != key}
                curves.setdefault(point_key(others), (others, []))[1].append((value, ratio))
        for others, curve in curves.values():
            if len(curve) > 1:
                who = _part(others, question.compared_keys())
                rest = {k: v for k, v in others.items() if k not in who}
                crossing = crossing_of(sorted(curve, key=lambda entry: entry[0]))
                crossings.append(replace(crossing, who=who, key=key, rest=rest))
    return crossings


def break_even_lines(question: Question, points: Sequence[PointAnalysis]) -> list[str]:
    """Return at most `MAX_LINES` sentences, crossings first.

    Each covers one comparison along one hyperparameter, or all comparisons without a crossing that had the same
    result. There are none if the study compares anything other than `RESOURCES`.
    """
    if not RESOURCES.issuperset(question.compared_keys()):
        return []
    comparisons: dict[tuple[str, PointKey], list[Crossing]] = {}
    for crossing in crossings_of(question, points):
        comparisons.setdefault((crossing.key, point_key(crossing.who)), []).append(crossing)
    groups: dict[tuple[str, CrossingKind | PointKey], list[Crossing]] = {}
    for (key, who), members in comparisons.items():
        kinds = {c.kind for c in members}
        alike = kinds.pop() if len(kinds) == 1 and members[0].between is None else who
        groups.setdefault((key, alike), []).extend(members)
    order = list(CrossingKind)
    ranked = sorted(groups.values(), key=lambda group: min(order.index(c.kind) for c in group))
    return [_line(group) for group in ranked[:MAX_LINES]]


def _interpolated(left: tuple[float, Estimate], right: tuple[float, Estimate]) -> float | None:
    (x0, s0), (x1, s1) = left, right
    if x0 <= 0 or s0.value <= 0 or s1.value <= 0:
        return None
    y0, y1 = math.log(s0.value), math.log(s1.value)
    return math.exp(math.log(x0) + math.log(x1 / x0) * y0 / (y0 - y1))


def _line(group: Sequence[Crossing]) -> str:
    """Return one sentence about comparisons along a key, over all settings of the other hyperparameters."""
    names = list(dict.fromkeys(_name(c.who) for c in group))
    name, s = units.listed(names, MAX_NAMED, word="and"), "" if len(names) > 1 or names[0].endswith("workers") else "s"
    by_kind = {kind: members for kind in CrossingKind if (members := [c for c in group if c.kind is kind])}
    if list(by_kind) == [CrossingKind.UNCLEAR]:
        why = f": {group[0].why}" if len(group) == 1 else ""
        return f"The {group[0].key} at which {name} start{s} to pay{_for(group)} is inconclusive{why}."
    clauses = (_clause(kind, members, s, is_only=len(by_kind) == 1) for kind, members in by_kind.items())
    return f"{name} {'; '.join(clauses)}."


def _name(who: Mapping[str, Value]) -> str:
    workers = who.get("num_workers")
    return units.counted(workers, "worker") if len(who) == 1 and isinstance(workers, int) else point_label(who)


def _clause(kind: CrossingKind, members: Sequence[Crossing], s: str, *, is_only: bool) -> str:
    """Return the clause on the settings of one kind. `s` is the verb's ending: "s" after a singular, else empty."""
    key, num_settings = members[0].key, len({point_key(c.rest) for c in members})
    where = _for(members)
    if is_only and num_settings > MAX_NAMED:
        where = f", whatever {' and '.join(members[0].rest)} ({num_settings} settings)"
    if members[0].between is not None:
        verb = f"start{s} to pay" if kind is CrossingKind.STARTS else f"stop{s} paying"
        return f"{verb} {units.listed((_place(c) + _for([c]) for c in members), MAX_NAMED, word='and')}"
    if kind is CrossingKind.NEVER:
        return f"never paid up to {key}={units.value_of(min(c.ends[1] for c in members))}{where}"
    if kind is CrossingKind.ALWAYS:
        return f"paid from {key}={units.value_of(max(c.ends[0] for c in members))}, the smallest, on{where}"
    return f"inconclusive{where}"


def _place(c: Crossing) -> str:
    assert c.between is not None
    low, high = map(units.value_of, c.between)
    if c.at is None:
        return f"between {c.key}={low} and {high}"
    # Use two digits, or more if needed to stay between the two values.
    rounded = (float(f"{c.at:.{digits}g}") for digits in range(2, 17))
    at = next((number for number in rounded if c.between[0] < number < c.between[1]), c.at)
    return f"at about {c.key}={f'{at:.0f}' if at.is_integer() else f'{at:g}'} (between {low} and {high})"


def _for(group: Sequence[Crossing]) -> str:
    """Return `` for num_samples=20000 or num_samples=60000``; empty if nothing else is swept."""
    labels = dict.fromkeys(point_label(c.rest) for c in group if c.rest)
    return " for " + units.listed(labels, MAX_NAMED, word="or") if labels else ""
