"""`raypar doctor` finds what is amiss, and says how to mend it."""

from __future__ import annotations

import json
import socket
from contextlib import closing
from pathlib import Path

import pytest

from raypar.doctor import (
    cores,
    cpu_quota,
    data_sets,
    disk,
    gpus,
    memory,
    open_files,
    out_of_range,
    pinning,
    port,
    shared_memory,
    store,
    torch_imports,
    unsent,
    versions_in_range,
)
from raypar.train.affinity import allowed_cores


def test_versions_in_the_ranges_asked_for_are_fine() -> None:
    (finding,) = versions_in_range()
    assert finding.is_well and not finding.mend


def test_a_package_of_another_version_is_named_with_the_command_that_mends_it() -> None:
    ((requirement, installed),) = out_of_range(["ray[train,tune]<2", "numpy>=1"])
    assert requirement.name == "ray" and installed is not None and installed.startswith("2.")


def test_an_absent_package_is_amiss_unless_it_is_of_an_extra() -> None:
    texts = ["no-such-package-here>=1", 'no-such-extra-here>=1; extra == "more"', 'numpy<1; extra == "more"']
    found = {requirement.name: installed for requirement, installed in out_of_range(texts)}
    assert found.pop("no-such-package-here") is None
    assert list(found) == ["numpy"], "an extra's package that is there has to be of its version"


def test_torch_is_tried_in_a_process_of_its_own() -> None:
    found = torch_imports()
    assert found.finding.is_well and found.num_gpus is not None


def test_cores_and_pinning_are_told() -> None:
    assert cores().found.startswith(str(len(allowed_cores())))
    assert pinning().is_well


@pytest.mark.parametrize("told", ["max 100000", "", "nonsense"])
def test_no_quota_is_nothing_to_tell(tmp_path: Path, told: str) -> None:
    (tmp_path / "cpu.max").write_text(told)
    assert not list(cpu_quota(tmp_path))


def test_a_quota_below_the_cores_is_amiss(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("50000 100000")
    (finding,) = cpu_quota(tmp_path)
    assert not finding.is_well and "0.5" in finding.found and "cpuset" in finding.mend


def test_a_quota_of_all_cores_is_fine(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text(f"{100_000 * len(allowed_cores())} 100000")
    assert not list(cpu_quota(tmp_path))


def test_memory_disk_and_limits_are_told_with_sizes(tmp_path: Path) -> None:
    for finding in (memory(), *shared_memory(tmp_path), *disk(tmp_path)):
        assert any(unit in finding.found for unit in ("GB", "MB", "kB", "GiB", "MiB")), finding
    assert open_files().found
    assert not list(shared_memory(tmp_path / "absent"))


def test_a_gpu_that_torch_does_not_see_is_amiss(monkeypatch: pytest.MonkeyPatch) -> None:
    # No GPU to look at: what the driver tells is made up.
    monkeypatch.setattr("raypar.doctor.gpu_model", lambda: "Tesla P40")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus(1).is_well
    monkeypatch.setattr("raypar.doctor.num_gpus", lambda: 2)
    assert not gpus(0).is_well and "install torch" in gpus(0).mend
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert "CUDA_VISIBLE_DEVICES" in gpus(0).mend


def test_data_that_is_half_there_is_amiss_and_data_that_is_absent_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYPAR_DATA_DIR", str(tmp_path))
    (finding,) = data_sets()
    assert finding.is_well and "MNIST" in finding.found and "refused" in finding.found
    (tmp_path / "MNIST" / "raw").mkdir(parents=True)
    (tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte").write_bytes(b"half")
    broken, absent = data_sets()
    assert not broken.is_well and str(tmp_path) in broken.found and broken.mend
    assert "MNIST," not in absent.found.replace("FashionMNIST,", "")


def test_a_store_that_cannot_be_used_is_amiss(tmp_path: Path) -> None:
    assert store(tmp_path, f"sqlite:///{tmp_path / 'mlflow.db'}").is_well
    (tmp_path / "broken.db").write_text("no database")
    finding = store(tmp_path, f"sqlite:///{tmp_path / 'broken.db'}")
    assert not finding.is_well and "broken.db" in finding.found and finding.mend


def test_results_that_wait_for_their_store_are_told(tmp_path: Path) -> None:
    assert not list(unsent(tmp_path))
    spool = tmp_path / ".raypar" / "spool" / "one-1.jsonl"
    spool.parent.mkdir(parents=True)
    spool.write_text("{}\n")
    spool.with_suffix(".ack").write_text(json.dumps({"tracking_uri": "http://127.0.0.1:1", "offset": 0}))
    (finding,) = unsent(tmp_path)
    assert not finding.is_well and "raypar sync" in finding.mend


def test_a_port_that_is_taken_is_told_and_the_next_one_named() -> None:
    with closing(socket.socket()) as taken:
        try:
            taken.bind(("127.0.0.1", 5000))
        except OSError:
            pass  # somebody has it: as good
        else:
            taken.listen()
        finding = port("sqlite:////tmp/x.db")
    assert finding.is_well and "5000 is taken" in finding.found
    assert "none is needed" in port("http://127.0.0.1:5000").found
