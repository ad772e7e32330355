"""Predictions for other worker counts or networks, and their error on measured points."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from raypar.analysis.laws import Scaling
from raypar.analysis.stats import LEVEL, Estimate, Method, median_estimate
from raypar.errors import RayparError
from raypar.predict.calibration import Calibration, Measured, calibrate, epoch_samples, fit_study_network, step_times
from raypar.predict.network import Algorithm, Network, Topology
from raypar.predict.step_model import MIB, Communication, Limit, StepTime, StepTimes, limit_of
from raypar.study.space import Value
from raypar.study.trial import TrialResult

Floats: TypeAlias = NDArray[np.float64]


# Bytes sent for each gradient, by the option `compression`; None: as many as it has.
COMPRESSIONS: Mapping[str, int | None] = {"none": None, "fp16": 2, "bf16": 2}


@dataclass(frozen=True)
class Training:
    """What is to be predicted.

    Attributes:
        scaling: strong: the global batch stays as it is; weak: that of a worker does.
        batch_size: of a step: the global one in strong scaling, one worker's in weak scaling.
        num_samples: of an epoch.
        epochs: of the training.
        accumulation_steps: micro-batches of a step.
        input_samples_per_s: what a node's input pipeline delivers; None: as much as is wanted.
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


def communication_of(
    config: Mapping[str, Value],
    network: Network | Topology,
    algorithm: Algorithm | str = Algorithm.AUTO,
    *,
    bucket_mb: float | None = None,
    overlap: bool | None = None,
) -> Communication:
    """How a trial with this config sends its gradients, on this network.

    Args:
        config: complete, or as an older result has it.
        bucket_mb: MiB of a bucket instead of the config's; 0: no fusion.
        overlap: instead of the config's.

    Raises:
        RayparError: the step model is not of such a strategy or compression.
    """
    strategy, compression = config.get("strategy", "ddp"), config.get("compression") or "none"
    if strategy != "ddp":
        raise RayparError(
            f"strategy={strategy}: the step model knows synchronous data parallelism by all-reduce only",
            hint="predict from trials with --set strategy=ddp",
        )
    if compression not in COMPRESSIONS:
        raise RayparError(
            f"compression={compression}: how much it sends depends on the shapes of the weights, which the step model "
            "does not know",
            hint=f"predict from trials with another: --set compression=X, one of {', '.join(COMPRESSIONS)}",
        )
    num_bytes, sent_bytes = 8 if config.get("precision") == "fp64" else 4, COMPRESSIONS[str(compression)]
    own_mb = config.get("bucket_mb")
    chosen_mb = bucket_mb if bucket_mb is not None else own_mb if isinstance(own_mb, (int, float)) else None
    return Communication(
        network=network,
        algorithm=algorithm,
        bucket_bytes=None if chosen_mb is None else chosen_mb * MIB,
        overlap=bool(config.get("overlap", True)) if overlap is None else overlap,
        compression=1.0 if sent_bytes is None else sent_bytes / num_bytes,
    )


