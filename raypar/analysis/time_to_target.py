"""How long a trial trains until its metric reaches a target: time to accuracy, and samples to accuracy.

The clock of `Start.FIRST_STEP` runs in the timed steps alone, from the first of them to the report that reaches the
target; start-up, warm-up and evaluation are left out. That of `Start.LAUNCH` runs from the start of the trial's
processes and leaves out nothing but what lies between the parts (barriers, reports). Both know no finer than the
evaluations: a target that is met between two of them is reached at the second.

A trial that ends without reaching the target is censored: all that is known is that it takes longer. So it counts in
the median, which is known where more than half have reached the target (`raypar.analysis.stats`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from raypar.analysis.question import PointSamples, Question
from raypar.analysis.stats import Estimate, censored_median_estimate
from raypar.study.space import Value
from raypar.study.trial import TrialResult, TrialState, gain

_LESS_IS_BETTER = ("loss", "error", "perplexity")


class Start(StrEnum):
    """From when on the time counts."""

    FIRST_STEP = "first-step"
    LAUNCH = "launch"


class TargetStatus(StrEnum):
    """What became of a trial, as far as the target goes."""

    REACHED = "reached it"
    MISSED = "did not reach it"
    UNKNOWN = "can't be told"  # no such metric in its reports, or reached it at a time that was not kept
    FAILED = "failed"


@dataclass(frozen=True)
class Target:
    """A value of a metric that is good enough.

    Attributes:
        mode: "max": this or more is; "min": this or less.
    """

    metric: str
    value: float
    mode: str = "max"

    def is_reached_by(self, value: float | None) -> bool:
        if value is None or not math.isfinite(value):
            return False
        return gain(self.mode, value) >= gain(self.mode, self.value)


@dataclass(frozen=True)
class TrialToTarget:
    """What one trial says.

    Attributes:
        time_s: to the first report that reaches the target; None where it was not reached, or its time not kept.
        num_samples: trained on until then; None likewise.
        best: the best value of the metric in any report; None where it was never reported.
    """

    repeat: int
    status: TargetStatus
    time_s: float | None = None
    num_samples: float | None = None
    best: float | None = None


@dataclass(frozen=True)
class PointToTarget:
    """The trials of one point.

    Attributes:
        trials: by repeat.
        time_s: median over those that reached the target and those that did not, which count as longer; None where no
            more than half did.
    """

    point: Mapping[str, Value]
    trials: tuple[TrialToTarget, ...]
    time_s: Estimate | None

    def num_in(self, status: TargetStatus) -> int:
        """How many trials this became of."""
        return sum(trial.status is status for trial in self.trials)

    @property
    def is_always_reached(self) -> bool:
        """Whether it was reached by every trial that did not fail, and there is one."""
        fates = {trial.status for trial in self.trials} - {TargetStatus.FAILED}
        return fates == {TargetStatus.REACHED}

    @property
    def times(self) -> dict[int, float]:
        """Seconds by repeat, of the trials that reached it."""
        return {trial.repeat: trial.time_s for trial in self.trials if trial.time_s is not None}

    @property
    def samples(self) -> dict[int, float]:
        """Samples to the target by repeat, of the trials that reached it and tell."""
        return {trial.repeat: trial.num_samples for trial in self.trials if trial.num_samples is not None}


def mode_of(question: Question, metric: str) -> str:
    """Whether more or less of a metric is better: as the study says for its own, by the name for others."""
    if metric == question.metric:
        return question.mode
    return "min" if any(word in metric.lower() for word in _LESS_IS_BETTER) else "max"


def reported_metrics(results: Sequence[TrialResult]) -> tuple[str, ...]:
    """Every key of any report."""
    return tuple(dict.fromkeys(key for result in results for report in result.reports for key in report))


def time_to_target(samples: PointSamples, target: Target, start: Start = Start.FIRST_STEP) -> PointToTarget:
    """What the trials of a point say. Of trials that a scheduler stopped, what they had reached by then counts."""
    trials = tuple(trial_to_target(result, target, start) for result in samples.results)
    times = [trial.time_s for trial in trials if trial.time_s is not None]
    num_missed = sum(trial.status is TargetStatus.MISSED for trial in trials)
    return PointToTarget(samples.point, trials, censored_median_estimate(times, num_missed))


def trial_to_target(result: TrialResult, target: Target, start: Start = Start.FIRST_STEP) -> TrialToTarget:
    """What one trial says. A report's ``train_time_s`` is of the steps since the report before."""
    repeat = result.spec.repeat
    if result.state is TrialState.FAILED:
        return TrialToTarget(repeat, TargetStatus.FAILED)
    values = [report.get(target.metric) for report in result.reports]
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return TrialToTarget(repeat, TargetStatus.UNKNOWN)
    best = max(known, key=partial(gain, target.mode))
    at = next((i for i, value in enumerate(values) if target.is_reached_by(value)), None)
    if at is None:
        return TrialToTarget(repeat, TargetStatus.MISSED, best=best)
    time_s = _time_s(result, at, start)
    if time_s is None or time_s <= 0:
        return TrialToTarget(repeat, TargetStatus.UNKNOWN, best=best)
    return TrialToTarget(repeat, TargetStatus.REACHED, time_s, _num_samples(result, at), best)


def _time_s(result: TrialResult, at: int, start: Start) -> float | None:
    """Seconds until the report of this index."""
    train_time_s = _sum(result, "train_time_s", at, result.train_time_s)
    if start is Start.FIRST_STEP or train_time_s is None:
        return train_time_s
    rest = [result.startup_s, result.warmup_s, _sum(result, "eval_time_s", at, result.eval_time_s)]
    known = [part for part in rest if part is not None]
    return train_time_s + sum(known) if len(known) == len(rest) else None


def _num_samples(result: TrialResult, at: int) -> float | None:
    if result.train_time_s is None:
        return None  # a train loop's, whose reports raypar does not understand
    reports = result.reports[: at + 1]
    counts = [_product(report.get("throughput_samples_per_s"), report.get("train_time_s")) for report in reports]
    known = [count for count in counts if count is not None]
    if len(known) == len(counts):
        return sum(known)
    if at == len(result.reports) - 1:
        return _product(result.throughput_samples_per_s, result.train_time_s)
    return None


def _sum(result: TrialResult, key: str, at: int, total: float | None) -> float | None:
    """Over the reports up to this one; of the last one, the trial's total where reports don't tell."""
    if result.train_time_s is None:
        return None  # a train loop's, whose reports raypar does not understand
    parts = [report.get(key) for report in result.reports[: at + 1]]
    known = [part for part in parts if part is not None and math.isfinite(part)]
    if len(known) == len(parts):
        return sum(known)
    return total if at == len(result.reports) - 1 else None


def _product(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else first * second
