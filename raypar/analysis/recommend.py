"""Recommendation of a point: the fastest that meets the constraints, how sure that is, and what would settle it.

A limit is compared with the median. Where the interval encloses the limit, an excluded point is a close call. Without a
target, points are excluded whose metric is significantly worse than the best one, block by block, and by more than a
report shows; where there are no two blocks to compare, the values decide, and that is a close call too.

A point of which a trial diverged is excluded, however fast the others were.

Of the points that no limit excludes, the one with the smallest median time leads. Those whose times don't differ
significantly from its are its rivals. Of the leader and the rivals within `MARGIN` of it, the one with the fewest
workers is chosen: equals should not cost more. If no rival can be much faster than the chosen one, it is a tie and no
more trials are needed; else the study is inconclusive.

A point is dominated by another one that is at least as good in every respect by its median, and significantly better
in one of them. Points that differ significantly in no respect don't dominate each other, however their medians lie.
The relation has no circles, so there always is a front. Where no point was repeated, as in a search, medians alone
count: then it is the Pareto front of the literature.
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
from raypar.analysis.goodput import BatchGroup, batch_groups
from raypar.analysis.pairwise import (
    MARGIN,
    MIN_METRIC_DIFFERENCE,
    Confidence,
    confidence_of,
    joint_share,
    metric_change,
    repeats_needed,
    time_ratio,
)
from raypar.analysis.points import (
    PointAnalysis,
    analyse_points,
    cost_of,
    energy_of,
    energy_source,
    num_nodes,
    why_energy_unknown,
)
from raypar.analysis.question import PointSamples, Question, current_results
from raypar.analysis.stats import MIN_RANKED, Estimate
from raypar.analysis.time_to_target import PointToTarget, Start, Target, TargetStatus, reported_metrics, time_to_target
from raypar.errors import RayparError, suggest
from raypar.study.space import Value
from raypar.study.trial import TrialResult, gain

MAX_REPEATS = 100  # more than that nobody waits for
MAX_DOUBTED = 4

Differs: TypeAlias = Callable[[int, int, int], bool]


def front_of(points: Sequence[PointAnalysis], mode: str) -> frozenset[int]:
    """Return the indices of the points on the front of time, metric, cost and energy, of those that have a time.

    Points of which a trial diverged are neither on the front nor do they beat others.

    Args:
        points: of one study; the metric, the cost and the energy count where all of those with a time have one.
        mode: "max" or "min" of the metric is better.
    """
    indices = [i for i, point in enumerate(points) if point.time_s is not None and not point.unusable]
    timed = [points[i] for i in indices]
    every = {name: [getattr(p, name) for p in timed] for name in ("time_s", "metric", "cost", "energy_j")}
    columns: dict[str, list[Estimate]] = {name: column for name, column in every.items() if None not in column}
    names = list(columns)
    rows = [
        [gain(mode, -column[i].value) if name == "metric" else column[i].value for name, column in columns.items()]
        for i in range(len(timed))
    ]

    def differs(one: int, other: int, objective: int) -> bool:
        if names[objective] == "time_s":
            return is_time_apart(timed[one], timed[other])
        column = columns[names[objective]]
        return _are_apart(column[one], column[other])

    is_repeated = any(len(p.times) > 1 for p in timed)
    return frozenset(indices[i] for i in pareto_front(rows, differs if is_repeated else None))


def is_time_apart(one: PointAnalysis, other: PointAnalysis) -> bool:
    """Return whether the times of two points that have one differ significantly."""
    if one.time_s and other.time_s and _are_apart(one.time_s, other.time_s):
        return True
    if min(len(one.times), len(other.times)) < 2:
        return False  # there is no interval
    # Times can differ significantly whose intervals overlap; that takes longer to compute.
    return time_ratio(one.times, other.times).excludes(1.0)


def _are_apart(one: Estimate, other: Estimate) -> bool:
    """Return whether the intervals have nothing in common.

    That neither holds the other's median would not do: two of a kind are so in one case of six.
    """
    bounds = [math.nan if bound is None else bound for bound in (one.low, one.high, other.low, other.high)]
    return bounds[1] < bounds[2] or bounds[3] < bounds[0]


def pareto_front(medians: Sequence[Sequence[float]], differs: Differs | None = None) -> tuple[int, ...]:
    """Return the indices of the points on the front, in their order.

    Args:
        medians: ``[point][objective]``, finite; less is better: what is to be large comes with its sign turned.
        differs: whether point `one` differs significantly from point `other` in an objective; called for differing
            medians; None: every difference counts.
    """
    table = np.asarray(medians, dtype=float)
    front = []
    for i, row in enumerate(table):
        # Of thousands of points few are as good in all: those alone are looked at one by one, the fastest first.
        as_good = np.flatnonzero((table <= row).all(axis=1) & (table < row).any(axis=1))
        ordered = as_good[np.argsort(table[as_good, 0], kind="stable")]
        better = ((int(j), int(k)) for j in ordered for k in np.flatnonzero(table[j] < row))
        if not any(differs is None or differs(j, i, k) for j, k in better):
            front.append(i)
    return tuple(front)


@dataclass(frozen=True)
class Constraints:
    """Constraints on a recommended configuration.

    Attributes:
        target: the time until it is reached counts; None: the time of the whole training.
        start: from when on.
        max_time_s: of the time that counts.
        max_cost: in the currency of the price.
        max_energy_j: joules of the time that counts.
        min_efficiency: parallel efficiency, 0 to 1, as the report has it.
        min_metric: of the study's metric after the last epoch; the most it may be where less is better.
        only: hyperparameters and the values they may have.
    """

    target: Target | None = None
    start: Start = Start.FIRST_STEP
    max_time_s: float | None = None
    max_cost: float | None = None
    max_energy_j: float | None = None
    min_efficiency: float | None = None
    min_metric: float | None = None
    only: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Candidate(PointAnalysis):
    """A point with the numbers that count: up to the target where one is asked for, else of the whole training.

    Attributes:
        to_target: None where no target is asked for.
        exclusion: why it can't be chosen; empty: it can.
        is_close_call: whether that hangs on a limit which its interval encloses, or on one trial.
        is_on_front: whether no other beats it in time, metric, cost and energy.
    """

    to_target: PointToTarget | None = None
    exclusion: str = ""
    is_close_call: bool = False
    is_on_front: bool = False

    @property
    def times(self) -> dict[int, float]:
        """Seconds that count, by repeat."""
        return self.to_target.times if self.to_target else super().times

    @property
    def median_s(self) -> float:
        """Median of its times; infinite where it has none."""
        return self.time_s.value if self.time_s else math.inf


def _candidates(
    question: Question, gathered: Sequence[PointSamples], constraints: Constraints
) -> tuple[Candidate, ...]:
    """Return a candidate for each point that has the values asked for, in the order given.

    Raises:
        RayparError: no point has them.
    """
    analysed = [p for p in analyse_points(question, gathered) if _has_values(p, constraints.only)]
    if not analysed:
        raise _no_such_point(gathered, constraints.only)
    candidates = [_candidate(question, constraints, point) for point in analysed]
    if constraints.target is None:
        candidates = _without_worse(candidates, question)
    # Those that miss the target are neither on the front nor do they beat others.
    reaching = [i for i, c in enumerate(candidates) if not c.to_target or c.to_target.is_always_reached]
    front = {reaching[i] for i in front_of([candidates[i] for i in reaching], question.mode)}
    return tuple(replace(c, is_on_front=i in front) for i, c in enumerate(candidates))


def _candidate(question: Question, constraints: Constraints, analysed: PointAnalysis) -> Candidate:
    candidate = Candidate(**vars(analysed))
    if constraints.target:
        to_target = time_to_target(analysed, constraints.target, constraints.start)
        is_metered = analysed.energy_j is not None and constraints.start is Start.FIRST_STEP
        candidate = replace(
            candidate,
            to_target=to_target,
            time_s=to_target.time_s,
            cost=cost_of(to_target.time_s, num_nodes(analysed), question.price_per_node_hour),
            energy_j=energy_of(analysed, to_target.times) if is_metered else None,
        )
    exclusion, is_close_call = _exclusion(question, constraints, candidate)
    return replace(candidate, exclusion=exclusion, is_close_call=is_close_call)


def _exclusion(question: Question, constraints: Constraints, c: Candidate) -> tuple[str, bool]:
    """Return the first reason why it can't be chosen, empty for none, and whether that is a close call."""
    if num_unusable := len(c.unusable):
        of_all = f" in {num_unusable} of {len(c.results)}" if num_unusable < len(c.results) else ""
        return f"{c.unusable[0].state}{of_all}", False
    if c.to_target is not None and not c.to_target.is_always_reached:
        return _why_missed(c.to_target), False
    if c.time_s is None:
        return c.outcome or ("no time known" if c.results else "not run yet"), False
    metric = question.metric
    limits: tuple[tuple[str, float | None, Estimate | None, bool, Callable[[float], str]], ...] = (
        ("time", constraints.max_time_s, c.time_s, True, units.seconds),
        ("cost", constraints.max_cost, c.cost, True, "{:g}".format),
        ("energy", constraints.max_energy_j, c.energy_j, True, units.energy),
        ("efficiency", constraints.min_efficiency, c.efficiency, False, units.percent),
        (metric, constraints.min_metric, c.metric, question.mode == "min", partial(units.score, metric)),
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


def _why_missed(to_target: PointToTarget) -> str:
    num = {status: to_target.num_in(status) for status in TargetStatus}
    num_reached, num_ended = num[TargetStatus.REACHED], len(to_target.trials) - num[TargetStatus.FAILED]
    if not num_ended:
        return "failed" if to_target.trials else "not run yet"
    if num[TargetStatus.UNKNOWN]:
        return "time to the target unknown"
    return f"reached by {num_reached} of {num_ended}" if num_reached else "target not reached"


def _without_worse(candidates: Sequence[Candidate], question: Question) -> list[Candidate]:
    """Exclude the candidates whose metric is significantly worse than the best one."""
    name, rank = question.metric, partial(gain, question.mode)
    scored = [(c, c.metric.value) for c in candidates if c.metric and not c.exclusion]
    best, best_value = max(scored, key=lambda entry: rank(entry[1]), default=(None, 0.0))

    def judged(c: Candidate) -> Candidate:
        if c.exclusion or best is None:
            return c
        if c.metric is None:
            return replace(c, exclusion=f"{name} unknown")
        if rank(best_value - c.metric.value) <= MIN_METRIC_DIFFERENCE * abs(best_value):
            return c
        change = metric_change(c, best)
        is_single = change is None or change.low is None
        if change is not None and not is_single and not change.excludes(0.0):
            return c
        return replace(c, exclusion=f"{name} worse than the best", is_close_call=is_single)

    return [judged(c) for c in candidates]


def _has_values(samples: PointSamples, only: Mapping[str, tuple[Value, ...]]) -> bool:
    """Return whether a point has one of the values of each of these hyperparameters."""
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
    CLEAR = "clear"  # significantly faster than every other
    TIED = "tied"  # no rival can be faster by more than MARGIN
    UNCLEAR = "unclear"  # a rival may be
    NONE = "none"  # no point meets the constraints


@dataclass(frozen=True)
class Settling:
    """Trials that would settle which point is the fastest.

    Attributes:
        points: to be repeated.
        num_repeats: about how many trials each of them needs in all; None: too many to be worth it.
        spread_is_known: False: one trial each says nothing of the spread, and the count is only a beginning.
    """

    points: tuple[Mapping[str, Value], ...]
    num_repeats: int | None
    spread_is_known: bool


@dataclass(frozen=True)
class Recommendation:
    """Recommendation of a study.

    Attributes:
        time_metric: what the times are where no target is asked for.
        candidates: all points, in the order of their values.
        chosen: None for `Decision.NONE`.
        runner_up: the one to take otherwise: the fastest of the others; None where there is none.
        lead: time of the runner-up over that of the chosen one; None without one.
        confidence: that the chosen one is faster than every other, or, if it was chosen for its workers, slower than
            none by more than `MARGIN`; None where one of them ran only once.
        rivals: the leader and those that don't differ significantly from it, without the chosen one.
        settling: None where there is nothing to settle.
        batches: what the batch size does, where a target is asked for.
        excluded: a sentence on trials of other settings; empty where there are none.
        energy_source: what the candidates' energies are of; empty: they have none.
    """

    question: Question
    constraints: Constraints
    time_metric: str
    candidates: tuple[Candidate, ...]
    decision: Decision
    chosen: Candidate | None = None
    runner_up: Candidate | None = None
    lead: Estimate | None = None
    confidence: Confidence | None = None
    rivals: tuple[Candidate, ...] = ()
    settling: Settling | None = None
    batches: tuple[BatchGroup, ...] = ()
    excluded: str = ""
    energy_source: str = ""

    @property
    def eligible(self) -> list[Candidate]:
        """Candidates that may be chosen, the fastest first."""
        return sorted((c for c in self.candidates if not c.exclusion), key=lambda c: c.median_s)

    @property
    def leader(self) -> Candidate | None:
        """The eligible one with the smallest median time."""
        return next(iter(self.eligible), None)


def recommend(question: Question, results: Sequence[TrialResult], constraints: Constraints) -> Recommendation:
    """Recommend a point.

    Raises:
        RayparError: the target's metric is in no report, no point has the values asked for, or a limit is on what no
            point has.
    """
    current = current_results(question, results)
    target = constraints.target
    if target is not None and target.metric not in (metrics := reported_metrics(current.results)):
        hint = suggest(target.metric, metrics) if metrics else "the trials report nothing: leave --target out"
        raise RayparError(f"--target {target.metric}=…: no trial reports `{target.metric}`", hint=hint)
    candidates = _candidates(question, current.points, constraints)
    _check_limits(candidates, constraints, current.results)
    batches: tuple[BatchGroup, ...] = ()
    if target is not None:
        compared = [p for p in current.points if _has_values(p, constraints.only)]
        batches = batch_groups(compared, target, question.baseline)
    before = Recommendation(question, constraints, current.time_metric, candidates, Decision.NONE)
    source = energy_source(current.points)
    before = replace(before, batches=batches, excluded=current.sentence, energy_source=source)
    return _chosen(before) if before.eligible else before


def _chosen(before: Recommendation) -> Recommendation:
    leader, *others = ranked = before.eligible
    rivals = [c for c in others if not is_time_apart(c, leader)]
    # Without intervals no tie is shown, and the fastest is the best guess.
    losses = [(c, time_ratio(c.times, leader.times)) for c in rivals]
    near = [c for c, loss in losses if loss.low is not None and loss.value <= 1 + MARGIN]
    chosen = min((leader, *near), key=lambda c: (c.num_workers or 0, c.median_s))
    tied = [c for c in (leader, *rivals) if c is not chosen] if rivals else []
    bounds = [(c, time_ratio(chosen.times, c.times).high) for c in tied]
    much_faster = [c for c, most in bounds if most is None or most > 1 + MARGIN]  # as far as is known
    open_rivals = much_faster + _doubted(before, chosen)
    after = replace(
        before,
        decision=Decision.UNCLEAR if open_rivals else Decision.TIED if tied else Decision.CLEAR,
        chosen=chosen,
        rivals=tuple(tied),
        settling=_settling(chosen, open_rivals) if open_rivals else None,
    )
    rest = [c for c in ranked if c is not chosen]
    if not rest:
        return after
    return replace(
        after,
        runner_up=rest[0],
        lead=time_ratio(rest[0].times, chosen.times),
        confidence=_joint_confidence(chosen, rest, is_leader=chosen is leader),
    )


def _joint_confidence(chosen: Candidate, others: Sequence[Candidate], *, is_leader: bool) -> Confidence | None:
    """Return the confidence against all others at once: the least of each, corrected for their number."""
    at_least = 1.0 if is_leader else 1 / (1 + MARGIN)
    each = [c for other in others if (c := confidence_of(other.times, chosen.times, at_least)) is not None]
    if len(each) < len(others):
        return None
    least = min(each, key=lambda confidence: confidence.share)
    return replace(least, share=joint_share([confidence.share for confidence in each]))


def _doubted(before: Recommendation, chosen: Candidate) -> list[Candidate]:
    """Return faster points whose metric was worse in one trial, which proves little: the best few of them."""
    if len(chosen.times) > 1:
        return []
    close = [(c, c.metric.value) for c in before.candidates if c.is_close_call and c.metric is not None]
    faster = [(c, value) for c, value in close if c.median_s < chosen.median_s]
    faster.sort(key=lambda entry: gain(before.question.mode, entry[1]), reverse=True)
    return [c for c, _ in faster[:MAX_DOUBTED]]


def _settling(chosen: Candidate, rivals: Sequence[Candidate]) -> Settling:
    points = (chosen.point, *(c.point for c in rivals))
    counts = [repeats_needed(c.times, chosen.times) for c in rivals]
    if None in counts:
        return Settling(points, MIN_RANKED, spread_is_known=False)
    most = max(count for count in counts if count is not None)
    return Settling(points, most if most <= MAX_REPEATS else None, spread_is_known=True)


def _check_limits(candidates: Sequence[Candidate], constraints: Constraints, results: Sequence[TrialResult]) -> None:
    """Refuse a limit on what no point has."""
    timed = [c for c in candidates if c.time_s is not None]
    if constraints.min_efficiency is not None and timed and all(c.efficiency is None for c in timed):
        hint = 'compare with something: baseline={"num_workers": 1} in the study\'s file, or leave it out'
        raise RayparError(f"--min-efficiency {constraints.min_efficiency:g}: no point has an efficiency", hint=hint)
    if constraints.max_cost is not None and timed and all(c.cost is None for c in timed):
        hint = "leave it out, or run the study again: results of now say where they ran"
        raise RayparError(f"--max-cost {constraints.max_cost:g}: no result says on how many nodes it ran", hint=hint)
    if constraints.max_energy_j is None:
        return
    limit = f"--max-energy {units.energy(constraints.max_energy_j)}"
    if constraints.target is not None and constraints.start is not Start.FIRST_STEP:
        raise RayparError(f"{limit}: energy is known from the first timed step on", hint="leave --start out")
    if timed and not any(c.energy_j for c in candidates):
        hint = "leave it out, or run the study where it can be read"
        raise RayparError(f"{limit}: {why_energy_unknown(results)}", hint=hint)
