"""The points that are worth considering: those that no other beats in every respect.

A point is dominated by another one that is at least as good in every respect by its median, and significantly better
in one of them. Points that differ significantly in no respect don't dominate each other, however their medians lie.
The relation has no circles, so there always is a front. Where no point was repeated, as in a search, medians alone
count: then it is the front as known from the literature.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

import numpy as np

from raypar.analysis.settle import time_ratio
from raypar.analysis.stats import Estimate

CanTell: TypeAlias = Callable[[int, int, int], bool]


class Judged(Protocol):
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


def front_of(points: Sequence[Judged], mode: str) -> frozenset[int]:
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

    def can_tell(one: int, other: int, objective: int) -> bool:
        if objective == 0:
            return is_time_apart(timed[one], timed[other])
        return _are_apart(estimates[objective][one], estimates[objective][other])

    is_repeated = any(len(p.times) > 1 for p in timed)
    rows = np.transpose(columns).tolist() if timed else []
    return frozenset(indices[i] for i in pareto_front(rows, can_tell if is_repeated else _always))


def is_time_apart(one: Judged, other: Judged) -> bool:
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


def pareto_front(medians: Sequence[Sequence[float]], can_tell: CanTell = _always) -> tuple[int, ...]:
    """Return the indices of the points on the front, in their order.

    Args:
        medians: ``[point][objective]``, finite; less is better: what is to be large comes with its sign turned.
        can_tell: whether point `one` differs significantly from point `other` in an objective; asked for differing
            medians.
    """
    table = np.asarray(medians, dtype=float)
    front = []
    for i in range(len(table)):
        # Of thousands of points few are as good in all: those alone are looked at one by one, the fastest first.
        beats = np.flatnonzero((table <= table[i]).all(axis=1) & (table < table[i]).any(axis=1))
        ordered = beats[np.argsort(table[beats, 0], kind="stable")]
        if not any(dominates(medians, int(j), i, can_tell) for j in ordered):
            front.append(i)
    return tuple(front)


def dominates(medians: Sequence[Sequence[float]], one: int, other: int, can_tell: CanTell = _always) -> bool:
    """Whether point `one` is at least as good as `other` in all objectives, and significantly better in one."""
    pairs = list(zip(medians[one], medians[other], strict=True))
    if any(first > second for first, second in pairs):
        return False
    return any(first < second and can_tell(one, other, k) for k, (first, second) in enumerate(pairs))
