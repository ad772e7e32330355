"""False claims and power of raypar's reports: simulated studies whose truth is known.

Every study goes through `analyse` and `recommend`, as a user's results do. In an A/A study all points are the same, and
any claim of its report is false: a speedup whose interval excludes 1, a fastest or a best point, an effect, an
interaction, a difference of the metric, a trend where there was none, a point that another one dominates, a clear
recommendation. A tie claims nothing. Other studies have points that differ, and count how often the report shows it.

Noise is log-normal, of trials and of whole blocks (which disturbs all trials of a block alike). A bar is reached within
two standard errors of the simulation.
"""

from __future__ import annotations

import importlib
import math
import multiprocessing
import re
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from typing import Any, TypeAlias

import numpy as np
from common import begin, parser_for, print_bar, print_row, progress
from honesty_compare import ACCURACY, OUTLIER_SCALE, OUTLIER_SHARE, TRIAL_S, is_reached, show
from scipy.optimize import brentq
from scipy.stats import exponnorm, norm

from raypar import units
from raypar.analysis.analyse import StudyAnalysis, analyse
from raypar.analysis.comparison import Outcome as Shown
from raypar.analysis.pairwise import worker_metrics
from raypar.analysis.question import Question
from raypar.analysis.recommend import Constraints, Decision, Recommendation, recommend
from raypar.analysis.stats import Floats, median_estimate, ratio_estimate
from raypar.analysis.time_to_target import Target
from raypar.study.space import Value
from raypar.study.trial import TrialResult, TrialSpec, TrialState
from raypar.train.affinity import allowed_cores

NUM_RUNS = 2000
NUM_QUICK_RUNS = 100
COVERAGE_FACTOR = 5  # simulations of an interval for each of a study
MOST_RUNS_A_TASK = 50
FALSE_CLAIMS, FALSE_CLAIMS_WITH_OUTLIERS = 0.05, 0.07
OTHERS = ("honesty_compare", "honesty_laws", "honesty_settle")  # scripts whose rows this one prints too
CONFIG = {"num_workers": 1, "cpus_per_worker": 1, "device": "cpu", "batch_size": 64, "epochs": 3, "lr": 0.1}
# Sentences of a verdict that leave it open; any other one is a claim.
HEDGES = re.compile(
    r"unconfirmed|inconclusive|too close|equivalent within|the same at",
    re.IGNORECASE,
)

Point: TypeAlias = Mapping[str, Value]


@dataclass(frozen=True)
class Noise:
    """Disturbances of a study's times and metrics.

    Attributes:
        name: for a row's title.
        cv: of the time of a trial within its block.
        block_cv: of a whole block.
        drift: change of the log times over the study.
        has_outliers: 5 % of the trials take longer by far.
        has_heavy_tails: Student's t with 3 degrees of freedom instead of the normal distribution.
        noisy_point: index of the one point whose trials have a CV of 10 %.
        missing: share of the trials that are missing.
        metric_sd: of the accuracy.
        report_cv: CV of an epoch's rate and of its distance to the final accuracy; 0: only the final report.
    """

    name: str = "clean"
    cv: float = 0.05
    block_cv: float = 0.0
    drift: float = 0.0
    has_outliers: bool = False
    has_heavy_tails: bool = False
    noisy_point: int | None = None
    missing: float = 0.0
    metric_sd: float = 0.005
    report_cv: float = 0.0

    def log_times(self, rng: np.random.Generator, num_points: int, num_blocks: int) -> Floats:
        """Return ``[point, block]``, around 0."""
        shape = (num_points, num_blocks)
        draws = rng.standard_t(3, shape) / math.sqrt(3) if self.has_heavy_tails else rng.standard_normal(shape)
        cvs = np.full((num_points, 1), self.cv)
        if self.noisy_point is not None:
            cvs[self.noisy_point] = 0.1
        logs = draws * cvs + self.block_cv * rng.standard_normal((1, num_blocks))
        # Points take turns in random order within a block.
        turns = np.argsort(rng.random(shape), axis=0) + rng.random(shape)
        logs += self.drift * (turns / num_points + np.arange(num_blocks)) / num_blocks
        if self.has_outliers:
            logs += np.where(rng.random(shape) < OUTLIER_SHARE, rng.exponential(OUTLIER_SCALE, shape), 0)
        return logs

    def median_log_time(self) -> float:
        """Return the median of a single point's log times, over all blocks."""
        if not self.has_outliers:
            return self.drift / 2  # symmetric

        def excess(at: float) -> float:
            late = exponnorm.cdf(at, OUTLIER_SCALE / self.cv, scale=self.cv)
            return float((1 - OUTLIER_SHARE) * norm.cdf(at / self.cv) + OUTLIER_SHARE * late - 0.5)

        return float(brentq(excess, -self.cv, self.cv))


