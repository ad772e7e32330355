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
    have_equal_metrics,
    same_work,
    worker_metrics,
)
from raypar.analysis.points import PointAnalysis
from raypar.analysis.question import PointKey, Question, point_key
from raypar.analysis.recommend import Recommendation
from raypar.analysis.search import confirmation, leading
from raypar.analysis.stats import Estimate
from raypar.study.script_settings import is_counterfactual
from raypar.study.space import Value
from raypar.study.trial import TrialState, gain, point_label

MAX_NAMED = 3  # points, or settings of the other hyperparameters, that a line lists by name


@dataclass(frozen=True)
class BaselineComparison:
    """Comparison of a point with its baseline.

    Attributes:
        compared: values of the hyperparameters that the study compares: ``{"num_workers": 2}``.
        baseline: those of the baseline.
        rest: values of the other swept hyperparameters, which both share.
    """

    point: PointAnalysis
    compared: Mapping[str, Value]
    baseline: Mapping[str, Value]
    rest: Mapping[str, Value]
    comparison: Comparison

    @property
    def outcome(self) -> Outcome:
        return self.comparison.outcome

    @property
    def who(self) -> str:
        """Compared part of the point: ``2 workers``."""
        return _name(self.compared)

    @property
    def base(self) -> str:
        """Compared part of the baseline: ``1``."""
        workers = _num_workers(self.baseline)
        return point_label(self.baseline) if workers is None else str(workers)

    @property
    def setting(self) -> str:
        """Shared part: ``batch_size=96``; empty if there is none."""
        return point_label(self.rest) if self.rest else ""


def _num_workers(who: Mapping[str, Value]) -> int | None:
    """Return the number of workers; None if other hyperparameters are compared too."""
    workers = who.get("num_workers")
    return workers if len(who) == 1 and isinstance(workers, int) else None


def _name(who: Mapping[str, Value]) -> str:
    workers = _num_workers(who)
    return point_label(who) if workers is None else units.counted(workers, "worker")


def _is_plural(who: Mapping[str, Value]) -> bool:
    return _num_workers(who) not in (None, 1)


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
    comparisons = _comparisons(question, points, doubt)
    if not any(p.samples or p.metric for p in points):
        answer = nothing_to_compare(points)
    elif question.is_search:
        answer = leading(question, points, doubt)
    elif question.leader:
        answer = confirmation(question, points, family)
    elif doubt:
        answer = f"Inconclusive: {doubt}. Rerun it on an idle machine, with --fresh."
    elif len(comparisons) == 1:
        answer = _one_speedup(question, comparisons[0])
    elif comparisons:
        answer = _several_speedups(question, comparisons)
    elif len(points) == 1:
        answer = _only(question, points[0])
    else:
        answer = " ".join([*fastest_lines(points, family), *best_lines(question, points, family)])
    return Verdict(question.text, answer, comparisons, recommendation, doubt)


def _comparisons(
    question: Question, points: Sequence[PointAnalysis], doubt: str = ""
) -> tuple[BaselineComparison, ...]:
    """Compare each point that has a speedup with its baseline, in the order of the points."""
    keys = question.compared_keys()
    rest = [key for key in question.space_keys if key not in question.baseline]
    return tuple(
        BaselineComparison(
            p,
            _part(p.point, keys),
            _part(question.baseline_of(p.point), keys),
            _part(p.point, rest),
            against_baseline(question, p.speedup, doubt),
        )
        for p in points
        if p.speedup is not None and not p.is_baseline
    )


def _part(point: Mapping[str, Value], keys: Sequence[str]) -> dict[str, Value]:
    return {k: point[k] for k in keys if k in point}


def nothing_to_compare(points: Sequence[PointAnalysis]) -> str:
    """Return the answer for a study without a finished trial."""
    outcomes = {p.outcome for p in points if p.results}
    what = f"Every trial {outcomes.pop()}" if outcomes == {TrialState.DIVERGED} else "No trial finished"
    return f"{what}: there is nothing to compare."


