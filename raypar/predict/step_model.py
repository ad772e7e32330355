"""Step time of synchronous data-parallel SGD, simulated layer by layer for many worker counts at once.

A worker computes forward, then backward from the last layer to the first. Gradients fill buckets in the order in which
they are ready. Full buckets are all-reduced during the backward pass, one or two at a time (wait-free back-propagation:
Zhang et al., "Poseidon", ATC'17, https://arxiv.org/abs/1706.03292; buckets: Li et al., "PyTorch Distributed", VLDB
2020, https://arxiv.org/abs/2006.15704). Every step waits for the slowest worker and for its data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr

from raypar.predict.network import Algorithm, Cost, Floats, Network, Topology, all_reduce_cost

MIB = 2**20
# Losses below this share of a step do not limit it.
NEGLIGIBLE_SHARE = 0.05
Seconds = TypeVar("Seconds", float, Floats)


@dataclass(frozen=True)
class LayerCost:
    """Layer of a network. The forward and backward shares of all layers add up to 1.

    Attributes:
        name: its name in the model.
        num_gradient_bytes: bytes of its gradients, uncompressed.
        backward_share: share of a step's computing time for its gradients.
        forward_share: share of a step's computing time for its forward pass.
        num_gradients: number of gradient tensors.
        kind: name of its class; empty if it is not known.
    """

    name: str
    num_gradient_bytes: int
    backward_share: float
    forward_share: float
    num_gradients: int = 1
    kind: str = ""


def one_layer(num_gradient_bytes: int) -> tuple[LayerCost, ...]:
    """Return a network with a known size: all gradients are ready at the end of the backward pass."""
    # The backward pass computes gradients by weights and by inputs: twice the work of the forward pass.
    return (LayerCost("all layers", num_gradient_bytes, 2 / 3, 1 / 3),)


# Of torch's DistributedDataParallel. The first bucket is small so that sending starts early.
DEFAULT_BUCKET_BYTES = 25 * MIB
FIRST_BUCKET_BYTES = 1 * MIB


def buckets(layers: Sequence[LayerCost], bucket_bytes: float | None = None) -> list[tuple[float, float]]:
    """Return the messages in sending order: (bytes, share of the step's work after which they are ready).

    The layer that fills a bucket closes it, as single tensors do in torch. `bucket_bytes` is that of `Communication`.
    """
    messages: list[tuple[float, float]] = []
    filled, passed = 0.0, 0.0
    for layer in reversed(layers):
        passed += layer.backward_share
        if bucket_bytes == 0:  # assumes that a layer's tensors have equal sizes: only their number matters
            if layer.num_gradient_bytes:
                messages += [(layer.num_gradient_bytes / layer.num_gradients, passed)] * layer.num_gradients
            continue
        filled += layer.num_gradient_bytes
        capacity = bucket_bytes or (DEFAULT_BUCKET_BYTES if messages else FIRST_BUCKET_BYTES)
        if filled >= capacity:
            messages.append((filled, passed))
            filled = 0.0
    return [*messages, (filled, passed)] if filled else messages


class Limit(StrEnum):
    """Main cause that keeps a step from being shorter."""

    COMPUTE = "compute"
    LATENCY = "latency"
    BANDWIDTH = "bandwidth"
    STRAGGLERS = "stragglers"
    INPUT = "input"
    BATCH = "batch too small"


@dataclass(frozen=True)
class Communication:
    """Settings of the gradient exchange.

    Attributes:
        bucket_bytes: size at which a bucket is sent; 0: every gradient alone; infinite: all at once; None: as in torch,
            first `FIRST_BUCKET_BYTES`, then `DEFAULT_BUCKET_BYTES`.
        overlap: send buckets during the backward pass, not after it.
        compression: bytes sent for each byte of gradients.
        cores_per_worker: below 1: workers share a core.
    """

    network: Network | Topology
    algorithm: Algorithm | str = Algorithm.RING
    bucket_bytes: float | None = None
    overlap: bool = True
    compression: float = 1.0
    cores_per_worker: float = 1.0

    @property
    def num_at_once(self) -> int:
        """Number of concurrent all-reduces: one transfers bytes while another waits for its messages.

        torch's gloo has two threads for them. Without overlap, a step waits for each.
        """
        return 2 if str(self.algorithm) == Algorithm.GLOO and self.overlap else 1


@dataclass(frozen=True)
class StepTime(Generic[Seconds]):
    """Parts of a step's time in seconds: numbers for one step, or arrays of one shape for many worker counts.

    Exposed communication adds to the step, hidden communication does not. Time that a worker's core spends on hidden
    transfers counts as exposed.

    Attributes:
        compute_s: forward and backward pass of a worker.
        straggler_s: additional computing time of the slowest worker.
        exposed_latency_s: latencies of messages that the step waits for.
        exposed_transfer_s: transfers that the step waits for.
        hidden_communication_s: communication during the backward pass.
        optimizer_s: part of a step that doesn't depend on its batch.
        data_wait_s: waiting for the input pipeline.
    """

    compute_s: Seconds
    straggler_s: Seconds
    exposed_latency_s: Seconds
    exposed_transfer_s: Seconds
    hidden_communication_s: Seconds
    optimizer_s: Seconds
    data_wait_s: Seconds

    @property
    def exposed_communication_s(self) -> Seconds:
        return self.exposed_latency_s + self.exposed_transfer_s

    @property
    def step_time_s(self) -> Seconds:
        return self.compute_s + self.straggler_s + self.exposed_communication_s + self.optimizer_s + self.data_wait_s

    @property
    def losses_s(self) -> Mapping[Limit, Seconds]:
        """Seconds that a single worker would not lose, by cause."""
        return {
            Limit.LATENCY: self.exposed_latency_s,
            Limit.BANDWIDTH: self.exposed_transfer_s,
            Limit.STRAGGLERS: self.straggler_s,
            Limit.INPUT: self.data_wait_s,
        }

    def at(self: StepTime[Floats], *index: int) -> StepTime[float]:
        """Return the step of one worker count."""
        return StepTime(**{field.name: float(getattr(self, field.name)[index]) for field in fields(self)})


def limit_of(losses_s: Mapping[Limit, float], step_time_s: float) -> Limit:
    """Return the largest loss, or computing if the sum of all losses is below `NEGLIGIBLE_SHARE`."""
    if sum(losses_s.values()) < NEGLIGIBLE_SHARE * step_time_s:
        return Limit.COMPUTE
    return max(losses_s, key=lambda limit: losses_s[limit])


def simulate_steps(
    layers: Sequence[LayerCost],
    num_workers: NDArray[Any],
    communication: Communication,
    *,
    compute_s: Floats,
    optimizer_s: float | Floats = 0.0,
    data_s: float | Floats = 0.0,
    variation: float | Floats = 0.0,
    accumulation_steps: int = 1,
) -> StepTime[Floats]:
    """Return the parts of a step's time for each worker count. Arrays are broadcast against each other.

    The slowest of N workers takes ``compute_s * (1 + variation * E)``, where E is the expected maximum of N standard
    normals: workers are assumed to be alike and to vary independently from step to step.

    Args:
        layers: in the order of the forward pass; only the proportions of the shares count.
        compute_s: forward and backward pass of a worker's part of the batch, over all accumulated micro-batches.
        optimizer_s: time per step after the gradients.
        data_s: time of the input pipeline, in parallel to computing, for a worker's part of the batch.
        variation: coefficient of variation of a worker's `compute_s` from step to step.
        accumulation_steps: micro-batches per step; gradients are sent with the last one's backward pass.
    """
    shares = sum(layer.forward_share + layer.backward_share for layer in layers)
    compute, workers, fixed, data, spread = np.broadcast_arrays(
        *(np.asarray(a, np.float64) for a in (compute_s, num_workers, optimizer_s, data_s, variation))
    )
    straggler_s = compute * spread * expected_max_of_normals(workers)
    last_s = (compute + straggler_s) / accumulation_steps  # the micro-batch whose backward pass overlaps sending
    backward_s = last_s * (sum(layer.backward_share for layer in layers) / shares)
    messages = [
        (num_bytes, last_s * (ready_share / shares) if communication.overlap else backward_s)
        for num_bytes, ready_share in buckets(layers, communication.bucket_bytes)
    ]
    cost, all_there_at_s = _sent(messages, workers, communication)
    exposed_s = np.where(workers > 1, np.clip(all_there_at_s - backward_s, 0.0, cost.total_s), 0.0)
    exposed_share = np.divide(exposed_s, cost.total_s, out=np.zeros_like(compute), where=cost.total_s > 0)
    # A core that copies gradients doesn't compute: hidden transfers delay the step by their time on the core.
    delay_s = cost.host_s * (1 - exposed_share) / communication.cores_per_worker
    exposed_s = exposed_s + delay_s
    busy_s = compute + straggler_s + exposed_s + fixed
    return StepTime(
        compute_s=compute,
        straggler_s=straggler_s,
        exposed_latency_s=cost.latency_s * exposed_share,
        exposed_transfer_s=cost.transfer_s * exposed_share + delay_s,
        hidden_communication_s=cost.total_s - exposed_s,
        optimizer_s=fixed,
        data_wait_s=np.maximum(data - busy_s, 0.0),
    )


def _sent(
    messages: Sequence[tuple[float, Floats]], workers: Floats, communication: Communication
) -> tuple[Cost, Floats]:
    """Return the total cost of messages, given as (bytes, ready after seconds), and when the last one has arrived."""
    total = Cost(*(np.zeros_like(workers) for _ in range(3)))
    link_free_at_s = all_there_at_s = np.zeros_like(workers)
    there_at_s: list[Floats] = []  # arrival of each message
    for num_bytes, ready_at_s in messages:
        num_sent = num_bytes * communication.compression
        cost = all_reduce_cost(num_sent, workers, communication.network, communication.algorithm)
        if len(there_at_s) >= communication.num_at_once:
            ready_at_s = np.maximum(ready_at_s, there_at_s[-communication.num_at_once])
        link_free_at_s = np.maximum(ready_at_s, link_free_at_s) + cost.transfer_s
        there_at_s.append(link_free_at_s + cost.latency_s)
        all_there_at_s = np.maximum(all_there_at_s, there_at_s[-1])
        total = Cost(total.latency_s + cost.latency_s, total.transfer_s + cost.transfer_s, total.host_s + cost.host_s)
    return total, all_there_at_s


def expected_max_of_normals(count: NDArray[Any]) -> Floats:
    """Return the expected maximum of N >= 1 independent standard normals: the integral of x N phi(x) Phi(x)^(N-1).

    David and Nagaraja, "Order Statistics", 3rd edition, 2003, section 3.1; by the trapezoid rule.
    """
    different, where = np.unique(np.asarray(count, np.float64), return_inverse=True)
    x = np.linspace(-10.0, 10.0, 1001)
    log_density = -0.5 * x**2 - 0.5 * np.log(2 * np.pi) + np.log(different)[:, None]
    maxima = np.exp(log_density + (different[:, None] - 1) * log_ndtr(x)) @ x * (x[1] - x[0])
    return np.where(different > 1, maxima, 0.0)[where].reshape(np.shape(count))
