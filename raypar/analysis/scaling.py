"""Scaling of a study or of a table: numbers by worker count, the laws fitted to them, gains of each doubling.

Speedup S(N) is the rate of N workers divided by that of N0, the baseline. Parallel efficiency is S(N) · N0 / N. In a
table of times, rates are 1 / time in strong scaling (every worker count does the same work), and N / time in weak
scaling (N workers do N times the work of one).

A study's rates are samples per second of the timed region, or trainings per second if raypar can't instrument the
training. They need no factor: an epoch is the same number of samples for any worker count, and in weak scaling
(``per_worker_batch_size`` fixed) it has fewer steps. A study's speedups are those of `raypar.analysis.points`, with the
same simultaneous intervals.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import pairwise

import numpy as np

from raypar import units
from raypar.analysis.laws import LAWS, Fit, Law, LogRates, Refused, Scaling, better_law, fit_law, log_rates
from raypar.analysis.pairwise import Family, family_of
from raypar.analysis.question import PointKey, PointSamples, Question, point_key
from raypar.analysis.stats import LEVEL, Estimate, Floats, median_estimate, ratio_estimate, reference
from raypar.errors import RayparError
from raypar.study.space import Value
from raypar.study.trial import point_label


class Measurement(StrEnum):
    """Measured quantity of a table."""

    TIME = "time"  # seconds
    THROUGHPUT = "throughput"  # work per second, in any unit


@dataclass(frozen=True)
class Runs:
    """Measurements by worker count: one value greater than 0 for each repeat, at least one.

    Attributes:
        are_paired: whether the i-th values of all worker counts come from one block.
        unit: of a throughput, in words.
    """

    values: Mapping[int, tuple[float, ...]]
    quantity: Measurement = Measurement.TIME
    are_paired: bool = False
    unit: str = ""


@dataclass(frozen=True)
class ScalingPoint:
    """Numbers of one worker count; its speedup is over `baseline` workers."""

    num_workers: int
    baseline: int
    measured: Estimate
    speedup: Estimate
    scaling: Scaling = Scaling.STRONG

    @property
    def efficiency(self) -> Estimate:
        return self.speedup.scaled(self.baseline / self.num_workers)

    @property
    def serial_fraction(self) -> Estimate | None:
        """Serial fraction that explains the speedup: Karp and Flatt's in strong scaling, Gustafson's in weak scaling.

        None for the baseline, and if `why_no_fraction` has a reason.
        """
        return None if self.num_workers == self.baseline or self.why_no_fraction else self._fraction

    @property
    def why_no_fraction(self) -> str:
        """Reason why no fraction between 0 and 1 describes the speedup; empty if one does."""
        if self.num_workers == self.baseline:
            return ""
        fraction = self._fraction
        low, high = fraction.low, fraction.high
        if high is not None and high < 0:
            return "faster than perfect scaling"
        if low is not None and low > 1:
            side = "slower" if self.num_workers > self.baseline else "faster"
            return f"{side} than {units.counted(self.baseline, 'worker')}"
        spans = low is not None and high is not None and low <= 0 and high >= 1
        return "inconclusive, needs more repeats" if spans or not 0 <= fraction.value <= 1 else ""

    @property
    def _fraction(self) -> Estimate:
        of = karp_flatt if self.scaling is Scaling.STRONG else gustafson_fraction
        return self.speedup.mapped(lambda speedup: of(speedup, self.num_workers / self.baseline))


@dataclass(frozen=True)
class Step:
    """Step from one measured worker count to the next that is at least twice as large.

    Attributes:
        start: workers before.
        end: workers after.
        gain: ratio of the rates after and before, per doubling: a step from 1 to 4 workers is two doublings. All steps'
            intervals hold together.
    """

    start: int
    end: int
    gain: Estimate

    @property
    def cost(self) -> float:
        """Worker-seconds for the same work after the step, divided by those before."""
        num_doublings = math.log2(self.end / self.start)
        return float((2 / self.gain.value) ** num_doublings)


WORTHWHILE = 1.3  # gain of a doubling below which workers are better used elsewhere: each new one adds less than 30 %


@dataclass(frozen=True)
class ScalingAnalysis:
    """Scaling of some runs.

    Attributes:
        baseline: worker count that speedups are relative to.
        points: one for each worker count, from the smallest.
        steps: from the smallest worker count on.
        laws: laws of strong or weak scaling, fitted or refused.
        better: the law that predicts left-out points significantly better.
        why_no_interval: reason why the laws' parameters have no intervals; empty if they have.
    """

    scaling: Scaling
    quantity: Measurement
    baseline: int
    points: tuple[ScalingPoint, ...]
    steps: tuple[Step, ...]
    laws: tuple[Fit | Refused, ...]
    better: Law | None
    why_no_interval: str

    @property
    def last_step(self) -> Step | None:
        """First step that gains significantly less than `WORTHWHILE`, if no later one gains significantly more."""
        poor = [i for i, s in enumerate(self.steps) if s.gain.high is not None and s.gain.high < WORTHWHILE]
        good = [i for i, s in enumerate(self.steps) if s.gain.low is not None and s.gain.low >= WORTHWHILE]
        later = [i for i in poor if i > max(good, default=-1)]
        return self.steps[later[0]] if later else None


def analyse_scaling(
    runs: Runs,
    scaling: Scaling = Scaling.STRONG,
    baseline: int | None = None,
    *,
    speedups: Mapping[int, Estimate] | None = None,
    level: float = LEVEL,
) -> ScalingAnalysis:
    """Estimate speedups, and fit the laws of strong or weak scaling.

    Args:
        runs: of at least one worker count.
        scaling: quantity that grows with the workers.
        baseline: worker count to compare with; None: the smallest.
        speedups: relative to the baseline, for every worker count; None: estimated from independent samples.
        level: of each law's intervals, of those of all steps together, and of those of all speedups together.

    Raises:
        RayparError: there are no runs of the baseline.
    """
    counts = sorted(runs.values)
    base = counts[0] if baseline is None else baseline
    if base not in runs.values:
        hint = f"worker counts that have runs: {', '.join(map(str, counts))}"
        raise RayparError(f"no run with {base} workers to compare with", hint=hint)
    single = [n for n in counts if len(runs.values[n]) < 2]
    by_count = {n: rates_of(runs, scaling, n) for n in counts}
    rates = log_rates({n: np.log(each) for n, each in by_count.items()}, are_paired=runs.are_paired)
    of_each = 1 - (1 - level) / max(1, len(counts) - 1)
    speedups = speedups or {
        n: reference(len(each)) if n == base else ratio_estimate(each, by_count[base], paired=False, level=of_each)
        for n, each in by_count.items()
    }
    laws = tuple(fit_law(law, rates, base, level) for law in LAWS[scaling])
    return ScalingAnalysis(
        scaling=scaling,
        quantity=runs.quantity,
        baseline=base,
        points=tuple(ScalingPoint(n, base, median_estimate(runs.values[n]), speedups[n], scaling) for n in counts),
        steps=tuple(_steps(counts, rates, speedups, base, level)),
        laws=laws,
        better=better_law(laws),
        why_no_interval=f"{', '.join(map(str, single))} workers ran only once" if single else "",
    )


def _steps(
    counts: Sequence[int], rates: LogRates, speedups: Mapping[int, Estimate], base: int, level: float
) -> Iterator[Step]:
    ends = [counts[0]]
    while (following := next((n for n in counts if n >= 2 * ends[-1]), None)) is not None:
        ends.append(following)
    for start, end in pairwise(ends):
        ratio = speedups[end]
        if start != base:
            by_medians = rates.ratio(start, end, 1 - (1 - level) / (len(ends) - 1))
            ratio = by_medians.scaled(speedups[end].value / speedups[start].value / by_medians.value)
        yield _step(start, end, ratio)


def _step(start: int, end: int, ratio: Estimate) -> Step:
    num_doublings = math.log2(end / start)
    return Step(start, end, ratio.mapped(lambda rate: float(rate ** (1 / num_doublings))))


def karp_flatt(speedup: float, num_workers: float) -> float:
    """Return the serial fraction that a speedup implies, (1/S - 1/N) / (1 - 1/N). It is negative if S exceeds N.

    Karp and Flatt, "Measuring Parallel Processor Performance", CACM 33(5), 1990.
    """
    return (1 / speedup - 1 / num_workers) / (1 - 1 / num_workers)


def gustafson_fraction(speedup: float, num_workers: float) -> float:
    """Return the serial fraction that a speedup implies by Gustafson's law, (N - S) / (N - 1)."""
    return (num_workers - speedup) / (num_workers - 1)


