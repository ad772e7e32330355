"""Ranks without a runner, possibly more than there are cores, for tests of their losses.

A server without threads forks them. Forks of the test's process, which has threads of Ray and torch, might hang.
"""

import pickle
import tempfile
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path

import cloudpickle
import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

from raypar.parallel.strategy import DistContext
from raypar.study.options import resolve
from raypar.train.loop import train

TIMEOUT = timedelta(seconds=240)


class Reports(list[dict[str, float]]):
    """A channel that keeps all reports."""

    def report(self, metrics):
        self.append(dict(metrics))
        return True


def trained(workload, config, num_ranks=1):
    """Return every rank's reports of a training."""
    return on_ranks(lambda context: reports_of(workload, config, context), num_ranks)


def reports_of(workload, config, context):
    """Return this rank's reports of a training."""
    reports = Reports()
    train(workload, resolve(workload, {**config, "num_workers": context.world_size}), 0, context, reports, start_s=0.0)
    return reports


def on_ranks(do, num_ranks):
    """Return the value of `do`, which may be a closure, on each of `num_ranks` ranks; raise the first error."""
    get_context("forkserver").set_forkserver_preload(["torch.distributed.fsdp", "raypar.train.loop"])
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_rank, (cloudpickle.dumps(do), num_ranks, Path(folder)), num_ranks, start_method="forkserver")
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(num_ranks)]


def _rank(rank, do, num_ranks, folder):
    torch.set_num_threads(1)
    if num_ranks > 1:
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks, timeout=TIMEOUT)
    value = cloudpickle.loads(do)(DistContext(rank, num_ranks, torch.device("cpu")))
    (folder / str(rank)).write_bytes(cloudpickle.dumps(value))
    if num_ranks > 1:
        dist.barrier()
        dist.destroy_process_group()
