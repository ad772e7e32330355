"""Comparisons of points: ratios of their times, differences of their metrics, and the repeats that they still need.

Points are compared block by block (`by_block`). If they trained on different numbers of samples (``drop_last``), rates
are compared instead of times.

A `Family` chooses the intervals of a study's comparisons so that all of them hold at once with 95 % confidence
(Bonferroni). A study that runs until it is settled is evaluated after each block. Each comparison's error is then spent
over these looks (`stats.sequential_errors`), and its interval is that of the look after its number of blocks.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np
from scipy.special import chdtr, ndtri

from raypar.analysis.comparison import METRIC_CHANGE, Comparison
from raypar.analysis.question import MARGIN, PointKey, PointSamples, Question, Sample, point_key, with_baselines
from raypar.analysis.stats import (
    HODGES_LEHMANN_ERROR,
    LEVEL,
    MIN_RANKED,
    NO_PRIOR,
    Estimate,
    Floats,
    VariancePrior,
    exponential,
    independent_shift_estimate,
    ratio_estimate,
    sequential_errors,
    shift_estimate,
    variance_prior,
)
from raypar.study.blocks import MIN_BLOCKS

POWER = 0.8
MAX_REPEATS = 100  # nobody runs more, and the spread of a few repeats can't predict more
# Less than one sample in a million: the rounding error of throughput × time.
SAME_WORK_TOLERANCE = 1e-6
# Parts of the 5 % probability of a false claim: on times, on the metric, and on a trend over the study.
TIME_ERROR, METRIC_ERROR, TREND_ERROR = 0.044, 0.003, 0.003
SECONDARY = 0.25  # weight of explanatory comparisons relative to those that answer the study's question
LAW_ERROR = 0.01  # of an interval of the laws of scaling; a peak is a claim about one of its sides

# Probability that metrics of two points that share only their variance come this close to each other.
ALIKE = 0.005

BATCH_KEYS = ("batch_size", "per_worker_batch_size")

T = TypeVar("T")


def by_block(first: Mapping[int, T], second: Mapping[int, T]) -> tuple[list[T], list[T], bool]:
    """Return the values of both points to compare, given by repeat, and whether they are pairs of one block each.

    They are pairs, unless fewer than two blocks hold both points although each has at least two values.
    """
    both = sorted(first.keys() & second.keys())
    if len(both) > 1 or (both and min(len(first), len(second)) == 1):
        return [first[r] for r in both], [second[r] for r in both], True
    return [first[r] for r in sorted(first)], [second[r] for r in sorted(second)], False


def same_work(first: float | None, second: float | None) -> bool:
    """Return whether two trials trained on the same number of samples; True if unknown."""
    if first is None or second is None:
        return True
    # A stored throughput has few digits, so a difference of less than one sample is rounding, too.
    return abs(first - second) < 1 or math.isclose(first, second, rel_tol=SAME_WORK_TOLERANCE)


def comparable_times(base: PointSamples, other: PointSamples) -> tuple[dict[int, float], dict[int, float]] | None:
    """Return the seconds of both by repeat, per sample if their work differs; None if either has none."""
    works = [[s.num_samples for s in p.samples.values()] for p in (base, other)]
    if all(same_work(b, o) for b in works[0] for o in works[1]):
        of_base, of_other = base.times, other.times
    else:
        rates = base.by_repeat("throughput"), other.by_repeat("throughput")
        of_base, of_other = ({repeat: 1 / rate for repeat, rate in of.items()} for of in rates)
    return (of_base, of_other) if of_base and of_other else None


def trial_speedup(base: Sample, other: Sample) -> float | None:
    """Return the speedup of one trial over another of the same block; None if either has no time."""
    if base.time_s is None or other.time_s is None:
        return None
    if base.throughput is None or other.throughput is None or same_work(base.num_samples, other.num_samples):
        return base.time_s / other.time_s
    return other.throughput / base.throughput


def metric_differences(first: PointSamples, second: PointSamples) -> list[float]:
    """Return the study's metric of `second` minus that of `first`, block by block."""
    of_first, of_second = first.by_repeat("metric"), second.by_repeat("metric")
    return [of_second[r] - of_first[r] for r in sorted(of_first.keys() & of_second.keys())]


def have_equal_metrics(first: PointSamples, second: PointSamples) -> bool:
    """Return whether two points have a common block, and identical metrics in each of these."""
    differences = metric_differences(first, second)
    return bool(differences) and not any(differences)


