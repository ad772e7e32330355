"""Comparison of two studies: A, the reference, and B, from another machine, version or branch.

Points are matched by the values of all swept hyperparameters, including those in a study's config. Trials of the two
are independent samples. An interval covers the scatter within each study. Differences between the studies, such as
machine, load and day, shift the ratio itself.

All claims of a comparison hold together with 95 % confidence, by Holm's method (`holm_estimates`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from raypar.analysis.comparison import METRIC_CHANGE, TIME_RATIO, Comparison, Gate, gate_of, gate_of_all
from raypar.analysis.load import doubt_of_times
from raypar.analysis.pairwise import METRIC_ERROR, TIME_ERROR, comparable_times
from raypar.analysis.question import (
    PointKey,
    PointSamples,
    Question,
    collect,
    current_results,
    point_key,
    time_metric_of,
)
from raypar.analysis.stats import (
    Estimate,
    exponential,
    independent_prior,
    independent_shift_estimate,
    median_estimate,
)
from raypar.analysis.time_to_target import metric_of
from raypar.errors import RayparError
from raypar.study.metric import Metric
from raypar.study.space import Value
from raypar.study.trial import TrialResult, TrialState

# Settings that change how a trial runs, not what it computes: they may differ between points that are compared.
EXECUTION_KEYS = (
    *("device", "cpus_per_worker", "cpu_affinity", "nodes", "node_label", "num_threads", "compile", "channels_last"),
    *("loader", "num_loader_workers", "prefetch_factor", "pin_memory"),
    *("bucket_mb", "overlap", "static_graph", "fsdp_reshard"),
    *("num_warmup_steps", "eval_batch_size", "keep_model", "keep_checkpoints", "stop_on_nan"),
)
# Provenance that differs each time, or is reported separately.
UNREPORTED = ("command", "load", "git.dirty")

Point: TypeAlias = Mapping[str, Value]
Changes: TypeAlias = Mapping[str, tuple[Value, Value]]  # key to (A's, B's)
Origin: TypeAlias = Mapping[str, tuple[str, ...]]


def match(
    points_a: Sequence[PointSamples], points_b: Sequence[PointSamples], keys: Sequence[str]
) -> tuple[list[tuple[PointSamples, PointSamples]], list[PointSamples], list[PointSamples]]:
    """Return the points of A and B with the same values of all `keys` as pairs, and those that only A or only B has."""
    of_b: dict[PointKey, list[PointSamples]] = {}
    for p in points_b:
        of_b.setdefault(point_key(swept_values(p, keys)), []).append(p)
    pairs = [(p, same.pop(0)) for p in points_a if (same := of_b.get(point_key(swept_values(p, keys))))]
    taken = {id(p) for pair in pairs for p in pair}
    return pairs, [p for p in points_a if id(p) not in taken], [p for p in points_b if id(p) not in taken]


def swept_values(samples: PointSamples, keys: Sequence[str]) -> dict[str, Value]:
    """Return the values of these hyperparameters, without those that a point's trials lack."""
    return {key: samples.values[key] for key in keys if key in samples.values}


def config_changes(a: PointSamples, b: PointSamples) -> tuple[Changes, Changes]:
    """Return the differences in hyperparameters that both configs have: in work, and in execution (`EXECUTION_KEYS`).

    A hyperparameter that only one of them has is ignored, because newer versions have more.
    """
    both = [(key, value, b.config[key]) for key, value in a.config.items() if key in b.config]
    changes = {key: (x, y) for key, x, y in both if point_key({key: x}) != point_key({key: y})}
    work = {key: values for key, values in changes.items() if key not in EXECUTION_KEYS}
    return work, {key: values for key, values in changes.items() if key in EXECUTION_KEYS}


WORSE = (TrialState.DIVERGED, TrialState.DOES_NOT_FIT, TrialState.FAILED)  # than any time


@dataclass(frozen=True)
class MatchedPoint:
    """A point of both studies; pairs are (A's, B's).

    Attributes:
        point: values of all hyperparameters that either study sweeps.
        num_finished: number of finished trials.
        num_diverged: number of diverged trials.
        outcomes: state of the trials if none finished.
        times_s: the time metric.
        time: B's time divided by A's for the same work, compared with the allowed ratio.
        metrics: A's metric after the last epoch.
        metric: B's metric minus A's.
        execution_changes: hyperparameters of `EXECUTION_KEYS` that differ.
    """

    point: Point
    num_finished: tuple[int, int]
    num_diverged: tuple[int, int]
    outcomes: tuple[TrialState | None, TrialState | None]
    times_s: tuple[Estimate | None, Estimate | None]
    time: Comparison
    metrics: tuple[Estimate | None, Estimate | None]
    metric: Comparison
    execution_changes: Changes

    @property
    def diverges_in_b_alone(self) -> bool:
        return self.num_diverged[1] > 0 and self.num_diverged[0] == 0

    @property
    def gate(self) -> Gate | None:
        """Result at this point; None if A has no time that B could exceed.

        If all trials of B diverged, failed or do not fit, that is worse than being slow. If some diverged, the times of
        the others don't prove a pass.
        """
        if self.times_s[0] is None:
            return None
        is_lost = self.outcomes[1] in WORSE
        return gate_of(self.time, is_lost=is_lost, is_doubtful=self.diverges_in_b_alone)


