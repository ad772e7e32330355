"""GPUs of a machine, from a stand-in for NVML and from folders like the kernel's."""

import os
import sys

import nvml
import pytest
from nvml import Card

from raypar import gpus
from raypar.gpus import (
    Gpu,
    all_gpus,
    device_handle,
    local_cores,
    torch_build,
    torch_problem,
    visible_gpus,
    visible_only,
)

TWO = (Card(1), Card(2, name="NVIDIA H200"))
PARTS = [Card(1, uuid=f"MIG-{letter}5", name="NVIDIA H100 MIG 1g.10gb") for letter in "ab"]


@pytest.fixture(autouse=True)
def nothing_hidden(monkeypatch, tmp_path):
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(gpus, "AMD_NODES", tmp_path / "nodes")


def uuids(listed):
    return [gpu.uuid for gpu in listed]


def test_gpus_are_listed_by_nvml(monkeypatch):
    library = nvml.install(monkeypatch, *TWO)
    one, two = all_gpus()
    assert one == Gpu(0, "GPU-1234", "NVIDIA H100", "0000:1b:00.0")
    assert (two.index, two.name, two.bus_id) == (1, "NVIDIA H200", "0000:2b:00.0")
    assert library.num_open == 0  # nothing stays open in a process that forks ranks


@pytest.mark.parametrize("reason", ["Driver Not Loaded", "NVML Shared Library Not Found"])
def test_there_are_no_gpus_without_driver_or_module(monkeypatch, reason):
    nvml.install(monkeypatch, *TWO, error=reason)
    assert all_gpus() == () and gpus.driver_versions() == ("", 0)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert all_gpus() == ()


def test_a_gpu_denied_to_the_container_is_not_counted(monkeypatch):
    nvml.install(monkeypatch, Card(1, is_denied=True), Card(2), Card(3))
    assert [(gpu.index, gpu.uuid) for gpu in all_gpus()] == [(0, "GPU-2234"), (1, "GPU-3234")]
    assert uuids(visible_gpus({"CUDA_VISIBLE_DEVICES": "1"})) == ["GPU-3234"]


def test_a_split_gpu_is_listed_as_its_mig_slices(monkeypatch):
    nvml.install(monkeypatch, Card(1, PARTS), Card(2, is_split=None))
    assert [(gpu.index, gpu.uuid, gpu.bus_id) for gpu in all_gpus()] == [
        (0, "MIG-a5", "0000:1b:00.0"),
        (0, "MIG-b5", "0000:1b:00.0"),
        (1, "GPU-2234", "0000:2b:00.0"),
    ]
    nvml.install(monkeypatch, Card(1, is_split=True))
    assert all_gpus() == ()  # no slice exists


@pytest.mark.parametrize(
    ("variable", "visible"),
    [
        ("0", ["GPU-1234"]),
        ("1,0", ["GPU-2234", "GPU-1234"]),
        (" 1 , 0", ["GPU-2234", "GPU-1234"]),
        ("1,9,0", ["GPU-2234"]),  # entries after an invalid one are ignored
        ("1,-1,0", ["GPU-2234"]),
        ("0,0", []),
        ("GPU-2234", ["GPU-2234"]),
        ("GPU-2", ["GPU-2234"]),
        ("GPU-2234,GPU-1234", ["GPU-2234", "GPU-1234"]),
        ("GPU-1,GPU-1", []),
        ("GPU-", []),  # ambiguous
        ("GPU-9,GPU-1234", []),
        *((hidden, []) for hidden in ("", "-1", "NoDevFiles", "none")),
    ],
)
def test_cuda_visible_devices_is_read_like_cuda_does(monkeypatch, variable, visible):
    nvml.install(monkeypatch, *TWO)
    assert uuids(visible_gpus({"CUDA_VISIBLE_DEVICES": variable})) == visible
    torch = pytest.importorskip("torch")
    # torch uses the same rules, here with NVML's raw answers instead of a driver.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    monkeypatch.setattr(torch.cuda, "_raw_device_count_nvml", lambda: 2)
    monkeypatch.setattr(torch.cuda, "_raw_device_uuid_nvml", lambda: uuids(all_gpus()))
    monkeypatch.setattr(torch.version, "hip", None)
    assert torch.cuda._device_count_nvml() == len(visible)


@pytest.mark.parametrize(
    ("variable", "visible"), [("MIG-b5", ["MIG-b5"]), ("MIG-b5,MIG-a5", ["MIG-b5", "MIG-a5"]), ("0", ["MIG-a5"])]
)
def test_mig_slices_are_chosen_by_uuid_and_an_index_means_the_first(monkeypatch, variable, visible):
    nvml.install(monkeypatch, Card(1, PARTS))
    assert uuids(visible_gpus({"CUDA_VISIBLE_DEVICES": variable})) == visible


