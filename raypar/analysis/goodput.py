"""Goodput of batch sizes, in two factors: samples per second, and progress per sample.

Goodput is throughput × progress per sample (Qiao et al., Pollux, OSDI 2021). Pollux estimates the progress from the
noise of the gradients. Here it is measured: the number of samples that the base needs to reach the target, divided by
the number that this batch size needs. The base is the baseline's batch size, or else the smallest.

The intervals are simultaneous with those of the study's other comparisons. Only evaluations show that a target is
reached, so intervals of the progress and of the product are wider by half an evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias, TypeVar

import numpy as np

from raypar.analysis.pairwise import BATCH_KEYS, Family, prior_of
from raypar.analysis.question import PointKey, PointSamples, Question, point_key
from raypar.analysis.stats import NO_PRIOR, Estimate, reference
from raypar.analysis.time_to_target import Start, Target, time_to_target
from raypar.study.space import Value
from raypar.study.trial import gain


@dataclass(frozen=True)
class Goodput:
    """One batch size, relative to the base of its group.

    Attributes:
        throughput: samples per second until the target.
        progress: progress per sample.
        goodput: their product.
    """

    batch_size: int
    throughput: Estimate
    progress: Estimate
    goodput: Estimate


@dataclass(frozen=True)
class BatchGroup:
    """Points that differ in their batch size only.

    Attributes:
        key: ``batch_size`` or ``per_worker_batch_size``.
        rest: the other swept hyperparameters, which they share.
        batches: from the smallest.
        base: batch size that others are compared with.
    """

    key: str
    rest: Mapping[str, Value]
    batches: tuple[Goodput, ...]
    base: int


T = TypeVar("T", bound=Hashable)
Run: TypeAlias = tuple[float, float, int]  # until the target: samples, seconds, evaluations


def batch_groups(
    gathered: Sequence[PointSamples], target: Target, family: Family, baseline: Mapping[str, Value] | None = None
) -> tuple[BatchGroup, ...]:
    """Return every group of two or more batch sizes that reached the target in all their trials."""
    groups: dict[tuple[str, PointKey], tuple[dict[str, Value], dict[int, dict[int, Run]]]] = {}
    for samples in gathered:
        key = next((k for k in BATCH_KEYS if k in samples.point), None)
        size = samples.point.get(key) if key else None
        if key is None or not isinstance(size, int) or not (runs := runs_to_target(samples, target)):
            continue
        rest = {k: v for k, v in samples.point.items() if k != key}
        groups.setdefault((key, point_key(rest)), (rest, {}))[1][size] = runs
    return tuple(
        _group(key, rest, dict(sorted(by_size.items())), baseline or {}, family)
        for (key, _), (rest, by_size) in groups.items()
        if len(by_size) > 1
    )


def common_target(question: Question, gathered: Sequence[PointSamples]) -> Target | None:
    """Return the best value of the study's metric that all finished trials of points with a batch size reached."""
    return best_reached(question, [p for p in gathered if any(key in p.point for key in BATCH_KEYS)])


def best_reached(question: Question, points: Sequence[PointSamples]) -> Target | None:
    """Return the best value of the study's metric that all finished trials of these points reached.

    None if a trial reported no value, or if all had reached it at their first report.
    """
    reports = [
        [report[question.metric] for report in result.reports if question.metric in report]
        for samples in points
        for result in samples.measured
    ]
    values = [[v for v in series if math.isfinite(v)] for series in reports]
    if not values or not all(values):
        return None
    rank = partial(gain, question.mode)
    value = min((max(series, key=rank) for series in values), key=rank)
    target = Target(question.metric, value, question.mode, question.unit)
    return None if all(target.is_reached_by(series[0]) for series in values) else target


def runs_to_target(samples: PointSamples, target: Target) -> dict[int, Run]:
    """Return samples, seconds and evaluations until the target by repeat; empty if a trial missed it."""
    reached = time_to_target(samples, target, Start.FIRST_STEP)
    counts, times = reached.samples, reached.times
    if not reached.is_always_reached or counts.keys() != times.keys():
        return {}
    evaluations = {trial.repeat: trial.num_reports for trial in reached.trials}
    return {r: (counts[r], times[r], evaluations[r]) for r in times if counts[r] > 0}


def _group(
    key: str,
    rest: Mapping[str, Value],
    by_size: Mapping[int, Mapping[int, Run]],
    baseline: Mapping[str, Value],
    family: Family,
) -> BatchGroup:
    asked = baseline.get(key)
    base = asked if isinstance(asked, int) and asked in by_size else next(iter(by_size))
    one = reference(len(by_size[base]))
    batches = (
        Goodput(size, one, one, one) if size == base else _goodput(size, runs, by_size[base], family)
        for size, runs in by_size.items()
    )
    return BatchGroup(key, rest, tuple(batches), base)


def _goodput(size: int, runs: Mapping[int, Run], base: Mapping[int, Run], family: Family) -> Goodput:
    def ratio(value: Callable[[Run], float]) -> Estimate:
        slow, fast = ({repeat: value(run) for repeat, run in side.items()} for side in (base, runs))
        return family.secondary.ratio(slow, fast, NO_PRIOR)

    rounding = sum(_rounding([run[2] for run in side.values()]) for side in (base, runs))
    return Goodput(
        size,
        throughput=ratio(lambda run: run[1] / run[0]),
        progress=_widened(ratio(lambda run: run[0]), rounding),
        goodput=_widened(ratio(lambda run: run[1]), rounding),
    )


def needed_ratios(runs: Mapping[T, Mapping[int, Run]], base: T, family: Family) -> dict[T, Estimate]:
    """Estimate how many times as many samples as the base each of the others needs to the target."""
    needed = {key: {repeat: run[0] for repeat, run in of.items()} for key, of in runs.items()}
    prior = prior_of([{repeat: math.log(number) for repeat, number in of.items()} for of in needed.values()])
    evaluations = {key: [run[2] for run in of.values()] for key, of in runs.items()}
    return {
        key: _widened(family.ratio(of, needed[base], prior), _rounding(evaluations[key]) + _rounding(evaluations[base]))
        for key, of in needed.items()
        if key != base
    }


def _rounding(evaluations: Sequence[int]) -> float:
    """Return log(n / (n - 1/2)) for the median number n of evaluations until the target."""
    return -math.log1p(-0.5 / float(np.median(evaluations)))


def _widened(ratio: Estimate, rounding: float) -> Estimate:
    if ratio.low is None or ratio.high is None:
        return ratio
    return replace(ratio, low=ratio.low * math.exp(-rounding), high=ratio.high * math.exp(rounding))
