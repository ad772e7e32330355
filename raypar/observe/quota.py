"""CPU quota of a container: its limit of CPU time per second, whatever cores it may run on."""

import math
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OF_PROCESS = Path("/proc/self/cgroup")


def cpu_quota(cgroups: Path = CGROUPS, of_process: Path = OF_PROCESS) -> float:
    """Return the CPU quota of this process in cores, the smallest of its cgroup and those above; infinity: none.

    Over quota, the kernel stops all threads until the next period of usually 100 ms. Cgroups of version 1 and 2:
    https://docs.kernel.org/scheduler/sched-bwc.html, https://docs.kernel.org/admin-guide/cgroup-v2.html

    Args:
        cgroups: where they are mounted.
        of_process: the file that names those of the process.
    """
    return min(filter(None, map(_quota, _folders(cgroups, of_process))), default=math.inf)


def whole_cores(quota: float, num_cores: int) -> int:
    """Return the number of whole cores that a quota pays for, at least one, of those that a process may run on."""
    return max(1, int(min(quota, num_cores)))


def _folders(cgroups: Path, of_process: Path) -> Iterator[Path]:
    """Yield the folders of the process's CPU cgroups, from its own up to the mounted ones.

    A container that is shown paths of its host has its own cgroup mounted in their place.
    """
    try:
        lines = of_process.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            mounted = cgroups
        elif "cpu" in controllers.split(","):
            mounted = cgroups / "cpu"
        else:
            continue
        here = mounted / path.lstrip("/")
        yield from (folder for folder in (here, *here.parents) if folder.is_relative_to(mounted))


def _quota(folder: Path) -> float:
    """Return the quota of a cgroup in cores; 0 if it has none."""
    try:
        if (of_version_2 := folder / "cpu.max").exists():
            quota, period = of_version_2.read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return max(0.0, int(quota) / int(period))  # both in microseconds; without a quota "max", or -1
    except (OSError, ValueError, ZeroDivisionError):
        return 0.0
