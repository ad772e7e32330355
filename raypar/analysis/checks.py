"""Checks of a study's measurements: machines, steadiness over time, load while timed.

A new check is a member of `Check` with its advice, a function from the `Evidence` to findings in the module of its
theme, and a line in `CHECKS`.

All work on logarithms of times, so that 5 % are 5 % for a short trial and for a long one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from raypar import units
from raypar.analysis.findings import Check, Evidence, Finding, OneCheck, named
from raypar.analysis.points import MIN_METRIC_DIFFERENCE, differences, same_work
from raypar.analysis.question import WALL_TIME, PointKey, PointSamples, point_key
from raypar.analysis.stats import LEVEL, MIN_RANKED, median_estimate
from raypar.study.code import are_comparable, changed_files, files_text
from raypar.study.trial import TrialResult, TrialState, point_label


def mixed_hardware(evidence: Evidence) -> Iterator[Finding]:
    """Trials on one kind of device that met different models of it, or that each ran on one node, but on unlike ones.

    Nodes are alike that have CPUs of one model and as many cores; what isn't known of a node is not taken to be alike.
    Trials that spread over nodes are not compared by node: that is what was asked.
    """
    by_device: dict[Any, list[TrialResult]] = {}
    for result in evidence.finished:
        by_device.setdefault(result.spec.config.get("device"), []).append(result)
    for results in by_device.values():
        for key, what in (("device_name", "devices"), ("cpu_model", "CPU models")):
            models = [names for r in results if (names := _names(r, key))]
            if kinds := _several({name for names in models for name in names}):
                yield Finding(Check.MIXED_HARDWARE, f"Trials ran on different {what}: {named(kinds)}.")
        if told := _unlike_nodes(results):
            yield Finding(Check.MIXED_HARDWARE, f"Trials ran on {told}.")


def resumed(evidence: Evidence) -> Iterator[Finding]:
    """Trials whose times are of more than one attempt."""
    finished = evidence.finished
    labels = [r.spec.label for r in finished if r.environment.get("resumed_at_epoch")]
    if labels:
        yield Finding(
            Check.RESUMED,
            f"{len(labels)} of {units.counted(len(finished), 'trial')} went on from a checkpoint after a failure: "
            f"{named(labels)}.",
        )


def shared_cores(evidence: Evidence) -> Iterator[Finding]:
    finished = evidence.finished
    unpinned = sum(_is_unpinned(r.environment.get("cores")) for r in finished)
    if unpinned:
        yield Finding(
            Check.SHARED_CORES, f"{unpinned} of {units.counted(len(finished), 'trial')} had no cores of their own."
        )


def side_by_side(evidence: Evidence) -> Iterator[Finding]:
    """Trials that shared with others of the study what their times depend on: a machine, or, between machines, the
    network."""
    finished = evidence.finished
    sharing = [count for r in finished if (count := _count(r, "num_sharing"))]
    if sharing:
        yield Finding(
            Check.SIDE_BY_SIDE,
            f"{len(sharing)} of {units.counted(len(finished), 'trial')} shared a machine, its memory and clock with "
            f"others of the study (up to {max(sharing)} at a time).",
        )
    spread = [r for r in finished if len(_names(r, "node")) > 1]
    beside = [count for r in spread if (count := _count(r, "num_beside"))]
    if beside:
        yield Finding(
            Check.SIDE_BY_SIDE,
            f"{len(beside)} of {units.counted(len(spread), 'trial')} over several machines shared the network with "
            f"others of the study (up to {max(beside)} at a time).",
        )


def too_many_threads(evidence: Evidence) -> Iterator[Finding]:
    finished = evidence.finished
    crowded = [(t, c) for r in finished for t, c in _threads_on_cores(r.environment) if t > c > 0]
    if crowded:
        threads, cores = max(crowded, key=lambda pair: pair[0] / pair[1])
        yield Finding(
            Check.TOO_MANY_THREADS,
            f"A worker had {units.counted(threads, 'torch thread')} on {units.counted(cores, 'core')}: that can be "
            "many times slower than one thread a core.",
        )


def _count(result: TrialResult, key: str) -> int:
    told = result.environment.get(key)
    return told if isinstance(told, int) else 0


def _names(result: TrialResult, key: str) -> set[str]:
    """What the trial's ranks tell under this key."""
    told = result.environment.get(key)
    return {name for name in told if isinstance(name, str)} if isinstance(told, (list, tuple)) else set()