@dataclass(frozen=True)
class Family:
    """Comparisons of a study's points that all hold at once with 95 % confidence.

    Attributes:
        num_comparisons: maximum number of comparisons of times; one-sided ones count half, secondary ones a quarter.
        num_metric_comparisons: the same for metrics.
        times: variance of the points' log times.
        metrics: variance of their metrics.
        max_blocks: last block after which the results are evaluated; None: they are evaluated once.
    """

    num_comparisons: float = 1.0
    num_metric_comparisons: float = 1.0
    times: VariancePrior = NO_PRIOR
    metrics: VariancePrior = NO_PRIOR
    max_blocks: int | None = None

    def of_all_pairs(self, num_points: int) -> Family:
        """Return the family for comparisons of each point with every other one."""
        least = num_points * (num_points - 1) / 2
        counts = max(self.num_comparisons, least), max(self.num_metric_comparisons, least)
        return replace(self, num_comparisons=counts[0], num_metric_comparisons=counts[1])

    @property
    def secondary(self) -> Family:
        """Family for explanatory comparisons: each has a quarter of the others' error."""
        counts = self.num_comparisons / SECONDARY, self.num_metric_comparisons / SECONDARY
        return replace(self, num_comparisons=counts[0], num_metric_comparisons=counts[1])

    def time_level(self, num_blocks: int) -> float:
        """Return the confidence of each comparison of times over this number of blocks."""
        return self._level(TIME_ERROR / self.num_comparisons, num_blocks)

    def metric_level(self, num_blocks: int) -> float:
        """Return the confidence of each comparison of metrics over this number of blocks."""
        return self._level(METRIC_ERROR / self.num_metric_comparisons, num_blocks)

    def law_level(self, num_groups: int, num_blocks: int) -> float:
        """Return the confidence of the laws' intervals in a report on this number of groups of worker counts."""
        return self._level(LAW_ERROR / max(1, num_groups), num_blocks)

    def bounds_level(self, num_tests: int, num_blocks: int) -> float:
        """Return the confidence of an interval whose bounds serve `num_tests` simultaneous one-sided tests."""
        return self._level(2 * (1 - LEVEL) / max(1, num_tests), num_blocks)

    def _level(self, error: float, num_blocks: int) -> float:
        if self.max_blocks is None:
            return 1 - error
        # Fewer blocks than at the first look use its level, which they hardly ever reach.
        looks = sequential_errors(error, MIN_BLOCKS, self.max_blocks)
        return 1 - looks[min(max(num_blocks, MIN_BLOCKS), self.max_blocks) - MIN_BLOCKS]

    def speedup(self, base: PointSamples, other: PointSamples) -> Estimate | None:
        """Estimate the speedup of `other` over `base`; None if either has no time."""
        sides = comparable_times(base, other)
        return None if sides is None else self.ratio(*sides)

    def ratio(
        self, slow: Mapping[int, float], fast: Mapping[int, float], prior: VariancePrior | None = None
    ) -> Estimate:
        """Estimate how many times as long the first takes as the second: seconds by repeat, at least one each.

        Args:
            prior: of the variances; None: that of single points.
        """
        tops, bottoms, is_paired = by_block(slow, fast)
        if not is_paired:
            level = self.time_level(min(len(tops), len(bottoms)))
            return ratio_estimate(tops, bottoms, paired=False, level=level)
        return self.log_ratio(np.log(tops) - np.log(bottoms), prior)

    def log_ratio(self, differences: Sequence[float] | Floats, prior: VariancePrior | None = None) -> Estimate:
        """Estimate a ratio from differences of log times, block by block."""
        level = self.time_level(len(differences))
        return exponential(shift_estimate(differences, level=level, prior=prior or self.times))

    def metric_change(self, first: PointSamples, second: PointSamples) -> Estimate | None:
        """Estimate the metric of `second` minus that of `first`; None if either has none."""
        return self._metric_gap(first, second, self.metric_level)

    def metric_bounds(self, first: PointSamples, second: PointSamples, num_tests: int = 1) -> Estimate | None:
        """Estimate the same for one-sided tests against a margin.

        Args:
            num_tests: number of such tests that hold at once with 95 % confidence.
        """
        return self._metric_gap(first, second, partial(self.bounds_level, num_tests))

    def _metric_gap(
        self, first: PointSamples, second: PointSamples, level_of: Callable[[int], float]
    ) -> Estimate | None:
        of_first, of_second, is_paired = by_block(first.by_repeat("metric"), second.by_repeat("metric"))
        if not of_first or not of_second:
            return None
        level = level_of(min(len(of_first), len(of_second)))
        if not is_paired:
            return independent_shift_estimate(of_first, of_second, level=level)
        return self.metric_shift([b - a for a, b in zip(of_first, of_second, strict=True)], level)

    def compare_metrics(
        self, first: PointSamples, second: PointSamples, margin: float | None = None, num_tests: int = 1
    ) -> Comparison:
        """Compare the metric of `second` with that of `first`.

        Equivalence is two one-sided tests against the margin (D. J. Schuirmann, Journal of Pharmacokinetics and
        Biopharmaceutics 15, 1987).

        Args:
            margin: of equivalence; None: no test of equivalence.
            num_tests: as in `metric_bounds`.
        """
        bounds = None if margin is None else self.metric_bounds(first, second, num_tests)
        return Comparison(self.metric_change(first, second), METRIC_CHANGE, margin=margin, bounds=bounds)

    def metric_shift(
        self, differences: Sequence[float], level: float | None = None, prior: VariancePrior | None = None
    ) -> Estimate | None:
        """Estimate a difference of metrics from those of each block; None without a block.

        The prior does not apply to points whose training differs only by rounding, such as equal batches on different
        numbers of workers: they vary far less against each other than against other points.

        Args:
            level: of the interval; None: that of simultaneous comparisons.
            prior: of the variances; None: that of single points.
        """
        if not differences:
            return None
        level, prior = level or self.metric_level(len(differences)), prior or self.metrics
        scale = 2 * prior.variance
        if scale and chdtr(len(differences), float(np.sum(np.square(differences))) / scale) < ALIKE:
            prior = NO_PRIOR
        return shift_estimate(differences, level=level, prior=prior)