CLEAN = Noise()
BLOCKS = Noise("block noise", block_cv=0.1)
OUTLIERS = Noise("5 % outliers", has_outliers=True)
DRIFT = Noise("drift 10 %", drift=0.1)
HEAVY_TAILS = Noise("t3 tails", has_heavy_tails=True)
NOISY_BASELINE = Noise("noisy baseline", cv=0.01, noisy_point=0)
NOISY_OTHER = Noise("noisy point", cv=0.01, noisy_point=1)


@dataclass(frozen=True)
class Design:
    """Points of a study.

    Attributes:
        name: for a row's title.
        space: hyperparameters and their values.
        baseline: of the study.
    """

    name: str
    space: Mapping[str, Sequence[Value]]
    baseline: Point

    @property
    def points(self) -> list[dict[str, Value]]:
        return [dict(zip(self.space, values, strict=True)) for values in product(*self.space.values())]


def dummies(num_points: int) -> Design:
    """Return a design whose points differ in a hyperparameter without effect."""
    return Design(f"{num_points} points", {"dummy": range(num_points)}, {"dummy": 0})


NO_BASELINE = Design("8 points, no baseline", {"dummy": range(8)}, {})
GRID = Design("grid 4 × 2", {"batch_size": (32, 64, 128, 256), "num_workers": (1, 2)}, {"num_workers": 1})
WIDE_GRID = Design("grid 3 × 3 × 2", {"lr": (0.1, 0.2, 0.3), "dummy": range(3), "num_workers": (1, 2)}, {"lr": 0.1})
WORKERS = Design("1 to 8 workers", {"num_workers": (1, 2, 4, 8)}, {"num_workers": 1})


@dataclass(frozen=True)
class Simulated:
    """A simulated study: its question, and the results of its trials."""

    question: Question
    results: list[TrialResult]


def simulate(
    rng: np.random.Generator,
    design: Design,
    num_blocks: int,
    noise: Noise,
    speedups: Mapping[int, float] | None = None,
    metric_changes: Mapping[int, float] | None = None,
) -> Simulated:
    """Return a study of the points, in which some differ from the others.

    Args:
        speedups: by the index of the point.
        metric_changes: likewise.
    """
    points = design.points
    times = TRIAL_S * np.exp(noise.log_times(rng, len(points), num_blocks))
    scores = ACCURACY + noise.metric_sd * rng.standard_normal(times.shape)
    for i, factor in (speedups or {}).items():
        times[i] /= factor
    for i, change in (metric_changes or {}).items():
        scores[i] += change
    kept = rng.random(times.shape) >= noise.missing
    question = Question("simulated", design.baseline, tuple(design.space), points=tuple(points), num_repeats=num_blocks)
    results = [
        _result(rng, noise, points[i], block, float(times[i, block]), float(scores[i, block]))
        for block in range(num_blocks)
        for i in range(len(points))
        if kept[i, block]
    ]
    return Simulated(question, results)


def _result(
    rng: np.random.Generator, noise: Noise, point: Point, block: int, time_s: float, accuracy: float
) -> TrialResult:
    spec = TrialSpec("simulated", "mnist_mlp", point, {**CONFIG, **point}, block, seed=block)
    num_samples = 180_000
    reports: list[dict[str, Any]] = [{"epoch": 3, "accuracy": accuracy}]
    if noise.report_cv:
        num_epochs = 6
        seconds = np.exp(noise.report_cv * rng.standard_normal(num_epochs))
        seconds *= time_s / seconds.sum()
        shares = 1 - 0.5 ** np.arange(1, num_epochs + 1) * np.exp(noise.report_cv * rng.standard_normal(num_epochs))
        reports = [
            {
                "epoch": i + 1,
                "accuracy": accuracy if i + 1 == num_epochs else accuracy * share,
                "train_time_s": second,
                "throughput_samples_per_s": num_samples / num_epochs / second,
            }
            for i, (second, share) in enumerate(zip(seconds.tolist(), shares.tolist(), strict=True))
        ]
    return TrialResult(
        spec,
        TrialState.FINISHED,
        started_at=1000.0 * block,
        wall_s=time_s + 1,
        train_time_s=time_s,
        throughput_samples_per_s=num_samples / time_s,
        reports=tuple(reports),
    )


