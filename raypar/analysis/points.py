"""Numbers of each point: medians with intervals, speedup, parallel efficiency, energy, cost.

Speedup S(N) = T(baseline) / T(N), from trials of the same block where there are such (see `ratio_of`). Parallel
efficiency is S(N) · N0 / N, for N workers against a baseline of N0.

Strong scaling (``batch_size`` fixed) and weak scaling (``per_worker_batch_size`` fixed) need no two formulas: an epoch
is the same number of samples either way. Where the number differs (``drop_last``), rates are compared, not times.

Energies are compared only where they are of the same parts: with the packages' share in all of them, or in none.

Nodes are the machines that its workers ran on, each paid for whole, however many of its cores were used. The hours are
those of the time that is compared; what a study leaves out of it (start-up, evaluation) is not paid for here either.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from raypar.analysis.question import PointKey, PointSamples, Question, point_key
from raypar.analysis.stats import Estimate, median_estimate, ratio_estimate, reference
from raypar.study.space import Value
from raypar.study.trial import TrialResult, TrialState
from raypar.units import HOUR_S

PACKAGES = "CPU packages"
MIXED = "the energies of some trials hold that of the CPU packages, those of others don't"
NOT_MEASURED = "no trial says what energy it used"


def energy_source(gathered: Iterable[PointSamples]) -> str:
    """What the trials' energies are of: "CPU packages", "GPUs" or both; empty where there is none to be compared."""
    told = {str(r.environment.get("energy_of")) for p in gathered for r in _measured(p)}
    if len({PACKAGES in parts for parts in told}) != 1:
        return ""
    return max(told, key=len)  # on CPUs alone some trials have no GPUs to count


def energy_of(samples: PointSamples) -> Estimate | None:
    """Of a whole training: median over the finished trials that tell it."""
    joules = [r.energy_j for r in _measured(samples) if r.energy_j]
    return median_estimate(joules) if joules else None


def energy_to(samples: PointSamples, times: Mapping[int, float]) -> Estimate | None:
    """Of a training up to some time after its first timed step, in seconds by repeat.

    Power is taken as constant: a share of the timed region uses that share of its energy.
    """
    joules = [
        r.energy_j * min(1.0, times[r.spec.repeat] / r.train_time_s)
        for r in _measured(samples)
        if r.energy_j and r.train_time_s and r.spec.repeat in times
    ]
    return median_estimate(joules) if joules else None


def why_energy_unknown(results: Sequence[TrialResult]) -> str:
    """Why no energies can be compared, in words of the machine where it has some."""
    if any(r.energy_j is not None for r in results):
        return MIXED
    reasons = dict.fromkeys(str(r.environment["no_energy"]) for r in results if r.environment.get("no_energy"))
    return "; ".join(reasons) or NOT_MEASURED


def _measured(samples: PointSamples) -> list[TrialResult]:
    return [r for r in samples.results if r.state is TrialState.FINISHED and r.energy_j is not None]


def num_nodes(samples: PointSamples) -> int | None:
    """On how many machines the workers of a point's trials ran, the most of any trial; None where unknown."""
    listed = [result.environment.get("node") for result in samples.results]
    counts = [len(set(nodes)) for nodes in listed if isinstance(nodes, Sequence) and not isinstance(nodes, str)]
    return max((count for count in counts if count), default=None)


def cost_of(time_s: Estimate | None, nodes: int | None, price_per_node_hour: float | None) -> Estimate | None:
    """In the currency of the price; None where anything is unknown."""
    if time_s is None or nodes is None or price_per_node_hour is None:
        return None
    return time_s.scaled(nodes * price_per_node_hour / HOUR_S)


# Less than one sample in a million: what rounding may do to throughput × time.
SAME_WORK_TOLERANCE = 1e-6
MIN_METRIC_DIFFERENCE = 1e-3  # of the value: less is below what a report shows


@dataclass(frozen=True)
class PointAnalysis:
    """What is known about one point. Only finished trials enter the estimates.

    Attributes:
        point: the swept hyperparameters.
        num_workers: ranks that train together; None for a point without a trial.
        num_finished: trials that ran to their end.
        num_failed: trials that failed for good.
        num_stopped: trials that a scheduler stopped early; no part of the estimates.
        time_s: the study's time metric, seconds.
        throughput: samples per second, whole gang, timed region.
        speedup: how many times as fast as the baseline; 1 for a baseline itself; None without one.
        efficiency: speedup · N0 / N; None where the baseline names no ``num_workers``.
        metric: the study's metric (accuracy, say) after the last epoch.
        is_baseline: whether it is what others are compared with.
        step_time_median_s: over all steps of all finished trials, slowest rank.
        step_time_p95_s: 95th percentile of the same.
        cost: of the time, in the currency of the study's price; None where that or the number of nodes is unknown.
        energy_j: of a training, joules; None where it can't be read, or not be compared with the other points'.
        times: seconds of the time metric by repeat.
    """

    point: Mapping[str, Value]
    num_workers: int | None
    num_finished: int
    num_failed: int
    num_stopped: int
    time_s: Estimate | None
    throughput: Estimate | None
    speedup: Estimate | None
    efficiency: Estimate | None
    metric: Estimate | None
    is_baseline: bool
    step_time_median_s: float | None
    step_time_p95_s: float | None
    cost: Estimate | None = None
    energy_j: Estimate | None = None
    times: Mapping[int, float] = field(default_factory=dict)

    @property
    def num_trials(self) -> int:
        return self.num_finished + self.num_failed + self.num_stopped


