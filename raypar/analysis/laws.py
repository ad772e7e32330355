"""Laws of scaling of Amdahl, Gustafson and Gunther, and their fit to rates by worker count.

Each law is a sum of terms with weights of at least 0, which are fitted to the logarithms of the rates, one median per
worker count. The baseline's rate is fitted too, so that a noisy baseline doesn't shift every other point. Parameters
are relative to the baseline: N is the number of workers divided by the baseline's.

Intervals are those of the profile likelihood (Bates and Watts, "Nonlinear Regression Analysis and Its Applications",
1988, chapter 6), with Welch's t, because worker counts differ in their noise. If a law misses the medians by more than
their noise, its intervals are widened by that factor (the scale factor of the Particle Data Group, "Review of Particle
Physics"). A peak, a limit and extrapolations need repeats, a law that holds, and a parameter interval that excludes 0.
benchmarks/honesty_laws.py simulates how often a peak is claimed that doesn't exist.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np
from scipy.optimize import brentq, nnls
from scipy.special import fdtrc, stdtrit

from raypar.analysis.stats import LEVEL, MEDIAN_ERROR, MEDIAN_ERRORS, Estimate, Floats, Method, exponential, reference

EXTRAPOLATED = (2, 4)  # times the largest worker count measured
EXACT = 1e-6  # relative errors below it are rounding
NO_EFFECT = 1e-4  # a term with a smaller share of every sum counts as 0
MAX_ITERATIONS, MAX_HALVINGS = 50, 20
MAX_LEFT_OUT = 10.0  # error of a law that has no rate at a left-out worker count: exp(10) times too high
TOLERANCE = 1e-6  # relative change of the sum of squares at which the iteration stops
# A law does not hold if it misses the medians by more than noise does in 1 % of cases, and one of them by over 5 %.
MISFIT_ERROR, MISFIT = 0.01, 0.05


class Scaling(StrEnum):
    """Quantity that grows with the workers."""

    STRONG = "strong"  # nothing: all worker counts do the same work
    WEAK = "weak"  # the work


@dataclass(frozen=True)
class Law:
    """A law of scaling.

    Attributes:
        author: its author's name.
        formula: speedup over the baseline, in plain characters.
        parameters: names of its parameters; each is at least 0.
        orders: power of the worker count with which each parameter takes effect.
        speedup: speedup of `n` times the baseline's workers, given the parameters.
        terms: function of each `n`, and of the `n` of one worker, that returns the terms whose weighted sum is the
            time, or the rate with `sums_rates`.
        numerators: function of the `n` of one worker that returns the factors of the weights in the numerator of each
            parameter. The denominator is the sum of the terms for the baseline.
        sums_rates: whether the sum is a rate.
    """

    author: str
    name: str
    formula: str
    parameters: tuple[str, ...]
    orders: tuple[int, ...]
    speedup: Callable[..., Any]
    terms: Callable[[Any, float], tuple[Any, ...]]
    numerators: Callable[[float], tuple[tuple[float, ...], ...]]
    sums_rates: bool = False

    @property
    def min_counts(self) -> int:
        """Fewest distinct worker counts: one more than the parameters, counting the baseline's rate."""
        return len(self.parameters) + 2


