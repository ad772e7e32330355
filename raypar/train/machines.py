"""What the ranks of a trial counted, taken together machine by machine: others' load, and energy."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from raypar.train.cpu_watch import other_load_cores

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Counted:
    """What one rank's counters went up by over the timed regions, and whose they are.

    Attributes:
        machine: the same for all ranks on one machine, whatever containers they are in.
        num_cores: of the machine.
        elapsed_s: how long the regions were together.
        busy_s: CPU time of the whole machine.
        own_s: of that, what this rank's processes used.
        package_j: of all of the machine's CPU packages; None: can't be read.
        gpu: the GPU's identity; empty: the rank trains on none that counts energy.
        gpu_j: None: can't be read.
        no_energy: what can't be read, and why.
    """

    machine: str
    num_cores: int
    elapsed_s: float
    busy_s: float
    own_s: float
    package_j: float | None = None
    gpu: str = ""
    gpu_j: float | None = None
    no_energy: tuple[str, ...] = ()


def this_machine() -> str:
    """What tells this machine from others: two containers on one have a name each, but see the same counters."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return platform.node()


def other_loads(ranks: Sequence[Counted]) -> list[float | None]:
    """For each rank, how many cores of its machine were busy with other work than the trial's; None: can't be told."""
    loads = {}
    for machine, there in _by_machine(ranks).items():
        # The ranks' regions start and end together, but for the last step's stragglers.
        elapsed_s = max(rank.elapsed_s for rank in there)
        busy_s = max(rank.busy_s for rank in there)
        loads[machine] = other_load_cores(elapsed_s, busy_s, sum(rank.own_s for rank in there))
    return [loads[rank.machine] for rank in ranks]


def energy(ranks: Sequence[Counted]) -> tuple[float, str] | None:
    """Joules over all machines, each package and GPU once, and of what: "CPU packages", "GPUs" or both.

    None where something that the trial used can't be read: its GPUs, if it trains on some, else its machines' packages;
    packages that only some of the machines tell are left out.
    """
    packages = [there[0].package_j for there in _by_machine(ranks).values()]
    known = [joules for joules in packages if joules is not None]
    has_packages = bool(known) and len(known) == len(packages)
    if not any(rank.gpu for rank in ranks):
        return (sum(known), "CPU packages") if has_packages else None
    gpus: dict[tuple[str, str], float | None] = {}
    for rank in ranks:
        gpus.setdefault((rank.machine, rank.gpu), rank.gpu_j)
    gpu_j = [joules for joules in gpus.values() if joules is not None]
    if len(gpu_j) < len(gpus):
        return None
    return (sum(gpu_j) + sum(known), "CPU packages and GPUs") if has_packages else (sum(gpu_j), "GPUs")


def _by_machine(ranks: Sequence[Counted]) -> Mapping[str, list[Counted]]:
    found: dict[str, list[Counted]] = {}
    for rank in ranks:
        found.setdefault(rank.machine, []).append(rank)
    return found