def _only(question: Question, point: PointAnalysis) -> str:
    """Return the time and the metric of a study's only point; empty if it has neither."""
    parts = [units.seconds_interval(point.time_s)] if point.time_s else []
    if point.metric:
        parts.append(f"{question.metric} {question.judged_by.show_interval(point.metric)}")
    return f"{f'{point_label(point.point)}: ' * bool(point.point)}{', '.join(parts)}." if parts else ""


def _one_speedup(question: Question, c: BaselineComparison) -> str:
    at = f" at {c.setting}" if c.setting else ""
    shown = units.ratio_interval(c.point.speedup)
    against = f"{c.who} against {c.base}{at}: {shown}"
    match c.outcome:
        case Outcome.UNCONFIRMED:
            return f"{against} (1 trial each, unconfirmed)."
        case Outcome.INCONCLUSIVE:
            return f"{against}, inconclusive."
        case Outcome.EQUIVALENT:
            return f"{against}, equivalent within {units.percent(question.margin)}."
    efficiency = c.point.efficiency
    note = f" (efficiency {units.percent(efficiency.value)})" if efficiency else ""
    return f"{c.who} {'are' if _is_plural(c.compared) else 'is'} {c.outcome} than {c.base}{at}: {shown}{note}."


def _several_speedups(question: Question, comparisons: Sequence[BaselineComparison]) -> str:
    """Summarise the outcomes of all comparisons in one sentence.

    If all comparisons have the same subject, it lists the settings: ``2 workers are faster than 1 only at
    batch_size=768``. If all have the same setting, it lists the subjects: ``2 and 4 workers are faster than 1;
    inconclusive: 16 workers``. Otherwise, it counts the outcomes.
    """
    first, by_outcome = comparisons[0], _by_outcome(comparisons)
    has_one_subject = len({c.who for c in comparisons}) == 1
    if has_one_subject == (len({c.setting for c in comparisons}) == 1):
        return f"{_counts(comparisons)}."
    only = ""
    if has_one_subject and by_outcome.keys() == {Outcome.FASTER, Outcome.SLOWER}:
        only = " only"
        del by_outcome[Outcome.SLOWER]
    clauses: list[str] = []
    for outcome, group in by_outcome.items():
        names = first.who if has_one_subject else _subjects(group, comparisons)
        where = _where(question, group, comparisons) if has_one_subject else ""
        if clauses and has_one_subject:
            clauses.append(f"{outcome}{where}")
        elif outcome in (Outcome.FASTER, Outcome.SLOWER):
            are = "are" if _is_plural(group[0].compared) or (len(group) > 1 and not has_one_subject) else "is"
            clauses.append(f"{names} {are} {outcome} than {first.base}{only}{where}")
        elif clauses:
            clauses.append(f"{outcome}: {names}")
        else:
            clauses.append(f"{outcome.capitalize()}{where}: {names} against {first.base}")
    at = f" at {first.setting}" if first.setting and not has_one_subject else ""
    return f"{'; '.join(clauses)}{at}."


def _where(question: Question, group: Sequence[BaselineComparison], every: Sequence[BaselineComparison]) -> str:
    """Return `` at batch_size=768``, `` at every batch_size``, `` from batch_size=256 on``."""
    keys = [key for key in question.space_keys if key not in question.baseline]
    if len(group) == len(every):
        return f" at every {keys[0]}" if len(keys) == 1 else f" in all {len(every)} settings"
    is_number = all(isinstance(c.rest.get(keys[0]), (int, float)) for c in every)
    places = [every.index(c) for c in group]
    if len(keys) == 1 and len(group) > 1 and is_number and places[-1] - places[0] == len(places) - 1:
        # The points are in the order of their values.
        if places[-1] == len(every) - 1:
            return f" from {group[0].setting} on"
        if places[0] == 0:
            return f" up to {group[-1].setting}"
    if len(group) <= MAX_NAMED:
        return " at " + units.listed((c.setting for c in group), MAX_NAMED, word="and")
    return f" in {len(group)} of {len(every)} settings"


