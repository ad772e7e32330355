"""Cores of a machine, and the pinning of a rank to some of them."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from raypar.gpus import local_cores, visible_gpus
from raypar.measure.cpu import TOPOLOGY
from raypar.observe.quota import cpu_quota, whole_cores
from raypar.study.options import UNPINNED
from raypar.study.space import Value

CAN_PIN = hasattr(os, "sched_setaffinity")  # Linux


@dataclass(frozen=True)
class Core:
    """Core as the system counts cores (a hardware thread).

    Attributes:
        number: the system's number, for pinning.
        package: its socket.
        physical: its physical core, unique on the machine; hardware threads of one core share it.
    """

    number: int
    package: int
    physical: int


def allowed_cores() -> tuple[int, ...]:
    """Return the cores of this process's cpuset, regardless of its current pinning."""
    if not CAN_PIN:
        return tuple(range(os.cpu_count() or 1))
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))  # the kernel cuts this to the cpuset
    widest = os.sched_getaffinity(0)
    os.sched_setaffinity(0, mine)
    return tuple(sorted(widest))


def host_cores() -> tuple[Core, ...]:
    """Return as many cores as processes on this machine may keep busy: in a container, no more than its CPU quota."""
    allowed = allowed_cores()
    return topology(allowed[: whole_cores(cpu_quota(), len(allowed))])


def own_cores() -> tuple[Core, ...]:
    """Return the cores of this machine to pin ranks to; empty: none.

    A quota that is smaller than the cpuset gives a container time on any cores, which others use as well. Pinned there,
    the ranks of all containers of a machine would meet on its first cores. Unpinned, the kernel keeps them apart.
    """
    cores = host_cores()
    return cores if len(cores) == len(allowed_cores()) else ()


def cores_near_gpu(index: int, environment: Mapping[str, str] = os.environ) -> frozenset[int]:
    """Return the numbers of the cores of a GPU's NUMA node; empty if they are unknown.

    Args:
        index: index of the GPU among those that a process with this environment sees.
    """
    gpus = visible_gpus(environment)
    return local_cores(gpus[index]) if index < len(gpus) else frozenset()


def topology(numbers: Iterable[int], folder: Path = TOPOLOGY) -> tuple[Core, ...]:
    """Return sockets and physical cores of these cores; a core without files counts as physical."""
    return tuple(_core(number, folder / f"cpu{number}" / "topology") for number in numbers)


def _core(number: int, folder: Path) -> Core:
    try:
        package = int((folder / "physical_package_id").read_text())
        # The first sibling identifies a physical core. `core_id` is not unique: some sockets restart it on every die.
        first = re.match(r"\d+", (folder / "thread_siblings_list").read_text().strip())
        return Core(number, package, int(first[0]) if first else number)
    except (OSError, ValueError):  # macOS; some containers and virtual machines
        return Core(number, 0, number)


def pin(cores: Iterable[int]) -> tuple[int, ...]:
    """Bind the calling thread, and all threads and processes that it starts later, to these cores.

    Call it before torch starts its threads.

    Returns:
        The cores that the kernel reports; empty if the system can't pin.
    """
    if not CAN_PIN:
        return ()
    os.sched_setaffinity(0, cores)
    return tuple(sorted(os.sched_getaffinity(0)))


def bind_rank(cores: Iterable[int], affinity: Value) -> tuple[int, ...]:
    """Bind the calling thread to the cores of its rank, as `pin`; with ``cpu_affinity="off"``, to all allowed ones.

    The process that it was forked from may have been bound to other cores than the rank's.

    Returns:
        The cores that it is pinned to; empty: not pinned.
    """
    if affinity == UNPINNED:
        pin(allowed_cores())
        return ()
    return pin(cores) if cores else ()


MAX_SWEEPS = 5  # a thread that starts during a sweep may have the old cores


@dataclass(frozen=True)
class ProcessTree:
    """A process and its descendants.

    Attributes:
        root: its process id.
        but: process ids of children that are left out, with their descendants.
    """

    root: int
    but: frozenset[int] = frozenset()

    def pids(self) -> set[int]:
        """Return the ids of its processes."""
        return _tree(self.root).difference(*map(_tree, self.but))

    def keep_off(self, cores: Collection[int]) -> None:
        """Bind each thread, and all threads and processes that it starts later, to its other cores, if it has any."""
        for _ in range(MAX_SWEEPS if CAN_PIN else 0):
            if not sum(_keep_off(pid, cores) for pid in self.pids()):
                break


def _tree(root: int) -> set[int]:
    with contextlib.suppress(psutil.Error):  # it has ended
        return {root, *(child.pid for child in psutil.Process(root).children(recursive=True))}
    return set()


def _keep_off(pid: int, cores: Collection[int]) -> int:
    """Bind the threads of a process to other cores than these; return how many were moved."""
    num_moved = 0
    with contextlib.suppress(OSError):  # it has ended
        for thread in map(int, os.listdir(f"/proc/{pid}/task")):  # noqa: PTH208
            with contextlib.suppress(OSError):
                mine = os.sched_getaffinity(thread)
                if (rest := mine.difference(cores)) and rest != mine:
                    os.sched_setaffinity(thread, rest)
                    num_moved += 1
    return num_moved
