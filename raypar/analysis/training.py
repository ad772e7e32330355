"""What is to be predicted: the training of a study's trials with more workers, and how they send their gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from raypar.analysis.all_reduce import Algorithm
from raypar.analysis.buckets import MIB
from raypar.analysis.laws import Scaling
from raypar.analysis.measured import epoch_samples
from raypar.analysis.network import Network, Topology
from raypar.analysis.step_model import Communication
from raypar.errors import RayparError
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
    """What the trials of `raypar.analysis.calibration.choose_results` train, with more workers.

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