def _subjects(group: Sequence[BaselineComparison], every: Sequence[BaselineComparison]) -> str:
    """Return ``2, 4 and 8 workers``."""
    if len(group) > MAX_NAMED + 1:
        return f"{len(group)} of {len(every)}"
    workers = [_num_workers(c.compared) for c in group]
    if len(group) == 1 or None in workers:
        return units.listed((c.who for c in group), len(group), word="and")
    return units.listed(map(str, workers), len(group), word="and") + " workers"


def _counts(comparisons: Sequence[BaselineComparison]) -> str:
    """Return the number of comparisons with each outcome, and the largest speedup."""
    by_outcome = _by_outcome(comparisons)
    head = f"{units.counted(len(comparisons), 'comparison')} with {_name(comparisons[0].baseline)}"
    text = f"Of {head}: {', '.join(f'{len(group)} {outcome}' for outcome, group in by_outcome.items())}"
    if len(by_outcome) == 1:
        text = f"All {head}: {next(iter(by_outcome))}"
    if faster := by_outcome.get(Outcome.FASTER):
        ratio, most = max(((c.point.speedup.value, c) for c in faster if c.point.speedup), key=itemgetter(0))
        text += f"; highest: {units.ratio(ratio)}, {most.who}{f' at {most.setting}' if most.setting else ''}"
    return text


def _by_outcome(comparisons: Sequence[BaselineComparison]) -> dict[Outcome, list[BaselineComparison]]:
    groups = {outcome: [c for c in comparisons if c.outcome is outcome] for outcome in Outcome}
    return {outcome: group for outcome, group in groups.items() if group}


# ---- statements


def statements(question: Question, points: Sequence[PointAnalysis], family: Family, doubt: str = "") -> tuple[str, ...]:
    """Return sentences on break-even points, the fastest point, the best one, and the metric by numbers of workers.

    Args:
        doubt: as in `Verdict`; if set, there are no sentences on times.
    """
    if not any(p.samples or p.metric for p in points):
        return (nothing_to_compare(points),)
    on_times = [*break_even_lines(question, points), *fastest_lines(points, family)]
    return (
        *(on_times if not doubt else ()),
        *best_lines(question, points, family),
        *_over_workers(question, points, family),
    )


def fastest_lines(points: Sequence[PointAnalysis], family: Family) -> list[str]:
    """Name the point that trains fastest: by time if all did the same work, by throughput otherwise.

    Points with a diverged trial, and those whose trials leave out a part of the work, are excluded.
    """
    timed = [p for p in points if p.time_s and not p.unusable and not is_counterfactual(p.values)]
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
        num_trials = "1 trial" if best.num_samples == 1 else "others have 1 trial"
        return [f"{name} leads: {shown} ({num_trials}, unconfirmed)."]
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
    if all(have_equal_metrics(p, best) for p, _ in others):
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
    if not compared or all(have_equal_metrics(scored[0], p) for p in scored):
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


# ---- break-even

# Resources, for which break-even is a sensible question; it isn't for an optimizer or a learning rate.
RESOURCES = frozenset(
    (
        *("num_workers", "device", "nodes", "node_label", "cpus_per_worker", "cpu_affinity", "num_threads"),
        *("loader", "num_loader_workers", "precision", "compile", "channels_last"),
    )
)
MAX_LINES = 5

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
    """Return the crossing of a curve of at least two points, sorted by value."""
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
        why = "one trial each gives no interval"
    elif changes:
        why = "the speedups go up and down"
    else:
        num_open = len(curve) - len(clear)
        why = f"{num_open} of {len(curve)} intervals {'includes' if num_open == 1 else 'include'} 1"
    return Crossing(CrossingKind.UNCLEAR, ends, why=why)


