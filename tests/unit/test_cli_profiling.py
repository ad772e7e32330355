"""``raypar model profile``: the profiled point, and refused studies."""

import pytest

from raypar import Study, Workload, choice, grid, uniform
from raypar.cli.profile import point_of
from raypar.cli.study import check_can_profile
from raypar.errors import RayparError
from raypar.workloads import digits


@pytest.mark.parametrize(
    ("space", "baseline", "point"),
    [
        ({"lr": grid(0.3, 0.1), "num_workers": grid(2, 1)}, {"num_workers": 1}, {"lr": 0.3, "num_workers": 2}),
        (
            {"overlap": grid(True, False), "num_workers": grid(1, 2)},
            {"overlap": False},
            {"overlap": False, "num_workers": 2},
        ),
        ({"lr": grid(0.3, 0.1)}, {"lr": 0.1}, {"lr": 0.1}),
        ({"num_workers": choice(1, 4, 2)}, {}, {"num_workers": 4}),
        ({"lr": grid(0.3, 0.1)}, {}, {"lr": 0.3}),
        ({"batch_size": choice(64, 32), "lr": uniform(0.1, 0.5)}, {}, {"batch_size": 64, "lr": 0.1}),
        ({}, {}, {}),
    ],
    ids=["most", "most beside a baseline", "baseline", "most of those drawn", "first", "drawn", "only"],
)
def test_the_point_with_the_most_workers_is_profiled(space, baseline, point):
    assert point_of(Study(workload=digits, name="s", space=space, baseline=baseline)) == point


def test_a_train_loop_is_refused_with_a_hint():
    study = Study(workload=Workload.from_train_loop(lambda config: None, name="loop"), name="s")
    with pytest.raises(RayparError, match="workload loop is a train loop") as refused:
        check_can_profile(study, "--profile")
    assert "torch.profiler" in refused.value.hint
    check_can_profile(Study(workload=digits, name="s"), "--profile")