@dataclass(frozen=True)
class StudyComparison:
    """Comparison of two studies; pairs are (A's, B's).

    Attributes:
        time_metric: kind of the times: ``train_time_s``, or ``wall_s`` if either study lacks that.
        metric: name of A's metric.
        keys: hyperparameters that either study sweeps, A's first.
        allowed_share: how much slower B may be, 0.05 for 5 %; None: the question is whether it differs from A.
        matched: points that are compared, in the order of A's.
        missing: points with a time in A, and no trial with the same work in B.
        unlike: points with the same swept values that do different work, and the differences.
        only: points that only one of them has.
        origins: differences in provenance (versions, machine, commit): values of each by key.
        is_known: whether the store has the provenance; unless both have it, `origins` covers only the trials.
        uncommitted: whether a study ran uncommitted code.
        excluded: sentences on trials with other settings; empty if there are none.
        doubts: reasons why times can't be trusted; empty if they can.
        metric_units: units of the metric; metrics with different units are not compared.
    """

    names: tuple[str, str]
    time_metric: str
    metric: str
    keys: tuple[str, ...]
    allowed_share: float | None
    matched: tuple[MatchedPoint, ...]
    missing: tuple[Point, ...]
    unlike: tuple[tuple[Point, Changes], ...]
    only: tuple[tuple[Point, ...], tuple[Point, ...]]
    origins: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]
    is_known: tuple[bool, bool]
    uncommitted: tuple[bool, bool]
    excluded: tuple[str, str] = ("", "")
    doubts: tuple[str, str] = ("", "")
    metric_units: tuple[str, str] = ("", "")

    @property
    def judged_by(self) -> Metric:
        """A's metric."""
        return Metric(self.metric, unit=self.metric_units[0])

    @property
    def gate(self) -> Gate | None:
        """Result over all points with a time in A; None if no point has times in both and none is lost in B."""
        result = gate_of_all({Gate.INCONCLUSIVE if self.missing else None, *(point.gate for point in self.matched)})
        return result if result is Gate.FAILED or any(point.time.estimate for point in self.matched) else None


@dataclass(frozen=True)
class Side:
    """One of two studies.

    Attributes:
        results: at least one.
        origin: provenance of its executions, each key with every value that occurred; empty: unknown.
    """

    question: Question
    results: tuple[TrialResult, ...]
    origin: Origin


