"""Studies on a cluster of several hosts made by `ray up`, from inside and outside of it.

The hosts are namespaces of this machine, each with an address, a home and an ssh daemon (needs root).
"""

import contextlib
import csv
import json
import os
import signal
import sys

import pytest
import ray
from harness import digits_study, until
from netlab import Lab, Shape, why_not
from netlab.ray_cluster import HEAD, RayCluster

WHY_NOT = why_not(with_ssh=True)
pytestmark = [
    *(pytest.mark.cluster, pytest.mark.timeout(900)),
    pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or ""),
]

STUDY = digits_study('{"num_workers": grid(1, 2)}', num_repeats=2, config={"epochs": 2})
LOGGING = """
import mlflow
import ray.train
from raypar import Study, Workload

def train(config):
    ray.train.report({"loss": 1.0})
    with mlflow.start_run(run_name="my own"):
        mlflow.log_metric("score", 0.25, step=7)

workload = Workload.from_train_loop(train, metric="score", mode="max")
study = Study(workload=workload, config={"num_workers": 1}, num_repeats=1)
"""
PIP = '#!/bin/sh\necho "$@" >>~/pip.log\n'
DASHBOARD = "http://127.0.0.1:8265"
MLFLOW = "http://127.0.0.1:5000"
RUNS = """
import json, sys
from mlflow import MlflowClient
client = MlflowClient(sys.argv[1])
experiment = client.get_experiment_by_name(sys.argv[2])
runs = client.search_runs([experiment.experiment_id], "tags.`raypar.kind` = 'trial'")
print("runs " + json.dumps([[run.data.params, run.data.tags, run.info.status, run.data.metrics] for run in runs]))
"""


@pytest.fixture(scope="module")
def cluster():
    with Lab(4, with_ssh=True) as lab:
        cluster = RayCluster(lab)
        assert cluster.make_token().stat().st_mode & 0o077 == 0
        cluster.up()
        (lab.folder / "runs.py").write_text(RUNS)
        yield cluster


def trials_of(cluster, study):
    """Return params, tags, status and metrics of a study's trials from the head's MLflow server."""
    printed = cluster.run(HEAD, f"python {cluster.lab.folder / 'runs.py'} {MLFLOW} {study}")
    (line,) = [line for line in printed.splitlines() if line.startswith("runs ")]
    return [tuple(run) for run in json.loads(line.removeprefix("runs "))]


def rows_of(cluster, study):
    """Return the rows that `raypar store export` writes for a study."""
    cluster.run(HEAD, f"raypar store export {study} {study}.csv --tracking-uri {MLFLOW}")
    with (cluster.lab.home(HEAD) / f"{study}.csv").open() as table:
        return list(csv.DictReader(table))


@contextlib.contextmanager
def tunnel(cluster):
    """Forward the head's dashboard to the client."""
    ssh = cluster.start(
        cluster.client,
        f"exec ssh -N -i {cluster.lab.folder / 'key'} -o StrictHostKeyChecking=no -o ExitOnForwardFailure=yes"
        f" -L 8265:127.0.0.1:8265 root@{cluster.head_address}",
    )
    try:
        cluster.run(cluster.client, "until (: </dev/tcp/127.0.0.1/8265) 2>/dev/null; do sleep 0.1; done")
        yield
    finally:
        os.killpg(ssh.pid, signal.SIGKILL)
        ssh.wait()


def write_study(cluster, host, name, text=STUDY):
    """Write a study into a new folder."""
    (cluster.lab.home(host) / name).mkdir()
    (cluster.lab.home(host) / name / f"{name}.py").write_text(text)


