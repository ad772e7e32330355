"""Recommendation of a point: the fastest that meets the constraints and is good enough, and the trials that settle it.

A limit is compared with the median. An excluded point is a close call if its interval encloses the limit. A point with
a diverged trial is excluded.

Without a target, a point qualifies only if it is shown to be as good as the best one within a tolerated margin
(`metric_margin`): the one-sided interval of the difference of their metrics ends within the margin. "Not significantly
worse" would be too weak, because few repeats show hardly any difference. A point that may be worse is a close call.

The qualifying point with the smallest median time leads. Points that are not shown to be slower are its rivals. Among
the leader and the rivals within the study's margin of it, the one with the fewest workers is chosen, because equal
results should not cost more. If no rival can be much faster than the chosen point, it is a tie and no more trials are
needed. Otherwise, or if a faster point may be good enough, the study is inconclusive. One trial per point is always
inconclusive.

A point is dominated by another one whose medians are at least as good in every objective and that is significantly
better in one of them. This relation has no cycles, so there always is a front. If no point was repeated, as in a
search, only medians count, and the result is the usual Pareto front.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import TypeAlias

import numpy as np

from raypar import units
from raypar.analysis.comparison import Comparison, Outcome
from raypar.analysis.evidence import Evidence, evidence_of
from raypar.analysis.goodput import BatchGroup, batch_groups
from raypar.analysis.pairwise import (
    MAX_REPEATS,
    Family,
    family_of,
    repeats_for_margin,
    repeats_needed,
)
from raypar.analysis.points import PointAnalysis, hourly_price, quantities_until
from raypar.analysis.question import PointSamples, Question
from raypar.analysis.stats import MIN_RANKED, Estimate
from raypar.analysis.time_to_target import (
    PointToTarget,
    Start,
    Target,
    TargetStatus,
    metric_of,
    reported_metrics,
    time_to_target,
)
from raypar.errors import RayparError, suggest
from raypar.study.memory_fit import MemoryFit, fit_of, gpu_range_bytes
from raypar.study.metric import Metric
from raypar.study.quantity import View, limited, of_view
from raypar.study.script_settings import WHAT_IF, is_counterfactual
from raypar.study.space import Value
from raypar.study.trial import TrialResult, gain

MAX_DOUBTED = 4
PEAK = "peak_memory_bytes"
NOISE = 0.5  # of the best metric; a possible loss beyond that is reported without a number

Differs: TypeAlias = Callable[[int, int, int], bool]


def front_of(points: Sequence[PointAnalysis], mode: str, family: Family) -> frozenset[int]:
    """Return the indices of the points on the front of time, metric and the quantities of `View.FRONT`.

    Points without a time or with a diverged trial are not on the front and dominate no others. The metric and each
    quantity count only if all other points have them.
    """
    indices = [i for i, point in enumerate(points) if point.time_s is not None and not point.unusable]
    timed = [points[i] for i in indices]
    every = {"time_s": [p.time_s for p in timed], "metric": [p.metric for p in timed]}
    every |= {q.key: [p.of(q) for p in timed] for q in of_view(View.FRONT)}
    columns = {name: [e for e in column if e is not None] for name, column in every.items() if None not in column}
    names = list(columns)
    rows = [
        [gain(mode, -column[i].value) if name == "metric" else column[i].value for name, column in columns.items()]
        for i in range(len(timed))
    ]

    family = family.of_all_pairs(len(timed))

    def differs(one: int, other: int, objective: int) -> bool:
        if names[objective] == "time_s":
            return Comparison(family.ratio(timed[one].times, timed[other].times)).differs
        if names[objective] == "metric":
            return family.compare_metrics(timed[one], timed[other]).differs
        column = columns[names[objective]]
        return _are_apart(column[one], column[other])

    is_repeated = any(len(p.times) > 1 for p in timed)
    return frozenset(indices[i] for i in pareto_front(rows, differs if is_repeated else None))


def _are_apart(one: Estimate, other: Estimate) -> bool:
    """Return whether the intervals don't overlap."""
    if one.low is None or one.high is None or other.low is None or other.high is None:
        return False
    return one.high < other.low or other.high < one.low


