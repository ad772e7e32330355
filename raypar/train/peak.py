"""How fast this machine multiplies matrices: the peak that a training's least time is reckoned with."""

from __future__ import annotations

import time

import torch

SIZES = {"cpu": (256, 512, 1024, 2048), "other": (2048, 4096, 8192)}  # rows and columns
BUDGET_S = 1.0  # for all sizes together
MIN_RUNS = 3


def peak_flops(device: torch.device, dtype: torch.dtype, num_threads: int) -> float:
    """The most FLOP/s that products of two square matrices reach: the best run of the best size.

    A product of n x n matrices has 2 n^3 FLOP. It takes about a second: a size that would not fit into what is left
    of it is left out. What else runs on the machine lowers the figure, which is why the best run counts.

    Args:
        num_threads: of torch on a CPU; torch's setting is put back afterwards.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        return _peak(device, dtype, SIZES["cpu" if device.type == "cpu" else "other"])
    finally:
        torch.set_num_threads(before)


def _peak(device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...]) -> float:
    best = 0.0
    left_s = BUDGET_S
    for number, size in enumerate(sizes):
        flop = 2 * size**3
        if best and MIN_RUNS * flop / best > left_s:
            break
        share_s = left_s / (len(sizes) - number)
        begin_s = time.perf_counter()
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        out = a @ b  # not timed: the first run of a size picks its kernel
        _wait(device)
        num_runs = 0
        while num_runs < MIN_RUNS or time.perf_counter() - begin_s < share_s:
            started_s = time.perf_counter()
            torch.mm(a, b, out=out)
            _wait(device)
            best = max(best, flop / (time.perf_counter() - started_s))
            num_runs += 1
        left_s -= time.perf_counter() - begin_s
    return best


def _wait(device: torch.device) -> None:
    """Until the device has done what it was given; a CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
