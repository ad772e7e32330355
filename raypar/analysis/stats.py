"""Medians, ratios and their intervals.

After Hoefler and Belli, "Scientific Benchmarking of Parallel Computing Systems", SC'15.
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
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtr, stdtrit

Floats: TypeAlias = NDArray[np.float64]
Counts: TypeAlias = NDArray[Any]  # unsigned integers

NUM_RESAMPLES = 10_000
BOOTSTRAP_SEED = 20150915
MOST_CACHED = 100  # values in samples whose draws are kept in memory
MOST_DRAWN = 2_000_000  # numbers in memory at a time


def resampled_medians(top: Floats, bottom: Floats, *, paired: bool) -> tuple[Floats, Floats]:
    """Return medians of both samples drawn anew, shape ``(NUM_RESAMPLES,)`` each; pairs stay together.

    The same samples give the same medians.
    """
    sizes = (len(top),) if paired else (len(top), len(bottom))
    draws = (_cached_draws if sum(sizes) <= MOST_CACHED else _draws)(*sizes)
    top_counts, bottom_counts = draws[0], draws[-1]
    return _drawn_medians(top, top_counts), _drawn_medians(bottom, bottom_counts)


def _draws(*sizes: int) -> tuple[Counts, ...]:
    """Return how often each value of samples of these sizes is in each resample: ``[value, resample]`` each."""
    rng = np.random.default_rng(BOOTSTRAP_SEED)
    draws = []
    for size in sizes:
        counts = np.empty((size, NUM_RESAMPLES), dtype=np.min_scalar_type(size))
        num_rows = max(1, MOST_DRAWN // size)  # at a time: the stream is the same as of all at once
        for start in range(0, NUM_RESAMPLES, num_rows):
            rows = min(num_rows, NUM_RESAMPLES - start)
            places = rng.integers(size, size=(rows, size)) + size * np.arange(rows)[:, np.newaxis]
            counts[:, start : start + rows] = np.bincount(places.ravel(), minlength=rows * size).reshape(rows, size).T
        draws.append(counts)
    return tuple(draws)


_cached_draws = lru_cache(maxsize=16)(_draws)  # a report needs the same few sizes thousands of times


def _drawn_medians(sample: Floats, counts: Counts) -> Floats:
    """Return the median of each resample from how often it holds each value: sorting once is enough for all."""
    size = len(sample)
    order = np.argsort(sample)
    reached = np.zeros_like(counts[0])  # how many of the resample's values are at most the i-th smallest of the sample
    low, high = np.zeros_like(reached), np.zeros_like(reached)
    for row in order:
        reached += counts[row]
        low += reached < (size + 1) // 2
        high += reached < size // 2 + 1
    return np.asarray((sample[order[low]] + sample[order[high]]) / 2)


def spread_medians(logs: Floats, num_resamples: int, rng: np.random.Generator) -> Floats:
    """Return medians of two repeats or more drawn anew, shape ``(num_resamples,)``.

    The repeats are spread by sqrt(n / (n - 1)) around their mean first: n of them, drawn with replacement, vary that
    much too little.
    """
    size, mean = len(logs), np.mean(logs)
    spread = mean + math.sqrt(size / (size - 1)) * (logs - mean)
    return np.asarray(np.median(spread[rng.integers(size, size=(num_resamples, size))], axis=1))


LEVEL = 0.95
MIN_RANKED = 6  # the fewest samples whose extremes enclose the median with 95 % confidence
# Standard error of a median over that of a mean, of many normal samples: sqrt(pi / 2). For few samples it is a little
# less (1.16 for three), so the interval is on the safe side.
MEDIAN_TO_MEAN_ERROR = math.sqrt(math.pi / 2)


class Method(StrEnum):
    """Method behind an interval, in words that fit a report."""

    SINGLE = "one sample, no interval"
    T_LOG = "Student t on logarithms, assumes log-normal times"
    T_LINEAR = "Student t, assumes normal values"
    RANKS = "order statistics, assumes no distribution"
    BOOTSTRAP = "bootstrap over blocks, assumes no distribution"
    CENSORED = "order statistics, what was not reached counts as longer"
    REFERENCE = "1 by definition"


@dataclass(frozen=True)
class Estimate:
    """A value with its confidence interval.

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
        """Return whether `other` lies outside the interval: a significant difference. False without an interval."""
        return self.low is not None and self.high is not None and not self.low <= other <= self.high

    def scaled(self, factor: float) -> Estimate:
        """Return the estimate of `factor` (greater than 0) times the quantity."""
        low, high = (None if b is None else b * factor for b in (self.low, self.high))
        return replace(self, value=self.value * factor, low=low, high=high)


def reference(num_samples: int) -> Estimate:
    """Return the speedup of a baseline against itself: 1."""
    return Estimate(1.0, 1.0, 1.0, num_samples, None, Method.REFERENCE)


