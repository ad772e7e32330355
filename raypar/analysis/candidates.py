"""Candidates for a recommendation: each point with its time, metric, efficiency, cost and limits.

A limit is held against the median. Where the interval encloses the limit, a point that is left out is a close call.
Without a target, points are left out whose metric is worse than the best one by more than chance, block by block, and
by more than a report shows; where there are no two blocks to compare, the values decide, and that is a close call too.

A point is dominated by another one that is at least as good in every respect by its median, and significantly better
in one of them. Points that differ significantly in no respect don't dominate each other, however their medians lie.
The relation has no circles, so there always is a front. Where no point was repeated, as in a search, medians alone
count: then it is the front as known from the literature.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, TypeAlias

import numpy as np

from raypar import units
from raypar.analysis.pairwise import time_ratio
from raypar.analysis.points import (
    MIN_METRIC_DIFFERENCE,
    PointAnalysis,
    analyse_points,
    cost_of,
    differences,
    energy_to,
    num_nodes,
)
from raypar.analysis.question import PointSamples, Question, point_key
from raypar.analysis.stats import Estimate, median_estimate
from raypar.analysis.time_to_target import PointToTarget, Start, Target, TargetStatus, time_to_target
from raypar.errors import RayparError, suggest
from raypar.study.space import Value
from raypar.study.trial import TrialState, gain

Differs: TypeAlias = Callable[[int, int, int], bool]


class Objectives(Protocol):
    """A point with its objectives: seconds that count by repeat, and medians."""

    @property
    def times(self) -> Mapping[int, float]: ...
    @property
    def time_s(self) -> Estimate | None: ...
    @property
    def metric(self) -> Estimate | None: ...
    @property
    def cost(self) -> Estimate | None: ...
    @property
    def energy_j(self) -> Estimate | None: ...


def front_of(points: Sequence[Objectives], mode: str) -> frozenset[int]:
    """Return the indices of the points on the front of time, metric, cost and energy, of those that have a time.

    Args:
        points: of one study; the metric, the cost and the energy count where all of those with a time have one.
        mode: "max" or "min" of the metric is better.
    """
    indices = [i for i, point in enumerate(points) if point.time_s is not None]
    timed = [points[i] for i in indices]
    columns: list[list[float]] = []
    estimates: list[list[Estimate]] = []
    for quantities, is_less_better in (
        ([p.time_s for p in timed], True),
        ([p.metric for p in timed], mode == "min"),
        ([p.cost for p in timed], True),
        ([p.energy_j for p in timed], True),
    ):
        complete = [q for q in quantities if q is not None]
        if timed and len(complete) == len(timed):
            columns.append([q.value if is_less_better else -q.value for q in complete])
            estimates.append(complete)

    def differs(one: int, other: int, objective: int) -> bool:
        if objective == 0:
            return is_time_apart(timed[one], timed[other])
        return _are_apart(estimates[objective][one], estimates[objective][other])

    is_repeated = any(len(p.times) > 1 for p in timed)
    rows = np.transpose(columns).tolist() if timed else []
    return frozenset(indices[i] for i in pareto_front(rows, differs if is_repeated else _always))


def is_time_apart(one: Objectives, other: Objectives) -> bool:
    """Whether the times of two points that have one differ significantly."""
    if one.time_s and other.time_s and _are_apart(one.time_s, other.time_s):
        return True
    if min(len(one.times), len(other.times)) < 2:
        return False  # there is no interval
    # Times can differ significantly whose intervals overlap; that takes longer to find out.
    return time_ratio(one.times, other.times).excludes(1.0)


def _are_apart(one: Estimate, other: Estimate) -> bool:
    """Whether the intervals have nothing in common.

    That neither holds the other's median would not do: two of a kind are so in one case of six.
    """
    if one.low is None or one.high is None or other.low is None or other.high is None:
        return False
    return one.high < other.low or other.high < one.low


def _always(_one: int, _other: int, _objective: int) -> bool:
    return True


def pareto_front(medians: Sequence[Sequence[float]], differs: Differs = _always) -> tuple[int, ...]:
    """Return the indices of the points on the front, in their order.

    Args:
        medians: ``[point][objective]``, finite; less is better: what is to be large comes with its sign turned.
        differs: whether point `one` differs significantly from point `other` in an objective; asked for differing
            medians.
    """
    table = np.asarray(medians, dtype=float)
    front = []
    for i in range(len(table)):
        # Of thousands of points few are as good in all: those alone are looked at one by one, the fastest first.
        beats = np.flatnonzero((table <= table[i]).all(axis=1) & (table < table[i]).any(axis=1))
        ordered = beats[np.argsort(table[beats, 0], kind="stable")]
        if not any(dominates(medians, int(j), i, differs) for j in ordered):
            front.append(i)
    return tuple(front)


def dominates(medians: Sequence[Sequence[float]], one: int, other: int, differs: Differs = _always) -> bool:
    """Whether point `one` is at least as good as `other` in all objectives, and significantly better in one."""
    pairs = list(zip(medians[one], medians[other], strict=True))
    if any(first > second for first, second in pairs):
        return False
    return any(first < second and differs(one, other, k) for k, (first, second) in enumerate(pairs))


@dataclass(frozen=True)
class Constraints:
    """What a configuration is wanted for.

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
class Candidate:
    """A point and what speaks for and against it.

    Attributes:
        times: seconds that count, by repeat.
        time_s: their median; None where there is none.
        metric: the study's, after the last epoch.
        efficiency: as the report has it; None without a baseline that names ``num_workers``.
        cost: None where the price or the number of nodes is unknown.
        to_target: None where no target is asked for.
        energy_j: of the time that counts; None where it can't be read, or that starts before the first timed step.
        exclusion: why it can't be chosen; empty: it can.
        is_close_call: whether that hangs on a limit which its interval encloses, or on one trial.
        is_on_front: whether no other beats it in time, metric, cost and energy.
    """

    point: Mapping[str, Value]
    num_workers: int | None
    num_nodes: int | None
    times: Mapping[int, float]
    time_s: Estimate | None
    metric: Estimate | None
    efficiency: Estimate | None
    cost: Estimate | None
    to_target: PointToTarget | None
    energy_j: Estimate | None = None
    exclusion: str = ""
    is_close_call: bool = False
    is_on_front: bool = False


