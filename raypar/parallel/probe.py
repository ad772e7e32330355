"""How long all-reduces take among the ranks of a process group, for a network's latency and bandwidth."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

# From what is latency alone to what a large bucket of gradients is.
SIZES_BYTES = (4, 4 * 2**10, 64 * 2**10, 2**20, 4 * 2**20, 16 * 2**20, 32 * 2**20)
NUM_REPEATS = 9
FLOAT_BYTES = 4


def all_reduce_times(
    device: torch.device, sizes_bytes: Sequence[int] = SIZES_BYTES, num_repeats: int = NUM_REPEATS
) -> Iterator[tuple[int, float]]:
    """Each size with the median seconds of an all-reduce of it; every rank calls it and gets the same.

    Of each repeat the slowest rank counts, from a barrier on. Two more are done first and not counted.

    Args:
        device: where the gradients would be.
        sizes_bytes: multiples of 4, rounded down.
        num_repeats: all-reduces of each size.
    """
    for size in sizes_bytes:
        values = torch.ones(max(1, size // FLOAT_BYTES), device=device)
        times_s = [_one(values) for _ in range(2 + num_repeats)][2:]
        slowest = torch.tensor(times_s, dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        yield values.numel() * FLOAT_BYTES, statistics.median(slowest.tolist())


def _one(values: torch.Tensor) -> float:
    _wait_for(values)
    dist.barrier()
    start_s = time.perf_counter()
    dist.all_reduce(values)
    _wait_for(values)
    return time.perf_counter() - start_s


def _wait_for(values: torch.Tensor) -> None:
    if values.device.type == "cuda":
        torch.cuda.synchronize(values.device)
