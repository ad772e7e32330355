"""Clusters that don't answer and lost processes of Ray end a study in time, with one message."""

import contextlib
import getpass
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import ray
from ray.core.generated import autoscaler_pb2
from stage import options_of
from typer.testing import CliRunner

from raypar import Study, gpus
from raypar.cli.app import app
from raypar.errors import ClusterError
from raypar.execution.machine import cluster_for
from raypar.run import auth, cluster, jobs
from raypar.run.cluster import Cluster, NodeType, joined_cluster, node_types
from raypar.run.private_ray import processes_noted
from raypar.run.watch import watch_of_cluster, watch_of_own
from raypar.signals import abort_reason, handle_signals
from raypar.study.trial import Placement
from raypar.workloads import digits


def a_process():
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


def work():
    for _ in range(6000):
        try:
            time.sleep(0.01)
        except Exception as error:
            raise AssertionError("the abort was caught as an Exception") from error


def test_a_killed_head_aborts_the_work():
    with a_process() as head, handle_signals():
        watch = watch_of_own({"gcs_server": head.pid})
        head.kill()
        with watch.watching(), pytest.raises(KeyboardInterrupt):
            work()
        reason = abort_reason()
    assert abort_reason() is None
    with handle_signals():
        assert abort_reason() is None  # an earlier loss is forgotten
    assert isinstance(reason, ClusterError)
    assert reason.message == f"Ray was lost: its head, gcs_server, ended (process {head.pid})"
    assert watch.lost


def test_a_head_that_stays_stopped_aborts_the_work(monkeypatch):
    with a_process() as head, handle_signals():
        head.send_signal(signal.SIGSTOP)
        patient = watch_of_own({"gcs_server": head.pid})
        with patient.watching():
            pass
        assert not patient.lost
        monkeypatch.setattr("raypar.run.watch.STOPPED_LIMIT_S", 0.2)
        with watch_of_own({"gcs_server": head.pid}).watching(), pytest.raises(KeyboardInterrupt):
            work()
        reason = abort_reason()
        head.kill()
    assert isinstance(reason, ClusterError)
    assert reason.message == f"Ray was lost: its head, gcs_server, was stopped for 0.20 s (process {head.pid})"


def test_a_ray_that_does_not_start_is_given_up(monkeypatch):
    monkeypatch.setattr("raypar.run.watch.START_LIMIT_S", 0.0)
    with a_process() as stopped, handle_signals():
        stopped.send_signal(signal.SIGSTOP)
        watch = watch_of_own({"gcs_server": stopped.pid}, lambda: False)
        with watch.watching(), pytest.raises(KeyboardInterrupt, match="Ray did not start within"):
            work()
        assert isinstance(abort_reason(), ClusterError)
        stopped.kill()
    with handle_signals(), watch_of_own({}, lambda: True).watching():
        pass


def test_rays_processes_are_watched_from_their_start(tmp_path):
    from ray._private import services

    for name in ("gcs_server", "log_monitor"):
        (tmp_path / name).write_text("#!/bin/sh\nread line")
        (tmp_path / name).chmod(0o755)
    processes, plain = {}, services.ConsolePopen
    watch = watch_of_own(processes)
    with contextlib.ExitStack() as stack, handle_signals(), watch.watching():
        with processes_noted(processes):
            monitor, head = (
                stack.enter_context(services.ConsolePopen([str(tmp_path / name)], stdin=subprocess.PIPE))
                for name in ("log_monitor", "gcs_server")
            )
        assert services.ConsolePopen is plain and processes == {"gcs_server": head.pid}
        assert os.getpgid(head.pid) == (head.pid if sys.platform == "linux" else os.getpgid(0))
        head.kill()
        with pytest.raises(KeyboardInterrupt, match="its head, gcs_server, ended"):
            work()
        monitor.kill()
    assert watch.lost


def test_a_head_that_ended_with_the_work_counts_as_lost():
    with a_process() as head:
        for is_lost in (False, True):
            watch = watch_of_own({"raylet": head.pid})
            with watch.watching():
                pass
            assert watch.lost is is_lost
            head.kill()
            head.wait()