def _several(names: set[str]) -> list[str]:
    """The names in order where there is more than one, else nothing."""
    return sorted(names) if len(names) > 1 else []


def _unlike_nodes(results: Sequence[TrialResult]) -> str:
    """How the nodes differ that trials had to themselves; empty where they are alike, or differ in the CPU's model
    alone, which is told by itself."""
    models: dict[str, set[str]] = {}
    cores: dict[str, set[int]] = {}
    for result in results:
        nodes = _names(result, "node")
        if len(nodes) == 1:
            (node,) = nodes
            models.setdefault(node, set()).update(_names(result, "cpu_model"))
            counts = result.environment.get("num_node_cores")
            known = counts if isinstance(counts, (list, tuple)) else ()
            cores.setdefault(node, set()).update(count for count in known if isinstance(count, int))
    if len(models) < 2:
        return ""
    if not all(models.values()) or not all(cores.values()):
        return f"different nodes: {named(sorted(models))}"
    if len(set().union(*cores.values())) == 1:
        return ""
    sizes = [f"{node} ({units.counted(max(cores[node]), 'core')})" for node in sorted(cores)]
    return f"nodes of different sizes: {named(sizes)}"


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


MIN_DRIFT = 0.02  # relative change that is worth a word
MIN_PARTS = 4  # reports of a trial, whose ends can be compared
MIN_TRIALS = 3  # with so many reports
MIN_OUTLYING = 0.05  # relative distance that is worth a word
# Iglewicz and Hoaglin, "How to Detect and Handle Outliers", 1993: so many (robust) standard deviations.
OUTLYING_SCALES = 3.5
# The median difference of two normal values over their standard deviation: sqrt(2) · 0.6745.
MEDIAN_DIFFERENCE = 0.9539

Series: TypeAlias = Sequence[tuple[float, float]]  # of one point's trials: start, time; seconds


@dataclass(frozen=True)
class Trend:
    """How trials of the same points became slower or faster as a study went on.

    Attributes:
        change: relative change of the times from the first trial's start to the last one's; 0.08 is 8 % slower.
        tau: Kendall's: of the pairs of a point's trials, the share that became slower less that which became faster.
        p_value: how often trials without a trend show one as strong or stronger.
        num_trials: how many it rests on.
    """

    change: float
    tau: float
    p_value: float
    num_trials: int


@dataclass(frozen=True)
class _Timed:
    """One finished trial: its result, and the logarithm of its time."""

    result: TrialResult
    log_time: float


def trend_of(points: Iterable[Series]) -> Trend | None:
    """The trend of times over start times; None where the trials are so few that no order of them would tell one.

    Trials are compared with others of their own point alone, and the comparisons added up over the points: the
    seasonal Kendall test and slope of Hirsch, Slack and Smith, "Techniques of Trend Analysis for Monthly Water Quality
    Data", Water Resources Research 18(1), 1982, points in the place of seasons; two-sided, normal approximation with
    continuity correction.

    Args:
        points: of each point, its trials' starts and times (greater than 0), in any order.
    """
    score = variance = 0.0
    num_pairs = num_trials = 0
    slopes: list[NDArray[np.float64]] = []
    starts: list[float] = []
    for series in points:
        size = len(series)
        if size < 2:
            continue
        at, log_times = np.asarray([s for s, _ in series]), np.log([t for _, t in series])
        first, second = np.triu_indices(size, 1)
        later, slower = at[second] - at[first], log_times[second] - log_times[first]
        # Ties count 0 and leave the variance as it is: with them the test is on the safe side.
        score += float(np.sum(np.sign(later) * np.sign(slower)))
        variance += size * (size - 1) * (2 * size + 5) / 18
        slopes.append(slower[later != 0] / later[later != 0])
        num_pairs, num_trials = num_pairs + len(first), num_trials + size
        starts += [float(at.min()), float(at.max())]
    if not variance or _p_value(num_pairs, variance) >= 1 - LEVEL or not sum(map(len, slopes)):
        return None
    change = math.expm1(float(np.median(np.concatenate(slopes))) * (max(starts) - min(starts)))
    return Trend(change, score / num_pairs, _p_value(score, variance), num_trials)


