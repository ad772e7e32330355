"""All-reduces timed between the ranks of a gang: a study of one train loop, and the links that its results show.

`raypar model network` runs the study. Its trials are ordinary ones, so the ranks use the transport of training (gloo or
NCCL), on one machine or on the nodes of a cluster.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raypar.predict.network import Algorithm, Network, all_reduce_cost, fit_network
from raypar.study.study import Study
from raypar.study.trial import TrialResult, latest
from raypar.study.workload import Workload, whole_number

if TYPE_CHECKING:
    import torch

# From pure latency to several buckets of gradients.
SIZES_BYTES = (4, 2**10, 2**13, 2**16, 2**18, 2**20, 2**22, 2**24, 2**26)
NUM_WARMUPS, NUM_REPEATS = 2, 9
MIN_REPEATS, SIZE_BUDGET_S = 2, 2.0  # on slow links, large messages are repeated less often
FLOAT_BYTES = 4
MIB = 2**20


def measure(config: Mapping[str, Any]) -> None:
    """Report the median seconds of an all-reduce for each size; of each repeat, the slowest rank counts."""
    import ray.train.torch
    import torch
    import torch.distributed as dist

    device, num_workers = ray.train.torch.get_device(), dist.get_world_size()

    def slowest(times_s: Sequence[float]) -> list[float]:
        of_all = torch.tensor(times_s, dtype=torch.float64, device=device)
        dist.all_reduce(of_all, dist.ReduceOp.MAX)
        return list(map(float, of_all.tolist()))

    for size in SIZES_BYTES:
        if size > config["max_mib"] * MIB:
            break
        values = torch.ones(size // FLOAT_BYTES, device=device)
        *_, last_s = slowest([_all_reduce_s(values) for _ in range(NUM_WARMUPS)])
        num_repeats = max(MIN_REPEATS, min(NUM_REPEATS, int(SIZE_BUDGET_S / last_s)))
        time_s = statistics.median(slowest([_all_reduce_s(values) for _ in range(num_repeats)]))
        bus = bus_bytes(size, num_workers) / time_s
        ray.train.report({"num_bytes": size, "time_s": time_s, "bus_bytes_per_s": bus})


def _all_reduce_s(values: torch.Tensor) -> float:
    """Return the seconds of an all-reduce after a barrier."""
    import torch.distributed as dist

    from raypar.parallel.strategy import wait_for_device

    values.fill_(1.0)  # sums of sums would grow beyond all bounds
    wait_for_device(values.device)
    dist.barrier()
    start_s = time.perf_counter()
    dist.all_reduce(values)
    wait_for_device(values.device)
    return time.perf_counter() - start_s


def bus_bytes(num_bytes: float, num_workers: int) -> float:
    """Return the bytes that each rank sends in a ring: divided by the time, they compare with a link's bandwidth.

    The "bus bandwidth" of https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md.
    """
    return 2 * (num_workers - 1) / num_workers * num_bytes


workload = Workload.from_train_loop(
    measure,
    name="all_reduces",
    preload=("ray.train.torch",),
    options={"max_mib": whole_number(64, "largest message, MiB")},
    metric="bus_bytes_per_s",
    mode="max",
    description="all-reduces of several sizes between the workers",
)
network = Study(
    workload=workload,
    config={"num_workers": 2, "nodes": 1},
    name="network",
    num_repeats=3,
    description="How long do all-reduces take within a node and between nodes?",
)


@dataclass(frozen=True)
class MessageTime:
    """Time of an all-reduce of one size: median and extremes of the trials' medians.

    Attributes:
        algorithm_bytes_per_s: bytes of the message by its time.
        bus_bytes_per_s: bytes that each worker sends in a ring, by the time; at most a link's bandwidth.
    """

    num_bytes: int
    time_s: float
    least_s: float
    most_s: float
    algorithm_bytes_per_s: float
    bus_bytes_per_s: float


@dataclass(frozen=True)
class MeasuredLink:
    """All-reduces between the workers of one node, or of several.

    Attributes:
        nodes: host names.
        device: "cpu" or "cuda".
        device_names, cpu_models: the workers' hardware.
        transport: what carried the messages, see `raypar.train.transport`; empty: unknown.
        measured_at: Unix time at which the last trial started.
        algorithm: all-reduce of the fit: gloo's on CPUs, else a ring.
        network: fitted link.
    """

    num_workers: int
    nodes: tuple[str, ...]
    device: str
    device_names: tuple[str, ...]
    cpu_models: tuple[str, ...]
    transport: str
    measured_at: float
    messages: tuple[MessageTime, ...]
    algorithm: Algorithm
    network: Network

    @property
    def num_nodes(self) -> int:
        return len(self.nodes)

    def time_s(self, num_bytes: float) -> float:
        """Return the time of an all-reduce on the fitted link."""
        return float(all_reduce_cost(num_bytes, self.num_workers, self.network, self.algorithm).total_s)

    def is_of(self, results: Sequence[TrialResult]) -> bool:
        """Return whether trials ran on its kind of hardware, and on one of its nodes at least."""
        conditions = [result.conditions for result in results]
        return (
            bool(set(self.nodes) & {node for each in conditions for node in each.names("node")})
            and {self.device} == {str(result.spec.config["device"]) for result in results}
            and set(self.device_names) == {name for each in conditions for name in each.names("device_name")}
            and set(self.cpu_models) == {name for each in conditions for name in each.names("cpu_model")}
        )


def measured_links(results: Sequence[TrialResult]) -> tuple[MeasuredLink, ...]:
    """Return the links that the study's results show, the latest first.

    Raises:
        RayparError: time doesn't grow with size.
    """
    gangs: dict[tuple[object, ...], list[TrialResult]] = {}
    for result in latest(results):
        if result.is_measured and result.reports and "num_bytes" in result.final:
            names = result.conditions.names
            hardware = names("node"), names("device_name"), names("cpu_model")
            gangs.setdefault((result.spec.point_identity, *hardware), []).append(result)
    links = map(_link, gangs.values())
    return tuple(sorted(links, key=lambda link: -link.measured_at))


@dataclass(frozen=True)
class StoredLinks:
    """Latest measured links on the machines of a study; at least one of them.

    Attributes:
        within: between workers of one node.
        between: between nodes.
    """

    within: MeasuredLink | None
    between: MeasuredLink | None

    @classmethod
    def of(cls, network_results: Sequence[TrialResult], results: Sequence[TrialResult]) -> StoredLinks | None:
        """Return the links that the results of the study `network` show, for a study's results; None: there are none.

        Links of other hardware or other nodes don't count.
        """
        links = [link for link in measured_links(network_results) if link.is_of(results)]
        within = next((link for link in links if link.num_nodes == 1), None)
        between = next((link for link in links if link.num_nodes > 1), None)
        return cls(within, between) if links else None

    @property
    def across(self) -> MeasuredLink:
        """The link between nodes, or else within one."""
        link = self.between or self.within
        assert link is not None
        return link

    @property
    def origin(self) -> str:
        """Place and time of the measurement of `across`, for people."""
        link = self.across
        at = time.strftime("%Y-%m-%d %H:%M", time.localtime(link.measured_at))
        between = (
            f"{link.num_nodes} nodes" if link is self.between else f"{link.num_workers} workers of {link.nodes[0]}"
        )
        return f"measured between {between} at {at} (`raypar model network` measures it again)"


def _link(results: Sequence[TrialResult]) -> MeasuredLink:
    """Return the link between the workers of trials that differ only in their repeat."""
    last = max(results, key=lambda result: result.started_at)
    placement, names = last.spec.placement, last.conditions.names
    num_workers, on_cpu = placement.num_workers, placement.device == "cpu"
    times_s: dict[int, list[float]] = {}
    for result in results:
        for report in result.reports:
            times_s.setdefault(int(report["num_bytes"]), []).append(report["time_s"])
    algorithm = Algorithm.GLOO if on_cpu else Algorithm.RING
    messages = tuple(_message(size, times, num_workers) for size, times in sorted(times_s.items()))
    samples = [(float(message.num_bytes), message.time_s) for message in messages]
    return MeasuredLink(
        num_workers=num_workers,
        nodes=names("node"),
        device=placement.device,
        device_names=names("device_name"),
        cpu_models=names("cpu_model"),
        transport="; ".join(dict.fromkeys(last.conditions.of_ranks("transport"))),
        measured_at=last.started_at,
        messages=messages,
        algorithm=algorithm,
        network=fit_network(samples, num_workers, algorithm),
    )


def _message(size: int, times_s: Sequence[float], num_workers: int) -> MessageTime:
    time_s = statistics.median(times_s)
    bus = bus_bytes(size, num_workers)
    return MessageTime(size, time_s, min(times_s), max(times_s), size / time_s, bus / time_s)
