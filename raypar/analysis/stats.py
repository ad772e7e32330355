"""Medians, differences and ratios, and their intervals.

Times are summarised by medians, which assume no distribution (Hoefler and Belli, "Scientific Benchmarking of Parallel
Computing Systems", SC'15). Their intervals come from order statistics. Below six samples, none of these encloses the
median with 95 % confidence (1 - 2/2^5 = 93.75 %), and Student's t on logarithms is used, which assumes log-normal
times. The ratio of paired samples is the exponential of the median of their log differences, so that disturbances
common to a pair cancel.

Simultaneous differences of many points each need more confidence than order statistics of a few samples give
(`shift_estimate`). They are estimated by the median of the pairwise means (Hodges and Lehmann, "Estimates of location
based on rank tests", Annals of Mathematical Statistics 34, 1963), which is nearly as efficient as the mean and robust
to outliers. The t interval's variance borrows from the other points (`VariancePrior`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache, lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import bdtr, digamma, ndtr, polygamma, stdtr, stdtrit

Floats: TypeAlias = NDArray[np.float64]


LEVEL = 0.95
MIN_RANKED = 6  # the fewest samples whose extremes enclose the median with 95 % confidence
# Standard error of the median divided by that of the mean, by number of normal samples (David and Nagaraja, "Order
# Statistics", 2003), and for many samples.
MEDIAN_ERRORS = {2: 1.0, 3: 1.160, 4: 1.092, 5: 1.198}
MEDIAN_ERROR = math.sqrt(math.pi / 2)
HODGES_LEHMANN_ERROR = math.sqrt(math.pi / 3)  # the same for the median of pairwise means


class Method(StrEnum):
    """Method of an interval, in words for a report."""

    SINGLE = "no interval"
    T_LOG = "Student t on logarithms, assumes log-normal times"
    T_LINEAR = "Student t, assumes normal values"
    RANKS = "order statistics, assumes no distribution"
    MODERATED = "Student t, variances moderated over all points"
    PROFILE = "profile likelihood, Student t"
    BOOTSTRAP = "bootstrap over blocks, assumes no distribution"
    CENSORED = "order statistics, what was not reached counts as longer"
    FIELLER = "ratio of means (Fieller), assumes normal means of blocks"
    REFERENCE = "1 by definition"
    PUBLISHED = "Gaussian process over published trainings and the measured worker counts"


@dataclass(frozen=True)
class Estimate:
    """A value with its confidence interval.

    Attributes:
        value: the median, or the ratio.
        low: lower bound of the interval; None for a single sample.
        high: upper bound; None together with `low`; infinite if it lies beyond the observed values.
        num_samples: number of samples, or pairs.
        level: confidence that the interval achieves, 0 to 1; None without an interval.
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

    def mapped(self, function: Callable[[float], float]) -> Estimate:
        """Return the estimate of a monotone function of the quantity."""
        bounds = sorted(function(b) for b in (self.low, self.high) if b is not None)
        low, high = bounds or (None, None)
        return replace(self, value=function(self.value), low=low, high=high)

    def scaled(self, factor: float) -> Estimate:
        """Return the estimate of `factor` times the quantity."""
        return self.mapped(lambda value: value * factor)

    def inverse(self) -> Estimate:
        """Return the estimate of 1 divided by the quantity."""
        return self.mapped(lambda value: 1 / value)


def reference(num_samples: int) -> Estimate:
    """Return the speedup of a baseline against itself: 1."""
    return Estimate(1.0, 1.0, 1.0, num_samples, None, Method.REFERENCE)


def median_estimate(values: Sequence[float], *, log_scale: bool = True, level: float = LEVEL) -> Estimate:
    """Estimate the median.

    Args:
        values: at least one finite number; greater than 0 with `log_scale`.
        log_scale: whether fewer than six values are taken as log-normal (times, rates) or as normal (accuracies).
        level: of the interval. If the extremes of the values don't reach it, the same assumption is made.

    Raises:
        ValueError: there are no values, or invalid ones.
    """
    sample = _checked(values, positive=log_scale)
    median, size = float(np.median(sample)), len(sample)
    if size == 1:
        return Estimate(median, None, None, 1, None, Method.SINGLE)
    if size >= MIN_RANKED and _confidence(1, size) >= level:
        return Estimate(median, *_interpolated_ranks(np.sort(sample), level), size, level, Method.RANKS)
    half = _quantile(size - 1, level) * _median_error(np.log(sample) if log_scale else sample)
    if log_scale:
        return _log_estimate(median, half, size, level)
    return Estimate(median, median - half, median + half, size, level, Method.T_LINEAR)


