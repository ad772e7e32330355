"""Timing of all-reduces between workers on this machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from raypar.errors import RayparError
from raypar.parallel.strategy import wait_for_device
from raypar.run.local import LocalRunner
from raypar.run.locks import Holder, leased_cores
from raypar.run.runner import Event, Listener, TrialEnded
from raypar.study.study import Study
from raypar.study.workload import Workload
from raypar.train.affinity import host_cores
from raypar.train.job import RunSettings

# From pure latency to a large bucket of gradients.
SIZES_BYTES = (4, 4 * 2**10, 64 * 2**10, 2**20, 4 * 2**20, 16 * 2**20, 32 * 2**20)
NUM_WARMUPS, NUM_REPEATS = 2, 9
FLOAT_BYTES = 4


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
    workload = Workload.from_train_loop(_loop, name="probe", preload=("ray.train.torch",))
    study = Study(workload=workload, config={"num_workers": num_workers, "device": device}, name="probe", num_repeats=1)
    events: list[Event] = []
    me, settings = Holder.here("probe", ("raypar", "model", "predict")), RunSettings(log_dir=log_dir, isolation="fresh")
    with leased_cores(me, machine, notice), LocalRunner(settings, machine) as runner:
        runner.run(study, [study.trial({}, 0)], events.append)
    (result,) = (event.result for event in events if isinstance(event, TrialEnded))
    if (failure := result.failure) is not None:
        raise RayparError(
            f"the network between {num_workers} workers can't be measured: {failure.message}",
            hint="set it: --network 100Gbit",
        )
    return tuple((report["num_bytes"], report["time_s"]) for report in result.reports)


def _loop(_: Mapping[str, Any]) -> None:
    """Report the median seconds of an all-reduce for each size; of each repeat, the slowest rank counts."""
    import ray.train.torch

    device = ray.train.torch.get_device()
    for size in SIZES_BYTES:
        values = torch.ones(size // FLOAT_BYTES, device=device)
        times_s = [_all_reduce_s(values) for _ in range(NUM_WARMUPS + NUM_REPEATS)][NUM_WARMUPS:]
        slowest = torch.tensor(times_s, dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        ray.train.report({"num_bytes": size, "time_s": statistics.median(slowest.tolist())})


def _all_reduce_s(values: torch.Tensor) -> float:
    """Return the seconds of an all-reduce after a barrier."""
    wait_for_device(values.device)
    dist.barrier()
    start_s = time.perf_counter()
    dist.all_reduce(values)
    wait_for_device(values.device)
    return time.perf_counter() - start_s
