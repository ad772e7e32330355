"""Timing of all-reduces between workers on this machine, without a store."""

from __future__ import annotations

from pathlib import Path

from raypar.errors import RayparError
from raypar.predict.all_reduces import workload
from raypar.run.local import LocalRunner
from raypar.run.locks import Holder, leased_cores
from raypar.run.runner import Event, Listener, TrialEnded
from raypar.study.study import Study
from raypar.study.workload import Config
from raypar.train.affinity import host_cores, own_cores
from raypar.train.job import RunSettings

MAX_MIB = 32


def probe_all_reduces(
    num_workers: int, log_dir: Path, device: str = "cpu", notice: Listener = lambda _: None
) -> tuple[tuple[float, float], ...]:
    """Measure (bytes, seconds) of all-reduces of several sizes between workers with one core each, while no study runs.

    Args:
        num_workers: at least 2.
        log_dir: folder for the ranks' output.
        notice: called with the study that it waits for.

    Raises:
        RayparError: this machine has fewer cores, or a rank failed.
    """
    machine = host_cores()
    if num_workers > len(machine):  # the runner doesn't check this
        raise RayparError(
            f"the network between {num_workers} workers can't be measured on {len(machine)} cores",
            hint="set it: --network 100Gbit",
        )
    config: Config = {"num_workers": num_workers, "device": device, "max_mib": MAX_MIB}
    study = Study(workload=workload, config=config, name="probe", num_repeats=1)
    events: list[Event] = []
    me, settings = Holder.here("probe", ("raypar", "model", "predict")), RunSettings(log_dir=log_dir, isolation="fresh")
    with leased_cores(me, machine, notice), LocalRunner(settings, own_cores()) as runner:
        runner.run(study, [study.trial({}, 0)], events.append)
    (result,) = (event.result for event in events if isinstance(event, TrialEnded))
    if (failure := result.failure) is not None:
        raise RayparError(
            f"the network between {num_workers} workers can't be measured: {failure.message}",
            hint="set it: --network 100Gbit",
        )
    return tuple((report["num_bytes"], report["time_s"]) for report in result.reports)
