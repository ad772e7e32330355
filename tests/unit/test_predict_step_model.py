"""The alpha-beta model of an all-reduce and its networks; a step of synchronous SGD, simulated on them."""

from dataclasses import astuple, replace

import numpy as np
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
from raypar.predict.step_model import (
    MIB,
    Communication,
    LayerCost,
    buckets,
    expected_max_of_normals,
    one_layer,
    simulate_steps,
)

LINK = Network(1e-3, 1e6)  # 1 ms, 1 MB/s
FAR = Network(20e-3, 2**20 / 1e-3)
NODES = Topology(4, Network(1e-5, 1e8), LINK)
networks = st.builds(Network, st.floats(0, 1e-2), st.floats(1e5, 1e11))
topologies = st.builds(Topology, st.integers(1, 16), networks, networks)
sizes = st.floats(1, 1e9)
counts = st.integers(1, 5000)
algorithms = st.sampled_from(list(Algorithm))


def all_reduce_s(num_bytes, num_workers, network, algorithm="ring"):
    return float(all_reduce_cost(num_bytes, num_workers, network, algorithm).total_s)


@pytest.mark.parametrize(
    ("algorithm", "num_bytes", "num_workers", "network", "latency_s", "transfer_s"),
    [
        # 6 messages of a quarter each.
        ("ring", 1e6, 4, LINK, 6e-3, 1.5),
        # Each of 6 steps waits for the request and for the answer.
        ("gloo", 4, 4, LINK, 12e-3 - 2e-6, 6e-6),
        # If a segment takes longer than a round trip, only the first of each of two rounds is waited for.
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
def test_costs_follow_the_published_formulas(algorithm, num_bytes, num_workers, network, latency_s, transfer_s):
    cost = all_reduce_cost(num_bytes, num_workers, network, algorithm)
    assert (float(cost.latency_s), float(cost.transfer_s)) == pytest.approx((latency_s, transfer_s))


@given(sizes, counts, topologies, algorithms, st.floats(1, 100))
def test_a_faster_network_is_never_slower_and_one_worker_sends_nothing(
    num_bytes, num_workers, topology, algorithm, factor
):
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
def test_auto_is_the_fastest_of_all(num_bytes, num_workers, network):
    named = [all_reduce_s(num_bytes, num_workers, network, name) for name in ("ring", "tree", "hierarchical")]
    assert all_reduce_s(num_bytes, num_workers, network, Algorithm.AUTO) == pytest.approx(min(named))


@pytest.mark.parametrize(
    ("text", "latency_s", "bytes_per_s"),
    [
        ("100Gbit", DEFAULT_LATENCY_S, 100e9 / 8 * PAYLOAD_SHARE),
        ("25Gbps", DEFAULT_LATENCY_S, 25e9 / 8 * PAYLOAD_SHARE),
        ("100Mb/s, 5 ms", 5e-3, 1e8 / 8 * PAYLOAD_SHARE),
        ("10GB/s,20us", 20e-6, 10e9),
        ("12.5gB,1.5µs", 1.5e-6, 12.5e9),
        ("1Tbits/s,500ns", 500e-9, 1e12 / 8 * PAYLOAD_SHARE),
        (".5Gbyte", DEFAULT_LATENCY_S, 5e8),
    ],
)
def test_a_network_is_written_as_bandwidth_and_latency(text, latency_s, bytes_per_s):
    network = parse_network(text)
    assert (network.latency_s, network.bandwidth_bytes_per_s) == pytest.approx((latency_s, bytes_per_s))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "network '': '' is not a bandwidth"),
        ("100Gbut", "'100Gbut' is not a bandwidth"),
        ("-1Gbit", "'-1Gbit' is not a bandwidth"),
        ("0Gbit", "a bandwidth of 0.0 bytes/s: must be greater than 0"),
        ("1Gbit," + "9" * 400 + "s", "a latency of inf s: must be 0 or more"),
        ("1Gbit,1m", "'1m' is not a latency"),
        ("1Gbit,1ms,2", "expected only a bandwidth and a latency"),
    ],
)
def test_a_malformed_network_is_refused_with_an_example(text, problem):
    with pytest.raises(RayparError) as caught:
        parse_network(text)
    assert problem in caught.value.message and caught.value.hint and "write" in caught.value.hint


@given(networks, st.integers(2, 64))
def test_a_fit_recovers_the_link(network, num_workers):
    samples = [(size, all_reduce_s(size, num_workers, network)) for size in (1e3, 1e5, 1e7, 1e8)]
    fitted = fit_network(samples, num_workers)
    for size, seconds in samples:
        assert all_reduce_s(size, num_workers, fitted) == pytest.approx(seconds, rel=1e-3)


