"""`raypar doctor` fails a check that matters, with the fix."""

import json
import math
from contextlib import nullcontext

import nvml
import pytest
from nvml import Card

from raypar import doctor, gpus
from raypar.doctor import CheckResult, TorchGpus
from raypar.run.cluster import Cluster
from raypar.train import affinity
from raypar.train.affinity import allowed_cores


def test_packages_out_of_range_and_missing_ones_fail_unless_only_an_extra_needs_them():
    (check,) = doctor.versions_in_range()
    assert check.is_ok
    texts = ["no-such-package-here>=1", 'no-such-extra-here>=1; extra == "more"', 'numpy<1; extra == "more"']
    unmet = {r.name: installed for r, installed in doctor.unmet_requirements(["ray[train,tune]<2", "torch>=1", *texts])}
    assert (unmet.pop("ray") or "").startswith("2.")
    assert unmet.pop("no-such-package-here") is None
    assert list(unmet) == ["numpy"], "an installed package of an extra must have a valid version"


def test_cores_and_memory_are_shown(tmp_path):
    assert doctor.cores().detail.startswith(str(len(allowed_cores()))) and doctor.pinning().is_ok
    for check in (doctor.memory(), *doctor.shared_memory(tmp_path), *doctor.disk(tmp_path)):
        assert any(unit in check.detail for unit in ("GB", "MB", "kB", "GiB", "MiB")), check
    assert not list(doctor.shared_memory(tmp_path / "absent"))


@pytest.mark.parametrize("more", [0.0, 0.5, math.inf])
def test_only_a_quota_below_the_number_of_cores_fails(monkeypatch, more):
    num_cores = len(allowed_cores())
    monkeypatch.setattr(doctor, "cpu_quota", lambda: num_cores + more)
    assert not list(doctor.quota_of_cpus())
    monkeypatch.setattr(doctor, "cpu_quota", lambda: 0.5)
    monkeypatch.setattr(affinity, "cpu_quota", lambda: 0.5)
    (check,) = doctor.quota_of_cpus()
    assert not check.is_ok and "cpuset" in check.fix
    assert check.detail.startswith(f"0.5 of {num_cores} cores: raypar uses 1 core, and can't pin")


NCCL = "2.30.7"


@pytest.fixture
def one_gpu(monkeypatch):
    """A stand-in for the driver, and a torch built for it."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpus, "torch_build", lambda: gpus.TorchBuild("13.2", ""))
    return nvml.install(monkeypatch, Card(1))


def test_gpus_used_by_torch_pass_with_their_model_and_nccl_version(one_gpu):
    seen, nccl, persistence = doctor.gpus(TorchGpus(1, NCCL))
    assert seen == CheckResult("GPU", "1 × NVIDIA H100, and torch uses them")
    assert nccl.is_ok and nccl.detail == NCCL and persistence.is_ok
    assert doctor.torch_imports()[1] is not None, "the process that imports torch knows its NCCL"
    seen, _ = doctor.gpus(None)
    assert seen.is_ok and "unknown" in seen.detail
    one_gpu.cards = ()
    assert [check.detail for check in doctor.gpus(TorchGpus(0, NCCL))] == ["none"]


def test_a_gpu_invisible_to_torch_fails(one_gpu, monkeypatch):
    seen, *_ = doctor.gpus(TorchGpus(0, NCCL))
    assert not seen.is_ok and "torch sees none" in seen.detail and "torch.cuda.init()" in seen.fix
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    seen, *_ = doctor.gpus(TorchGpus(0, NCCL))
    assert not seen.is_ok and seen.fix == "unset CUDA_VISIBLE_DEVICES"


def test_a_driver_too_old_for_the_installed_torch_fails(one_gpu):
    one_gpu.driver, one_gpu.cuda = "535.183.01", 12020
    seen, *_ = doctor.gpus(TorchGpus(1, NCCL))
    assert not seen.is_ok and "needs driver 580.65.06 or later; installed: 535.183.01" in seen.detail
    assert "newer driver" in seen.fix


def test_missing_nccl_and_disabled_persistence_fail(one_gpu):
    one_gpu.cards = (Card(1), Card(2, is_persistent=False))
    _, nccl, persistence = doctor.gpus(TorchGpus(2, ""))
    assert not nccl.is_ok and "gradients" in nccl.fix
    assert (persistence.detail, persistence.is_ok) == ("off for 1 GPU", False) and "nvidia-smi -pm 1" in persistence.fix
    one_gpu.cards = (Card(1, is_persistent=None),)
    assert len(list(doctor.gpus(TorchGpus(1, NCCL)))) == 2, "WSL2 has no persistence mode"


def test_incomplete_data_fails_and_missing_data_does_not(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYPAR_DATA_DIR", str(tmp_path))
    (check,) = doctor.data_sets()
    assert check.is_ok and "MNIST" in check.detail and "fails" in check.detail
    (raw := tmp_path / "MNIST" / "raw").mkdir(parents=True)
    (raw / "train-images-idx3-ubyte").write_bytes(b"half")
    broken, absent = doctor.data_sets()
    assert not broken.is_ok and str(tmp_path) in broken.detail and broken.fix
    assert "MNIST," not in absent.detail.replace("FashionMNIST,", "")


def test_a_bad_store_and_results_not_in_their_store_fail(tmp_path):
    assert doctor.store(tmp_path, f"sqlite:///{tmp_path / 'mlflow.db'}").is_ok
    (tmp_path / "broken.db").write_text("no database")
    check = doctor.store(tmp_path, f"sqlite:///{tmp_path / 'broken.db'}")
    assert not check.is_ok and "broken.db" in check.detail and check.fix
    assert not list(doctor.unsent(tmp_path))
    (spool := tmp_path / ".raypar" / "spool").mkdir(parents=True)
    (spool / "one-1.jsonl").write_text("{}\n")
    (spool / "one-1.ack").write_text(json.dumps({"tracking_uri": "http://127.0.0.1:1", "offset": 0}))
    (check,) = doctor.unsent(tmp_path)
    assert not check.is_ok and "raypar store sync" in check.fix


@pytest.mark.parametrize(("torch_there", "is_ok"), [("2.15.0", True), ("2.15.0+cpu", True), ("2.14.1+cpu", False)])
def test_nodes_need_one_version_of_torch_whatever_its_build(monkeypatch, torch_there, is_ok):
    monkeypatch.setattr(doctor, "joined_cluster", lambda _: nullcontext(Cluster(({"CPU": 2.0},), is_own=False)))
    monkeypatch.setattr(doctor, "versions_of_nodes", lambda: {"node1": {"torch": torch_there}})
    monkeypatch.setattr(doctor, "versions", lambda: {"torch": "2.15.0+cu130"})
    check = doctor.cluster("auto")
    assert check.is_ok == is_ok and ("node1: torch 2.14.1 there, 2.15.0 here" in check.detail) != is_ok
