"""Peak memory of a rank that has not run: its parts, the range in which it lies, and whether it fits."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from raypar.errors import RayparError

# Upper ends of the ranges. Those on CPUs were measured (benchmarks/memory_predicted.py), those on a GPU are assumed:
# gaps in the allocator's blocks, and what torch does not allocate: CUDA's context, workspaces of cuBLAS and cuDNN, and
# NCCL's buffers.
MOST_ALONE, MOST_IN_GANG, MOST_ON_GPU = 1.02, 1.1, 1.15
LIBRARIES_BYTES = (0.3e9, 1.5e9)


class NotPredictable(RayparError):
    """Memory that can't be predicted."""


class MemoryFit(StrEnum):
    """Verdict on a rank in a memory of some size."""

    YES = "fits"
    UNCERTAIN = "may not fit"
    NO = "does not fit"


@dataclass(frozen=True)
class PeakMemory:
    """Bytes of a rank's memory when it needs the most, by what they hold.

    Attributes:
        parameters: parameters and buffers of the model, as far as this rank has them.
        gradients: gradients, and the buckets that send them.
        optimizer: the optimizer's state, and what its step needs.
        activations: what the forward pass keeps for the backward pass.
        temporary: everything else: results in use, gathered weights, messages.
        inputs: batches, before and after the data's transform, and the order of the epoch.
        host_copy: complete copy of the model in host memory, which strategies that split the model keep.
        uncertain: bytes that may be needed as well, on CPUs: messages that wait for a peer, scratch memory of oneDNN
            for an LSTM's backward pass, and what the data of a script take.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    temporary: int = 0
    inputs: int = 0
    host_copy: int = 0
    uncertain: int = 0

    @property
    def total(self) -> int:
        """Bytes of all parts that are certainly needed."""
        parts: dict[str, int] = vars(self)
        return sum(parts.values()) - self.uncertain

    def range_bytes(self, num_workers: int, *, on_gpu: bool) -> tuple[float, float]:
        """Return the least and the most that a rank takes: of a GPU's memory, or of what torch allocates on a CPU."""
        if not on_gpu:
            return self.total, (self.total + self.uncertain) * (MOST_ALONE if num_workers == 1 else MOST_IN_GANG)
        allocated = self.total - self.host_copy
        return allocated + LIBRARIES_BYTES[0], allocated * MOST_ON_GPU + LIBRARIES_BYTES[1]


def fit_of(range_bytes: tuple[float, float], memory_bytes: float) -> MemoryFit:
    """Return whether a rank fits into a memory."""
    least, most = range_bytes
    return MemoryFit.YES if most <= memory_bytes else MemoryFit.UNCERTAIN if least <= memory_bytes else MemoryFit.NO
