"""Networks: links with latency and bandwidth, and the cost of an all-reduce on them.

Alpha is a link's latency and beta the inverse of its bandwidth: a message of n bytes takes alpha + n x beta (Hockney
1994). Links work in both directions at once, and none slows another. A measured beta includes the time to add two
gradients, a given one doesn't.

- Hockney, "The communication challenge for MPP", Parallel Computing 20(3), 1994
- Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA 19(1), 2005
- Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69(2), 2009
- Sanders, Speck and Traff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel Computing
  35(12), 2009
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares, nnls

from raypar.errors import RayparError

Floats: TypeAlias = NDArray[np.float64]

# A message between two machines of a rack through one switch, by RDMA or well-tuned TCP.
DEFAULT_LATENCY_S = 20e-6
# Share of a line's bits that TCP delivers: 1,448 bytes of an Ethernet frame of 1,500, which takes 1,538 on the line.
PAYLOAD_SHARE = 1448 / 1538
_FACTORS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)"
_BANDWIDTH = re.compile(rf"{_NUMBER}\s*([kKMmGgTt]?)(bits?|bytes?|b|B)(/s|ps)?")
_LATENCY = re.compile(rf"{_NUMBER}\s*(ns|us|µs|μs|ms|s)")
EXAMPLES = "write 100Gbit (a line's rate), 12GB/s (what arrives), or either with a latency: 1Gbit,0.5ms"


@dataclass(frozen=True)
class Network:
    """Link between two workers or nodes.

    Attributes:
        latency_s: alpha, one way.
        bandwidth_bytes_per_s: 1 / beta, delivered in each direction; may be infinite.
    """

    latency_s: float
    bandwidth_bytes_per_s: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.latency_s) and self.latency_s >= 0):
            raise RayparError(f"a latency of {self.latency_s} s: must be 0 or more", hint=EXAMPLES)
        if not self.bandwidth_bytes_per_s > 0:
            problem = f"a bandwidth of {self.bandwidth_bytes_per_s} bytes/s: must be greater than 0"
            raise RayparError(problem, hint=EXAMPLES)


@dataclass(frozen=True)
class Topology:
    """Nodes with several workers each: fast links within a node, and one link of each node to the others.

    Attributes:
        workers_per_node: workers of a node; the last node may have fewer.
        within: link between two workers of a node.
        between: a node's link to the other nodes, which its workers share.
    """

    workers_per_node: int
    within: Network
    between: Network


def parse_network(text: str) -> Network:
    """Parse a link's bandwidth and optional latency: ``100Gbit``, ``1Gbit,1ms``, ``10GB/s,20us``.

    Bits (Gbit, Gb, Gbps) are a line's nominal rate, of which `PAYLOAD_SHARE` is delivered. Bytes (GB, GB/s, GBps) are
    the delivered rate. Factors are decimal. The default latency is `DEFAULT_LATENCY_S`.

    Raises:
        RayparError: the bandwidth or the latency can't be parsed.
    """
    first, *rest = (part.strip() for part in text.split(","))
    bandwidth = _BANDWIDTH.fullmatch(first)
    if not bandwidth:
        raise RayparError(f"network {text!r}: {first!r} is not a bandwidth", hint=EXAMPLES)
    if len(rest) > 1:
        raise RayparError(f"network {text!r}: expected only a bandwidth and a latency", hint=EXAMPLES)
    latency_s = DEFAULT_LATENCY_S
    if rest:
        latency = _LATENCY.fullmatch(rest[0])
        if not latency:
            raise RayparError(f"network {text!r}: {rest[0]!r} is not a latency", hint="write 20us, 0.5ms or 0.001s")
        latency_s = float(latency[1]) * _SECONDS[latency[2]]
    value, unit = float(bandwidth[1]) * _FACTORS[bandwidth[2].lower()], bandwidth[3]
    in_bits = unit == "b" or unit.startswith("bit")
    return Network(latency_s, value / 8 * PAYLOAD_SHARE if in_bits else value)


# Largest segment that gloo sends (`maxSegmentSize` in gloo/allreduce.h); it has two in flight.
GLOO_SEGMENT_BYTES = 2**20


class Algorithm(StrEnum):
    """Algorithm of the all-reduce: "auto" is the fastest of ring, tree and hierarchical, "gloo" is torch's on CPUs."""

    AUTO = "auto"
    RING = "ring"
    GLOO = "gloo"
    TREE = "tree"
    HIERARCHICAL = "hierarchical"


