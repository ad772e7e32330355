"""`raypar doctor` fails a check that matters, with the fix."""

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
    pinning,
    port,
    shared_memory,
    store,
    torch_imports,
    unmet_requirements,
    unsent,
    versions_in_range,
)
from raypar.train.affinity import allowed_cores


def test_versions_in_the_ranges_asked_for_are_fine() -> None:
    (check,) = versions_in_range()
    assert check.is_ok


def test_a_package_of_another_version_is_named_with_the_command_that_fixes_it() -> None:
    ((requirement, installed),) = unmet_requirements(["ray[train,tune]<2", "numpy>=1"])
    assert requirement.name == "ray" and installed is not None and installed.startswith("2.")


def test_an_absent_package_fails_unless_it_is_of_an_extra() -> None:
    texts = ["no-such-package-here>=1", 'no-such-extra-here>=1; extra == "more"', 'numpy<1; extra == "more"']
    found = {requirement.name: installed for requirement, installed in unmet_requirements(texts)}
    assert found.pop("no-such-package-here") is None
    assert list(found) == ["numpy"], "an extra's package that is there has to be of its version"


def test_torch_is_tried_in_a_process_of_its_own() -> None:
    check, num_gpus = torch_imports()
    assert check.is_ok and num_gpus is not None


def test_cores_and_pinning_are_told() -> None:
    assert cores().detail.startswith(str(len(allowed_cores())))
    assert pinning().is_ok


@pytest.mark.parametrize("content", ["max 100000", "", "nonsense", f"{100_000 * len(allowed_cores())} 100000"])
def test_no_quota_or_one_of_all_cores_passes(tmp_path: Path, content: str) -> None:
    (tmp_path / "cpu.max").write_text(content)
    assert not list(cpu_quota(tmp_path))


def test_a_quota_below_the_cores_fails(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("50000 100000")
    (check,) = cpu_quota(tmp_path)
    assert not check.is_ok and "0.5" in check.detail and "cpuset" in check.fix


def test_memory_disk_and_limits_are_told_with_sizes(tmp_path: Path) -> None:
    for check in (memory(), *shared_memory(tmp_path), *disk(tmp_path)):
        assert any(unit in check.detail for unit in ("GB", "MB", "kB", "GiB", "MiB")), check
    assert open_files().detail
    assert not list(shared_memory(tmp_path / "absent"))


def test_a_gpu_that_torch_does_not_see_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # No GPU to look at: what the driver tells is made up.
    monkeypatch.setattr("raypar.doctor.gpu_model", lambda: "Tesla P40")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus(1).is_ok
    (tmp_path / "0000:00:1e.0").touch()
    assert not gpus(0, tmp_path).is_ok and "install torch" in gpus(0, tmp_path).fix
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert "CUDA_VISIBLE_DEVICES" in gpus(0, tmp_path).fix


def test_data_that_is_half_there_fails_and_data_that_is_absent_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYPAR_DATA_DIR", str(tmp_path))
    (check,) = data_sets()
    assert check.is_ok and "MNIST" in check.detail and "refused" in check.detail
    (tmp_path / "MNIST" / "raw").mkdir(parents=True)
    (tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte").write_bytes(b"half")
    broken, absent = data_sets()
    assert not broken.is_ok and str(tmp_path) in broken.detail and broken.fix
    assert "MNIST," not in absent.detail.replace("FashionMNIST,", "")


def test_a_store_that_cannot_be_used_fails(tmp_path: Path) -> None:
    assert store(tmp_path, f"sqlite:///{tmp_path / 'mlflow.db'}").is_ok
    (tmp_path / "broken.db").write_text("no database")
    check = store(tmp_path, f"sqlite:///{tmp_path / 'broken.db'}")
    assert not check.is_ok and "broken.db" in check.detail and check.fix


def test_results_that_wait_for_their_store_are_told(tmp_path: Path) -> None:
    assert not list(unsent(tmp_path))
    spool = tmp_path / ".raypar" / "spool" / "one-1.jsonl"
    spool.parent.mkdir(parents=True)
    spool.write_text("{}\n")
    spool.with_suffix(".ack").write_text(json.dumps({"tracking_uri": "http://127.0.0.1:1", "offset": 0}))
    (check,) = unsent(tmp_path)
    assert not check.is_ok and "raypar sync" in check.fix


def test_a_port_that_is_taken_is_told_and_the_next_one_named() -> None:
    with closing(socket.socket()) as taken:
        try:
            taken.bind(("127.0.0.1", 5000))
        except OSError:
            pass  # somebody has it: as good
        else:
            taken.listen()
        check = port("sqlite:////tmp/x.db")
    assert check.is_ok and "5000 is taken" in check.detail
    assert "none is needed" in port("http://127.0.0.1:5000").detail