def analyse_points(question: Question, gathered: Sequence[PointSamples]) -> tuple[PointAnalysis, ...]:
    """The numbers of every point, in the order given."""
    by_key = {point_key(p.point): p for p in gathered}
    has_energy = bool(energy_source(gathered))
    return tuple(
        replace(
            _analyse_point(question, p, baseline_in(question, by_key, p)), energy_j=energy_of(p) if has_energy else None
        )
        for p in gathered
    )


def baseline_in(
    question: Question, by_key: Mapping[PointKey, PointSamples], samples: PointSamples
) -> PointSamples | None:
    """The trials that a point's own are compared with; None where the study names no baseline or it has no trials."""
    return by_key.get(point_key(question.baseline_of(samples.point))) if question.baseline else None


def same_work(first: float | None, second: float | None) -> bool:
    """Whether two trials trained on equally many samples; taken as given where that is unknown."""
    return first is None or second is None or math.isclose(first, second, rel_tol=SAME_WORK_TOLERANCE)


def ratio_of(base: PointSamples, other: PointSamples) -> Estimate | None:
    """How many times as fast `other` is as `base`; None where either has no time.

    Trials of the same block are paired. Where fewer than two blocks hold both, and yet each point has two trials or
    more, the two are compared as independent samples.
    """
    both = sorted(base.samples.keys() & other.samples.keys())
    pairs = [(base.samples[r], other.samples[r]) for r in both]
    pairs = [(b, o) for b, o in pairs if b.time_s is not None and o.time_s is not None]
    works = [[s.num_samples for s in p.samples.values()] for p in (base, other)]
    by_time = all(same_work(b, o) for b in works[0] for o in works[1])
    top, bottom = (base, other) if by_time else (other, base)
    quantity = "time_s" if by_time else "throughput"
    tops, bottoms = top.all_of(quantity), bottom.all_of(quantity)
    if not tops or not bottoms:
        return None
    if not pairs or len(pairs) < 2 <= min(len(tops), len(bottoms)):
        return ratio_estimate(tops, bottoms, paired=False)
    ordered = pairs if by_time else [(o, b) for b, o in pairs]
    return ratio_estimate(
        [getattr(t, quantity) for t, _ in ordered],
        [getattr(b, quantity) for _, b in ordered],
    )


def differences(first: PointSamples, second: PointSamples) -> list[float]:
    """The study's metric of `second` minus that of `first`, block by block."""
    both = sorted(first.samples.keys() & second.samples.keys())
    pairs = [(first.samples[r].metric, second.samples[r].metric) for r in both]
    return [b - a for a, b in pairs if a is not None and b is not None]


def _analyse_point(question: Question, samples: PointSamples, base: PointSamples | None) -> PointAnalysis:
    is_baseline = question.is_baseline(samples.point)
    times, rates, metrics = (samples.all_of(q) for q in ("time_s", "throughput", "metric"))
    speedup = None
    if is_baseline and times:
        speedup = reference(len(times))
    elif base is not None:
        speedup = ratio_of(base, samples)
    steps = [t for r in samples.results if r.state is TrialState.FINISHED for t in r.gang_step_times_s]
    time_s = median_estimate(times) if times else None
    return PointAnalysis(
        point=samples.point,
        num_workers=samples.num_workers,
        num_finished=samples.num_in(TrialState.FINISHED),
        num_failed=samples.num_in(TrialState.FAILED),
        num_stopped=samples.num_in(TrialState.STOPPED),
        time_s=time_s,
        throughput=median_estimate(rates) if rates else None,
        speedup=speedup,
        efficiency=_efficiency(question, samples, base, speedup),
        metric=median_estimate(metrics, log_scale=False) if metrics else None,
        is_baseline=is_baseline,
        step_time_median_s=float(np.median(steps)) if steps else None,
        step_time_p95_s=float(np.quantile(steps, 0.95)) if steps else None,
        cost=cost_of(time_s, num_nodes(samples), question.price_per_node_hour),
        times=samples.times,
    )


def _efficiency(
    question: Question, samples: PointSamples, base: PointSamples | None, speedup: Estimate | None
) -> Estimate | None:
    """None too where the baseline leaves ``num_workers`` alone: S · N0 / N would be the speedup once more."""
    if speedup is None or base is None or "num_workers" not in question.compared_keys():
        return None
    workers, base_workers = samples.num_workers, base.num_workers
    return speedup.scaled(base_workers / workers) if workers and base_workers else None
