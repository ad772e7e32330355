"""Preparation of a run: settings, fork servers on this machine, check of data and model, and the runner."""

from __future__ import annotations

import contextlib
import importlib
import os
import statistics
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from raypar.errors import WorkloadError
from raypar.execution.options import Options
from raypar.execution.plan import ExecutionPlan
from raypar.execution.revisions import pickle_by_value, preload_of
from raypar.files import make_private_folder
from raypar.masking import secret_variables
from raypar.run.private_ray import private_ray
from raypar.run.ranks import ForkAgent, check_workload
from raypar.run.runner import Runner
from raypar.run.time_limit import end_of_time
from raypar.run.watch import watch_of_cluster
from raypar.scratch import LOGS_PREFIX
from raypar.study.loader import LoadedStudy
from raypar.study.trial import TrialResult
from raypar.study.workload import CommandWorkload, Workload
from raypar.track.recorder import Recorder
from raypar.track.system_metrics import system_sampled
from raypar.train.affinity import host_cores
from raypar.train.job import CheckJob, RunSettings

# Variables of the driver's environment that a trial's processes need: on every node, and only on this machine.
PASSED_ON, PASSED_ON_HERE = ("RAYPAR_DATA_DIR",), ("XDG_CACHE_HOME", "HOME")
# Prefixes of variables that configure the network between ranks: NCCL, gloo, and libfabric for EFA.
NETWORK_VARIABLES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "FI_")
CHECK_LOG = "check.log"


def network_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that configure the network between ranks."""
    return {name: value for name, value in environment.items() if name.startswith(NETWORK_VARIABLES)}


def rank_environment(environment: Mapping[str, str], *, is_own: bool) -> dict[str, str]:
    """Return the variables of the driver's environment that the ranks get.

    Args:
        is_own: the ranks run only on this machine. Other nodes have different home folders.
    """
    names = [*PASSED_ON, *network_environment(environment)]
    if is_own:
        # A private Ray does not inherit secrets, which a trial's code may need to fetch data. Never send them to
        # shared machines.
        names += [*PASSED_ON_HERE, *secret_variables(environment)]
    return {name: environment[name] for name in names if name in environment}


@dataclass(frozen=True)
class Prepared:
    """Settings of a run, and its fork servers on this machine by the label of their revision."""

    settings: RunSettings
    servers: Mapping[str, ForkAgent]


def walls_s(results: Sequence[TrialResult]) -> dict[str, float]:
    """Return the median seconds of the complete trials of each point."""
    by_point: defaultdict[str, list[float]] = defaultdict(list)
    for result in results:
        if result.is_complete and result.wall_s is not None:
            by_point[result.spec.point_name].append(result.wall_s)
    return {point: statistics.median(seconds) for point, seconds in by_point.items()}


@contextlib.contextmanager
def prepared(
    loaded: LoadedStudy, options: Options, plan: ExecutionPlan, log_dir: Path, meanwhile: Callable[[], object]
) -> Iterator[Prepared]:
    """Start the fork servers on this machine, and check data and models in one.

    Args:
        meanwhile: called while the servers start.

    Raises:
        WorkloadError: the data or models have mistakes.
    """
    pickle_by_value(loaded)
    settings = RunSettings(
        # Other nodes don't have this project's folder, but each has one for temporary files.
        log_dir=log_dir if plan.cluster.is_own else Path(tempfile.gettempdir()) / f"{LOGS_PREFIX}{log_dir.name}",
        isolation=options.flags.isolation,
        environment=rank_environment(os.environ, is_own=plan.cluster.is_own),
        sys_path=(str(loaded.path.parent),),
        preload=preload_of(loaded),
        trial_timeout_s=options.flags.trial_timeout,
        auto=plan.auto,
        driver_dir=None if plan.cluster.is_own else log_dir.absolute(),
        profiling=options.profiling,
        exclusive=options.flags.exclusive,
        sources={} if plan.cluster.is_own else loaded.sources,
        revisions=options.revisions,
        sampling=system_sampled if options.flags.system_metrics else None,
        is_command=isinstance(loaded.study.workload, CommandWorkload),
        ends_at=end_of_time(),
        expected_s=walls_s(plan.done),
        metric=loaded.study.judged_by.name,
    )
    with contextlib.ExitStack() as stack:
        servers: dict[str, ForkAgent] = {}
        if options.flags.isolation == "warm" and (plan.cluster.is_own or not options.with_ray):
            for revision in settings.revisions or (settings.revision(),):
                servers[revision.label] = stack.enter_context(contextlib.closing(ForkAgent(revision)))
        if options.with_ray:  # while the servers import
            threading.Thread(target=_import_ray, daemon=True).start()
        meanwhile()
        _check_workload(plan, settings, servers, log_dir)
        yield Prepared(settings, servers)


def _import_ray() -> None:
    """Import Ray, then modules that use it. Two threads that import Ray at once may see it half initialised."""
    importlib.import_module("ray")
    importlib.import_module("raypar.run.tune")


def _check_workload(
    plan: ExecutionPlan, settings: RunSettings, servers: Mapping[str, ForkAgent], log_dir: Path
) -> None:
    """Raise WorkloadError if the data or models of the trials to run have mistakes.

    This does not check train loops, commands, two versions of the code, and runs without a fork server.
    """
    workload = plan.study.workload
    if not isinstance(workload, Workload) or settings.revisions or not servers:
        return
    import cloudpickle

    points = {spec.point_name: spec.config for spec in plan.to_check}
    job = CheckJob(
        cloudpickle.dumps(workload), tuple(points.items()), plan.study.seed, settings.sys_path, settings.environment
    )
    log_dir.mkdir(parents=True, exist_ok=True)
    if mistakes := check_workload(servers[""].address(), job, log_dir / CHECK_LOG):
        raise WorkloadError.of(workload.name, mistakes)


@contextlib.contextmanager
def runner_for(ready: Prepared, options: Options, plan: ExecutionPlan, recorder: Recorder) -> Iterator[Runner]:
    """Start the runner of the trials, and stop it afterwards.

    Args:
        recorder: connects to the store meanwhile.
    """
    settings = ready.settings
    if not options.with_ray:
        from raypar.run.local import LocalRunner

        recorder.connect()
        with LocalRunner(settings, plan.cluster.cores, ready.servers) as local:
            yield local
        return
    with contextlib.ExitStack() as stack:
        _import_ray()
        own_ray = None
        if plan.cluster.is_own:
            own_ray = stack.enter_context(private_ray(plan.cluster))
        else:
            make_private_folder(settings.log_dir)
            stack.enter_context(watch_of_cluster().watching())
        recorder.connect()  # not earlier: two threads that import the same modules may see them half initialised
        from raypar.run.tune import Ahead, TuneRunner

        addresses = {label: server.address() for label, server in ready.servers.items()}
        yield TuneRunner(
            settings,
            owns_cluster=plan.cluster.is_own,
            fork_addresses=addresses,
            cores=plan.cluster.cores,
            own_ray=own_ray,
            ahead=Ahead(len(host_cores()), recorder.flush) if plan.cluster.is_own else None,
        )