# Amdahl, "Validity of the Single Processor Approach", AFIPS 1967: strong scaling.
AMDAHL = Law(
    "Amdahl",
    "Amdahl's law",
    "S = 1 / (f + (1 - f) / N)",
    ("serial fraction f",),
    (1,),
    lambda n, f: 1 / (f + (1 - f) / n),
    lambda n, _: (1 / n, 1 + 0 * n),
    lambda _: ((0.0, 1.0),),
)
# Gustafson, "Reevaluating Amdahl's Law", CACM 31(5), 1988: weak scaling.
GUSTAFSON = Law(
    "Gustafson",
    "Gustafson's law",
    "S = N - f (N - 1)",
    ("serial fraction f",),
    (0,),
    lambda n, f: n - f * (n - 1),
    lambda n, _: (1 + 0 * n, n),
    lambda _: ((1.0, 0.0),),
    sums_rates=True,
)
# Gunther, "Guerrilla Capacity Planning", 2007. A single worker waits for no others, hence n - one.
USL = Law(
    "Gunther",
    "Gunther's Universal Scalability Law",
    "S = N / (1 + s (N - 1) + k N (N - 1))",
    ("contention s", "coherence k"),
    (1, 2),
    lambda n, s, k: n / (1 + s * (n - 1) + k * n * (n - 1)),
    lambda n, one: (1 / n, 1 + 0 * n, n - one),
    lambda one: ((0.0, 1.0, 1 - one), (0.0, 0.0, 1.0)),
)
LAWS = {Scaling.STRONG: (AMDAHL, USL), Scaling.WEAK: (GUSTAFSON, USL)}


@dataclass(frozen=True)
class LogRates:
    """Logarithms of rates by worker count.

    Attributes:
        counts: the worker counts, from the smallest.
        medians: of each count's repeats, up to a common constant.
        weights: the inverse variance of each median, in units of that of a single repeat.
        variances: of a single repeat of each count; empty if a worker count ran only once.
        num_freedom: degrees of freedom of each variance.
        num_samples: the fewest repeats of a worker count.
    """

    counts: Floats
    medians: Floats
    weights: Floats
    variances: Floats
    num_freedom: Floats
    num_samples: int

    def ratio(self, first: int, second: int, level: float) -> Estimate:
        """Estimate the ratio of the second worker count's rate to the first's, with Welch's t."""
        base, value = (float(self.medians[np.searchsorted(self.counts, n)]) for n in (first, second))
        value -= base
        if not len(self.variances):
            return exponential(Estimate(value, None, None, self.num_samples, None, Method.SINGLE))
        variance, quantile = self.welch(np.isin(self.counts, (first, second)) / self.weights, level)
        half = quantile * math.sqrt(max(variance, EXACT**2))
        return exponential(Estimate(value, value - half, value + half, self.num_samples, level, Method.T_LINEAR))

    def welch(self, shares: Floats, level: float) -> tuple[float, float]:
        """Return the variance of a sum, and half its interval in standard errors (Welch and Satterthwaite's t).

        Args:
            shares: share of each count's variance in that of the sum.
            level: of the interval.
        """
        each = shares * self.variances
        total, num_freedom = float(np.sum(each)), float(np.sum(self.num_freedom))
        if total > 0:
            num_freedom = total**2 / float(np.sum(each**2 / self.num_freedom))
        return total, float(stdtrit(num_freedom, (1 + level) / 2))

    def without(self, index: int) -> LogRates:
        """Return the rates without one worker count."""
        counts, medians, weights = (np.delete(v, index) for v in (self.counts, self.medians, self.weights))
        return replace(self, counts=counts, medians=medians, weights=weights)


def log_rates(logs: Mapping[int, Floats], *, are_paired: bool = False) -> LogRates:
    """Summarise the logarithms of each worker count's rates.

    Args:
        logs: of the repeats, at least one of each worker count.
        are_paired: whether the i-th values of all worker counts come from one block; block effects are removed.
    """
    counts = sorted(logs)
    repeats = [np.asarray(logs[n], dtype=np.float64) for n in counts]
    sizes = np.array([len(each) for each in repeats])
    num_freedom, residuals = sizes - 1.0, [each - each.mean() for each in repeats]
    if are_paired and len(counts) > 1:
        table = np.stack(repeats)
        table -= np.median(table, axis=0)
        table -= np.median(table - np.median(table, axis=1, keepdims=True), axis=0)
        repeats = list(table)
        residuals = list(np.stack(residuals) - np.mean(residuals, axis=0))
        num_freedom *= 1 - 1 / len(counts)
    squares = np.array([np.sum(each**2) for each in residuals])
    errors = np.array([1.0 if size == 1 else MEDIAN_ERRORS.get(int(size), MEDIAN_ERROR) for size in sizes])
    return LogRates(
        counts=np.array(counts, dtype=np.float64),
        medians=np.array([np.median(each) for each in repeats]),
        weights=sizes / errors**2,
        variances=squares / num_freedom if np.all(sizes > 1) else np.array([]),
        num_freedom=num_freedom,
        num_samples=int(sizes.min()),
    )


