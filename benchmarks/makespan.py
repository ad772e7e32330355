"""How near to the shortest possible a study of sixty trials of mixed sizes comes on a cluster of four machines.

The machines are Ray nodes on this one, with 2 CPUs each: trials sleep, they don't compute. There are 20 points in 3
blocks, on 1, 2 and 4 workers (those over two machines), of 30 to 90 s, in the order of a study. Each has its machines
to itself; with --sharing, as many run at a time as there are CPUs for (max_concurrent_trials).

No schedule is shorter than the bound: the trials' seconds times the CPUs that they keep from others, over the CPUs of
the cluster, or the longest trial. Trial-seconds are those asked for: the start of ranks, of gangs and of the runner
count as loss. What the loss is made of is told besides. The cluster is nobody else's (`raypar study --exclusive`). With
--reserving gangs reserve their CPUs, as where others use the cluster too: one of 2 workers leaves no room for others on
its machine, and is started anew when it is needed again.
"""

from __future__ import annotations

import os
import random
import sys
import time
from typing import Any

import cloudpickle
import psutil
from common import Figure, begin, judge, parser_for, progress, scratch, tell, times

from raypar import Study, Workload, units
from raypar.run.placement import num_machines
from raypar.run.runner import Event, GangReady, TrialEnded, TrialStarted
from raypar.study.trial import Placement, TrialSpec
from raypar.train.job import RunSettings

NUM_NODES, NUM_CPUS = 4, 2
NUM_POINTS = {1: 10, 2: 6, 4: 4}  # by number of workers
SECONDS = (30.0, 90.0)
NUM_REPEATS = 3
MAX_RATIO = 1.2
SETTLE_S, IDLE_PERCENT = 60.0, 20.0


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--sharing", action="store_true", help="trials may share machines")
    parser.add_argument("--reserving", action="store_true", help="gangs reserve their CPUs in Ray")
    args = begin(parser)
    os.environ["RAY_AUTH_MODE"] = "disabled"
    from ray.cluster_utils import Cluster

    from raypar.run.cluster import TRAIN_ENVIRONMENT, joined_cluster
    from raypar.run.gang_pool import MACHINE_LABEL, alive_nodes
    from raypar.run.tune import TuneRunner

    os.environ.update(TRAIN_ENVIRONMENT)
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    study = Study(
        workload=Workload.from_train_loop(sleep, preload=("ray.train.torch",)),
        name="makespan",
        max_concurrent_trials=NUM_NODES * NUM_CPUS if args.sharing else None,
    )
    specs = trials(study, scale=0.1 if args.quick else 1.0)
    heard: list[tuple[float, Event]] = []

    def listen(event: Event) -> None:
        heard.append((time.perf_counter(), event))
        if isinstance(event, TrialEnded):
            num_ended = sum(isinstance(e, TrialEnded) for _, e in heard)
            progress(f"{num_ended}/{len(specs)} after {heard[-1][0] - begun_s:.0f} s")

    nodes = [{"num_cpus": NUM_CPUS, "labels": {MACHINE_LABEL: f"machine{i + 1}"}} for i in range(NUM_NODES)]
    cluster = Cluster(initialize_head=True, head_node_args={**nodes[0], "include_dashboard": False})
    try:
        for node in nodes[1:]:
            cluster.add_node(**node)
        with scratch() as folder, joined_cluster(cluster.address):
            assert num_machines(alive_nodes()) == NUM_NODES
            settle()
            begun_s = time.perf_counter()
            settings = RunSettings(log_dir=folder, exclusive=not args.reserving, preload=study.workload.preload)
            TuneRunner(settings, owns_cluster=False).run(study, specs, listen)
            ended_s = time.perf_counter()
    finally:
        cluster.shutdown()
    show(specs, heard, begun_s, ended_s, args.sharing)


def settle() -> None:
    """Wait until nodes that have just joined have started what serves them: a cluster that is there has."""
    until_s = time.monotonic() + SETTLE_S
    while psutil.cpu_percent(2.0) > IDLE_PERCENT and time.monotonic() < until_s:
        pass


def sleep(config: dict[str, Any]) -> None:
    time.sleep(config["seconds"])


def trials(study: Study, scale: float) -> tuple[TrialSpec, ...]:
    """As `Study.trials` orders them: block by block, in a block the placements in random order."""
    draw = random.Random(0)
    points = [
        {"num_workers": count, "seconds": scale * round(draw.uniform(*SECONDS), 1), "point": f"{count}/{i}"}
        for count, num_points in NUM_POINTS.items()
        for i in range(num_points)
    ]
    ordered: list[TrialSpec] = []
    for repeat in range(NUM_REPEATS):
        by_placement: dict[Placement, list[TrialSpec]] = {}
        for point in points:
            spec = study.trial(point, repeat)
            by_placement.setdefault(spec.placement, []).append(spec)
        groups = list(by_placement.values())
        draw.shuffle(groups)
        for group in groups:
            draw.shuffle(group)
            ordered += group
    return tuple(ordered)


def show(
    specs: tuple[TrialSpec, ...], heard: list[tuple[float, Event]], begun_s: float, ended_s: float, sharing: bool
) -> None:
    results = [event.result for _, event in heard if isinstance(event, TrialEnded)]
    failed = [result for result in results if result.failure]
    assert len(results) == len(specs) and not failed, failed
    most = max(result.environment["num_sharing"] for result in results)
    assert sharing or most == 0

    def cpus(spec: TrialSpec) -> int:
        num_machines = -(-spec.placement.num_cpus // NUM_CPUS)
        return spec.placement.num_cpus if sharing else num_machines * NUM_CPUS

    asked = [float(spec.config["seconds"]) for spec in specs]  # type: ignore[arg-type]
    total = NUM_NODES * NUM_CPUS
    bound_s = max(sum(s * cpus(spec) for s, spec in zip(asked, specs, strict=True)) / total, max(asked))
    walls = [result.wall_s or 0.0 for result in results]
    wall_bound_s = max(sum(s * cpus(r.spec) for s, r in zip(walls, results, strict=True)) / total, max(walls))
    first_s = min(when_s for when_s, event in heard if isinstance(event, TrialStarted))
    starts = [event.seconds for _, event in heard if isinstance(event, GangReady)]
    tell("trials, of seconds", f"{len(specs)}, {min(asked):.1f} … {max(asked):.1f}")
    tell("lower bound", units.seconds(bound_s))
    tell("makespan", units.seconds(ended_s - begun_s))
    judge(
        "makespan / lower bound, everything in it", Figure.of([(ended_s - begun_s) / bound_s]), times, at_most=MAX_RATIO
    )
    tell("the same from the first trial's start", times((ended_s - first_s) / bound_s))
    tell("the same, ranks' start counted as trials' time", times((ended_s - first_s) / wall_bound_s))
    tell("gangs started; seconds until ready", f"{len(starts)}; {Figure.of(starts).show(units.seconds)}")
    tell("most trials at a time, most on one machine", f"{1 + most_beside(results)}, {1 + most}")


def most_beside(results: list[Any]) -> int:
    return max(int(result.environment["num_beside"]) for result in results)


if __name__ == "__main__":
    main()