def test_a_fit_has_no_latency_below_zero_and_needs_a_bandwidth():
    fitted = fit_network([(1e6, 0.9), (2e6, 2.0), (4e6, 4.1)], 2)
    assert (fitted.latency_s, fitted.bandwidth_bytes_per_s) == (0, pytest.approx(1e6, rel=0.1))
    with pytest.raises(RayparError, match="can't fit a bandwidth"):
        fit_network([(1e3, 2.0), (1e6, 1.0)], 2)


# ---- a step

# One step computes 1 s: 0.4 s forward, then c, b and a backward in 0.1, 0.2 and 0.3 s.
LAYERS = (LayerCost("a", 100, 0.3, 0.2), LayerCost("b", 0, 0.2, 0.1), LayerCost("c", 300, 0.1, 0.1))
SLOW = Communication(Network(0.01, 1000.0), bucket_bytes=0)  # two workers: 20 ms + bytes / 1000 s

shares = st.floats(0.01, 1)
layer_lists = st.lists(
    st.builds(LayerCost, st.just("layer"), st.integers(1, 10**8), shares, shares), min_size=1, max_size=12
)
communications = st.builds(
    Communication,
    networks | topologies,
    st.sampled_from(("auto", "ring", "gloo", "tree", "hierarchical")),
    st.none() | st.sampled_from((0.0, 1e6, float("inf"))),
    st.booleans(),
    st.floats(0.01, 1),
)
seconds = st.floats(1e-4, 10)


def simulate_step(layers, num_workers, communication, *, compute_s, **more):
    compute, workers = np.array([compute_s]), np.array([num_workers])
    return simulate_steps(layers, workers, communication, compute_s=compute, **more).at(0)


CASES = {
    # c: ready 0.1 s into the backward pass, sent until 0.42; a: ready at its end, 0.6, sent until 0.72.
    "behind the backward pass": (SLOW, 0.12, 0.32),
    "after it": (replace(SLOW, overlap=False), 0.32 + 0.12, 0),
    # c: from 0.1 to 0.7; a: from 0.7 to 0.9, though ready at 0.6.
    "a bucket waits for the one before it": (replace(SLOW, network=Network(0.0, 500.0)), 0.3, 0.5),
    "fused: one latency, and a wait for the last": (replace(SLOW, bucket_bytes=float("inf")), 0.02 + 0.4, 0),
    # c: from 0.1 to 0.27; a: from 0.6 to 0.67.
    "compressed": (replace(SLOW, compression=0.5), 0.07, 0.17),
}


@pytest.mark.parametrize(("how", "exposed_s", "hidden_s"), CASES.values(), ids=CASES)
def test_gradients_are_sent_bucket_by_bucket(how, exposed_s, hidden_s):
    step = simulate_step(LAYERS, 2, how, compute_s=1.0)
    assert (step.exposed_communication_s, step.hidden_communication_s) == pytest.approx((exposed_s, hidden_s))
    assert step.step_time_s == pytest.approx(1 + exposed_s)
    # Only the last of the accumulated micro-batches hides them.
    assert simulate_step(LAYERS, 2, how, compute_s=4.0, accumulation_steps=4).step_time_s == pytest.approx(
        4 + exposed_s
    )


def test_gloo_sends_two_buckets_at_once_during_the_backward_pass():
    # Four gradients of almost no work, 40 ms of messages each among two workers, and 100 ms of bytes.
    layers = tuple(LayerCost(name, 100, 1e-9, 1e-9) for name in "abcd")
    gloo = Communication(Network(0.01, 1000.0), "gloo", bucket_bytes=0)
    waits = replace(gloo, network=Network(0.01, float("inf")))
    # With the second pair the link is idle only for the last messages.
    for how, overlapped_s, after_s in ((waits, 0.08, 0.16), (gloo, 0.4 + 0.04, 0.56)):
        steps = [simulate_step(layers, 2, replace(how, overlap=o), compute_s=1e-9) for o in (True, False)]
        assert [step.step_time_s for step in steps] == pytest.approx([overlapped_s, after_s])


def test_a_step_takes_as_long_as_its_data():
    step = simulate_step(LAYERS, 2, SLOW, compute_s=1.0, optimizer_s=0.08, data_s=3.0)
    assert step.data_wait_s == pytest.approx(3.0 - 1.2)
    assert step.step_time_s == pytest.approx(3.0)
    assert simulate_step(LAYERS, 2, SLOW, compute_s=1.0, data_s=1.0).data_wait_s == 0


