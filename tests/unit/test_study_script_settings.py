"""Settings of a script: which values are valid, and that those that had no effect are noticed."""

import pytest

from raypar import Study, Workload, grid
from raypar.errors import StudyError
from raypar.observe.settings import SETTINGS, WITHOUT, hooks, not_applied
from raypar.study.script_settings import (
    CHANGE,
    COUNTERFACTUALS,
    SCRIPT_SETTINGS,
    WHAT_IF,
    is_counterfactual,
    script_settings,
    settings_of,
    text_of,
)
from raypar.train.script_times import SettingNotApplied, check_applied


def test_every_setting_that_is_described_can_be_applied():
    assert SETTINGS.keys() == SCRIPT_SETTINGS.keys() - {WHAT_IF, CHANGE}
    assert WITHOUT.keys() == COUNTERFACTUALS.keys()
    assert hooks(dict.fromkeys(SETTINGS, True)).keys() == {module for module, _ in SETTINGS.values()}


@pytest.mark.parametrize("change", ["none", "loader_workers=0", "threads=2 pin_memory=False compile=True"])
def test_valid_changes(change):
    assert SCRIPT_SETTINGS[CHANGE].check(change) is None
    assert text_of(settings_of(change)) == change


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("loader_workers=banana", "sets loader_workers to 'banana': must be a whole number"),
        ("loader_workers=True", "sets loader_workers to True: must be a whole number"),
        ("threads=0", "sets threads to 0: must be at least 1"),
        ("pin_memory=1", "sets pin_memory to 1: must be True or False"),
        ("lodaer_workers=1", "has an unknown setting 'lodaer_workers', did you mean 'loader_workers'?"),
        ("what_if=2", "has an unknown setting 'what_if', choose from: bucket_cap_mb, *"),
        ("compile", "needs key=value, not 'compile'"),
        ("threads=1 threads=2", "sets threads twice"),
        ("", "is empty; write 'none' to change nothing"),
    ],
)
def test_changes_that_are_refused(change, problem):
    found = SCRIPT_SETTINGS[CHANGE].check(change)
    assert found is not None and found.startswith(problem.removesuffix("*"))


def test_a_study_with_a_wrong_change_does_not_start():
    command = Workload.from_command("python train.py")
    with pytest.raises(StudyError, match="`change` sets loader_workers to 'banana': must be a whole number"):
        Study(workload=command, name="s", space={"change": grid("none", "loader_workers=banana")})


def test_the_script_s_own_hyperparameters_are_no_settings():
    config = {"threads": 4, "compile": None, "change": "tf32=True", "what_if": "none", "lr": 0.1}
    assert script_settings(config) == {"tf32": True, "threads": 4}
    assert script_settings(config, names=("threads",)) == {"tf32": True}
    assert not is_counterfactual(config) and is_counterfactual({"what_if": "no loading"})


def test_a_setting_without_effect_fails_the_trial(tmp_path):
    settings = {"threads": 2, "what_if": "no communication"}
    assert not_applied(settings, tmp_path) == ["threads", "what_if"]
    with pytest.raises(SettingNotApplied, match="threads=2, what_if=no communication had no effect: no torch"):
        check_applied(settings, tmp_path, 0, (), "no torch")
    (tmp_path / "applied-threads").touch()
    with pytest.raises(SettingNotApplied, match="had no effect: no model is a DistributedDataParallel"):
        check_applied(settings, tmp_path, 0, (), "")
    check_applied(settings, tmp_path, 1, (), "")
    (tmp_path / "applied-what_if").touch()
    check_applied(settings, tmp_path, 0, (), "")
