"""Two points compared: ratio of their times, difference of their metrics, confidence, and the repeats still needed.

Trials of the same block are compared with each other where there are such; else the two are independent samples
(`by_block`). Where two points trained on different numbers of samples (``drop_last``), rates are compared, not times.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

import numpy as np
from scipy.special import ndtri, stdtr

from raypar.analysis.question import PointSamples, Sample
from raypar.analysis.stats import (
    LEVEL,
    MEDIAN_TO_MEAN_ERROR,
    MIN_RANKED,
    NUM_RESAMPLES,
    Estimate,
    Floats,
    median_estimate,
    ratio_estimate,
    resampled_medians,
)

MARGIN = 0.1  # a loss of time that is not worth more trials
POWER = 0.8
# Less than one sample in a million: what rounding may do to throughput × time.
SAME_WORK_TOLERANCE = 1e-6
MIN_METRIC_DIFFERENCE = 1e-3  # of the value: less is below what a report shows

T = TypeVar("T")


class Basis(StrEnum):
    """Method behind a confidence, in words that fit a report."""

    BOOTSTRAP = f"bootstrap over the repeats, {NUM_RESAMPLES:,} resamples"
    STUDENT = "Student t on logarithms, assumes log-normal times"


@dataclass(frozen=True)
class Confidence:
    """Confidence in a claim about two points.

    Attributes:
        share: 0 to 1, of the resamples or of the distribution.
        num_samples: how many pairs, or how many trials of the point that has fewer.
        is_paired: whether trials of the same block were compared.
    """

    share: float
    basis: Basis
    num_samples: int
    is_paired: bool


def by_block(first: Mapping[int, T], second: Mapping[int, T]) -> tuple[list[T], list[T], bool]:
    """Return the values of both to compare, and whether they are pairs.

    Pairs, unless fewer than two blocks hold both and yet each has two values or more.

    Args:
        first: values by repeat; a repeat is a block.
        second: the same of the other point.
    """
    both = sorted(first.keys() & second.keys())
    if len(both) > 1 or (both and min(len(first), len(second)) == 1):
        return [first[r] for r in both], [second[r] for r in both], True
    return [first[r] for r in sorted(first)], [second[r] for r in sorted(second)], False


def same_work(first: float | None, second: float | None) -> bool:
    """Return whether two trials trained on equally many samples; taken as given where that is unknown."""
    if first is None or second is None:
        return True
    # A stored throughput has few digits: less than one sample is rounding, too.
    return abs(first - second) < 1 or math.isclose(first, second, rel_tol=SAME_WORK_TOLERANCE)


def speedup(base: PointSamples, other: PointSamples, *, are_blocks_shared: bool = True) -> Estimate | None:
    """Estimate how many times as fast `other` is as `base`; None where either has no time.

    Args:
        are_blocks_shared: False for points of two studies, whose repeats of one number have nothing in common.
    """
    works = [[s.num_samples for s in p.samples.values()] for p in (base, other)]
    if all(same_work(b, o) for b in works[0] for o in works[1]):
        top, bottom = base.times, other.times
    else:
        top, bottom = other.by_repeat("throughput"), base.by_repeat("throughput")
    if not top or not bottom:
        return None
    if not are_blocks_shared:
        return ratio_estimate(list(top.values()), list(bottom.values()), paired=False)
    return time_ratio(top, bottom)


def trial_speedup(base: Sample, other: Sample) -> float | None:
    """Return how many times as fast one trial is as another of the same block; None where either has no time."""
    if base.time_s is None or other.time_s is None:
        return None
    if base.throughput is None or other.throughput is None or same_work(base.num_samples, other.num_samples):
        return base.time_s / other.time_s
    return other.throughput / base.throughput


def metric_differences(first: PointSamples, second: PointSamples) -> list[float]:
    """Return the study's metric of `second` minus that of `first`, block by block."""
    of_first, of_second = first.by_repeat("metric"), second.by_repeat("metric")
    return [of_second[r] - of_first[r] for r in sorted(of_first.keys() & of_second.keys())]


def metric_change(first: PointSamples, second: PointSamples) -> Estimate | None:
    """Estimate the metric of `second` minus that of `first`; None where no block has both."""
    differences = metric_differences(first, second)
    return median_estimate(differences, log_scale=False) if differences else None


def time_ratio(slow: Mapping[int, float], fast: Mapping[int, float]) -> Estimate:
    """Estimate how many times as long the first takes as the second: seconds by repeat, at least one each."""
    tops, bottoms, is_paired = by_block(slow, fast)
    return ratio_estimate(tops, bottoms, paired=is_paired)


def confidence_of(slow: Mapping[int, float], fast: Mapping[int, float], at_least: float = 1.0) -> Confidence | None:
    """Return the confidence that the first takes more than `at_least` times as long; None with one trial of either."""
    tops, bottoms, is_paired = by_block(slow, fast)
    size = min(len(tops), len(bottoms))
    if size < 2:
        return None
    top, bottom = np.log(tops), np.log(bottoms) + math.log(at_least)
    if size >= MIN_RANKED:
        # Share of resamples in which the first median is larger; equal ones count half.
        signs = np.sign(np.subtract(*resampled_medians(top, bottom, paired=is_paired)))
        return Confidence(float(0.5 + 0.5 * np.mean(signs)), Basis.BOOTSTRAP, size, is_paired)
    centre = float(np.median(top - bottom) if is_paired else np.median(top) - np.median(bottom))
    error = MEDIAN_TO_MEAN_ERROR * _error(top, bottom, is_paired)
    # Degrees of freedom of the smaller group: Welch's are never fewer.
    share = float(stdtr(size - 1, centre / error)) if error > 0 else 0.5 + 0.5 * float(np.sign(centre))
    return Confidence(share, Basis.STUDENT, size, is_paired)


def joint_share(shares: list[float]) -> float:
    """Return the confidence that several claims hold at once, given that of each, whatever their dependence.

    Bonferroni's bound, 1 - sum(1 - share): the least median of many is partly luck. At least what guessing would do.
    """
    return max(1 - sum(1 - share for share in shares), 1 / (len(shares) + 1))


def repeats_needed(slow: Mapping[int, float], fast: Mapping[int, float]) -> int | None:
    """Return about how many trials each of the two needs for an answer; None where no spread is known yet.

    An answer is a ratio whose interval excludes 1, or ends before a difference that matters (`MARGIN`): whichever takes
    fewer trials. The count is that of a normal test of the log ratio with the observed spread,
    n = ((z(97.5 %) + z(80 %)) · sqrt(π/2) · spread / distance)².
    """
    tops, bottoms, is_paired = by_block(slow, fast)
    size = min(len(tops), len(bottoms))
    if size < 2:
        return None
    top, bottom = np.log(tops), np.log(bottoms)
    spread = _error(top, bottom, is_paired) * math.sqrt(size)
    difference = abs(float(np.median(top) - np.median(bottom)))
    distance = max(difference, math.log1p(MARGIN) - difference)
    quantiles = float(ndtri((1 + LEVEL) / 2)) + float(ndtri(POWER))
    return max(math.ceil((quantiles * MEDIAN_TO_MEAN_ERROR * spread / distance) ** 2), MIN_RANKED, size + 1)


def _error(top: Floats, bottom: Floats, is_paired: bool) -> float:
    """Return the standard error of the mean difference."""
    sides = [top - bottom] if is_paired else [top, bottom]
    return math.sqrt(sum(float(np.var(side, ddof=1)) / len(side) for side in sides))
