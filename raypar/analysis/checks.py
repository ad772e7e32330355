"""What to mind when reading a study's numbers.

A new check is a member of `Check` with its advice, a function from the `Evidence` to findings in the module of its
theme, and a line in `CHECKS`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, combinations

import numpy as np

from raypar import units
from raypar.analysis.checks_kinds import Check, Evidence, Finding, OneCheck, named
from raypar.analysis.checks_of_machines import mixed_hardware, resumed, shared_cores, side_by_side, too_many_threads
from raypar.analysis.checks_over_time import drift_in_trials, drift_over_study, outliers, slow_first_trial
from raypar.analysis.checks_while_timed import clock_changes, other_load, throttled
from raypar.analysis.points import MIN_METRIC_DIFFERENCE, differences, same_work
from raypar.analysis.question import WALL_TIME, PointKey, PointSamples, point_key
from raypar.analysis.stats import median_estimate
from raypar.study.code import are_comparable, changed_files, files_text
from raypar.study.trial import TrialState, point_label

__all__ = ["CHECKS", "Check", "Evidence", "Finding", "find_all"]

MIN_REPEATS = 5
MIN_TIME_S = 1.0
MIN_EXCESS = 0.01  # of the efficiency over 1: less is not worth a word


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
        labels = named([point_label(b) for b in missing.values()])
        yield Finding(
            Check.BASELINE_MISSING,
            f"{units.counted(len(orphans), 'point')} without a speedup: no finished trial of the baseline {labels}.",
        )


def _other_settings(evidence: Evidence) -> Iterator[Finding]:
    if evidence.aside:
        yield Finding(Check.OTHER_SETTINGS, evidence.aside)


def _other_code(evidence: Evidence) -> Iterator[Finding]:
    """Trials that ran other code than the latest one."""
    latest = max((r for r in evidence.finished if r.code), key=lambda r: r.started_at, default=None)
    if latest is None:
        return
    comparable = [r for r in evidence.finished if are_comparable(r.code, latest.code)]
    changes = [files for r in comparable if (files := changed_files(r.code, latest.code))]
    if changes:
        yield Finding(
            Check.OTHER_CODE,
            f"{len(changes)} of {units.counted(len(comparable), 'trial')} ran other code than the latest one: "
            f"{files_text(chain.from_iterable(changes))} changed in between.",
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


def _unequal_work(evidence: Evidence) -> Iterator[Finding]:
    """Points that trained on another number of samples than their baseline, unless that is what was asked."""
    question = evidence.question
    if not question.baseline or {"epochs", "num_samples"} & set(question.compared_keys()):
        return
    works = {point_key(p.point): [s.num_samples for s in p.samples.values()] for p in evidence.gathered}
    found: list[str] = []
    for samples in evidence.gathered:
        own, base = works[point_key(samples.point)], works.get(point_key(question.baseline_of(samples.point)), [])
        unequal = ((o, b) for o in own for b in base if not same_work(o, b))
        if pair := next(unequal, None):
            numbers = " against ".join(units.count(round(number)) for number in pair if number is not None)
            found.append(f"{point_label(samples.point)} ({numbers})")
    if found:
        yield Finding(
            Check.UNEQUAL_WORK,
            f"{units.counted(len(found), 'point')} trained on other numbers of samples than the baseline: "
            f"{named(found)}. Speedups there are of rates, not of times.",
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
            f"{name} differs between numbers of workers by more than between repeats: {named(found, '; ')}.",
        )


def _more_than_linear(evidence: Evidence) -> Iterator[Finding]:
    """Speedups by workers alone that are larger, with all of their interval, than workers were added."""
    if evidence.question.compared_keys() != ("num_workers",):
        return
    found = [
        f"{units.ratio(p.speedup.value)} at {point_label(p.point)}"
        for p in evidence.points
        if p.speedup and p.efficiency and p.efficiency.low is not None and p.efficiency.low > 1 + MIN_EXCESS
    ]
    if found:
        yield Finding(
            Check.MORE_THAN_LINEAR,
            f"{units.counted(len(found), 'speedup')} larger than the number of workers accounts for, by more than "
            f"chance: {named(found)}.",
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
            f"{named([point_label(p.point) for p in tied])}.",
        )


CHECKS: tuple[OneCheck, ...] = (
    _other_settings,
    _other_code,
    _baseline_missing,
    _failed_trials,
    _includes_start_up,
    mixed_hardware,
    resumed,
    shared_cores,
    side_by_side,
    other_load,
    too_many_threads,
    throttled,
    clock_changes,
    _unequal_work,
    _metric_differs,
    _more_than_linear,
    drift_over_study,
    drift_in_trials,
    slow_first_trial,
    outliers,
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
