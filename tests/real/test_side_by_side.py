"""Trials side by side on several simulated machines (Ray nodes labelled as machines), one on each.

Run as a script with a folder, it runs the study and writes ``trials.json`` there.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import cloudpickle
import psutil
import pytest

from raypar.study.trial import result_from_json

NUM_CPUS = 4


def meet(config):
    """Wait until all trials that must run at the same time are here."""
    folder, ends_s = Path(config["folder"]), time.monotonic() + 300
    if config["name"] == "lost":
        if (folder / "has begun").exists():
            return
        (folder / "has begun").touch()
        time.sleep(600)  # until its node is lost
    (folder / config["name"]).touch()
    while not all((folder / name).exists() for name in config["others"].split()):
        if time.monotonic() > ends_s:
            raise TimeoutError(f"{config['name']} did not meet all of {config['others']}")
        time.sleep(0.02)


def main(folder):
    os.environ["RAY_AUTH_MODE"] = "disabled"
    import ray
    from ray.cluster_utils import Cluster

    from raypar import Study, Workload
    from raypar.run.cluster import TRAIN_ENVIRONMENT, joined_cluster
    from raypar.run.runner import ClusterChanged, TrialEnded, TrialStarted
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
    # Without Ray's signal handlers, which only the main thread may set: a node is added from another thread.
    cluster = Cluster(initialize_head=True, head_node_args=node_args("m1"), shutdown_at_exit=False)
    cluster.add_node(**node_args("m2"))
    events = []
    joined = []

    def listen(event):
        events.append(event)
        if not isinstance(event, TrialStarted):
            return
        if sum(isinstance(e, TrialStarted) for e in events) == 2:
            joined.append(cluster.add_node(**node_args("m3")))
        elif event.spec.point["name"] == "lost" and event.attempt == 1:
            while not (folder / "has begun").exists():
                time.sleep(0.02)
            cluster.remove_node(joined[0], allow_graceful=False)
            while sum(node["Alive"] for node in ray.nodes()) > 2:  # or the loss is noticed after the study's end
                time.sleep(0.02)
            cluster.add_node(**node_args("m4"))

    with contextlib.ExitStack() as stack:
        stack.callback(cluster.shutdown)
        stack.enter_context(joined_cluster(cluster.address))
        TuneRunner(RunSettings(log_dir=folder / "logs"), owns_cluster=False).run(study, specs, listen)
    trials = [e.result.to_json() for e in events if isinstance(e, TrialEnded)]
    changes = [[e.num_nodes, e.num_slots] for e in events if isinstance(e, ClusterChanged)]
    (folder / "trials.json").write_text(json.dumps({"changes": changes, "trials": trials}))


def node_args(machine):
    return {"num_cpus": NUM_CPUS, "labels": {"raypar-machine": machine}, "include_dashboard": False}


@pytest.mark.ray
@pytest.mark.timeout(500)
def test_trials_use_separate_machines_that_join_and_survive_the_loss_of_one(tmp_path):
    with (tmp_path / "log").open("wb") as log:
        process = psutil.Popen([sys.executable, __file__, tmp_path], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            code = process.wait(400)
        finally:
            with contextlib.suppress(psutil.Error):
                for descendant in [*process.children(recursive=True), process]:
                    descendant.kill()
    assert code == 0, (tmp_path / "log").read_text()
    outcome = json.loads((tmp_path / "trials.json").read_text())
    results = {r.spec.point["name"]: r for r in map(result_from_json, outcome["trials"])}
    assert outcome["changes"][0] == outcome["changes"][-1] == [3, 3]
    too_wide = results.pop("too wide").failure
    assert too_wide is not None and "needs 16 CPUs in one gang, the cluster has 12" in too_wide.message
    # One, two and three end only if all three run at the same time.
    assert {name: result.failure for name, result in results.items()} == dict.fromkeys(results) and len(results) == 6
    nodes = {name: sorted(set(result.conditions.node)) for name, result in results.items()}
    assert [result.conditions.num_sharing for result in results.values()] == [0] * 6
    assert sorted(nodes["one"] + nodes["two"] + nodes["three"]) == ["m1", "m2", "m3"]
    assert [results[name].conditions.num_beside for name in ("one", "two", "three")] == [2, 2, 2]
    wide, after = results["wide"], results["after"]
    assert len(nodes["wide"]) == 2 and wide.wall_s is not None and after.wall_s is not None
    if wide.started_at < after.started_at + after.wall_s and after.started_at < wide.started_at + wide.wall_s:
        assert not set(nodes["wide"]) & set(nodes["after"])
    assert (results["lost"].attempts, nodes["lost"]) == (2, ["m1", "m2", "m4"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