def drift_over_study(evidence: Evidence) -> Iterator[Finding]:
    """A trend of the baseline's times, or of all points' where the baseline's are too few to tell.

    Where there is none, five studies in a hundred at most are said to have one (the level of the test).
    """
    question = evidence.question
    every = [(p.point, [(t.result.started_at, math.exp(t.log_time)) for t in of]) for p, of in _timed(evidence)]
    trend, who = trend_of(series for point, series in every if question.is_baseline(point)), "The baseline"
    if trend is None:
        trend, who = trend_of(series for _, series in every), "Trials of the same point"
    if trend is not None and trend.p_value < 1 - LEVEL and abs(trend.change) >= MIN_DRIFT:
        yield Finding(
            Check.DRIFT_OVER_STUDY,
            f"{who} became {_changed(trend.change)} from the study's first trial to its last "
            f"(Kendall's tau {trend.tau:.2f} over {units.counted(trend.num_trials, 'trial')}).",
        )


def drift_in_trials(evidence: Evidence) -> Iterator[Finding]:
    """Steps at the end of trials that take longer than at their beginning: a clock that falls with the temperature."""
    # By the reports' rates, not by step times, which a store doesn't give with its results.
    slowdowns = [change for _, of in _timed(evidence) for t in of if (change := _slowdown(t.result)) is not None]
    if len(slowdowns) < MIN_TRIALS:
        return
    estimate = median_estimate(slowdowns, log_scale=False)
    change = math.expm1(estimate.value)
    if estimate.excludes(0.0) and abs(change) >= MIN_DRIFT:
        yield Finding(
            Check.DRIFT_IN_TRIALS,
            f"Steps became {_changed(change)} from the first third of a trial to its last (median of "
            f"{units.counted(len(slowdowns), 'trial')}).",
        )


def slow_first_trial(evidence: Evidence) -> Iterator[Finding]:
    """The study's first trial took far longer than the others of its point."""
    if (found := _slow_first(evidence)) is not None:
        first, excess = found
        yield Finding(
            Check.SLOW_FIRST_TRIAL,
            f"The study's first trial ({first.spec.label}) took {units.percent(math.expm1(excess))} longer than the "
            "median of its point's others.",
        )


def outliers(evidence: Evidence) -> Iterator[Finding]:
    """Trials far from the median of their point, by what trials of a point differ from each other. None is dropped."""
    groups = [of for _, of in _timed(evidence)]
    pooled = _scale(groups)
    if pooled is None:
        return
    first = _slow_first(evidence)
    found: list[str] = []
    for group in groups:
        if len(group) < 3:
            continue  # of two, neither is the one that is off
        own = _scale([group]) if len(group) >= MIN_RANKED else None
        limit = max(OUTLYING_SCALES * max(pooled, own or 0.0), math.log1p(MIN_OUTLYING))
        median = float(np.median([t.log_time for t in group]))
        for timed in group:
            off = timed.log_time - median
            if abs(off) > limit and not (first and timed.result is first[0]):
                found.append(f"{timed.result.spec.label} ({_changed(math.expm1(off))})")
    if found:
        total = sum(map(len, groups))
        yield Finding(
            Check.OUTLIERS,
            f"Far from the median of their point: {len(found)} of {units.counted(total, 'trial')}: {named(found)}.",
        )


def _timed(evidence: Evidence) -> Iterator[tuple[PointSamples, list[_Timed]]]:
    for samples in evidence.gathered:
        finished = [r for r in samples.results if r.state is TrialState.FINISHED]
        times = {s.identity: s.time_s for s in samples.samples.values()}
        timed = [(r, times.get(r.spec.identity)) for r in finished]
        yield samples, [_Timed(r, math.log(time_s)) for r, time_s in timed if time_s is not None]


def _p_value(score: float, variance: float) -> float:
    return min(1.0, 2 * float(ndtr(-max(0.0, abs(score) - 1) / math.sqrt(variance))))


