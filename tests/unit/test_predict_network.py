"""The alpha-beta model of an all-reduce, how a network is written, and how one is fitted to measurements."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypar.errors import RayparError
from raypar.predict.network import (
    DEFAULT_LATENCY_S,
    PAYLOAD_SHARE,
    Algorithm,
    Network,
    Topology,
    all_reduce_cost,
    fit_network,
    parse_network,
)

LINK = Network(1e-3, 1e6)  # 1 ms, 1 MB/s
FAR = Network(20e-3, 2**20 / 1e-3)
NODES = Topology(4, Network(1e-5, 1e8), LINK)
networks = st.builds(Network, st.floats(0, 1e-2), st.floats(1e5, 1e11))
topologies = st.builds(Topology, st.integers(1, 16), networks, networks)
sizes = st.floats(1, 1e9)
counts = st.integers(2, 5000)
algorithms = st.sampled_from(list(Algorithm))


def all_reduce_s(
    num_bytes: float, num_workers: int, network: Network | Topology, algorithm: Algorithm | str = "ring"
) -> float:
    return float(all_reduce_cost(num_bytes, num_workers, network, algorithm).total_s)


@pytest.mark.parametrize(
    ("algorithm", "num_bytes", "num_workers", "network", "latency_s", "transfer_s"),
    [
        # 6 messages of a quarter each.
        ("ring", 1e6, 4, LINK, 6e-3, 1.5),
        # Each of 6 steps waits for the request and for the answer.
        ("gloo", 4, 4, LINK, 12e-3 - 2e-6, 6e-6),
        # Where a segment takes longer than a round trip, only the first of each of two rounds is waited for.
        ("gloo", 1e6, 4, LINK, 4e-3, 1.5),
        # 8 segments of 1 MiB, 1 ms each, to reduce, 8 to gather. Two of them every 2 x 20 + 1 ms, but the last two,
        # which follow each other.
        ("gloo", 16 * 2**20, 2, FAR, 2 * (4 * 41e-3 + 1e-3) - 16e-3, 16e-3),
        ("ring", 16 * 2**20, 2, FAR, 2 * 20e-3, 2 * 8e-3),
        # A tree of height 3, up and down.
        ("tree", 1e6, 5, LINK, 2 * 3 * 1e-3, 2.0),
        # 2 nodes of 4: within 6 messages of a quarter, between them two of half.
        ("hierarchical", 1e6, 8, NODES, 6e-5 + 2e-3, 0.015 + 1.0),
        # Between 64 nodes a tree is faster than a ring.
        ("hierarchical", 100, 4 * 64, NODES, 6e-5 + 2 * 6 * 1e-3, 1.5e-6 + 2e-4),
        # A flat ring over nodes goes at the pace of the slowest link; within one node that is the node's.
        ("ring", 1e6, 8, NODES, 14e-3, 1.75),
        ("ring", 1e6, 4, NODES, 6e-5, 0.015),
        # 4 nodes of 4: 3 hops in the node, 2 between nodes, each way; a node alone has a tree.
        ("tree", 1e6, 16, NODES, 2 * (3e-5 + 2e-3), 2.0),
        ("tree", 1e6, 4, NODES, 4e-5, 0.02),
    ],
)
def test_costs_are_those_of_the_published_formulas(
    algorithm: str, num_bytes: float, num_workers: int, network: Network | Topology, latency_s: float, transfer_s: float
) -> None:
    cost = all_reduce_cost(num_bytes, num_workers, network, algorithm)
    assert (float(cost.latency_s), float(cost.transfer_s)) == pytest.approx((latency_s, transfer_s))


@given(sizes, counts, topologies, algorithms, st.floats(1, 100))
def test_a_faster_network_is_never_slower_and_one_worker_sends_nothing(
    num_bytes: float, num_workers: int, topology: Topology, algorithm: Algorithm, factor: float
) -> None:
    assert all_reduce_s(num_bytes, 1, topology, algorithm) == 0
    between = topology.between
    for faster in (
        Network(between.latency_s, between.bandwidth_bytes_per_s * factor),
        Network(between.latency_s / factor, between.bandwidth_bytes_per_s),
    ):
        better = Topology(topology.workers_per_node, topology.within, faster)
        slow, fast = (all_reduce_s(num_bytes, num_workers, net, algorithm) for net in (topology, better))
        assert fast <= slow * (1 + 1e-12)


@given(sizes, counts, networks | topologies)
def test_auto_is_the_fastest_of_all(num_bytes: float, num_workers: int, network: Network | Topology) -> None:
    named = [all_reduce_s(num_bytes, num_workers, network, name) for name in ("ring", "tree", "hierarchical")]
    assert all_reduce_s(num_bytes, num_workers, network, Algorithm.AUTO) == pytest.approx(min(named))


@pytest.mark.parametrize(
    ("text", "latency_s", "bytes_per_s"),
    [
        ("100Gbit", DEFAULT_LATENCY_S, 100e9 / 8 * PAYLOAD_SHARE),
        ("100 Gbit/s", DEFAULT_LATENCY_S, 100e9 / 8 * PAYLOAD_SHARE),
        ("25Gbps", DEFAULT_LATENCY_S, 25e9 / 8 * PAYLOAD_SHARE),
        ("1Gbit,1ms", 1e-3, 1e9 / 8 * PAYLOAD_SHARE),
        ("100Mb/s, 5 ms", 5e-3, 1e8 / 8 * PAYLOAD_SHARE),
        ("10GB/s,20us", 20e-6, 10e9),
        ("12.5gB,1.5µs", 1.5e-6, 12.5e9),
        ("1Tbits/s,500ns", 500e-9, 1e12 / 8 * PAYLOAD_SHARE),
        ("800kBps,0s", 0.0, 8e5),
        (".5Gbyte", DEFAULT_LATENCY_S, 5e8),
    ],
)
def test_a_network_is_written_as_bandwidth_and_latency(text: str, latency_s: float, bytes_per_s: float) -> None:
    network = parse_network(text)
    assert (network.latency_s, network.bandwidth_bytes_per_s) == pytest.approx((latency_s, bytes_per_s))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "network '': '' is no bandwidth"),
        ("100", "network '100': '100' is no bandwidth"),
        ("100Gbut", "'100Gbut' is no bandwidth"),
        ("-1Gbit", "'-1Gbit' is no bandwidth"),
        ("0Gbit", "a bandwidth of 0.0 bytes/s: must be greater than 0"),
        ("1Gbit," + "9" * 400 + "s", "a latency of inf s: must be 0 or more"),
        ("1Gbit,1", "'1' is no latency"),
        ("1Gbit,1m", "'1m' is no latency"),
        ("1Gbit,1ms,2", "more than a bandwidth and a latency"),
    ],
)
def test_a_malformed_network_is_refused_with_an_example(text: str, problem: str) -> None:
    with pytest.raises(RayparError) as caught:
        parse_network(text)
    assert problem in caught.value.message and caught.value.hint and "write" in caught.value.hint


@given(networks, st.integers(2, 64))
def test_a_fit_gives_the_link_that_made_the_times(network: Network, num_workers: int) -> None:
    samples = [(size, all_reduce_s(size, num_workers, network)) for size in (1e3, 1e5, 1e7, 1e8)]
    fitted = fit_network(samples, num_workers)
    for size, seconds in samples:
        assert all_reduce_s(size, num_workers, fitted) == pytest.approx(seconds, rel=1e-3)


def test_a_fit_has_no_latency_below_zero_and_needs_a_bandwidth() -> None:
    fitted = fit_network([(1e6, 0.9), (2e6, 2.0), (4e6, 4.1)], 2)
    assert (fitted.latency_s, fitted.bandwidth_bytes_per_s) == (0, pytest.approx(1e6, rel=0.1))
    with pytest.raises(RayparError, match="no bandwidth shows"):
        fit_network([(1e3, 2.0), (1e6, 1.0)], 2)
