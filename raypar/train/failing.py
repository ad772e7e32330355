"""What kind of failure an exception of a rank is: the code's own, memory that ran out, or somebody else's end."""

from __future__ import annotations

import re

from raypar.study.trial import FailureKind

# How torch's collectives say that another rank is gone: gloo in a RuntimeError, NCCL and the store by type.
_LOST = re.compile(r"gloo.*(Connection (closed|reset) by peer|Broken pipe|Connection refused)", re.DOTALL)
_LOST_TYPES = ("DistBackendError", "DistNetworkError", "DistStoreError")
_LOADER_DIED = re.compile(r"DataLoader worker .*(is killed by signal|exited unexpectedly)", re.DOTALL)
_NO_MEMORY = re.compile(r"can't allocate memory|Cannot allocate memory|out of memory", re.IGNORECASE)


def failure_kind(error: BaseException) -> FailureKind:
    """The kind of what a rank raised: ERROR unless it is known to be something else."""
    name, text = type(error).__name__, str(error)
    if isinstance(error, MemoryError) or name == "OutOfMemoryError":
        return FailureKind.OUT_OF_MEMORY
    if isinstance(error, (RuntimeError, OSError)) and _NO_MEMORY.search(text):
        return FailureKind.OUT_OF_MEMORY
    if name in _LOST_TYPES or (isinstance(error, RuntimeError) and _LOST.search(text)):
        return FailureKind.PEER_LOST
    if isinstance(error, RuntimeError) and _LOADER_DIED.search(text):
        return FailureKind.CRASH
    return FailureKind.ERROR