# ---- claims


def claims_of(analysis: StudyAnalysis) -> Iterator[str]:
    """Yield a word for every claim of a report."""
    for point in analysis.points:
        if point.speedup is not None and not point.is_baseline and point.speedup.excludes(1.0):
            yield "speedup"
    for sentence in analysis.statements:
        if not HEDGES.search(sentence):
            yield "verdict"
    for group in analysis.worker_groups:
        if any(s.excludes(1.0) for n, s in group.speedups.items() if n != group.baseline):
            yield "scaling"
    for batches in analysis.batches:
        for batch in batches.batches:
            if any(factor.excludes(1.0) for factor in (batch.throughput, batch.progress, batch.goodput)):
                yield "batch size"
    if analysis.effects is not None:
        levels = [level for effect in analysis.effects.main for level in effect.levels]
        if any(level.speedup.excludes(1.0) for level in levels):
            yield "effect on time"
        if any(level.metric_change.excludes(0.0) for level in levels if level.metric_change):
            yield "effect on metric"
        if any(interaction.change.excludes(1.0) for interaction in analysis.effects.interactions):
            yield "interaction"
    for finding in analysis.warnings:
        if finding.check in ("drift_over_study", "drift_in_trials", "metric_differs", "more_than_linear"):
            yield finding.check


def recommendation_claims(advice: Recommendation) -> Iterator[str]:
    """Yield a word for every claim of a recommendation."""
    if advice.decision is Decision.CLEAR:
        yield "recommended"
    if any(not candidate.is_on_front for candidate in advice.candidates):
        yield "dominated"
    if any("worse than the best" in candidate.exclusion for candidate in advice.candidates):
        yield "excluded"


def false_claims(study: Simulated, noise: Noise, target: Target | None = None) -> list[str]:
    """Return the claims of a study whose points are all the same; with a target, only those of its recommendation."""
    claims = [*recommendation_claims(recommend(study.question, study.results, Constraints(target)))]
    if target is None:  # a report without target compares other times
        claims += claims_of(analyse(study.question, study.results))
    return [claim for claim in claims if not (noise.drift and claim == "drift_over_study")]


# ---- cells


@dataclass(frozen=True)
class Outcome:
    """Outcome of a number of simulations of a cell.

    Attributes:
        sums: sum of the measured numbers, one per simulation, mostly 0 or 1.
        squares: sum of the squares.
        counts: claims, each at most once a simulation.
    """

    num_runs: int = 0
    sums: float = 0.0
    squares: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)

    def __add__(self, other: Outcome) -> Outcome:
        runs, sums, squares = self.num_runs + other.num_runs, self.sums + other.sums, self.squares + other.squares
        return Outcome(runs, sums, squares, self.counts + other.counts)

    @property
    def value(self) -> float:
        return self.sums / self.num_runs

    @property
    def error(self) -> float:
        """Standard error."""
        return math.sqrt(max(0.0, self.squares / self.num_runs - self.value**2) / self.num_runs)


# Function of one simulation: its number, and the names of its claims.
Measure: TypeAlias = Callable[[np.random.Generator], tuple[float, Sequence[str]]]


