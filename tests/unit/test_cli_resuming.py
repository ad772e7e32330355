"""The command that goes on with an interrupted study names what `raypar resume` would otherwise refuse to take."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from raypar import Study
from raypar.cli.study import resume_command
from raypar.errors import RayparError
from raypar.execution.options import Options, ResumeFlags, is_in_folder, is_of_this_machine
from raypar.execution.results import execution_record
from raypar.study.loader import LoadedStudy
from raypar.track.store import default_tracking_uri
from raypar.train.job import Profiling
from raypar.workloads import digits


def a_folders_options(folder: Path, uri: str = "", **flags: Any) -> Options:
    return Options(project_dir=folder, tracking_uri=uri or default_tracking_uri(folder), **flags)


def command(path: Path, folder: Path, *, uri: str = "", address: str | None = None) -> list[str]:
    loaded = LoadedStudy(Study(workload=digits, name="a study"), path, "", "", (), ())
    return shlex.split(resume_command(loaded, a_folders_options(folder, uri, address=address)))


def test_a_file_of_this_folder_needs_no_naming_and_one_of_elsewhere_does(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    assert command(folder / "studies" / "s.py", folder) == ["raypar", "resume", "a study"]
    assert command(tmp_path / "s.py", folder)[-2:] == ["--file", str(tmp_path / "s.py")]


def test_a_cluster_of_this_machine_needs_no_naming_and_one_of_elsewhere_does(tmp_path: Path) -> None:
    assert command(tmp_path / "s.py", tmp_path, address="auto") == ["raypar", "resume", "a study"]
    assert command(tmp_path / "s.py", tmp_path, address="head:6379")[-2:] == ["--address", "head:6379"]


def test_another_store_is_named_without_its_password(tmp_path: Path) -> None:
    named = command(tmp_path / "s.py", tmp_path, uri="http://me:open-sesame@head:5000")
    assert named[-2:] == ["--tracking-uri", "http://me:***@head:5000"]


def resumed(folder: Path, given: str | None, **first: Any) -> ResumeFlags:
    """The flags that a study goes on with when `resume` is given an address, or none."""
    loaded = LoadedStudy(Study(workload=digits, name="s"), folder / "s.py", "", "", (), ())
    record = execution_record(loaded, a_folders_options(folder, **first))
    stored = json.loads(record.tags["raypar.resume"])
    return ResumeFlags.from_stored("s", stored).trusted("s", folder, address=given)


def test_a_cluster_for_oneself_is_one_when_a_study_goes_on_and_no_other_is(tmp_path: Path) -> None:
    assert resumed(tmp_path, None, address="auto", exclusive=True).exclusive
    assert resumed(tmp_path, "head:6379", address="head:6379", exclusive=True).exclusive
    assert not resumed(tmp_path, "another:6379", address="head:6379", exclusive=True).exclusive
    assert not resumed(tmp_path, None, address="auto").exclusive


@pytest.mark.parametrize("address", ["auto", "localhost:6379", "127.0.0.1:6379", "[::1]:6379"])
def test_addresses_of_this_machine(address: str) -> None:
    assert is_of_this_machine(address)


@pytest.mark.parametrize("address", ["10.0.0.1:6379", "head:6379", "ray://127.0.0.1:10001", "autos", ""])
def test_addresses_of_elsewhere(address: str) -> None:
    assert not is_of_this_machine(address)


def test_a_link_that_leads_out_of_the_folder_is_elsewhere(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "s.py").symlink_to(tmp_path / "s.py")
    assert not is_in_folder(str(folder / "s.py"), folder)
    assert not is_in_folder("s\0.py", folder)


def test_all_options_that_are_stored_are_those_that_a_study_goes_on_with(tmp_path: Path) -> None:
    first: dict[str, Any] = {
        "settings": ["epochs=1"],
        "address": "auto",
        "isolation": "fresh",
        "trial_timeout_s": 7.5,
        "profiling": Profiling(20),
        "log_model": True,
        "system_metrics": True,
        "exclusive": True,
        "not_before": 103.0,
    }
    assert resumed(tmp_path, None, **first).applied_to(a_folders_options(tmp_path)) == a_folders_options(
        tmp_path, **first
    )
    assert not resumed(tmp_path, None, with_ray=False).applied_to(a_folders_options(tmp_path)).with_ray


def test_the_stored_keys_and_a_record_of_them_stay_readable() -> None:
    stored = {
        "file": "s.py",
        "set": ["epochs=1"],
        "repeats": 3,
        "seed": 0,
        "data_dir": None,
        "address": None,
        "isolation": "warm",
        "no_ray": False,
        "trial_timeout": None,
        "num_profiled_steps": 0,
        "log_model": False,
        "system_metrics": False,
        "exclusive": False,
        "not_before": 0.0,
    }
    assert ResumeFlags.from_stored("s", stored).to_json() == json.dumps(stored, separators=(",", ":"))
    first_keys = dict(list(stored.items())[:9])
    assert ResumeFlags.from_stored("s", {**first_keys, "of a later version": 1}).to_json() == json.dumps(
        stored, separators=(",", ":")
    )
    with pytest.raises(RayparError, match="does not say how study `s` was run: seed, exclusive"):
        ResumeFlags.from_stored("s", {**stored, "seed": None, "exclusive": "yes"})