def test_an_unreachable_cluster_head_aborts_the_work_after_a_while():
    with socket.create_server(("127.0.0.1", 0)) as head, handle_signals():
        address = f"127.0.0.1:{head.getsockname()[1]}"
        watch = watch_of_cluster(address, patience_s=0.2)
        with watch.watching():
            for _ in range(3):
                head.accept()[0].close()
            head.close()
            with pytest.raises(KeyboardInterrupt, match=f"its head at {address} can no longer be reached"):
                work()
        assert watch.lost
    patient = watch_of_cluster(address, patience_s=3600.0)
    with patient.watching():
        pass
    assert not patient.lost


@contextlib.contextmanager
def black_hole(takes_connections):
    """Yield the address of a host that accepts or drops connections and never answers."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=50 if takes_connections else 0))
        address = server.getsockname()
        for _ in range(0 if takes_connections else 4):  # with a full queue, the kernel drops connections
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(address)
        yield f"127.0.0.1:{address[1]}"


@pytest.mark.timeout(100)
@pytest.mark.parametrize("takes_connections", [True, False], ids=["accepts", "drops"])
@pytest.mark.parametrize("scheme", ["", "http://"])
def test_an_address_without_an_answer_is_given_up_soon(scheme, takes_connections, monkeypatch, tmp_path, capfd):
    for name in auth.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    limits_s = [*map(float, auth.FIRST_CONTACT.values()), cluster.CONNECT_TIMEOUT_S]
    assert sum(limits_s) + 1 <= 10 and jobs.ANSWER_TIMEOUT_S <= 10  # Ray connects twice
    for module, name in ((cluster, "CONNECT_TIMEOUT_S"), (jobs, "ANSWER_TIMEOUT_S")):
        monkeypatch.setattr(module, name, 0.2)
    monkeypatch.setattr(auth, "FIRST_CONTACT", dict.fromkeys(auth.FIRST_CONTACT, "1"))
    with black_hole(takes_connections) as host_port:
        address = scheme + host_port
        with pytest.raises(ClusterError) as refused, contextlib.ExitStack() as stack:
            _ = jobs.connect(address, print) if scheme else stack.enter_context(joined_cluster(address))
    assert f"--address {address}" in refused.value.message and refused.value.hint
    assert capfd.readouterr() == ("", "") and not auth.FIRST_CONTACT.keys() & os.environ.keys()


REPOSITORY = Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def autoscaler(config):
    """Run a process with the command line of Ray's autoscaler for head:1."""
    flags = ["--gcs-address=head:1", f"--autoscaling-config={config}"]
    with subprocess.Popen([sys.executable, "-c", "input()", *flags], stdin=subprocess.PIPE) as process:
        until_s = time.monotonic() + 20
        while flags[0] not in psutil.Process(process.pid).cmdline() and time.monotonic() < until_s:
            time.sleep(0.01)  # before its exec
        yield
        process.communicate(b"\n")


@pytest.fixture
def joined(monkeypatch):
    """Replace Ray's answers by those of a joined cluster, head:1, whose nodes can be set."""
    answers = SimpleNamespace(nodes=[], now_s=0.0, joins={}, config=None)
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(gcs_address="head:1"))
    monkeypatch.setattr("ray._private.state.state.get_cluster_config", lambda: answers.config)

    def sleep(seconds):
        answers.now_s += seconds
        answers.nodes += [answers.joins.pop(at_s) for at_s in sorted(answers.joins) if at_s <= answers.now_s]

    def nodes():
        return [{"Alive": cpus >= 0, "Resources": {"CPU": abs(cpus)}, "Labels": {}} for cpus in answers.nodes]

    monkeypatch.setattr("ray.nodes", nodes)
    monkeypatch.setattr(cluster, "time", SimpleNamespace(monotonic=lambda: answers.now_s, sleep=sleep))
    return answers


@pytest.mark.usefixtures("joined")
def test_node_types_come_from_the_autoscalers_file_on_the_head():
    assert node_types() == ()
    with autoscaler(REPOSITORY / "cluster-local.yaml"):
        assert node_types() == (NodeType(2, 2),)
    with autoscaler(REPOSITORY / "cluster.yaml"):
        by_shape = {each.shape: (each.min_count, each.max_count) for each in node_types()}
    assert by_shape == {(0, 0): (0, 0), (8, 0): (0, 8), (2, 1): (0, 4), (96, 8): (0, 2)}
    with autoscaler(REPOSITORY / "absent.yaml"):
        assert node_types() == ()


