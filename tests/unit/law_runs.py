"""Runs as a law of scaling has them, for tests of what is fitted to them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from raypar.analysis.laws import Fit, Law, Scaling
from raypar.analysis.scaling import Quantity, Runs, ScalingAnalysis
from raypar.analysis.stats import Estimate

COUNTS = (1, 2, 4, 8, 16)


def runs_of(
    law: Law,
    *parameters: float,
    counts: Iterable[int] = COUNTS,
    rate: float = 0.01,
    noise: float = 0.0,
    num_repeats: int = 1,
    seed: int = 0,
) -> Runs:
    """Throughputs as a law has them, with log-normal noise."""
    rng = np.random.default_rng(seed)
    values = {}
    for n in counts:
        factors = np.exp(noise * rng.standard_normal(num_repeats))
        values[n] = tuple(float(rate * law.speedup(n, *parameters) * factor) for factor in factors)
    return Runs(values, Quantity.THROUGHPUT)


def as_times(runs: Runs, scaling: Scaling = Scaling.STRONG) -> Runs:
    return Runs({n: tuple((n if scaling is Scaling.WEAK else 1) / r for r in v) for n, v in runs.values.items()})


def fit_of(analysis: ScalingAnalysis, law: Law) -> Fit:
    (fit,) = [found for found in analysis.laws if isinstance(found, Fit) and found.law is law]
    return fit


def holds(estimate: Estimate | None, truth: float) -> bool:
    assert estimate is not None and estimate.low is not None and estimate.high is not None
    return estimate.low <= truth <= estimate.high