def _slowdown(result: TrialResult) -> float | None:
    """Logarithm of the time for a sample in the last third of a trial over that in the first; None if too short."""
    rates = [rate for r in result.reports if (rate := r.get("throughput_samples_per_s")) and math.isfinite(rate)]
    if len(rates) < MIN_PARTS or min(rates) <= 0:
        return None
    third = len(rates) // 3
    return math.log(float(np.median(rates[:third])) / float(np.median(rates[-third:])))


def _slow_first(evidence: Evidence) -> tuple[TrialResult, float] | None:
    """The study's first trial and the logarithm of how much longer it took, if that stands out."""
    groups = [of for _, of in _timed(evidence)]
    starts = sorted(t.result.started_at for group in groups for t in group)
    if len(starts) < 3 or starts[0] == starts[1]:
        return None
    group = next(g for g in groups if any(t.result.started_at == starts[0] for t in g))
    first = next(t for t in group if t.result.started_at == starts[0])
    others = [t for t in group if t is not first]
    scale = _scale([others if g is group else g for g in groups])
    if len(others) < 2 or scale is None:
        return None
    excess = first.log_time - float(np.median([t.log_time for t in others]))
    return (first.result, excess) if excess > max(OUTLYING_SCALES * scale, math.log1p(MIN_OUTLYING)) else None


def _scale(groups: Iterable[Sequence[_Timed]]) -> float | None:
    """What trials of one point differ by, as a standard deviation of log times; None without a pair.

    From the median of the pairwise differences, which needs no centre, and so serves points of two trials as well
    (after Rousseeuw and Croux, "Alternatives to the Median Absolute Deviation", JASA 88, 1993).
    """
    differences: list[NDArray[np.float64]] = []
    for group in groups:
        values = np.asarray([t.log_time for t in group])
        first, second = np.triu_indices(len(values), 1)
        differences.append(np.abs(values[first] - values[second]))
    every = np.concatenate(differences) if differences else np.empty(0)
    return float(np.median(every)) / MEDIAN_DIFFERENCE if len(every) else None


def _changed(change: float) -> str:
    return f"{units.percent(abs(change))} {'slower' if change > 0 else 'faster'}"


MAX_TAKEN = 0.05  # of the time of a worker's cores
MIN_TAKEN_S = 0.05  # five ticks of the clock by which it is counted
# Of the machine's cores, where the trial's own are known to be left alone: memory, caches and clocks are shared still.
MAX_BUSY = 0.1
MAX_CLOCK_CHANGE = 0.05


@dataclass(frozen=True)
class _Load:
    """Others' work while a trial was timed, on the machine where it was most.

    Attributes:
        taken: share of a worker's own cores' time; None where the trial had none, or nothing was measured.
        busy_cores: of the machine, on average; None: not measured.
        num_cores: of that machine.
    """

    taken: float | None
    busy_cores: float | None
    num_cores: int

    @property
    def busy(self) -> float:
        """The machine's share that was busy with it."""
        return self.busy_cores / self.num_cores if self.busy_cores is not None and self.num_cores else 0.0

    def disturbs(self, timed_s: float) -> bool:
        if self.taken is not None:
            return self.busy > MAX_BUSY or (self.taken > MAX_TAKEN and self.taken * timed_s > MIN_TAKEN_S)
        return self.busy > MAX_TAKEN  # nothing kept it off the cores that the trial ran on


def other_load(evidence: Evidence) -> Iterator[Finding]:
    """Others' work that took the trials' cores, or kept a good part of the machine busy."""
    finished = evidence.finished
    # Not cpu_wait_share: a rank's own threads (gloo's beside torch's) wait for each other too.
    loads = [(_load_of(r), r.train_time_s or r.wall_s or math.inf) for r in finished]
    disturbed = [load for load, timed_s in loads if load.disturbs(timed_s)]
    if not disturbed:
        return
    told = []
    if taken := max((load.taken for load in disturbed if load.taken is not None), default=0.0):
        told.append(f"it took {units.percent(taken)} of the time of a worker's own cores")
    most = max(disturbed, key=lambda load: load.busy)
    if most.busy_cores is not None and most.busy:
        told.append(f"it kept {most.busy_cores:.1f} of a machine's {units.counted(most.num_cores, 'core')} busy")
    yield Finding(
        Check.OTHER_LOAD,
        f"Other work ran while {len(disturbed)} of {units.counted(len(finished), 'trial')} were timed; at worst "
        f"{' and '.join(told)}.",
    )


