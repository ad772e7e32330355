"""GPUs of this machine: NVIDIA's as listed by the driver's library NVML, AMD's as listed by the kernel.

NVML works without ``/proc/driver/nvidia`` (WSL2, containers) and lists MIG slices. This module imports no torch and
doesn't touch CUDA, so that a process that forks ranks may use it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import runpy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

AMD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
PCI_DEVICES = Path("/sys/bus/pci/devices")
VISIBLE, VISIBLE_AMD = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"
# Oldest Linux driver of each major version of CUDA: NVIDIA, "CUDA Compatibility", minor version compatibility.
OLDEST_DRIVERS = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}


class NoDriver(Exception):
    """NVML is not available, for the reason in the message."""


@dataclass(frozen=True)
class Gpu:
    """Device that a process can use alone: a GPU or a MIG slice.

    Attributes:
        index: index of its card among those that this machine's processes can open; MIG slices of a card share it.
        uuid: NVML's, ``GPU-…`` or ``MIG-…``; empty for AMD.
        bus_id: PCI address of its card, as in `PCI_DEVICES`: ``0000:3b:00.0``; empty if unknown.
        is_amd: True if HIP lists it rather than CUDA.
    """

    index: int
    uuid: str
    name: str
    bus_id: str
    is_amd: bool = False


class TorchBuild(NamedTuple):
    """CUDA and HIP versions that the installed torch is built for; empty: built without."""

    cuda: str
    hip: str


def open_nvml() -> Any:
    """Return the module pynvml with NVML open; each call needs a matching ``nvmlShutdown``.

    Raises:
        NoDriver: nvidia-ml-py or the driver is missing.
    """
    try:
        import pynvml
    except ImportError:
        raise NoDriver("nvidia-ml-py is not installed: pip install 'raypar[train]'") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NoDriver(str(error)) from None
    return pynvml


@contextlib.contextmanager
def nvml() -> Iterator[Any]:
    """Yield the module pynvml with NVML open; its errors become `NoDriver`.

    Raises:
        NoDriver: as `open_nvml`, or NVML failed.
    """
    pynvml = open_nvml()
    try:
        yield pynvml
    except pynvml.NVMLError as error:
        raise NoDriver(str(error)) from None
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def device_handle(library: Any, uuid: str) -> Any:
    """Return NVML's handle of a device. Raises NVMLError if it has none.

    Args:
        library: result of `open_nvml`.
        uuid: NVML's, or torch's, which lacks the prefix ``GPU-`` or ``MIG-``.
    """
    if not uuid.startswith(("GPU-", "MIG-")):
        with contextlib.suppress(library.NVMLError):
            return library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        uuid = f"MIG-{uuid}"
    return library.nvmlDeviceGetHandleByUUID(uuid)


def all_gpus() -> tuple[Gpu, ...]:
    """Return all devices of this machine in NVML's order (by bus), including those hidden by a variable."""
    try:
        with nvml() as library:
            listed = tuple(_nvidia_gpus(library))
    except NoDriver:
        listed = ()
    return listed or _amd_gpus(AMD_NODES)


def visible_gpus(environment: Mapping[str, str] = os.environ) -> tuple[Gpu, ...]:
    """Return the devices that a process with this environment may use, in the order it sees them."""
    gpus = all_gpus()
    names = (VISIBLE_AMD, VISIBLE) if gpus and gpus[0].is_amd else (VISIBLE,)
    visible = next((environment[name] for name in names if name in environment), None)
    if visible is None:
        return gpus
    chosen: list[Gpu] = []
    for part in map(str.strip, visible.split(",")):
        # CUDA accepts an index or a prefix of a UUID, and ignores the list from the first invalid entry on.
        by_index = [gpu for gpu in gpus if str(gpu.index) == part][:1]  # an index of a split GPU means its first slice
        by_uuid = [gpu for gpu in gpus if part.startswith(("GPU-", "MIG-")) and gpu.uuid.startswith(part)]
        if len(matches := by_index or by_uuid) != 1:
            break
        if matches[0] in chosen:
            return ()  # as CUDA does for a device that is named twice
        chosen += matches
    return tuple(chosen)


@contextlib.contextmanager
def visible_only(gpus: Sequence[Gpu]) -> Iterator[None]:
    """Hide all devices but these from processes that are started in the block.

    MIG slices have to be named by UUID: without a variable, or by an index, CUDA uses the first slice only.
    """
    if tuple(gpus) == visible_gpus() and not any(gpu.uuid.startswith("MIG-") for gpu in gpus):
        yield
        return
    name = VISIBLE_AMD if gpus and gpus[0].is_amd else VISIBLE
    before = os.environ.get(name)
    os.environ[name] = ",".join(gpu.uuid or str(gpu.index) for gpu in gpus)
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _nvidia_gpus(library: Any) -> Iterator[Gpu]:
    index = 0
    for i in range(library.nvmlDeviceGetCount()):
        try:
            handle = library.nvmlDeviceGetHandleByIndex(i)
        except library.NVMLError:  # counted, but lost or not available to this container
            continue
        yield from _devices(library, handle, index)
        index += 1


