"""The machine: cores that trials can have to themselves, memory, GPUs, limits."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from raypar import units
from raypar.doctor.finding import Finding, well_or
from raypar.provenance import cpu_model, gpu_model
from raypar.run.private_ray import OBJECT_STORE_BYTES
from raypar.train.affinity import CAN_PIN, allowed_cores, host_cores, pin

GANG_BYTES = 2 * 1024**3  # what a gang of two workers and Ray's own processes take
MIN_OPEN_FILES = 4096  # Ray's own advice
MAX_OTHER_LOAD = 0.1  # of the cores
LOAD_WINDOW_S = 0.5
CGROUPS = Path("/sys/fs/cgroup")
SHARED_MEMORY = Path("/dev/shm")


def cores() -> Finding:
    there = host_cores()
    physical = len({(core.package, core.physical) for core in there})
    told = f"{len(there)} ({cpu_model()})"
    if physical < len(there):
        told += f"; these are hardware threads of {physical} cores: two workers on one core share it"
    return Finding("cores", told)


def cpu_quota(folder: Path = CGROUPS) -> Iterator[Finding]:
    """Told only where a container may use less time than its cores have: its trials are stopped again and again."""
    try:  # the second version of control groups: "max 100000", or microseconds of a period
        quota, period = (folder / "cpu.max").read_text().split()
        allowed = int(quota) / int(period)
    except (OSError, ValueError):
        return
    if allowed < (count := len(allowed_cores())):
        yield Finding(
            "CPU quota",
            f"the time of {allowed:g} cores, of {count}",
            is_well=False,
            mend=f"give the container whole cores (docker run --cpuset-cpus 0-{max(0, int(allowed) - 1)}): past a "
            "quota the kernel stops trials until its next period",
        )


def pinning() -> Finding:
    mend = "nothing to be done: trials may disturb each other, and the report says how far they did"
    if not CAN_PIN:
        return Finding("pinning", "this system can't bind processes to cores", is_well=True, mend=mend)
    before = os.sched_getaffinity(0)
    try:
        bound = pin(allowed_cores()[:1])
    except OSError as error:
        return Finding("pinning", f"processes can't be bound to cores: {error.strerror}", is_well=False, mend=mend)
    finally:
        pin(before)
    return Finding("pinning", "processes can be bound to cores" if bound else "not possible here")


def other_load() -> Finding:
    """How busy others keep the machine right now."""
    busy = psutil.cpu_percent(interval=LOAD_WINDOW_S) / 100
    return well_or(
        "other load",
        f"{units.percent(busy)} of the cores are busy right now",
        is_well=busy <= MAX_OTHER_LOAD,
        mend="end what else runs before you time trials",
    )


def memory() -> Finding:
    free = psutil.virtual_memory().available
    return well_or(
        "memory",
        f"{units.size(free)} to be had",
        is_well=free >= GANG_BYTES,
        mend=f"free some: a gang of two workers takes about {units.size(GANG_BYTES)}",
    )


def shared_memory(folder: Path = SHARED_MEMORY) -> Iterator[Finding]:
    """Ray keeps its objects there; loader processes hand over batches through it."""
    if not folder.is_dir():  # macOS
        return
    free = shutil.disk_usage(folder).free
    yield well_or(
        "shared memory",
        f"{units.size(free)} free in {folder}",
        is_well=free >= OBJECT_STORE_BYTES,
        mend=f"give it {units.size(2 * OBJECT_STORE_BYTES)} or more (docker run --shm-size=1g)",
    )


def open_files() -> Finding:
    if sys.platform == "win32":
        return Finding("open files", "no limit is known here")
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = soft == resource.RLIM_INFINITY
    can_raise = hard == resource.RLIM_INFINITY or hard >= MIN_OPEN_FILES
    return well_or(
        "open files",
        "any number" if unlimited else f"{units.count(soft)} a process",
        # Ray raises its own soft limit as far as the hard one lets it.
        is_well=unlimited or soft >= MIN_OPEN_FILES or can_raise,
        mend=f"ulimit -n {MIN_OPEN_FILES}; Ray opens many connections",
    )


def num_gpus(folder: Path = Path("/proc/driver/nvidia/gpus")) -> int:
    """As the driver counts them."""
    return len(list(folder.iterdir())) if folder.is_dir() else 0


def gpus(num_seen_by_torch: int | None) -> Finding:
    """The driver's GPUs against those that torch can use (None: torch can't be asked)."""
    model, there = gpu_model(), num_gpus()
    if not there and not num_seen_by_torch:
        return Finding("GPU", "none")
    if num_seen_by_torch is None:
        return Finding("GPU", f"{there} × {model}; torch can't say whether it sees them")
    if num_seen_by_torch:
        return Finding("GPU", f"{num_seen_by_torch} × {model or 'a GPU'}, and torch uses them")
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    mend = "unset CUDA_VISIBLE_DEVICES" if hidden else "install torch for CUDA, for a version that this driver supports"
    return Finding("GPU", f"{there} × {model}, and torch sees none", is_well=False, mend=mend)
