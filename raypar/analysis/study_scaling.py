"""How a study scales: its points that differ only in ``num_workers``, group by group.

What is compared are rates: samples per second of the timed region, or trainings per second where raypar can't look
into the training. They need no factor, for an epoch is the same number of samples whatever the worker count. In strong
scaling (``batch_size`` fixed) a rate is the work of all over the time of all. In weak scaling
(``per_worker_batch_size`` fixed) the work grows with the workers in a step, not in an epoch, which has fewer steps
instead: the rate of N workers is N times that of one of them, and over the rate of one worker alone it is N times what
is left of a worker's rate among N, which is Gustafson's scaled speedup. Twice the samples per second on two workers
are a speedup of 2 either way; only the law differs that is fitted to it.

Speedups are those of `raypar.analysis.points`, from trials of the same block. The laws' bootstrap draws the repeats of
each worker count on their own: what disturbed a whole block makes its intervals wider, never narrower.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from raypar.analysis.last_asked import last_asked
from raypar.analysis.laws import Scaling
from raypar.analysis.points import ratio_of
from raypar.analysis.question import PointKey, PointSamples, Question, collect, point_key, time_metric_of
from raypar.analysis.scaling import ScalingAnalysis, analyse_scaling, karp_flatt_of
from raypar.analysis.stats import Estimate, reference
from raypar.analysis.table import Quantity, Runs
from raypar.errors import RayparError
from raypar.study.space import Value
from raypar.study.trial import TrialResult, TrialState, point_label

SAMPLES_PER_S = "samples/s"
TRAININGS_PER_S = "trainings/s"  # whole trainings: of train loops, whose samples raypar can't count
# Fewer than for a file: a study has many groups. Bounds move by less than a tenth of an interval's width.
NUM_RESAMPLES = 300


@dataclass(frozen=True)
class WorkerGroup:
    """Points that differ only in ``num_workers``, two or more with finished trials.

    Attributes:
        point: the other swept hyperparameters, which they share.
        scaling: weak where the config fixes ``per_worker_batch_size``.
        runs: the rates of the finished trials.
        unit: of the rates.
        baseline: the worker count that speedups are over: the study's, else the smallest that has finished trials.
        speedups: over the baseline, by worker count, from the smallest; 1 for the baseline itself.
        left_out: worker counts without a finished trial, and what became of theirs.
    """

    point: Mapping[str, Value]
    scaling: Scaling
    runs: Runs
    unit: str
    baseline: int
    speedups: Mapping[int, Estimate]
    left_out: Mapping[int, str]

    @property
    def label(self) -> str:
        """``batch_size=64``; empty where nothing else is swept."""
        return point_label(self.point) if self.point else ""

    @property
    def karp_flatt(self) -> dict[int, Estimate]:
        """The serial fraction that each speedup shows, by worker count; the baseline shows none."""
        return {n: karp_flatt_of(s, n / self.baseline) for n, s in self.speedups.items() if n != self.baseline}

    @cached_property
    def analysis(self) -> ScalingAnalysis:
        """The same as `analyse` gives, made once."""
        return self.analyse()

    def analyse(self, num_resamples: int = NUM_RESAMPLES) -> ScalingAnalysis:
        """Its numbers and the laws fitted to them, which takes about a millisecond for each resample."""
        return analyse_scaling(
            self.runs, self.scaling, self.baseline, speedups=self.speedups, num_resamples=num_resamples
        )


def worker_groups(
    question: Question, gathered: Sequence[PointSamples], baseline: int | None = None
) -> tuple[WorkerGroup, ...]:
    """The groups of a study, in the order of their points.

    Args:
        question: what the study asks.
        gathered: the trials of each point.
        baseline: the worker count to compare with; None: the study's.

    Raises:
        RayparError: a group has no finished trial with `baseline` workers.
    """
    by_rest: dict[PointKey, dict[int, PointSamples]] = {}
    for samples in gathered:
        if "num_workers" in samples.point and samples.num_workers is not None:
            by_rest.setdefault(point_key(_rest(samples)), {})[samples.num_workers] = samples
    groups = (_group(question, dict(sorted(by_count.items())), baseline) for by_count in by_rest.values())
    return tuple(group for group in groups if group is not None)


def groups_in(
    question: Question, results: Sequence[TrialResult], baseline: int | None = None
) -> tuple[WorkerGroup, ...]:
    """The same from a study's results, in any order; those of other settings are left out."""
    results = last_asked(question, results).results
    return worker_groups(question, collect(question, results, time_metric_of(results)), baseline)


def _group(question: Question, by_count: Mapping[int, PointSamples], baseline: int | None) -> WorkerGroup | None:
    """None for fewer than two worker counts with finished trials."""
    timed = {n: samples for n, samples in by_count.items() if samples.all_of("time_s")}
    if len(timed) < 2:
        return None
    first = next(iter(timed.values()))
    rest = _rest(first)
    asked = question.baseline.get("num_workers") if baseline is None else baseline
    base = asked if isinstance(asked, int) and asked in timed else min(timed)
    if baseline is not None and base != baseline:
        at = f" at {point_label(rest)}" if rest else ""
        raise RayparError(
            f"no finished trial with {baseline} workers{at} to compare with",
            hint=f"worker counts that have some: {', '.join(map(str, timed))}",
        )
    ratios = {n: reference(len(s.samples)) if n == base else ratio_of(timed[base], s) for n, s in timed.items()}
    speedups = {n: ratio for n, ratio in ratios.items() if ratio is not None}
    counts_samples = all(s.throughput is not None for p in timed.values() for s in p.samples.values())
    return WorkerGroup(
        point=rest,
        scaling=Scaling.STRONG if first.config.get("per_worker_batch_size") is None else Scaling.WEAK,
        runs=Runs({n: _rates(timed[n], counts_samples) for n in speedups}, Quantity.THROUGHPUT),
        unit=SAMPLES_PER_S if counts_samples else TRAININGS_PER_S,
        baseline=base,
        speedups=speedups,
        left_out={n: _fate(samples) for n, samples in by_count.items() if n not in speedups},
    )


def _rest(samples: PointSamples) -> dict[str, Value]:
    return {key: value for key, value in samples.point.items() if key != "num_workers"}


def _rates(samples: PointSamples, counts_samples: bool) -> tuple[float, ...]:
    return tuple(samples.all_of("throughput") if counts_samples else (1 / t for t in samples.all_of("time_s")))


def _fate(samples: PointSamples) -> str:
    """What became of the trials of a point that has no time."""
    if samples.num_in(TrialState.FAILED):
        return "failed"
    if samples.num_in(TrialState.STOPPED):
        return "stopped early"
    return "finished without a time" if samples.results else "not run yet"
