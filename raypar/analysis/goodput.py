"""What a batch size does, split in two: samples per second, and how far a sample takes the training.

Goodput is throughput × progress per sample (Qiao et al., Pollux, OSDI 2021). Pollux estimates the progress from the
noise of the gradients; here it is measured: the samples that the base needs to reach the target, over
those that this batch needs. The base is the baseline's batch size, or else the smallest. Both factors are relative to
it, and so is their product, which is how many times as fast the target is reached.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from raypar.analysis.pairwise import by_block
from raypar.analysis.question import PointKey, PointSamples, Question, point_key
from raypar.analysis.stats import Estimate, ratio_estimate, reference
from raypar.analysis.time_to_target import Start, Target, time_to_target
from raypar.study.space import Value
from raypar.study.trial import TrialState, gain

BATCH_KEYS = ("batch_size", "per_worker_batch_size")


@dataclass(frozen=True)
class Goodput:
    """One batch size against the base of its group.

    Attributes:
        throughput: samples per second until the target, over those of the base: hardware efficiency.
        progress: per sample, over that of the base: statistical efficiency.
        goodput: their product, from the same trials.
    """

    batch_size: int
    throughput: Estimate
    progress: Estimate
    goodput: Estimate


@dataclass(frozen=True)
class BatchGroup:
    """Points that differ in their batch size only.

    Attributes:
        key: the hyperparameter, of the whole batch or that of a worker.
        rest: the other swept hyperparameters, which they share.
        batches: from the smallest.
        base: the batch size that all are held against: the baseline's, or the smallest.
    """

    key: str
    rest: Mapping[str, Value]
    batches: tuple[Goodput, ...]
    base: int


@dataclass(frozen=True)
class _Run:
    """Until the target."""

    num_samples: float
    time_s: float


def batch_groups(
    gathered: Sequence[PointSamples], target: Target, baseline: Mapping[str, Value] | None = None
) -> tuple[BatchGroup, ...]:
    """Every group of two batch sizes or more that reached the target in all their trials.

    Args:
        baseline: of the study: the batch size in it is what the others are held against; else the smallest of a group.
    """
    found: dict[tuple[str, PointKey], dict[int, dict[int, _Run]]] = {}
    rests: dict[tuple[str, PointKey], dict[str, Value]] = {}
    for samples in gathered:
        key = next((k for k in BATCH_KEYS if k in samples.point), None)
        size = samples.point.get(key) if key else None
        if key is None or not isinstance(size, int) or not (runs := _runs(samples, target)):
            continue
        rest = {k: v for k, v in samples.point.items() if k != key}
        rests[key, point_key(rest)] = rest
        found.setdefault((key, point_key(rest)), {})[size] = runs
    return tuple(
        _group(name[0], rests[name], dict(sorted(by_size.items())), baseline or {})
        for name, by_size in found.items()
        if len(by_size) > 1
    )


def common_target(question: Question, gathered: Sequence[PointSamples]) -> Target | None:
    """The best value of the study's metric that all finished trials with a batch size of their own have reached.

    None where it tells nothing: a trial reported no value, or each had reached it at its first report.
    """
    reports = [
        [report[question.metric] for report in result.reports if question.metric in report]
        for samples in gathered
        if any(key in samples.point for key in BATCH_KEYS)
        for result in samples.results
        if result.state is TrialState.FINISHED
    ]
    values = [[v for v in series if math.isfinite(v)] for series in reports]
    if not values or not all(values):
        return None
    rank = partial(gain, question.mode)
    target = Target(question.metric, min((max(series, key=rank) for series in values), key=rank), question.mode)
    return None if all(target.is_reached_by(series[0]) for series in values) else target


def _runs(samples: PointSamples, target: Target) -> dict[int, _Run]:
    """By repeat; empty where not every trial reached the target."""
    reached = time_to_target(samples, target, Start.FIRST_STEP)
    counts, times = reached.samples, reached.times
    if not reached.is_always_reached or counts.keys() != times.keys():
        return {}
    return {repeat: _Run(counts[repeat], times[repeat]) for repeat in times if counts[repeat] > 0}


def _group(
    key: str, rest: Mapping[str, Value], by_size: Mapping[int, Mapping[int, _Run]], baseline: Mapping[str, Value]
) -> BatchGroup:
    named = baseline.get(key)
    base = named if isinstance(named, int) and named in by_size else next(iter(by_size))
    one = reference(len(by_size[base]))
    batches = (
        Goodput(size, one, one, one) if size == base else _goodput(size, runs, by_size[base])
        for size, runs in by_size.items()
    )
    return BatchGroup(key, rest, tuple(batches), base)


def _goodput(size: int, runs: Mapping[int, _Run], base: Mapping[int, _Run]) -> Goodput:
    ours, theirs, is_paired = by_block(runs, base)
    rates, base_rates = ([run.num_samples / run.time_s for run in side] for side in (ours, theirs))
    return Goodput(
        size,
        throughput=ratio_estimate(rates, base_rates, paired=is_paired),
        progress=ratio_estimate([r.num_samples for r in theirs], [r.num_samples for r in ours], paired=is_paired),
        goodput=ratio_estimate([r.time_s for r in theirs], [r.time_s for r in ours], paired=is_paired),
    )
