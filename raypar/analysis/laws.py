"""How a training scales with its workers: speedups, and the laws of Amdahl, Gustafson and Gunther fitted to them.

Speedup S(N) is the rate of N workers over that of N0, the baseline; parallel efficiency is S(N) · N0 / N. In strong
scaling every worker count does the same work, so that rates are 1 / time; in weak scaling N workers do N times the
work of one, so that rates are N / time. A throughput is a rate as it stands.

A law is fitted to the logarithms of the rates, one median per worker count: what is made small is the relative error,
and the rate of one worker is free, so that a noisy baseline doesn't bend every other point. Intervals are percentiles
of a bootstrap over the repeats of each worker count (Efron 1979). The repeats are spread by sqrt(n / (n - 1)) around
their mean first: n of them, drawn with replacement, vary that much too little. Simulated with 3 % noise and six
worker counts, intervals hold the truth in about 95 % of cases from three repeats on, with two in about 80 %.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from operator import itemgetter
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import curve_fit

from raypar.analysis.stats import LEVEL, Estimate, Method, median_estimate, ratio_estimate, reference
from raypar.analysis.table import Quantity, Runs
from raypar.errors import RayparError

NUM_RESAMPLES = 1000
BOOTSTRAP_SEED = 19670418
EXTRAPOLATED = (2, 4)  # times the largest worker count measured
# What slows the largest worker count by less than this share is 0: an optimizer never quite arrives at a bound.
NO_EFFECT = 1e-4
TOLERANCES = {"ftol": 1e-12, "xtol": 1e-12, "gtol": 1e-14}
EXACT = 1e-6  # relative errors below it are rounding, and tell no law from another

Floats: TypeAlias = NDArray[np.float64]


class Scaling(StrEnum):
    """What grows with the workers."""

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
        min_counts: the fewest distinct worker counts: one more than it has parameters, the rate of one worker included.
        speedup: the speedup over one worker of some worker counts, given the parameters.
    """

    name: str
    formula: str
    parameters: tuple[str, ...]
    upper: tuple[float, ...]
    orders: tuple[int, ...]
    min_counts: int
    speedup: Callable[..., Any]


