"""A study on a Ray of several nodes on this machine, each of which counts as a machine; in a process of its own.

Started with a folder, it leaves ``told.json`` there: of every trial, how it ended, where, and beside how many others.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import cloudpickle

NUM_CPUS = 4


def meet(config: dict[str, Any]) -> None:
    """Ends when all that it is to meet have been here."""
    folder, ends_s = Path(config["folder"]), time.monotonic() + 60
    if config["own"] == "lost":
        if (folder / "has begun").exists():
            return
        (folder / "has begun").touch()
        time.sleep(600)  # until its node is lost
    (folder / config["own"]).touch()
    while not all((folder / name).exists() for name in config["others"].split()):
        if time.monotonic() > ends_s:
            raise TimeoutError(f"{config['own']} met not all of {config['others']}")
        time.sleep(0.02)


def main(folder: Path) -> None:
    os.environ["RAY_AUTH_MODE"] = "disabled"
    from ray.cluster_utils import Cluster

    from raypar import Study, Workload
    from raypar.run.cluster import TRAIN_ENVIRONMENT, joined_cluster
    from raypar.run.runner import ClusterChanged, Event, TrialEnded, TrialStarted
    from raypar.run.tune import TuneRunner
    from raypar.train.job import RunSettings

    os.environ.update(TRAIN_ENVIRONMENT)
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    study = Study(workload=Workload.from_train_loop(meet), name="simulated", max_retries=1)

    def trial(name: str, others: str = "", **shape: Any) -> Any:
        return study.trial({"own": name, "others": others, "folder": str(folder), **shape}, 0)

    specs = (
        trial("one", "two three"),
        trial("two", "one three"),
        trial("three", "one two"),  # needs a third machine, since no two run on one
        trial("wide", num_workers=2, cpus_per_worker=NUM_CPUS, nodes=2),
        trial("after", num_workers=1),
        trial("too wide", num_workers=4, cpus_per_worker=NUM_CPUS),
        trial("lost", num_workers=3, cpus_per_worker=NUM_CPUS, nodes=3),
    )
    # Without Ray's handlers of signals, which only the main thread may set: a node joins from another one.
    cluster = Cluster(initialize_head=True, head_node_args=node_args("m1"), shutdown_at_exit=False)
    cluster.add_node(**node_args("m2"))
    events: list[Event] = []
    joined: list[Any] = []

    def listen(event: Event) -> None:
        events.append(event)
        if not isinstance(event, TrialStarted):
            return
        if sum(isinstance(e, TrialStarted) for e in events) == 2:
            joined.append(cluster.add_node(**node_args("m3")))
        elif event.spec.point["own"] == "lost" and event.attempt == 1:
            while not (folder / "has begun").exists():
                time.sleep(0.02)
            cluster.remove_node(joined[0], allow_graceful=False)
            cluster.add_node(**node_args("m4"))

    with contextlib.ExitStack() as stack:
        stack.callback(cluster.shutdown)
        stack.enter_context(joined_cluster(cluster.address))
        settings = RunSettings(log_dir=folder / "logs")
        TuneRunner(settings, owns_cluster=False).run(study, specs, listen)
    results = {e.result.spec.point["own"]: e.result for e in events if isinstance(e, TrialEnded)}
    outcome = {
        "changes": [[e.num_nodes, e.num_slots] for e in events if isinstance(e, ClusterChanged)],
        "trials": {
            name: {
                "state": result.state.value,
                "attempts": result.attempts,
                "failure": result.failure.message if result.failure else None,
                "nodes": sorted(set(result.environment.get("node", ()))),
                "num_beside": result.environment.get("num_beside"),
                "num_sharing": result.environment.get("num_sharing"),
                "begun_s": result.started_at,
                "ended_s": result.started_at + (result.wall_s or 0.0),
            }
            for name, result in results.items()
        },
    }
    (folder / "told.json").write_text(json.dumps(outcome))


def node_args(machine: str) -> dict[str, Any]:
    return {"num_cpus": NUM_CPUS, "labels": {"raypar-machine": machine}, "include_dashboard": False}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
