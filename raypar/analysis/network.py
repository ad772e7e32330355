"""A network: links with latency and bandwidth, and nodes that share one.

Alpha is a link's latency and beta the inverse of its bandwidth (Hockney, "The communication challenge for MPP",
Parallel Computing 20(3), 1994): a message of n bytes takes alpha + n x beta.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from raypar.errors import RayparError

Floats: TypeAlias = NDArray[np.float64]

# A message between two machines of one rack, through one switch, by RDMA or well-tuned TCP.
DEFAULT_LATENCY_S = 20e-6
# What TCP carries of a line's bits: 1,448 bytes of each Ethernet frame of 1,500, which takes 1,538 on the line.
PAYLOAD_SHARE = 1448 / 1538
_FACTORS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)"
_BANDWIDTH = re.compile(rf"{_NUMBER}\s*([kKMmGgTt]?)(bits?|bytes?|b|B)(/s|ps)?")
_LATENCY = re.compile(rf"{_NUMBER}\s*(ns|us|µs|μs|ms|s)")
EXAMPLES = "write 100Gbit (a line's rate), 12GB/s (what arrives), or either with a latency: 1Gbit,0.5ms"


@dataclass(frozen=True)
class Network:
    """One link.

    Attributes:
        latency_s: alpha, seconds that the shortest message takes, one way.
        bandwidth_bytes_per_s: 1 / beta, what arrives in a second, each way. May be infinite.
    """

    latency_s: float
    bandwidth_bytes_per_s: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.latency_s) and self.latency_s >= 0):
            raise RayparError(f"a latency of {self.latency_s} s: must be 0 or more", hint=EXAMPLES)
        if not self.bandwidth_bytes_per_s > 0:
            raise RayparError(f"a bandwidth of {self.bandwidth_bytes_per_s} bytes/s: must be greater than 0")

    @property
    def s_per_byte(self) -> float:
        """Beta."""
        return 1 / self.bandwidth_bytes_per_s


@dataclass(frozen=True)
class Topology:
    """Nodes of several workers each: fast links within a node, and one link of each node to the others.

    Attributes:
        workers_per_node: fewer work in the last node where they don't divide the workers.
        within: between two workers of a node.
        between: a node's link to the other nodes, which its workers share.
    """

    workers_per_node: int
    within: Network
    between: Network

    def __post_init__(self) -> None:
        if self.workers_per_node < 1:
            raise RayparError(f"{self.workers_per_node} workers in a node: must be 1 or more")


def parse_network(text: str) -> Network:
    """A link from ``100Gbit``, ``1Gbit,1ms``, ``10GB/s,20us``: bandwidth, then perhaps latency.

    Bits (Gbit, Gb, Gbps) are a line's nominal rate, of which `PAYLOAD_SHARE` arrives; bytes (GB, GB/s, GBps) are what
    arrives. Factors are decimal. Without a latency it is `DEFAULT_LATENCY_S`.

    Raises:
        RayparError: the text says no such thing.
    """
    first, *rest = (part.strip() for part in text.split(","))
    bandwidth = _BANDWIDTH.fullmatch(first)
    if not bandwidth:
        raise RayparError(f"network {text!r}: {first!r} is no bandwidth", hint=EXAMPLES)
    if len(rest) > 1:
        raise RayparError(f"network {text!r}: more than a bandwidth and a latency", hint=EXAMPLES)
    latency_s = DEFAULT_LATENCY_S
    if rest:
        latency = _LATENCY.fullmatch(rest[0])
        if not latency:
            raise RayparError(f"network {text!r}: {rest[0]!r} is no latency", hint="write 20us, 0.5ms or 0.001s")
        latency_s = float(latency[1]) * _SECONDS[latency[2]]
    value, unit = float(bandwidth[1]) * _FACTORS[bandwidth[2].lower()], bandwidth[3]
    if value <= 0:
        raise RayparError(f"network {text!r}: a bandwidth must be greater than 0", hint=EXAMPLES)
    in_bits = unit == "b" or unit.startswith("bit")
    return Network(latency_s, value / 8 * PAYLOAD_SHARE if in_bits else value)