# Amdahl, "Validity of the Single Processor Approach", AFIPS 1967: strong scaling.
AMDAHL = Law(
    "Amdahl's law",
    "S = 1 / (f + (1 - f) / N)",
    ("serial fraction f",),
    (1.0,),
    (1,),
    3,
    lambda n, f: 1 / (f + (1 - f) / n),
)
# Gustafson, "Reevaluating Amdahl's Law", CACM 31(5), 1988: weak scaling.
GUSTAFSON = Law(
    "Gustafson's law", "S = N - f (N - 1)", ("serial fraction f",), (1.0,), (0,), 3, lambda n, f: n - f * (n - 1)
)
# Gunther, "Guerrilla Capacity Planning", 2007. Its rate of one worker, lambda, is `Fit.rate`.
USL = Law(
    "Gunther's Universal Scalability Law",
    "S = N / (1 + s (N - 1) + k N (N - 1))",
    ("contention s", "coherence k"),
    (1.0, math.inf),
    (1, 2),
    4,
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
        left_out: by worker count, how far off the law is at it, fitted to the others alone: abs(log(ratio)).
        extrapolated: speedups that the law predicts for worker counts beyond the measured ones.
        limit: Amdahl's: the speedup that no worker count exceeds; None where f can't be told from 0.
        peak: Gunther's: the worker count with the highest rate, sqrt((1 - s) / k); None where k can't be told from 0.
        peak_speedup: the speedup there.
    """

    law: Law
    parameters: tuple[Estimate, ...]
    rate: Estimate
    residuals: Mapping[int, float]
    left_out: Mapping[int, float]
    extrapolated: Mapping[int, Estimate]
    limit: Estimate | None = None
    peak: Estimate | None = None
    peak_speedup: Estimate | None = None

    @property
    def left_out_error(self) -> float:
        """The mean of `left_out`."""
        return float(np.mean(list(self.left_out.values())))


@dataclass(frozen=True)
class Refused:
    """A law that was not fitted, and why."""

    law: Law
    reason: str


@dataclass(frozen=True)
class ScalingPoint:
    """The numbers of one worker count; `karp_flatt` is None for the baseline, which shows no serial fraction."""

    num_workers: int
    measured: Estimate
    speedup: Estimate
    efficiency: Estimate
    karp_flatt: float | None


@dataclass(frozen=True)
class ScalingAnalysis:
    """What some runs say about scaling.

    Attributes:
        baseline: the worker count that speedups are over.
        points: one for each worker count, from the smallest.
        laws: those of this way to scale, fitted or refused.
        better: the law that predicts left-out points better; None where that can't be told.
        why_no_better: what keeps it from being told.
        why_no_interval: what keeps the laws' parameters from having intervals; empty where they have them.
    """

    scaling: Scaling
    quantity: Quantity
    baseline: int
    points: tuple[ScalingPoint, ...]
    laws: tuple[Fit | Refused, ...]
    better: Law | None
    why_no_better: str
    why_no_interval: str


def analyse_scaling(
    runs: Runs,
    scaling: Scaling = Scaling.STRONG,
    baseline: int | None = None,
    *,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = BOOTSTRAP_SEED,
) -> ScalingAnalysis:
    """Speedups, and the laws that hold for this way to scale. The same runs and seed give the same numbers.

    Args:
        runs: what was measured.
        scaling: what grows with the workers.
        baseline: the worker count to compare with; None: the smallest.
        num_resamples: how often the repeats are drawn for an interval.
        seed: of the draws.

    Raises:
        RayparError: there are no runs, or none of the baseline.
    """
    counts = sorted(runs.values)
    if not counts:
        raise RayparError("no runs to look at", hint="give the times of two worker counts or more")
    base = counts[0] if baseline is None else baseline
    if base not in runs.values:
        known = ", ".join(map(str, counts))
        raise RayparError(f"no run with {base} workers to compare with", hint=f"worker counts that have runs: {known}")
    single = [n for n in counts if len(runs.values[n]) < 2]
    logs = {n: _log_rates(runs, scaling, n) for n in counts}
    draws = None if single else _resampled(logs, num_resamples, seed)
    laws = tuple(fit_law(law, logs, base, draws) for law in LAWS[scaling])
    better, why = better_law(laws)
    return ScalingAnalysis(
        scaling=scaling,
        quantity=runs.quantity,
        baseline=base,
        points=tuple(_point(runs, scaling, n, base) for n in counts),
        laws=laws,
        better=better,
        why_no_better=why,
        why_no_interval=f"{', '.join(map(str, single))} workers ran only once" if single else "",
    )


def karp_flatt(speedup: float, num_workers: float) -> float:
    """The serial fraction that a speedup shows, (1/S - 1/N) / (1 - 1/N), for N other than 1.

    After Karp and Flatt, "Measuring Parallel Processor Performance", CACM 33(5), 1990. Against a baseline of N0
    workers, N is N / N0 and the fraction one of the baseline's time. It is below 0 where the speedup exceeds N.
    """
    return (1 / speedup - 1 / num_workers) / (1 - 1 / num_workers)


def fit_law(law: Law, logs: Mapping[int, Floats], baseline: int, draws: Floats | None) -> Fit | Refused:
    """The law fitted to log rates.

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
        left_out = {int(n): _left_out_error(law, counts, medians, i, best[1:]) for i, n in enumerate(counts)}
        rows = None if draws is None else np.array([_fitted(law, counts, row, best[1:]) for row in draws])
    except RuntimeError:
        return Refused(law, "no parameters were found that fit it")
    fitted = best[0] + np.log(law.speedup(counts, *best[1:]))

    def told(quantity: Callable[[Floats], Any]) -> Estimate:
        """A quantity of the fit, (log rate, parameters), with its interval."""
        value = float(quantity(best))
        if rows is None:
            return Estimate(value, None, None, 1, None, Method.SINGLE)
        # Of ranks, not between them: a draw may be infinite.
        bounds = np.quantile([quantity(row) for row in rows], [(1 - LEVEL) / 2, (1 + LEVEL) / 2], method="nearest")
        low, high = min(float(bounds[0]), value), max(float(bounds[1]), value)
        return Estimate(value, low, high, min(map(len, logs.values())), LEVEL, Method.BOOTSTRAP)

    def over_baseline(num_workers: float) -> Callable[[Floats], Any]:
        return lambda row: law.speedup(num_workers, *row[1:]) / law.speedup(baseline, *row[1:])

    parameters = tuple(told(itemgetter(1 + i)) for i in range(len(law.parameters)))
    bends = parameters[-1].value > 0 and parameters[-1].low != 0
    peak = told(_peak) if law is USL and bends else None
    return Fit(
        law=law,
        parameters=parameters,
        rate=told(lambda row: math.exp(row[0])),
        residuals={int(n): float(r) for n, r in zip(counts, np.expm1(medians - fitted), strict=True)},
        left_out=left_out,
        extrapolated={n: told(over_baseline(n)) for n in (factor * int(counts[-1]) for factor in EXTRAPOLATED)},
        limit=told(lambda row: _inverse(row[1] * law.speedup(baseline, row[1]))) if law is AMDAHL and bends else None,
        peak=peak,
        peak_speedup=told(lambda row: over_baseline(max(1.0, min(_peak(row), 1e9)))(row)) if peak else None,
    )


def better_law(laws: tuple[Fit | Refused, ...]) -> tuple[Law | None, str]:
    """The law with the lowest leave-one-out error, or None and why it can't be told.

    Two laws are told apart where their errors differ by more than one standard error of the points' differences
    (the rule of Breiman et al., "Classification and Regression Trees", 1984).
    """
    fits = sorted((law for law in laws if isinstance(law, Fit)), key=lambda fit: fit.left_out_error)
    if len(fits) < 2:
        return None, "fewer than two laws could be fitted"
    first, second = (np.maximum(list(fit.left_out.values()), EXACT) for fit in fits[:2])
    gaps = second - first
    if not np.mean(gaps) > max(float(np.std(gaps, ddof=1)) / math.sqrt(len(gaps)), EXACT):
        return None, "they predict left-out points about equally well"
    return fits[0].law, ""


def _point(runs: Runs, scaling: Scaling, num_workers: int, base: int) -> ScalingPoint:
    values, base_values = runs.values[num_workers], runs.values[base]
    speedup = reference(len(values))
    if num_workers != base:
        is_time = runs.quantity is Quantity.TIME
        tops, bottoms = (base_values, values) if is_time else (values, base_values)
        # Nothing says which repeats belong together.
        speedup = ratio_estimate(tops, bottoms, paired=False)
        if is_time and scaling is Scaling.WEAK:
            speedup = speedup.scaled(num_workers / base)
    return ScalingPoint(
        num_workers=num_workers,
        measured=median_estimate(values),
        speedup=speedup,
        efficiency=speedup.scaled(base / num_workers),
        karp_flatt=karp_flatt(speedup.value, num_workers / base) if num_workers != base else None,
    )


def _log_rates(runs: Runs, scaling: Scaling, num_workers: int) -> Floats:
    logs = np.log(np.asarray(runs.values[num_workers], dtype=np.float64))
    if runs.quantity is Quantity.THROUGHPUT:
        return logs
    return (math.log(num_workers) if scaling is Scaling.WEAK else 0.0) - logs


def _resampled(logs: Mapping[int, Floats], num_resamples: int, seed: int) -> Floats:
    """Medians of repeats drawn anew: a row for each draw, a column for each worker count, from the smallest."""
    rng = np.random.default_rng(seed)
    columns = []
    for n in sorted(logs):
        size, mean = len(logs[n]), np.mean(logs[n])
        spread = mean + math.sqrt(size / (size - 1)) * (logs[n] - mean)
        columns.append(np.median(spread[rng.integers(size, size=(num_resamples, size))], axis=1))
    return np.stack(columns, axis=1)


def _fitted(law: Law, counts: Floats, logs: Floats, start: Floats | None = None) -> Floats:
    """Log rate of one worker and the law's parameters, by least squares of the logs."""

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
        found, _ = curve_fit(
            centred, counts, logs - logs.mean(), p0=first, bounds=(0, upper), method="dogbox", **TOLERANCES
        )
    found = np.where(found * largest ** np.array(law.orders) < NO_EFFECT, 0.0, found)
    return np.array([np.mean(logs - np.log(law.speedup(counts, *found))), *found])


def _left_out_error(law: Law, counts: Floats, logs: Floats, index: int, start: Floats) -> float:
    row = _fitted(law, np.delete(counts, index), np.delete(logs, index), start)
    return float(abs(logs[index] - row[0] - np.log(law.speedup(counts[index], *row[1:]))))


def _peak(row: Floats) -> float:
    _, contention, coherence = row
    return math.sqrt((1 - contention) / coherence) if coherence > 0 else math.inf


def _inverse(value: float) -> float:
    return 1 / value if value > 0 else math.inf
