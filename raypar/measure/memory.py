"""Memory of a rank: the peak that its training allocates, and the peak that it takes from the machine or the GPU.

A rank keeps the memory that it frees (`raypar.run.ranks`) and can't always reuse it. Some models take twice as much
from the machine as they need, so both are measured. On a GPU, torch counts all allocations. On a CPU, its profiler
counts them while the model is built and for two warm-up steps, outside the timed region. The data set and memory that
libraries allocate themselves are not included.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from raypar.errors import DoesNotFit
from raypar.measure.allocations import allocations
from raypar.units import size

NUM_COUNTED_STEPS = 2  # the second one starts with the optimizer's state
MAX_UNCOUNTED_BYTES = 2e9  # contexts, libraries and the driver, which torch does not count
TOO_LARGE = "needs {} of memory on a worker, more than max_memory={}"


class MemoryMonitor:
    """Peak memory of one rank, without evaluations and kept models.

    Peaks are read before an evaluation and reset after it. After the first timed region, only the growth within a
    region counts, so memory that an evaluation leaves behind does not.
    """

    def __init__(self, device: torch.device, *, is_alone: bool = True) -> None:
        """Set up.

        Args:
            device: of the training.
            is_alone: whether the rank has no others, whose collectives free memory in threads of their own.
        """
        self._device, self._is_alone = device, is_alone
        self._on_gpu, self._on_cpu = device.type == "cuda", device.type == "cpu"
        self._held_bytes: int | None = 0  # counted and still allocated; None: can't be counted
        self._allocated_bytes = self._excluded_bytes = 0
        self._footprints = {"peak_rss_bytes": _Footprint(_resident_bytes)}
        if self._on_gpu:
            self._footprints["peak_reserved_bytes"] = _Footprint(self._reserved_bytes)

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """Count the memory that remains after the block (the model), but not its peak."""
        with self.counting():
            yield
        self._allocated_bytes = 0

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count allocations within the block, in addition to memory that remains from earlier blocks."""
        self._allocated_bytes = self._excluded_bytes = 0  # the last block's peak counts
        if self._on_gpu:
            self._reset_peak()
            yield
            self._allocated_bytes = max(0, torch.cuda.max_memory_allocated(self._device) - self._excluded_bytes)
            return
        if not self._on_cpu or self._held_bytes is None:
            yield
            return
        with allocations(of_all_threads=not self._is_alone) as changes:
            yield
        if changes is None:
            self._held_bytes = None
            return
        for change in changes:
            self._held_bytes += change
            self._allocated_bytes = max(self._allocated_bytes, self._held_bytes - self._excluded_bytes)

    def note_change(self, num_bytes: int) -> None:
        """Add bytes that were allocated outside of the blocks, and remain; negative: they were freed."""
        if self._held_bytes is not None:
            self._held_bytes += num_bytes

    def exclude(self, num_bytes: int) -> None:
        """Exclude bytes that the block has allocated before its peak, but not for the training."""
        self._excluded_bytes = num_bytes

    def start(self) -> None:
        """Start a timed region."""
        if self._on_gpu:
            self._reset_peak()
        for footprint in self._footprints.values():
            footprint.start()

    def stop(self) -> None:
        """End a timed region, before anything else is done."""
        if self._on_gpu:
            self._allocated_bytes = max(self._allocated_bytes, torch.cuda.max_memory_allocated(self._device))
        for footprint in self._footprints.values():
            footprint.stop()

    @property
    def peak_bytes(self) -> int | None:
        """Peak bytes that the training has allocated; None: not counted."""
        return self._allocated_bytes or None

    def check(self, limit_bytes: float, peak_bytes: float) -> None:
        """Raise DoesNotFit if a rank's peak is above the limit."""
        if peak_bytes > limit_bytes:
            raise DoesNotFit(TOO_LARGE.format(size(peak_bytes), size(limit_bytes)))

    def summary(self) -> dict[str, Any]:
        """Return the known peaks: fields of `raypar.study.conditions.RankConditions`."""
        peaks = {"peak_memory_bytes": self.peak_bytes}
        peaks |= {name: footprint.peak_bytes for name, footprint in self._footprints.items()}
        return {name: value for name, value in peaks.items() if value}

    def _reset_peak(self) -> None:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch raises otherwise
            torch.cuda.reset_peak_memory_stats(self._device)

    def _reserved_bytes(self, *, at_peak: bool) -> int:
        read = torch.cuda.max_memory_reserved if at_peak else torch.cuda.memory_reserved
        return int(read(self._device))


def stored_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's parameters and buffers, as far as they are initialised."""
    tensors = (each for each in (*model.parameters(), *model.buffers()) if not is_lazy(each))
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())


class _Footprint:
    """Peak memory that a rank takes: up to the end of the first region, plus the growth within later regions."""

    def __init__(self, read: Any) -> None:
        self._read = read
        self._before_bytes: int | None = None
        self.peak_bytes: int | None = None

    def start(self) -> None:
        self._before_bytes = self._read(at_peak=False)

    def stop(self) -> None:
        if self.peak_bytes is None:
            self.peak_bytes = self._read(at_peak=True)
        elif (after_bytes := self._read(at_peak=False)) is not None and self._before_bytes is not None:
            self.peak_bytes += max(0, after_bytes - self._before_bytes)


def limit_on_gpu(device: torch.device, limit_bytes: float) -> None:
    """Make the allocator of a GPU refuse more than the limit, in every step."""
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total_bytes), device)


def has_gpu_alone() -> bool:
    """Return whether this process, without other ranks, has almost all of its GPU's used memory."""
    if not torch.cuda.is_available():
        return False
    device = torch.cuda.current_device()
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return total_bytes - free_bytes - torch.cuda.memory_reserved(device) < MAX_UNCOUNTED_BYTES


def _status(pid: int | str = "self") -> Mapping[str, int]:
    """Return the memory fields of a process in bytes, from Linux's /proc; empty on other systems."""
    with contextlib.suppress(OSError, ValueError):
        lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1:] == ["kB"]}
    return {}


def _resident_bytes(*, at_peak: bool) -> int | None:
    """Return this process's resident bytes, without those shared with its fork server, and without files."""
    mine, servers = _status(), _status(os.getppid())
    name = "VmHWM" if at_peak else "VmRSS"
    if not {name, "RssFile"} <= mine.keys():
        return None
    return max(0, mine[name] - mine["RssFile"] - servers.get("RssAnon", 0))


def children_peak_bytes() -> int | None:
    """Return the peak resident bytes of the largest ended child process; None if unknown.

    Before its ``exec``, a child has the memory of this process, which Linux counts too. Only a larger figure is
    certainly that of its program.
    """
    unit = 1 if sys.platform == "darwin" else 1024
    mine, largest = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return largest * unit if largest > mine else None
