"""``raypar model network``: links from results, when a second node pays, and the stored links that `predict` uses."""

import io
from dataclasses import replace

import numpy as np
import pytest
from command import joined, raypar, refused
from recording import recorded
from results import stored_conditions
from test_cli_predicting import trial

from raypar.analysis.question import Question
from raypar.predict.all_reduces import SIZES_BYTES, StoredLinks, measured_links, network
from raypar.predict.calibration import ObservedPoint, calibrate
from raypar.predict.network import Algorithm, Network, Topology, all_reduce_cost
from raypar.predict.second_node import FP32_BYTES, Nodes, SecondNode, StudyNodes, equal_layers
from raypar.predict.step_model import Communication, one_layer, simulate_steps
from raypar.reporting.network import NUM_PARAMETERS, NetworkView, plot_of, print_network
from raypar.reporting.text import TerminalConsole
from raypar.study.space import grid
from raypar.study.trial import TrialResult, TrialState
from raypar.train.transport import nccl_transport, transport_of

INSIDE, ACROSS = Network(50e-6, 1e9), Network(1e-3, 117e6)
CPU = {"device_name": ["cpu"] * 2, "cpu_model": ["fast"] * 2, "transport": ["gloo, TCP sockets on eth0"] * 2}


def measured(link, num_nodes, *, factor=1.0, repeat=0, at_s=1.0, nodes=("node1", "node2"), **conditions):
    """Return a trial whose all-reduces take as long as gloo's on a link, times a factor."""
    study = replace(network, config={"num_workers": 2, "device": "cpu"}, space={"nodes": grid(1, 2)})
    times_s = all_reduce_cost(np.array(SIZES_BYTES, float), 2, link, "gloo").total_s * factor
    reports = [{"num_bytes": float(n), "time_s": t} for n, t in zip(SIZES_BYTES, times_s.tolist(), strict=True)]
    where = [nodes[0], nodes[num_nodes - 1]]
    return TrialResult(
        study.trial({"nodes": num_nodes}, repeat),
        TrialState.FINISHED,
        started_at=at_s,
        wall_s=5.0,
        reports=tuple(reports),
        conditions=stored_conditions({**CPU, "node": where, **conditions}),
    )


def both(**changes):
    factors = enumerate((0.9, 1.0, 1.3))
    return [
        measured(link, nodes, factor=factor, repeat=i, **changes)
        for i, factor in factors
        for link, nodes in ((INSIDE, 1), (ACROSS, 2))
    ]


def by_nodes(results):
    return {link.num_nodes: link for link in measured_links(results)}


def test_the_links_of_both_gangs_are_recovered_from_their_all_reduces():
    links = by_nodes(both())
    for nodes, link in ((1, INSIDE), (2, ACROSS)):
        fitted = links[nodes].network
        assert fitted.bandwidth_bytes_per_s == pytest.approx(link.bandwidth_bytes_per_s, rel=0.02)
        assert fitted.latency_s == pytest.approx(link.latency_s, rel=0.1)
        large = links[nodes].messages[-1]
        exact_s = float(all_reduce_cost(SIZES_BYTES[-1], 2, link, "gloo").total_s)
        assert (large.least_s, large.time_s, large.most_s) == pytest.approx((0.9 * exact_s, exact_s, 1.3 * exact_s))
        # Two workers send each byte once: bus and algorithm bandwidth agree.
        assert large.bus_bytes_per_s == large.algorithm_bytes_per_s == pytest.approx(SIZES_BYTES[-1] / exact_s)
    assert links[1].nodes == ("node1",) and links[2].nodes == ("node1", "node2")
    assert links[2].transport == "gloo, TCP sockets on eth0"


def test_a_measurement_of_other_hardware_is_a_separate_link():
    old, new = both(at_s=1.0, cpu_model=["slow"] * 2)[:2], both(at_s=2.0)[2:]
    assert [link.cpu_models for link in measured_links([*old, *new])][:2] == [("fast",), ("fast",)]


