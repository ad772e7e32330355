"""Energy of the timed regions: joules of the machine's CPU packages and of the rank's GPU, if they can be read.

RAPL counts a package's energy (cores, caches and memory controller, but not memory, disks or fans) in
``/sys/class/powercap``, on Intel's and AMD's CPUs. Since Linux 5.10, only root can read it by default. A package's
energy includes that of all processes of the machine, and its idle power.
NVML counts a GPU's energy since the driver was loaded, from Volta on. It updates the counter every 20 to 100 ms (Yang,
Adamek and Armour, "Part-time Power Measurements", arXiv 2312.02741), so a timed region must be much longer.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from raypar.gpus import NoDriver, device_handle, open_nvml

POWERCAP = Path("/sys/class/powercap")
MAX_PACKAGE_W = 1000.0  # more than any package draws; used if the system has no limit for one
LIMIT_MARGIN = 1.5  # a package may exceed its long-term limit for some seconds
GPU_UPDATE_S = 0.1
# Minimum length of a region in updates: the lag of the counter is lost at a region's end.
MIN_UPDATES = 10


class CannotRead(Exception):
    """A counter is missing or not readable; the message gives the reason."""


@dataclass(frozen=True)
class EnergyCounter:
    """One counter of joules.

    Attributes:
        read: returns the joules since some moment, modulo `range_j`; raises `CannotRead`.
        max_w: highest power, in watts.
        update_s: longest time between two updates, in seconds; 0: it is always up to date.
    """

    read: Callable[[], float]
    range_j: float = math.inf
    max_w: float = MAX_PACKAGE_W
    update_s: float = 0.0

    def used(self, first_j: float, last_j: float, elapsed_s: float) -> float:
        """Return the joules between two reads.

        Raises:
            CannotRead: `elapsed_s` is so long that the counter may have wrapped around more than once.
        """
        if elapsed_s * self.max_w > self.range_j:
            raise CannotRead(
                f"a package's energy counter may wrap around within {self.range_j / self.max_w:.0f} s, and a timed "
                f"region lasted {elapsed_s:.0f} s: evaluate more often (eval_every_steps)"
            )
        return last_j - first_j + (self.range_j if last_j < first_j else 0.0)


def package_counters(folder: Path = POWERCAP) -> list[EnergyCounter]:
    """Return the counters of all CPU packages of this machine.

    Raises:
        CannotRead: there are none, or they may not be read.
    """
    # intel-rapl:0 is a package, or the board (psys), which includes the packages. intel-rapl:0:0 is a part of a
    # package, and intel-rapl-mmio:0 is the same package again.
    zones = sorted(zone for zone in folder.glob("intel-rapl:*") if zone.name.count(":") == 1)
    counters = [
        EnergyCounter(partial(_joules, zone / "energy_uj"), _joules(zone / "max_energy_range_uj"), _limit_w(zone))
        for zone in zones
        if _text(zone / "name").startswith("package")
    ]
    if not counters:
        raise CannotRead(f"no CPU package has an energy counter in {folder}")
    return counters


def gpu_counters(uuid: str) -> list[EnergyCounter]:
    """Return the counter of one GPU; reading it raises CannotRead if the GPU has none (before Volta).

    Args:
        uuid: NVML's or torch's identifier.

    Raises:
        CannotRead: NVML is not available, or the GPU is a MIG slice.
    """
    try:
        library = open_nvml()
    except NoDriver as error:
        raise CannotRead(f"a GPU's energy can't be read: {error}") from None
    try:
        device = device_handle(library, uuid)
        is_part = library.nvmlDeviceIsMigDeviceHandle(device)
    except library.NVMLError as error:
        raise CannotRead(f"NVML has no GPU {uuid}: {error}") from None
    if is_part:
        raise CannotRead("NVML counts the energy of whole GPUs, and the trial ran on a slice of one (MIG)")

    def read() -> float:
        try:
            return float(library.nvmlDeviceGetTotalEnergyConsumption(device)) / 1e3
        except library.NVMLError as error:
            raise CannotRead(f"NVML can't read the energy of GPU {uuid}: {error}") from None

    return [EnergyCounter(read, update_s=GPU_UPDATE_S)]


class EnergyMonitor:
    """Sum of the energy of some counters over the timed regions, read at the start and the end of a region."""

    def __init__(self, open_counters: Callable[[], list[EnergyCounter]]) -> None:
        self._error = ""
        self._sum_j = self._sum_s = 0.0
        self._num_regions = 0
        self._counters: list[EnergyCounter] = []
        with self._closed_on_error():
            self._counters = open_counters()
        self.start()  # a counter that can't be read is reported even if nothing is timed

    @property
    def why_not(self) -> str:
        """Reason why the energy can't be read; empty: it can."""
        update_s = max((counter.update_s for counter in self._counters), default=0.0)
        if self._error or self._sum_s >= MIN_UPDATES * update_s * self._num_regions:
            return self._error
        region_s = self._sum_s / self._num_regions
        return (
            f"a GPU updates its energy counter every {update_s:g} s, too rarely for timed regions of {region_s:.2g} s: "
            "evaluate less often, or train on more samples"
        )

    @property
    def joules(self) -> float | None:
        """Sum over the regions; None if a counter can't be read."""
        return None if self.why_not else self._sum_j

    def start(self) -> None:
        with self._closed_on_error():
            self._before = self._read()

    def stop(self) -> None:
        with self._closed_on_error():
            (first_s, first), (last_s, last) = self._before, self._read()
            for counter, first_j, last_j in zip(self._counters, first, last, strict=False):
                self._sum_j += counter.used(first_j, last_j, last_s - first_s)
            self._sum_s, self._num_regions = self._sum_s + last_s - first_s, self._num_regions + 1

    def _read(self) -> tuple[float, list[float]]:
        return time.perf_counter(), [counter.read() for counter in self._counters]

    @contextlib.contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        try:
            yield
        except CannotRead as error:
            self._error, self._counters = str(error), []


def _limit_w(zone: Path) -> float:
    """Return the watts that a package may draw: its long-term limit with a margin."""
    try:
        limit_w = _joules(zone / "constraint_0_power_limit_uw")
    except CannotRead:
        return MAX_PACKAGE_W
    return LIMIT_MARGIN * limit_w if limit_w > 0 else MAX_PACKAGE_W


def _joules(path: Path) -> float:
    """Return a file's number divided by a million."""
    text = _text(path)
    try:
        return int(text) / 1e6
    except ValueError:
        raise CannotRead(f"{path}: not a number: {text!r}") from None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except PermissionError:
        raise CannotRead(f"{path}: may not be read; root can allow it: chmod a+r {path}") from None
    except OSError as error:
        raise CannotRead(f"{path}: can't be read: {error.strerror}") from None