# Seconds of a core, by gloo over TCP, for each byte that a worker sends: to copy it there and back, and to add it up.
# 0.6 to 1.3 ns between namespaces of an x86 machine (2 and 4 workers, messages of 4 to 32 MiB).
GLOO_HOST_S_PER_BYTE = 0.9e-9


@dataclass(frozen=True)
class Cost:
    """Seconds of all-reduces for latencies and for bytes, in the broadcast shape of bytes and workers.

    Attributes:
        host_s: time of a worker's core during the transfer, which its computing lacks; 0 on GPUs.
    """

    latency_s: Floats
    transfer_s: Floats
    host_s: Floats

    @property
    def total_s(self) -> Floats:
        return self.latency_s + self.transfer_s


def all_reduce_cost(
    num_bytes: float | Floats,
    num_workers: int | NDArray[Any],
    network: Network | Topology,
    algorithm: Algorithm | str = Algorithm.RING,
) -> Cost:
    """Return the cost of an all-reduce of n bytes among N workers; one worker sends nothing.

    - ring: reduce-scatter, then all-gather, of N parts in N - 1 steps each (Patarasuk and Yuan 2009; NCCL for large
      messages): 2 (N - 1) alpha + 2 (N - 1) / N n beta. Over nodes, each step waits for the slowest link.
    - gloo: a ring whose messages have segments of up to 1 MiB, at least two for each part. A segment is sent once the
      receiver has asked for it, which it does after receiving the last but one. So two segments of s bytes can't follow
      two others in less than 2 alpha + s beta. With k segments per part:
      2 (2 alpha + ((N - 1) k / 2 - 1) max(0, 2 alpha - s beta)) + 2 (N - 1) / N n beta
      (from gloo's source, allreduce.cc and transport/tcp/pair.cc). The workers' cores copy and add what is sent.
    - tree: up to a root and down again in pieces, over two trees that share the work (Sanders et al. 2009; NCCL for
      small messages among many workers): 2 ceil(log2 N) alpha + 2 n beta. Over M nodes of K workers, a chain in each
      node and trees between them: 2 (K - 1) alpha_within + 2 ceil(log2 M) alpha_between + 2 n max(beta).
    - hierarchical: reduce-scatter in the node, an all-reduce of each part between the nodes by ring or tree, whichever
      is faster, and all-gather in the node (Thakur et al. 2005; Goyal et al. 2017, https://arxiv.org/abs/1706.02677):
      2 (K - 1) alpha_within + 2 (K - 1) / K n beta_within, plus ring or tree for M nodes and n bytes, since the K
      workers of a node share its link.

    Args:
        num_bytes: bytes of a worker's gradients.
        num_workers: broadcast with the bytes.
        network: one kind of link between all workers, or nodes.
    """
    topology = network if isinstance(network, Topology) else _flat(network)
    n, workers = np.broadcast_arrays(np.asarray(num_bytes, np.float64), np.asarray(num_workers, np.float64))
    cost = _COSTS[Algorithm(algorithm)](n, workers, topology)
    alone = (workers <= 1) | (n <= 0)
    return Cost(*(np.where(alone, 0.0, part) for part in (cost.latency_s, cost.transfer_s, cost.host_s)))


def fit_network(
    samples: Sequence[tuple[float, float]], num_workers: int, algorithm: Algorithm | str = Algorithm.RING
) -> Network:
    """Fit a link to measured all-reduces, by least squares of the relative errors.

    Errors are weighted by the root of the size: gradients are large messages, and on links that let bursts pass, middle
    ones are faster than the link sustains.

    Args:
        samples: (bytes, seconds) of all-reduces, greater than 0, with at least two different sizes.
        num_workers: workers of the all-reduces, at least 2.

    Raises:
        RayparError: time doesn't grow with size.
    """
    sizes, times_s = np.array(samples, dtype=np.float64).T
    # A ring's cost is linear in alpha and beta; a link of 1 s and 1 byte/s gives their coefficients.
    coefficients = all_reduce_cost(sizes, num_workers, Network(1.0, 1.0))
    # Scale bytes by the largest message, so that both columns have similar size.
    unit = float(np.max(sizes))
    columns = np.stack([coefficients.latency_s, coefficients.transfer_s / unit], axis=1)
    weights = np.sqrt(sizes / unit)
    (latency_s, s_per_unit), _ = nnls(columns * (weights / times_s)[:, None], weights)
    if s_per_unit <= 0:
        raise RayparError(
            "all-reduces of more bytes take no longer: can't fit a bandwidth", hint="measure larger messages"
        )
    by_ring = np.array([latency_s, s_per_unit])
    if algorithm == Algorithm.RING:
        return _link_of(by_ring, unit)

    def errors(parameters: Floats) -> Floats:
        cost = all_reduce_cost(sizes, num_workers, _link_of(parameters, unit), algorithm)
        return np.asarray(weights * (cost.total_s / times_s - 1))

    # Waits of gloo's segments make the cost piecewise linear: start from several shares of the ring's latency.
    scale = np.maximum(by_ring, 1e-12)
    fits = [least_squares(errors, by_ring * [share, 1.0], bounds=(0, np.inf), x_scale=scale) for share in (1, 0.5, 0.1)]
    return _link_of(min(fits, key=lambda fit: float(fit.cost)).x, unit)