@pytest.mark.parametrize(
    ("changes", "is_used"),
    [
        ({}, True),
        ({"nodes": ("node2", "node3")}, True),  # shares a node
        ({"nodes": ("node3", "node4")}, False),
        ({"cpu_model": ["slow"] * 2}, False),
        ({"device_name": ["H100"] * 2}, False),
    ],
)
def test_only_links_of_the_studys_hardware_and_nodes_are_used(changes, is_used):
    study = [measured(INSIDE, 2)]
    links = StoredLinks.of(both(**changes), study)
    assert (links is not None) == is_used
    if links:
        assert links.across is links.between and links.between.num_nodes == 2 and links.within.num_nodes == 1


def verdict(within=INSIDE, between=ACROSS):
    links = by_nodes([measured(within, 1), measured(between, 2)])
    return Nodes.of(links[1], links[2]), links[2]


def test_a_second_node_pays_exactly_where_the_simulated_throughputs_cross():
    nodes, between = verdict()
    row = SecondNode.of(nodes, between, 25_000_000)
    layers = equal_layers(25_000_000)
    assert sum(layer.num_gradient_bytes for layer in layers) == 25_000_000 * FP32_BYTES == row.gradient_bytes
    links = Topology(2, nodes.communication.network.within, nodes.communication.network.between)
    how = Communication(links, Algorithm.GLOO)
    for factor, pays in ((0.5, False), (0.97, False), (1.03, True), (3.0, True)):
        # Find the computing time whose step on one node is this factor of the answer.
        computing_s = np.geomspace(1e-3, 100, 20_000)
        one_s = simulate_steps(layers, np.array(2), how, compute_s=computing_s).step_time_s
        at = int(np.argmin(abs(one_s - factor * row.pays_from_s)))
        four_s = simulate_steps(layers, np.array(4), how, compute_s=computing_s[at : at + 1]).step_time_s
        assert (2 / float(four_s[0]) > 1 / one_s[at]) == pays
    assert row.nearly_full_from_s > row.pays_from_s


def test_without_overlap_a_second_node_pays_from_the_time_of_an_all_reduce():
    nodes = Nodes(1, 2, Communication(ACROSS, "ring"))
    # One layer: all gradients are sent after the backward pass, so twice the samples take c + T.
    sending_s = float(all_reduce_cost(1e8, 2, ACROSS).total_s)
    assert nodes.least_step_s(one_layer(10**8)) == pytest.approx(sending_s, rel=0.01)
    assert nodes.least_step_s(one_layer(10**8), 1.8) == pytest.approx(9 * sending_s, rel=0.01)


def test_a_study_pays_from_the_batch_whose_step_takes_as_long_as_sending():
    points = [ObservedPoint(1, 100, (0.1, 0.1)), ObservedPoint(1, 200, (0.2, 0.2))]
    calibration = calibrate(points, one_layer(10**8), variation=1e-9)
    nodes = Nodes(1, 2, Communication(ACROSS, "ring"))
    sending_s = float(all_reduce_cost(1e8, 2, ACROSS).total_s)
    small, large = (StudyNodes.of(nodes, "mine", calibration, batch) for batch in (100, 2000))
    assert small.pays_from_batch == pytest.approx(1000 * sending_s, rel=0.02)
    assert small.one_samples_per_s == pytest.approx(1000) and small.all_samples_per_s < 1000
    assert large.all_samples_per_s == pytest.approx(2 * 2000 / (2 + sending_s))


def shown(view, width=100):
    text = io.StringIO()
    print_network(TerminalConsole(file=text, width=width), view)
    return joined(text.getvalue())


def test_the_report_has_both_links_the_transport_and_the_verdict(tmp_path):
    nodes, between = verdict()
    links = by_nodes(both())
    rows = tuple(SecondNode.of(nodes, between, number) for number in NUM_PARAMETERS)
    view = NetworkView(links[1], links[2], "", rows)
    text = shown(view)
    for words in (
        "All-reduces within a node (2 workers on node1):",
        "All-reduces between 2 nodes (2 workers on node1, node2):",
        "67.1 MB",
        "each way over gloo, TCP sockets on eth0, fitted to gloo's all-reduces",
        "An all-reduce of 25.0M parameters (100 MB of gradients) takes 0.86 s between 2 nodes: 2 nodes pay if a step",
        "90% efficiency",
    ):
        assert words in text
    plot_of(view).save(tmp_path / "network.svg")
    assert (tmp_path / "network.svg").read_text().count("between 2 nodes") >= 1
    alone = shown(NetworkView(links[1], None, "The network between nodes was not measured: one node."))
    assert "was not measured: one node." in alone and "nodes pay" not in alone