@dataclass(frozen=True)
class Cell:
    """A kind of study, of which many are simulated.

    Attributes:
        title: of its row.
        kind: name of the function in `MEASURES`.
        options: its arguments.
        at_most: bar; None: there is none.
        at_least: likewise.
        factor: simulations of this cell for each simulation of a study.
        show: format of the figure.
    """

    title: str
    kind: str
    options: Mapping[str, Any]
    at_most: float | None = None
    at_least: float | None = None
    factor: int = 1
    show: Callable[[float], str] = field(default=units.percent)

    def run(self, num_runs: int, seed: int) -> Outcome:
        """Run `num_runs` simulations, reproducibly by seed."""
        rng = np.random.default_rng([seed, zlib.crc32(self.title.encode())])
        measure = MEASURES[self.kind]
        measured = [measure(rng, **self.options) for _ in range(num_runs)]
        values = np.array([value for value, _ in measured])
        counts = Counter(name for _, names in measured for name in set(names))
        return Outcome(num_runs, float(values.sum()), float((values**2).sum()), counts)


def a_a(
    rng: np.random.Generator, design: Design, num_blocks: int, noise: Noise, target: Target | None = None
) -> tuple[float, Sequence[str]]:
    """Measure whether a report on points that are all the same claims anything; the target is a recommendation's."""
    claims = false_claims(simulate(rng, design, num_blocks, noise), noise, target)
    return float(bool(claims)), claims


def shown_faster(
    rng: np.random.Generator, num_points: int, num_blocks: int, factor: float, noise: Noise
) -> tuple[float, Sequence[str]]:
    """Measure whether the one point that is faster is reported as faster than the baseline."""
    study = simulate(rng, dummies(num_points), num_blocks, noise, {num_points - 1: factor})
    speedup = analyse(study.question, study.results).points[-1].speedup
    return float(speedup is not None and speedup.low is not None and speedup.low > 1), ()


def named_fastest(
    rng: np.random.Generator, num_points: int, num_blocks: int, factor: float, noise: Noise
) -> tuple[float, Sequence[str]]:
    """Measure whether the one point that is faster than all others is called the fastest."""
    study = simulate(rng, dummies(num_points), num_blocks, noise, {num_points - 1: factor})
    sentences = analyse(study.question, study.results).statements
    label = f"dummy={num_points - 1} is the fastest"
    return float(any(label in sentence and not HEDGES.search(sentence) for sentence in sentences)), ()


def recommended(
    rng: np.random.Generator, num_blocks: int, change: float, metric_sd: float, metric_margin: float = 0.005
) -> tuple[float, Sequence[str]]:
    """Measure whether a point that is twice as fast, and has another accuracy, is recommended.

    A point that is not shown to be good enough counts as recommended if it is chosen nevertheless.
    """
    noise = Noise(metric_sd=metric_sd)
    study = simulate(rng, dummies(2), num_blocks, noise, {1: 2.0}, {1: change})
    advice = recommend(study.question, study.results, Constraints(metric_margin=metric_margin))
    is_chosen = advice.chosen is not None and advice.chosen.point == {"dummy": 1}
    return float(is_chosen and (change < 0 or advice.decision is not Decision.UNCLEAR)), [advice.decision]


def found_equivalent(
    rng: np.random.Generator, num_blocks: int, change: float, metric_sd: float
) -> tuple[float, Sequence[str]]:
    """Measure whether two workers' accuracy is called equivalent to one worker's."""
    design = Design("2 workers", {"num_workers": (1, 2)}, {"num_workers": 1})
    study = simulate(rng, design, num_blocks, Noise(metric_sd=metric_sd), None, {1: change})
    analysis = analyse(study.question, study.results)
    verdicts = [each.comparison.outcome for each in worker_metrics(analysis.question, analysis.points, analysis.family)]
    return float(Shown.EQUIVALENT in verdicts), verdicts


def time_covered(rng: np.random.Generator, num_blocks: int, noise: Noise) -> tuple[float, Sequence[str]]:
    """Measure whether the interval of a time holds the median."""
    truth = math.exp(noise.median_log_time())
    return float(not median_estimate(np.exp(noise.log_times(rng, 1, num_blocks)[0]).tolist()).excludes(truth)), ()


def ratio_covered(rng: np.random.Generator, num_blocks: int, noise: Noise) -> tuple[float, Sequence[str]]:
    """Measure whether the interval of a paired ratio holds 1."""
    tops, bottoms = np.exp(noise.log_times(rng, 2, num_blocks)).tolist()
    return float(not ratio_estimate(tops, bottoms).excludes(1.0)), ()


