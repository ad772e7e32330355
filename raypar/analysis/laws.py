"""Laws of scaling of Amdahl, Gustafson and Gunther, and their fit to rates by worker count.

A law is fitted to the logarithms of the rates, one median per worker count: what is minimized is the relative error,
and the rate of one worker is free, so that a noisy baseline doesn't bend every other point. Rates and
their intervals are explained in `raypar.analysis.scaling`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from operator import itemgetter
from typing import Any

import numpy as np

from raypar.analysis.stats import Estimate, Floats, Method, bootstrap_estimate

EXTRAPOLATED = (2, 4)  # times the largest worker count measured
# A parameter that slows the largest worker count by less than this share is 0: an optimizer never arrives at a bound.
NO_EFFECT = 1e-4
TOLERANCE = 1e-12
DRAW_TOLERANCE = 1e-6  # far below what draws differ by, and in half the time
EXACT = 1e-6  # relative errors below it are rounding


class Scaling(StrEnum):
    """Quantity that grows with the workers."""

    STRONG = "strong"  # nothing: all worker counts do the same work
    WEAK = "weak"  # the work


@dataclass(frozen=True)
class Law:
    """A law of scaling.

    Attributes:
        name: whose it is.
        formula: the speedup over one worker, in plain characters.
        parameters: what its parameters are called; each is at least 0.
        upper: the largest value of each.
        orders: the power of the worker count with which each takes effect.
        speedup: the speedup over one worker of some worker counts, given the parameters.
    """

    name: str
    formula: str
    parameters: tuple[str, ...]
    upper: tuple[float, ...]
    orders: tuple[int, ...]
    speedup: Callable[..., Any]

    @property
    def min_counts(self) -> int:
        """Fewest distinct worker counts: one more than parameters, the rate of one worker included."""
        return len(self.parameters) + 2


# Amdahl, "Validity of the Single Processor Approach", AFIPS 1967: strong scaling.
AMDAHL = Law(
    "Amdahl's law",
    "S = 1 / (f + (1 - f) / N)",
    ("serial fraction f",),
    (1.0,),
    (1,),
    lambda n, f: 1 / (f + (1 - f) / n),
)
# Gustafson, "Reevaluating Amdahl's Law", CACM 31(5), 1988: weak scaling.
GUSTAFSON = Law(
    "Gustafson's law", "S = N - f (N - 1)", ("serial fraction f",), (1.0,), (0,), lambda n, f: n - f * (n - 1)
)
# Gunther, "Guerrilla Capacity Planning", 2007. Its rate of one worker, lambda, is `Fit.rate`.
USL = Law(
    "Gunther's Universal Scalability Law",
    "S = N / (1 + s (N - 1) + k N (N - 1))",
    ("contention s", "coherence k"),
    (1.0, math.inf),
    (1, 2),
    lambda n, s, k: n / (1 + s * (n - 1) + k * n * (n - 1)),
)
LAWS = {Scaling.STRONG: (AMDAHL, USL), Scaling.WEAK: (GUSTAFSON, USL)}


@dataclass(frozen=True)
class Fit:
    """A law with the parameters that fit best. Speedups are over the baseline's worker count, as the law has it.

    Attributes:
        parameters: in the order of the law's; without bounds where there are too few repeats.
        rate: what one worker does in a second, as the law has it.
        residuals: by worker count, the measured rate over the fitted one, minus 1.
        cv_errors: by worker count, how far off the law is at it, fitted to the others alone: abs(log(ratio)).
        extrapolated: speedups that the law predicts for worker counts beyond the measured ones.
        limit: Amdahl's: the speedup that no worker count exceeds; None where the interval of f includes 0.
        peak: Gunther's: the worker count with the highest rate, sqrt((1 - s) / k); None where that of k includes 0.
        peak_speedup: the speedup there.
    """

    law: Law
    parameters: tuple[Estimate, ...]
    rate: Estimate
    residuals: Mapping[int, float]
    cv_errors: Mapping[int, float]
    extrapolated: Mapping[int, Estimate]
    limit: Estimate | None = None
    peak: Estimate | None = None
    peak_speedup: Estimate | None = None

    @property
    def cv_error(self) -> float:
        """Mean of `cv_errors`."""
        return float(np.mean(list(self.cv_errors.values())))


@dataclass(frozen=True)
class Refused:
    """A law that was not fitted, and why."""

    law: Law
    reason: str


def fit_law(law: Law, logs: Mapping[int, Floats], baseline: int, draws: Floats | None) -> Fit | Refused:
    """Fit a law to log rates.

    Args:
        law: which.
        logs: for each worker count, the natural logarithms of its repeats' rates.
        baseline: the worker count that speedups are over.
        draws: rows of medians as `logs` might have had them, for the intervals; None: no intervals.
    """
    counts = np.array(sorted(logs), dtype=np.float64)
    if len(counts) < law.min_counts:
        return Refused(law, f"it takes {law.min_counts} distinct worker counts or more, and there are {len(counts)}")
    medians = np.array([np.median(logs[int(n)]) for n in counts])
    try:
        best = _fitted(law, counts, medians)
        cv_errors = {int(n): _left_out_error(law, counts, medians, i, best[1:]) for i, n in enumerate(counts)}
        rows = (
            None if draws is None else np.array([_fitted(law, counts, row, best[1:], DRAW_TOLERANCE) for row in draws])
        )
    except RuntimeError:
        return Refused(law, "no parameters were found that fit it")
    fitted = best[0] + np.log(law.speedup(counts, *best[1:]))

    def estimated(quantity: Callable[[Floats], Any]) -> Estimate:
        """Estimate a quantity of the fit, a function of log rate and parameters."""
        value = float(quantity(best))
        if rows is None:
            return Estimate(value, None, None, 1, None, Method.SINGLE)
        num_samples = min(map(len, logs.values()))
        return bootstrap_estimate(value, [quantity(row) for row in rows], num_samples, interpolates=False)

    def over_baseline(num_workers: float) -> Callable[[Floats], Any]:
        return lambda row: law.speedup(num_workers, *row[1:]) / law.speedup(baseline, *row[1:])

    parameters = tuple(estimated(itemgetter(1 + i)) for i in range(len(law.parameters)))
    bends = parameters[-1].value > 0 and parameters[-1].low != 0
    peak = estimated(_peak) if law is USL and bends else None
    return Fit(
        law=law,
        parameters=parameters,
        rate=estimated(lambda row: math.exp(row[0])),
        residuals={int(n): float(r) for n, r in zip(counts, np.expm1(medians - fitted), strict=True)},
        cv_errors=cv_errors,
        extrapolated={n: estimated(over_baseline(n)) for n in (factor * int(counts[-1]) for factor in EXTRAPOLATED)},
        limit=estimated(lambda row: _inverse(row[1] * law.speedup(baseline, row[1])))
        if law is AMDAHL and bends
        else None,
        peak=peak,
        peak_speedup=estimated(lambda row: over_baseline(max(1.0, min(_peak(row), 1e9)))(row)) if peak else None,
    )


def better_law(laws: tuple[Fit | Refused, ...]) -> tuple[Law | None, str]:
    """Return the law with the lowest leave-one-out error, or None and why none is better.

    A law is better where the errors differ by more than one standard error of the points' differences
    (the rule of Breiman et al., "Classification and Regression Trees", 1984).
    """
    fits = sorted((law for law in laws if isinstance(law, Fit)), key=lambda fit: fit.cv_error)
    if len(fits) < 2:
        return None, "fewer than two laws could be fitted"
    first, second = (np.maximum(list(fit.cv_errors.values()), EXACT) for fit in fits[:2])
    gaps = second - first
    if not np.mean(gaps) > max(float(np.std(gaps, ddof=1)) / math.sqrt(len(gaps)), EXACT):
        return None, "they predict left-out points about equally well"
    return fits[0].law, ""


def _fitted(
    law: Law, counts: Floats, logs: Floats, start: Floats | None = None, tolerance: float = TOLERANCE
) -> Floats:
    """Return the log rate of one worker and the law's parameters, by least squares of the logs."""
    from scipy.optimize import curve_fit  # here: it takes half a second, and most studies have nothing to fit

    def centred(n: Floats, *parameters: float) -> Floats:
        # The rate of one worker is what is left of the mean: with it taken out, the law alone is fitted.
        shape = np.log(law.speedup(n, *parameters))
        return np.asarray(shape - shape.mean())

    largest = counts[-1]
    upper = np.array(law.upper)
    edge = np.array([1e-3 * NO_EFFECT / largest**order for order in law.orders])
    # Within the bounds: the optimizer crawls where it starts on one.
    first = np.array([0.1 / largest**order for order in law.orders]) if start is None else start
    first = np.clip(first, edge, np.minimum(upper, 1e300) - edge)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the covariance isn't used
        # dogbox arrives at a bound; trf, curve_fit's own choice, stops a little before it.
        parameters, _ = curve_fit(
            centred,
            counts,
            logs - logs.mean(),
            p0=first,
            bounds=(0, upper),
            method="dogbox",
            ftol=tolerance,
            xtol=tolerance,
            gtol=1e-2 * tolerance,
        )
    parameters = np.where(parameters * largest ** np.array(law.orders) < NO_EFFECT, 0.0, parameters)
    return np.array([np.mean(logs - np.log(law.speedup(counts, *parameters))), *parameters])


def _left_out_error(law: Law, counts: Floats, logs: Floats, index: int, start: Floats) -> float:
    row = _fitted(law, np.delete(counts, index), np.delete(logs, index), start)
    return float(abs(logs[index] - row[0] - np.log(law.speedup(counts[index], *row[1:]))))


def _peak(row: Floats) -> float:
    _, contention, coherence = row
    return math.sqrt((1 - contention) / coherence) if coherence > 0 else math.inf


def _inverse(value: float) -> float:
    return 1 / value if value > 0 else math.inf
