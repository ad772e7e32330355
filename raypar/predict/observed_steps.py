"""Observed steps of training code that raypar didn't write, as the step model takes them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from raypar.analysis.laws import Scaling
from raypar.errors import RayparError
from raypar.predict.calibration import ObservedPoint
from raypar.predict.predict import JobSpec
from raypar.predict.step_model import DEFAULT_BUCKET_BYTES, MIB, LayerCost
from raypar.study.observation import Observation
from raypar.study.profile import BACKWARD
from raypar.study.space import Value
from raypar.study.trial import TrialResult

NUM_PARTS = 32  # that gradients are assumed to be ready in, one after the other: their layers are not known
BYTES_PER_GRADIENT = 4  # unless DDP says otherwise
SAME = 0.01  # relative difference of batches that count as equal: the last one of an epoch may be short
ASSUMPTIONS = (
    "the layers of the script are not known: its gradients are assumed to be ready evenly during the backward pass, "
    "and to be sent as DistributedDataParallel does"
)


@dataclass(frozen=True)
class ObservedTraining:
    """Observed training, as the step model takes it.

    Attributes:
        points: steps by worker count.
        layers: equal parts of the gradients.
        config: how gradients are sent, as for `raypar.predict.predict.communication_of`.
    """

    points: tuple[ObservedPoint, ...]
    layers: tuple[LayerCost, ...]
    job: JobSpec
    config: dict[str, Value]


def observed_training(
    results: Sequence[TrialResult], scaling: Scaling | None = None, input_samples_per_s: float | None = None
) -> ObservedTraining:
    """Return the training of trials that differ only in their number of workers.

    Args:
        scaling: of the predicted counts; None: that of the trials.
        input_samples_per_s: as in `JobSpec`.

    Raises:
        RayparError: the steps, their samples or the parameters of a trial were not observed, or the ranks don't
            exchange gradients.
    """
    steps: dict[int, list[tuple[float, float]]] = {}
    observations = []
    for result in results:
        num_workers, seen = result.spec.placement.num_workers, result.observation
        if seen is None or len(seen.ranks) != num_workers:
            raise RayparError("the steps of its training were not observed")
        if not seen.samples_per_step:
            raise RayparError("the samples of its steps are not known")
        if any(rank.sends for rank in seen.ranks):
            raise RayparError("its workers send to single others: they don't train by data parallelism alone")
        step_s = max(rank.breakdown.step_s for rank in seen.ranks)
        steps.setdefault(num_workers, []).append((seen.samples_per_step, step_s))
        observations.append(seen)
    batches = {n: statistics.median(samples for samples, _ in each) for n, each in steps.items()}
    of_trials = _scaling_of(batches)
    least = min(batches)
    of_worker = batches[least] / least
    scaling = scaling or of_trials
    loaders = [loader for o in observations for loader in o.ranks[0].loaders if loader.is_trained_on]
    num_epochs = max((loader.num_iterations for loader in loaders), default=1)
    return ObservedTraining(
        points=tuple(ObservedPoint(n, round(batches[n]), tuple(s for _, s in steps[n])) for n in sorted(steps)),
        layers=_layers(observations),
        job=JobSpec(
            scaling=scaling,
            batch_size=max(1, round(batches[least] if scaling is Scaling.STRONG else of_worker)),
            num_samples=round(max(o.samples_per_step * o.ranks[0].num_steps for o in observations) / num_epochs),
            epochs=num_epochs,
            accumulation_steps=max(1, round(statistics.median(o.ranks[0].passes_per_step for o in observations))),
            input_samples_per_s=input_samples_per_s,
        ),
        config=_config(observations),
    )


def _scaling_of(batches: dict[int, float]) -> Scaling:
    """Return what grows with the workers, from the samples of a step by worker count; a script's batch is a worker's.

    Raises:
        RayparError: the batch of a worker differs, and that of all workers, too.
    """
    for scaling, sizes in (
        (Scaling.WEAK, [samples / n for n, samples in batches.items()]),
        (Scaling.STRONG, [*batches.values()]),
    ):
        if max(sizes) <= (1 + SAME) * min(sizes):
            return scaling
    shown = ", ".join(f"{samples:.0f} with {n}" for n, samples in sorted(batches.items()))
    raise RayparError(f"neither a worker's samples of a step nor those of all workers are the same: {shown}")


def _layers(observations: Sequence[Observation]) -> tuple[LayerCost, ...]:
    by_ddp = [sum(model.parameter_bytes for model in o.ranks[0].ddp) for o in observations]
    num_parameters = max(sum(o.ranks[0].num_parameters) for o in observations)
    num_bytes = max(by_ddp) or BYTES_PER_GRADIENT * num_parameters
    alone = [o.ranks[0].breakdown for o in observations if len(o.ranks) == 1]
    if not num_bytes or not alone:
        missing = "trials of one worker" if num_bytes else "parameters of an optimizer"
        raise RayparError(f"no {missing} were observed")
    share = statistics.median(each.parts[BACKWARD] / each.step_s for each in alone)
    part = LayerCost("a part", round(num_bytes / NUM_PARTS), share / NUM_PARTS, (1 - share) / NUM_PARTS)
    return (part,) * NUM_PARTS


def _config(observations: Sequence[Observation]) -> dict[str, Value]:
    ranks = [rank for o in observations for rank in o.ranks]
    capacity = max((model.bucket_bytes for rank in ranks for model in rank.ddp), default=0)
    config: dict[str, Value] = {"device": "cuda" if any(rank.device_name for rank in ranks) else "cpu"}
    # By default, the first bucket is smaller than the others.
    return config if capacity in (0, DEFAULT_BUCKET_BYTES) else {**config, "bucket_mb": capacity / MIB}