def _interpolated_ranks(ordered: Floats, level: float) -> tuple[float, float]:
    """Return an interval of the median with exactly this level (Hettmansperger and Sheather, "Confidence intervals
    based on interpolated order statistics", Statistics and Probability Letters 4(2), 1986).
    """
    size, k = len(ordered), 1
    while _confidence(k + 1, size) >= level:
        k += 1
    outer, inner = _confidence(k, size), _confidence(k + 1, size)
    share = (outer - level) / (outer - inner)
    weight = (size - k) * share / (k + (size - 2 * k) * share)
    low = ordered[k - 1] + weight * (ordered[k] - ordered[k - 1])
    high = ordered[size - k] + weight * (ordered[size - k - 1] - ordered[size - k])
    return float(low), float(high)


def _confidence(k: int, size: int) -> float:
    """Return the confidence with which the k-th smallest and k-th largest of `size` samples enclose the median."""
    return 1 - 2 * float(bdtr(k - 1, size, 0.5))


def _median_error(sample: Floats) -> float:
    """Return the standard error of the median of a normal sample."""
    size = len(sample)
    return MEDIAN_ERRORS.get(size, MEDIAN_ERROR) * float(np.std(sample, ddof=1)) / math.sqrt(size)


def _quantile(num_freedom: float, level: float) -> float:
    """Return half the width of Student's t interval, in standard errors."""
    return float(stdtrit(num_freedom, (1 + level) / 2))


