"""Predictions for other worker counts or networks from a calibrated step model.

They are upper bounds: the model has no contention between workers, no other traffic and no slow nodes. The efficiency
of published systems was up to 12 points lower (benchmarks/README.md). If a measurement is faster than its bound, the
model does not describe the study, and nothing is predicted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raypar.analysis.laws import Scaling
from raypar.analysis.stats import Estimate, Method, bootstrap_estimate, median_estimate
from raypar.errors import RayparError
from raypar.predict.calibration import Calibration, epoch_samples
from raypar.predict.network import Algorithm, Floats, Network, Topology
from raypar.predict.step_model import MIB, Communication, Limit, StepTime, limit_of
from raypar.study.space import Value
from raypar.study.trial import TrialResult
from raypar.units import counted, seconds

# Bytes sent for each gradient by option `compression`; None: not compressed.
COMPRESSIONS: Mapping[str, int | None] = {"none": None, "fp16": 2, "bf16": 2}
MAX_WORKERS = 2**20
MAX_EXCESS = 0.05  # noise: a measured step may be this much faster than its bound
FREE = Network(0.0, math.inf)  # an ideal network


@dataclass(frozen=True)
class JobSpec:
    """The training to predict.

    Attributes:
        scaling: strong: the global batch is fixed; weak: each worker's batch is fixed.
        batch_size: the fixed batch: global in strong scaling, of a worker in weak scaling.
        num_samples: samples per epoch.
        accumulation_steps: micro-batches per step.
        input_samples_per_s: throughput of a node's input pipeline; None: it doesn't limit.
    """

    scaling: Scaling
    batch_size: int
    num_samples: int
    epochs: int = 1
    accumulation_steps: int = 1
    input_samples_per_s: float | None = None

    def global_batch(self, num_workers: NDArray[Any]) -> Floats:
        sizes = np.full(np.shape(num_workers), float(self.batch_size))
        return sizes if self.scaling is Scaling.STRONG else sizes * num_workers

    def batch_of(self, num_workers: int) -> float:
        """Return the global batch of a worker count."""
        return float(self.global_batch(np.array(num_workers)))


def communication_of(
    config: Mapping[str, Value],
    network: Network | Topology,
    algorithm: Algorithm | str = Algorithm.AUTO,
    *,
    bucket_mb: float | None = None,
    overlap: bool | None = None,
) -> Communication:
    """Return how a trial with this config sends its gradients on a network.

    Args:
        config: complete, or from an older result.
        bucket_mb: bucket size in MiB that replaces the config's.
        overlap: replaces the config's.

    Raises:
        RayparError: the step model doesn't cover this strategy or compression.
    """
    strategy, compression = config.get("strategy", "ddp"), config.get("compression") or "none"
    if strategy != "ddp":
        raise RayparError(
            f"strategy={strategy}: the step model only covers synchronous data parallelism with all-reduce",
            hint="predict from trials with --set strategy=ddp",
        )
    if compression not in COMPRESSIONS:
        raise RayparError(
            f"compression={compression}: the bytes sent depend on the shapes of the weights, which the step model does "
            "not know",
            hint=f"predict from trials with another compression: --set compression=X, one of {', '.join(COMPRESSIONS)}",
        )
    num_bytes, sent_bytes = 8 if config.get("precision") == "fp64" else 4, COMPRESSIONS[str(compression)]
    if bucket_mb is None and isinstance(configured_mb := config.get("bucket_mb"), (int, float)):
        bucket_mb = configured_mb
    return Communication(
        network=network,
        algorithm=algorithm,
        bucket_bytes=None if bucket_mb is None else bucket_mb * MIB,
        overlap=bool(config.get("overlap", True)) if overlap is None else overlap,
        compression=1.0 if sent_bytes is None else sent_bytes / num_bytes,
        cores_per_worker=num_cores if isinstance(num_cores := config.get("cpus_per_worker"), int) else 1,
    )


def job_spec_of(
    results: Sequence[TrialResult],
    settings: Mapping[str, Value],
    scaling: Scaling | None = None,
    input_samples_per_s: float | None = None,
) -> JobSpec:
    """Return the training job of trials from `raypar.predict.calibration.choose_results`.

    Args:
        settings: hyperparameters; `batch_size` or `per_worker_batch_size` selects the batch.
        scaling: None: weak if the study sets the batch of each worker, else strong.
        input_samples_per_s: as in `JobSpec`.

    Raises:
        RayparError: the trials have several batches and none is selected, or the selected one is not a whole number.
    """
    configs: list[Mapping[str, Any]] = [r.spec.config for r in results]
    is_weak = all(c.get("per_worker_batch_size") is not None for c in configs)
    scaling = scaling or (Scaling.WEAK if is_weak or settings.get("per_worker_batch_size") else Scaling.STRONG)
    key, batches = "batch_size", {c["batch_size"] for c in configs}
    if scaling is Scaling.WEAK:
        key, batches = "per_worker_batch_size", {c["batch_size"] // c["num_workers"] for c in configs}
    batch_size = settings.get(key)
    if batch_size is None and len(batches) > 1:
        sizes = ", ".join(map(str, sorted(batches)))
        raise RayparError(f"the trials differ in their batch: {sizes}", hint=f"choose: --set {key}={max(batches)}")
    if batch_size is not None and (not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1):
        raise RayparError(f"--set {key}={batch_size}: must be a whole number of at least 1")
    return JobSpec(
        scaling=scaling,
        batch_size=batches.pop() if batch_size is None else int(batch_size),
        num_samples=max(epoch_samples(r) for r in results),
        epochs=max(int(c.get("epochs") or 1) for c in configs),
        accumulation_steps=max(int(c.get("accumulation_steps") or 1) for c in configs),
        input_samples_per_s=input_samples_per_s,
    )


def job_step_times(
    calibration: Calibration,
    job: JobSpec,
    communication: Communication,
    workers: NDArray[Any],
    costs: Floats | None = None,
) -> StepTime[Floats]:
    """Return the step times of a job for each worker count; `costs` as in `Calibration.step_times`."""
    batches, network = job.global_batch(workers), communication.network
    data_s: float | Floats = 0.0
    if job.input_samples_per_s is not None:
        per_node = network.workers_per_node if isinstance(network, Topology) else 1
        data_s = np.minimum(workers, per_node) * batches / workers / job.input_samples_per_s
    return calibration.step_times(
        workers, batches, communication, costs=costs, data_s=data_s, accumulation_steps=job.accumulation_steps
    )


class BootstrapSteps:
    """Calibrated and bootstrapped step times of worker counts, and estimates of functions of them."""

    def __init__(
        self, calibration: Calibration, job: JobSpec, communication: Communication, workers: NDArray[Any]
    ) -> None:
        self._num_samples = min(len(p.step_times_s) for p in calibration.points)
        # One worker comes last, for the speedups.
        given = calibration, job, communication, np.append(workers, 1)
        self._best = job_step_times(*given).step_time_s
        draws = calibration.draws
        self._rows = None if draws is None else job_step_times(*given, draws).step_time_s

    def estimate(self, quantity: Callable[[Floats], Any], *, has_interval: bool = True) -> Estimate:
        """Estimate a function of step times in seconds, shape ``(..., worker counts + 1)``; the last is one worker."""
        value = float(quantity(self._best))
        if self._rows is None or not has_interval:
            return Estimate(value, None, None, self._num_samples, None, Method.SINGLE)
        return bootstrap_estimate(value, quantity(self._rows), self._num_samples)


@dataclass(frozen=True)
class Prediction:
    """Predicted best times of a worker count. Effects that the model leaves out make it slower.

    Extrapolated estimates have no interval, because noise of the measurements is the smallest part of their error.

    Attributes:
        batch_size: global batch.
        speedup: over one worker on the same work (strong), or by throughput (weak); both predicted.
        efficiency: speedup divided by workers.
        training_s: all epochs.
        limit: main cause that keeps it from being faster.
        measured: step time measured with these workers, this batch, network and way of sending; None: not measured.
        extrapolated: what goes beyond the measurements: "workers", "batch", "network", "sending".
    """

    num_workers: int
    batch_size: int
    step: StepTime[float]
    step_time_s: Estimate
    throughput_samples_per_s: Estimate
    speedup: Estimate
    efficiency: Estimate
    epoch_s: Estimate
    training_s: Estimate
    limit: Limit
    measured: Estimate | None
    extrapolated: tuple[str, ...]


@dataclass(frozen=True)
class Sweep:
    """Predictions by worker count.

    Attributes:
        predictions: in order of worker count.
        most_workers: samples of the global batch, which limit the workers; None: no limit.
        fastest: smallest worker count with the highest throughput, up to the largest requested.
    """

    predictions: tuple[Prediction, ...]
    most_workers: int | None
    fastest: int


def worker_counts(largest: Sequence[int], measured: Sequence[int] = ()) -> tuple[int, ...]:
    """Return 1, 2, 4 …, the requested counts and the measured ones, up to the largest requested.

    Raises:
        RayparError: a count is below 1 or above `MAX_WORKERS`.
    """
    for count in largest:
        if not 1 <= count <= MAX_WORKERS:
            problem = f"--workers {count}: must be from 1 to {MAX_WORKERS:,}"
            raise RayparError(problem, hint="write --workers 1024, or --workers 8,64")
    top = max(largest)
    powers = [2**i for i in range(top.bit_length())]
    return tuple(sorted({*powers, *largest, *(n for n in measured if n <= top)}))


def predict(
    calibration: Calibration,
    job: JobSpec,
    communication: Communication,
    counts: Sequence[int],
    *,
    is_measured_network: bool = False,
    is_measured_sending: bool = True,
) -> Sweep:
    """Predict the times of a job for each worker count.

    Args:
        counts: worker counts; those above the samples of a batch are excluded.
        is_measured_network: the network is the one that the study ran on.
        is_measured_sending: gradients are sent in the study's buckets, with its overlap and algorithm.

    Raises:
        RayparError: all counts exceed the samples of a batch, or the model contradicts the measurements.
    """
    is_measured = is_measured_network and is_measured_sending
    _check_measured(calibration, job, communication if is_measured else replace(communication, network=FREE))
    kept = possible_counts(job, counts)
    times = BootstrapSteps(calibration, job, communication, np.array(kept))
    every = np.arange(1, kept[-1] + 1)
    steps = job_step_times(calibration, job, communication, every)
    rates = job.global_batch(every) / steps.step_time_s
    missing = "" if is_measured else "sending" if is_measured_network else "network"
    return Sweep(
        predictions=tuple(
            _prediction(calibration, job, steps.at(n - 1), times, i, n, missing) for i, n in enumerate(kept)
        ),
        most_workers=most_workers(job),
        fastest=int(every[np.argmax(rates)]),
    )


def most_workers(job: JobSpec) -> int | None:
    """Return the samples of a global batch that is fixed, which limit the workers; None: no limit."""
    return job.batch_size if job.scaling is Scaling.STRONG else None


def possible_counts(job: JobSpec, counts: Sequence[int]) -> list[int]:
    """Return the worker counts that have a sample each, from the smallest.

    Raises:
        RayparError: none has.
    """
    most = most_workers(job)
    kept = [n for n in sorted(set(counts)) if most is None or n <= most]
    if not kept:
        raise RayparError(
            f"a global batch of {most} has too few samples for {min(counts)} workers",
            hint="ask for fewer workers, or use --scaling weak",
        )
    return kept


def _check_measured(calibration: Calibration, job: JobSpec, how: Communication) -> None:
    """Raise RayparError if a measured step is faster than its bound, for the job's batch or, if not measured, any."""
    workers = np.array([p.num_workers for p in calibration.points])
    batches = np.array([float(p.batch_size) for p in calibration.points])
    bounds = calibration.step_times(workers, batches, how, accumulation_steps=job.accumulation_steps).step_time_s
    measured = np.array([float(np.median(p.step_times_s)) for p in calibration.points])
    is_asked = batches == job.global_batch(workers)
    excess = np.where(is_asked if np.any(is_asked) else True, bounds / measured - 1, -1.0)
    worst = int(np.argmax(excess))
    if excess[worst] > MAX_EXCESS:
        with_workers = f"{counted(int(workers[worst]), 'worker')}, batch {int(batches[worst])}"
        raise RayparError(
            f"the step model contradicts the measurements, so it gives no bound: {with_workers} took "
            f"{seconds(measured[worst])} per step, but the model's best is {seconds(float(bounds[worst]))}",
            hint="run the study again on an idle machine, with --fresh; or it scales in a way that the model doesn't "
            "cover, such as a smaller batch per worker that fits into the caches",
        )