def ratio_width(rng: np.random.Generator, num_blocks: int, noise: Noise) -> tuple[float, Sequence[str]]:
    """Measure the width of the interval of a paired ratio."""
    tops, bottoms = np.exp(noise.log_times(rng, 2, num_blocks)).tolist()
    estimate = ratio_estimate(tops, bottoms)
    assert estimate.low is not None and estimate.high is not None
    return estimate.high - estimate.low, ()


MEASURES: dict[str, Callable[..., tuple[float, Sequence[str]]]] = {
    measure.__name__: measure
    for measure in (
        a_a,
        shown_faster,
        named_fastest,
        recommended,
        found_equivalent,
        time_covered,
        ratio_covered,
        ratio_width,
    )
}

COUNTS = (2, 3, 5, 6, 7, 8, 10, 20)


def cells() -> Iterator[Cell]:
    """Yield every cell, in the order of the rows."""
    quiet = Noise(cv=0.02)
    for noise in (CLEAN, BLOCKS, DRIFT, OUTLIERS, NOISY_BASELINE, NOISY_OTHER):
        for num_points, num_blocks in product((2, 8, 20), (3, 6, 10)):
            if noise.noisy_point is None or num_points > 2:
                yield _a_a_cell(dummies(num_points), num_blocks, noise)
    for num_blocks in (4, 5):
        for noise in (CLEAN, OUTLIERS, NOISY_OTHER):
            yield _a_a_cell(dummies(8), num_blocks, noise)
    others = (
        (dummies(3), 6, NOISY_OTHER),
        (dummies(8), 2, CLEAN),
        (dummies(8), 20, CLEAN),
        (dummies(8), 6, HEAVY_TAILS),
        (dummies(8), 6, Noise("CV 30 %", cv=0.3)),
        (dummies(8), 6, Noise("CV 0.5 %", cv=0.005)),
        (dummies(8), 6, Noise("10 % of trials missing", missing=0.1)),
        (dummies(8), 6, Noise("steady accuracy", metric_sd=0)),
        (NO_BASELINE, 6, CLEAN),
        (GRID, 3, CLEAN),
        (GRID, 6, CLEAN),
        (GRID, 6, Noise("noisy epochs", report_cv=0.1)),
        (WIDE_GRID, 6, CLEAN),
        (WIDE_GRID, 6, Noise("block noise, 10 % missing", block_cv=0.1, missing=0.1)),
        (WORKERS, 3, Noise("noisy epochs", report_cv=0.1)),
    )
    for design, num_blocks, noise in others:
        yield _a_a_cell(design, num_blocks, noise)
    for design, num_blocks in ((dummies(2), 3), (dummies(8), 6)):
        yield _a_a_cell(design, num_blocks, Noise("noisy epochs", report_cv=0.1), Target("accuracy", 0.85))
    for num_points, bar in ((2, 0.88), (8, 0.75)):
        options = {"num_points": num_points, "num_blocks": 6, "factor": 1.05, "noise": quiet}
        title = f"5 % faster than the baseline, CV 2 %, {num_points} points, n=6: shown"
        yield Cell(title, "shown_faster", options, at_least=bar)
    options = {"num_points": 8, "num_blocks": 6, "factor": 1.1, "noise": quiet}
    yield Cell("10 % faster than 7 equal points, CV 2 %, n=6: the fastest", "named_fastest", options, at_least=0.8)
    for num_blocks in (3, 6, 10):
        options = {"num_blocks": num_blocks, "change": -0.01, "metric_sd": 0.005}
        yield Cell(
            f"2× as fast, 1 point worse, SD 0.5, n={num_blocks}: recommended", "recommended", options, at_most=0.05
        )
    for num_blocks, metric_sd in ((6, 0.002), (20, 0.005)):
        options = {"num_blocks": num_blocks, "change": 0.0, "metric_sd": metric_sd}
        title = f"2× as fast, equal accuracy, SD {metric_sd * 100:.1f}, n={num_blocks}: recommended"
        yield Cell(title, "recommended", options, at_least=0.8)
    for num_blocks in (3, 6, 10):
        options = {"num_blocks": num_blocks, "change": -0.005, "metric_sd": 0.002}
        yield Cell(
            f"2 workers 0.5 points worse, SD 0.2, n={num_blocks}: equivalent", "found_equivalent", options, at_most=0.05
        )
    noises = [Noise(f"CV {cv:.0%}", cv=cv) for cv in (0.02, 0.1, 0.3)]
    noises += [Noise("block noise", 0.02, block_cv=0.1), OUTLIERS, Noise("t3 tails", 0.1, has_heavy_tails=True)]
    for (what, kind), noise, num in product((("time", "time_covered"), ("ratio", "ratio_covered")), noises, COUNTS):
        yield _coverage_cell(what, kind, noise, num, at_most=0.975 if num >= 6 else None)
    for num in COUNTS:
        yield _coverage_cell("time", "time_covered", Noise("drift 10 %", 0.02, drift=0.1), num)
    for num in COUNTS:
        options = {"num_blocks": num, "noise": Noise(cv=0.02, block_cv=0.1)}
        bar = {"at_most": 0.033} if num == 20 else {}
        title = f"width of a ratio, block noise 10 %, CV 2 %, n={num}"
        yield Cell(title, "ratio_width", options, **bar, factor=COVERAGE_FACTOR, show="{:.4f}".format)


