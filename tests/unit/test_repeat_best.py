"""``--repeat-best``: the leading points of a search as a study of its own, with other seeds."""

from pathlib import Path

import pytest

from raypar import RayparError, Study, choice, grid, uniform
from raypar.execution.flags import RunFlags
from raypar.execution.options import Options
from raypar.execution.plan import make_plan
from raypar.execution.repeat_best import repeating_best
from raypar.run.cluster import Cluster
from raypar.study.loader import LoadedStudy
from raypar.study.trial import TrialResult, TrialState
from raypar.workloads import digits

SPACE = {"lr": uniform(0.1, 1.0), "batch_size": choice(32, 64)}
ONE_NODE = Cluster(({"CPU": 2},), is_own=True)


def followed(num_points, accuracies, **changes):
    fields = {"workload": digits, "name": "s", "space": SPACE, "num_repeats": 2, "max_concurrent_trials": 2, **changes}
    study = Study(**fields)
    results = [
        TrialResult(study.trial({"lr": lr, "batch_size": 32}, 0), state, wall_s=2.0, reports=({"accuracy": accuracy},))
        for lr, (accuracy, state) in accuracies.items()
    ]
    loaded = LoadedStudy(study, Path("s.py"), "", "s", (), ())
    options = Options(project_dir=Path(), tracking_uri="", flags=RunFlags())
    return repeating_best(loaded, options, num_points, results)


ENDED = {
    0.2: (0.90, TrialState.FINISHED),
    0.3: (0.95, TrialState.STOPPED),
    0.4: (0.99, TrialState.DIVERGED),
    0.5: (0.93, TrialState.FINISHED),
}


def test_the_leading_points_are_repeated_with_other_seeds():
    loaded, options = followed(2, ENDED)
    study = loaded.study
    assert (study.name, study.leader, study.is_search) == ("s-best", {"lr": 0.3, "batch_size": 32}, False)
    assert [point["lr"] for point in study.points()] == [0.3, 0.5]
    plan = make_plan(study, ONE_NODE, (), source=options.source)
    assert sorted((spec.config["lr"], spec.seed) for spec in plan.missing) == [(0.3, 1), (0.3, 2), (0.5, 1), (0.5, 2)]
    assert plan.question.text == "Is lr=0.3 batch_size=32 the best of s?"
    assert plan.question.leader == study.leader


def test_a_search_with_a_target_is_repeated_to_the_end_of_training():
    study = followed(2, ENDED, target=0.9, max_concurrent_trials=None)[0].study
    assert (study.target, study.leader) == (None, {})


@pytest.mark.parametrize(
    ("changes", "accuracies", "problem"),
    [
        ({"space": {"lr": grid(0.1, 0.2)}}, {}, "s.py is not a search"),
        ({}, {}, "no trial has accuracy in the store"),
        ({}, {0.2: (0.9, TrialState.FINISHED)}, "only one trial has accuracy"),
    ],
)
def test_what_cannot_be_repeated_is_refused(changes, accuracies, problem):
    with pytest.raises(RayparError, match=problem):
        followed(3, accuracies, **changes)