LOG = """
vm:7:7 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [RO]; OOB eth0:10.0.0.1<0>
vm:7:9 [0] NCCL INFO Channel 00/0 : 1[1] -> 0[0] via P2P/CUMEM
vm:7:9 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/IB/0/GDRDMA
vm:7:9 [0] NCCL INFO Channel 01/0 : 1[0] -> 0[0] [send] via NET/IB/1/GDRDMA
"""


@pytest.mark.parametrize(
    ("log", "text"),
    [
        (LOG, "NCCL, P2P/CUMEM, NET/IB/GDRDMA on mlx5_0:1/RoCE"),
        ("[0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>\n", "NCCL, NET/Socket on eth0:10.0.0.1"),
        ("[0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via SHM/direct/direct\n", "NCCL, SHM/direct/direct"),
        ("no line of NCCL", "NCCL"),
    ],
)
def test_nccls_log_names_the_transport(log, text):
    assert nccl_transport(log) == text


def test_gloos_transport_is_the_interface_of_the_group(monkeypatch, tmp_path):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    assert transport_of("cpu", tmp_path / "none") == "gloo, TCP sockets on ib0"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert transport_of("cpu", tmp_path / "none") == "gloo, TCP sockets"
    assert transport_of("cuda", tmp_path / "none") == "NCCL"


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a study on node1, and stored links of its cluster."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    hardware = {"node": ["node1"], "device_name": ["cpu"], "cpu_model": ["fast"]}
    step_s = {(1, 64): 0.0104, (1, 256): 0.0296}
    trials = [trial(n, b, r, step_s[n, b]) for r in range(3) for n, b in step_s]
    trials = [replace(each, conditions=stored_conditions(hardware)) for each in trials]
    recorded(tmp_path, Question("scaled", {"num_workers": 1}, ("num_workers",)), trials)
    return tmp_path


def predicted(*flags):
    code, out, err = raypar(
        "model", "predict", "scaled", "--set", "batch_size=256", "--workers", "8", "--network", "measured", *flags
    )
    assert code == 0, err
    return joined(out)


def store_links(folder, results):
    recorded(folder, Question("network", {}, ("nodes",)), results)


def test_predict_uses_the_stored_network_between_nodes_and_says_from_when(project):
    store_links(project, both(at_s=1.8e9))
    text = predicted()
    assert "in gloo's ring on CPUs, on links of 1.0 ms and 117 MB/s, measured between 2 nodes at 2027-01-1" in text
    assert "no communication overlaps" not in text and "Extrapolated (*): more workers" in text
    text = predicted("--nodes-of", "4")
    assert "4 workers per node, links of 50.0 µs and 1.00 GB/s within it, and a shared link of 1.0 ms and 117" in text
    assert "links within a node were not given" not in text


def test_predict_uses_the_stored_network_within_the_node(project):
    store_links(project, [each for each in both() if each.spec.point["nodes"] == 1])
    text = predicted()
    assert "links of 50.0 µs and 1.00 GB/s, measured between 2 workers of node1 at 1970" in text
    assert "no communication overlaps on this machine" in text


def test_predict_probes_this_machine_if_the_stored_network_is_of_another(project, monkeypatch):
    from raypar.predict import probe

    store_links(project, both(nodes=("other1", "other2")))
    monkeypatch.setattr(probe, "probe_all_reduces", lambda *_: ((4, 1e-3), (10**7, 1.0)))
    assert "measured between two workers of this machine" in predicted()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--nodes 4 --workers 2", "--nodes 4 is more than --workers 2 → write --workers 4"),
        ("--nodes 2", "the network of 2 workers on 2 nodes can't be measured: needs 2 workers"),
        ("--workers 5000", "the network of 5000 workers on 1 node can't be measured: needs 5000 CPUs"),
        ("--plot curve.txt", "--plot curve.txt: unknown format"),
        ("--for nothing", "no study `nothing` in the store"),
        ("--device tpu", "tpu"),
        ("--workers 1", "1"),
    ],
)
def test_what_can_not_be_measured_is_refused_before_anything_starts(flags, message, project):
    refused(message, "model", "network", *flags.split(), out=None)
    assert not (project / ".raypar" / "logs").exists()