def test_buckets_are_filled_as_torch_fills_them_and_a_last_one_takes_the_rest():
    layers = [LayerCost(str(i), 600 * 1024, 0.1, 0.0) for i in range(60)]
    messages = buckets(layers)
    # The layer that brings the first bucket to 1 MiB closes it; the next bucket is closed at 25 MiB.
    assert [size / (600 * 1024) for size, _ in messages] == [2, 43, 15]
    assert [share for _, share in messages] == pytest.approx([0.2, 4.5, 6.0])
    assert len(buckets(layers, 0)) == 60
    assert buckets(layers, 10 * MIB)[0][0] == 18 * 600 * 1024
    assert buckets([LayerCost("two", 600, 0.1, 0.0, num_gradients=2)], 0) == [(300, 0.1), (300, 0.1)]
    assert buckets([LayerCost("no weights", 0, 1.0, 0.5)], 0) == []
    assert buckets([LayerCost("no weights", 0, 1.0, 0.5)]) == []


@given(layer_lists, communications, counts, seconds, st.floats(0, 0.3))
def test_hidden_and_exposed_communication_add_up(layers, how, num_workers, compute_s, variation):
    step = simulate_step(layers, num_workers, how, compute_s=compute_s, variation=variation)
    sent = [
        float(all_reduce_cost(size * how.compression, num_workers, how.network, how.algorithm).total_s)
        for size, _ in buckets(layers, how.bucket_bytes)
    ]
    assert step.exposed_communication_s + step.hidden_communication_s == pytest.approx(sum(sent), abs=1e-12)
    assert min(step.exposed_latency_s, step.exposed_transfer_s, step.hidden_communication_s) >= -1e-12
    if not how.overlap:
        assert step.hidden_communication_s == pytest.approx(0, abs=1e-12)


@given(layer_lists, communications, counts, seconds, st.floats(1, 50))
def test_overlap_bandwidth_and_compression_never_slow_a_step(layers, how, num_workers, compute_s, factor):
    def step_s(how):
        return simulate_step(layers, num_workers, how, compute_s=compute_s).step_time_s

    first = how.network if isinstance(how.network, Network) else how.network.between
    faster = Network(first.latency_s, first.bandwidth_bytes_per_s * factor)
    network = faster if isinstance(how.network, Network) else replace(how.network, between=faster)
    limit = step_s(how) * (1 + 1e-9)
    assert step_s(replace(how, network=network)) <= limit
    assert step_s(replace(how, overlap=True)) <= limit
    assert step_s(replace(how, compression=how.compression / factor)) <= limit


def test_the_expected_maximum_matches_published_tables():
    # Harter, "Expected values of normal order statistics", Biometrika 48, 1961.
    maxima = expected_max_of_normals(np.array([[1, 2, 3], [5, 10, 100]]))
    assert simulate_step(LAYERS, 3, SLOW, compute_s=1.0, variation=0.1).straggler_s == pytest.approx(0.084628, rel=1e-4)
    assert maxima.ravel().tolist() == pytest.approx([0, 0.56419, 0.84628, 1.16296, 1.53875, 2.50759], abs=1e-5)


@given(communications)
def test_worker_counts_can_be_simulated_together(how):
    workers = np.array([1, 2, 3, 64])
    times = simulate_steps(LAYERS, workers, how, compute_s=1 / workers, variation=0.05, data_s=0.3)
    for i, n in enumerate(workers):
        alone = simulate_step(LAYERS, int(n), how, compute_s=1 / int(n), variation=0.05, data_s=0.3)
        assert astuple(times.at(i)) == pytest.approx(astuple(alone))
        assert times.step_time_s[i] == pytest.approx(alone.step_time_s)


def test_a_network_of_known_size_sends_everything_at_the_end():
    step = simulate_step(one_layer(400), 2, replace(SLOW, bucket_bytes=None), compute_s=1.0)
    assert (step.hidden_communication_s, step.exposed_communication_s) == pytest.approx((0, 0.42))


def test_cores_that_copy_hidden_gradients_delay_the_step_by_that_time():
    """By hand: 1e8 bytes between two workers cost each core 0.09 s, also if the network hides behind computing."""
    link, layers = Network(0.0, 1e8), [LayerCost(f"layer {i}", 10**7, 0.09, 0.01) for i in range(10)]

    def step(algorithm, **how):
        communication = Communication(link, algorithm, bucket_bytes=0, **how)
        return simulate_steps(layers, np.array(2), communication, compute_s=np.array(20.0))

    hidden = 0.9  # of ten messages, all but the last, which is sent when computing has ended
    by_ring, by_gloo, on_two = step("ring"), step("gloo"), step("gloo", cores_per_worker=2)
    assert float(by_ring.step_time_s) == pytest.approx(20.1)
    assert float(by_gloo.step_time_s) == pytest.approx(20.1 + hidden * 0.09)
    assert float(on_two.step_time_s) == pytest.approx(20.1 + hidden * 0.09 / 2)
    assert float(by_gloo.exposed_communication_s + by_gloo.hidden_communication_s) == pytest.approx(
        float(by_ring.exposed_communication_s + by_ring.hidden_communication_s)
    )