def test_visible_only_hides_gpus_and_restores_the_variable(monkeypatch):
    nvml.install(monkeypatch, *TWO)
    with visible_only(all_gpus()):
        assert "CUDA_VISIBLE_DEVICES" not in os.environ  # nothing to hide
    with visible_only(all_gpus()[1:]):
        assert uuids(visible_gpus()) == ["GPU-2234"]
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    with visible_only(visible_gpus()[1:]):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-1234"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1,0"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    nvml.install(monkeypatch, Card(1, PARTS))
    with visible_only(visible_gpus()):  # otherwise CUDA would use the first slice only
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "MIG-a5,MIG-b5"


def write_node(folder, number, **properties):
    (folder / "nodes" / str(number)).mkdir(parents=True)
    text = "".join(f"{key} {value}\n" for key, value in properties.items())
    (folder / "nodes" / str(number) / "properties").write_text(text + "name with several words\n")


def test_amd_gpus_are_kernel_nodes_with_simd_units(monkeypatch, tmp_path):
    nvml.install(monkeypatch, error="NVML Shared Library Not Found")
    write_node(tmp_path, 0, cpu_cores_count=64, simd_count=0)
    write_node(tmp_path, 2, simd_count=440, location_id=0x2300, domain=1)
    write_node(tmp_path, 10, simd_count=440, location_id=0x438A)
    (tmp_path / "nodes" / "3").mkdir()  # of another container: unreadable
    one, two = all_gpus()
    assert (one.index, one.uuid, one.bus_id, one.is_amd) == (0, "", "0001:23:00.0", True)
    assert (two.index, two.bus_id) == (1, "0000:43:11.2")
    assert visible_gpus({"HIP_VISIBLE_DEVICES": "1"}) == (two,)
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "1,0"}) == (two, one)
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0"}) == (one,)  # HIP reads it too
    with visible_only([two]):
        assert os.environ["HIP_VISIBLE_DEVICES"] == "1"


def test_local_cores_are_those_of_the_numa_node(tmp_path):
    gpu = Gpu(0, "GPU-1", "H100", "0000:1b:00.0")
    assert local_cores(gpu, tmp_path) == frozenset()
    (tmp_path / gpu.bus_id).mkdir()
    (tmp_path / gpu.bus_id / "local_cpulist").write_text("0-2,8,10-11\n")
    assert local_cores(gpu, tmp_path) == {0, 1, 2, 8, 10, 11}
    assert local_cores(Gpu(0, "", "AMD GPU", ""), tmp_path) == frozenset()


@pytest.mark.parametrize("uuid", ["GPU-2234", "2234", "MIG-a5", "a5"])  # torch omits the prefix
def test_device_handles_accept_uuids_of_nvml_and_torch(monkeypatch, uuid):
    library = nvml.install(monkeypatch, Card(1, PARTS), Card(2))
    assert device_handle(gpus.open_nvml(), uuid).uuid.endswith(uuid)
    with pytest.raises(library.NVMLError):
        device_handle(library, "77")


@pytest.mark.parametrize(
    ("build", "driver", "problem"),
    [
        (("13.2", ""), {}, None),
        (("12.6", ""), {}, None),
        (
            ("13.2", ""),
            {"driver": "535.183.01", "cuda": 12020},
            "CUDA 13.2, which needs driver 580.65.06 or later; installed: 535.183.01",
        ),
        (("14.0", ""), {}, "CUDA 14.0, which needs a newer driver; installed: 580.65.06"),
        (("13.2", ""), {"driver": "535.183.01", "cuda": 13000}, None),  # with cuda-compat
        (("13.2", ""), {"error": "Driver Not Loaded"}, None),
        (("", ""), {}, "the installed torch is built without CUDA"),
        (None, {}, "torch is not installed"),
    ],
)
def test_a_torch_too_new_for_the_driver_is_reported_with_both_versions(monkeypatch, build, driver, problem):
    listed = (Gpu(0, "GPU-1", "H100", ""),)
    nvml.install(monkeypatch, **driver)
    monkeypatch.setattr(gpus, "torch_build", lambda: build and gpus.TorchBuild(*build))
    text = torch_problem(listed)
    assert text is None if problem is None else problem in text
    amd = (Gpu(0, "", "AMD GPU", "", is_amd=True),)
    assert build is None or ("ROCm" in torch_problem(amd) and "no GPU" in torch_problem(()))
    monkeypatch.setattr(gpus, "torch_build", lambda: gpus.TorchBuild("", "6.4"))
    assert torch_problem(amd) is None


def test_the_build_of_torch_is_known_without_an_import():
    torch = pytest.importorskip("torch")
    assert torch_build() == (torch.version.cuda or "", torch.version.hip or "")


def test_nvidia_ml_py_has_the_functions_in_use():
    pynvml = pytest.importorskip("pynvml")
    names = [name for name in vars(nvml.Nvml) if name.startswith(("nvml", "NVML"))]
    assert [name for name in names if not hasattr(pynvml, name)] == []
    constants = [name for name in names if isinstance(getattr(nvml.Nvml, name), int)]
    assert [name for name in constants if getattr(pynvml, name) != getattr(nvml.Nvml, name)] == []
    assert issubclass(pynvml.NVMLError, Exception)