@dataclass(frozen=True)
class Fit:
    """A law with the best-fitting parameters. Everything is relative to the baseline.

    Attributes:
        parameters: in the law's order; without bounds if there are too few repeats.
        residuals: by worker count: measured rate divided by the fitted one, minus 1.
        cv_errors: by worker count: error there of the law fitted to the other counts, abs(log(ratio)).
        misfit_p: probability that noise alone makes the law miss the medians by as much, 0 to 1; 1 without repeats.
        extrapolated: predicted speedups for worker counts beyond the measured ones; none if the law doesn't hold,
            without repeats, or for Gunther's law if the interval of k includes 0.
        limit: Amdahl's: the speedup that no worker count exceeds; None if the interval of f includes 0.
        peak: Gunther's: the worker count with the highest rate; None if the interval of k includes 0.
        peak_speedup: speedup there, for a whole number of workers.
    """

    law: Law
    parameters: tuple[Estimate, ...]
    residuals: Mapping[int, float]
    cv_errors: Mapping[int, float]
    misfit_p: float = 1.0
    extrapolated: Mapping[int, Estimate] = field(default_factory=dict)
    limit: Estimate | None = None
    peak: Estimate | None = None
    peak_speedup: Estimate | None = None

    @property
    def cv_error(self) -> float:
        """Mean of `cv_errors`."""
        return float(np.mean(list(self.cv_errors.values())))

    @property
    def is_bent(self) -> bool:
        """True if the last parameter is significantly above 0."""
        return bool(self.parameters[-1].low)

    @property
    def holds(self) -> bool:
        """True if the law misses the medians by no more than their noise, or only by little."""
        return self.misfit_p >= MISFIT_ERROR or max(map(abs, self.residuals.values())) <= MISFIT


@dataclass(frozen=True)
class Refused:
    """A law that was not fitted, with the reason."""

    law: Law
    reason: str


def fit_law(law: Law, rates: LogRates, baseline: int, level: float = LEVEL) -> Fit | Refused:
    """Fit a law to log rates.

    Args:
        baseline: worker count that speedups and parameters are relative to.
        level: of the intervals.
    """
    if len(rates.counts) < law.min_counts:
        reason = f"it takes {law.min_counts} distinct worker counts or more, and there are {len(rates.counts)}"
        return Refused(law, reason)
    profile = _Profile(law, rates, baseline, level)
    fit = Fit(
        law=law,
        parameters=profile.parameters(),
        residuals={int(n): float(r) for n, r in zip(rates.counts, np.expm1(profile.residuals), strict=True)},
        cv_errors={int(n): _left_out_error(law, rates, baseline, i) for i, n in enumerate(rates.counts)},
        misfit_p=profile.misfit_p(),
    )
    if not fit.holds or not len(rates.variances) or (law is USL and not fit.is_bent):
        return fit
    largest = int(rates.counts[-1])
    fit = replace(fit, extrapolated={n: profile.speedup(n) for n in (factor * largest for factor in EXTRAPOLATED)})
    if law is AMDAHL and fit.is_bent:
        return replace(fit, limit=fit.parameters[0].inverse())
    if law is USL and (peak := profile.peak()).high != math.inf:
        return replace(fit, peak=peak, peak_speedup=profile.speedup(max(1, round(peak.value))))
    return fit