def candidates_of(
    question: Question, gathered: Sequence[PointSamples], constraints: Constraints
) -> tuple[Candidate, ...]:
    """One for each point that has the values asked for, in the order given.

    Raises:
        RayparError: no point has them.
    """
    analysed = analyse_points(question, gathered)
    kept = [(g, a) for g, a in zip(gathered, analysed, strict=True) if has_values(g, constraints.only)]
    if not kept:
        raise _no_such_point(gathered, constraints.only)
    found = [_candidate(question, constraints, g, a) for g, a in kept]
    return _with_front(_without_worse(found, [g for g, _ in kept], question, constraints), question)


def _candidate(
    question: Question, constraints: Constraints, samples: PointSamples, analysed: PointAnalysis
) -> Candidate:
    to_target = time_to_target(samples, constraints.target, constraints.start) if constraints.target else None
    energy_j = analysed.energy_j
    if to_target is None:
        times, time_s = analysed.times, analysed.time_s
    else:
        times, time_s = to_target.times, to_target.time_s
        if energy_j is not None:
            energy_j = energy_to(samples, times) if constraints.start is Start.FIRST_STEP else None
    nodes = num_nodes(samples)
    found = Candidate(
        samples.point,
        samples.num_workers,
        nodes,
        times,
        time_s,
        analysed.metric,
        analysed.efficiency,
        cost_of(time_s, nodes, question.price_per_node_hour),
        to_target,
        energy_j,
    )
    return _judged(question, constraints, samples, found)


def _judged(question: Question, constraints: Constraints, samples: PointSamples, found: Candidate) -> Candidate:
    """With the first reason why it can't be chosen, if there is one."""
    if found.to_target is not None and not found.to_target.is_always_reached:
        return replace(found, exclusion=_why_not_reached(found.to_target))
    if found.time_s is None:
        return replace(found, exclusion=_why_no_time(samples))
    # Whether less is asked for, the limit, what it is of, the quantity.
    limits: tuple[tuple[float, float | None, str, Estimate | None], ...] = (
        (-1, constraints.max_time_s, "time", found.time_s),
        (-1, constraints.max_cost, "cost", found.cost),
        (-1, constraints.max_energy_j, "energy", found.energy_j),
        (1, constraints.min_efficiency, "efficiency", found.efficiency),
        (gain(question.mode, 1), constraints.min_metric, question.metric, found.metric),
    )
    for side, limit, name, quantity in limits:
        if limit is None:
            continue
        if quantity is None:
            return replace(found, exclusion=f"{name} unknown")
        if (quantity.value - limit) * side < 0:
            is_close = quantity.low is not None and not quantity.excludes(limit)
            return replace(found, exclusion=_limit_told(name, side, limit), is_close_call=is_close)
    return found


