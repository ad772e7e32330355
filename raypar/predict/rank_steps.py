"""Time and messages of a rank's step, from real steps in a process group whose messages go nowhere.

A rank's computation takes the same time whatever its peers send, so one process measures the ranks of any layout, one
at a time. What it would send is counted, and costs what a network model says.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from raypar.parallel.hybrid import DEFAULT_BUCKET_MB
from raypar.parallel.strategy import wait_for_device
from raypar.predict.layout import Message, RankStep
from raypar.predict.shapes import Alone, Buckets, group, numerics_and_batches, prepared_step
from raypar.study.strategy import pipeline_size, tensor_size
from raypar.study.workload import Config, Data, Workload
from raypar.train.data import mapped

NUM_WARMUP, NUM_STEPS, MAX_S = 2, 7, 2.0
# Names of collectives in the operators of torch's two interfaces, and which of a message's sizes counts.
KINDS = {
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "broadcast": "broadcast",
    "recv": "recv",
}


class Messages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the messages of what runs in it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent: list[Message] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.rpartition("::")[2].strip("_")
            kind = next((kind for start, kind in KINDS.items() if name.startswith(start)), "")
            sizes = [leaf.nbytes for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
            if kind and sizes:
                self.sent.append(Message(kind, max(sizes), _num_members(args)))
        return result


def _num_members(args: Any) -> int:
    """Return the number of ranks of the group that an operator's arguments name."""
    for each in reversed(args):
        if hasattr(each, "size") and not isinstance(each, Tensor):
            return int(each.size())
        if isinstance(each, str):
            try:
                return int(torch._C._distributed_c10d._resolve_process_group(each).size())  # type: ignore[arg-type]
            except (RuntimeError, ValueError, LookupError):  # the name of a reduction
                continue
    return torch.distributed.get_world_size()


def rank_steps(workload: Workload, config: Config, seed: int, data: Data) -> tuple[RankStep, ...]:
    """Return the step of a rank; with a pipeline, that of a rank of each stage."""
    num_threads = torch.get_num_threads()
    torch.set_flush_denormal(True)  # weights that nobody sends may be any bytes
    torch.set_num_threads(config["num_threads"])
    try:
        ranks = [stage * tensor_size(config) for stage in range(pipeline_size(config))]
        return tuple(_of_rank(workload, config, seed, rank, data) for rank in ranks)
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(num_threads)


def _of_rank(workload: Workload, config: Config, seed: int, rank: int, data: Data) -> RankStep:
    device = torch.device(config["device"], 0) if config["device"] == "cuda" else torch.device(config["device"])
    context = Alone(rank, config["num_workers"], device)
    numerics, batches = numerics_and_batches(config, seed, context, data)
    batch = next(batches.full(1))

    def moved(tree: Any) -> Any:
        return mapped(lambda tensor: tensor.to(device), tree)

    torch.manual_seed(seed)
    unsent = mock.patch.object(torch.nn.parallel, "DistributedDataParallel", Buckets)  # whose C++ needs a real group
    with unsent, group(context), prepared_step(workload, config, context, numerics, batch, moved) as made:
        strategy, stepper, of_batch, _ = made
        strategy.module.train()
        for _ in range(NUM_WARMUP):
            stepper.step(of_batch)
        with Messages() as messages:
            stepper.step(of_batch)
        sent = (*messages.sent, *_gradients(strategy.module, config))
        return RankStep(statistics.median(_times_s(stepper, of_batch, device)), sent)


def _gradients(module: Any, config: Config) -> Iterator[Message]:
    """Yield the all-reduces of DistributedDataParallel: a bucket each."""
    if isinstance(module, Buckets):
        num_bytes = sum(p.nbytes for p in module.parameters() if p.requires_grad)
        size_mb = DEFAULT_BUCKET_MB if config["bucket_mb"] is None else config["bucket_mb"]
        num = max(1, math.ceil(num_bytes / max(size_mb * 2**20, 1)))
        if not size_mb:
            num = sum(p.requires_grad for p in module.parameters())
        yield from (Message("all_reduce", num_bytes // num, config["num_workers"]) for _ in range(num))


def _times_s(stepper: Any, batch: Any, device: torch.device) -> Iterator[float]:
    begun_s = time.perf_counter()
    for _ in range(NUM_STEPS):
        wait_for_device(device)
        start_s = time.perf_counter()
        stepper.step(batch)
        wait_for_device(device)
        yield time.perf_counter() - start_s
        if time.perf_counter() - begun_s > MAX_S:
            return
