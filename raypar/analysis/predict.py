"""What more workers, or another network, would bring: the step model with what a study has measured put in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from raypar.analysis.calibration import Calibration
from raypar.analysis.drawn_steps import DrawnSteps, training_steps
from raypar.analysis.laws import Scaling
from raypar.analysis.measured import Measured
from raypar.analysis.stats import Estimate, median_estimate
from raypar.analysis.step_model import Communication, Limit, StepTime, limit_of
from raypar.analysis.training import Training
from raypar.errors import RayparError

Floats: TypeAlias = NDArray[np.float64]

MAX_WORKERS = 2**20


@dataclass(frozen=True)
class Prediction:
    """One worker count.

    Attributes:
        batch_size: global.
        step: where the time of a step goes.
        speedup: over one worker on the same work (strong), or by throughput (weak); as predicted for both.
        efficiency: speedup over workers.
        epoch_s: seconds of an epoch.
        training_s: seconds of all epochs.
        limit: what keeps it from being faster.
        measured: the step time as measured with these workers, this batch and this network; None: it was not.
        extrapolated: in what the prediction goes beyond what was measured: "workers", "batch", "network".
    """

    num_workers: int
    batch_size: int
    step: StepTime
    step_time_s: Estimate
    throughput_samples_per_s: Estimate
    speedup: Estimate
    efficiency: Estimate
    epoch_s: Estimate
    training_s: Estimate
    limit: Limit
    measured: Estimate | None
    extrapolated: tuple[str, ...]

    @property
    def is_extrapolated(self) -> bool:
        return bool(self.extrapolated)


@dataclass(frozen=True)
class Sweep:
    """Predictions by worker count.

    Attributes:
        predictions: of the worker counts asked for, from the fewest.
        most_workers: as many as the global batch has samples; None: any number can work.
        fastest: the worker count up to the largest asked for with the highest throughput; the fewest such.
        curve: worker counts and their throughput, for a plot: every one up to the largest asked for.
    """

    predictions: tuple[Prediction, ...]
    most_workers: int | None
    fastest: int
    curve: tuple[Floats, Floats]


def worker_counts(largest: Sequence[int], measured: Sequence[int] = ()) -> tuple[int, ...]:
    """1, 2, 4 … up to the largest asked for, those asked for, and those measured up to there.

    Raises:
        RayparError: a count is none.
    """
    for count in largest:
        if not 1 <= count <= MAX_WORKERS:
            raise RayparError(
                f"--workers {count}: must be from 1 to {MAX_WORKERS:,}", hint="write --workers 1024, or --workers 8,64"
            )
    top = max(largest)
    powers = [2**i for i in range(top.bit_length())]
    return tuple(sorted({*powers, *largest, *(n for n in measured if n <= top)}))


def predict(
    calibration: Calibration,
    training: Training,
    communication: Communication,
    counts: Sequence[int],
    *,
    is_measured_network: bool = False,
) -> Sweep:
    """What each worker count would take.

    Args:
        calibration: of the study.
        training: what is to be predicted.
        communication: how and on which network gradients are sent.
        counts: worker counts, at least 1 each; those with more workers than samples in a batch are left out.
        is_measured_network: the network is the one that the study ran on.

    Raises:
        RayparError: all counts are more than the batch has samples.
    """
    most = training.batch_size if training.scaling is Scaling.STRONG else None
    kept = [n for n in sorted(set(counts)) if most is None or n <= most]
    if not kept:
        raise RayparError(
            f"a global batch of {most} has no sample for each of {min(counts)} workers",
            hint="ask for fewer workers, or say --scaling weak",
        )
    workers = np.array(kept)
    steps = training_steps(calibration, training, communication, workers)
    times = DrawnSteps(calibration, training, communication, workers)
    every = np.arange(1, kept[-1] + 1)
    rates = training.global_batch(every) / training_steps(calibration, training, communication, every).step_time_s
    return Sweep(
        predictions=tuple(
            _prediction(calibration, training, steps.at(i), times, i, is_measured_network) for i in range(len(kept))
        ),
        most_workers=most,
        fastest=int(every[np.argmax(rates)]),
        curve=(every.astype(np.float64), rates),
    )


def _prediction(
    calibration: Calibration, training: Training, step: StepTime, times: DrawnSteps, i: int, is_measured_network: bool
) -> Prediction:
    num_workers, batch_size = int(times.workers[i]), int(times.batches[i])
    one = batch_size if training.scaling is Scaling.STRONG else training.batch_size  # the batch of one worker

    def speedup(t: Floats) -> Any:
        return (batch_size / t[..., i]) / (one / t[..., -1])

    losses = dict(step.losses_s)
    if training.scaling is Scaling.STRONG:
        losses[Limit.BATCH] = step.optimizer_s * (1 - 1 / num_workers)
    epoch_s = times.told(lambda t: training.num_samples / batch_size * t[..., i])
    same = [p for p in calibration.points if (p.num_workers, p.batch_size) == (num_workers, batch_size)]
    return Prediction(
        num_workers=num_workers,
        batch_size=batch_size,
        step=step,
        step_time_s=times.told(lambda t: t[..., i]),
        throughput_samples_per_s=times.told(lambda t: batch_size / t[..., i]),
        speedup=times.told(speedup),
        efficiency=times.told(lambda t: speedup(t) / num_workers),
        epoch_s=epoch_s,
        training_s=epoch_s.scaled(training.epochs),
        limit=limit_of(losses, step.step_time_s),
        measured=median_estimate(same[0].step_times_s) if same and (is_measured_network or num_workers == 1) else None,
        extrapolated=_beyond(calibration, num_workers, batch_size, is_measured_network),
    )


def _beyond(calibration: Calibration, num_workers: int, batch_size: int, is_measured_network: bool) -> tuple[str, ...]:
    """In what a point goes beyond the measured ones."""

    def reaches(points: Sequence[Measured]) -> bool:
        sizes = [p.samples_per_worker for p in points]
        return min(sizes) <= batch_size / num_workers <= max(sizes)

    found = []
    if num_workers > max(p.num_workers for p in calibration.points):
        found.append("workers")
    if not reaches(calibration.points if is_measured_network else calibration.of_one_worker):
        found.append("batch")
    if num_workers > 1 and not is_measured_network:
        found.append("network")
    return tuple(found)
