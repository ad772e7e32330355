"""Exit codes, and what a store without the study is reported as."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from command import raypar

from raypar.errors import BrokeOff, RayparError, StoreError
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
