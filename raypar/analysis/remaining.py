"""How long a study will still take, from what its trials have taken so far."""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from raypar.analysis.question import PointKey, point_key
from raypar.study.trial import Placement, TrialSpec


@dataclass(frozen=True)
class Kind:
    """What tells how long a trial takes; both None for one that a search has still to draw."""

    point: PointKey | None = None
    placement: Placement | None = None


def kind_of(spec: TrialSpec) -> Kind:
    return Kind(point_key(spec.point), spec.placement)


Timed: TypeAlias = tuple[Kind, float]
Key = TypeVar("Key", bound=Hashable)


def remaining_s(
    queued: Sequence[Kind],
    running: Sequence[Timed],
    ended: Sequence[Timed],
    *,
    num_slots: int = 1,
    overheads_s: Sequence[float] = (),
    gang_starts_s: Sequence[float] = (),
    num_gang_starts: int = 0,
) -> float | None:
    """Seconds until the last trial ends; None as long as no trial has ended: nothing tells.

    A trial takes as long as those of its point did in the median; where none has ended, as those on as many workers
    placed alike; else as all.

    Args:
        queued: the trials not started.
        running: those under way, with the seconds since their start.
        ended: those that ended, with the seconds that they took.
        num_slots: how many run side by side.
        overheads_s: measured pauses from a trial's end to the next one's start.
        gang_starts_s: measured starts of gangs.
        num_gang_starts: how many gangs have still to start; they start one after the other.
    """
    if not ended:
        return None
    by_point = _medians([(kind.point, seconds) for kind, seconds in ended])
    by_placement = _medians([(kind.placement, seconds) for kind, seconds in ended])
    of_all = statistics.median(seconds for _, seconds in ended)

    def typical(kind: Kind) -> float:
        if kind.point in by_point:
            return by_point[kind.point]
        return by_placement.get(kind.placement, of_all)

    overhead_s = statistics.median(overheads_s) if overheads_s else 0.0
    rests = [max(0.0, typical(kind) - since_s) for kind, since_s in running]
    rests += [typical(kind) + overhead_s for kind in queued]
    starts_s = num_gang_starts * statistics.median(gang_starts_s) if gang_starts_s else 0.0
    return max(sum(rests) / max(1, num_slots), *rests, 0.0) + starts_s if rests else starts_s


def _medians(timed: Sequence[tuple[Key | None, float]]) -> Mapping[Key | None, float]:
    by_key: dict[Key | None, list[float]] = {}
    for key, seconds in timed:
        if key is not None:
            by_key.setdefault(key, []).append(seconds)
    return {key: statistics.median(times) for key, times in by_key.items()}
