"""Checks of how steady times were: over the study, within its trials, and from trial to trial of a point.

All work on logarithms of times, so that 5 % are 5 % for a short trial and for a long one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from raypar import units
from raypar.analysis.checks_kinds import Check, Evidence, Finding, named
from raypar.analysis.question import PointSamples
from raypar.analysis.stats import LEVEL, MIN_RANKED, median_estimate
from raypar.study.trial import TrialResult, TrialState

MIN_DRIFT = 0.02  # relative change that is worth a word
MIN_PARTS = 4  # reports of a trial, whose ends can be compared
MIN_TRIALS = 3  # with so many reports
MIN_OUTLYING = 0.05  # relative distance that is worth a word
# Iglewicz and Hoaglin, "How to Detect and Handle Outliers", 1993: so many (robust) standard deviations.
OUTLYING_SCALES = 3.5
# The median difference of two normal values over their standard deviation: sqrt(2) · 0.6745.
MEDIAN_DIFFERENCE = 0.9539

Series: TypeAlias = Sequence[tuple[float, float]]  # of one point's trials: start, time; seconds


@dataclass(frozen=True)
class Trend:
    """How trials of the same points became slower or faster as a study went on.

    Attributes:
        change: relative change of the times from the first trial's start to the last one's; 0.08 is 8 % slower.
        tau: Kendall's: of the pairs of a point's trials, the share that became slower less that which became faster.
        p_value: how often trials without a trend show one as strong or stronger.
        num_trials: how many it rests on.
    """

    change: float
    tau: float
    p_value: float
    num_trials: int


@dataclass(frozen=True)
class _Timed:
    """One finished trial: its result, and the logarithm of its time."""

    result: TrialResult
    log_time: float


def trend_of(points: Iterable[Series]) -> Trend | None:
    """The trend of times over start times; None where the trials are so few that no order of them would tell one.

    Trials are compared with others of their own point alone, and the comparisons added up over the points: the
    seasonal Kendall test and slope of Hirsch, Slack and Smith, "Techniques of Trend Analysis for Monthly Water Quality
    Data", Water Resources Research 18(1), 1982, points in the place of seasons; two-sided, normal approximation with
    continuity correction.

    Args:
        points: of each point, its trials' starts and times (greater than 0), in any order.
    """
    score = variance = 0.0
    num_pairs = num_trials = 0
    slopes: list[NDArray[np.float64]] = []
    starts: list[float] = []
    for series in points:
        size = len(series)
        if size < 2:
            continue
        at, log_times = np.asarray([s for s, _ in series]), np.log([t for _, t in series])
        first, second = np.triu_indices(size, 1)
        later, slower = at[second] - at[first], log_times[second] - log_times[first]
        # Ties count 0 and leave the variance as it is: with them the test is on the safe side.
        score += float(np.sum(np.sign(later) * np.sign(slower)))
        variance += size * (size - 1) * (2 * size + 5) / 18
        slopes.append(slower[later != 0] / later[later != 0])
        num_pairs, num_trials = num_pairs + len(first), num_trials + size
        starts += [float(at.min()), float(at.max())]
    if not variance or _p_value(num_pairs, variance) >= 1 - LEVEL or not sum(map(len, slopes)):
        return None
    change = math.expm1(float(np.median(np.concatenate(slopes))) * (max(starts) - min(starts)))
    return Trend(change, score / num_pairs, _p_value(score, variance), num_trials)


def drift_over_study(evidence: Evidence) -> Iterator[Finding]:
    """A trend of the baseline's times, or of all points' where the baseline's are too few to tell.

    Where there is none, five studies in a hundred at most are said to have one (the level of the test).
    """
    question = evidence.question
    every = [(p.point, [(t.result.started_at, math.exp(t.log_time)) for t in of]) for p, of in _timed(evidence)]
    trend, who = trend_of(series for point, series in every if question.is_baseline(point)), "The baseline"
    if trend is None:
        trend, who = trend_of(series for _, series in every), "Trials of the same point"
    if trend is not None and trend.p_value < 1 - LEVEL and abs(trend.change) >= MIN_DRIFT:
        yield Finding(
            Check.DRIFT_OVER_STUDY,
            f"{who} became {_changed(trend.change)} from the study's first trial to its last "
            f"(Kendall's tau {trend.tau:.2f} over {units.counted(trend.num_trials, 'trial')}).",
        )


def drift_in_trials(evidence: Evidence) -> Iterator[Finding]:
    """Steps at the end of trials that take longer than at their beginning: a clock that falls with the temperature."""
    # By the reports' rates, not by step times, which a store doesn't give with its results.
    slowdowns = [change for _, of in _timed(evidence) for t in of if (change := _slowdown(t.result)) is not None]
    if len(slowdowns) < MIN_TRIALS:
        return
    estimate = median_estimate(slowdowns, log_scale=False)
    change = math.expm1(estimate.value)
    if estimate.excludes(0.0) and abs(change) >= MIN_DRIFT:
        yield Finding(
            Check.DRIFT_IN_TRIALS,
            f"Steps became {_changed(change)} from the first third of a trial to its last (median of "
            f"{units.counted(len(slowdowns), 'trial')}).",
        )


def slow_first_trial(evidence: Evidence) -> Iterator[Finding]:
    """The study's first trial took far longer than the others of its point."""
    if (found := _slow_first(evidence)) is not None:
        first, excess = found
        yield Finding(
            Check.SLOW_FIRST_TRIAL,
            f"The study's first trial ({first.spec.label}) took {units.percent(math.expm1(excess))} longer than the "
            "median of its point's others.",
        )