def pareto_front(medians: Sequence[Sequence[float]], differs: Differs | None = None) -> tuple[int, ...]:
    """Return the indices of the points on the front, in order.

    Args:
        medians: ``[point][objective]``, finite; smaller is better.
        differs: whether one point differs significantly from another in an objective; None: every difference counts.
    """
    table = np.asarray(medians, dtype=float)
    front = []
    for i, row in enumerate(table):
        as_good = np.flatnonzero((table <= row).all(axis=1) & (table < row).any(axis=1))
        # Compare with the best of these in each objective: tests against all would find some difference by chance.
        best = {k: int(as_good[np.argmin(table[as_good, k])]) for k in range(len(row)) if len(as_good)}
        if not any(table[j, k] < row[k] and (differs is None or differs(j, i, k)) for k, j in best.items()):
            front.append(i)
    return tuple(front)


@dataclass(frozen=True)
class Constraints:
    """Constraints on a recommended configuration.

    Attributes:
        target: the time until it is reached counts; None: the time of the whole training.
        start: start of that time.
        max_time_s: upper limit of that time.
        limits: upper limits of quantities, by their keys.
        gpu_bytes: memory of a GPU that each worker has to fit into; None: any.
        min_efficiency: parallel efficiency, 0 to 1.
        min_metric: limit of the study's metric after the last epoch; an upper limit if smaller is better.
        metric_margin: how much worse than the best a metric may be; None: the default.
        only: hyperparameters and their allowed values.
    """

    target: Target | None = None
    start: Start = Start.FIRST_STEP
    max_time_s: float | None = None
    limits: Mapping[str, float] = field(default_factory=dict)
    gpu_bytes: float | None = None
    min_efficiency: float | None = None
    min_metric: float | None = None
    metric_margin: float | None = None
    only: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Candidate(PointAnalysis):
    """A point with the numbers that count: up to the target if there is one, otherwise of the whole training.

    Attributes:
        to_target: None without a target.
        exclusion: reason why it can't be chosen; empty if it can.
        is_excluded_for_metric: whether it is excluded because its metric is not shown to be as good as the best.
        is_close_call: whether the exclusion depends on a limit that its interval encloses, or on one trial.
        metric_gap: its metric minus the best point's, if it is open whether that is within the margin.
        is_metric_worse: whether its metric is shown to be worse than the best point's by more than the margin.
        is_on_front: whether no other point dominates it in time, metric and the quantities of `View.FRONT`.
        fit: whether a worker fits into the GPU; None: none was given, or the memory is unknown.
    """

    to_target: PointToTarget | None = None
    exclusion: str = ""
    is_excluded_for_metric: bool = False
    is_close_call: bool = False
    metric_gap: Estimate | None = None
    is_metric_worse: bool = False
    is_on_front: bool = False
    fit: MemoryFit | None = None

    @property
    def times(self) -> dict[int, float]:
        """Times that count, in seconds, by repeat."""
        return self.to_target.times if self.to_target else super().times

    @property
    def median_s(self) -> float:
        """Median of its times; infinite if it has none."""
        return self.time_s.value if self.time_s else math.inf


def _candidates(evidence: Evidence, constraints: Constraints) -> tuple[tuple[Candidate, ...], Family]:
    """Return a candidate for each point with the allowed values, in the order given, and their family."""
    question, family = evidence.question, evidence.family
    analysed = [p for p in evidence.points if _has_values(p, constraints.only)]
    if not analysed:
        raise _no_such_point(evidence.points, constraints.only)
    candidates = [_candidate(question, constraints, point) for point in analysed]
    if constraints.target is None:
        candidates = _without_worse(candidates, question, constraints, family)
    else:
        family = family_of(question, candidates)  # of the times to the target
    # Counterfactuals and points that miss the target are not on the front and dominate no others.
    reaching = [i for i, c in enumerate(candidates) if not c.to_target or c.to_target.is_always_reached]
    possible = [i for i in reaching if not is_counterfactual(candidates[i].values)]
    front = {possible[i] for i in front_of([candidates[i] for i in possible], question.mode, family)}
    return tuple(replace(c, is_on_front=i in front) for i, c in enumerate(candidates)), family


