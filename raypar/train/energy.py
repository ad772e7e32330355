"""Energy of the timed regions: joules of the machine's CPU packages and of the rank's GPU, where they can be read.

RAPL counts a package's energy (cores, caches, memory controller; not the memory, disks or fans) in
``/sys/class/powercap``, on Intel's and AMD's CPUs; since Linux 5.10 root alone may read it unless somebody allows more.
A package serves all processes of the machine: its energy includes theirs, and its idle power.
NVML, which comes with the driver, counts a GPU's energy since the driver was loaded, from Volta on.

RAPL's two files are read without a package: zeus starts processes that sample, codecarbon samples in a thread and looks
up the place's carbon intensity, pyRAPL was last released in 2019.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")
# More than any package draws; used if the system has no limit for one.
MAX_PACKAGE_W = 1000.0
# A package may exceed its long-term limit for some seconds.
LIMIT_MARGIN = 1.5


class CannotRead(Exception):
    """A counter that is not there or may not be read; the message says why."""


class Packages:
    """The energy counters of all CPU packages of this machine.

    Raises:
        CannotRead: there are none, or they may not be read.
    """

    def __init__(self, folder: Path = POWERCAP) -> None:
        # intel-rapl:0 is a package, or the board (psys), which the packages are part of; intel-rapl:0:0 is a part
        # of one; intel-rapl-mmio:0 is the same package once more.
        zones = sorted(zone for zone in folder.glob("intel-rapl:*") if zone.name.count(":") == 1)
        self._zones = [zone for zone in zones if _text(zone / "name").startswith("package")]
        if not self._zones:
            raise CannotRead(f"no CPU package has an energy counter in {folder}")
        self._ranges_j = [_microjoules(zone / "max_energy_range_uj") for zone in self._zones]
        self._limits_w = [_limit_w(zone) for zone in self._zones]
        self.read()

    def read(self) -> tuple[float, ...]:
        """Return each package's joules since some time, modulo its counter's range."""
        return tuple(_microjoules(zone / "energy_uj") for zone in self._zones)

    def used(self, before: tuple[float, ...], after: tuple[float, ...], elapsed_s: float) -> float:
        """Return the joules of all packages between two reads.

        Raises:
            CannotRead: `elapsed_s` is so long that a counter may have wrapped around more than once.
        """
        total_j = 0.0
        for first, last, range_j, limit_w in zip(before, after, self._ranges_j, self._limits_w, strict=True):
            if elapsed_s * limit_w > range_j:
                raise CannotRead(
                    f"a package's counter may wrap around within {range_j / limit_w:.0f} s, and {elapsed_s:.0f} s were "
                    "timed at a time: evaluate more often (eval_every_steps)"
                )
            total_j += last - first + (range_j if last < first else 0.0)
        return total_j


class Gpu:
    """The energy counter of one GPU.

    Raises:
        CannotRead: there is no NVML, or the GPU has no such counter (before Volta, or a part of a GPU: MIG).
    """

    def __init__(self, uuid: str) -> None:
        try:
            import pynvml
        except ImportError:
            raise CannotRead("a GPU's energy needs nvidia-ml-py: pip install 'raypar[train]'") from None
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise CannotRead(f"NVML can't be loaded: {error}") from None
        name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        try:
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(name)
        except pynvml.NVMLError as error:
            raise CannotRead(f"NVML has no GPU {uuid}: {error}") from None
        self.read()

    def read(self) -> float:
        """Return joules since the driver was loaded."""
        try:
            return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1e3
        except self._nvml.NVMLError as error:
            raise CannotRead(f"the GPU's energy can't be read: {error}") from None


@dataclass
class EnergyMonitor:
    """Sum, over the timed regions, of the energy of this machine's packages and of the rank's GPU.

    Counters are read at the start and the end of a region.

    Attributes:
        gpu_uuid: as NVML or torch have it; empty: the rank trains on no GPU of NVIDIA's.
        package_j: None if it can't be read.
        gpu_j: None if it can't be read, or if there is none.
        why_not: why something can't be read; empty: everything can.
    """

    gpu_uuid: str = ""
    folder: Path = POWERCAP
    package_j: float | None = None
    gpu_j: float | None = None
    why_not: list[str] = field(default_factory=list)
    _packages: Packages | None = None
    _gpu: Gpu | None = None
    _before: tuple[float, tuple[float, ...], float] = (0.0, (), 0.0)

    def __post_init__(self) -> None:
        try:
            self._packages = Packages(self.folder)
            self.package_j = 0.0
        except CannotRead as error:
            self.why_not.append(str(error))
        try:
            if self.gpu_uuid:
                self._gpu = Gpu(self.gpu_uuid)
                self.gpu_j = 0.0
        except CannotRead as error:
            self.why_not.append(str(error))

    def start(self) -> None:
        self._before = self._read()

    def stop(self) -> None:
        (first_s, first, first_gpu), (last_s, last, last_gpu) = self._before, self._read()
        if self._packages and self.package_j is not None:
            try:
                self.package_j += self._packages.used(first, last, last_s - first_s)
            except CannotRead as error:
                self.package_j = None
                self.why_not.append(str(error))
        if self.gpu_j is not None:
            self.gpu_j += last_gpu - first_gpu

    def _read(self) -> tuple[float, tuple[float, ...], float]:
        """Return the time in seconds, and the counters in joules."""
        packages: tuple[float, ...] = ()
        gpu = 0.0
        try:
            packages = self._packages.read() if self._packages else ()
            gpu = self._gpu.read() if self._gpu else 0.0
        except CannotRead as error:  # it could be read before: nothing that was summed up can be trusted
            self._packages = self._gpu = self.package_j = self.gpu_j = None
            self.why_not.append(str(error))
        return time.perf_counter(), packages, gpu


def _limit_w(zone: Path) -> float:
    """Return the watts that a package may draw: its long-term limit with some room."""
    try:
        limit_w = _microjoules(zone / "constraint_0_power_limit_uw")  # micro all the same
    except CannotRead:
        return MAX_PACKAGE_W
    return LIMIT_MARGIN * limit_w if limit_w > 0 else MAX_PACKAGE_W


def _microjoules(path: Path) -> float:
    text = _text(path)
    try:
        return int(text) / 1e6
    except ValueError:
        raise CannotRead(f"{path}: holds no number: {text!r}") from None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except PermissionError:
        raise CannotRead(f"{path}: may not be read; root can allow it: chmod a+r {path}") from None
    except OSError as error:
        raise CannotRead(f"{path}: can't be read: {error.strerror}") from None
