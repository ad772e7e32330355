"""False claims and power of `raypar store compare`: simulated pairs of studies whose truth is known.

Both studies go through `compare`, as a user's results do. Their trials scatter log-normally, and their accuracies
normally. In an A/A comparison both are the same, and any significant difference of a time or of the accuracy is a false
claim. `--fail-if-slower 5%` is judged where B is as slow as allowed (failing is false), and where one of its points is
just slower than that (passing is false). Power is the share of comparisons that show a true slowdown. A bar is reached
within two standard errors of the simulation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
from common import begin, parser_for, print_row

from raypar import units
from raypar.analysis.compare import Side, StudyComparison, compare
from raypar.analysis.comparison import Gate, Outcome
from raypar.analysis.question import Question
from raypar.analysis.stats import Floats
from raypar.study.trial import TrialResult, TrialSpec, TrialState

NUM_SIMULATIONS = 2000
NUM_QUICK = 100
TRIAL_S, NUM_SAMPLES, ACCURACY, ACCURACY_SD = 4.0, 180_000, 0.9, 0.005
ALLOWED = 0.05
CONFIG = {"cpus_per_worker": 1, "device": "cpu", "batch_size": 64, "epochs": 3, "lr": 0.1}
FALSE_CLAIMS, FALSE_CLAIMS_WITH_OUTLIERS, POWER = (0.0, 0.05), (0.0, 0.07), (0.8, 1.0)
NO_BAR = (0.0, 1.0)
OUTLIER_SHARE, OUTLIER_SCALE = 0.05, 0.5  # an outlier takes exp(x) times as long, x exponential with this mean


class Row(NamedTuple):
    """Result of a cell.

    Attributes:
        cell: title.
        share: of the simulations.
        error: standard error of the share.
        bar: lowest and highest share that reach it.
    """

    cell: str
    share: float
    error: float
    bar: tuple[float, float]


def row_of(title: str, hits: Sequence[bool], bar: tuple[float, float]) -> Row:
    """Return the row of simulations, each of which is a hit or not."""
    # One more simulation of either kind, since 0 hits of 100 do not prove 0.
    smoothed = (sum(hits) + 1) / (len(hits) + 2)
    return Row(title, sum(hits) / len(hits), math.sqrt(smoothed * (1 - smoothed) / len(hits)), bar)


@dataclass(frozen=True)
class Cell:
    """Simulated pairs of studies.

    Attributes:
        title: name of the counted claim.
        counts: function that tells if a comparison counts.
        bar: as in `Row`.
        num_points: of each study.
        size: trials a point, in each study.
        cvs: coefficients of variation of a trial's time, in A and in B.
        slowdowns: log of B's time over A's, at the first point and at the others.
        allowed_share: as in `compare`.
        block_cv: of a block of one study, which all its points share.
        has_outliers: 5 % of the trials take longer by far.
    """

    title: str
    counts: Callable[[StudyComparison], bool]
    bar: tuple[float, float]
    num_points: int
    size: int
    cvs: tuple[float, float]
    slowdowns: tuple[float, float] = (0.0, 0.0)
    allowed_share: float | None = None
    block_cv: float = 0.0
    has_outliers: bool = False

    @property
    def name(self) -> str:
        cv = " and ".join(dict.fromkeys(f"{100 * cv:g} %" for cv in self.cvs))
        return f"{self.title}, {units.counted(self.num_points, 'point')}, n = {self.size}, CV {cv}"

    def simulate(self, num_simulations: int, seed: int) -> Row:
        rng = np.random.default_rng(seed)
        return row_of(self.name, [self.counts(self._comparison(rng)) for _ in range(num_simulations)], self.bar)

    def _comparison(self, rng: np.random.Generator) -> StudyComparison:
        sides = [self._side(rng, name, i) for i, name in enumerate("AB")]
        return compare(sides[0], sides[1], self.allowed_share)

    def _side(self, rng: np.random.Generator, name: str, i: int) -> Side:
        shape = (self.num_points, self.size)
        logs = self.cvs[i] * rng.standard_normal(shape) + self.block_cv * rng.standard_normal((1, self.size))
        if self.has_outliers:
            logs += np.where(rng.random(shape) < OUTLIER_SHARE, rng.exponential(OUTLIER_SCALE, shape), 0)
        if i == 1:
            logs[0] += self.slowdowns[0]
            logs[1:] += self.slowdowns[1]
        results = trials(TRIAL_S * np.exp(logs), ACCURACY + ACCURACY_SD * rng.standard_normal(shape))
        return Side(Question(name, {}, ("num_workers",)), tuple(results), {})


def trials(times_s: Floats, accuracies: Floats) -> Iterator[TrialResult]:
    """Yield a finished trial for each time and accuracy, ``[point, repeat]``."""
    for point, of_point in enumerate(times_s):
        values = {"num_workers": point + 1}
        for repeat, time_s in enumerate(of_point.tolist()):
            yield TrialResult(
                TrialSpec("simulated", "mnist_mlp", values, {**CONFIG, **values}, repeat, seed=repeat),
                TrialState.FINISHED,
                started_at=0.0,
                wall_s=time_s + 1,
                train_time_s=time_s,
                throughput_samples_per_s=NUM_SAMPLES / time_s,
                reports=({"epoch": 3, "accuracy": float(accuracies[point, repeat])},),
            )


def claims_anything(comparison: StudyComparison) -> bool:
    """Return whether a time or a metric is reported to differ."""
    return any(p.time.differs or p.metric.differs for p in comparison.matched)


def shows_slowdown(comparison: StudyComparison) -> bool:
    """Return whether the first point, which is slower, is reported to be so."""
    return comparison.matched[0].time.outcome is Outcome.SLOWER


def fails(comparison: StudyComparison) -> bool:
    return comparison.gate is Gate.FAILED


def passes(comparison: StudyComparison) -> bool:
    return comparison.gate is Gate.PASSED


def cells() -> Iterator[Cell]:
    """Yield all cells: false claims, then power."""
    tenth, limit, beyond = math.log(1.1), math.log1p(ALLOWED), math.log1p(ALLOWED + 1e-9)
    sizes = [(num_points, size) for num_points in (1, 4, 8) for size in (3, 6, 10)]
    for cv in (0.02, 0.1):
        for num_points, size in sizes:
            yield Cell("A/A: any claim", claims_anything, FALSE_CLAIMS, num_points, size, (cv, cv))
    for num_points, size in ((8, 3), (8, 6), (20, 6)):
        of_both = Cell("", claims_anything, FALSE_CLAIMS, num_points, size, (0.02, 0.02))
        yield replace(of_both, title="A/A, blocks of CV 10 %: any claim", block_cv=0.1)
        yield replace(of_both, title="A/A, B's machine is noisier: any claim", cvs=(0.01, 0.1))
        yield replace(
            of_both,
            title="A/A, 5 % outliers: any claim",
            cvs=(0.05, 0.05),
            has_outliers=True,
            bar=FALSE_CLAIMS_WITH_OUTLIERS,
        )
    for num_points, size in sizes:
        gate = Cell("", fails, FALSE_CLAIMS, num_points, size, (0.02, 0.02), allowed_share=ALLOWED)
        yield replace(gate, title="5 % slower, 5 % allowed: failed", slowdowns=(limit, limit))
        yield replace(gate, title="one point over 5 % slower: passed", counts=passes, slowdowns=(beyond, 0.0))
    for num_points in (1, 4, 8):
        # No interval covers an offset between two runs, as the report says.
        title, offset = "an offset of 3 % between the runs: any claim", math.log(1.03)
        yield Cell(title, claims_anything, NO_BAR, num_points, 6, (0.02, 0.02), (offset, offset))
    for cv in (0.02, 0.1):
        for num_points, size in sizes:
            bar = POWER if cv == 0.02 and size > 3 else NO_BAR
            one = Cell("10 % slower at one point: shown", shows_slowdown, bar, num_points, size, (cv, cv), (tenth, 0.0))
            yield one
            if cv == 0.02:
                gate = replace(one, allowed_share=ALLOWED)
                yield replace(gate, title="10 % slower, 5 % allowed: failed", counts=fails, slowdowns=(tenth, tenth))
                yield replace(
                    gate,
                    title="A/A, 5 % allowed: passed",
                    counts=passes,
                    slowdowns=(0.0, 0.0),
                    bar=POWER if size == 10 else NO_BAR,
                )


def parts() -> list[Callable[[int], list[Row]]]:
    """Return the simulations of each cell; each takes their number and gives the rows."""
    return [partial(_rows, cell, seed) for seed, cell in enumerate(cells())]


def _rows(cell: Cell, seed: int, num_simulations: int) -> list[Row]:
    return [cell.simulate(num_simulations, seed)]


def is_reached(row: Row) -> bool:
    low, high = row.bar
    return low - 2 * row.error <= row.share <= high + 2 * row.error


def show(rows: Sequence[Row]) -> None:
    for row in rows:
        low, high = row.bar
        text = f"{units.percent(row.share, 1)} ±{100 * row.error:.1f}"
        if row.bar != NO_BAR:
            bar = f"≥ {units.percent(low)}" if low else f"≤ {units.percent(high)}"
            text += f" (bar: {bar}) {'ok' if is_reached(row) else 'MISSED'}"
        print_row(row.cell, text)


def run(parts: Sequence[Callable[[int], list[Row]]], num_simulations: int) -> None:
    """Run the simulations one after the other, and print their rows."""
    rows = [row for part in parts for row in part(num_simulations)]
    show(rows)
    print_row("bars reached", f"{sum(map(is_reached, rows))} of {len(rows)}")


if __name__ == "__main__":
    run(parts(), begin(parser_for(__doc__, rounds=NUM_SIMULATIONS, quick_rounds=NUM_QUICK)).rounds)
