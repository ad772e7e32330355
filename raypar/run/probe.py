"""All-reduces between workers of this machine, timed: ranks are forked, measure, and are gone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raypar.errors import RayparError
from raypar.run.local import LocalRunner
from raypar.run.runner import Event, RunSettings, TrialEnded
from raypar.study.study import Study
from raypar.study.trial import TrialResult
from raypar.study.workload import Workload
from raypar.train.affinity import allowed_cores


def probe_all_reduces(num_workers: int, log_dir: Path, device: str = "cpu") -> tuple[tuple[float, float], ...]:
    """(bytes, seconds) of all-reduces of several sizes among workers with a core each.

    Args:
        num_workers: at least 2.
        log_dir: where the ranks' output goes.
        device: where the gradients would be.

    Raises:
        RayparError: this machine has not as many cores, or a rank failed.
    """
    num_cores = len(allowed_cores())
    if num_workers > num_cores:  # the runner takes as many ranks as it is given
        raise RayparError(
            f"the network between {num_workers} workers can't be measured on {num_cores} cores",
            hint="give it: --network 100Gbit",
        )
    workload = Workload.from_train_loop(_loop, name="probe", preload=("ray.train.torch",))
    study = Study(workload=workload, config={"num_workers": num_workers, "device": device}, name="probe", num_repeats=1)
    ended: list[TrialResult] = []

    def listen(event: Event) -> None:
        if isinstance(event, TrialEnded):
            ended.append(event.result)

    with LocalRunner(RunSettings(log_dir=log_dir, isolation="fresh")) as runner:
        runner.run(study, [study.trial({}, 0)], listen)
    failure = ended[0].failure
    if failure is not None:
        raise RayparError(
            f"the network between {num_workers} workers can't be measured: {failure.message}",
            hint="give it: --network 100Gbit",
        )
    return tuple((report["num_bytes"], report["time_s"]) for report in ended[0].reports)


def _loop(_: Mapping[str, Any]) -> None:
    import ray.train.torch

    from raypar.parallel.probe import all_reduce_times

    for num_bytes, time_s in all_reduce_times(ray.train.torch.get_device()):
        ray.train.report({"num_bytes": num_bytes, "time_s": time_s})
