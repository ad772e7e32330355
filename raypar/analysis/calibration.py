"""What a study's results say about a step: the time that one worker computes, how it varies, the network it ran on.

A worker alone takes ``fixed_s + per_sample_s * samples`` a step, fitted to its batch sizes. What several workers take
beyond that is communication as the step model has it, whose network is fitted where it is asked for: what workers on
one machine take from each other (memory bandwidth, caches) then counts as communication.

Intervals are percentiles of a bootstrap over each point's repeats. They hold the noise of the measurements, not the
error of the model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares, nnls

from raypar.analysis.measured import Measured
from raypar.analysis.network import Network
from raypar.analysis.step_model import Communication, LayerCost, StepTimes, simulate_steps
from raypar.errors import RayparError

Floats: TypeAlias = NDArray[np.float64]

NUM_DRAWS = 200
BOOTSTRAP_SEED = 19930101
# Between processes of one machine, by TCP; taken where one worker count can't tell latency from bandwidth.
LOCAL_LATENCY_S = 50e-6
# Bounds of a fitted network: from a slow modem to what no machine has.
_BANDWIDTHS = (1e4, 1e14)
_LATENCIES_S = (1e-8, 1.0)


@dataclass(frozen=True)
class Calibration:
    """What a step takes; `draws` are the same numbers as other repeats might have given them.

    Attributes:
        layers: of the network.
        points: measured, by worker count and batch size.
        fixed_s: of one worker's step, whatever its batch: optimizer, launches, Python.
        per_sample_s: of one worker's step, for each of its samples.
        variation: coefficient of variation of one worker's step times.
        draws: shape ``(draws, 2)``: fixed_s and per_sample_s; None where some point ran only once.
        notes: sentences on what was taken for granted.
    """

    layers: tuple[LayerCost, ...]
    points: tuple[Measured, ...]
    fixed_s: float
    per_sample_s: float
    variation: float
    draws: Floats | None
    notes: tuple[str, ...]

    @property
    def of_one_worker(self) -> tuple[Measured, ...]:
        return tuple(p for p in self.points if p.num_workers == 1)

    @property
    def of_several(self) -> tuple[Measured, ...]:
        return tuple(p for p in self.points if p.num_workers > 1)


def calibrate(
    points: Sequence[Measured],
    layers: Sequence[LayerCost],
    variation: float | None = None,
    *,
    num_draws: int = NUM_DRAWS,
    seed: int = BOOTSTRAP_SEED,
) -> Calibration:
    """What a step takes one worker, as the points of one worker have it.

    Args:
        points: at least one of one worker.
        layers: of the network.
        variation: coefficient of variation of step times; None: unknown, and taken as 0.
        num_draws: how often the repeats are drawn for intervals.
        seed: of the draws.

    Raises:
        RayparError: no point is of one worker.
    """
    alone = [p for p in points if p.num_workers == 1]
    if not alone:
        raise RayparError(
            "no trial of one worker was measured: what computing takes can't be told from communication",
            hint="run the study with --set num_workers=1 as well",
        )
    notes = []
    sizes = sorted({p.batch_size for p in alone})
    if len(sizes) == 1:
        notes.append(
            f"one worker was measured with a batch of {sizes[0]} only: its time is taken as proportional to the batch, "
            "which flatters smaller ones"
        )
    if variation is None:
        notes.append("no step times of one worker are stored: no stragglers are reckoned with")
    batches = np.array([p.batch_size for p in alone], dtype=np.float64)
    fixed_s, per_sample_s = _fitted_compute(batches, np.array([np.median(p.step_times_s) for p in alone]))
    draws = None
    if min(len(p.step_times_s) for p in points) > 1:
        rng = np.random.default_rng(seed)
        drawn = np.stack([drawn_medians(p.step_times_s, num_draws, rng) for p in alone], axis=1)
        draws = np.array([_fitted_compute(batches, row) for row in drawn])
    return Calibration(tuple(layers), tuple(points), fixed_s, per_sample_s, variation or 0.0, draws, tuple(notes))


def drawn_medians(times_s: Sequence[float], num_draws: int, rng: np.random.Generator) -> Floats:
    """Medians of a point's repeats drawn anew, shape ``(num_draws,)``.

    The repeats are spread around their mean on the log scale, as `raypar.analysis.laws` does it: a few of them, drawn
    with replacement, vary too little.
    """
    logs = np.log(np.asarray(times_s, dtype=np.float64))
    size, mean = len(logs), float(np.mean(logs))
    spread = mean + math.sqrt(size / (size - 1)) * (logs - mean)
    return np.asarray(np.exp(np.median(spread[rng.integers(size, size=(num_draws, size))], axis=1)))


def step_times(
    calibration: Calibration,
    num_workers: NDArray[Any],
    batch_size: Floats,
    communication: Communication,
    *,
    fixed_s: float | Floats | None = None,
    per_sample_s: float | Floats | None = None,
    data_s: float | Floats = 0.0,
    accumulation_steps: int = 1,
) -> StepTimes:
    """The steps of some worker counts with some global batches, as calibrated; arrays are broadcast.

    Args:
        fixed_s: a draw instead of the calibration's own; so `per_sample_s`.
        data_s: as in `raypar.analysis.step_model.simulate_steps`.
    """
    fixed_s = calibration.fixed_s if fixed_s is None else fixed_s
    per_sample_s = calibration.per_sample_s if per_sample_s is None else per_sample_s
    return simulate_steps(
        calibration.layers,
        num_workers,
        communication,
        compute_s=np.asarray(per_sample_s) * batch_size / num_workers,
        optimizer_s=fixed_s,
        data_s=data_s,
        variation=calibration.variation,
        accumulation_steps=accumulation_steps,
    )


def fit_study_network(
    calibration: Calibration, communication: Communication, accumulation_steps: int = 1
) -> tuple[Network, str]:
    """The link that explains what several workers took, and a sentence on how it came about.

    One worker count tells one number: then the latency is `LOCAL_LATENCY_S`. The relative errors of the step times are
    made small (least squares of logarithms).

    Args:
        communication: how the study's gradients were sent; its network is not looked at.

    Raises:
        RayparError: no point has several workers.
    """
    several = calibration.of_several
    if not several:
        raise RayparError(
            "no trial of several workers was measured: the study tells nothing of a network",
            hint="give one: --network 100Gbit, or --network measured",
        )
    workers = np.array([p.num_workers for p in several])
    batches = np.array([p.batch_size for p in several], dtype=np.float64)
    logs = np.log([np.median(p.step_times_s) for p in several])
    fits_latency = len(set(workers.tolist())) > 1

    def network_of(parameters: Floats) -> Network:
        latency_s = math.exp(parameters[1]) if fits_latency else LOCAL_LATENCY_S
        return Network(latency_s, math.exp(parameters[0]))

    def errors(parameters: Floats) -> Floats:
        how = replace(communication, network=network_of(parameters))
        times = step_times(calibration, workers, batches, how, accumulation_steps=accumulation_steps)
        return np.asarray(np.log(times.step_time_s) - logs)

    limits = [_BANDWIDTHS, _LATENCIES_S] if fits_latency else [_BANDWIDTHS]
    bounds = np.log(np.array(limits)).T
    # From several starts: where all communication is hidden, nothing shows which way to go.
    starts = [
        np.log([bandwidth, latency_s][: len(limits)])
        for bandwidth in (1e7, 1e8, 1e9, 1e10)
        for latency_s in (1e-5, 1e-3)
    ]
    fits = [least_squares(errors, start, bounds=bounds) for start in (starts if fits_latency else starts[::2])]
    network = network_of(min(fits, key=lambda fit: float(fit.cost)).x)
    counts = ", ".join(str(n) for n in sorted(set(workers.tolist())))
    how = "latency and bandwidth" if fits_latency else f"bandwidth, with a latency of {LOCAL_LATENCY_S * 1e6:.0f} µs,"
    return network, f"the network is that of the measurements: {how} fitted to the steps of {counts} workers"


def _fitted_compute(batches: Floats, times_s: Floats) -> tuple[float, float]:
    """Seconds a step and seconds a sample, neither below 0, by least squares of the relative errors."""
    if len(set(batches.tolist())) == 1:
        return 0.0, float(np.median(times_s) / batches[0])
    columns = np.stack([np.ones_like(batches), batches], axis=1) / times_s[:, None]
    (fixed_s, per_sample_s), _ = nnls(columns, np.ones_like(times_s))
    return float(fixed_s), float(per_sample_s)
