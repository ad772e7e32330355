"""Answer to why a step takes as long as it does: its parts, and what it would take without one of them.

The parts are those that the ranks measured: in all steps of a script, and in the profiled steps of a model. What a part
costs is measured too, for scripts: by trials that leave it out, in the same blocks as complete ones.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from raypar.analysis.comparison import Comparison
from raypar.analysis.evidence import Evidence
from raypar.analysis.pairwise import Family
from raypar.analysis.points import PointAnalysis
from raypar.analysis.question import TRAIN_TIME, PointKey, point_key
from raypar.analysis.stats import Estimate, median_estimate
from raypar.study.observation import ObservedRank
from raypar.study.profile import COMMUNICATION, DATA_WAIT, PARTS, Profile, mean_of
from raypar.study.script_settings import (
    CHANGE,
    COUNTERFACTUALS,
    NO_CHECKPOINTS,
    NO_COMMUNICATION,
    NO_EVALUATION,
    NO_LOADING,
    UNCHANGED,
    WHAT_IF,
)
from raypar.study.space import Value
from raypar.study.trial import TrialResult

PART_OF = {NO_LOADING: DATA_WAIT, NO_COMMUNICATION: COMMUNICATION}  # left out by each counterfactual
WORTH_MEASURING = 0.02  # share of the time that a part must have for it to be left out


@dataclass(frozen=True)
class Part:
    """Part of a step, mean of the ranks.

    Attributes:
        time_s: median over the trials.
        share: of the step.
    """

    name: str
    time_s: Estimate
    share: Estimate


@dataclass(frozen=True)
class WhatIf:
    """Counterfactual: trials that left out a part of the work.

    Attributes:
        left_out: value of the hyperparameter ``what_if``.
        comparison: of their time with that of complete trials; the estimate is the speedup.
    """

    left_out: str
    comparison: Comparison


@dataclass(frozen=True)
class PointWhy:
    """Answer at one point.

    Attributes:
        point: without ``what_if``.
        step_s: median over the trials, slowest rank, without a profiler.
        parts: in order of a step.
        train_s: all training steps of a trial.
        eval_s: evaluations of a trial after its first step, slowest rank.
        save_s: checkpoints of a trial after its first step, slowest rank.
        samples_per_step: of all ranks; None: unknown.
        analysed: its complete trials.
    """

    point: Mapping[str, Value]
    num_workers: int
    step_s: Estimate
    parts: tuple[Part, ...]
    train_s: Estimate
    eval_s: float
    save_s: float
    samples_per_step: float | None
    what_ifs: tuple[WhatIf, ...]
    analysed: PointAnalysis

    @property
    def by_size(self) -> list[Part]:
        """Parts, the largest first."""
        return sorted(self.parts, key=lambda part: -part.time_s.value)

    @property
    def eval_share(self) -> float:
        """Share of evaluations in the time of steps, evaluations and checkpoints."""
        return self.eval_s / (self.train_s.value + self.eval_s + self.save_s)

    @property
    def save_share(self) -> float:
        """Share of checkpoints in the same time."""
        return self.save_s / (self.train_s.value + self.eval_s + self.save_s)

    @property
    def ranks(self) -> tuple[ObservedRank, ...]:
        """Ranks of its first trial."""
        first = observed(self.analysed)[0].observation
        return first.ranks if first else ()

    def share_of(self, name: str) -> float:
        """Return the share of a part."""
        return next((part.share.value for part in self.parts if part.name == name), 0.0)


@dataclass(frozen=True)
class ScalingWhy:
    """Comparison of a point with the one that has the fewest workers and is otherwise the same.

    Attributes:
        base: with the fewest workers.
        answer: with more workers.
        comparison: of their times for the same work; the estimate is the speedup.
        growth_s: seconds per step by which each part is longer; negative: shorter.
        ideal_step_s: step with perfect scaling: that of the fewest workers, for the samples that a worker gets now;
            None: the samples are unknown.
        excess_s: seconds per step by which each part exceeds perfect scaling; empty: unknown.
    """

    base: PointWhy
    answer: PointWhy
    comparison: Comparison
    growth_s: Mapping[str, float]
    ideal_step_s: float | None
    excess_s: Mapping[str, float]


def why_of(evidence: Evidence) -> tuple[PointWhy, ...]:
    """Return the answer at each point with known parts of its steps."""
    grouped: defaultdict[PointKey, dict[str, PointAnalysis]] = defaultdict(dict)
    for p in evidence.points:
        grouped[point_key(_without_defaults(p.point))][str(p.point.get(WHAT_IF, UNCHANGED))] = p
    return tuple(_why(evidence, group) for group in grouped.values() if observed(group.get(UNCHANGED)))


def _without_defaults(point: Mapping[str, Value]) -> dict[str, Value]:
    return {key: value for key, value in point.items() if key != WHAT_IF and (key, value) != (CHANGE, UNCHANGED)}


def observed(point: PointAnalysis | None) -> list[TrialResult]:
    """Return the trials of a point with known parts of their steps."""
    return [r for r in point.measured if r.profile and r.train_time_s] if point else []


def _why(evidence: Evidence, group: Mapping[str, PointAnalysis]) -> PointWhy:
    complete = group[UNCHANGED]
    results = observed(complete)
    return PointWhy(
        point=_without_defaults(complete.point),
        num_workers=results[0].spec.placement.num_workers,
        step_s=median_estimate([step_s for r in complete.measured if (step_s := _step_s(r))]),
        parts=tuple(_parts([r.profile for r in results if r.profile])),
        train_s=median_estimate([r.train_time_s for r in results if r.train_time_s]),
        eval_s=statistics.median(map(_eval_s, results)),
        save_s=statistics.median(map(_save_s, results)),
        samples_per_step=_samples_per_step(results[0]),
        what_ifs=tuple(
            WhatIf(left_out, Comparison(_gain(evidence, left_out, complete, group[left_out]), doubt=evidence.doubt))
            for left_out in COUNTERFACTUALS
            if observed(group.get(left_out))
        ),
        analysed=complete,
    )


def _ranks(result: TrialResult) -> tuple[ObservedRank, ...]:
    return result.observation.ranks if result.observation else ()


def _step_s(result: TrialResult) -> float | None:
    """Return the time of a step on the slowest rank; None: unknown."""
    if not _ranks(result) and all(result.step_times_s):
        return max(map(statistics.fmean, result.step_times_s), default=None)
    return result.profile.step_s if result.profile else None


def _eval_s(result: TrialResult) -> float:
    return max((rank.eval_s for rank in _ranks(result)), default=result.eval_time_s or 0.0)


def _save_s(result: TrialResult) -> float:
    return max((rank.save_s for rank in _ranks(result)), default=0.0)


def _samples_per_step(result: TrialResult) -> float | None:
    """Return the samples of a step on all ranks; None: unknown."""
    if result.observation:
        return result.observation.samples_per_step or None
    num_steps = max(map(len, result.step_times_s), default=0)
    num_samples = round((result.throughput_samples_per_s or 0) * (result.train_time_s or 0))
    return num_samples / num_steps if num_samples and num_steps else None


def _parts(profiles: Sequence[Profile]) -> Iterator[Part]:
    means = [profile.mean for profile in profiles]
    whole = mean_of(means)
    for name in PARTS:
        if whole.parts[name] > 0:
            shares = [mean.parts[name] / mean.step_s for mean in means]
            # Steps under a profiler take longer than others.
            times = [
                mean.parts[name] if profile.overhead is None else share * profile.step_s
                for mean, share, profile in zip(means, shares, profiles, strict=True)
            ]
            yield Part(name, median_estimate(times, log_scale=False), median_estimate(shares, log_scale=False))


def total_times_s(point: PointAnalysis) -> dict[int, float]:
    """Return the time of training steps, evaluations and checkpoints by repeat."""
    return {
        r.spec.repeat: (r.train_time_s or 0)
        + max((rank.eval_s + rank.save_s for rank in _ranks(r)), default=_eval_s(r))
        for r in observed(point)
    }


def _gain(evidence: Evidence, left_out: str, complete: PointAnalysis, other: PointAnalysis) -> Estimate | None:
    if left_out in PART_OF:
        return _speedup(evidence, evidence.family, complete, other)
    # Training times are without evaluations and checkpoints, so their absence shows only in the time of all.
    return evidence.family.ratio(total_times_s(complete), total_times_s(other))


def _speedup(evidence: Evidence, family: Family, base: PointAnalysis, other: PointAnalysis) -> Estimate | None:
    """Estimate the speedup of the training steps for the same number of samples."""
    if evidence.time_metric == TRAIN_TIME:
        return family.speedup(base, other)
    # Trials of other points were not observed, so the study compares the times of whole trials.
    trials = observed(base), observed(other)
    rates = [{r.spec.repeat: r.throughput_samples_per_s or 0 for r in each} for each in trials]
    if all(rate for each in rates for rate in each.values()):
        return family.ratio(rates[1], rates[0])
    times_s = [{r.spec.repeat: r.train_time_s or 0 for r in each} for each in trials]
    return family.ratio(times_s[0], times_s[1])


def worth_leaving_out(answers: Iterable[PointWhy]) -> tuple[str, ...]:
    """Return the counterfactuals whose part has a share of some point's time that is worth measuring."""
    chosen = []
    for answer in answers:
        shares = {left_out: answer.share_of(part) for left_out, part in PART_OF.items()}
        shares |= {NO_EVALUATION: answer.eval_share, NO_CHECKPOINTS: answer.save_share}
        chosen += [left_out for left_out, share in shares.items() if share >= WORTH_MEASURING]
    return tuple(dict.fromkeys(chosen))