def crossings_of(question: Question, points: Sequence[PointAnalysis]) -> list[Crossing]:
    """Return a crossing for every curve along a numeric hyperparameter that points share with their baseline."""
    compared, crossings = _comparisons(question, points), list[Crossing]()
    for key in question.space_keys:
        curves: dict[PointKey, list[tuple[float, BaselineComparison]]] = {}
        for c in compared:
            value = c.rest.get(key)
            if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
                others = {k: v for k, v in c.point.point.items() if k != key}
                curves.setdefault(point_key(others), []).append((value, c))
        for curve in filter(lambda curve: len(curve) > 1, curves.values()):
            first = curve[0][1]
            speedups = [(value, c.point.speedup) for value, c in sorted(curve, key=itemgetter(0))]
            crossing = crossing_of([(value, speedup) for value, speedup in speedups if speedup is not None])
            rest = {k: v for k, v in first.rest.items() if k != key}
            crossings.append(replace(crossing, who=first.compared, key=key, rest=rest))
    return crossings


def break_even_lines(question: Question, points: Sequence[PointAnalysis]) -> list[str]:
    """Return at most `MAX_LINES` sentences, crossings first; none if the study compares anything but `RESOURCES`.

    Comparisons along one hyperparameter share a sentence if they have the same result and no crossing.
    """
    if not RESOURCES.issuperset(question.compared_keys()):
        return []
    of_each: dict[tuple[CrossingKind, str, PointKey], list[Crossing]] = {}
    for c in crossings_of(question, points):
        of_each.setdefault((c.kind, c.key, point_key(c.who)), []).append(c)
    groups: dict[tuple[CrossingKind, str, object], list[Crossing]] = {}
    for (kind, key, who), members in of_each.items():
        rests = frozenset(point_key(c.rest) for c in members)
        groups.setdefault((kind, key, who if members[0].between else rests), []).extend(members)
    ranked = sorted(groups.values(), key=lambda group: list(CrossingKind).index(group[0].kind))
    return [_line(group) for group in ranked[:MAX_LINES]]


def _interpolated(left: tuple[float, Estimate], right: tuple[float, Estimate]) -> float | None:
    (x0, s0), (x1, s1) = left, right
    if x0 <= 0 or s0.value <= 0 or s1.value <= 0:
        return None
    y0, y1 = math.log(s0.value), math.log(s1.value)
    return math.exp(math.log(x0) + math.log(x1 / x0) * y0 / (y0 - y1))


def _line(group: Sequence[Crossing]) -> str:
    """Return the sentence on crossings of one kind along one hyperparameter."""
    first, key = group[0], group[0].key
    names = list(dict.fromkeys(_name(c.who) for c in group))
    name = units.listed(names, MAX_NAMED, word="and")
    s = "" if len(names) > 1 or _is_plural(first.who) else "s"
    match first.kind:
        case CrossingKind.STARTS | CrossingKind.STOPS:
            verb = f"start{s} to pay" if first.kind is CrossingKind.STARTS else f"stop{s} paying"
            places = units.listed((_place(c) + _for([c]) for c in group), MAX_NAMED, word="and")
            return f"{name} {verb} {places}."
        case CrossingKind.NEVER:
            return f"{name} never paid up to {key}={units.value_of(min(c.ends[1] for c in group))}{_for(group)}."
        case CrossingKind.ALWAYS:
            least = units.value_of(max(c.ends[0] for c in group))
            return f"{name} paid at every {key} from {least} up{_for(group)}."
    why = f": {first.why}" if len(group) == 1 else ""
    return f"The {key} at which {name} start{s} to pay{_for(group)} is inconclusive{why}."


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
    labels = list(dict.fromkeys(point_label(c.rest) for c in group if c.rest))
    if len(labels) > MAX_NAMED:
        return f" in {len(labels)} settings of {' and '.join(group[0].rest)}"
    return " for " + units.listed(labels, MAX_NAMED, word="or") if labels else ""