def median_estimate(values: Sequence[float], *, log_scale: bool = True) -> Estimate:
    """Estimate the median.

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
            return _log_estimate(median, _t_half_width(np.log(sample)), size)
        half = _t_half_width(sample)
        return Estimate(median, median - half, median + half, size, LEVEL, Method.T_LINEAR)
    return _ranked_estimate(np.sort(sample), Method.RANKS)


def _ranked_estimate(ordered: Floats, method: Method) -> Estimate:
    low, high, level = median_ranks(len(ordered))
    return Estimate(
        float(np.median(ordered)), float(ordered[low - 1]), float(ordered[high - 1]), len(ordered), level, method
    )


def censored_median_estimate(values: Sequence[float], num_longer: int) -> Estimate | None:
    """Estimate the median where some values are censored: larger than all others, nobody knows by how much.

    Its interval is that of order statistics, which needs no more; from six values on, its upper bound may be infinite.
    With fewer there is none: how far the censored ones lie out is in no model.

    Args:
        values: the observed ones, greater than 0.
        num_longer: how many are censored.

    Returns:
        None where no more than half are observed: then the median is not.
    """
    if not num_longer:
        return median_estimate(values) if values else None
    size = len(values) + num_longer
    if 2 * len(values) <= size:
        return None
    ordered = np.append(np.sort(_checked(values, positive=True)), np.full(num_longer, math.inf))
    if size < MIN_RANKED:
        return Estimate(float(np.median(ordered)), None, None, size, None, Method.CENSORED)
    return _ranked_estimate(ordered, Method.CENSORED)


def median_ranks(num_samples: int, level: float = LEVEL) -> tuple[int, int, float]:
    """Return the ranks (from 1) of the two order statistics that enclose the median, and their confidence.

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
    """Estimate how many times as large the numerators are, in the median.

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
        tops, bottoms = resampled_medians(top, bottom, paired=paired)
        return bootstrap_estimate(medians_ratio, tops / bottoms, size)
    if paired:
        differences = np.log(top) - np.log(bottom)
        return _log_estimate(math.exp(np.median(differences)), _t_half_width(differences), size)
    return _log_estimate(medians_ratio, _welch_half_width(np.log(top), np.log(bottom)), size)


def bootstrap_estimate(value: float, draws: Any, num_samples: int, *, interpolates: bool = True) -> Estimate:
    """Return the value with the percentiles of its bootstrap draws; `interpolates`: False where a draw may be infinite.

    Percentiles of few, skewed resamples may miss the value itself. Such an interval is widened up to it.
    """
    method: Literal["linear", "nearest"] = "linear" if interpolates else "nearest"
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], method=method)
    return Estimate(value, min(float(low), value), max(float(high), value), num_samples, LEVEL, Method.BOOTSTRAP)


def difference_estimate(first: Estimate, second: Estimate) -> Estimate:
    """Estimate `second` minus `first`, of independent samples, each with its own interval.

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


def _checked(values: Sequence[float], *, positive: bool) -> Floats:
    sample = np.asarray(values, dtype=np.float64)
    if sample.ndim != 1 or sample.size == 0:
        raise ValueError("an estimate needs at least one value")
    if not np.all(np.isfinite(sample)) or (positive and not np.all(sample > 0)):
        raise ValueError("an estimate needs finite values" + (" greater than 0" if positive else ""))
    return sample


def _t_half_width(sample: Floats) -> float:
    """Return half the t interval of the median of a normal sample."""
    size = len(sample)
    error = MEDIAN_TO_MEAN_ERROR * float(np.std(sample, ddof=1)) / math.sqrt(size)
    return float(stdtrit(size - 1, (1 + LEVEL) / 2)) * error


def _welch_half_width(first: Floats, second: Floats) -> float:
    """Return half the t interval of the difference of two medians, degrees of freedom after Welch, Satterthwaite."""
    parts = [float(np.var(s, ddof=1)) / len(s) for s in (first, second)]
    squared_error = sum(parts)
    if squared_error == 0:
        return 0.0
    shares = [part / squared_error for part in parts]  # scaled first: squares of tiny variances underflow
    freedom = 1 / sum(s**2 / (len(x) - 1) for s, x in zip(shares, (first, second), strict=True))
    return float(stdtrit(freedom, (1 + LEVEL) / 2)) * MEDIAN_TO_MEAN_ERROR * math.sqrt(squared_error)


def _log_estimate(value: float, half: float, size: int) -> Estimate:
    """Return the t interval taken back from the log scale; two wild samples may span more than a float does."""
    centre, largest = math.log(value), math.log(sys.float_info.max)
    low, high = math.exp(max(centre - half, -largest)), math.exp(min(centre + half, largest))
    return Estimate(value, min(low, value), max(high, value), size, LEVEL, Method.T_LOG)