def better_law(laws: tuple[Fit | Refused, ...]) -> Law | None:
    """Return the law that predicts left-out worker counts better; None if none does, or if it does not hold.

    Its errors must be lower by more than one standard error of their differences (Breiman et al., "Classification and
    Regression Trees", 1984), and the laws must differ by more than noise. Gunther's law with k = 0 is Amdahl's, so for
    another law to be better, Gunther's must miss the medians.
    """
    fits = sorted((law for law in laws if isinstance(law, Fit)), key=lambda fit: fit.cv_error)
    if len(fits) < 2:
        return None
    best, other = fits
    if not best.holds or not (best.is_bent if best.law is USL else other.misfit_p < 1 - LEVEL):
        return None
    errors, other_errors = (np.maximum(list(fit.cv_errors.values()), EXACT) for fit in fits)
    gaps = other_errors - errors
    is_better = np.mean(gaps) > max(float(np.std(gaps, ddof=1)) / math.sqrt(len(gaps)), EXACT)
    return best.law if is_better else None


class _Profile:
    """A law fitted to log rates, with intervals of the ratios of two sums of its weights."""

    def __init__(self, law: Law, rates: LogRates, baseline: int, level: float) -> None:
        self._law, self._rates, self._baseline, self._level = law, rates, baseline, level
        self._columns = _terms(law, rates.counts, baseline)
        self._logs = rates.medians if law.sums_rates else -rates.medians
        self._scale = np.sqrt(rates.weights)
        weights, _ = _minimize(self._columns, self._logs, self._scale)
        shares = self._columns * weights / (self._columns @ weights)[:, None]
        self.weights = np.where(shares.max(axis=0) < NO_EFFECT, 0.0, weights)
        fitted = np.log(self._columns @ self.weights)
        self.residuals = (self._logs - fitted) * (1 if law.sums_rates else -1)
        self._least = float(np.sum((self._scale * self.residuals) ** 2))
        self._num_misfit = len(rates.counts) - self._columns.shape[1]

    def misfit_p(self) -> float:
        """Probability that noise alone makes the law miss the medians by as much, from an F test."""
        freedom = self._rates.num_freedom
        if not len(self._rates.variances):
            return 1.0
        variance = float(np.sum(self._rates.variances * freedom) / np.sum(freedom))
        ratio = self._least / self._num_misfit / max(variance, EXACT**2)
        return float(fdtrc(self._num_misfit, float(np.sum(freedom)), ratio))

    def parameters(self) -> tuple[Estimate, ...]:
        """Estimate the law's parameters."""
        below = np.array(self._law.terms(1.0, 1 / self._baseline))
        return tuple(self._ratio(np.array(above), below) for above in self._law.numerators(1 / self._baseline))

    def speedup(self, num_workers: int) -> Estimate:
        """Estimate the speedup that the law predicts."""
        if num_workers == self._baseline:
            return reference(self._rates.num_samples)
        counts = (self._baseline, num_workers)
        base, other = (np.array(self._law.terms(n / self._baseline, 1 / self._baseline)) for n in counts)
        return self._ratio(other, base) if self._law.sums_rates else self._ratio(base, other)

    def peak(self) -> Estimate:
        """Estimate Gunther's peak: the time a / n + b + c (n - 1) is shortest where n² = a / c."""
        square = self._ratio(np.array([1.0, 0.0, 0.0]), np.array([0.0, 0.0, 1.0]))
        return square.mapped(lambda ratio: self._baseline * math.sqrt(ratio))

    def _ratio(self, above: Floats, below: Floats) -> Estimate:
        """Estimate the sum of the weights times `above`, over that times `below`."""
        top, bottom = float(above @ self.weights), float(below @ self.weights)
        value, size = top / bottom if bottom > 0 else math.inf, self._rates.num_samples
        if not len(self._rates.variances):
            return Estimate(value, None, None, size, None, Method.SINGLE)
        allowed = self._allowed(above * bottom - below * top)
        unit = value if 0 < value < math.inf else 1.0
        place = 0.0 if value == 0 else 1.0 if value == math.inf else 0.5  # of the value between 0 and infinity

        def excess(share: float) -> float:
            # The ratio is unit · share / (1 - share), which leaves a cone of weights.
            if share == place:
                return -allowed
            columns = self._columns @ _edges((1 - share) * above - share * unit * below)
            least = _minimize(columns, self._logs, self._scale)[1] if columns.size else math.inf
            return min(least - self._least, 1e9 * allowed) - allowed

        low, high = (
            unit * share / (1 - share) if share < 1 else math.inf
            for share in (_crossing(excess, end, place) for end in (0.0, 1.0))
        )
        return Estimate(value, low, high, size, self._level, Method.PROFILE)

    def _allowed(self, slope: Floats) -> float:
        """Return the excess of the sum of squares over its minimum that the interval of a quantity allows.

        Args:
            slope: of the quantity in the weights, of any length.
        """
        slopes = self._columns / (self._columns @ self.weights)[:, None]
        influence = (slope @ np.linalg.pinv(slopes * self._scale[:, None])) ** 2
        variance, quantile = self._rates.welch(influence / float(np.sum(influence)), self._level)
        return float(quantile**2 * max(variance, self._least / self._num_misfit, EXACT**2))


