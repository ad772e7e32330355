"""Estimates of each point: medians with intervals, speedup, parallel efficiency, energy, cost.

Speedup S(N) = T(baseline) / T(N), with an interval that is simultaneous with those of all other points
(`raypar.analysis.pairwise`). Parallel efficiency is S(N) · N0 / N, for N workers against a baseline of N0. Both are the
same for strong and weak scaling, because an epoch has the same number of samples either way.

Cost counts every machine that workers ran on in full, for the compared time, at the price of its kind. Parts that a
study excludes from that time (start-up, evaluation) are not in the cost either. The interval of a cost is that of the
time, since a price is exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from raypar.analysis.pairwise import Family
from raypar.analysis.question import PointSamples, Question, with_baselines
from raypar.analysis.stats import Estimate, median_estimate, reference
from raypar.analysis.time_to_target import Target, trial_to_target
from raypar.study.price import Price, price_of
from raypar.study.quantity import COST, ENERGY, MEMORY, THROUGHPUT, Quantity, Repeats, quantities
from raypar.study.trial import TrialResult, gang_step_times_s
from raypar.units import HOUR_S, is_number

OF_HARDWARE = ("node_label", "device")  # select the kind of machine


def comparable(gathered: Sequence[PointSamples]) -> list[Quantity]:
    """Return the quantities that are estimated from trials, except those whose values can't be compared."""
    finished = [result for samples in gathered for result in samples.measured]
    estimated = [q for q in quantities() if q.of_repeats not in (None, Repeats.DERIVED)]
    return [q for q in estimated if q.are_comparable(finished)]


def estimate_of(q: Quantity, samples: PointSamples, times: Mapping[int, float] | None = None) -> Estimate | None:
    """Estimate a quantity of a point; None if no finished trial has it.

    Args:
        times: seconds after the first timed step, by repeat: a quantity that accrues counts up to then, and only for
            these trials.
    """
    if q is THROUGHPUT:  # of trials that are compared by their training time
        values = samples.all_of("throughput")
    else:
        values = [value for r in samples.measured if (value := _value(q, r, times)) is not None]
    if not values:
        return None
    return median_estimate(
        [max(values)] if q.of_repeats is Repeats.MOST else values, log_scale=q.of_repeats is Repeats.MEDIAN
    )


def _value(q: Quantity, result: TrialResult, times: Mapping[int, float] | None) -> float | None:
    value = q.of(result)
    if not is_number(value) or (value <= 0 and q.of_repeats is not Repeats.LINEAR):
        return None
    if q.accrues and (result.conditions.stalls_s or result.conditions.is_untrained):
        return None
    if not q.accrues or times is None:
        return value
    until_s = times.get(result.spec.repeat)
    if until_s is None or not result.train_time_s:
        return None
    return value * min(1.0, until_s / result.train_time_s)


def num_nodes(samples: PointSamples) -> int | None:
    """Return the largest number of machines that the workers of a trial ran on; None: unknown."""
    return max(filter(None, (len(set(result.conditions.node)) for result in samples.results)), default=None)


def hourly_price(samples: PointSamples, price: Price | None) -> float | None:
    """Return the price of an hour on all machines of a trial; None: unknown."""
    nodes, of_node = num_nodes(samples), price_of(price, samples.values.get("node_label"))
    return None if nodes is None or of_node is None else nodes * of_node


def cost_of(samples: PointSamples, time_s: Estimate | None, price: Price | None) -> Estimate | None:
    """Return the cost of a time at a point in the currency of the price; None if anything is unknown."""
    hourly = hourly_price(samples, price)
    return None if time_s is None or hourly is None else time_s.scaled(hourly / HOUR_S)