def _limit_told(name: str, side: float, limit: float) -> str:
    if name == "time":
        return f"longer than {units.seconds(limit)}"
    if name == "efficiency":
        return f"efficiency below {units.percent(limit)}"
    if name == "energy":
        return f"energy above {units.energy(limit)}"
    shown = f"{limit:g}" if name == "cost" else units.score(name, limit)
    return f"{name} {'below' if side > 0 else 'above'} {shown}"


def _why_not_reached(found: PointToTarget) -> str:
    fates = {fate: found.num_in(fate) for fate in TargetStatus}
    counted = len(found.trials) - fates[TargetStatus.FAILED]
    if not found.trials:
        return "not run yet"
    if not counted:
        return "failed"
    if fates[TargetStatus.UNKNOWN]:
        return "time to the target unknown"
    return (
        "target not reached"
        if not fates[TargetStatus.REACHED]
        else f"reached by {fates[TargetStatus.REACHED]} of {counted}"
    )


def _why_no_time(samples: PointSamples) -> str:
    if samples.num_in(TrialState.FAILED):
        return "failed"
    return "no time known" if samples.results else "not run yet"


def _without_worse(
    candidates: Sequence[Candidate], gathered: Sequence[PointSamples], question: Question, constraints: Constraints
) -> tuple[Candidate, ...]:
    """Without a target: those out whose metric can be told from the best one."""
    name, rank = question.metric, partial(gain, question.mode)
    both = list(zip(candidates, gathered, strict=True))
    scored = [(g, c.metric.value) for c, g in both if c.metric and not c.exclusion]
    if constraints.target is not None or not scored:
        return tuple(candidates)
    best, best_value = max(scored, key=lambda entry: rank(entry[1]))
    found = []
    for c, g in both:
        if c.exclusion:
            found.append(c)
        elif c.metric is None:
            found.append(replace(c, exclusion=f"{name} unknown"))
        elif rank(best_value - c.metric.value) <= MIN_METRIC_DIFFERENCE * abs(best_value):
            found.append(c)
        elif len(changes := differences(g, best)) < 2:
            found.append(replace(c, exclusion=f"{name} worse than the best", is_close_call=True))
        elif median_estimate(changes, log_scale=False).excludes(0.0):
            found.append(replace(c, exclusion=f"{name} worse than the best"))
        else:
            found.append(c)
    return tuple(found)


def _with_front(candidates: Sequence[Candidate], question: Question) -> tuple[Candidate, ...]:
    """Those that miss the target are neither on the front nor do they beat others."""
    kept = [c for c in candidates if not _misses_target(c)]
    front = {point_key(kept[i].point) for i in front_of(kept, question.mode)}
    return tuple(replace(c, is_on_front=point_key(c.point) in front) for c in candidates)


def _misses_target(candidate: Candidate) -> bool:
    return candidate.to_target is not None and not candidate.to_target.is_always_reached


def median_s(candidate: Candidate) -> float:
    """Of its times; infinite where it has none."""
    return candidate.time_s.value if candidate.time_s else math.inf


def has_values(samples: PointSamples, only: Mapping[str, tuple[Value, ...]]) -> bool:
    """Whether a point has one of the values of each of these hyperparameters."""
    chosen = {**samples.config, **samples.point}
    return all(key in chosen and chosen[key] in values for key, values in only.items())


def _no_such_point(gathered: Sequence[PointSamples], only: Mapping[str, tuple[Value, ...]]) -> RayparError:
    known = list(dict.fromkeys(k for g in gathered for k in (*g.point, *g.config)))
    for key, values in only.items():
        wanted = ",".join(map(units.value_of, values))
        if key not in known:
            return RayparError(f"--set {key}={wanted}: no trial has `{key}`", hint=suggest(key, known))
        there = list(dict.fromkeys(units.value_of({**g.config, **g.point}.get(key)) for g in gathered))
        if not any(has_values(g, {key: values}) for g in gathered):
            return RayparError(f"--set {key}={wanted}: no point has it", hint=f"there are: {', '.join(there)}")
    return RayparError("no point has all the values of --set at once", hint="leave one out")