def rates_of(runs: Runs, scaling: Scaling, num_workers: int) -> Floats:
    """Return the rates of a worker count, one for each repeat: work per second of the whole gang."""
    values = np.asarray(runs.values[num_workers], dtype=np.float64)
    if runs.quantity is Measurement.THROUGHPUT:
        return values
    return (num_workers if scaling is Scaling.WEAK else 1) / values


# ---- groups of a study

SAMPLES_PER_S = "samples/s"
TRAININGS_PER_S = "trainings/s"  # for train loops, whose samples raypar can't count


@dataclass(frozen=True)
class WorkerGroup:
    """Points that differ only in ``num_workers``, at least two of them with finished trials.

    Attributes:
        point: the other swept hyperparameters, which they share.
        scaling: weak if the config fixes ``per_worker_batch_size``.
        runs: the rates of the finished trials.
        unit: of the rates.
        baseline: worker count that speedups are relative to: the study's, or else the smallest with finished trials.
        speedups: by worker count, from the smallest; 1 for the baseline itself.
        excluded: worker counts without a finished trial, and the outcome of their trials.
        level: of the laws' intervals in the study's report.
    """

    point: Mapping[str, Value]
    scaling: Scaling
    runs: Runs
    unit: str
    baseline: int
    speedups: Mapping[int, Estimate]
    excluded: Mapping[int, str]
    level: float = LEVEL

    @property
    def label(self) -> str:
        """Shared part of the points: ``batch_size=64``; empty if nothing else is swept."""
        return point_label(self.point) if self.point else ""

    @property
    def points(self) -> tuple[ScalingPoint, ...]:
        return self.analysis.points

    @cached_property
    def analysis(self) -> ScalingAnalysis:
        return self.analyse(self.level)

    def analyse(self, level: float) -> ScalingAnalysis:
        """Estimate the group's numbers and fit the laws."""
        return analyse_scaling(self.runs, self.scaling, self.baseline, speedups=self.speedups, level=level)