def _a_a_cell(design: Design, num_blocks: int, noise: Noise, target: Target | None = None) -> Cell:
    bar = FALSE_CLAIMS_WITH_OUTLIERS if noise.has_outliers else FALSE_CLAIMS
    options = {"design": design, "num_blocks": num_blocks, "noise": noise, "target": target}
    name = noise.name + (", a target" if target else "")
    return Cell(f"A/A, {design.name}, n={num_blocks}, {name}: any claim", "a_a", options, at_most=bar)


def _coverage_cell(what: str, kind: str, noise: Noise, num_blocks: int, at_most: float | None = None) -> Cell:
    options = {"num_blocks": num_blocks, "noise": noise}
    title = f"95 % interval of a {what}, {noise.name}, n={num_blocks}: holds the truth"
    return Cell(title, kind, options, at_most, 0.93, COVERAGE_FACTOR, "{:.1%}".format)


# ---- run


def _submitted(pool: ProcessPoolExecutor, cell: Cell, num_runs: int) -> list[Future[Outcome]]:
    size = MOST_RUNS_A_TASK * cell.factor**2
    sizes = [min(size, num_runs - begun) for begun in range(0, num_runs, size)]
    return [pool.submit(cell.run, size, seed) for seed, size in enumerate(sizes)]


def other_rows(name: str, part: int, num_runs: int) -> list[Any]:
    """Return a part of the rows of another script in `OTHERS`."""
    return list(importlib.import_module(name).parts()[part](num_runs))


def print_cell(cell: Cell, outcome: Outcome) -> bool:
    """Print a row; return whether its bar is reached."""
    most = outcome.counts.most_common(4)
    claims = ", ".join(f"{name} {units.percent(count / outcome.num_runs, 1)}" for name, count in most)
    reached = print_bar(
        cell.title, outcome.value, cell.show, at_most=cell.at_most, at_least=cell.at_least, error=outcome.error
    )
    if claims:
        progress(claims)
    return reached


def main() -> None:
    parser = parser_for(__doc__, rounds=NUM_RUNS, quick_rounds=NUM_QUICK_RUNS)
    parser.add_argument("--jobs", type=int, default=len(allowed_cores()), help="processes [default: %(default)s]")
    parser.add_argument("--only", default="", metavar="TEXT", help="regular expression for the titles of rows")
    args = begin(parser)
    begun_s = time.monotonic()
    asked = [cell for cell in cells() if re.search(args.only, cell.title)]
    others = [name for name in OTHERS if re.search(args.only, name)]
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        parts = [(name, i) for name in others for i in range(len(importlib.import_module(name).parts()))]
        rows = [pool.submit(other_rows, name, i, args.rounds) for name, i in parts]
        begun = [(cell, _submitted(pool, cell, args.rounds * cell.factor)) for cell in asked]
        reached = [print_cell(cell, sum((part.result() for part in parts), Outcome())) for cell, parts in begun]
        for future in rows:
            show(future.result())
            reached += map(is_reached, future.result())
    print_row("rows whose bar is reached, or that have none", f"{sum(reached)} of {len(reached)}")
    print(f"{args.rounds} studies a row, {time.monotonic() - begun_s:.0f} s in all")


if __name__ == "__main__":
    main()
