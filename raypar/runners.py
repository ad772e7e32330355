"""Which runner a study gets, and what has to be started for it."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from raypar.masking import secret_variables
from raypar.options import Options
from raypar.planning import Plan
from raypar.run.cluster import watch_of_joined
from raypar.run.private_ray import private_ray
from raypar.run.ranks import ForkServer
from raypar.run.runner import Runner, RunSettings
from raypar.study.loader import LoadedStudy

CLUSTER_LOGS = Path("/tmp/raypar-logs")  # on every node of a cluster that is not our own
# What a trial's processes have to see of the driver's environment.
PASSED_ON = ("RAYPAR_DATA_DIR", "XDG_CACHE_HOME", "HOME")


@contextlib.contextmanager
def runner_for(loaded: LoadedStudy, options: Options, plan: Plan, log_dir: Path) -> Iterator[Runner]:
    """What runs the trials, ready to; with all that had to be started for it, and is stopped after."""
    import cloudpickle

    # The study's functions travel by value: the ranks don't import the study file.
    for name in (loaded.module_name, *loaded.local_modules):
        cloudpickle.register_pickle_by_value(sys.modules[name])
    settings = RunSettings(
        # Other nodes don't have this project's folder.
        log_dir=log_dir if plan.cluster.is_own else CLUSTER_LOGS / log_dir.name,
        isolation=options.isolation,
        environment={key: os.environ[key] for key in _passed_on(plan) if key in os.environ},
        sys_path=(str(loaded.path.parent),),
        preload=tuple(dict.fromkeys((*loaded.study.workload.preload, *loaded.imported_modules))),
        trial_timeout_s=options.trial_timeout_s,
        default_device=plan.cluster.default_device,
        ships_artifacts=not plan.cluster.is_own,
        num_profiled_steps=options.num_profiled_steps,
        only_profiles=options.only_profiles,
        exclusive=options.exclusive,
    )
    if not options.with_ray:
        from raypar.run.local import LocalRunner

        with LocalRunner(settings) as local:
            yield local
        return
    with contextlib.ExitStack() as stack:
        fork_address = ""
        if plan.cluster.is_own:
            if options.isolation == "warm":
                # Before Ray, so that its imports run while Ray starts.
                server = stack.enter_context(contextlib.closing(ForkServer(settings.preload, settings.sys_path)))
                fork_address = server.address
            # Ray's start is mostly waiting; Tune's import is not.
            importing = threading.Thread(target=_import_tuner)
            importing.start()
            stack.enter_context(private_ray(plan.cluster, plan.trial_cores))
            importing.join()
        else:
            stack.enter_context(watch_of_joined().watching())
        from raypar.run.tune import TuneRunner

        yield TuneRunner(settings, owns_cluster=plan.cluster.is_own, fork_address=fork_address)


def _passed_on(plan: Plan) -> Iterator[str]:
    """The variables that a trial's processes get from here. A Ray of our own has not inherited secrets; a trial's code
    may need them, to fetch its data. To machines that others share none is sent."""
    yield from PASSED_ON
    if plan.cluster.is_own:
        yield from secret_variables(os.environ)


def _import_tuner() -> None:
    import raypar.run.tune  # noqa: F401
