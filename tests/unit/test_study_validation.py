"""All mistakes of a study are reported at once, and each once; the kinds are in `bad_input`."""

from __future__ import annotations

from typing import Any

import pytest

from raypar import Study, StudyError, grid
from raypar.workloads import digits


def mistakes_of(**changes: Any) -> StudyError:
    with pytest.raises(StudyError) as caught:
        Study(**{"workload": digits, "name": "s", "space": {"num_workers": grid(1, 2)}, **changes})
    return caught.value


def test_all_mistakes_are_reported_at_once() -> None:
    error = mistakes_of(
        name="a/b",
        num_repeats=0,
        space={"num_workers": grid(0, 1), "bach_size": grid(1)},
        config={"epoch": 3, "lr": "fast"},
        baseline={"num_workers": 7, "optimizer": "sgd"},
    )
    fields = {m.field for m in error.mistakes}
    assert fields == {
        "name",
        "num_repeats",
        "space['num_workers']",
        "space['bach_size']",
        "config['epoch']",
        "config['lr']",
        "baseline['num_workers']",
        "baseline['optimizer']",
    }
    assert str(error).startswith("8 mistakes in the study")


def test_a_mistake_of_many_points_is_reported_for_each_point_once() -> None:
    error = mistakes_of(space={"num_workers": grid(1, 2), "batch_size": grid(1, 64)})
    assert [m.field for m in error.mistakes] == ["num_workers=2 batch_size=1.batch_size"]