def _link_of(parameters: Floats, unit: float) -> Network:
    """Return the link with this alpha, and beta for `unit` bytes."""
    latency_s, s_per_unit = map(float, parameters)
    return Network(latency_s, unit / s_per_unit if s_per_unit > 0 else math.inf)


def _flat(network: Network) -> Topology:
    return Topology(1, network, network)


def _ring(n: Floats, workers: Floats, topology: Topology) -> Cost:
    latency_s, s_per_byte = _slowest(workers, topology)
    steps = 2 * (workers - 1)
    return Cost(steps * latency_s, steps / workers * n * s_per_byte, np.zeros_like(n))


def _gloo(n: Floats, workers: Floats, topology: Topology) -> Cost:
    latency_s, s_per_byte = _slowest(workers, topology)
    part = n / workers
    num_segments = np.maximum(2, np.ceil(part / GLOO_SEGMENT_BYTES))
    pairs = (workers - 1) * num_segments / 2  # in sequence, first to reduce, then to gather
    stall_s = np.maximum(0.0, 2 * latency_s - part / num_segments * s_per_byte)
    waited_s = 2 * (2 * latency_s + (pairs - 1) * stall_s)
    num_sent = 2 * (workers - 1) / workers * n
    return Cost(waited_s, num_sent * s_per_byte, np.minimum(s_per_byte, GLOO_HOST_S_PER_BYTE) * num_sent)


def _tree(n: Floats, workers: Floats, topology: Topology) -> Cost:
    local, nodes = _nodes(workers, topology)
    # A single node has a tree, as a chain would take longer.
    chain = np.where(nodes > 1, local - 1, _height(local)) * topology.within.latency_s
    latency_s = 2 * (chain + _height(nodes) * topology.between.latency_s)
    return Cost(latency_s, 2 * n * _slowest(workers, topology)[1], np.zeros_like(n))


def _hierarchical(n: Floats, workers: Floats, topology: Topology) -> Cost:
    local, nodes = _nodes(workers, topology)
    inside = _ring(n, local, _flat(topology.within))
    across = _fastest(*(cost_of(n, nodes, _flat(topology.between)) for cost_of in (_ring, _tree)))
    return Cost(inside.latency_s + across.latency_s, inside.transfer_s + across.transfer_s, inside.host_s)


def _height(workers: Floats) -> Floats:
    return np.ceil(np.log2(np.maximum(workers, 1)))


def _nodes(workers: Floats, topology: Topology) -> tuple[Floats, Floats]:
    """Return the workers of a full node, and the number of nodes."""
    return np.minimum(workers, topology.workers_per_node), np.ceil(workers / topology.workers_per_node)


def _slowest(workers: Floats, topology: Topology) -> tuple[Floats, Floats]:
    """Return the larger alpha and the larger beta of the kinds of links in use."""
    local, nodes = _nodes(workers, topology)
    links = ((local > 1, topology.within), (nodes > 1, topology.between))
    latency_s = np.maximum(*(used * link.latency_s for used, link in links))
    return latency_s, np.maximum(*(used / link.bandwidth_bytes_per_s for used, link in links))


def _fastest(*costs: Cost) -> Cost:
    which = np.argmin([cost.total_s for cost in costs], axis=0)
    parts = ("latency_s", "transfer_s", "host_s")
    return Cost(*(np.choose(which, [getattr(cost, part) for cost in costs]) for part in parts))


_COSTS: Mapping[Algorithm, Callable[[Floats, Floats, Topology], Cost]] = {
    Algorithm.AUTO: lambda *given: _fastest(_ring(*given), _tree(*given), _hierarchical(*given)),
    Algorithm.RING: _ring,
    Algorithm.GLOO: _gloo,
    Algorithm.TREE: _tree,
    Algorithm.HIERARCHICAL: _hierarchical,
}