def _candidate(question: Question, constraints: Constraints, analysed: PointAnalysis) -> Candidate:
    fit = None if constraints.gpu_bytes is None else _fit(analysed, constraints.gpu_bytes)
    candidate = Candidate(**vars(analysed), fit=fit)
    if constraints.target:
        to_target = time_to_target(analysed, constraints.target, constraints.start)
        times = to_target.times if constraints.start is Start.FIRST_STEP else None
        until = quantities_until(analysed, to_target.time_s, times, question.price_per_node_hour)
        candidate = replace(candidate, to_target=to_target, time_s=to_target.time_s, quantities=until)
    exclusion, is_close_call = _exclusion(question, constraints, candidate)
    return replace(candidate, exclusion=exclusion, is_close_call=is_close_call)


def _exclusion(question: Question, constraints: Constraints, c: Candidate) -> tuple[str, bool]:
    """Return the first reason why a candidate can't be chosen (empty if it can), and whether that is a close call."""
    if is_counterfactual(c.values):
        return f"{c.values[WHAT_IF]}: a counterfactual", False
    if num_unusable := len(c.unusable):
        of_all = f" in {num_unusable} of {len(c.results)}" if num_unusable < len(c.results) else ""
        return f"{c.unusable[0].state}{of_all}", False
    if c.to_target is not None and not c.to_target.is_always_reached:
        return _why_missed(c.to_target), False
    if c.time_s is None:
        return c.outcome or ("no time known" if c.results else "not run yet"), False
    if constraints.gpu_bytes is not None and c.fit is not MemoryFit.YES:
        text = f"{c.fit} into {units.size(constraints.gpu_bytes)}" if c.fit else "GPU memory unknown"
        return text, c.fit is MemoryFit.UNCERTAIN
    metric = question.metric
    limits: tuple[tuple[str, float | None, Estimate | None, bool, Callable[[float], str]], ...] = (
        ("time", constraints.max_time_s, c.time_s, True, units.seconds),
        *(
            (q.head, constraints.limits.get(q.key), c.of(q), True, limit.show or q.show)
            for q, limit in limited().items()
        ),
        ("efficiency", constraints.min_efficiency, c.efficiency, False, units.percent),
        (metric, constraints.min_metric, c.metric, question.mode == "min", question.judged_by.show),
    )
    for name, limit, quantity, is_upper, show in limits:
        if limit is None:
            continue
        if quantity is None:
            return f"{name} unknown", False
        if quantity.value > limit if is_upper else quantity.value < limit:
            side = "longer than" if name == "time" else f"{name} {'above' if is_upper else 'below'}"
            return f"{side} {show(limit)}", quantity.low is not None and not quantity.excludes(limit)
    return "", False


def _fit(analysed: PointAnalysis, gpu_bytes: float) -> MemoryFit | None:
    """Return whether the measured allocations of a point's workers fit into a GPU; None if they were not counted."""
    peaks_bytes = [r.conditions.largest(PEAK) for r in analysed.results]
    peak_bytes = max((peak for peak in peaks_bytes if peak), default=None)
    return None if peak_bytes is None else fit_of(gpu_range_bytes(peak_bytes), gpu_bytes)


def _why_missed(to_target: PointToTarget) -> str:
    num = {status: to_target.num_in(status) for status in TargetStatus}
    num_reached, num_ended = num[TargetStatus.REACHED], len(to_target.trials) - num[TargetStatus.FAILED]
    if not num_ended:
        return "failed" if to_target.trials else "not run yet"
    if num[TargetStatus.UNKNOWN]:
        return "time to the target unknown"
    return f"reached by {num_reached} of {num_ended}" if num_reached else "target not reached"


def _without_worse(
    candidates: Sequence[Candidate], question: Question, constraints: Constraints, family: Family
) -> list[Candidate]:
    """Exclude candidates that are not shown to be as good as the best one within the margin."""
    name, sign = question.metric, gain(question.mode, 1.0)
    num_scored = sum(c.metric is not None and not c.exclusion for c in candidates)
    best, best_value = _best(candidates, question.mode)
    margin = constraints.metric_margin
    margin = question.judged_by.margin(best_value) if margin is None else margin

    def judged(c: Candidate) -> Candidate:
        if c.exclusion or best is None or c is best:
            return c
        gap = family.metric_bounds(best, c, num_scored - 1) if c.metric is not None else None
        excluded = replace(c, is_excluded_for_metric=True, metric_gap=gap)
        if gap is None:
            return replace(excluded, exclusion=f"{name} unknown")
        if gap.low is None or gap.high is None:
            if (worse := -sign * gap.value) <= margin:
                return replace(c, metric_gap=gap)
            exclusion = f"{name} {question.judged_by.show_difference(worse)} worse (1 trial, unconfirmed)"
            return replace(excluded, exclusion=exclusion, is_close_call=True)
        worst, most = sorted((sign * gap.low, sign * gap.high))
        if worst >= -margin:
            return c
        if most < -margin and family.compare_metrics(best, c).differs:
            return replace(excluded, exclusion=f"{name} worse than the best", is_metric_worse=True, metric_gap=None)
        is_open = most >= -margin
        exclusion = could_be_worse(question.judged_by, -worst, best_value)
        return replace(excluded, exclusion=exclusion, is_close_call=is_open, is_metric_worse=not is_open)

    return [judged(c) for c in candidates]