def censored_median_estimate(values: Sequence[float], num_longer: int) -> Estimate | None:
    """Estimate the median if some values are censored: larger than all others by an unknown amount.

    The interval comes from order statistics, and its upper bound may be infinite. It needs at least six values.

    Args:
        values: the observed values, greater than 0.
        num_longer: number of censored values.

    Returns:
        None if at most half of the values are observed.
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
    # Not interpolated, because nothing lies half-way to infinity.
    k = max(k for k in range(1, size // 2 + 1) if _confidence(k, size) >= LEVEL)
    low, high = float(ordered[k - 1]), float(ordered[size - k])
    return Estimate(median, low, high, size, _confidence(k, size), Method.CENSORED)


def ratio_estimate(
    numerators: Sequence[float] | Floats,
    denominators: Sequence[float] | Floats,
    *,
    paired: bool = True,
    level: float = LEVEL,
) -> Estimate:
    """Estimate how many times as large the numerators are.

    Args:
        numerators: finite numbers greater than 0.
        denominators: the same.
        paired: whether the i-th values of both come from one block. Otherwise, the ratio is that of the medians.
        level: of the interval.

    Raises:
        ValueError: there are no values, invalid ones, or values without a partner.
    """
    top, bottom = (np.log(_checked(values, positive=True)) for values in (numerators, denominators))
    if not paired:
        return exponential(_unpaired_difference(bottom, top, level))
    if len(top) != len(bottom):
        raise ValueError(f"{len(top)} numerators don't pair with {len(bottom)} denominators")
    return exponential(median_estimate((top - bottom).tolist(), log_scale=False, level=level))


def _unpaired_difference(first: Floats, second: Floats, level: float) -> Estimate:
    """Estimate how much higher the median of the second sample is, from the intervals of both medians.

    Each median's level is the one at which its Student quantile equals that of the difference, which has the degrees of
    freedom of Welch and Satterthwaite. The bounds are recovered from those of the medians (MOVER: G. Y. Zou and A.
    Donner, "Construction of confidence limits about effect measures: a general approach", Statistics in Medicine 27,
    2008).
    """
    sides = [(sample.tolist(), len(sample) - 1) for sample in (first, second)]
    each = [median_estimate(sample, log_scale=False, level=level) for sample, _ in sides]
    widths = [e.high - e.low for e in each if e.low is not None and e.high is not None]
    if len(widths) == 2 and min(widths) > 0:
        squares = [(width / _quantile(n, level)) ** 2 for width, (_, n) in zip(widths, sides, strict=True)]
        num_freedom = sum(squares) ** 2 / sum(s**2 / n for s, (_, n) in zip(squares, sides, strict=True))
        quantile = _quantile(num_freedom, level)
        levels = [2 * float(stdtr(n, quantile)) - 1 for _, n in sides]
        pairs = zip(sides, levels, strict=True)
        each = [median_estimate(side, log_scale=False, level=of_side) for (side, _), of_side in pairs]
    one, other = each
    value, size = other.value - one.value, min(len(first), len(second))
    if one.low is None or one.high is None or other.low is None or other.high is None:
        return Estimate(value, None, None, size, None, Method.SINGLE)
    down = math.hypot(other.value - other.low, one.high - one.value)
    up = math.hypot(other.high - other.value, one.value - one.low)
    method = Method.T_LINEAR if Method.T_LINEAR in (one.method, other.method) else one.method
    return Estimate(value, value - down, value + up, size, level, method)


@dataclass(frozen=True)
class VariancePrior:
    """Variance of a point's samples within blocks, pooled over all points.

    Attributes:
        variance: of one sample.
        num_freedom: degrees of freedom that it adds to each comparison; 0 if the points are too different.
        num_pooled: degrees of freedom of all points together, the upper limit for any comparison.
    """

    variance: float
    num_freedom: float
    num_pooled: int


NO_PRIOR = VariancePrior(0.0, 0.0, 0)


def variance_prior(table: Floats) -> VariancePrior:
    """Return the prior of each point's variance that follows from the variances of all points.

    Empirical Bayes: a point's variance is drawn from a scaled inverse chi-squared distribution, which is fitted to the
    spread of the points' log variances (G. K. Smyth, "Linear models and empirical Bayes methods for assessing
    differential expression in microarray experiments", Statistical Applications in Genetics and Molecular Biology 3(1),
    2004). With very few blocks a noisy point can look like a quiet one, so the prior is limited to (n - 2)² degrees of
    freedom.

    Args:
        table: logarithms of times, or metrics, ``[point, block]``, all finite.
    """
    num_points, size = table.shape
    if num_points < 3 or size < 3:  # two points have only one variance, that of their differences
        return NO_PRIOR
    centred = table - table.mean(axis=1, keepdims=True)
    residuals = centred - np.median(centred, axis=0)
    residuals -= residuals.mean(axis=1, keepdims=True)
    num_each = (size - 1) * (num_points - 1) / num_points
    variances = np.sum(residuals**2, axis=1) / num_each
    return _prior(variances, np.full(num_points, num_each), (size - 2.0) ** 2, (size - 1) * (num_points - 1))


def independent_prior(samples: Sequence[Sequence[float]]) -> VariancePrior:
    """Return the prior of each sample's variance from independent samples that share no blocks.

    It counts no more than a sample's own variance, because a disturbance of a block affects all samples of a study.
    """
    scattered = [sample for sample in samples if len(sample) > 1 and max(sample) > min(sample)]
    sizes = [len(sample) for sample in scattered]
    if len(scattered) < 3 or min(sizes) < 3:
        return NO_PRIOR
    variances = np.array([np.var(sample, ddof=1) for sample in scattered])
    size = min(sizes)
    return _prior(variances, np.array(sizes) - 1.0, min((size - 2.0) ** 2, size - 1.0), sum(sizes) - len(sizes))


def _prior(variances: Floats, num_freedom: Floats, most: float, num_pooled: int) -> VariancePrior:
    """Return the prior from variances with these degrees of freedom, limited to `most` degrees of freedom."""
    if not np.all(variances > 0):
        return NO_PRIOR
    logs = np.log(variances) - digamma(num_freedom / 2) + np.log(num_freedom / 2)
    excess = float(np.var(logs, ddof=1)) - float(np.mean(polygamma(1, num_freedom / 2)))
    most = min(most, num_pooled)
    if excess <= 0:
        return VariancePrior(float(np.average(variances, weights=num_freedom)), most, num_pooled)
    half = float(brentq(lambda x: float(polygamma(1, x)) - excess, 1 / (excess + 1), 1 + 2 / excess, rtol=1e-12))
    variance = math.exp(float(np.mean(logs)) + float(digamma(half)) - math.log(half))
    return VariancePrior(variance, min(2 * half, most), num_pooled)


def prior_of_mean(of_points: VariancePrior, num_blocks: int, num_pairs: int, level: float) -> VariancePrior:
    """Return the prior for the difference of two means over points, from the points' variances.

    The difference varies at most as much as that of two points, and much less if the points' noise is independent. The
    prior is used if it promises the shorter interval.

    Args:
        of_points: of single points.
        num_blocks: of the means.
        num_pairs: points in each mean.
        level: of the interval.
    """
    num_own, num_prior = num_blocks - 1, of_points.num_freedom
    if num_own < 1 or not num_prior:
        return NO_PRIOR
    num_both = num_own + num_prior
    share = (num_prior + num_own / num_pairs) / num_both
    with_prior = _quantile(max(num_own, min(num_both, of_points.num_pooled)), level) * math.sqrt(share)
    return of_points if with_prior < _quantile(num_own, level) / math.sqrt(num_pairs) else NO_PRIOR


def shift_estimate(differences: Sequence[float] | Floats, *, level: float, prior: VariancePrior = NO_PRIOR) -> Estimate:
    """Estimate the shift of one point against another, from their differences block by block.

    Args:
        differences: finite, at least one.
        level: of the interval.
        prior: of the points' variances.
    """
    sample = _checked(differences, positive=False)
    size = len(sample)
    rows, columns = _pairs(size)
    value = float(np.median((sample[rows] + sample[columns]) / 2))
    if size == 1:
        return Estimate(value, None, None, 1, None, Method.SINGLE)
    variance, num_freedom = _moderated(sample, 2 * prior.variance, prior)
    half = _quantile(num_freedom, level) * HODGES_LEHMANN_ERROR * math.sqrt(variance / size)
    return Estimate(value, value - half, value + half, size, level, Method.MODERATED)


def independent_shift_estimate(
    first: Sequence[float],
    second: Sequence[float],
    *,
    level: float,
    priors: tuple[VariancePrior, VariancePrior] = (NO_PRIOR, NO_PRIOR),
) -> Estimate:
    """Estimate the shift of the second of two independent samples against the first.

    It is the median of all differences between their values (Hodges and Lehmann 1963), with Welch's t interval from
    moderated variances. If neither sample has any scatter, a permutation test decides.

    Args:
        first: finite, at least one.
        second: the same.
        level: of the interval.
        priors: of the variances of the first and of the second.
    """
    sides = [_checked(values, positive=False) for values in (first, second)]
    sizes = [len(side) for side in sides]
    value = float(np.median(np.subtract.outer(sides[1], sides[0])))
    if min(sizes) == 1:
        return Estimate(value, None, None, 1, None, Method.SINGLE)
    moderated = [_moderated(side, prior.variance, prior) for side, prior in zip(sides, priors, strict=True)]
    parts = [variance / size for (variance, _), size in zip(moderated, sizes, strict=True)]
    if sum(parts) == 0:
        # Rounded metrics of a few trials are often all equal.
        if value and 2 / math.comb(sum(sizes), sizes[0]) > 1 - level:
            return Estimate(value, None, None, min(sizes), None, Method.SINGLE)
        return Estimate(value, value, value, min(sizes), level, Method.MODERATED)
    shares = [part / sum(parts) for part in parts]
    num_freedom = 1 / sum(share**2 / n for share, (_, n) in zip(shares, moderated, strict=True))
    half = _quantile(num_freedom, level) * HODGES_LEHMANN_ERROR * math.sqrt(sum(parts))
    return Estimate(value, value - half, value + half, min(sizes), level, Method.MODERATED)


def _moderated(sample: Floats, prior_variance: float, prior: VariancePrior) -> tuple[float, float]:
    """Return a sample's variance, shrunk towards that of the prior, and its degrees of freedom."""
    num_own = len(sample) - 1
    num_freedom = num_own + prior.num_freedom
    sampled = float(np.var(sample, ddof=1)) if np.ptp(sample) else 0.0  # the mean of equal values may differ from them
    variance = (prior.num_freedom * prior_variance + num_own * sampled) / num_freedom
    return variance, max(num_own, min(num_freedom, prior.num_pooled))