def _prediction(
    calibration: Calibration,
    job: JobSpec,
    step: StepTime[float],
    times: BootstrapSteps,
    i: int,
    num_workers: int,
    missing: str,
) -> Prediction:
    """Return the prediction of a worker count.

    Args:
        missing: part of the communication that was not measured, "network" or "sending"; empty: all was.
    """
    batch_size = int(job.global_batch(np.array(num_workers)))

    def speedup(t: Floats) -> Any:
        return (batch_size / t[..., i]) / (job.batch_size / t[..., -1])

    losses = dict(step.losses_s)
    if job.scaling is Scaling.STRONG:
        losses[Limit.BATCH] = step.optimizer_s * (1 - 1 / num_workers)
    comparable = [p for p in calibration.points if not missing or p.num_workers == 1]
    same = [p for p in comparable if (p.num_workers, p.batch_size) == (num_workers, batch_size)]
    shares = [p.batch_size / p.num_workers for p in comparable]
    beyond = {
        "workers": num_workers > max(p.num_workers for p in calibration.points),
        "batch": not min(shares) <= batch_size / num_workers <= max(shares),
        missing: num_workers > 1 and bool(missing),
    }
    extrapolated = tuple(what for what, is_beyond in beyond.items() if is_beyond)
    estimate = partial(times.estimate, has_interval=not extrapolated)
    epoch_s = estimate(lambda t: job.num_samples / batch_size * t[..., i])
    return Prediction(
        num_workers=num_workers,
        batch_size=batch_size,
        step=step,
        step_time_s=estimate(lambda t: t[..., i]),
        throughput_samples_per_s=estimate(lambda t: batch_size / t[..., i]),
        speedup=estimate(speedup),
        efficiency=estimate(lambda t: speedup(t) / num_workers),
        epoch_s=epoch_s,
        training_s=epoch_s.scaled(job.epochs),
        limit=limit_of(losses, step.step_time_s),
        measured=median_estimate(same[0].step_times_s) if same else None,
        extrapolated=extrapolated,
    )
