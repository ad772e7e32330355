"""The best point as long as a study runs, and whether that can be told yet."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raypar.analysis.points import baseline_in, differences, ratio_of
from raypar.analysis.question import PointSamples, Question, collect, point_key, time_metric_of
from raypar.analysis.stats import Estimate, median_estimate
from raypar.study.space import Value
from raypar.study.trial import TrialResult, gain

SPEEDUP = "speedup"


@dataclass(frozen=True)
class SoFar:
    """The best point of those that have finished trials.

    Attributes:
        quantity: ``speedup`` over its baseline, or the study's metric where it names no baseline.
        is_told: a speedup: from 1; a metric: from that of the next best point.
    """

    point: Mapping[str, Value]
    quantity: str
    estimate: Estimate
    is_told: bool


def best_so_far(question: Question, results: Sequence[TrialResult]) -> SoFar | None:
    """The point with the best median; None where nothing can be compared yet.

    Cheap enough to be asked after every trial: only the best point's interval is worked out.
    """
    gathered = collect(question, results, time_metric_of(results))
    return _fastest(question, gathered) if question.baseline else _best(question, gathered)


def _fastest(question: Question, gathered: Sequence[PointSamples]) -> SoFar | None:
    by_key = {point_key(p.point): p for p in gathered}
    compared: list[tuple[float, PointSamples, PointSamples]] = []
    for samples in gathered:
        base = baseline_in(question, by_key, samples)
        if base is not None and not question.is_baseline(samples.point) and (speedup := _rough(base, samples)):
            compared.append((speedup, samples, base))
    if not compared:
        return None
    _, best, base = max(compared, key=lambda entry: entry[0])
    estimate = ratio_of(base, best)
    return SoFar(best.point, SPEEDUP, estimate, estimate.excludes(1.0)) if estimate else None


def _rough(base: PointSamples, other: PointSamples) -> float | None:
    """A median of the ratios of rates (of times, where rates are unknown), without its interval."""
    both = [(base.samples[repeat], sample) for repeat, sample in other.samples.items() if repeat in base.samples]
    rates = [o.throughput / b.throughput for b, o in both if b.throughput and o.throughput]
    times = [b.time_s / o.time_s for b, o in both if b.time_s and o.time_s]
    ratios = rates or times
    return statistics.median(ratios) if ratios else None


def _best(question: Question, gathered: Sequence[PointSamples]) -> SoFar | None:
    scored = [(p, metrics) for p in gathered if (metrics := p.all_of("metric"))]
    ordered = sorted(scored, key=lambda entry: gain(question.mode, statistics.median(entry[1])), reverse=True)
    if len(ordered) < 2:
        return None
    best, metrics = ordered[0]
    gains = differences(ordered[1][0], best)
    is_told = len(gains) > 1 and median_estimate(gains, log_scale=False).excludes(0.0)
    return SoFar(best.point, question.metric, median_estimate(metrics, log_scale=False), is_told)