@dataclass(frozen=True)
class PointAnalysis(PointSamples):
    """Trials of one point, and estimates from the finished ones.

    Attributes:
        time_s: the study's time metric, or the training time to the target of a search.
        speedup: over the baseline; 1 for a baseline itself; None without one.
        efficiency: speedup · N0 / N; None if the baseline has no ``num_workers``, or is another kind of machine.
        metric: the study's metric after the last epoch.
        step_time_median_s: over all steps of all finished trials, slowest rank.
        step_time_p95_s: 95th percentile of the same.
        quantities: known quantities by their keys, except those that can't be compared with other points.
    """

    is_baseline: bool = False
    time_s: Estimate | None = None
    speedup: Estimate | None = None
    efficiency: Estimate | None = None
    metric: Estimate | None = None
    step_time_median_s: float | None = None
    step_time_p95_s: float | None = None
    quantities: Mapping[str, Estimate] = field(default_factory=dict)

    def of(self, q: Quantity) -> Estimate | None:
        """Return the estimate of a quantity; None: unknown."""
        return self.quantities.get(q.key)

    @property
    def shown_metric(self) -> Estimate | None:
        """The metric; if all trials were stopped, the median of their last ones, which no choice or claim uses."""
        if self.metric or self.samples or not self.stopped_metrics:
            return self.metric
        last = median_estimate(self.searched_metrics, log_scale=False)
        return replace(last, low=None, high=None)  # they were stopped after different epochs

    @property
    def throughput(self) -> Estimate | None:
        """Samples per second of the whole gang, timed region."""
        return self.of(THROUGHPUT)

    @property
    def cost(self) -> Estimate | None:
        """Cost, in the currency of the study's price."""
        return self.of(COST)

    @property
    def energy_j(self) -> Estimate | None:
        """Energy of a training."""
        return self.of(ENERGY)

    @property
    def memory_bytes(self) -> Estimate | None:
        """Memory that a worker needs."""
        return self.of(MEMORY)


def analyse_points(question: Question, gathered: Sequence[PointSamples], family: Family) -> tuple[PointAnalysis, ...]:
    """Estimate the numbers of every point, in the order given."""
    estimated = comparable(gathered)
    return tuple(_analysed(question, p, base, estimated, family) for p, base in with_baselines(question, gathered))


def _analysed(
    question: Question, samples: PointSamples, base: PointSamples | None, estimated: Sequence[Quantity], family: Family
) -> PointAnalysis:
    is_baseline = question.is_baseline(samples.point)
    times = samples.all_of("time_s") if question.target is None else times_to(question, samples)
    metrics = samples.searched_metrics if question.is_search else samples.all_of("metric")
    ratio = None
    if is_baseline and times:
        ratio = reference(len(times))
    elif base is not None:
        ratio = family.speedup(base, samples)
    steps = [t for r in samples.measured for t in gang_step_times_s(r)]
    time_s = median_estimate(times) if times else None
    return PointAnalysis(
        **vars(samples),
        is_baseline=is_baseline,
        time_s=time_s,
        speedup=ratio,
        efficiency=_efficiency(question, samples, base, ratio),
        metric=median_estimate(metrics, log_scale=False) if metrics else None,
        step_time_median_s=float(np.median(steps)) if steps else None,
        step_time_p95_s=float(np.quantile(steps, 0.95)) if steps else None,
        quantities=_by_key(
            {
                COST: cost_of(samples, time_s, question.price_per_node_hour),
                **{q: estimate_of(q, samples) for q in estimated},
            }
        ),
    )


def times_to(question: Question, samples: PointSamples) -> list[float]:
    """Return the training times to the target of a search, in seconds, of the trials that reached it."""
    if question.target is None:
        return []
    target = Target(question.metric, question.target, question.mode, question.unit)
    times = (trial_to_target(result, target).time_s for result in samples.results)
    return [time_s for time_s in times if time_s is not None]


def _by_key(estimates: Mapping[Quantity, Estimate | None]) -> dict[str, Estimate]:
    return {q.key: estimate for q, estimate in estimates.items() if estimate is not None}


def quantities_until(
    point: PointAnalysis, time_s: Estimate | None, times: Mapping[int, float] | None, price: Price | None
) -> dict[str, Estimate]:
    """Return a point's quantities up to a moment, by their keys.

    Args:
        time_s: time until the moment.
        times: seconds from the first timed step until then, by repeat; None: unknown, like all quantities that accrue.
    """
    estimates = {q: point.of(q) for q in quantities() if not q.accrues}
    estimates[COST] = cost_of(point, time_s, price)
    if times is not None:
        estimates |= {q: estimate_of(q, point, times) for q in quantities() if q.accrues and point.of(q) is not None}
    return _by_key(estimates)


def _efficiency(
    question: Question, samples: PointSamples, base: PointSamples | None, ratio: Estimate | None
) -> Estimate | None:
    # If the baseline doesn't set `num_workers`, the efficiency would equal the speedup.
    if ratio is None or base is None or "num_workers" not in question.compared_keys():
        return None
    if any(samples.values.get(key) != base.values.get(key) for key in OF_HARDWARE):
        return None  # a ratio of two kinds of machine says nothing about the use of more workers
    workers, base_workers = samples.num_workers, base.num_workers
    return ratio.scaled(base_workers / workers) if workers and base_workers else None