def scaling_of(evidence: Evidence, answers: Iterable[PointWhy]) -> tuple[ScalingWhy, ...]:
    """Return what changes with the number of workers, for each group of points that differ only in it."""
    groups: defaultdict[PointKey, list[PointWhy]] = defaultdict(list)
    for answer in answers:
        groups[point_key({key: v for key, v in answer.point.items() if key != "num_workers"})].append(answer)
    made = []
    for group in groups.values():
        base = min(group, key=lambda answer: answer.num_workers)
        made += [_scaling(evidence, base, each) for each in group if each.num_workers > base.num_workers]
    return tuple(made)


def _scaling(evidence: Evidence, base: PointWhy, answer: PointWhy) -> ScalingWhy:
    of_base, of_answer = ({part.name: part.time_s.value for part in each.parts} for each in (base, answer))
    names = [name for name in PARTS if name in of_base or name in of_answer]
    # Samples of a worker, relative to those with the fewest workers.
    work = 0.0
    if base.samples_per_step and answer.samples_per_step:
        work = answer.samples_per_step / base.samples_per_step * base.num_workers / answer.num_workers
    return ScalingWhy(
        base=base,
        answer=answer,
        comparison=Comparison(
            _speedup(evidence, evidence.family.secondary, base.analysed, answer.analysed), doubt=evidence.doubt
        ),
        growth_s={name: of_answer.get(name, 0.0) - of_base.get(name, 0.0) for name in names},
        ideal_step_s=base.step_s.value * work if work else None,
        excess_s={name: of_answer.get(name, 0.0) - of_base.get(name, 0.0) * work for name in names} if work else {},
    )