def test_a_study_on_the_head_waits_for_the_nodes_and_uses_all_of_them(cluster):
    """Must run first: `ray up` has just returned."""
    write_study(cluster, HEAD, "from_head")
    command = f"ray exec {cluster.file} 'raypar study from_head/from_head.py --address auto'"
    printed = " ".join(cluster.run(cluster.client, command).split())
    assert "from_head: 2 points, 4 trials" in printed
    assert "different nodes" not in printed  # they are alike
    trials = trials_of(cluster, "from_head")
    assert len(trials) == 4 and {status for _, _, status, _ in trials} == {"FINISHED"}
    assert {params["num_workers"] for params, *_ in trials} == {"1", "2"}
    for row in rows_of(cluster, "from_head"):
        assert set(row["environment.node"].split()) <= {"node1", "node2"}
        assert all(row[f"environment.{key}"] for key in ("node", "cores", "cpu_model", "device_name"))
        assert row["environment.device_name"] == "cpu"


def test_ray_requires_a_token_and_mlflow_a_password(cluster):
    study = "raypar study raypar/studies/quickstart.py --address auto"
    for command, words in (
        (study, ("the cluster requires a token, and none was found", "ray get-auth-token")),
        (f"raypar list --tracking-uri {MLFLOW}", ("asks for a user and a password", "~/.mlflow/credentials")),
    ):
        refused = cluster.run(HEAD, f"{command}; echo status $?", HOME="/nonexistent")
        assert all(part in refused for part in words) and "status 0" not in refused and "Traceback" not in refused
    assert "gcs_client" not in cluster.run(HEAD, "raypar plan raypar/studies/quickstart.py --address auto")  # Ray's log
    assert cluster.run(HEAD, "stat -c %a ~/.mlflow/credentials ~/.ray/auth_token").split() == ["600", "600"]
    assert not [host for host in range(1, cluster.num_workers + 1) if (cluster.lab.home(host) / ".mlflow").exists()]


def test_hyperparameters_choose_the_nodes_of_workers(cluster):
    flags = f"--repeats 1 --address auto --tracking-uri {MLFLOW}"
    write_study(cluster, HEAD, "where", STUDY.replace("grid(1, 2)", "grid(2)"))
    cluster.run(HEAD, f"raypar study where/where.py --set nodes=1,2 {flags}")
    rows = rows_of(cluster, "where")
    assert {row["config.nodes"]: len(set(row["environment.node"].split())) for row in rows} == {"1": 1, "2": 2}
    write_study(cluster, HEAD, "labelled")
    study = f"raypar study labelled/labelled.py --set num_workers=1 {flags} --set node_label=host"
    cluster.run(HEAD, f"{study}=node2")
    assert {node for row in rows_of(cluster, "labelled") for node in row["environment.node"].split()} == {"node2"}
    # What code on another node logs to MLflow is in its trial's run.
    write_study(cluster, HEAD, "logging", LOGGING)
    cluster.run(HEAD, f"raypar study logging/logging.py {flags} --set node_label=host=node2")
    ((_, tags, _, metrics),) = trials_of(cluster, "logging")
    assert metrics["score"] == 0.25 and tags["raypar.kind"] == "trial"
    (row,) = rows_of(cluster, "logging")
    assert (row["environment.node"], float(row["final.score"])) == ("node2", 0.25)
    refused = cluster.run(HEAD, f"{study}=node9", check=False)
    assert "no node has the label host=node9; there are: host=node1, host=node2" in refused