@cache
def sequential_errors(error: float, first: int, last: int) -> tuple[float, ...]:
    """Return the error of a two-sided test at each look, so that all looks together have the given error.

    There is a look after each sample from the `first` to the `last`. Up to the n-th sample, n / last of the error is
    spent (K. Kim and D. L. DeMets, Biometrika 74, 1987). The bounds follow from the distribution of a sum of normal
    samples that has not crossed any bound so far (P. Armitage, C. K. McPherson and B. C. Rowe, Journal of the Royal
    Statistical Society A 132, 1969). Their levels also apply to t statistics (C. Jennison and B. W. Turnbull, "Group
    Sequential Methods", 2000, 3.8).
    """
    errors: list[float] = []
    # Sums that have not crossed a bound: masses at nodes of the positive half of their symmetric distribution.
    nodes, masses, size_before = np.zeros(1), np.full(1, 0.5), 0
    for size in range(first, last + 1):
        step, spent = math.sqrt(size - size_before), error * (size - size_before) / last
        bound = float(brentq(_log_crossed, 0.0, 40 * math.sqrt(size), args=(spent, step, nodes, masses)))
        errors.append(2 * float(ndtr(-bound / math.sqrt(size))))
        places, weights = _gauss_legendre(32 * math.ceil(4 * bound / 32))
        inside = bound * (1 + places) / 2
        distances = np.subtract.outer(inside, nodes), np.add.outer(inside, nodes)
        density = sum(np.exp(-((d / step) ** 2) / 2) for d in distances) @ masses / (step * math.sqrt(2 * math.pi))
        nodes, masses, size_before = inside, density * weights * bound / 2, size
    return tuple(errors)


