"""The command that goes on with an interrupted study names what `raypar resume` would otherwise refuse to take."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from raypar import Study
from raypar.cli.executing import resume_command
from raypar.cli.resuming import Flags, is_here, is_taken, last_flags
from raypar.options import Options
from raypar.record import execution_record
from raypar.study.loader import LoadedStudy
from raypar.track.store import default_tracking_uri
from raypar.workloads import digits


def command(path: Path, folder: Path, *, uri: str = "", address: str | None = None) -> list[str]:
    loaded = LoadedStudy(Study(workload=digits, name="a study"), path, "", "", (), ())
    return shlex.split(resume_command(loaded, Options(folder, uri or default_tracking_uri(folder), address)))


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


def resumed(folder: Path, given: str | None, **first: Any) -> Flags:
    """The flags that a study goes on with when `resume` is given an address, or none."""
    loaded = LoadedStudy(Study(workload=digits, name="s"), folder / "s.py", "", "", (), ())
    record = execution_record(loaded, Options(folder, default_tracking_uri(folder), **first))
    return last_flags("s", json.loads(record.tags["raypar.resume"]), folder, address=given)


def test_a_cluster_for_oneself_is_one_when_a_study_goes_on_and_no_other_is(tmp_path: Path) -> None:
    assert resumed(tmp_path, None, address="auto", exclusive=True).exclusive
    assert resumed(tmp_path, "head:6379", address="head:6379", exclusive=True).exclusive
    assert not resumed(tmp_path, "another:6379", address="head:6379", exclusive=True).exclusive
    assert not resumed(tmp_path, None, address="auto").exclusive


@pytest.mark.parametrize("address", ["auto", "localhost:6379", "127.0.0.1:6379", "[::1]:6379"])
def test_addresses_of_this_machine(address: str) -> None:
    assert is_here(address)


@pytest.mark.parametrize("address", ["10.0.0.1:6379", "head:6379", "ray://127.0.0.1:10001", "autos", ""])
def test_addresses_of_elsewhere(address: str) -> None:
    assert not is_here(address)


def test_a_link_that_leads_out_of_the_folder_is_elsewhere(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "s.py").symlink_to(tmp_path / "s.py")
    assert not is_taken(str(folder / "s.py"), folder)
    assert not is_taken("s\0.py", folder)
