"""Medians, ratios and their intervals.

What is done, and on whose advice: Hoefler and Belli, "Scientific Benchmarking of Parallel Computing Systems", SC'15.
Times are summarised by medians with an interval that fits the number of samples (rules 5 and 6: don't take normality
for granted); costs are averaged arithmetically and rates harmonically, ratios never (rules 3 and 4).

===========  ==========================================  ===============================================
samples      interval of a median                        interval of a ratio
===========  ==========================================  ===============================================
1            none                                        none
2 to 5       Student t on logs (assumes log-normal)      Student t on the paired log differences
6 or more    order statistics (assumes no distribution)  bootstrap over blocks, percentiles
===========  ==========================================  ===============================================

Below six samples no pair of order statistics encloses the median with 95 % confidence (1 - 2/2^5 = 93.75 %).

Efron, "Bootstrap methods: another look at the jackknife", Annals of Statistics 7(1), 1979.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtr, stdtrit

Floats: TypeAlias = NDArray[np.float64]
Counts: TypeAlias = NDArray[Any]  # unsigned integers

NUM_RESAMPLES = 10_000
BOOTSTRAP_SEED = 20150915
MOST_KEPT = 100  # values in samples whose draws are kept
MOST_DRAWN = 2_000_000  # numbers in memory at a time


def resampled_medians(top: Floats, bottom: Floats, *, paired: bool) -> tuple[Floats, Floats]:
    """Medians of both samples, shape ``(NUM_RESAMPLES,)`` each; pairs are drawn whole.

    The same samples give the same medians.
    """
    if paired:
        top_counts = bottom_counts = _draws(len(top))[0]
    else:
        top_counts, bottom_counts = _draws(len(top), len(bottom))
    return _drawn_medians(top, top_counts), _drawn_medians(bottom, bottom_counts)


def _draws(*sizes: int) -> tuple[Counts, ...]:
    """For samples of these sizes, how often each value is in each resample: ``[value, resample]``.

    A report asks for the same few sizes thousands of times.
    """
    return _kept_draws(sizes) if sum(sizes) <= MOST_KEPT else _drawn(sizes)


@lru_cache(maxsize=16)
def _kept_draws(sizes: tuple[int, ...]) -> tuple[Counts, ...]:
    return _drawn(sizes)


def _drawn(sizes: tuple[int, ...]) -> tuple[Counts, ...]:
    rng = np.random.default_rng(BOOTSTRAP_SEED)
    found = []
    for size in sizes:
        counts = np.empty((size, NUM_RESAMPLES), dtype=np.min_scalar_type(size))
        num_rows = max(1, MOST_DRAWN // size)  # at a time: the stream is the same as of all at once
        for start in range(0, NUM_RESAMPLES, num_rows):
            rows = min(num_rows, NUM_RESAMPLES - start)
            places = rng.integers(size, size=(rows, size)) + size * np.arange(rows)[:, np.newaxis]
            counts[:, start : start + rows] = np.bincount(places.ravel(), minlength=rows * size).reshape(rows, size).T
        found.append(counts)
    return tuple(found)


def _drawn_medians(sample: Floats, counts: Counts) -> Floats:
    """The median of each resample, from how often it holds each value: sorting once is enough for all of them."""
    size = len(sample)
    order = np.argsort(sample)
    reached = np.zeros_like(counts[0])  # how many of the resample's values are at most the i-th smallest of the sample
    low, high = np.zeros_like(reached), np.zeros_like(reached)
    for row in order:
        reached += counts[row]
        low += reached < (size + 1) // 2
        high += reached < size // 2 + 1
    return np.asarray((sample[order[low]] + sample[order[high]]) / 2)


LEVEL = 0.95
MIN_RANKED = 6  # the fewest samples whose extremes enclose the median with 95 % confidence
# Standard error of a median over that of a mean, of many normal samples: sqrt(pi / 2). For few samples it is a little
# less (1.16 for three), so the interval is on the safe side.
MEDIAN_TO_MEAN_ERROR = math.sqrt(math.pi / 2)


class Method(StrEnum):
    """How an interval came about, in words that fit a report."""

    SINGLE = "one sample, no interval"
    T_LOG = "Student t on logarithms, assumes log-normal times"
    T_LINEAR = "Student t, assumes normal values"
    RANKS = "order statistics, assumes no distribution"
    BOOTSTRAP = "bootstrap over blocks, assumes no distribution"
    CENSORED = "order statistics, what was not reached counts as longer"
    REFERENCE = "1 by definition"


@dataclass(frozen=True)
class Estimate:
    """A value with the interval that it is known to lie in.

    Attributes:
        value: the median, or the ratio.
        low: lower bound of the interval; None for a single sample.
        high: upper bound; None together with `low`; infinite where it lies beyond what was seen.
        num_samples: how many samples (or pairs) it rests on.
        level: the confidence that the interval achieves, 0 to 1; None where there is none.
        method: how the interval came about.
    """

    value: float
    low: float | None
    high: float | None
    num_samples: int
    level: float | None
    method: Method

    def excludes(self, other: float) -> bool:
        """Whether `other` lies outside the interval: the two can be told apart. False where there is no interval."""
        return self.low is not None and self.high is not None and not self.low <= other <= self.high

    def scaled(self, factor: float) -> Estimate:
        """The estimate of `factor` (greater than 0) times the quantity."""
        low, high = (None if b is None else b * factor for b in (self.low, self.high))
        return replace(self, value=self.value * factor, low=low, high=high)


def reference(num_samples: int) -> Estimate:
    """The speedup of a baseline against itself: 1."""
    return Estimate(1.0, 1.0, 1.0, num_samples, None, Method.REFERENCE)


def median_estimate(values: Sequence[float], *, log_scale: bool = True) -> Estimate:
    """The median and its interval.

    Args:
        values: at least one finite number; greater than 0 with `log_scale`.
        log_scale: whether fewer than six values are taken as log-normal (times, rates) or as normal (accuracies).

    Raises:
        ValueError: for no values, or such as are not allowed.
    """
    sample = _checked(values, positive=log_scale)
    median, size = float(np.median(sample)), len(sample)
    if size == 1:
        return Estimate(median, None, None, 1, None, Method.SINGLE)
    if size < MIN_RANKED:
        if log_scale:
            half = _t_half_width(np.log(sample))
            low, high = _exp_bounds(math.log(median), half)
            return Estimate(median, min(low, median), max(high, median), size, LEVEL, Method.T_LOG)
        half = _t_half_width(sample)
        return Estimate(median, median - half, median + half, size, LEVEL, Method.T_LINEAR)
    low_rank, high_rank, level = median_ranks(size)
    ordered = np.sort(sample)
    return Estimate(median, float(ordered[low_rank - 1]), float(ordered[high_rank - 1]), size, level, Method.RANKS)


def censored_median_estimate(values: Sequence[float], num_longer: int) -> Estimate | None:
    """The median where some values are only known to be larger than any that was seen.

    Its interval is that of order statistics, for which larger is enough to know; from six values on, its upper bound
    may be infinite. With fewer there is none: how far the censored ones lie out is in no model.

    Args:
        values: those that are known, greater than 0.
        num_longer: how many others there are.

    Returns:
        None where no more than half are known: then the median is not.
    """
    if not num_longer:
        return median_estimate(values) if values else None
    size = len(values) + num_longer
    if 2 * len(values) <= size:
        return None
    ordered = np.append(np.sort(_checked(values, positive=True)), np.full(num_longer, math.inf))
    median = float(np.median(ordered))
    if size < MIN_RANKED:
        return Estimate(median, None, None, size, None, Method.CENSORED)
    low_rank, high_rank, level = median_ranks(size)
    return Estimate(median, float(ordered[low_rank - 1]), float(ordered[high_rank - 1]), size, level, Method.CENSORED)


def median_ranks(num_samples: int, level: float = LEVEL) -> tuple[int, int, float]:
    """Ranks (from 1) of the two order statistics that enclose the median, and the confidence they achieve.

    The count of samples below the median is binomial(n, 1/2), whatever the distribution; the closest symmetric pair
    with at least `level` is taken. (Hoefler and Belli give the normal approximation of the same interval.)

    Raises:
        ValueError: where even the extremes don't reach the level.
    """
    if 1 - 2 * 0.5**num_samples < level:
        raise ValueError(f"{num_samples} samples enclose their median with less than {level:.0%} confidence")
    low = 1
    while low < num_samples // 2 and 1 - 2 * float(bdtr(low, num_samples, 0.5)) >= level:
        low += 1
    return low, num_samples + 1 - low, 1 - 2 * float(bdtr(low - 1, num_samples, 0.5))


def ratio_estimate(numerators: Sequence[float], denominators: Sequence[float], *, paired: bool = True) -> Estimate:
    """How many times as large the numerators are, in the median, and the interval of that ratio.

    Paired, the i-th of both come from one block, and what disturbed the block cancels. With six pairs or more the
    value is the ratio of the medians; with fewer it is the median of the pairs' log ratios, taken back from the logs.

    Args:
        numerators: finite numbers greater than 0.
        denominators: the same; as many where `paired`.
        paired: whether they come in pairs.

    Raises:
        ValueError: for no values, such as are not allowed, or pairs that lack a partner.
    """
    top, bottom = _checked(numerators, positive=True), _checked(denominators, positive=True)
    if paired and len(top) != len(bottom):
        raise ValueError(f"{len(top)} numerators don't pair with {len(bottom)} denominators")
    size = min(len(top), len(bottom))
    medians_ratio = float(np.median(top) / np.median(bottom))
    if size == 1:
        return Estimate(medians_ratio, None, None, 1, None, Method.SINGLE)
    if size >= MIN_RANKED:
        low, high = _bootstrap_bounds(top, bottom, paired=paired)
        # Percentiles of few, skewed resamples may miss the value itself: an interval that does would mislead.
        return Estimate(medians_ratio, min(low, medians_ratio), max(high, medians_ratio), size, LEVEL, Method.BOOTSTRAP)
    if paired:
        differences = np.log(top) - np.log(bottom)
        centre, half = float(np.median(differences)), _t_half_width(differences)
    else:
        centre, half = math.log(medians_ratio), _welch_half_width(np.log(top), np.log(bottom))
    value = math.exp(centre)
    low, high = _exp_bounds(centre, half)
    return Estimate(value, min(low, value), max(high, value), size, LEVEL, Method.T_LOG)


def difference_estimate(first: Estimate, second: Estimate) -> Estimate:
    """`second` minus `first`, of independent samples, each with its own interval.

    The bounds are recovered from those of the two (MOVER): G. Y. Zou and A. Donner, "Construction of confidence limits
    about effect measures: a general approach", Statistics in Medicine 27 (2008). No interval where either has none.
    """
    value = second.value - first.value
    size = min(first.num_samples, second.num_samples)
    if first.low is None or first.high is None or second.low is None or second.high is None:
        return Estimate(value, None, None, size, None, Method.SINGLE)
    down = math.hypot(second.value - second.low, first.high - first.value)
    up = math.hypot(second.high - second.value, first.value - first.low)
    levels = [e.level for e in (first, second) if e.level is not None]
    method = Method.T_LINEAR if Method.T_LINEAR in (first.method, second.method) else first.method
    return Estimate(value, value - down, value + up, size, min(levels, default=None), method)


def _checked(values: Sequence[float], *, positive: bool) -> NDArray[np.float64]:
    sample = np.asarray(values, dtype=np.float64)
    if sample.ndim != 1 or sample.size == 0:
        raise ValueError("an estimate needs at least one value")
    if not np.all(np.isfinite(sample)) or (positive and not np.all(sample > 0)):
        raise ValueError("an estimate needs finite values" + (" greater than 0" if positive else ""))
    return sample


def _t_half_width(sample: NDArray[np.float64]) -> float:
    """Half the t interval of the median of a normal sample."""
    size = len(sample)
    error = MEDIAN_TO_MEAN_ERROR * float(np.std(sample, ddof=1)) / math.sqrt(size)
    return float(stdtrit(size - 1, (1 + LEVEL) / 2)) * error


def _welch_half_width(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    """Half the t interval of the difference of two medians; degrees of freedom after Welch and Satterthwaite."""
    parts = [float(np.var(s, ddof=1)) / len(s) for s in (first, second)]
    squared_error = sum(parts)
    if squared_error == 0:
        return 0.0
    shares = [part / squared_error for part in parts]  # scaled first: squares of tiny variances underflow
    freedom = 1 / sum(s**2 / (len(x) - 1) for s, x in zip(shares, (first, second), strict=True))
    return float(stdtrit(freedom, (1 + LEVEL) / 2)) * MEDIAN_TO_MEAN_ERROR * math.sqrt(squared_error)


def _exp_bounds(centre: float, half: float) -> tuple[float, float]:
    """Bounds taken back from the log scale; two wild samples may span more than a float does."""
    largest = math.log(float(np.finfo(np.float64).max))
    return math.exp(max(centre - half, -largest)), math.exp(min(centre + half, largest))


def _bootstrap_bounds(top: NDArray[np.float64], bottom: NDArray[np.float64], *, paired: bool) -> tuple[float, float]:
    """Percentile bounds of the ratio of medians; see `resampled_medians`."""
    tops, bottoms = resampled_medians(top, bottom, paired=paired)
    low, high = np.quantile(tops / bottoms, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