def outliers(evidence: Evidence) -> Iterator[Finding]:
    """Trials far from the median of their point, by what trials of a point differ from each other. None is dropped."""
    groups = [of for _, of in _timed(evidence)]
    pooled = _scale(groups)
    if pooled is None:
        return
    first = _slow_first(evidence)
    found: list[str] = []
    for group in groups:
        if len(group) < 3:
            continue  # of two, neither is the one that is off
        own = _scale([group]) if len(group) >= MIN_RANKED else None
        limit = max(OUTLYING_SCALES * max(pooled, own or 0.0), math.log1p(MIN_OUTLYING))
        median = float(np.median([t.log_time for t in group]))
        for timed in group:
            off = timed.log_time - median
            if abs(off) > limit and not (first and timed.result is first[0]):
                found.append(f"{timed.result.spec.label} ({_changed(math.expm1(off))})")
    if found:
        total = sum(map(len, groups))
        yield Finding(
            Check.OUTLIERS,
            f"Far from the median of their point: {len(found)} of {units.counted(total, 'trial')}: {named(found)}.",
        )


def _timed(evidence: Evidence) -> Iterator[tuple[PointSamples, list[_Timed]]]:
    for samples in evidence.gathered:
        finished = [r for r in samples.results if r.state is TrialState.FINISHED]
        times = {s.identity: s.time_s for s in samples.samples.values()}
        timed = [(r, times.get(r.spec.identity)) for r in finished]
        yield samples, [_Timed(r, math.log(time_s)) for r, time_s in timed if time_s is not None]


def _p_value(score: float, variance: float) -> float:
    return min(1.0, 2 * float(ndtr(-max(0.0, abs(score) - 1) / math.sqrt(variance))))


def _slowdown(result: TrialResult) -> float | None:
    """Logarithm of the time for a sample in the last third of a trial over that in the first; None if too short."""
    rates = [rate for r in result.reports if (rate := r.get("throughput_samples_per_s")) and math.isfinite(rate)]
    if len(rates) < MIN_PARTS or min(rates) <= 0:
        return None
    third = len(rates) // 3
    return math.log(float(np.median(rates[:third])) / float(np.median(rates[-third:])))


def _slow_first(evidence: Evidence) -> tuple[TrialResult, float] | None:
    """The study's first trial and the logarithm of how much longer it took, if that stands out."""
    groups = [of for _, of in _timed(evidence)]
    starts = sorted(t.result.started_at for group in groups for t in group)
    if len(starts) < 3 or starts[0] == starts[1]:
        return None
    group = next(g for g in groups if any(t.result.started_at == starts[0] for t in g))
    first = next(t for t in group if t.result.started_at == starts[0])
    others = [t for t in group if t is not first]
    scale = _scale([others if g is group else g for g in groups])
    if len(others) < 2 or scale is None:
        return None
    excess = first.log_time - float(np.median([t.log_time for t in others]))
    return (first.result, excess) if excess > max(OUTLYING_SCALES * scale, math.log1p(MIN_OUTLYING)) else None


def _scale(groups: Iterable[Sequence[_Timed]]) -> float | None:
    """What trials of one point differ by, as a standard deviation of log times; None without a pair.

    From the median of the pairwise differences, which needs no centre, and so serves points of two trials as well
    (after Rousseeuw and Croux, "Alternatives to the Median Absolute Deviation", JASA 88, 1993).
    """
    differences: list[NDArray[np.float64]] = []
    for group in groups:
        values = np.asarray([t.log_time for t in group])
        first, second = np.triu_indices(len(values), 1)
        differences.append(np.abs(values[first] - values[second]))
    every = np.concatenate(differences) if differences else np.empty(0)
    return float(np.median(every)) / MEDIAN_DIFFERENCE if len(every) else None


def _changed(change: float) -> str:
    return f"{units.percent(abs(change))} {'slower' if change > 0 else 'faster'}"
