"""Exit codes, logs of commands, and what a store without the study is reported as."""

import os
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from command import raypar

from raypar.cli import study
from raypar.cli.common import DRIVER_LOG, quiet
from raypar.errors import BrokeOff, RayparError, StoreError
from raypar.execution.options import Options
from raypar.execution.stored import unknown_study


def test_a_study_without_a_result_is_reported_with_the_command_that_runs_it():
    error = unknown_study("mine", SimpleNamespace(studies=lambda: [SimpleNamespace(name="mine")]))
    assert str(error) == "study `mine` has no result yet\n  → `raypar resume mine` runs what is missing"


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [(BrokeOff("lost the cluster"), 1), (KeyError("bug"), 1), (StoreError("no such store"), 2), (RayparError("no"), 2)],
    ids=lambda value: type(value).__name__,
)
def test_a_study_that_broke_off_has_failed_and_what_the_user_can_fix_is_bad_input(monkeypatch, error, exit_code):
    monkeypatch.setattr("raypar.track.store.Store.studies", Mock(side_effect=error))
    code, _, err = raypar("list")
    assert code == exit_code and err.startswith("error: ")


def test_every_execution_has_a_log_of_its_own_which_no_other_command_of_the_folder_removes(monkeypatch, tmp_path):
    loaded = SimpleNamespace(study=SimpleNamespace(name="s"), path=tmp_path / "s.py")
    options = Options(project_dir=tmp_path, tracking_uri="sqlite:///x")
    logs = tmp_path / ".raypar" / "logs"
    log_dirs = []

    def execute(_, __, log_dir, *___):
        log_dirs.append(log_dir)
        if len(log_dirs) == 1:
            os.write(1, b"first, ")
            study.run(loaded, options)  # as a second command that finds nothing to do
            assert list(logs.iterdir()) == log_dirs[:1]
            os.write(1, b"still first")
        return SimpleNamespace(was_interrupted=False, num_done=0)

    monkeypatch.setattr("raypar.execution.execute.execute", execute)
    monkeypatch.setattr(study, "print_outcome", Mock())
    monkeypatch.setattr("raypar.cli.common.exit_as", Mock())
    study.run(loaded, options)
    assert log_dirs[0] != log_dirs[1] and list(logs.iterdir()) == log_dirs[:1]
    assert (log_dirs[0] / DRIVER_LOG).read_text() == "first, still first"


def test_a_log_that_somebody_removes_is_no_failure(tmp_path):
    with quiet(tmp_path / "logs" / "doctor.log"):
        (tmp_path / "logs" / "doctor.log").unlink()
    assert list(tmp_path.iterdir()) == []