def worker_groups(
    question: Question, gathered: Sequence[PointSamples], baseline: int | None = None, family: Family | None = None
) -> tuple[WorkerGroup, ...]:
    """Return the groups of a study, in the order of their points.

    Args:
        baseline: worker count to compare with; None: the study's.
        family: of the study's comparisons, if it is known already.

    Raises:
        RayparError: a group has no finished trial with `baseline` workers.
    """
    by_rest: dict[PointKey, dict[int, PointSamples]] = {}
    for samples in gathered:
        if "num_workers" in samples.point and samples.num_workers is not None:
            by_rest.setdefault(point_key(samples.rest), {})[samples.num_workers] = samples
    family = family or family_of(question, gathered)
    sorted_counts = (dict(sorted(by_count.items())) for by_count in by_rest.values())
    groups = [g for by_count in sorted_counts if (g := _group(question, by_count, baseline, family)) is not None]
    num_blocks = min((len(v) for g in groups for v in g.runs.values.values()), default=0)
    return tuple(replace(g, level=family.law_level(len(groups), num_blocks)) for g in groups)


def _group(
    question: Question, by_count: Mapping[int, PointSamples], baseline: int | None, family: Family
) -> WorkerGroup | None:
    timed = {n: samples for n, samples in by_count.items() if samples.times}
    if len(timed) < 2:
        return None
    first = next(iter(timed.values()))
    asked = question.baseline.get("num_workers") if baseline is None else baseline
    base = asked if isinstance(asked, int) and asked in timed else min(timed)
    if baseline is not None and base != baseline:
        at = f" at {point_label(first.rest)}" if first.rest else ""
        raise RayparError(
            f"no finished trial with {baseline} workers{at} to compare with",
            hint=f"worker counts that have some: {', '.join(map(str, timed))}",
        )
    if base != question.baseline.get("num_workers") or question.compared_keys() != ("num_workers",):
        family = family.secondary  # elsewhere these are the speedups of the points
    ratios = {n: reference(len(s.samples)) if n == base else family.speedup(timed[base], s) for n, s in timed.items()}
    speedups = {n: ratio for n, ratio in ratios.items() if ratio is not None}
    counts_samples = all(s.throughput is not None for p in timed.values() for s in p.samples.values())
    rates = {
        n: s.by_repeat("throughput") if counts_samples else {r: 1 / time_s for r, time_s in s.times.items()}
        for n, s in timed.items()
        if n in speedups
    }
    return WorkerGroup(
        point=first.rest,
        scaling=Scaling.STRONG if first.config.get("per_worker_batch_size") is None else Scaling.WEAK,
        runs=Runs(
            {n: tuple(of_count.values()) for n, of_count in rates.items()},
            Measurement.THROUGHPUT,
            are_paired=len({tuple(of_count) for of_count in rates.values()}) == 1,
        ),
        unit=SAMPLES_PER_S if counts_samples else TRAININGS_PER_S,
        baseline=base,
        speedups=speedups,
        excluded={n: _why_no_time(samples) for n, samples in by_count.items() if n not in speedups},
    )


def _why_no_time(samples: PointSamples) -> str:
    return samples.outcome or ("finished without a time" if samples.results else "not run yet")
