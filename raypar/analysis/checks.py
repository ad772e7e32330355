"""What to mind when reading a study's numbers.

A new check is a member of `Check` with its advice, a function from the `Evidence` to findings, and a line in `CHECKS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import combinations
from typing import Any, TypeAlias

import numpy as np

from raypar import units
from raypar.analysis.points import PointAnalysis, differences
from raypar.analysis.question import WALL_TIME, PointKey, PointSamples, Question, point_key
from raypar.analysis.stats import MIN_RANKED, median_estimate
from raypar.study.trial import TrialState, point_label

MIN_REPEATS = 5
MIN_TIME_S = 1.0
MAX_FOREIGN_SHARE = 0.1
MIN_METRIC_DIFFERENCE = 1e-3  # of the value: less is below what a report shows
MAX_NAMED = 3  # points that a finding names one by one


class Check(Enum):
    """What can be amiss; the value is the advice."""

    BASELINE_MISSING = "Run the study again: finished trials are kept, and the baseline's are made up for."
    FAILED_TRIALS = "Run the study again: finished trials are kept, failed ones get another try."
    INCLUDES_START_UP = (
        "Make trials long against their start, or hand model and data to Workload(model=…, data=…): "
        "then the steps alone are timed."
    )
    SHARED_CORES = (
        "Leave the machine to the study, or give workers fewer cores: where trials share them, their times say as "
        "much about the neighbours."
    )
    TOO_MANY_THREADS = (
        "Leave num_threads out, or raise cpus_per_worker: torch's threads wait for each other in a loop, and on one "
        "core each keeps the other from running."
    )
    METRIC_DIFFERS = (
        "Don't read the speedup as time saved for the same result; compare the time to a target, or tune lr for "
        "each number of workers."
    )
    SHORT_TIMES = "Raise epochs or num_samples, so that a trial trains for some seconds."
    FEW_REPEATS = f"Add repeats, say --repeats {MIN_RANKED}: finished trials are kept."
    NOT_SEPARATED = "More repeats narrow the intervals; longer trials steady the times."


@dataclass(frozen=True)
class Finding:
    """One thing to mind: what kind it is (with the advice), and the particulars."""

    check: Check
    detail: str

    @property
    def advice(self) -> str:
        return self.check.value


@dataclass(frozen=True)
class Evidence:
    """What checks look at: `gathered` and `points` are in the same order."""

    question: Question
    time_metric: str
    gathered: tuple[PointSamples, ...]
    points: tuple[PointAnalysis, ...]


OneCheck: TypeAlias = Callable[[Evidence], Iterator[Finding]]


def find_all(evidence: Evidence) -> tuple[Finding, ...]:
    """Every finding, in the order of `CHECKS`."""
    return tuple(finding for check in CHECKS for finding in check(evidence))


def _baseline_missing(evidence: Evidence) -> Iterator[Finding]:
    question = evidence.question
    if not question.baseline:
        return
    timed = {point_key(p.point) for p in evidence.points if p.time_s is not None}
    orphans = [
        p.point
        for p in evidence.points
        if p.time_s is not None and point_key(question.baseline_of(p.point)) not in timed
    ]
    if orphans:
        missing = {point_key(b): b for b in map(question.baseline_of, orphans)}
        named = _named([point_label(b) for b in missing.values()])
        yield Finding(
            Check.BASELINE_MISSING,
            f"{units.counted(len(orphans), 'point')} without a speedup: no finished trial of the baseline {named}.",
        )


def _failed_trials(evidence: Evidence) -> Iterator[Finding]:
    failed = [r for p in evidence.gathered for r in p.results if r.state is TrialState.FAILED]
    if not failed:
        return
    first = failed[0]
    cause = first.failure.message.strip().splitlines() if first.failure else []
    text = f"{units.counted(len(failed), 'trial')} failed; {first.spec.label}"
    text += f": {cause[0]}" if cause else "."
    if first.failure and first.failure.log_path:
        text += f" (log: {first.failure.log_path})"
    yield Finding(Check.FAILED_TRIALS, text)


def _includes_start_up(evidence: Evidence) -> Iterator[Finding]:
    if evidence.time_metric == WALL_TIME and any(p.time_s for p in evidence.points):
        yield Finding(
            Check.INCLUDES_START_UP,
            "Times are of whole trials: process start, data loading, evaluation and reports are in them, because a "
            "train loop can't be looked into. Speedups come out closer to 1 than those of the training steps.",
        )


def _shared_cores(evidence: Evidence) -> Iterator[Finding]:
    finished = [r for p in evidence.gathered for r in p.results if r.state is TrialState.FINISHED]
    unpinned = sum(_is_unpinned(r.environment.get("cores")) for r in finished)
    if unpinned:
        yield Finding(
            Check.SHARED_CORES, f"{unpinned} of {units.counted(len(finished), 'trial')} had no cores of their own."
        )
    # Not cpu_wait_share: a rank's own threads (gloo's beside torch's) wait for each other too.
    shares = [_largest(r.environment.get("foreign_cpu_share")) for r in finished]
    disturbed = [share for share in shares if share > MAX_FOREIGN_SHARE]
    if disturbed:
        yield Finding(
            Check.SHARED_CORES,
            f"{len(disturbed)} of {units.counted(len(finished), 'trial')} shared their cores: others kept them busy "
            f"for more than {units.percent(MAX_FOREIGN_SHARE)} of the time, at worst {units.percent(max(disturbed))}.",
        )


def _too_many_threads(evidence: Evidence) -> Iterator[Finding]:
    finished = [r for p in evidence.gathered for r in p.results if r.state is TrialState.FINISHED]
    crowded = [(t, c) for r in finished for t, c in _threads_on_cores(r.environment) if t > c > 0]
    if crowded:
        threads, cores = max(crowded, key=lambda pair: pair[0] / pair[1])
        yield Finding(
            Check.TOO_MANY_THREADS,
            f"A worker had {units.counted(threads, 'torch thread')} on {units.counted(cores, 'core')}: that can be "
            "many times slower than one thread a core.",
        )


def _metric_differs(evidence: Evidence) -> Iterator[Finding]:
    """Points that differ only in ``num_workers`` should be equally good: equal batches give equal gradients.

    Told only where the difference is larger than either point's own spread over the repeats, and the interval of the
    block-wise differences excludes 0 (its five percent of false alarms are what the first condition is against).
    """
    name = evidence.question.metric
    groups: dict[PointKey, list[PointSamples]] = {}
    for samples in evidence.gathered:
        rest = {k: v for k, v in samples.point.items() if k != "num_workers"}
        groups.setdefault(point_key(rest), []).append(samples)
    found: list[str] = []
    for group in groups.values():
        for one, other in combinations(group, 2):
            if _differs(one, other):
                values = [units.score(name, float(np.median(s.all_of("metric")))) for s in (one, other)]
                found.append(f"{values[0]} at {point_label(one.point)}, {values[1]} at {point_label(other.point)}")
    if found:
        yield Finding(
            Check.METRIC_DIFFERS,
            f"{name} differs between numbers of workers by more than between repeats: {_named(found, '; ')}.",
        )


def _short_times(evidence: Evidence) -> Iterator[Finding]:
    timed = [(p.time_s.value, p) for p in evidence.points if p.time_s]
    short = [(value, p) for value, p in timed if value < MIN_TIME_S]
    if short:
        value, point = min(short, key=lambda pair: pair[0])
        yield Finding(
            Check.SHORT_TIMES,
            f"{len(short)} of {units.counted(len(timed), 'point')} took less than {MIN_TIME_S:g} s "
            f"({point_label(point.point)}: {units.seconds(value)}): start and end effects weigh in.",
        )


def _few_repeats(evidence: Evidence) -> Iterator[Finding]:
    counts = [p.time_s.num_samples for p in evidence.points if p.time_s]
    if evidence.question.is_search or not counts or (fewest := min(counts)) >= MIN_REPEATS:
        return  # a search asks for a good point, not for the effect of one
    where = "" if fewest == max(counts) else " at the least"
    if fewest == 1:
        text = f"1 repeat a point{where}: no interval, and no telling an effect from noise."
    else:
        text = f"{fewest} repeats a point{where}: the intervals are wide and assume log-normal times."
    yield Finding(Check.FEW_REPEATS, text)


def _not_separated(evidence: Evidence) -> Iterator[Finding]:
    compared = [p for p in evidence.points if p.speedup and p.speedup.low is not None and not p.is_baseline]
    tied = [p for p in compared if p.speedup and not p.speedup.excludes(1.0)]
    if tied:
        yield Finding(
            Check.NOT_SEPARATED,
            f"{len(tied)} of {units.counted(len(compared), 'speedup')} can't be told from 1: "
            f"{_named([point_label(p.point) for p in tied])}.",
        )


CHECKS: tuple[OneCheck, ...] = (
    _baseline_missing,
    _failed_trials,
    _includes_start_up,
    _shared_cores,
    _too_many_threads,
    _metric_differs,
    _short_times,
    _few_repeats,
    _not_separated,
)


def _differs(one: PointSamples, other: PointSamples) -> bool:
    changes = differences(one, other)
    if len(changes) < 2:
        return False
    spread = max(float(np.ptp(s.all_of("metric"))) for s in (one, other))
    estimate = median_estimate(changes, log_scale=False)
    floor = MIN_METRIC_DIFFERENCE * abs(float(np.median(one.all_of("metric"))))
    return estimate.excludes(0.0) and abs(estimate.value) > max(spread, floor)


def _is_unpinned(cores: Any) -> bool:
    """Whether any rank's list of cores is empty; unknown counts as no."""
    if not isinstance(cores, Sequence):
        return False
    return len(cores) == 0 or any(isinstance(of_rank, Sequence) and len(of_rank) == 0 for of_rank in cores)


def _threads_on_cores(environment: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """Of every rank that tells: its torch threads, and its cores."""
    threads, cores = environment.get("num_threads"), environment.get("cores")
    if isinstance(threads, Sequence) and isinstance(cores, Sequence):
        for count, own in zip(threads, cores, strict=False):
            if isinstance(count, int) and isinstance(own, Sequence):
                yield count, len(own)


def _largest(shares: Any) -> float:
    """The largest of a rank's shares (or one share for all); 0 where unknown."""
    listed = shares if isinstance(shares, Sequence) else [shares]
    known = [float(s) for s in listed if isinstance(s, (int, float)) and math.isfinite(s)]
    return max(known, default=0.0)


def _named(labels: Sequence[str], separator: str = ", ") -> str:
    """The first few, and how many more there are."""
    more = len(labels) - MAX_NAMED
    return separator.join(labels[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