_gauss_legendre = cache(np.polynomial.legendre.leggauss)


def _log_crossed(bound: float, spent: float, step: float, nodes: Floats, masses: Floats) -> float:
    """Return log(p / spent), where p is the probability that the sum crosses the bound on either side."""
    crossed = 2 * float(masses @ (ndtr((nodes - bound) / step) + ndtr((-nodes - bound) / step)))
    return math.log(max(crossed, sys.float_info.min) / spent)


@lru_cache(maxsize=4)  # most studies have one number of blocks
def _pairs(size: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the indices of the two samples of each pair, including each sample with itself."""
    return np.triu_indices(size)


def exponential(of_logs: Estimate) -> Estimate:
    """Return the exponential of an estimate of logarithms; two wild samples may exceed the range of a float."""
    largest = math.log(sys.float_info.max)
    method = Method.T_LOG if of_logs.method is Method.T_LINEAR else of_logs.method
    return replace(of_logs.mapped(lambda log: math.exp(min(max(log, -largest), largest))), method=method)


def bootstrap_estimate(value: float, draws: Any, num_samples: int) -> Estimate:
    """Return the value with a percentile interval of its bootstrap draws, widened to include the value itself."""
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(value, min(float(low), value), max(float(high), value), num_samples, LEVEL, Method.BOOTSTRAP)


def _checked(values: Sequence[float] | Floats, *, positive: bool) -> Floats:
    sample = np.asarray(values, dtype=np.float64)
    if sample.ndim != 1 or sample.size == 0:
        raise ValueError("an estimate needs at least one value")
    if not np.all(np.isfinite(sample)) or (positive and not np.all(sample > 0)):
        raise ValueError("an estimate needs finite values" + (" greater than 0" if positive else ""))
    return sample


def _log_estimate(value: float, half: float, size: int, level: float) -> Estimate:
    """Return the t interval converted back from the log scale. It includes the value in spite of rounding."""
    centre = math.log(value)
    back = exponential(Estimate(centre, centre - half, centre + half, size, level, Method.T_LOG))
    assert back.low is not None and back.high is not None
    return replace(back, value=value, low=min(back.low, value), high=max(back.high, value))