def test_the_network_within_and_between_nodes_is_measured_and_kept(cluster):
    rate_bit_per_s = 200e6
    cluster.lab.shape(Shape(rate_bit_per_s))
    try:
        flags = f"--repeats 1 --address auto --tracking-uri {MLFLOW}"
        printed = cluster.run(HEAD, f"raypar model network --json {flags} 2>network.log || cat network.log")
    finally:
        cluster.lab.shape(Shape())
    found = json.loads(printed)
    within, between = found["within"], found["between"]
    assert set(between["nodes"]) == {"node1", "node2"} and len(within["nodes"]) == 1
    assert (within["transport"], between["transport"]) == ("gloo, TCP sockets on lo", "gloo, TCP sockets on eth0")
    # Two workers send each byte once, over a link that limits both directions.
    large = between["messages"][-1]
    assert 0.5 * rate_bit_per_s / 8 < large["bus_bytes_per_s"] < 1.05 * rate_bit_per_s / 8
    assert within["messages"][-1]["time_s"] < large["time_s"]
    assert within["network"]["bandwidth_bytes_per_s"] > between["network"]["bandwidth_bytes_per_s"]
    assert [row["pays_from_s"] for row in found["by_parameters"]] == sorted(
        row["pays_from_s"] for row in found["by_parameters"]
    )
    assert len(trials_of(cluster, "network")) == 2
    # The first study ran on these nodes. On a busy machine, its times support no prediction.
    predict = f"raypar model predict from_head --workers 4 --network measured --tracking-uri {MLFLOW}"
    text = " ".join(cluster.run(HEAD, f"{predict}; true").split())
    assert "measured between 2 nodes at" in text or "other load disturbed" in text


def test_a_study_submitted_from_outside_adds_only_missing_trials_to_the_same_store(cluster):
    write_study(cluster, cluster.client, "from_head")
    with tunnel(cluster):
        printed = cluster.run(cluster.client, f"raypar study from_head/from_head.py --repeats 3 --address {DASHBOARD}")
    assert "from_head: 2 points, 6 trials" in " ".join(printed.split())
    assert len(trials_of(cluster, "from_head")) == 6


def test_a_machine_joins_by_the_printed_commands_and_runs_a_trial(cluster):
    script = cluster.run(HEAD, "raypar cluster add-node")
    new, home = cluster.client, cluster.lab.home(cluster.client)
    (home / "add-node.sh").write_text(script)
    cluster.run(new, "rm -r ~/.ray")
    # This environment replaces an installation, as everywhere in this lab; pip only logs its arguments.
    (home / "venv" / "bin").mkdir(parents=True)
    for name in ("python", "ray"):
        (home / "venv" / "bin" / name).symlink_to(f"{sys.prefix}/bin/{name}")
    (home / "venv" / "bin" / "pip").write_text(PIP)
    (home / "venv" / "bin" / "pip").chmod(0o755)
    (home / ".ssh").mkdir(exist_ok=True)
    (home / ".ssh" / "config").write_text(f"IdentityFile {cluster.lab.folder / 'key'}\nStrictHostKeyChecking no\n")
    try:
        cluster.run(new, "bash add-node.sh >add-node.log 2>&1 || { cat add-node.log; exit 1; }")
        assert cluster.run(new, "stat -c %a ~/.ray/auth_token").split() == ["600"]
        assert (home / "raypar" / "raypar" / "__init__.py").exists()
        assert f"ray=={ray.__version__}" in (home / "pip.log").read_text()
        write_study(cluster, HEAD, "added")
        flags = "--set num_workers=1 --repeats 1 --set node_label=host=node3 --min-nodes 4"
        cluster.run(HEAD, f"raypar study added/added.py {flags} --address auto --tracking-uri {MLFLOW}")
        assert {row["environment.node"] for row in rows_of(cluster, "added")} == {"node3"}
    finally:
        cluster.run(new, "ray stop --force")


def test_only_ray_and_ssh_listen_on_the_heads_network(cluster):
    listening = cluster.run(HEAD, "ss -Hltn").split("\n")
    open_ports = {line.split()[3].rpartition(":")[2] for line in listening if line and "127.0.0.1:" not in line}
    assert {"5000", "8265"}.isdisjoint(open_ports)
    assert {"22", "6379", "10001"} <= open_ports


def test_ray_down_ends_ray_on_every_host(cluster):
    cluster.run(cluster.client, f"ray down -y {cluster.file}")
    assert "raylet" not in cluster.run(HEAD, "ps -eo comm")
    for host in range(1, cluster.num_workers + 1):  # they end after a minute without the head
        until(lambda host=host: "raylet" not in cluster.run(host, "ps -eo comm"), "the nodes' end", 180)
