"""Estimates of each point: medians with intervals, speedup, parallel efficiency, energy, cost.

Speedup S(N) = T(baseline) / T(N), from trials of the same block where there are such; its interval is simultaneous with
those of all other points (`raypar.analysis.pairwise`).
Parallel efficiency is S(N) · N0 / N, for N workers against a baseline of N0. Strong scaling (``batch_size`` fixed) and
weak scaling (``per_worker_batch_size`` fixed) need no two formulas: an epoch is the same number of samples either way.

Energies are compared only where they are of the same parts: with the packages' share in all of them, or in none.

Nodes are the machines that its workers ran on, each paid for whole, however many of its cores were used. The hours are
those of the time that is compared; what a study leaves out of it (start-up, evaluation) is not paid for here either.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from raypar.analysis.pairwise import Family, family_of
from raypar.analysis.question import PointSamples, Question, with_baselines
from raypar.analysis.stats import Estimate, median_estimate, reference
from raypar.study.trial import TrialResult
from raypar.units import HOUR_S

PACKAGES = "CPU packages"
MIXED = "the energies of some trials hold that of the CPU packages, those of others don't"
NOT_MEASURED = "no trial has its energy recorded"


def energy_source(gathered: Iterable[PointSamples]) -> str:
    """Return what the trials' energies are of: "CPU packages", "GPUs" or both; empty where none can be compared."""
    sources = {r.conditions.energy_of for p in gathered for r in _measured(p)}
    if len({PACKAGES in source for source in sources}) != 1:
        return ""
    return max(sources, key=len)  # on CPUs alone some trials have no GPUs to count


def energy_of(samples: PointSamples, times: Mapping[int, float] | None = None) -> Estimate | None:
    """Estimate the energy of a training, joules; None where no finished trial has one.

    Args:
        times: seconds after the first timed step by repeat: the energy up to then, and of those trials alone. Power is
            taken as constant: a share of the timed region uses that share of its energy.
    """
    joules: list[float] = []
    for result in _measured(samples):
        if not result.energy_j:
            continue
        if times is None:
            joules.append(result.energy_j)
        elif result.train_time_s and (until_s := times.get(result.spec.repeat)) is not None:
            joules.append(result.energy_j * min(1.0, until_s / result.train_time_s))
    return median_estimate(joules) if joules else None


def why_energy_unknown(results: Sequence[TrialResult]) -> str:
    """Return why no energies can be compared, in words of the machine where it has some."""
    if any(r.energy_j is not None for r in results):
        return MIXED
    reasons = dict.fromkeys(r.conditions.no_energy for r in results if r.conditions.no_energy)
    return "; ".join(reasons) or NOT_MEASURED


def _measured(samples: PointSamples) -> list[TrialResult]:
    return [r for r in samples.measured if r.energy_j is not None]


def num_nodes(samples: PointSamples) -> int | None:
    """Return on how many machines the workers of a point's trials ran, the most of any trial; None where unknown."""
    return max(filter(None, (len(set(result.conditions.node)) for result in samples.results)), default=None)


def cost_of(time_s: Estimate | None, nodes: int | None, price_per_node_hour: float | None) -> Estimate | None:
    """Return the cost in the currency of the price; None where anything is unknown."""
    if time_s is None or nodes is None or price_per_node_hour is None:
        return None
    return time_s.scaled(nodes * price_per_node_hour / HOUR_S)


@dataclass(frozen=True)
class PointAnalysis(PointSamples):
    """Trials of one point, and estimates from the finished ones alone.

    Attributes:
        is_baseline: whether it is what others are compared with.
        time_s: the study's time metric, seconds.
        throughput: samples per second, whole gang, timed region.
        speedup: how many times as fast as the baseline; 1 for a baseline itself; None without one.
        efficiency: speedup · N0 / N; None where the baseline names no ``num_workers``.
        metric: the study's metric (accuracy, say) after the last epoch.
        step_time_median_s: over all steps of all finished trials, slowest rank.
        step_time_p95_s: 95th percentile of the same.
        cost: of the time, in the currency of the study's price; None where that or the number of nodes is unknown.
        energy_j: of a training, joules; None where it can't be read, or not be compared with the other points'.
        memory_bytes: that a worker needs (`TrialResult.memory_bytes`), the most of any finished trial.
    """

    is_baseline: bool = False
    time_s: Estimate | None = None
    throughput: Estimate | None = None
    speedup: Estimate | None = None
    efficiency: Estimate | None = None
    metric: Estimate | None = None
    step_time_median_s: float | None = None
    step_time_p95_s: float | None = None
    cost: Estimate | None = None
    energy_j: Estimate | None = None
    memory_bytes: Estimate | None = None


def analyse_points(
    question: Question, gathered: Sequence[PointSamples], family: Family | None = None
) -> tuple[PointAnalysis, ...]:
    """Estimate the numbers of every point, in the order given.

    Args:
        family: of the study's comparisons, if it is known already.
    """
    has_energy, family = bool(energy_source(gathered)), family or family_of(question, gathered)
    return tuple(_analysed(question, p, base, has_energy, family) for p, base in with_baselines(question, gathered))


def _analysed(
    question: Question, samples: PointSamples, base: PointSamples | None, has_energy: bool, family: Family
) -> PointAnalysis:
    is_baseline = question.is_baseline(samples.point)
    times, rates, metrics = (samples.all_of(q) for q in ("time_s", "throughput", "metric"))
    ratio = None
    if is_baseline and times:
        ratio = reference(len(times))
    elif base is not None:
        ratio = family.speedup(base, samples)
    steps = [t for r in samples.measured for t in r.gang_step_times_s]
    time_s = median_estimate(times) if times else None
    return PointAnalysis(
        **vars(samples),
        is_baseline=is_baseline,
        time_s=time_s,
        throughput=median_estimate(rates) if rates else None,
        speedup=ratio,
        efficiency=_efficiency(question, samples, base, ratio),
        metric=median_estimate(metrics, log_scale=False) if metrics else None,
        step_time_median_s=float(np.median(steps)) if steps else None,
        step_time_p95_s=float(np.quantile(steps, 0.95)) if steps else None,
        cost=cost_of(time_s, num_nodes(samples), question.price_per_node_hour),
        energy_j=energy_of(samples) if has_energy else None,
        memory_bytes=_memory_of(samples),
    )


def _memory_of(samples: PointSamples) -> Estimate | None:
    sizes_bytes = [result.memory_bytes for result in samples.measured if result.memory_bytes]
    return median_estimate([max(sizes_bytes)]) if sizes_bytes else None


def _efficiency(
    question: Question, samples: PointSamples, base: PointSamples | None, ratio: Estimate | None
) -> Estimate | None:
    # Where the baseline leaves `num_workers` alone, S · N0 / N would be the speedup once more.
    if ratio is None or base is None or "num_workers" not in question.compared_keys():
        return None
    workers, base_workers = samples.num_workers, base.num_workers
    return ratio.scaled(base_workers / workers) if workers and base_workers else None
