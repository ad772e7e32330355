"""Makespan of trials of mixed sizes on a cluster of four machines, against the lower bound.

The machines are Ray nodes on this one, with 2 CPUs each; trials sleep instead of computing. There are 20 points in 3
blocks, on 1, 2 and 4 workers (4 span two machines), of 30 to 90 s, in the order of a study. Each trial has its machines
to itself; with --sharing, as many run at a time as fit on the CPUs (max_concurrent_trials).

With --mixed the machines have 1 CPU each, and 8 blocks hold a trial of 10 s on each of 1, 2 and 4 machines: starts of
gangs take longer than trials, and every other trial needs all machines. Blocks may overlap (a trial may fill a machine
that an earlier block leaves idle), so the lower bound is the sum over machines, 140 s; block after block it is 160 s.

The lower bound is the sum of the trials' seconds times the CPUs they occupy, over the CPUs of the cluster, or the
longest trial. Seconds are the requested ones, so the start of ranks, gangs and the runner counts as loss; the rows
below break it down. The cluster runs nothing else (`raypar study --exclusive`). With --reserving gangs reserve their
CPUs in Ray, as on a shared cluster: a gang of 2 workers then leaves no room for others on its machine, and has to be
started again when it is needed again.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

import cloudpickle
import psutil
from common import Figure, begin, parser_for, preload_of, print_bar, print_row, progress, scratch, times

from raypar import Study, Workload, grid, units
from raypar.run.placement import num_machines
from raypar.run.runner import Event, GangReady, TrialEnded, TrialStarted
from raypar.study.trial import Placement, TrialSpec
from raypar.train.job import RunSettings

NUM_NODES, NUM_CPUS = 4, 2  # with --mixed, 1 CPU
NUM_POINTS = {1: 10, 2: 6, 4: 4}  # by number of workers
SECONDS = (30.0, 90.0)
NUM_REPEATS = 3
MIXED_NUM_WORKERS, MIXED_SECONDS, MIXED_NUM_REPEATS = (1, 2, 4), 10.0, 8
MAX_RATIO, MIXED_MAX_RATIO = 1.2, 1.5
SETTLE_S, IDLE_PERCENT = 60.0, 20.0


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--mixed", action="store_true", help="short trials on 1, 2 and 4 machines with 1 CPU each")
    parser.add_argument("--sharing", action="store_true", help="trials may share machines")
    parser.add_argument("--reserving", action="store_true", help="gangs reserve their CPUs in Ray")
    args = begin(parser)
    os.environ["RAY_AUTH_MODE"] = "disabled"
    from ray.cluster_utils import Cluster

    from raypar.run.cluster import TRAIN_ENVIRONMENT, joined_cluster
    from raypar.run.gang_pool import alive_nodes
    from raypar.run.pool import MACHINE_LABEL
    from raypar.run.tune import TuneRunner

    os.environ.update(TRAIN_ENVIRONMENT)
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    num_cpus, scale = 1 if args.mixed else NUM_CPUS, 0.1 if args.quick else 1.0
    study = Study(
        workload=Workload.from_train_loop(sleep, preload=("ray.train.torch",)),
        name="makespan",
        space={"num_workers": grid(*MIXED_NUM_WORKERS)} if args.mixed else {},
        num_repeats=MIXED_NUM_REPEATS if args.mixed else NUM_REPEATS,
        config={"seconds": scale * MIXED_SECONDS} if args.mixed else {},
        max_concurrent_trials=NUM_NODES * num_cpus if args.sharing else None,
    )
    specs = study.trials() if args.mixed else trials(study, scale)
    events: list[tuple[float, Event]] = []

    def listen(event: Event) -> None:
        events.append((time.perf_counter(), event))
        if isinstance(event, TrialEnded):
            num_ended = sum(isinstance(e, TrialEnded) for _, e in events)
            progress(f"{num_ended}/{len(specs)} after {events[-1][0] - begun_s:.0f} s")

    nodes = [{"num_cpus": num_cpus, "labels": {MACHINE_LABEL: f"machine{i + 1}"}} for i in range(NUM_NODES)]
    cluster = Cluster(initialize_head=True, head_node_args={**nodes[0], "include_dashboard": False})
    try:
        for node in nodes[1:]:
            cluster.add_node(**node)
        with scratch() as folder, joined_cluster(cluster.address):
            assert num_machines(alive_nodes()) == NUM_NODES
            settle()
            begun_s = time.perf_counter()
            settings = RunSettings(log_dir=folder, exclusive=not args.reserving, preload=preload_of(study))
            TuneRunner(settings, owns_cluster=False).run(study, specs, listen)
            ended_s = time.perf_counter()
    finally:
        cluster.shutdown()
    max_ratio = MIXED_MAX_RATIO if args.mixed else MAX_RATIO
    show(specs, events, begun_s, ended_s, num_cpus, max_ratio, is_sharing=args.sharing)


def settle() -> None:
    """Wait until new nodes have started their processes, as those of a running cluster have."""
    until_s = time.monotonic() + SETTLE_S
    while psutil.cpu_percent(2.0) > IDLE_PERCENT and time.monotonic() < until_s:
        pass


def sleep(config: dict[str, Any]) -> None:
    time.sleep(config["seconds"])


def trials(study: Study, scale: float) -> tuple[TrialSpec, ...]:
    """Return the trials in the order of `Study.trials`: by block, then by placement, in random order.

    Args:
        study: the study to run.
        scale: factor of the trials' seconds.
    """
    rng = random.Random(0)
    points = [
        {"num_workers": count, "seconds": scale * round(rng.uniform(*SECONDS), 1), "point": f"{count}/{i}"}
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
        rng.shuffle(groups)
        for group in groups:
            rng.shuffle(group)
            ordered += group
    return tuple(ordered)


def show(
    specs: tuple[TrialSpec, ...],
    events: list[tuple[float, Event]],
    begun_s: float,
    ended_s: float,
    num_cpus: int,
    max_ratio: float,
    *,
    is_sharing: bool,
) -> None:
    results = [event.result for _, event in events if isinstance(event, TrialEnded)]
    failed = [result for result in results if result.failure]
    assert len(results) == len(specs) and not failed, failed
    max_sharing = max(int(result.conditions.num_sharing) for result in results)
    max_beside = max(int(result.conditions.num_beside) for result in results)
    assert is_sharing or max_sharing == 0

    def cpus(spec: TrialSpec) -> int:
        num_machines = -(-spec.placement.num_cpus // num_cpus)
        return spec.placement.num_cpus if is_sharing else num_machines * num_cpus

    def bound(seconds: list[float], specs: Sequence[TrialSpec]) -> float:
        cpu_seconds = sum(s * cpus(spec) for s, spec in zip(seconds, specs, strict=True))
        return max(cpu_seconds / (NUM_NODES * num_cpus), *seconds)

    requested_s = [float(spec.config["seconds"]) for spec in specs]  # type: ignore[arg-type]
    bound_s = bound(requested_s, specs)
    wall_bound_s = bound([result.wall_s or 0.0 for result in results], [result.spec for result in results])
    first_s = min(at_s for at_s, event in events if isinstance(event, TrialStarted))
    starts = [event.seconds for _, event in events if isinstance(event, GangReady)]
    print_row("trials; seconds of each", f"{len(specs)}; {min(requested_s):.1f} … {max(requested_s):.1f}")
    print_row("lower bound", units.seconds(bound_s))
    print_row("makespan", units.seconds(ended_s - begun_s))
    print_bar("makespan / lower bound, everything included", (ended_s - begun_s) / bound_s, times, at_most=max_ratio)
    print_row("the same from the first trial's start", times((ended_s - first_s) / bound_s))
    print_row("the same, start of ranks counted as trial time", times((ended_s - first_s) / wall_bound_s))
    print_row("gangs started; seconds until ready", f"{len(starts)}; {Figure.of(starts).show(units.seconds)}")
    print_row("most trials at a time, most on one machine", f"{1 + max_beside}, {1 + max_sharing}")


if __name__ == "__main__":
    main()