def could_be_worse(metric: Metric, worse: float, best: float) -> str:
    """Say how much worse than the best value a metric could be, or that it varies too much to tell."""
    if worse > NOISE * abs(best):
        return f"{metric.name} varies too much to compare it"
    return f"{metric.name} could be {metric.show_difference(worse)} worse"


def _best(candidates: Sequence[Candidate], mode: str) -> tuple[Candidate | None, float]:
    """Return the candidate with the best metric of those that may qualify, and that value."""
    scored = [(c, c.metric.value) for c in candidates if c.metric and (not c.exclusion or c.metric_gap)]
    return max(scored, key=lambda entry: gain(mode, entry[1]), default=(None, 0.0))


def _has_values(samples: PointSamples, only: Mapping[str, tuple[Value, ...]]) -> bool:
    return all(key in samples.values and samples.values[key] in values for key, values in only.items())


def _no_such_point(gathered: Sequence[PointSamples], only: Mapping[str, tuple[Value, ...]]) -> RayparError:
    names = list(dict.fromkeys(k for g in gathered for k in (*g.point, *g.config)))
    for key, values in only.items():
        option = f"--set {key}={','.join(map(units.value_of, values))}"
        if key not in names:
            return RayparError(f"{option}: no trial has `{key}`", hint=suggest(key, names))
        if not any(_has_values(g, {key: values}) for g in gathered):
            there = dict.fromkeys(units.value_of(g.values.get(key)) for g in gathered)
            return RayparError(f"{option}: no point has it", hint=f"there are: {', '.join(there)}")
    return RayparError("no point has all the values of --set at once", hint="leave one out")


# ---- choice


class Decision(StrEnum):
    CLEAR = "clear"  # significantly faster than every other point that may be good enough
    TIED = "tied"  # no such point can be faster by more than the margin
    UNCLEAR = "unclear"  # a rival may be faster by more than the margin
    NONE = "none"  # no point meets the constraints


@dataclass(frozen=True)
class Settling:
    """Trials that would settle which point is the fastest.

    Attributes:
        num_repeats: approximate number of trials that each point needs in total; None: too many to be worth it.
        spread_is_known: False with one trial each: the count is then only a start.
    """

    points: tuple[Mapping[str, Value], ...]
    num_repeats: int | None
    spread_is_known: bool


@dataclass(frozen=True)
class OpenRival:
    """A point that more trials may show to be the better choice.

    Attributes:
        num_repeats: approximate number of trials of both points that show it; None: not known yet.
    """

    candidate: Candidate
    num_repeats: int | None


@dataclass(frozen=True)
class Recommendation:
    """Recommendation of a study.

    Attributes:
        time_metric: kind of the times if there is no target.
        candidates: all points, sorted by their values.
        chosen: None for `Decision.NONE`.
        runner_up: the fastest of the other points.
        lead: time of the runner-up divided by that of the chosen point.
        rivals: the leader and the points that don't differ significantly from it, without the chosen one.
        open_rivals: points that may be faster than the chosen one by more than the margin, and may be good enough.
        settling: None if there is nothing to settle, or repeats would not help.
        doubt: reason why times can't be trusted; empty if they can.
        batches: effect of the batch size, if there is a target.
        excluded: a sentence on trials with other settings; empty if there are none.
        energy_source: parts whose energy the candidates have.
        family: family of the comparisons.
    """

    question: Question
    constraints: Constraints
    time_metric: str
    candidates: tuple[Candidate, ...]
    decision: Decision
    chosen: Candidate | None = None
    runner_up: Candidate | None = None
    lead: Estimate | None = None
    rivals: tuple[Candidate, ...] = ()
    open_rivals: tuple[OpenRival, ...] = ()
    settling: Settling | None = None
    doubt: str = ""
    batches: tuple[BatchGroup, ...] = ()
    excluded: str = ""
    energy_source: str = ""
    family: Family = field(default_factory=Family)

    @property
    def metric_margin(self) -> float:
        """Margin by which a metric may be worse than the best."""
        if self.constraints.metric_margin is not None:
            return self.constraints.metric_margin
        return self.question.judged_by.margin(_best(self.candidates, self.question.mode)[1])

    @property
    def best(self) -> Candidate | None:
        """Point with the best metric of those that may qualify."""
        return _best(self.candidates, self.question.mode)[0]

    @property
    def eligible(self) -> list[Candidate]:
        """Candidates that may be chosen, the fastest first."""
        return sorted((c for c in self.candidates if not c.exclusion), key=lambda c: c.median_s)

    @property
    def leader(self) -> Candidate | None:
        """Eligible candidate with the smallest median time."""
        return next(iter(self.eligible), None)


