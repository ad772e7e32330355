"""Progress of a running study: the leading point so far, and the time that remains."""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TypeAlias, TypeVar

from raypar.analysis.pairwise import trial_speedup
from raypar.analysis.question import (
    PointKey,
    PointSamples,
    Question,
    collect,
    point_key,
    time_metric_of,
    with_baselines,
)
from raypar.study.script_settings import is_counterfactual
from raypar.study.space import Value
from raypar.study.trial import Placement, TrialResult, TrialSpec, gain

SPEEDUP = "speedup"


@dataclass(frozen=True)
class Interim:
    """The leading point so far. It has no interval, because a look after every trial would invalidate one.

    Attributes:
        quantity: ``speedup`` over its baseline, or the study's metric if it has no baseline.
        value: its median; 1 for a baseline that no point beats.
        num_trials: number of trials behind the value.
    """

    point: Mapping[str, Value]
    quantity: str
    value: float
    num_trials: int


def interim_best(question: Question, results: Sequence[TrialResult]) -> Interim | None:
    """Return the point with the best median; None if nothing can be compared yet. Counterfactuals can't lead."""
    gathered = [p for p in collect(question, results, time_metric_of(results)) if not is_counterfactual(p.values)]
    return _fastest(question, gathered) if question.baseline else _best(question, gathered)


def _fastest(question: Question, gathered: Sequence[PointSamples]) -> Interim | None:
    compared: list[tuple[float, int, PointSamples, PointSamples]] = []
    for samples, base in with_baselines(question, gathered):
        if base is None or question.is_baseline(samples.point):
            continue
        both = samples.samples.keys() & base.samples.keys()
        ratios = [r for i in both if (r := trial_speedup(base.samples[i], samples.samples[i])) is not None]
        if ratios:
            compared.append((statistics.median(ratios), len(ratios), samples, base))
    if not compared:
        return None
    value, num_trials, best, base = max(compared, key=itemgetter(0))
    leading, speedup = (best, value) if value > 1 else (base, 1.0)
    return Interim(leading.point, SPEEDUP, speedup, num_trials)


def _best(question: Question, gathered: Sequence[PointSamples]) -> Interim | None:
    scored = [(statistics.median(metrics), len(metrics), p) for p in gathered if (metrics := p.all_of("metric"))]
    if len(scored) < 2:
        return None
    value, num_trials, best = max(scored, key=lambda entry: gain(question.mode, entry[0]))
    return Interim(best.point, question.metric, value, num_trials)


@dataclass(frozen=True)
class TrialKind:
    """Key to the expected time of a trial; both are None for one that a search has not drawn yet."""

    point: PointKey | None = None
    placement: Placement | None = None


def trial_kind(spec: TrialSpec) -> TrialKind:
    return TrialKind(point_key(spec.point), spec.placement)


TrialTime: TypeAlias = tuple[TrialKind, float]
Key = TypeVar("Key", bound=Hashable)


def remaining_s(
    queued: Sequence[TrialKind],
    running: Sequence[TrialTime],
    ended: Sequence[TrialTime],
    *,
    num_slots: int = 1,
    overheads_s: Sequence[float] = (),
    gang_starts_s: Sequence[float] = (),
    num_gang_starts: int = 0,
) -> float | None:
    """Estimate the seconds until the last trial ends; None as long as no trial has ended.

    A trial is expected to take the median of its point's trials, or else of the trials with its placement, or else of
    all. A trial that is late by x seconds is expected to take x more.

    Args:
        queued: trials that have not started.
        running: running trials, with the seconds since their start.
        ended: ended trials, with the seconds that they took.
        num_slots: number of trials that run at the same time.
        overheads_s: measured times from a trial's end to the next one's start.
        gang_starts_s: measured start times of gangs.
        num_gang_starts: number of gangs that have yet to start, one after another.
    """
    if not ended:
        return None
    by_point = _medians([(kind.point, seconds) for kind, seconds in ended])
    by_placement = _medians([(kind.placement, seconds) for kind, seconds in ended])
    of_all = statistics.median(seconds for _, seconds in ended)

    def typical(kind: TrialKind) -> float:
        if kind.point in by_point:
            return by_point[kind.point]
        return by_placement.get(kind.placement, of_all)

    overhead_s = statistics.median(overheads_s) if overheads_s else 0.0
    rests = [abs(typical(kind) - since_s) for kind, since_s in running]
    rests += [typical(kind) + overhead_s for kind in queued]
    starts_s = num_gang_starts * statistics.median(gang_starts_s) if gang_starts_s else 0.0
    return max(sum(rests) / max(1, num_slots), *rests, 0.0) + starts_s if rests else starts_s


def _medians(timed: Sequence[tuple[Key | None, float]]) -> Mapping[Key | None, float]:
    by_key: dict[Key | None, list[float]] = {}
    for key, seconds in timed:
        if key is not None:
            by_key.setdefault(key, []).append(seconds)
    return {key: statistics.median(times) for key, times in by_key.items()}
