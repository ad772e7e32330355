"""Joules, from folders laid out like /sys/class/powercap: machines that run tests rarely let them be read.

NVML is stood in for where there is no GPU; what it says of one that is there is another test's matter.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from raypar.train.energy import CannotRead, EnergyMonitor, Gpu, Packages


def a_zone(folder: Path, zone: str, name: str, microjoules: int, range_uj: int = 262_143_328_850) -> Path:
    (zone_dir := folder / zone).mkdir(parents=True, exist_ok=True)
    (zone_dir / "name").write_text(f"{name}\n")
    (zone_dir / "energy_uj").write_text(f"{microjoules}\n")
    (zone_dir / "max_energy_range_uj").write_text(f"{range_uj}\n")
    return zone_dir


def test_the_packages_are_added_up_and_their_parts_and_the_board_are_not(tmp_path: Path) -> None:
    def counters(joules: int) -> None:
        a_zone(tmp_path, "intel-rapl:0", "package-0", 10_000_000 + joules * 1_000_000)
        a_zone(tmp_path, "intel-rapl:1", "package-1", 90_000_000 + joules * 500_000)
        for zone, name in (("intel-rapl:0:0", "core"), ("intel-rapl:2", "psys"), ("intel-rapl-mmio:0", "package-0")):
            a_zone(tmp_path, zone, name, joules * 7_000_000)

    counters(0)
    watch = EnergyMonitor(folder=tmp_path)
    for joules in (100, 300):
        watch.start()
        counters(joules)
        watch.stop()
        counters(joules + 100)  # between the regions
    assert watch.package_j == pytest.approx(1.5 * (100 + (300 - 200)))
    assert (watch.gpu_j, watch.why_not) == (None, [])


def test_a_counter_that_wraps_around_goes_on_from_its_range(tmp_path: Path) -> None:
    zone = a_zone(tmp_path, "intel-rapl:0", "package-0", 990_000_000, range_uj=1_000_000_000)
    watch = EnergyMonitor(folder=tmp_path)
    watch.start()
    (zone / "energy_uj").write_text("15000000\n")
    watch.stop()
    assert watch.package_j == pytest.approx(25.0)


def test_a_region_in_which_a_counter_may_wrap_twice_has_no_energy(tmp_path: Path) -> None:
    zone = a_zone(tmp_path, "intel-rapl:0", "package-0", 0, range_uj=60_000_000_000)
    (zone / "constraint_0_power_limit_uw").write_text("100000000\n")
    packages = Packages(tmp_path)
    assert packages.used((1.0,), (11.0,), elapsed_s=399) == 10
    with pytest.raises(CannotRead, match=r"within 400 s, and 401 s were timed at a time: evaluate more often"):
        packages.used((1.0,), (11.0,), elapsed_s=401)


def test_a_machine_without_counters_says_so(tmp_path: Path) -> None:
    watch = EnergyMonitor(folder=tmp_path / "nowhere")
    watch.start()
    watch.stop()
    assert (watch.package_j, watch.gpu_j) == (None, None)
    assert watch.why_not == [f"no CPU package has an energy counter in {tmp_path / 'nowhere'}"]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_a_counter_that_may_not_be_read_says_what_would_allow_it(tmp_path: Path) -> None:
    (a_zone(tmp_path, "intel-rapl:0", "package-0", 0) / "energy_uj").chmod(0)
    (why_not,) = EnergyMonitor(folder=tmp_path).why_not
    assert why_not.endswith("may not be read; root can allow it: chmod a+r " + str(tmp_path / "intel-rapl:0/energy_uj"))


def test_a_permission_that_is_missing_is_told_to_root_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zone = a_zone(tmp_path, "intel-rapl:0", "package-0", 0)

    def forbidden(path: Path) -> str:
        if path.name == "energy_uj":
            raise PermissionError
        return plain(path)

    plain = Path.read_text
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", forbidden)
        watch = EnergyMonitor(folder=tmp_path)
    assert watch.package_j is None
    counter = zone / "energy_uj"
    assert watch.why_not == [f"{counter}: may not be read; root can allow it: chmod a+r {counter}"]


def test_a_counter_that_is_lost_takes_what_was_summed_up_with_it(tmp_path: Path) -> None:
    zone = a_zone(tmp_path, "intel-rapl:0", "package-0", 0)
    watch = EnergyMonitor(folder=tmp_path)
    watch.start()
    watch.stop()
    assert watch.package_j == 0
    watch.start()
    (zone / "energy_uj").write_text("gone\n")
    watch.stop()
    assert watch.package_j is None
    assert "holds no number: 'gone'" in watch.why_not[0]


class Nvml(ModuleType):
    """Stands in for the module pynvml, with a driver and one GPU, as far as energy goes."""

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.millijoules, self.has_driver, self.counts_energy = 5_000, True, True

    def nvmlInit(self) -> None:
        if not self.has_driver:
            raise self.NVMLError("NVML Shared Library Not Found")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> object:
        if uuid != "GPU-1234":
            raise self.NVMLError("Invalid Argument")
        return self

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: object) -> int:
        assert handle is self
        if not self.counts_energy:
            raise self.NVMLError("Not Supported")
        return self.millijoules


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    module = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


@pytest.mark.parametrize("uuid", ["1234", "GPU-1234"])  # torch leaves the prefix out
def test_a_gpus_energy_is_what_its_counter_went_up_by(nvml: Nvml, uuid: str, tmp_path: Path) -> None:
    watch = EnergyMonitor(uuid, tmp_path)
    for millijoules in (9_000, 12_500):
        nvml.millijoules = millijoules - 2_000
        watch.start()
        nvml.millijoules = millijoules
        watch.stop()
    assert watch.gpu_j == pytest.approx(4.0)


def test_a_gpu_that_counts_no_energy_says_so(nvml: Nvml) -> None:
    with pytest.raises(CannotRead, match="NVML has no GPU 5678: Invalid Argument"):
        Gpu("5678")
    nvml.counts_energy = False
    with pytest.raises(CannotRead, match="the GPU's energy can't be read: Not Supported"):
        Gpu("1234")


def test_a_machine_without_a_driver_says_so(nvml: Nvml, tmp_path: Path) -> None:
    nvml.has_driver = False
    watch = EnergyMonitor("1234", tmp_path)
    watch.start()
    watch.stop()
    assert watch.gpu_j is None
    assert watch.why_not[1] == "NVML can't be loaded: NVML Shared Library Not Found"


def test_a_machine_without_nvidia_ml_py_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    watch = EnergyMonitor("1234", tmp_path)
    assert watch.gpu_j is None
    assert watch.why_not[1] == "a GPU's energy needs nvidia-ml-py: pip install 'raypar[train]'"


def test_nvidia_ml_py_has_what_is_used() -> None:
    pynvml = pytest.importorskip("pynvml")
    stand_in = {name for name in vars(Nvml) if name.startswith(("nvml", "NVML"))}
    assert all(hasattr(pynvml, name) for name in stand_in)


def test_this_machines_gpu_counts_upwards() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available() or torch.version.hip:
        pytest.skip("no GPU of NVIDIA's")
    try:
        gpu = Gpu(str(torch.cuda.get_device_properties(0).uuid))
    except CannotRead as error:
        pytest.skip(str(error))
    before = gpu.read()
    a = torch.ones(8192, 8192, device="cuda")
    for _ in range(200):
        a = a @ a / 8192
    torch.cuda.synchronize()
    assert before < gpu.read() < before + 1e5