def test_node_types_come_from_rays_report(joined):
    joined.config = autoscaler_pb2.ClusterConfig(
        node_group_configs=[{"resources": {"CPU": 4}, "min_count": 1, "max_count": -1}]
    )
    assert node_types() == (NodeType(1, cluster.MAX_GROWTH, {"CPU": 4}),)


def test_nodes_that_may_be_added_count_for_placements():
    types = (NodeType(0, 0, {"CPU": 0}), NodeType(1, 3, {"CPU": 8}, {"zone": "a"}))
    growing = Cluster(({"CPU": 0}, {"CPU": 8}), is_own=False, node_types=types)
    fits, too_large = (Placement(num, 8, "cpu", "pack") for num in (3, 4))
    assert growing.refusals([fits, too_large]) == {too_large: "needs 32 CPUs in one gang, the cluster has 24"}
    assert not growing.refusals([replace(fits, num_workers=2, node_label="zone=a")])
    assert growing.may_grow and growing.num_promised == 2
    assert not replace(growing, nodes=({"CPU": 0}, *[{"CPU": 8}] * 3)).may_grow
    assert growing.cores_per_gpu is None


@pytest.mark.parametrize(
    ("nodes", "types", "cores"),
    [
        ([(8, 0)], (), None),
        ([(8, 1)], (), 8),
        ([(8, 0), (16, 2), (9, 2)], (), 4),
        ([(8, 1)], [NodeType(0, 3, {"CPU": 6, "GPU": 2})], 3),  # it may still be added
        ([(8, 0)], [NodeType(1, 1, {"CPU": 6, "GPU": 2})], 3),
        ([(2, 4)], (), 1),
        ([(0, 4)], (), None),  # a head without CPUs
        ([(0.5, 1), (8, 2)], (), 4),
    ],
)
def test_cores_per_gpu_are_those_of_the_poorest_node(nodes, types, cores):
    nodes = tuple({"CPU": cpus, **({"GPU": gpus} if gpus else {})} for cpus, gpus in nodes)
    assert Cluster(nodes, is_own=False, node_types=tuple(types)).cores_per_gpu == cores


@pytest.mark.parametrize("problem", [None, "the installed torch is built without CUDA"])
def test_this_machine_has_the_visible_gpus_and_torchs_problem_with_them(problem, monkeypatch):
    listed = tuple(gpus.Gpu(i, f"GPU-{i}", "a GPU", "") for i in range(3))
    monkeypatch.setattr(gpus, "all_gpus", lambda: listed)  # stands in for NVML
    monkeypatch.setattr(gpus, "torch_problem", lambda visible: problem if visible else "asked without a GPU")
    for visible, num in (("0,2", 2), ("GPU-1", 1), ("-1", 0)):
        monkeypatch.setenv(gpus.VISIBLE, visible)
        machine = cluster.this_machine()
        assert machine.nodes[0].get("GPU", 0) == num
        assert machine.gpu_problem == ((problem or "") if num else "")


def test_waiting_for_nodes_ends_when_they_join_or_time_is_up(joined):
    lines = []
    joined.nodes, joined.joins = [0, -2, 2], {30.0: 2, 30.4: 2}
    at_once = cluster.wait_for_nodes(Cluster(({}, {}), is_own=False), 2, lines.append)
    assert len(at_once.nodes) == 2 and not lines and joined.now_s == 0
    three = cluster.wait_for_nodes(Cluster(({}, {}), is_own=False), 3, lines.append)
    assert three.num_cpus == 4 and lines == ["waiting for nodes: 2 of 3 …"] and joined.now_s == 30
    lines.clear()
    late = cluster.wait_for_nodes(three, 5, lines.append)
    assert late.num_cpus == 6 and joined.now_s == 30 + cluster.NODES_TIMEOUT_S
    assert lines == ["waiting for nodes: 3 of 5 …", "waiting for nodes: 4 of 5 …", "4 of 5 nodes joined within 120 s"]


