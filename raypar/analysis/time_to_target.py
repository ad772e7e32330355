"""Time to target: seconds and samples that a trial trains until its metric reaches a value.

The clock of `Start.FIRST_STEP` counts only the timed steps; start-up, warm-up and evaluation are not in it. That of
`Start.LAUNCH` runs from the start of the trial's processes. Their resolution is that of the evaluations: a target that
is met between two of them is reached at the second. For training code that raypar can't instrument, only the times of
reports are known, so the clock runs from launch.

A trial that ends without reaching the target is censored: it counts in the median as longer (`raypar.analysis.stats`).
A trial that diverged has missed the target, even if it had reached it before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import TypeGuard

from raypar.analysis.question import PointSamples, Question, reported_values
from raypar.analysis.stats import Estimate, censored_median_estimate
from raypar.study.metric import Metric
from raypar.study.space import Value
from raypar.study.trial import SINCE_LAUNCH, TrialResult, TrialState, gain


class Start(StrEnum):
    """Start of the clock."""

    FIRST_STEP = "first-step"
    LAUNCH = "launch"


class TargetStatus(StrEnum):
    """State of a trial with regard to the target."""

    REACHED = "reached it"
    MISSED = "did not reach it"
    UNKNOWN = "unknown"  # its reports lack the metric, or the time at which it was reached
    FAILED = "failed"


@dataclass(frozen=True)
class Target:
    """Value of a metric that is good enough.

    Attributes:
        mode: "max": this or more; "min": this or less.
        unit: of the metric, as in `Metric`.
    """

    metric: str
    value: float
    mode: str = "max"
    unit: str = ""

    def show(self, value: float) -> str:
        """Return a value of the metric: ``93.2 %``."""
        return Metric(self.metric, self.mode, self.unit).show(value)

    def is_reached_by(self, value: float | None) -> bool:
        return _is_finite(value) and gain(self.mode, value) >= gain(self.mode, self.value)


@dataclass(frozen=True)
class TrialToTarget:
    """One trial on its way to the target.

    Attributes:
        time_s: until the first report that reaches the target; None if it was not reached, or its time is unknown.
        num_samples: samples until then; None if unknown.
        best: best value of the metric in any report.
        num_reports: number of reports up to the one that reached it; 0 if it was not reached.
    """

    repeat: int
    status: TargetStatus
    time_s: float | None = None
    num_samples: float | None = None
    best: float | None = None
    num_reports: int = 0


@dataclass(frozen=True)
class PointToTarget:
    """Trials of one point on their way to the target.

    Attributes:
        trials: by repeat.
        time_s: median of all trials, where those that missed the target count as longer; None if at most half reached
            it.
    """

    point: Mapping[str, Value]
    trials: tuple[TrialToTarget, ...]
    time_s: Estimate | None

    def num_in(self, status: TargetStatus) -> int:
        return sum(trial.status is status for trial in self.trials)

    @property
    def is_always_reached(self) -> bool:
        """True if every trial that did not fail reached it, and there is one."""
        return {trial.status for trial in self.trials} - {TargetStatus.FAILED} == {TargetStatus.REACHED}

    @property
    def times(self) -> dict[int, float]:
        """Seconds by repeat, for the trials that reached it."""
        return {trial.repeat: trial.time_s for trial in self.trials if trial.time_s is not None}

    @property
    def samples(self) -> dict[int, float]:
        """Samples by repeat, for the trials that reached it, if known."""
        return {trial.repeat: trial.num_samples for trial in self.trials if trial.num_samples is not None}


def metric_of(question: Question, name: str, results: Sequence[TrialResult]) -> Metric:
    """Return the study's metric, or another metric that trials report, with its unit."""
    metric = question.judged_by if name == question.metric else Metric(name)
    return metric.read_from(reported_values(results, name))


def reported_metrics(results: Sequence[TrialResult]) -> tuple[str, ...]:
    """Return every key of any report."""
    return tuple(dict.fromkeys(key for result in results for report in result.reports for key in report))


def time_to_target(samples: PointSamples, target: Target, start: Start = Start.FIRST_STEP) -> PointToTarget:
    """Return when the trials of a point reached the target."""
    trials = tuple(trial_to_target(result, target, start) for result in samples.results)
    times = [trial.time_s for trial in trials if trial.time_s is not None]
    num_missed = sum(trial.status is TargetStatus.MISSED for trial in trials)
    return PointToTarget(samples.point, trials, censored_median_estimate(times, num_missed))


def trial_to_target(result: TrialResult, target: Target, start: Start = Start.FIRST_STEP) -> TrialToTarget:
    """Return when one trial reached the target."""
    repeat = result.spec.repeat
    if result.state is TrialState.FAILED:
        return TrialToTarget(repeat, TargetStatus.FAILED)
    values = [report.get(target.metric) for report in result.reports]
    reported = [value for value in values if _is_finite(value)]
    if not reported:
        return TrialToTarget(repeat, TargetStatus.MISSED if result.state.traits.is_unusable else TargetStatus.UNKNOWN)
    best = max(reported, key=partial(gain, target.mode))
    at = next((i for i, value in enumerate(values) if target.is_reached_by(value)), None)
    if at is None or result.state.traits.is_unusable:
        return TrialToTarget(repeat, TargetStatus.MISSED, best=best)
    time_s, num_samples = _spent(result, at, start)
    if time_s is None or time_s <= 0:
        return TrialToTarget(repeat, TargetStatus.UNKNOWN, best=best)
    return TrialToTarget(repeat, TargetStatus.REACHED, time_s, num_samples, best, at + 1)


def _spent(result: TrialResult, at: int, start: Start) -> tuple[float | None, float | None]:
    """Return seconds and samples up to the report of this index; None if a part of them is unknown."""
    if result.conditions.is_foreign:
        return result.reports[at].get(SINCE_LAUNCH), None
    if result.train_time_s is None:
        return None, None
    reports = result.reports[: at + 1]  # each has the time of the steps since the one before
    time_s = _sum(report.get("train_time_s") for report in reports)
    rates = ((report.get("throughput_samples_per_s"), report.get("train_time_s")) for report in reports)
    num_samples = _sum(_product(*pair) for pair in rates)
    eval_time_s = _sum(report.get("eval_time_s") for report in reports)
    if at == len(result.reports) - 1:  # the trial's totals are known, too
        time_s = result.train_time_s if time_s is None else time_s
        eval_time_s = result.eval_time_s if eval_time_s is None else eval_time_s
        if num_samples is None:
            num_samples = _product(result.throughput_samples_per_s, result.train_time_s)
    if start is Start.LAUNCH:
        time_s = _sum([time_s, result.startup_s, result.warmup_s, eval_time_s])
    return time_s, num_samples


def _is_finite(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def _sum(parts: Iterable[float | None]) -> float | None:
    """Return the sum; None if a part is unknown."""
    numbers = list(parts)
    return sum(n for n in numbers if _is_finite(n)) if all(map(_is_finite, numbers)) else None


def _product(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else first * second
