"""False claims of a peak, or of a law with one, by `raypar model fit`: simulated runs whose truth is known.

Runs go through `analyse_scaling`, like those of a file or a study. Their times scatter log-normally around the
speedups of Amdahl's law, which has no peak, and of Gunther's with a peak at 4 workers. A peak is claimed if the fit of
Gunther's law has one, if that law is called the better one, or if a doubling is shown to slow down. A bar is reached
within two standard errors of the simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import numpy as np
from common import begin, parser_for
from honesty_compare import FALSE_CLAIMS, OUTLIER_SCALE, OUTLIER_SHARE, POWER, Row, row_of, run

from raypar import units
from raypar.analysis.laws import AMDAHL, USL, Fit
from raypar.analysis.scaling import Measurement, Runs, ScalingAnalysis, analyse_scaling

NUM_SIMULATIONS = 2000
NUM_QUICK = 50
DENSE, SPARSE = (1, 2, 3, 4, 6, 8), (1, 2, 4, 8)
PEAK = 4
COVERAGE = (0.93, 1.0)


@dataclass(frozen=True)
class Cell:
    """Simulated runs by worker count.

    Attributes:
        title: of the true speedups and the noise.
        speedup: the true one of a worker count.
        size: runs of each worker count.
        cv: coefficient of variation of a run's time.
        counts: worker counts.
        block_cv: of a block, which the i-th runs of all worker counts share.
        are_paired: whether the analysis knows the blocks.
        noisy_cv: CV of the runs with the most workers; None: like the others.
        has_outliers: 5 % of the runs take longer by far.
        has_peak: whether the true speedups have one.
    """

    title: str
    speedup: Callable[[int], float]
    size: int = 3
    cv: float = 0.02
    counts: tuple[int, ...] = DENSE
    block_cv: float = 0.0
    are_paired: bool = False
    noisy_cv: float | None = None
    has_outliers: bool = False
    has_peak: bool = False

    @property
    def name(self) -> str:
        return f"{self.title}, {len(self.counts)} counts, n = {self.size}, CV {100 * self.cv:g} %"

    def simulate(self, num_simulations: int, seed: int) -> Iterator[Row]:
        rng = np.random.default_rng(seed)
        analyses = [self._analysis(rng) for _ in range(num_simulations)]
        claims = [claims_peak(analysis) for analysis in analyses]
        yield row_of(f"{'a peak at 4' if self.has_peak else 'no peak'}: {self.name}: claimed", claims, self._bar)
        peaks = [fit.peak for analysis in analyses if (fit := _gunther(analysis)) is not None and fit.peak is not None]
        if self.has_peak and peaks:
            held = [p.low is not None and p.high is not None and p.low <= PEAK <= p.high for p in peaks]
            yield row_of(f"a peak at 4: {self.name}: its interval holds 4", held, COVERAGE)

    @property
    def _bar(self) -> tuple[float, float]:
        return POWER if self.has_peak else FALSE_CLAIMS

    def _analysis(self, rng: np.random.Generator) -> ScalingAnalysis:
        shape = (len(self.counts), self.size)
        cvs = np.full((len(self.counts), 1), self.cv)
        if self.noisy_cv is not None:
            cvs[-1] = self.noisy_cv
        logs = cvs * rng.standard_normal(shape) + self.block_cv * rng.standard_normal((1, self.size))
        if self.has_outliers:
            logs += np.where(rng.random(shape) < OUTLIER_SHARE, rng.exponential(OUTLIER_SCALE, shape), 0)
        times = np.exp(logs) / np.array([[self.speedup(n)] for n in self.counts])
        values = {n: tuple(of_count.tolist()) for n, of_count in zip(self.counts, times, strict=True)}
        return analyse_scaling(Runs(values, Measurement.TIME, self.are_paired))


def claims_peak(analysis: ScalingAnalysis) -> bool:
    """Return whether a fit's text has a peak, a law with one as the better law, or a doubling that slows down."""
    fit = _gunther(analysis)
    slows = any(step.gain.high is not None and step.gain.high < 1 for step in analysis.steps)
    return slows or analysis.better is USL or (fit is not None and fit.peak is not None)


def _gunther(analysis: ScalingAnalysis) -> Fit | None:
    return next((fit for fit in analysis.laws if isinstance(fit, Fit) and fit.law is USL), None)


def by_amdahl(fraction: float) -> Callable[[int], float]:
    return lambda num_workers: float(AMDAHL.speedup(num_workers, fraction))


def by_gunther(contention: float) -> Callable[[int], float]:
    """Return the speedups with the contention and a peak at 4 workers."""
    return lambda num_workers: float(USL.speedup(num_workers, contention, (1 - contention) / PEAK**2))


def cells() -> Iterator[Cell]:
    """Yield all cells: no peak, then a peak."""
    for fraction, counts, cv, size in product((0.0, 0.05, 0.3), (DENSE, SPARSE), (0.02, 0.05, 0.1), (1, 3, 5)):
        yield Cell(f"{units.percent(fraction)} serial", by_amdahl(fraction), size, cv, counts)
    for counts, size in product((DENSE, SPARSE), (2, 3, 5, 10)):
        tenth = Cell("10 % serial", by_amdahl(0.1), size, 0.05, counts)
        yield replace(tenth, title="10 % serial, blocks of CV 10 %", block_cv=0.1)
        yield replace(tenth, title="10 % serial, known blocks of CV 10 %", block_cv=0.1, are_paired=True)
        yield replace(tenth, title="10 % serial, CV 10 % with the most workers", cv=0.02, noisy_cv=0.1)
        yield replace(tenth, title="10 % serial, 5 % outliers", has_outliers=True)
        yield replace(tenth, title="all serial", speedup=by_amdahl(1.0))
        yield replace(tenth, title="as fast as 4 from 4 workers on", cv=0.02, speedup=lambda n: float(min(n, 4)))
    for contention, counts in product((0.0, 0.1, 0.5), (DENSE, SPARSE)):
        peak = Cell(f"contention {units.percent(contention)}", by_gunther(contention), counts=counts, has_peak=True)
        yield peak
        yield replace(peak, title=f"{peak.title}, known blocks of CV 10 %", block_cv=0.1, are_paired=True)


def parts() -> list[Callable[[int], list[Row]]]:
    """Return the simulations of each cell; each takes their number and gives the rows."""
    return [partial(_rows, cell, seed) for seed, cell in enumerate(cells())]


def _rows(cell: Cell, seed: int, num_simulations: int) -> list[Row]:
    return list(cell.simulate(num_simulations, seed))


if __name__ == "__main__":
    run(parts(), begin(parser_for(__doc__, rounds=NUM_SIMULATIONS, quick_rounds=NUM_QUICK)).rounds)