def _devices(library: Any, handle: Any, index: int) -> list[Gpu]:
    """Return a GPU, or its MIG slices."""
    name, bus_id = library.nvmlDeviceGetName(handle), _bus_id(library.nvmlDeviceGetPciInfo(handle).busId)
    try:
        is_split = library.nvmlDeviceGetMigMode(handle)[0] == library.NVML_DEVICE_MIG_ENABLE
    except library.NVMLError:  # no MIG support
        is_split = False
    if not is_split:
        return [Gpu(index, library.nvmlDeviceGetUUID(handle), name, bus_id)]
    parts: list[Gpu] = []
    for i in range(library.nvmlDeviceGetMaxMigDeviceCount(handle)):
        with contextlib.suppress(library.NVMLError):  # fewer slices than the maximum
            part = library.nvmlDeviceGetMigDeviceHandleByIndex(handle, i)
            parts.append(Gpu(index, library.nvmlDeviceGetUUID(part), library.nvmlDeviceGetName(part), bus_id))
    return parts


def _bus_id(value: str) -> str:
    """Convert NVML's ``00000000:3B:00.0`` to the kernel's form ``0000:3b:00.0``."""
    domain, _, rest = value.lower().partition(":")
    return f"{domain[-4:]}:{rest}" if rest else ""


def _amd_gpus(folder: Path) -> tuple[Gpu, ...]:
    """Return the GPUs among the nodes of the kernel's compute topology: CPUs have no SIMD units there."""
    gpus: list[Gpu] = []
    for node in sorted(folder.glob("*"), key=lambda path: int(path.name) if path.name.isdecimal() else -1):
        with contextlib.suppress(OSError, ValueError, KeyError):
            lines = (node / "properties").read_text().splitlines()
            properties = {key: int(value) for key, value in (line.split() for line in lines if len(line.split()) == 2)}
            if properties["simd_count"] > 0:
                location = properties.get("location_id", 0)
                bus_id = (
                    f"{properties.get('domain', 0):04x}:{location >> 8:02x}:{location >> 3 & 31:02x}.{location & 7}"
                )
                gpus.append(Gpu(len(gpus), "", "AMD GPU", bus_id, is_amd=True))
    return tuple(gpus)


def local_cores(gpu: Gpu, folder: Path = PCI_DEVICES) -> frozenset[int]:
    """Return the cores of the GPU's NUMA node; empty if the kernel doesn't list them."""
    try:
        listed = (folder / gpu.bus_id / "local_cpulist").read_text().strip() if gpu.bus_id else ""
        ranges = [part.partition("-") for part in listed.split(",") if part]
        return frozenset(core for first, _, last in ranges for core in range(int(first), int(last or first) + 1))
    except (OSError, ValueError):
        return frozenset()


def driver_versions() -> tuple[str, int]:
    """Return the version of NVIDIA's driver and the major version of CUDA that it supports; "" and 0 without NVML.

    The latter may be newer than the driver's version suggests: many images contain cuda-compat.
    """
    try:
        with nvml() as library:
            return str(library.nvmlSystemGetDriverVersion()), int(library.nvmlSystemGetCudaDriverVersion()) // 1000
    except NoDriver:
        return "", 0


def torch_build() -> TorchBuild | None:
    """Return what the installed torch is built for, without importing it; None: not installed."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    versions: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # generated by torch's build; imports nothing
        versions = runpy.run_path(str(Path(spec.origin).parent / "version.py"))
    return TorchBuild(*(str(versions.get(name) or "") for name in TorchBuild._fields))


def torch_problem(gpus: tuple[Gpu, ...]) -> str | None:
    """Return why the installed torch can't use these GPUs, judging by versions; None if it can."""
    build = torch_build()
    if build is None:
        return "torch is not installed"
    if not gpus:
        return "this machine has no GPU"
    if gpus[0].is_amd:
        return None if build.hip else "the installed torch is not built for AMD's GPUs (ROCm)"
    if not build.cuda:
        return "the installed torch is built without CUDA"
    major, (driver, newest) = int(build.cuda.partition(".")[0]), driver_versions()
    if not newest or newest >= major:
        return None
    needed = f"driver {OLDEST_DRIVERS[major]} or later" if major in OLDEST_DRIVERS else "a newer driver"
    return f"the installed torch is built for CUDA {build.cuda}, which needs {needed}; installed: {driver}"
