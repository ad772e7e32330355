"""Time to target: how long a trial trains, and on how many samples, until its metric reaches a value.

The clock of `Start.FIRST_STEP` runs in the timed steps alone, from the first of them to the report that reaches the
target; start-up, warm-up and evaluation are not in it. That of `Start.LAUNCH` runs from the start of the trial's
processes; only what lies between the parts (barriers, reports) is not in it. The resolution of both is that of the
evaluations: a target that is met between two of them is reached at the second.

Of training code that raypar didn't write (a script, a train loop) only the moments of its reports are known. Its clock
always runs from launch, and everything up to the report is in it.

A trial that ends without reaching the target is censored: it takes longer, nobody knows how much. So it counts in the
median, which is known where more than half have reached the target (`raypar.analysis.stats`). A trial that diverged has
missed it, whatever it had reached before.
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
    UNKNOWN = "unknown"  # no such metric in its reports, or reached it at a time that was not kept
    FAILED = "failed"


@dataclass(frozen=True)
class Target:
    """A value of a metric that is good enough.

    Attributes:
        mode: "max": this or more is; "min": this or less.
        unit: of the metric, as `Metric` has it.
    """

    metric: str
    value: float
    mode: str = "max"
    unit: str = ""

    def show(self, value: float) -> str:
        """Return a value of its metric: ``93.2 %``."""
        return Metric(self.metric, self.mode, self.unit).show(value)

    def is_reached_by(self, value: float | None) -> bool:
        return _is_finite(value) and gain(self.mode, value) >= gain(self.mode, self.value)


@dataclass(frozen=True)
class TrialToTarget:
    """One trial on its way to the target.

    Attributes:
        time_s: to the first report that reaches the target; None where it was not reached, or its time not kept.
        num_samples: trained on until then; None likewise.
        best: the best value of the metric in any report; None where it was never reported.
        num_reports: up to the one that reached it; 0 where it was not reached.
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
        time_s: median over those that reached the target and those that did not, which count as longer; None where no
            more than half did.
    """

    point: Mapping[str, Value]
    trials: tuple[TrialToTarget, ...]
    time_s: Estimate | None

    def num_in(self, status: TargetStatus) -> int:
        return sum(trial.status is status for trial in self.trials)

    @property
    def is_always_reached(self) -> bool:
        """True where every trial that did not fail reached it, and there is one."""
        return {trial.status for trial in self.trials} - {TargetStatus.FAILED} == {TargetStatus.REACHED}

    @property
    def times(self) -> dict[int, float]:
        """Seconds by repeat, of the trials that reached it."""
        return {trial.repeat: trial.time_s for trial in self.trials if trial.time_s is not None}

    @property
    def samples(self) -> dict[int, float]:
        """Samples to the target by repeat, of the trials that reached it, where that is known."""
        return {trial.repeat: trial.num_samples for trial in self.trials if trial.num_samples is not None}


def metric_of(question: Question, name: str, results: Sequence[TrialResult]) -> Metric:
    """Return a metric that trials report: as the study has it for its own, by name and values for others."""
    metric = question.judged_by if name == question.metric else Metric(name)
    return metric.read_from(reported_values(results, name))


def reported_metrics(results: Sequence[TrialResult]) -> tuple[str, ...]:
    """Return every key of any report."""
    return tuple(dict.fromkeys(key for result in results for report in result.reports for key in report))


def time_to_target(samples: PointSamples, target: Target, start: Start = Start.FIRST_STEP) -> PointToTarget:
    """Return when the trials of a point reached the target; a stopped trial counts by what it had reached by then."""
    trials = tuple(trial_to_target(result, target, start) for result in samples.results)
    times = [trial.time_s for trial in trials if trial.time_s is not None]
    num_missed = sum(trial.status is TargetStatus.MISSED for trial in trials)
    return PointToTarget(samples.point, trials, censored_median_estimate(times, num_missed))


def trial_to_target(result: TrialResult, target: Target, start: Start = Start.FIRST_STEP) -> TrialToTarget:
    """Return when one trial reached the target. A report's ``train_time_s`` is of the steps since the one before."""
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
    """Return seconds and samples up to the report of this index; None each where its parts are unknown."""
    if result.conditions.is_foreign:
        return result.reports[at].get(SINCE_LAUNCH), None  # unknown in results of earlier versions
    if result.train_time_s is None:
        return None, None
    reports = result.reports[: at + 1]
    # Up to the last report, the trial's totals are an answer too.
    totals = result if at == len(result.reports) - 1 else None
    time_s = _sum(report.get("train_time_s") for report in reports)
    counts = (_product(report.get("throughput_samples_per_s"), report.get("train_time_s")) for report in reports)
    num_samples = _sum(counts)
    if totals and time_s is None:
        time_s = totals.train_time_s
    if totals and num_samples is None:
        num_samples = _product(totals.throughput_samples_per_s, totals.train_time_s)
    if start is Start.LAUNCH:
        eval_time_s = _sum(report.get("eval_time_s") for report in reports)
        if totals and eval_time_s is None:
            eval_time_s = totals.eval_time_s
        time_s = _sum([time_s, result.startup_s, result.warmup_s, eval_time_s])
    return time_s, num_samples


def _is_finite(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def _sum(parts: Iterable[float | None]) -> float | None:
    """Return the sum; None where a part is unknown."""
    numbers = list(parts)
    return sum(n for n in numbers if _is_finite(n)) if all(map(_is_finite, numbers)) else None


def _product(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else first * second