def recommend(question: Question, results: Sequence[TrialResult], constraints: Constraints) -> Recommendation:
    """Recommend a point of a study from its trials; see `recommend_of`."""
    return recommend_of(evidence_of(question, results), constraints)


def recommend_of(evidence: Evidence, constraints: Constraints) -> Recommendation:
    """Recommend a point.

    Raises:
        RayparError: no report has the target's metric, no point has the allowed values, or no point has a limited
            quantity.
    """
    question, results, target = evidence.question, evidence.results, constraints.target
    if target is not None and target.metric not in (metrics := reported_metrics(results)):
        hint = suggest(target.metric, metrics) if metrics else "the trials report nothing: leave --target out"
        raise RayparError(f"--target {target.metric}=…: no trial reports `{target.metric}`", hint=hint)
    if target is not None and not target.unit:
        target = replace(target, unit=metric_of(question, target.metric, results).unit)
        constraints = replace(constraints, target=target)
    if target is not None and any(r.conditions.is_foreign for r in results):
        constraints = replace(constraints, start=Start.LAUNCH)  # the only start that is known for such code
    candidates, family = _candidates(evidence, constraints)
    _check_limits(candidates, constraints, results)
    batches: tuple[BatchGroup, ...] = ()
    if target is not None:
        chosen = (p for p in evidence.points if _has_values(p, constraints.only))
        compared = [p for p in chosen if not is_counterfactual(p.values)]
        batches = batch_groups(compared, target, family, question.baseline)
    before = Recommendation(
        question,
        constraints,
        evidence.time_metric,
        candidates,
        Decision.NONE,
        doubt=evidence.doubt,
        batches=batches,
        excluded=evidence.excluded,
        energy_source=evidence.energy_source,
        family=family,
    )
    return _chosen(before, family) if before.eligible else before


def _chosen(before: Recommendation, family: Family) -> Recommendation:
    leader, *others = ranked = before.eligible
    rivals = [(c, family.ratio(c.times, leader.times)) for c in others if not _is_slower(c, leader, family)]
    # Without intervals no tie can be shown, and the fastest is the best guess.
    near = [c for c, lead in rivals if lead.low is not None and lead.value <= 1 + before.question.margin]
    chosen = min((leader, *near), key=partial(_cheapest_first, before.question))
    tied = [c for c in (leader, *(c for c, _ in rivals)) if c is not chosen] if rivals else []
    much_faster = [c for c in tied if _may_be_faster(before, c, chosen, family)]
    doubted = [c for c in before.candidates if c.exclusion and c.metric_gap and c.times]
    maybe_good = [c for c in doubted if c.is_close_call and _may_be_faster(before, c, chosen, family)]
    maybe_good.sort(key=lambda c: c.median_s)
    open_rivals = [OpenRival(c, _repeats_for(before, c, chosen)) for c in (*much_faster, *maybe_good)]
    is_unconfirmed = len(before.candidates) > 1 and (len(chosen.times) < 2 or chosen.metric_gap is not None)
    is_open = is_unconfirmed or bool(open_rivals) or bool(before.doubt)
    is_tied = bool(tied) or not all(_is_slower(c, chosen, family) for c in doubted)
    repeated = open_rivals[: len(much_faster) + MAX_DOUBTED] or [OpenRival(c, None) for c in tied[:MAX_DOUBTED]]
    after = replace(
        before,
        decision=Decision.UNCLEAR if is_open else Decision.TIED if is_tied else Decision.CLEAR,
        chosen=chosen,
        rivals=tuple(tied),
        open_rivals=tuple(open_rivals),
        settling=_settling(chosen, repeated) if is_open and not before.doubt else None,
    )
    rest = [c for c in ranked if c is not chosen]
    return replace(after, runner_up=rest[0], lead=family.ratio(rest[0].times, chosen.times)) if rest else after


