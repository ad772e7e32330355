"""Which point `raypar profile` looks into, and which studies it refuses."""

from __future__ import annotations

import pytest

from raypar import Study, Workload, choice, grid, uniform
from raypar.cli.profile import point_of
from raypar.cli.study import check_can_profile
from raypar.errors import RayparError
from raypar.study.overrides import with_flags
from raypar.workloads import digits


def test_the_baseline_is_looked_into() -> None:
    study = Study(
        workload=digits,
        name="s",
        space={"batch_size": grid(32, 64), "num_workers": grid(2, 1)},
        baseline={"num_workers": 1},
    )
    assert point_of(study) == {"batch_size": 32, "num_workers": 1}


def test_without_a_baseline_it_is_the_first_point() -> None:
    assert point_of(Study(workload=digits, name="s", space={"lr": grid(0.3, 0.1)})) == {"lr": 0.3}


def test_a_flag_chooses_another_point() -> None:
    study = Study(workload=digits, name="s", space={"num_workers": grid(1, 2)}, baseline={"num_workers": 1})
    assert point_of(with_flags(study, ["num_workers=2"])) == {}  # it is in the config then
    assert with_flags(study, ["num_workers=2"]).config["num_workers"] == 2


def test_of_what_is_drawn_it_is_the_first_value() -> None:
    study = Study(
        workload=digits, name="s", space={"batch_size": choice(64, 32), "lr": uniform(0.1, 0.5)}, num_trials=2
    )
    assert point_of(study) == {"batch_size": 64, "lr": 0.1}


def test_a_study_that_sweeps_nothing_has_one_point() -> None:
    assert point_of(Study(workload=digits, name="s")) == {}


def test_a_train_loop_is_refused_with_the_way_out() -> None:
    study = Study(workload=Workload.from_train_loop(lambda config: None, name="loop"), name="s")
    with pytest.raises(RayparError, match="workload loop is a train loop") as refused:
        check_can_profile(study, "--profile")
    assert "torch.profiler" in refused.value.hint
    check_can_profile(Study(workload=digits, name="s"), "--profile")
