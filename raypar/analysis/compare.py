"""Comparison of two studies: A, the reference, and B, from another machine, version or branch.

Points are matched by value: what one study sweeps stands in the other's config. Their trials are independent samples,
never pairs: no block holds trials of both. An interval covers the scatter within each study; what differs between the
two, machines, load and day included, is part of the ratio itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeAlias

from raypar.analysis.pairwise import speedup
from raypar.analysis.question import (
    TRAIN_TIME,
    WALL_TIME,
    PointKey,
    PointSamples,
    Question,
    collect,
    current_results,
    point_key,
)
from raypar.analysis.stats import Estimate, difference_estimate, median_estimate
from raypar.errors import RayparError
from raypar.study.space import Value
from raypar.study.trial import TrialResult, TrialState

# Settings of how a trial is run, not of what it computes: they may differ between points that are compared.
EXECUTION_KEYS = (
    *("device", "cpus_per_worker", "cpu_affinity", "nodes", "node_label", "num_threads", "compile", "channels_last"),
    *("loader", "num_loader_workers", "prefetch_factor", "pin_memory"),
    *("bucket_mb", "overlap", "static_graph", "fsdp_reshard"),
    *("num_warmup_steps", "eval_batch_size", "keep_model", "stop_on_nan"),
)
# Of an execution's provenance: different each time, or reported by itself.
UNREPORTED = ("command", "load", "git.dirty")

Point: TypeAlias = Mapping[str, Value]
Changes: TypeAlias = Mapping[str, tuple[Value, Value]]  # key to (A's, B's)
Origin: TypeAlias = Mapping[str, tuple[str, ...]]


def match(
    points_a: Sequence[PointSamples], points_b: Sequence[PointSamples], keys: Sequence[str]
) -> tuple[list[tuple[PointSamples, PointSamples]], list[PointSamples], list[PointSamples]]:
    """Return the points of A and B with the same values of all `keys` as pairs, and those that A or B has alone.

    Args:
        points_a: different points, each with its config.
        points_b: the same.
        keys: all that either study sweeps.
    """
    of_b: dict[PointKey, list[PointSamples]] = {}
    for p in points_b:
        of_b.setdefault(point_key(swept_values(p, keys)), []).append(p)
    pairs = [(p, same.pop(0)) for p in points_a if (same := of_b.get(point_key(swept_values(p, keys))))]
    taken = {id(p) for pair in pairs for p in pair}
    return pairs, [p for p in points_a if id(p) not in taken], [p for p in points_b if id(p) not in taken]


def swept_values(samples: PointSamples, keys: Sequence[str]) -> dict[str, Value]:
    """Return the values of these hyperparameters that a point's trials had; without those that they lack."""
    return {key: samples.values[key] for key in keys if key in samples.values}


def config_changes(a: PointSamples, b: PointSamples) -> tuple[Changes, Changes]:
    """Return what both configs have and differ in: what trials compute, and how they are run (`EXECUTION_KEYS`).

    A hyperparameter that only one of them has makes no difference: a newer version has more.
    """
    both = [(key, value, b.config[key]) for key, value in a.config.items() if key in b.config]
    changes = {key: (x, y) for key, x, y in both if point_key({key: x}) != point_key({key: y})}
    work = {key: values for key, values in changes.items() if key not in EXECUTION_KEYS}
    return work, {key: values for key, values in changes.items() if key in EXECUTION_KEYS}


class Difference(Enum):
    """Result of comparing B with A at one point."""

    SLOWER = "slower"
    FASTER = "faster"
    TIED = "tied"  # the interval holds 1
    NO_INTERVAL = "no interval"  # one trial on a side
    NO_TIME = "no time"  # no finished trial on a side


class Gate(Enum):
    """Result of holding B's slowdown against an allowance."""

    SLOWER = "slower"
    WITHIN = "within"
    UNKNOWN = "unknown"  # the interval holds the limit, or there is none


@dataclass(frozen=True)
class MatchedPoint:
    """A point that both studies have trials of; pairs are (A's, B's).

    Attributes:
        point: the values of all that either study sweeps.
        num_finished: trials that ran to their end.
        outcomes: what became of the trials of each, where none finished.
        times_s: the time metric, seconds.
        ratio: how many times as long B takes as A for the same work; None where either has no time.
        metrics: A's metric after the last epoch.
        metric_change: that of B minus that of A; None where either has none.
        execution_changes: hyperparameters of `EXECUTION_KEYS` that differ.
    """

    point: Point
    num_finished: tuple[int, int]
    outcomes: tuple[TrialState | None, TrialState | None]
    times_s: tuple[Estimate | None, Estimate | None]
    ratio: Estimate | None
    metrics: tuple[Estimate | None, Estimate | None]
    metric_change: Estimate | None
    execution_changes: Changes

    @property
    def difference(self) -> Difference:
        if self.ratio is None:
            return Difference.NO_TIME
        if self.ratio.low is None:
            return Difference.NO_INTERVAL
        if not self.ratio.excludes(1.0):
            return Difference.TIED
        return Difference.SLOWER if self.ratio.value > 1 else Difference.FASTER

    def gate(self, allowed_share: float) -> Gate:
        """Hold B against A's time and this share of it: it is slower only where its whole interval is."""
        limit = 1 + allowed_share
        if self.ratio is None or self.ratio.low is None or self.ratio.high is None:
            return Gate.UNKNOWN
        if self.ratio.low > limit:
            return Gate.SLOWER
        return Gate.WITHIN if self.ratio.high <= limit else Gate.UNKNOWN


