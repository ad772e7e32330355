"""Verdict on whether a worker fits into the memory of a GPU, from the bytes that its training allocates."""

from __future__ import annotations

from enum import StrEnum

# Assumed, not measured: gaps in the allocator's blocks, and what torch does not allocate (CUDA's context, workspaces of
# cuBLAS and cuDNN, and NCCL's buffers).
MOST_ON_GPU = 1.15
LIBRARIES_BYTES = (0.3e9, 1.5e9)


class MemoryFit(StrEnum):
    """Verdict on a worker in a memory of some size."""

    YES = "fits"
    UNCERTAIN = "may not fit"
    NO = "does not fit"


def gpu_range_bytes(allocated_bytes: float) -> tuple[float, float]:
    """Return the least and the most that a worker takes of a GPU's memory if torch allocates this at its peak."""
    least, most = LIBRARIES_BYTES
    return allocated_bytes + least, allocated_bytes * MOST_ON_GPU + most


def fit_of(range_bytes: tuple[float, float], memory_bytes: float) -> MemoryFit:
    """Return whether a worker that takes a range of bytes fits into a memory."""
    least, most = range_bytes
    return MemoryFit.YES if most <= memory_bytes else MemoryFit.UNCERTAIN if least <= memory_bytes else MemoryFit.NO
