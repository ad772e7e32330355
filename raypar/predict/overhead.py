"""Overhead of parallel training as published systems have it: ranges of efficiency for worker counts not measured.

The efficiency of n workers, compared with the smallest measured count, is ``1 / (1 + bound + overhead)``. The bound is
what a step model explains with a known network (0 without one); the overhead is everything else, and its logarithm is a
Gaussian process over published scaling series::

    log overhead = features @ coefficients + source + training + slope * (growth - 1) + noise

where growth is the logarithm of one plus the doublings of the workers, to the base 2 (1 for twice as many), with a
normal term for each source of figures (a laboratory, a framework) and for each training. A prediction is the
process conditioned on the counts that were measured (kriging: Rasmussen and Williams, "Gaussian Processes for Machine
Learning", 2006, chapter 2), so it is a range that each measurement narrows. `benchmarks/predictions.py --fit` writes
the coefficients and standard deviations; without arguments, it judges them on sources that they were not fitted to.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import ndtri

from raypar.analysis.laws import Scaling
from raypar.predict.network import Floats
from raypar.study.strategy import Exchange

PRIOR_FILE = Path(__file__).with_name("overhead.json")
BOUND_ERROR = 0.05  # of what a step model explains, either way (benchmarks/networks.py)
LEVEL = 0.9  # of the ranges
# Smaller overheads can't be distinguished: published figures have two or three digits.
LEAST_OVERHEAD = 0.01
LEAST_NOISE_OVERHEAD = 0.02  # below it, the noise of an efficiency says nothing more about the logarithm
USUAL_STEP_TIME_S = 0.22  # geometric means of the published trainings, for those where it is not known
USUAL_PARAMETERS = 67e6


class Link(StrEnum):
    """Kind of links within a node."""

    FAST = "NVLink"
    BUS = "PCIe"


class Fabric(StrEnum):
    """Kind of network between nodes."""

    RDMA = "InfiniBand or RoCE"
    TCP = "TCP"


class ModelFamily(StrEnum):
    """Kind of model, as far as it changes the overhead."""

    CONVOLUTIONAL = "convolutional"
    RECURRENT = "recurrent"
    OTHER = "other"


@dataclass(frozen=True)
class Facts:
    """Facts of a training besides its measured rates; None: not known.

    Attributes:
        step_time_s: of the smallest measured worker count.
        num_parameters: trained ones.
    """

    scaling: Scaling | None = None
    exchange: Exchange = Exchange.ALL_REDUCE
    within: Link | None = None
    between: Fabric | None = None
    family: ModelFamily | None = None
    step_time_s: float | None = None
    num_parameters: float | None = None


@dataclass(frozen=True)
class GangSize:
    """Workers of a training, and the nodes that they are on."""

    num_workers: int
    num_nodes: int = 1


@dataclass(frozen=True)
class MeasuredEfficiency:
    """Measured efficiency of a gang, over the smallest measured count.

    Attributes:
        error: its standard error.
        bound: overhead that a step model explains.
    """

    gang: GangSize
    efficiency: float
    error: float = 0.0
    bound: float = 0.0


@dataclass(frozen=True)
class EfficiencyRange:
    """Predicted efficiency: its median, and the bounds of a range that holds it with probability `LEVEL`."""

    median: float
    low: float
    high: float

    @property
    def width(self) -> float:
        return self.high - self.low


_LINK_SIGNS = {Link.FAST: 1.0, Link.BUS: -1.0, None: 0.0}
_FABRIC_SIGNS = {Fabric.TCP: 1.0, Fabric.RDMA: -1.0, None: 0.0}
# Features of the logarithm of the overhead, each from the facts, the smallest count and the gang: one entry each.
FEATURES: Mapping[str, Callable[[Facts, GangSize, GangSize], float]] = {
    "constant": lambda *_: 1.0,
    "growth": lambda _, base, gang: math.log2(1 + math.log2(gang.num_workers / base.num_workers)),
    "doublings of the smallest": lambda _, base, __: math.log2(base.num_workers),
    # A worker's share of a fixed batch shrinks, so that the same communication weighs more.
    "doublings in strong scaling": lambda facts, base, gang: (
        math.log2(gang.num_workers / base.num_workers) if facts.scaling is Scaling.STRONG else 0.0
    ),
    "scaling not known": lambda facts, *_: float(facts.scaling is None),
    "through the host": lambda facts, *_: float(facts.exchange is Exchange.HOST),
    "sharded": lambda facts, *_: float(facts.exchange is Exchange.SHARDED),
    "parts of the model": lambda facts, *_: float(facts.exchange is Exchange.MODEL),
    "links within a node": lambda facts, *_: _LINK_SIGNS[facts.within],
    "network": lambda facts, *_: _FABRIC_SIGNS[facts.between],
    "convolutional": lambda facts, *_: float(facts.family is ModelFamily.CONVOLUTIONAL),
    "recurrent": lambda facts, *_: float(facts.family is ModelFamily.RECURRENT),
    "log step time": lambda facts, *_: math.log((facts.step_time_s or USUAL_STEP_TIME_S) / USUAL_STEP_TIME_S),
    "log parameters": lambda facts, *_: math.log((facts.num_parameters or USUAL_PARAMETERS) / USUAL_PARAMETERS),
}


def features(facts: Facts, base: GangSize, gangs: Sequence[GangSize]) -> Floats:
    """Return the features of each gang, shape ``(gangs, features)``."""
    return np.array([[feature(facts, base, gang) for feature in FEATURES.values()] for gang in gangs])


@dataclass(frozen=True)
class Deviations:
    """Standard deviations of the terms of the logarithm of an overhead.

    Attributes:
        slope: of a training's growth.
        noise: of each figure.
        efficiency: of each published efficiency, in units of efficiency.
    """

    source: float
    training: float
    slope: float
    noise: float
    efficiency: float

    def within_training(self, growth: Floats) -> Floats:
        """Return the covariances of figures of one training by their growth, shape ``(figures, figures)``."""
        steps = growth - 1
        return np.asarray(self.training**2 + self.slope**2 * np.outer(steps, steps))

    def noise_variances(self, overheads: Floats, errors: float | Floats) -> Floats:
        """Return the variances of the logarithms of measured overheads whose efficiencies have these errors.

        The derivative of log(1/e - 1) by e is -(1 + h)²/h with the overhead h, here with 1/h, as its noise is largest.
        """
        return np.asarray(self.noise**2 + (errors / np.maximum(np.abs(overheads), LEAST_NOISE_OVERHEAD)) ** 2)


@dataclass(frozen=True)
class Prior:
    """Fitted Gaussian process.

    Attributes:
        mean: of the coefficients of `FEATURES`.
        covariance: of the coefficients, shape ``(features, features)``.
        num_series: number of published series that it was fitted to.
    """

    mean: Floats
    covariance: Floats
    deviations: Deviations
    num_series: int

    @classmethod
    @cache
    def shipped(cls) -> Prior:
        """Return the prior that was fitted to all published series."""
        raw: Mapping[str, Any] = json.loads(PRIOR_FILE.read_text())
        means = np.array([raw["coefficients"][name] for name in FEATURES])
        return cls(means, np.array(raw["covariance"]), Deviations(**raw["deviations"]), raw["num_series"])

    def as_json(self) -> str:
        """Return the text of `PRIOR_FILE`."""
        raw = {
            "num_series": self.num_series,
            "deviations": {name: round(value, 4) for name, value in asdict(self.deviations).items()},
            "coefficients": dict(zip(FEATURES, np.round(self.mean, 4).tolist(), strict=True)),
            "covariance": np.round(self.covariance, 5).tolist(),
        }
        return json.dumps(raw, indent=1) + "\n"


def log_overhead(efficiency: float | Floats, bound: float | Floats = 0.0) -> Floats:
    """Return the logarithm of the overhead of an efficiency that the bound does not explain."""
    return np.log(np.maximum(1 / np.asarray(efficiency) - 1 - bound, LEAST_OVERHEAD))


def predict_efficiency(
    prior: Prior,
    facts: Facts,
    base: GangSize,
    gangs: Sequence[GangSize],
    measured: Sequence[MeasuredEfficiency] = (),
    bounds: Sequence[float] | None = None,
) -> tuple[EfficiencyRange, ...]:
    """Return the range of each gang's efficiency over that of the smallest count.

    Args:
        base: the smallest measured count, of which the efficiency is 1.
        measured: efficiencies of larger counts.
        bounds: overhead of each gang that a step model explains; None: 0.
    """
    means, deviations = _conditioned(prior, facts, base, gangs, measured)
    explained = np.zeros(len(gangs)) if bounds is None else np.asarray(bounds, np.float64)
    z = float(ndtri((1 + LEVEL) / 2))
    overheads = np.exp(means + np.outer([0.0, z, -z], deviations))
    is_base = np.array([gang.num_workers == base.num_workers for gang in gangs])
    explained = np.outer([1.0, 1 + BOUND_ERROR, 1 - BOUND_ERROR], explained)
    rows = np.where(is_base, 1.0, 1 / (1 + explained + overheads))
    return tuple(EfficiencyRange(*map(float, row)) for row in rows.T)


def _conditioned(
    prior: Prior, facts: Facts, base: GangSize, gangs: Sequence[GangSize], measured: Sequence[MeasuredEfficiency]
) -> tuple[Floats, Floats]:
    """Return the mean and standard deviation of each gang's log overhead, given the measured ones."""
    every = [*gangs, *(m.gang for m in measured)]
    rows = features(facts, base, every)
    growth = rows[:, list(FEATURES).index("growth")]
    of = prior.deviations
    means = rows @ prior.mean
    covariance = of.source**2 + of.within_training(growth) + rows @ prior.covariance @ rows.T
    new, old = slice(0, len(gangs)), slice(len(gangs), None)
    mean, variance = means[new], np.diag(covariance)[new]
    if measured:
        values = log_overhead(np.array([m.efficiency for m in measured]), np.array([m.bound for m in measured]))
        errors = np.hypot(np.array([m.error for m in measured]), of.efficiency)
        noisy = covariance[old, old] + np.diag(of.noise_variances(np.exp(values), errors))
        weights = np.linalg.solve(noisy, covariance[old, new])
        mean = mean + (values - means[old]) @ weights
        variance = variance - np.sum(weights * covariance[old, new], axis=0)
    noise = of.noise_variances(np.exp(mean), of.efficiency)
    return mean, np.sqrt(np.maximum(variance, 0.0) + noise)


def most_informative(
    prior: Prior,
    facts: Facts,
    base: GangSize,
    target: GangSize,
    measured: Sequence[MeasuredEfficiency],
    candidates: Sequence[GangSize],
    bound: float = 0.0,
) -> tuple[GangSize, EfficiencyRange] | None:
    """Return the candidate whose measurement would narrow the target's range most, and the expected range.

    Of candidates that narrow it about equally (within a tenth), the first counts. The measurement is assumed to give
    what is predicted for it. None if no candidate narrows the range by a tenth.

    Args:
        bound: the target's overhead that a step model explains.
    """
    (now,) = predict_efficiency(prior, facts, base, [target], measured, [bound])
    expected = []
    for gang in candidates:
        (there,) = predict_efficiency(prior, facts, base, [gang], measured)
        as_predicted = MeasuredEfficiency(gang, there.median)
        (then,) = predict_efficiency(prior, facts, base, [target], [*measured, as_predicted], [bound])
        expected.append((gang, then))
    narrowest = min((then.width for _, then in expected), default=math.inf)
    if narrowest > 0.9 * now.width:
        return None
    return next((gang, then) for gang, then in expected if then.width <= 1.1 * narrowest)