@dataclass(frozen=True)
class Comparison:
    """Comparison of two studies; pairs are (A's, B's).

    Attributes:
        names: of the studies.
        time_metric: what the times are: ``train_time_s``, or ``wall_s`` where either study lacks that.
        metric: name of A's metric, looked for in both.
        keys: the swept hyperparameters of either, A's first.
        matched: points that are compared, in the order of A's.
        unlike: points with the same swept values that do different work, and how that differs.
        only: points that one of them has alone.
        origins: what differs in where they come from (versions, machine, commit): key to the values of each.
        is_known: whether the store says where a study comes from; unless both do, `origins` is of the trials alone.
        uncommitted: whether a study ran code that no commit has.
        excluded: sentences on trials of other settings; empty where there are none.
    """

    names: tuple[str, str]
    time_metric: str
    metric: str
    keys: tuple[str, ...]
    matched: tuple[MatchedPoint, ...]
    unlike: tuple[tuple[Point, Changes], ...]
    only: tuple[tuple[Point, ...], tuple[Point, ...]]
    origins: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]
    is_known: tuple[bool, bool]
    uncommitted: tuple[bool, bool]
    excluded: tuple[str, str] = ("", "")

    def gate(self, allowed_share: float) -> Mapping[Gate, tuple[MatchedPoint, ...]]:
        """Sort the matched points by whether B is slower than allowed."""
        return {gate: tuple(p for p in self.matched if p.gate(allowed_share) is gate) for gate in Gate}


@dataclass(frozen=True)
class Side:
    """One of two studies.

    Attributes:
        results: of its trials; at least one.
        origin: the provenance of its executions, each key with every value that occurred; empty: unknown.
    """

    question: Question
    results: tuple[TrialResult, ...]
    origin: Origin


def compare(a: Side, b: Side) -> Comparison:
    """Compare B with A.

    Raises:
        RayparError: they train different workloads.
    """
    sides = tuple(current_results(side.question, side.results) for side in (a, b))
    workloads = [{r.spec.workload for r in side.results} for side in sides]
    if not workloads[0] & workloads[1]:
        names = [", ".join(sorted(each)) for each in workloads]
        message = f"`{a.question.study_name}` trains {names[0]}, `{b.question.study_name}` trains {names[1]}"
        raise RayparError(message, hint="compare two studies of one workload")
    # A time is compared with one of its kind.
    time_metric = TRAIN_TIME if all(side.time_metric == TRAIN_TIME for side in sides) else WALL_TIME
    swept = (*a.question.space_keys, *b.question.space_keys)
    # A study may have swept more, or less, in an earlier execution.
    keys = tuple(dict.fromkeys((*swept, *(key for side in sides for r in side.results for key in r.spec.point))))
    points_a, points_b = (
        [p for p in collect(replace(s.question, metric=a.question.metric), s.results, time_metric) if p.results]
        for s in sides
    )
    pairs, *only = match(points_a, points_b, keys)
    matched: list[MatchedPoint] = []
    unlike: list[tuple[Point, Changes]] = []
    for first, second in pairs:
        point, (work, execution) = swept_values(first, keys), config_changes(first, second)
        if work:
            unlike.append((point, work))
        else:
            matched.append(_compared(point, first, second, execution))
    is_known = (bool(a.origin), bool(b.origin))
    origin_a, origin_b = (
        {**trial_origin(current.results), **(side.origin if all(is_known) else {})}
        for current, side in zip(sides, (a, b), strict=True)
    )
    origins = {k: (origin_a.get(k, ()), origin_b.get(k, ())) for k in (*origin_a, *origin_b) if k not in UNREPORTED}
    return Comparison(
        names=(a.question.study_name, b.question.study_name),
        time_metric=time_metric,
        metric=a.question.metric,
        keys=keys,
        matched=tuple(matched),
        unlike=tuple(unlike),
        only=(tuple(p.point for p in only[0]), tuple(p.point for p in only[1])),
        origins={key: values for key, values in origins.items() if set(values[0]) != set(values[1])},
        is_known=is_known,
        excluded=(sides[0].sentence, sides[1].sentence),
        uncommitted=("yes" in a.origin.get("git.dirty", ()), "yes" in b.origin.get("git.dirty", ())),
    )


def trial_origin(results: Sequence[TrialResult]) -> dict[str, tuple[str, ...]]:
    """Return ``node``, ``device_name`` and ``cpu_model``: every one that a rank of the trials ran on."""
    origin = {}
    for key in ("node", "device_name", "cpu_model"):
        listed = [r.environment.get(key) for r in results]
        names = {str(name) for each in listed if isinstance(each, (list, tuple)) for name in each if name is not None}
        if names:
            origin[key] = tuple(sorted(names))
    return origin


def _compared(point: Point, a: PointSamples, b: PointSamples, execution_changes: Changes) -> MatchedPoint:
    times, metrics = ([p.all_of(quantity) for p in (a, b)] for quantity in ("time_s", "metric"))
    time_a, time_b = (median_estimate(t) if t else None for t in times)
    metric_a, metric_b = (median_estimate(m, log_scale=False) if m else None for m in metrics)
    return MatchedPoint(
        point=point,
        num_finished=(len(a.samples), len(b.samples)),
        outcomes=(a.outcome, b.outcome),
        times_s=(time_a, time_b),
        ratio=speedup(b, a, are_blocks_shared=False),
        metrics=(metric_a, metric_b),
        metric_change=difference_estimate(metric_a, metric_b) if metric_a and metric_b else None,
        execution_changes=execution_changes,
    )