def _crossing(excess: Callable[[float], float], end: float, inside: float) -> float:
    """Return the root of the excess between `inside`, where it is negative, and `end`; or `end` if there is none."""
    if end == inside or excess(end) <= 0:
        return end
    return float(brentq(excess, end, inside, xtol=1e-5, rtol=1e-3))


def _edges(normal: Floats) -> Floats:
    """Return the edges of the cone of weights of at least 0 at right angles to `normal`, as columns."""
    identity = np.eye(len(normal))
    edges = [identity[i] for i in np.flatnonzero(normal == 0)]
    edges += [
        normal[i] * identity[j] - normal[j] * identity[i]
        for i in np.flatnonzero(normal > 0)
        for j in np.flatnonzero(normal < 0)
    ]
    return np.array(edges).reshape(len(edges), len(normal)).T


def _terms(law: Law, counts: Floats, baseline: int) -> Floats:
    return np.stack(law.terms(counts / baseline, 1 / baseline), axis=1)


def _minimize(columns: Floats, logs: Floats, scale: Floats) -> tuple[Floats, float]:
    """Fit log(columns @ weights) to `logs` by least squares, with weights of at least 0 (Gauss and Newton).

    Returns:
        The weights, and the sum of the squares of `scale` times the residuals; infinite if columns @ weights has a 0.
    """
    centre = float(np.mean(logs))
    target = logs - centre

    def squares(weights: Floats) -> float:
        sums = columns @ weights
        return float(np.sum((scale * (target - np.log(sums))) ** 2)) if np.all(sums > 0) else math.inf

    weights, _ = nnls(columns * (scale / np.exp(target))[:, None], scale)
    if squares(weights) == math.inf and np.all(columns.sum(axis=1) > 0):  # a value that fits badly became 0
        weights = np.full(len(weights), math.exp(float(np.mean(target - np.log(columns.sum(axis=1))))))
    least, progress = squares(weights), math.inf
    for _ in range(MAX_ITERATIONS):
        if least == math.inf or progress <= TOLERANCE * least:
            break
        sums = columns @ weights
        goal, _ = nnls(columns * (scale / sums)[:, None], scale * (1 + target - np.log(sums)))
        # If a law is far off, a whole step may overshoot.
        steps = [0.5**i * (goal - weights) for i in range(MAX_HALVINGS)]
        step = next((step for step in steps if squares(weights + step) < least), None)
        if step is None:
            break
        weights = weights + step
        progress, least = least - squares(weights), squares(weights)
    return weights * math.exp(centre), least


def _left_out_error(law: Law, rates: LogRates, baseline: int, index: int) -> float:
    others = rates.without(index)
    sign = 1 if law.sums_rates else -1
    weights, _ = _minimize(_terms(law, others.counts, baseline), sign * others.medians, np.sqrt(others.weights))
    left_out = float(_terms(law, rates.counts[index : index + 1], baseline)[0] @ weights)
    return abs(sign * float(rates.medians[index]) - math.log(left_out)) if left_out > 0 else MAX_LEFT_OUT