def training_of(
    results: Sequence[TrialResult],
    settings: Mapping[str, Value],
    scaling: Scaling | None = None,
    input_samples_per_s: float | None = None,
) -> Training:
    """What the trials of `raypar.predict.calibration.choose_results` train, with more workers.

    Args:
        results: at least one.
        settings: `batch_size` or `per_worker_batch_size` among them chooses the batch.
        scaling: None: weak where the study gives every worker a batch of its own, else strong.
        input_samples_per_s: as in `Training`.

    Raises:
        RayparError: the trials have several batches and none is chosen.
    """
    configs: list[Mapping[str, Any]] = [r.spec.config for r in results]
    is_weak = all(c.get("per_worker_batch_size") is not None for c in configs)
    scaling = scaling or (Scaling.WEAK if is_weak or settings.get("per_worker_batch_size") else Scaling.STRONG)
    if scaling is Scaling.WEAK:
        key = "per_worker_batch_size"
        batches = {c["batch_size"] // c["num_workers"] for c in configs}
    else:
        key = "batch_size"
        batches = {c["batch_size"] for c in configs}
    wanted = settings.get(key)
    if wanted is None and len(batches) > 1:
        told = ", ".join(map(str, sorted(batches)))
        raise RayparError(f"the trials differ in their batch: {told}", hint=f"choose: --set {key}={max(batches)}")
    if wanted is not None and (not isinstance(wanted, int) or isinstance(wanted, bool) or wanted < 1):
        raise RayparError(f"--set {key}={wanted}: must be a whole number of at least 1")
    return Training(
        scaling=scaling,
        batch_size=int(wanted) if wanted is not None else batches.pop(),
        num_samples=max(epoch_samples(r) for r in results),
        epochs=max(int(c.get("epochs") or 1) for c in configs),
        accumulation_steps=max(int(c.get("accumulation_steps") or 1) for c in configs),
        input_samples_per_s=input_samples_per_s,
    )


def training_steps(
    calibration: Calibration, training: Training, communication: Communication, workers: NDArray[Any], **draw: Floats
) -> StepTimes:
    batches = training.global_batch(workers)
    data_s: float | Floats = 0.0
    if training.input_samples_per_s is not None:
        network = communication.network
        in_node = network.workers_per_node if isinstance(network, Topology) else 1
        data_s = np.minimum(workers, in_node) * batches / workers / training.input_samples_per_s
    return step_times(
        calibration,
        workers,
        batches,
        communication,
        data_s=data_s,
        accumulation_steps=training.accumulation_steps,
        **draw,
    )


class DrawnSteps:
    """Step times of some worker counts, as calibrated and as drawn, and what follows from them."""

    def __init__(
        self, calibration: Calibration, training: Training, communication: Communication, workers: NDArray[Any]
    ) -> None:
        self.workers = workers
        self.batches = training.global_batch(workers)
        self._num_samples = min(len(p.step_times_s) for p in calibration.points)
        # One worker comes last, for the speedups.
        with_one = np.append(workers, 1)
        self._best = training_steps(calibration, training, communication, with_one).step_time_s
        self._rows: Floats | None = None
        if calibration.draws is not None:
            draw = {"fixed_s": calibration.draws[:, :1], "per_sample_s": calibration.draws[:, 1:]}
            self._rows = training_steps(calibration, training, communication, with_one, **draw).step_time_s

    def told(self, quantity: Callable[[Floats], Any]) -> Estimate:
        """What `quantity` makes of step times, shape ``(..., workers and one worker)``."""
        value = float(quantity(self._best))
        if self._rows is None:
            return Estimate(value, None, None, self._num_samples, None, Method.SINGLE)
        low, high = np.quantile(quantity(self._rows), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        return Estimate(
            value, min(float(low), value), max(float(high), value), self._num_samples, LEVEL, Method.BOOTSTRAP
        )


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


@dataclass(frozen=True)
class LeftOut:
    """A measured point, predicted from the others.

    Attributes:
        measured: its step time.
        predicted: as the others have it; None where they can't tell.
        why_not: what keeps them from it.
    """

    num_workers: int
    batch_size: int
    measured: Estimate
    predicted: Estimate | None
    why_not: str = ""

    @property
    def error(self) -> float | None:
        """How far the prediction is off, as a share of what was measured."""
        return None if self.predicted is None else self.predicted.value / self.measured.value - 1

    @property
    def is_within(self) -> bool | None:
        """Whether the predicted value lies in the measured interval; None where there is none of either."""
        if self.predicted is None or self.measured.low is None:
            return None
        return not self.measured.excludes(self.predicted.value)


def leave_one_out(
    calibration: Calibration,
    communication: Communication,
    network: Network | Topology | None = None,
    accumulation_steps: int = 1,
) -> tuple[LeftOut, ...]:
    """Every measured point of several workers, predicted without the points of its worker count.

    Args:
        calibration: of the whole study.
        communication: how the study's gradients were sent; its network is not looked at.
        network: the one that the study ran on, as a probe has it; None: fitted to the other worker counts.
    """
    found = []
    for point in calibration.of_several:
        others = [p for p in calibration.points if p.num_workers != point.num_workers]
        rest = calibrate(others, calibration.layers, calibration.variation)
        measured = median_estimate(point.step_times_s)
        if network is None and not rest.of_several:
            why = "no other count of several workers was measured, so the network is not known: give it, or probe it"
            found.append(LeftOut(point.num_workers, point.batch_size, measured, None, why))
            continue
        link = network if network is not None else fit_study_network(rest, communication, accumulation_steps)[0]
        training = Training(Scaling.STRONG, point.batch_size, 1, accumulation_steps=accumulation_steps)
        how = replace(communication, network=link)
        drawn = DrawnSteps(rest, training, how, np.array([point.num_workers]))
        found.append(LeftOut(point.num_workers, point.batch_size, measured, drawn.told(lambda t: t[..., 0])))
    return tuple(found)