def compare(a: Side, b: Side, allowed_share: float | None = None) -> StudyComparison:
    """Compare study B with study A; `allowed_share` as in `StudyComparison`.

    Raises:
        RayparError: they train different workloads.
    """
    sides = tuple(current_results(side.question, side.results) for side in (a, b))
    workloads = [{r.spec.workload for r in side.results} for side in sides]
    if not workloads[0] & workloads[1]:
        names = [", ".join(sorted(each)) for each in workloads]
        message = f"`{a.question.study_name}` trains {names[0]}, `{b.question.study_name}` trains {names[1]}"
        raise RayparError(message, hint="compare two studies of one workload")
    time_metric = time_metric_of(result for side in sides for result in side.results)
    swept = (*a.question.space_keys, *b.question.space_keys)
    # A study may have swept more, or less, in an earlier execution.
    keys = tuple(dict.fromkeys((*swept, *(key for side in sides for r in side.results for key in r.spec.point))))
    metric, metric_of_b = (metric_of(side.question, a.question.metric, side.results) for side in (a, b))
    points_a, points_b = (
        [p for p in collect(replace(s.question, metric=metric.name), s.results, time_metric) if p.results]
        for s in sides
    )
    is_one_unit = metric.unit == metric_of_b.unit
    pairs, *only = match(points_a, points_b, keys)
    changes = [config_changes(*pair) for pair in pairs]
    alike = [(pair, execution) for pair, (work, execution) in zip(pairs, changes, strict=True) if not work]
    unlike = [(first, work) for (first, _), (work, _) in zip(pairs, changes, strict=True) if work]
    limit = 1 + (allowed_share or 0.0)
    doubts = (_doubt_of(points_a), _doubt_of(points_b))
    times = [comparable_times(*pair) for pair, _ in alike]
    logs = [None if t is None else (_logs(t[0]), _logs(t[1])) for t in times]
    metrics = [(of_a.all_of("metric"), of_b.all_of("metric")) if is_one_unit else ([], []) for (of_a, of_b), _ in alike]
    ratios = holm_estimates(logs, against=math.log(limit), error=TIME_ERROR)
    metric_changes = holm_estimates([m if all(m) else None for m in metrics], against=0.0, error=METRIC_ERROR)
    matched = [
        MatchedPoint(
            point=swept_values(first, keys),
            num_finished=(len(first.samples), len(second.samples)),
            num_diverged=(_num_diverged(first), _num_diverged(second)),
            outcomes=(first.outcome, second.outcome),
            times_s=(_median(first.all_of("time_s")), _median(second.all_of("time_s"))),
            time=Comparison(ratio and exponential(ratio), TIME_RATIO, limit=limit, doubt=doubts[0] or doubts[1]),
            metrics=(_median(metric_a, log_scale=False), _median(metric_b, log_scale=False)),
            metric=Comparison(metric_change, METRIC_CHANGE),
            execution_changes=execution,
        )
        for ((first, second), execution), (metric_a, metric_b), ratio, metric_change in zip(
            alike, metrics, ratios, metric_changes, strict=True
        )
    ]
    lost = [*only[0], *(first for first, _ in unlike)]
    is_known = (bool(a.origin), bool(b.origin))
    origin_a, origin_b = (
        {**trial_origin(current.results), **(side.origin if all(is_known) else {})}
        for current, side in zip(sides, (a, b), strict=True)
    )
    origins = {k: (origin_a.get(k, ()), origin_b.get(k, ())) for k in (*origin_a, *origin_b) if k not in UNREPORTED}
    return StudyComparison(
        names=(a.question.study_name, b.question.study_name),
        time_metric=time_metric,
        metric=metric.name,
        metric_units=(metric.unit, metric_of_b.unit),
        keys=keys,
        allowed_share=allowed_share,
        matched=tuple(matched),
        missing=tuple(swept_values(p, keys) for p in lost if p.times),
        unlike=tuple((swept_values(first, keys), work) for first, work in unlike),
        only=(tuple(p.point for p in only[0]), tuple(p.point for p in only[1])),
        origins={key: values for key, values in origins.items() if set(values[0]) != set(values[1])},
        is_known=is_known,
        excluded=(sides[0].sentence, sides[1].sentence),
        doubts=doubts,
        uncommitted=("yes" in a.origin.get("git.dirty", ()), "yes" in b.origin.get("git.dirty", ())),
    )


def _doubt_of(points: Sequence[PointSamples]) -> str:
    """Return the reason why times can't be trusted, also for searches: their times are compared here, too."""
    return doubt_of_times([r for p in points for r in p.measured])


def holm_estimates(
    pairs: Sequence[tuple[Sequence[float], Sequence[float]] | None], *, against: float, error: float
) -> list[Estimate | None]:
    """Estimate by how much the second of each pair of independent samples exceeds the first.

    With a probability of 1 - `error`, all claims that an interval excludes `against` are true. The claims are those of
    Holm's method ("A simple sequentially rejective multiple test procedure", Scandinavian Journal of Statistics 6,
    1979). Its last step is at the level 1 - error / (number of intervals that include `against`), and intervals of that
    level show the claims of all its steps. A pair with a single value on a side has no interval and is not counted.

    Args:
        pairs: samples; None: nothing to compare.
        against: value that the claims are about, 0 for a difference.
        error: probability of a false claim.
    """
    tested = [pair for pair in pairs if pair is not None and min(map(len, pair)) > 1]
    priors = (independent_prior([first for first, _ in tested]), independent_prior([second for _, second in tested]))
    num_open = max(1, len(tested))
    while True:
        level = 1 - error / num_open
        estimates = [pair and independent_shift_estimate(*pair, level=level, priors=priors) for pair in pairs]
        num_left = sum(not e.excludes(against) for e in estimates if e is not None and e.num_samples > 1)
        if num_left >= num_open or num_open == 1:
            return estimates
        num_open = max(1, num_left)


def trial_origin(results: Sequence[TrialResult]) -> dict[str, tuple[str, ...]]:
    """Return every ``node``, ``device_name`` and ``cpu_model`` of the trials' ranks."""
    keys = ("node", "device_name", "cpu_model")
    names = {key: {name for r in results for name in r.conditions.names(key)} for key in keys}
    return {key: tuple(sorted(each)) for key, each in names.items() if each}


def _logs(times: Mapping[int, float]) -> list[float]:
    return [math.log(time) for time in times.values()]


def _num_diverged(samples: PointSamples) -> int:
    return sum(result.state is TrialState.DIVERGED for result in samples.results)


def _median(values: Sequence[float], *, log_scale: bool = True) -> Estimate | None:
    return median_estimate(values, log_scale=log_scale) if values else None
