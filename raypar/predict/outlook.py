"""Expected rates of worker counts that were not measured: a median and a range that holds the truth in 9 of 10 cases.

They are those of published trainings like this one, narrowed by each count that was measured, and kept below the bound
of the step model where there is one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from raypar.analysis.laws import Scaling
from raypar.analysis.scaling import Measurement, Runs, rates_of
from raypar.analysis.stats import Estimate, Method, median_estimate
from raypar.predict.overhead import (
    LEVEL,
    EfficiencyRange,
    Facts,
    GangSize,
    MeasuredEfficiency,
    Prior,
    most_informative,
    predict_efficiency,
)
from raypar.predict.predict import JobSpec, Prediction, Sweep

# A measurement with this many times the largest measured count is still easy to make.
WITHIN_REACH = 4
NARROW = 0.05  # ranges of efficiency below this width need no further measurement


@dataclass(frozen=True)
class MeasuredRates:
    """Measured rates of a training's gangs, which differ only in their number of workers.

    Attributes:
        rates: work per second of the whole gang, one value for each repeat, by worker count.
        unit: of the rates; empty: only their ratios mean something.
        time_name: name of the time that a rate's inverse is, such as "step"; empty: none.
        work: amount of work in that time, by worker count.
        is_base_modelled: the rate of the smallest count is that of the step model.
    """

    rates: Mapping[int, tuple[float, ...]]
    unit: str = "samples/s"
    time_name: str = ""
    work: Callable[[int], float] = lambda _: 1.0
    is_base_modelled: bool = False

    @classmethod
    def of_runs(cls, runs: Runs, scaling: Scaling, unit: str = "") -> MeasuredRates:
        """Return the rates of a table or of a study's group.

        Args:
            scaling: of times: whether they are of the same work, or each worker has its own.
            unit: of the throughputs.
        """
        rates = {n: tuple(map(float, rates_of(runs, scaling, n))) for n in sorted(runs.values)}
        if runs.quantity is Measurement.THROUGHPUT:
            return cls(rates, unit or runs.unit)
        return cls(rates, "", "time", float if scaling is Scaling.WEAK else (lambda _: 1.0))

    @property
    def base(self) -> int:
        """Smallest worker count."""
        return min(self.rates)


@dataclass(frozen=True)
class Expected:
    """Expected numbers of a worker count: medians, and ranges that hold the truth with probability `LEVEL`.

    Attributes:
        efficiency: over the smallest measured count.
        rate: of all workers.
        time_s: time of a step, or of the measured work; None: not evidence.
        at_best: upper bounds of the step model; None: there is none.
        measured: measured rate; None: not measured, or on another network.
        measured_time_s: measured time; None: as for `measured` and `time_s`.
    """

    num_workers: int
    num_nodes: int
    efficiency: Estimate
    speedup: Estimate
    rate: Estimate
    time_s: Estimate | None
    at_best: Prediction | None
    measured: Estimate | None
    measured_time_s: Estimate | None


@dataclass(frozen=True)
class Advice:
    """Measurement that would narrow a range.

    Attributes:
        width_before: of the target's range of efficiency.
        width_after: expected.
    """

    num_workers: int
    num_nodes: int
    target: int
    width_before: float
    width_after: float


@dataclass(frozen=True)
class Outlook:
    """Expected numbers by worker count.

    Attributes:
        base: smallest measured count, which speedups and efficiencies are over.
        num_measured: counts whose measurements narrow the ranges.
        num_series: published series behind the ranges.
    """

    measured: MeasuredRates
    facts: Facts
    base: int
    expected: tuple[Expected, ...]
    num_measured: int
    num_series: int
    advice: Advice | None


def look_ahead(
    measured: MeasuredRates,
    facts: Facts,
    counts: Sequence[int],
    *,
    nodes_of: int | None = None,
    sweep: Sweep | None = None,
    is_comparable: Callable[[int], bool] = lambda _: True,
    prior: Prior | None = None,
) -> Outlook:
    """Predict each worker count from the measured ones.

    Args:
        counts: from the smallest measured count on; the largest is what the advice is for.
        nodes_of: workers per node; None: all are on one.
        sweep: bounds of the step model for these counts, and for the measured ones.
        is_comparable: whether a measured count had the links that are predicted.
    """
    prior = prior or Prior.shipped()
    base, bounds = measured.base, {p.num_workers: p for p in sweep.predictions} if sweep else {}
    gang = partial(_gang, nodes_of)

    def explained(num_workers: int) -> float:
        bound = bounds.get(num_workers)
        if bound is None:
            return 0.0
        over_base = bound.efficiency.value / (bounds[base].efficiency.value if base in bounds else 1.0)
        return 1 / over_base - 1

    kept = sorted({n for n in (*counts, *measured.rates) if base <= n <= max(counts) and (not bounds or n in bounds)})
    evidence = [
        MeasuredEfficiency(gang(n), *_measured_efficiency(measured, n), explained(n))
        for n in sorted(measured.rates)
        if n > base and is_comparable(n) and (not bounds or n in bounds)
    ]
    predict = partial(predict_efficiency, prior, facts, gang(base))
    ranges = predict([gang(n) for n in kept], evidence, [explained(n) for n in kept])
    base_rate = float(np.median(measured.rates[base]))
    expected = []
    for n, efficiency in zip(kept, ranges, strict=True):
        estimate = _estimate(efficiency, len(evidence) + 1)
        speedup = estimate.scaled(n / base)
        rate = speedup.scaled(base_rate)
        is_shown = n in measured.rates and is_comparable(n) and not (n == base and measured.is_base_modelled)
        shown = median_estimate(measured.rates[n]) if is_shown else None
        expected.append(
            Expected(
                num_workers=n,
                num_nodes=gang(n).num_nodes,
                efficiency=estimate,
                speedup=speedup,
                rate=rate,
                time_s=rate.inverse().scaled(measured.work(n)) if measured.time_name else None,
                at_best=bounds.get(n),
                measured=shown,
                measured_time_s=shown.inverse().scaled(measured.work(n)) if shown and measured.time_name else None,
            )
        )
    advice = _advice(prior, facts, gang, base, kept[-1], evidence, explained(kept[-1]))
    return Outlook(measured, facts, base, tuple(expected), len(evidence) + 1, prior.num_series, advice)


def _gang(nodes_of: int | None, num_workers: int) -> GangSize:
    return GangSize(num_workers, 1 if nodes_of is None else math.ceil(num_workers / nodes_of))


def _measured_efficiency(measured: MeasuredRates, num_workers: int) -> tuple[float, float]:
    """Return the efficiency of a count over the smallest, and its standard error."""
    base, rates = measured.base, measured.rates
    logs = [np.log(rates[n]) for n in (num_workers, base)]
    efficiency = float(np.exp(np.median(logs[0]) - np.median(logs[1]))) * base / num_workers
    variances = [float(np.var(values, ddof=1)) / len(values) if len(values) > 1 else 0.0 for values in logs]
    return efficiency, efficiency * math.sqrt(sum(variances))


def _estimate(efficiency: EfficiencyRange, num_measured: int) -> Estimate:
    return Estimate(efficiency.median, efficiency.low, efficiency.high, num_measured, LEVEL, Method.PUBLISHED)


def _advice(
    prior: Prior,
    facts: Facts,
    gang: Callable[[int], GangSize],
    base: int,
    target: int,
    evidence: Sequence[MeasuredEfficiency],
    bound: float,
) -> Advice | None:
    largest = max([base, *(m.gang.num_workers for m in evidence)])
    counts = [base * 2**i for i in range(1, 21)]
    taken = {m.gang.num_workers for m in evidence}
    candidates = [gang(n) for n in counts if n < target and n <= WITHIN_REACH * largest and n not in taken]
    (now,) = predict_efficiency(prior, facts, gang(base), [gang(target)], evidence, [bound])
    best = most_informative(prior, facts, gang(base), gang(target), evidence, candidates, bound)
    if best is None or target == base or now.width < NARROW:
        return None
    chosen, then = best
    return Advice(chosen.num_workers, chosen.num_nodes, target, now.width, then.width)


def rates_by_model(training: JobSpec, sweep: Sweep, measured: Mapping[int, tuple[float, ...]]) -> MeasuredRates:
    """Return rates in samples/s: the measured ones, and that of one worker by the model if it was not measured.

    Args:
        measured: samples/s with the training's batch, by worker count.
    """
    one = next(p for p in sweep.predictions if p.num_workers == 1)
    rates = {1: (one.throughput_samples_per_s.value,), **measured}
    return MeasuredRates(rates, "samples/s", "step", training.batch_of, is_base_modelled=1 not in measured)