def throttled(evidence: Evidence) -> Iterator[Finding]:
    """Cores that slowed down for their heat."""
    counts = [sum(_numbers(r.environment.get("throttles"))) for r in evidence.finished]
    if hot := [count for count in counts if count > 0]:
        yield Finding(
            Check.THROTTLED,
            f"Cores became too hot and slowed down while {len(hot)} of {units.counted(len(counts), 'trial')} were "
            f"timed (up to {units.counted(round(max(hot)), 'time')} in one).",
        )


def clock_changes(evidence: Evidence) -> Iterator[Finding]:
    """Clocks that ran slower or faster at a trial's end than at its beginning, or in one trial than in another."""
    finished = evidence.finished
    within = [(c, r) for r in finished if (c := _change_within(r)) is not None and abs(c) > MAX_CLOCK_CHANGE]
    if within:
        change, result = max(within, key=lambda pair: abs(pair[0]))
        yield Finding(
            Check.CLOCK_CHANGES,
            f"The cores' clock was another at the end than at the beginning of {len(within)} of "
            f"{units.counted(len(finished), 'trial')}: by up to {units.percent(abs(change))} "
            f"{'slower' if change < 0 else 'faster'} ({result.spec.label}).",
        )
    means = [(sum(mhz) / len(mhz), r) for r in finished if (mhz := _numbers(r.environment.get("cpu_mhz_mean")))]
    if not means:
        return
    (slowest, slow), (fastest, fast) = (pick(means, key=lambda pair: pair[0]) for pick in (min, max))
    if fastest > slowest * (1 + MAX_CLOCK_CHANGE):
        yield Finding(
            Check.CLOCK_CHANGES,
            f"The cores' clock was another in some trials than in others: {slowest / 1e3:.2f} GHz in "
            f"{slow.spec.label}, {fastest / 1e3:.2f} GHz in {fast.spec.label}.",
        )


def _load_of(result: TrialResult) -> _Load:
    environment = result.environment
    taken = _numbers(environment.get("foreign_cpu_share"))
    busy, cores = environment.get("other_load_cores"), environment.get("num_node_cores")
    ranks = zip(busy, cores, strict=False) if isinstance(busy, Sequence) and isinstance(cores, Sequence) else ()
    known = [(b, int(c)) for b, c in ranks if _numbers(b) and _numbers(c) and c > 0]
    busy_cores, num_cores = max(known, key=lambda pair: pair[0] / pair[1], default=(None, 0))
    return _Load(max(taken, default=None), busy_cores, num_cores)


def _change_within(result: TrialResult) -> float | None:
    """Relative change of the clock from a trial's beginning to its end; of the rank that changed most."""
    first, last = (result.environment.get(f"cpu_mhz_{which}") for which in ("first", "last"))
    if not isinstance(first, Sequence) or not isinstance(last, Sequence):
        return None
    changes = [e / b - 1 for b, e in zip(first, last, strict=False) if _numbers(b) and _numbers(e) and b > 0]
    return max(changes, key=abs, default=None)


def _numbers(told: Any) -> list[float]:
    """The finite numbers of what the ranks tell (or of one number for all)."""
    listed = told if isinstance(told, (list, tuple)) else [told]
    return [float(n) for n in listed if isinstance(n, (int, float)) and not isinstance(n, bool) and math.isfinite(n)]


__all__ = ["CHECKS", "Check", "Evidence", "Finding", "run_checks"]

MIN_REPEATS = 5
MIN_TIME_S = 1.0
MIN_EXCESS = 0.01  # of the efficiency over 1: less is not worth a word


def run_checks(evidence: Evidence) -> tuple[Finding, ...]:
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
    if evidence.excluded:
        yield Finding(Check.OTHER_SETTINGS, evidence.excluded)


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