def _cheapest_first(question: Question, c: Candidate) -> tuple[float, int, float]:
    """Return a key that sorts points of equal times by what their machines cost in an hour, then by their workers."""
    price = question.price_per_node_hour
    return hourly_price(c, price) or 0.0 if isinstance(price, Mapping) else 0.0, c.num_workers or 0, c.median_s


def _is_slower(c: Candidate, chosen: Candidate, family: Family) -> bool:
    return Comparison(family.ratio(c.times, chosen.times)).outcome is Outcome.FASTER


def _may_be_faster(before: Recommendation, c: Candidate, chosen: Candidate, family: Family) -> bool:
    """Return whether a point may still be faster than the chosen one by more than the margin."""
    ratio = family.ratio(chosen.times, c.times)
    if ratio.high is None:
        return ratio.value > 1
    return not Comparison(ratio, limit=1 + before.question.margin).rules_out(Outcome.FASTER)


def _settling(chosen: Candidate, rivals: Sequence[OpenRival]) -> Settling:
    points = (chosen.point, *(rival.candidate.point for rival in rivals))
    counts = [rival.num_repeats for rival in rivals]
    if None in counts or not counts:
        return Settling(points, MIN_RANKED, spread_is_known=False)
    most = max(count for count in counts if count is not None)
    return Settling(points, most if most <= MAX_REPEATS else None, spread_is_known=True)


def _repeats_for(before: Recommendation, c: Candidate, chosen: Candidate) -> int | None:
    """Return the approximate number of trials that decide whether to choose a rival; None if no spread is known."""
    family = before.family
    if c.metric_gap is None:
        level = family.time_level(min(len(c.times), len(chosen.times)))
        least = MIN_RANKED if before.question.max_repeats is None else 0
        return repeats_needed(c.times, chosen.times, level, before.question.margin, least)
    mode, (best, _) = before.question.mode, _best(before.candidates, before.question.mode)
    of_best, of_other = (
        {repeat: gain(mode, value) for repeat, value in p.by_repeat("metric").items()} for p in (best or c, c)
    )
    num_scored = sum(p.metric is not None for p in before.candidates)
    level = (1 + family.bounds_level(num_scored - 1, min(len(of_best), len(of_other)))) / 2
    return repeats_for_margin(of_best, of_other, before.metric_margin, level)


def _check_limits(candidates: Sequence[Candidate], constraints: Constraints, results: Sequence[TrialResult]) -> None:
    """Refuse a limit on a quantity that no point has."""
    timed = [c for c in candidates if c.time_s is not None]
    if constraints.min_efficiency is not None and timed and all(c.efficiency is None for c in timed):
        hint = 'compare with something: baseline={"num_workers": 1} in the study\'s file, or leave it out'
        raise RayparError(f"--min-efficiency {constraints.min_efficiency:g}: no point has an efficiency", hint=hint)
    if constraints.gpu_bytes is not None and timed and all(c.fit is None for c in timed):
        asked = f"--gpu-memory {units.size(constraints.gpu_bytes)}"
        hint = "leave it out, or run the study with a model of raypar"
        raise RayparError(f"{asked}: no result has counted what its training allocates", hint=hint)
    for q, option in limited().items():
        if (limit := constraints.limits.get(q.key)) is None:
            continue
        asked = f"{option.flag} {(option.show or q.show)(limit)}"
        if q.accrues and constraints.target is not None and constraints.start is not Start.FIRST_STEP:
            hint = "leave --target out" if any(r.conditions.is_foreign for r in results) else "leave --start out"
            raise RayparError(f"{asked}: {q.head} is known from the first timed step on", hint=hint)
        if timed and all(c.of(q) is None for c in candidates):
            why = option.why_unknown(results) if option.why_unknown else f"no result has its {q.head} recorded"
            raise RayparError(f"{asked}: {why}", hint=option.hint)
