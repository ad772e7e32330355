"""Progress of a running study: the leading point so far, and the time that remains."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from raypar.analysis.pairwise import trial_speedup
from raypar.analysis.question import (
    PointKey,
    PointSamples,
    Question,
    point_key,
    point_order,
    point_samples,
    time_metric_for,
    works_of,
)
from raypar.study.script_settings import is_counterfactual
from raypar.study.space import Value
from raypar.study.trial import Placement, TrialResult, TrialSpec, gain, latest

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


class Leader:
    """The leading point of the results so far: that with the best median. Counterfactuals can't lead.

    A further result takes the same time however many there are.
    """

    def __init__(self, question: Question, results: Iterable[TrialResult] = ()) -> None:
        self._question, self._order = question, point_order(question)
        self._works: set[str | None] = set()
        self._results: dict[PointKey, list[TrialResult]] = {}
        self._samples: dict[PointKey, PointSamples] = {}
        self._compared: defaultdict[PointKey, set[PointKey]] = defaultdict(set)  # points of each baseline
        self._scores: dict[PointKey, tuple[float, int]] = {}  # median and number of trials of each that can lead
        for result in results:
            self.add(result)

    def add(self, result: TrialResult) -> None:
        """Take a further result into account."""
        before = time_metric_for(self._works)
        self._works |= works_of([result])
        spec = result.spec
        if is_counterfactual({**spec.config, **spec.point}):
            return
        key = point_key(spec.point)
        self._results.setdefault(key, []).append(result)
        self._compared[self._baseline(key)].add(key)
        metric = time_metric_for(self._works)
        for changed in [key] if metric == before else self._results:
            results = latest(self._results[changed])
            self._samples[changed] = point_samples(self._question, results[0].spec.point, results, metric)
        for each in self._compared[key] | {key} if metric == before else self._results:
            self._score(each)

    @property
    def best(self) -> Interim | None:
        """Return the leading point; None if nothing can be compared yet."""
        scores, question = self._scores, self._question
        if len(scores) < (1 if question.baseline else 2):
            return None
        value = max((value for value, _ in scores.values()), key=lambda value: gain(self._mode, value))
        leading = (key for key, (score, _) in scores.items() if score == value)
        key = min(leading, key=lambda key: self._order(self._samples[key].point))
        num_trials = scores[key][1]
        if not question.baseline:
            return Interim(self._samples[key].point, question.metric, value, num_trials)
        leader = key if value > 1 else self._baseline(key)
        return Interim(self._samples[leader].point, SPEEDUP, max(value, 1.0), num_trials)

    @property
    def _mode(self) -> str:
        return "max" if self._question.baseline else self._question.mode

    def _baseline(self, key: PointKey) -> PointKey:
        """Return the point that a point with results is compared with; itself without a baseline."""
        question = self._question
        return point_key(question.baseline_of(self._results[key][0].spec.point)) if question.baseline else key

    def _score(self, key: PointKey) -> None:
        samples, baseline = self._samples[key], self._baseline(key)
        if not self._question.baseline:
            values = samples.searched_metrics if self._question.is_search else samples.all_of("metric")
        elif baseline == key or (base := self._samples.get(baseline)) is None:
            values = []
        else:
            both = samples.samples.keys() & base.samples.keys()
            values = [r for i in both if (r := trial_speedup(base.samples[i], samples.samples[i])) is not None]
        if values:
            self._scores[key] = (statistics.median(values), len(values))
        else:
            self._scores.pop(key, None)


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
    points = {kind.point for kind in (*queued, *(kind for kind, _ in running))}
    by_point = _medians([(kind.point, seconds) for kind, seconds in ended if kind.point in points])
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