def against_baseline(question: Question, speedup: Estimate, doubt: str = "") -> Comparison:
    """Return the comparison of a point with its baseline, tested for equivalence only in studies until settled.

    Args:
        doubt: reason why times can't be trusted; empty if they can.
    """
    return Comparison(speedup, margin=question.margin if question.max_repeats is not None else None, doubt=doubt)


def family_of(question: Question, gathered: Sequence[PointSamples]) -> Family:
    """Return the family of a study's comparisons.

    Each point is compared with its baseline, and one-sided with the fastest point; metrics are compared with the best
    one; rules of the learning rate are compared with the best rule. Secondary comparisons are between worker counts
    (unless these are the baseline comparisons), between batch sizes (three each, if trials report during training), and
    between the levels of each hyperparameter (if several are swept).
    """
    timed = [p for p in gathered if p.times]
    scored = [p for p in gathered if p.by_repeat("metric")]
    num_base = sum(
        base is not None and bool(base.times) and not question.is_baseline(p.point)
        for p, base in with_baselines(question, timed)
    )
    num_best = (len(timed) - 1) / 2 if len(timed) > 2 or not num_base else 0.0
    num_scaling = 0 if question.compared_keys() == ("num_workers",) else _num_grouped(timed, "num_workers")
    is_followed = any(len(result.reports) > 1 for p in timed for result in p.results)
    num_batches = 3 * sum(_num_grouped(timed, key) for key in BATCH_KEYS) if is_followed else 0
    levels = [len({point_key({k: p.point.get(k)}) for p in timed}) - 1 for k in question.space_keys]
    num_rules = _num_grouped(timed, "lr_scaling")
    num_effects = sum(levels) if sum(n > 0 for n in levels) > 1 else 0
    return Family(
        max(1.0, num_base + num_best + num_rules + SECONDARY * (num_scaling + num_batches + 2 * num_effects)),
        max(1.0, (len(scored) - 1) / 2 + SECONDARY * (_num_grouped(scored, "num_workers") + num_effects) + num_rules),
        prior_of([{r: math.log(t) for r, t in p.times.items()} for p in timed]),
        prior_of([p.by_repeat("metric") for p in gathered]),
        question.max_repeats,
    )


def _num_grouped(points: Sequence[PointSamples], key: str) -> int:
    """Return the number of comparisons with the base of each group that differs only in this hyperparameter."""
    grouped = [point_key({k: v for k, v in p.point.items() if k != key}) for p in points if key in p.point]
    return len(grouped) - len(set(grouped))


def prior_of(values: Sequence[Mapping[int, float]]) -> VariancePrior:
    """Return the prior of the points' variances from their values by block."""
    points = [each for each in values if each]
    blocks = sorted(set.intersection(*map(set, points))) if points else []
    table = np.array([[each[block] for block in blocks] for each in points]).reshape(len(points), len(blocks))
    return variance_prior(table)