@pytest.mark.parametrize(
    ("space", "min_nodes", "num_awaited"),
    [
        ({"num_workers": 1, "device": "cpu"}, None, 0),
        ({"num_workers": 1}, None, 3),  # nodes to come may have GPUs
        ({"num_workers": 2}, None, 3),
        ({"num_workers": 2, "nodes": "spread"}, None, 3),
        ({"num_workers": 1, "device": "cpu"}, 2, 2),
        ({"num_workers": 2}, 7, 7),
    ],
)
def test_a_study_waits_only_for_nodes_that_it_needs(space, min_nodes, num_awaited, joined, tmp_path):
    awaited = []

    def wait(cluster, num_nodes, notice):
        awaited.append(num_nodes)
        return cluster

    starting = Cluster(({"CPU": 0}, {"CPU": 1}), is_own=False, node_types=(NodeType(2, 2),))
    options = options_of(tmp_path, tracking_uri="", address="head:1", min_nodes=min_nodes)
    study = Study(workload=digits, space={}, config=space, name="s")
    joining = cluster_for(study, options, print, join=lambda _: contextlib.nullcontext(starting), wait=wait)
    if min_nodes == 7:
        with pytest.raises(ClusterError, match="--min-nodes 7: the cluster has 2 nodes"), joining:
            pass
    else:
        with joining as there:
            assert there == starting
    assert awaited == [num_awaited]


@pytest.mark.parametrize("takes_everybody", [True, False])
def test_add_node_copies_the_token_if_the_cluster_requires_one(takes_everybody, monkeypatch):
    monkeypatch.delenv(auth.TOKEN_PATH, raising=False)
    monkeypatch.delenv(auth.TOKEN, raising=False)
    there = cluster.Contact("10.0.0.1:6379", "10.0.0.2", takes_everybody)
    monkeypatch.setattr(cluster, "contact", lambda address: there)
    done = CliRunner().invoke(app, ["cluster", "add-node"])
    assert done.exit_code == 0 and subprocess.run(["bash", "-n"], input=done.stdout, text=True).returncode == 0
    lines = {line.split()[0]: line for line in done.stdout.splitlines()}
    start = "~/venv/bin/ray start --address=10.0.0.1:6379 "
    assert start in done.stdout and ("RAY_AUTH_MODE=token " + start in done.stdout) is not takes_everybody
    copies = f"(umask 077 && ssh -n {getpass.getuser()}@10.0.0.2 cat {Path.home()}/.ray/auth_token >~/.ray/auth_token)"
    assert (copies in done.stdout.splitlines()) is not takes_everybody
    assert f":{REPOSITORY}/ ~/raypar" in lines["rsync"] and f"ray=={ray.__version__}" in done.stdout


def test_add_node_refuses_a_loopback_head_and_a_token_in_the_environment(monkeypatch):
    monkeypatch.setattr(cluster, "admitted", lambda address: contextlib.nullcontext(False))
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        with pytest.raises(ClusterError, match="only from this machine"):
            cluster.contact(address)
    monkeypatch.setenv(auth.TOKEN, "t" * 20)
    with pytest.raises(ClusterError, match="from which no other machine can copy it"):
        auth.token_file()


STUCK = """
import sys, time
from pathlib import Path
from raypar.cli.common import quiet
from raypar.run import watch as head
from raypar.signals import handle_signals, uninterrupted

head.GRACE_S = 0.0
with handle_signals(), quiet(Path(sys.argv[2])):
    with head.watch_of_own({"gcs_server": int(sys.argv[1])}).watching(), uninterrupted():
        time.sleep(60)  # stands in for a call that ignores signals
"""


def test_work_that_cant_be_interrupted_ends_with_the_message(tmp_path):
    with a_process() as head:
        head.kill()
        head.wait()
    command = [sys.executable, "-c", STUCK, str(head.pid), str(tmp_path / "log")]
    stuck = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert (stuck.returncode, stuck.stdout) == (1, "")
    assert stuck.stderr.startswith(f"error: Ray was lost: its head, gcs_server, ended (process {head.pid})\n  → ")
