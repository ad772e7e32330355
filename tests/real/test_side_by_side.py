"""Trials side by side on several simulated machines (Ray nodes labelled as machines), one on each.

Run as a script with a folder, it runs the study and writes ``trials.json`` there.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import cloudpickle
import psutil
import pytest

from raypar.analysis.analyse import analyse
from raypar.analysis.question import Question
from raypar.study.trial import result_from_json

NUM_CPUS = 4


def meet(config):
    """Wait until all trials that must run at the same time are here."""
    folder, ends_s = Path(config["folder"]), time.monotonic() + 1500
    if config["name"] in ("lost", "preempted"):
        begun = folder / f"{config['name']} has begun"
        if begun.exists():
            return
        begun.touch()
        threading.Event().wait()  # until its node is lost
    (folder / config["name"]).touch()
    while not all((folder / name).exists() for name in config["others"].split()):
        if time.monotonic() > ends_s:
            raise TimeoutError(f"{config['name']} did not meet all of {config['others']}")
        time.sleep(0.02)


def main(folder):
    os.environ["RAY_AUTH_MODE"] = "disabled"
    import ray
    from ray.cluster_utils import Cluster
    from ray.core.generated import autoscaler_pb2

    from raypar import Study, Workload
    from raypar.run.cluster import TRAIN_ENVIRONMENT, joined_cluster
    from raypar.run.runner import ClusterChanged, TrialEnded, TrialRetried, TrialStarted
    from raypar.run.tune import TuneRunner
    from raypar.train.job import RunSettings

    os.environ.update(TRAIN_ENVIRONMENT)
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    study = Study(workload=Workload.from_train_loop(meet), name="simulated", max_retries=1)

    def trial(name, others="", **shape):
        return study.trial({"name": name, "others": others, "folder": str(folder), **shape}, 0)

    specs = (
        trial("one", "two three"),
        trial("two", "one three"),
        trial("three", "one two"),  # needs a third machine, since no two run on one
        trial("wide", num_workers=2, cpus_per_worker=NUM_CPUS, nodes=2),
        trial("after", num_workers=1),
        trial("too wide", num_workers=4, cpus_per_worker=NUM_CPUS),
        trial("lost", num_workers=3, cpus_per_worker=NUM_CPUS, nodes=3),
    )
    later = [
        trial("at its notice", "noticed", node_label="kind=spot"),
        trial("preempted", node_label="kind=spot"),  # not begun on the node of the one before, which has had its notice
    ]
    # Without Ray's signal handlers, which only the main thread may set: a node is added from another thread.
    cluster = Cluster(initialize_head=True, head_node_args=node_args("m1"), shutdown_at_exit=False)
    cluster.add_node(**node_args("m2"))
    events = []
    joined, is_noticed = [], []

    def await_begun(name):
        while not (folder / f"{name} has begun").exists():
            time.sleep(0.02)

    def remove(node):
        cluster.remove_node(node, allow_graceful=False)
        while any(each["Alive"] for each in ray.nodes() if each["NodeID"] == node.node_id):
            time.sleep(0.02)  # or the loss is noticed after the study's end

    def add_spot(machine):
        args = node_args(machine)
        joined.append(cluster.add_node(**{**args, "labels": {**args["labels"], "kind": "spot"}}))

    def give_notice(node):
        drain = ray._private.worker.global_worker.gcs_client.drain_node
        deadline_ms = int(1000 * time.time()) + 1
        assert drain(node.node_id, autoscaler_pb2.DRAIN_NODE_REASON_PREEMPTION, "", deadline_ms) == (True, "")

    def listen(event):
        events.append(event)
        if isinstance(event, ClusterChanged) and len(joined) == 2 and (event.num_nodes, is_noticed) == (2, [True]):
            (folder / "noticed").touch()
            add_spot("m5")  # the next trial has nowhere to run until it joins
        if not isinstance(event, TrialStarted):
            return
        if sum(isinstance(e, TrialStarted) for e in events) == 2:
            joined.append(cluster.add_node(**node_args("m3")))
        elif event.spec.point["name"] == "lost" and event.attempt == 1:
            await_begun("lost")
            remove(joined[0])
            add_spot("m4")
        elif event.spec.point["name"] == "at its notice":
            give_notice(joined[1])
            is_noticed.append(True)
        elif event.spec.point["name"] == "preempted" and event.attempt == 1:
            await_begun("preempted")
            give_notice(joined[2])
            remove(joined[2])
            add_spot("m6")

    with contextlib.ExitStack() as stack:
        stack.callback(cluster.shutdown)
        stack.enter_context(joined_cluster(cluster.address))
        TuneRunner(RunSettings(log_dir=folder / "logs"), owns_cluster=False).run(
            study, specs, listen, lambda: [later.pop() for _ in [*later]][::-1]
        )
    trials = [e.result.to_json() for e in events if isinstance(e, TrialEnded)]
    changes = [[e.num_nodes, e.num_slots] for e in events if isinstance(e, ClusterChanged)]
    retries = [[e.spec.point["name"], e.reason] for e in events if isinstance(e, TrialRetried)]
    (folder / "trials.json").write_text(json.dumps({"changes": changes, "trials": trials, "retries": retries}))


def node_args(machine):
    return {"num_cpus": NUM_CPUS, "labels": {"raypar-machine": machine}, "include_dashboard": False}


@pytest.mark.ray
@pytest.mark.timeout(2000)
def test_trials_use_separate_machines_that_join_and_survive_the_loss_of_one(tmp_path):
    with (tmp_path / "log").open("wb") as log:
        process = psutil.Popen([sys.executable, __file__, tmp_path], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            code = process.wait(1800)
        finally:
            with contextlib.suppress(psutil.Error):
                for descendant in [*process.children(recursive=True), process]:
                    descendant.kill()
    assert code == 0, (tmp_path / "log").read_text()
    outcome = json.loads((tmp_path / "trials.json").read_text())
    results = {r.spec.point["name"]: r for r in map(result_from_json, outcome["trials"])}
    assert outcome["changes"][0] == outcome["changes"][-1] == [3, 3]
    assert outcome["retries"][-1] == ["preempted", "node m5 was preempted"]
    too_wide = results.pop("too wide").failure
    assert too_wide is not None and "needs 16 CPUs in one gang, the cluster has 12" in too_wide.message
    # One, two and three end only if all three run at the same time.
    assert {name: result.failure for name, result in results.items()} == dict.fromkeys(results) and len(results) == 8
    nodes = {name: sorted(set(result.conditions.node)) for name, result in results.items()}
    assert [result.conditions.num_sharing for result in results.values()] == [0] * 8
    assert sorted(nodes["one"] + nodes["two"] + nodes["three"]) == ["m1", "m2", "m3"]
    assert [results[name].conditions.num_beside for name in ("one", "two", "three")] == [2, 2, 2]
    wide, after = results["wide"], results["after"]
    assert len(nodes["wide"]) == 2 and wide.wall_s is not None and after.wall_s is not None
    if wide.started_at < after.started_at + after.wall_s and after.started_at < wide.started_at + wide.wall_s:
        assert not set(nodes["wide"]) & set(nodes["after"])
    lost, preempted = results["lost"], results["preempted"]
    assert (lost.attempts, nodes["lost"], lost.conditions.preempted) == (2, ["m1", "m2", "m4"], ())
    assert (nodes["at its notice"], nodes["preempted"], preempted.attempts) == (["m4"], ["m6"], 2)
    assert preempted.conditions.preempted == ("node m5 was preempted",)
    # Nodes with the label cost another price than others.
    priced = Question("simulated", {}, ("name",), price_per_node_hour={"kind=spot": 36.0})
    costs = {p.point["name"]: p.cost for p in analyse(priced, list(results.values())).points}
    assert costs["preempted"].value == pytest.approx(preempted.wall_s / 100) and costs["after"] is None


if __name__ == "__main__":
    main(Path(sys.argv[1]))