@dataclass(frozen=True)
class WorkerMetric:
    """Metric of a point compared with that of the point with the base number of workers."""

    point: PointSamples
    base: PointSamples
    comparison: Comparison


def worker_metrics(question: Question, points: Sequence[PointSamples], family: Family) -> list[WorkerMetric]:
    """Compare the metrics of points that differ in ``num_workers`` alone: equal batches should make equal models.

    The base is the baseline's number of workers, or else the smallest.
    """
    groups: dict[PointKey, list[PointSamples]] = {}
    for p in points:
        if p.num_workers is not None and p.by_repeat("metric"):
            groups.setdefault(point_key(p.rest), []).append(p)
    compared: list[WorkerMetric] = []
    for group in groups.values():
        asked = question.baseline.get("num_workers")
        base = min(group, key=lambda p: (p.num_workers != asked, p.num_workers or 0))
        margin = question.judged_by.margin(float(np.median(base.all_of("metric"))))
        others = [p for p in group if p is not base]
        each = [(p, family.secondary.compare_metrics(base, p, margin, len(others))) for p in others]
        compared += [WorkerMetric(p, base, comparison) for p, comparison in each if comparison.estimate]
    return compared


def equivalent_metrics(
    question: Question, points: Sequence[PointSamples], family: Family, best: PointSamples
) -> list[PointSamples]:
    """Return the points whose metric is shown to equal that of the best point within the margin.

    Points that differ only in ``num_workers`` are judged as in `worker_metrics`, so that a report doesn't contradict
    itself.
    """
    compared = [each for each in worker_metrics(question, points, family) if each.point.rest == best.rest]
    alike = [each.point for each in compared if each.comparison.is_within_margin]
    alike += [each.base for each in compared[:1] if alike]
    group = [p for each in compared for p in (each.point, each.base)]
    margin, others = question.judged_by.margin(float(np.median(best.searched_metrics))), len(points) - 1
    equivalent = [p for p in points if p is not best and p in alike and best in alike]
    rest = [p for p in points if p is not best and p not in group]
    return equivalent + [p for p in rest if family.compare_metrics(best, p, margin, others).is_within_margin]


def repeats_needed(
    slow: Mapping[int, float],
    fast: Mapping[int, float],
    level: float = LEVEL,
    margin: float = MARGIN,
    least: int = MIN_RANKED,
) -> int | None:
    """Return the approximate number of trials that each of the two needs for an answer; None if no spread is known yet.

    An answer is a ratio whose interval excludes 1, or lies within the `margin`, whichever takes fewer trials.
    """
    tops, bottoms, is_paired = by_block(slow, fast)
    size = min(len(tops), len(bottoms))
    if size < 2:
        return None
    top, bottom = np.log(tops), np.log(bottoms)
    sides = [top - bottom] if is_paired else [top, bottom]
    spread = math.sqrt(sum(float(np.var(side, ddof=1)) for side in sides))
    difference = abs(float(np.median(top) - np.median(bottom)))
    distance = max(difference, math.log1p(margin) - difference)
    return max(_count(spread, distance, (1 + level) / 2), least, size + 1)


def repeats_for_margin(
    best: Mapping[int, float], other: Mapping[int, float], margin: float, level: float = LEVEL
) -> int | None:
    """Return the approximate number of trials of each that show on which side of a margin their metrics' gap lies.

    Args:
        best: metric by repeat, higher is better.
        other: the same of the point that may be worse by the margin.
        margin: negated lower limit of the gap: 0.005 for -0.005.
        level: of the one-sided test.

    Returns:
        None if no spread is known yet.
    """
    of_best, of_other, is_paired = by_block(best, other)
    size = min(len(of_best), len(of_other))
    if size < 2:
        return None
    gaps = np.subtract(of_other, of_best) if is_paired else np.subtract.outer(of_other, of_best)
    sides = [gaps] if is_paired else [of_other, of_best]
    spread = math.sqrt(sum(float(np.var(side, ddof=1)) for side in sides))
    return max(_count(spread, abs(float(np.median(gaps)) + margin), level), size + 1)


def _count(spread: float, distance: float, level: float) -> int:
    """Return the number of samples of a one-sided normal test, ((z(level) + z(80 %)) · sqrt(π/3) · spread /
    distance)²."""
    if distance <= 0:
        return sys.maxsize
    quantiles = float(ndtri(level)) + float(ndtri(POWER))
    return math.ceil(min((quantiles * HODGES_LEHMANN_ERROR * spread / distance) ** 2, sys.maxsize))
