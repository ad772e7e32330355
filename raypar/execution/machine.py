"""Machine or cluster of an execution: joining and leasing it, measuring other load, and leasing the study itself."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import chain, product
from pathlib import Path

from raypar import units
from raypar.analysis.load import MAX_BUSY
from raypar.errors import ClusterError
from raypar.execution.options import Options
from raypar.execution.part import rivals
from raypar.execution.plan import ExecutionPlan, drawable, lacks_nodes
from raypar.gpus import visible_gpus, visible_only
from raypar.measure.cpu import CpuMonitor
from raypar.run.cluster import Cluster, joined_cluster, this_machine, wait_for_nodes
from raypar.run.locks import Holder, leased_cores, leased_gpus, one_execution
from raypar.run.placement import cores_of_trials, near_first
from raypar.run.runner import Listener, Notice
from raypar.run.study_lease import leased_study
from raypar.study.options import listed_cores
from raypar.study.part import StudyPart
from raypar.study.space import examples
from raypar.study.study import Study
from raypar.study.trial import TrialSpec
from raypar.track.client import lease_path, store_identity
from raypar.train.affinity import Core, cores_near_gpu, host_cores

PLACING = ("device", "num_workers")  # options that determine how many GPUs a trial has
OTHER_LOAD = "other processes use {} of the cores: times will be noisy; wait until idle"
MIN_LOAD_S, MAX_LOAD_S = 0.5, 5.0  # window for measuring other load


@contextlib.contextmanager
def alone(
    study: str, command: Sequence[str], tracking_uri: str, project_dir: Path, part: StudyPart | None = None
) -> Iterator[Holder]:
    """Keep other processes from running or changing a study, or a part of it, during the block."""
    me, whole = Holder.here(study, command), lease_path(study, tracking_uri, project_dir)
    named, mine = (me, whole) if part is None else (replace(me, study=f"{study} {part}"), part.lease_of(whole))
    with (
        one_execution(named, store_identity(tracking_uri)),
        leased_study(me, mine, partial(rivals, part, whole)),
    ):
        yield me


@contextlib.contextmanager
def leased_machine(plan: ExecutionPlan, me: Holder, notice: Listener, *, share: bool) -> Iterator[ExecutionPlan]:
    """Lease the cores and GPUs of a study and hide other GPUs from its processes. Yields the plan on them.

    A study on the CPU leases all cores. A study on GPUs leases those GPUs and uses their share of the cores. GPUs come
    first, because a study that waits for them must not block cores.
    """
    cores, mine = plan.cluster.cores or host_cores(), set[int]()
    widest, most = num_gpus(plan)
    with contextlib.ExitStack() as stack:
        if visible := visible_gpus() if widest else ():
            least = min(widest * (plan.study.max_concurrent_trials or 1), len(visible))
            gpus = stack.enter_context(leased_gpus(me, visible, least, max(least, most), notice, share=share))
            near = near_first(cores, {i: cores_near_gpu(i) for i in range(len(visible))}, len(cores) // len(visible))
            mine = {number for i, gpu in enumerate(visible) if gpu in gpus for number in near[i]}
            stack.enter_context(visible_only(gpus))
            node = {**plan.cluster.nodes[0], "GPU": len(gpus)}
            plan = replace(plan, cluster=replace(plan.cluster, nodes=(node,)))
        if not (visible and needs_only_gpus(plan)):
            stack.enter_context(leased_cores(me, cores, notice, share=share))
        elif fits_on(plan, mine):
            cores = tuple(core for core in cores if core.number in mine)
        yield within(plan, trial_cores(plan, cores))


def needs_only_gpus(plan: ExecutionPlan) -> bool:
    """Return whether every trial to run needs a GPU."""
    return all(spec.placement.device == "cuda" for spec in _to_place(plan))


def fits_on(plan: ExecutionPlan, cores: Collection[int]) -> bool:
    """Return whether every trial to run fits on these cores."""
    listed = chain.from_iterable(listed_cores(spec.config["cpu_affinity"]) or () for spec in _to_place(plan))
    return _num_widest(plan) <= len(cores) and set(cores).issuperset(listed)


def trial_cores(plan: ExecutionPlan, machine: Sequence[Core]) -> frozenset[int]:
    """Return the numbers of the cores for trials. raypar and Ray use the others.

    Args:
        machine: cores that the study may use; enough for its widest trial.
    """
    placed = {(spec.placement, spec.config["cpu_affinity"]) for spec in _to_place(plan)}
    return cores_of_trials(placed, machine, _num_widest(plan) * (plan.study.max_concurrent_trials or 1))


def within(plan: ExecutionPlan, cores: Collection[int]) -> ExecutionPlan:
    """Return the plan on these cores."""
    node = {**plan.cluster.nodes[0], "CPU": len(cores)}
    kept = tuple(core for core in plan.cluster.cores or () if core.number in cores)
    return replace(plan, cluster=replace(plan.cluster, nodes=(node,), cores=kept))


def _num_widest(plan: ExecutionPlan) -> int:
    """Return the cores of the widest trial to run, at most all. A search may draw more than the machine has."""
    return max((min(spec.placement.num_cpus, int(plan.cluster.num_cpus)) for spec in _to_place(plan)), default=0)


def _to_place(plan: ExecutionPlan) -> tuple[TrialSpec, ...]:
    # Until a study is settled, any point may get further trials.
    return plan.specs if plan.study.until else plan.missing or drawable(plan.study, plan.auto)


def num_gpus(plan: ExecutionPlan) -> tuple[int, int]:
    """Return how many GPUs the largest trial uses, and how many the gangs of all placements use together."""
    study = plan.study
    placements = {spec.placement for spec in (plan.specs if study.until else plan.missing)}
    if study.is_search:
        drawn = [[(key, value) for value in examples(study.space[key])] for key in PLACING if key in study.space]
        placements = {study.trial(dict(p), 0, auto=plan.auto).placement for p in product(*drawn)}
    counts = [placement.num_workers for placement in placements if placement.device == "cuda"]
    return max(counts, default=0), sum(counts)


@contextlib.contextmanager
def cluster_for(
    study: Study,
    options: Options,
    notice: Listener,
    *,
    join: Callable[[str], AbstractContextManager[Cluster]] = joined_cluster,
    wait: Callable[[Cluster, int, Callable[[str], object]], Cluster] = wait_for_nodes,
) -> Iterator[Cluster]:
    """Join the cluster of a study. Without an address, describe the private Ray to start.

    `ray up` returns before the workers have joined. If the study needs them, this waits for them.

    Raises:
        ClusterError: the cluster can't be joined, or has fewer nodes than requested.
    """
    if options.flags.address is None:
        yield this_machine()
        return
    with join(options.flags.address) as cluster:
        num_nodes, least = cluster.num_promised if lacks_nodes(study, cluster) else 0, options.flags.min_nodes or 0
        cluster = wait(cluster, max(num_nodes, least), lambda text: notice(Notice(text)))
        if len(cluster.nodes) < least:
            problem = f"--min-nodes {least}: the cluster has {units.counted(len(cluster.nodes), 'node')}"
            raise ClusterError(problem, hint="`ray status` on its head shows why; or ask for fewer")
        yield cluster


def other_load(monitor: CpuMonitor, elapsed_s: float, sleep: Callable[[float], object] = time.sleep) -> str:
    """Return the notice of other load that would disturb the trials; empty if there is little.

    Args:
        monitor: of the cores of this process, started `elapsed_s` ago; load of this process doesn't count.
    """
    if elapsed_s > MAX_LOAD_S:  # after a download, or after waiting for another study
        monitor.start()
        elapsed_s = 0.0
    sleep(max(0.0, MIN_LOAD_S - elapsed_s))
    monitor.stop()
    share = monitor.summary().get("foreign_cpu_share", 0.0)
    return OTHER_LOAD.format(units.percent(share)) if share > MAX_BUSY else ""
