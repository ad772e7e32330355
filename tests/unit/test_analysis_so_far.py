"""The best point so far, and an honest word on whether it can be told."""

from __future__ import annotations

import pytest
from results import make_result

from raypar.analysis.analyse import analyse
from raypar.analysis.progress import interim_best
from raypar.analysis.question import Question
from raypar.study.trial import TrialState

SCALING = Question("s", {"num_workers": 1}, ("num_workers", "lr"))
SEARCH = Question("s", {}, ("lr",), num_repeats=1)


def scaling(times: dict[tuple[int, float], list[float]]):
    return [
        make_result({"num_workers": n, "lr": lr}, repeat, time_s)
        for (n, lr), all_s in times.items()
        for repeat, time_s in enumerate(all_s)
    ]


def test_nothing_is_best_before_a_point_and_its_baseline_have_finished() -> None:
    assert interim_best(SCALING, []) is None
    assert interim_best(SCALING, scaling({(1, 0.1): [4.0]})) is None
    assert interim_best(SCALING, scaling({(1, 0.1): [4.0], (2, 0.3): [2.0]})) is None
    failed = make_result({"num_workers": 2, "lr": 0.1}, state=TrialState.FAILED)
    assert interim_best(SCALING, [*scaling({(1, 0.1): [4.0]}), failed]) is None
    assert interim_best(SEARCH, [make_result({"lr": 0.1})]) is None


def test_the_point_with_the_best_median_speedup_over_its_own_baseline_is_best() -> None:
    results = scaling({(1, 0.1): [4.0] * 3, (2, 0.1): [2.5, 2.4, 2.6], (1, 0.3): [8.0] * 3, (2, 0.3): [4.0, 4.1, 4.2]})
    best = interim_best(SCALING, results)
    assert best.point == {"num_workers": 2, "lr": 0.3} and best.is_significant
    assert best.estimate.value == pytest.approx(8 / 4.1)
    known = {tuple(p.point.items()): p.speedup for p in analyse(SCALING, results).points}
    assert known[tuple(best.point.items())] == best.estimate  # what the report will say


@pytest.mark.parametrize(
    ("times", "is_significant"), [([2.0], False), ([2.0, 6.0, 3.5], False), ([2.0, 2.1, 2.05], True)]
)
def test_a_speedup_is_told_only_where_its_interval_leaves_out_one(times: list[float], is_significant: bool) -> None:
    best = interim_best(SCALING, scaling({(1, 0.1): [4.0] * len(times), (2, 0.1): times}))
    assert best.is_significant is is_significant


@pytest.mark.parametrize(("mode", "lr"), [("max", 0.3), ("min", 0.1)])
def test_without_a_baseline_the_best_metric_counts_and_one_trial_tells_nothing(mode: str, lr: float) -> None:
    question = Question("s", {}, ("lr",), mode=mode, num_repeats=1)
    results = [make_result({"lr": 0.1}, accuracy=0.91), make_result({"lr": 0.3}, accuracy=0.97)]
    best = interim_best(question, results)
    assert best.point == {"lr": lr} and best.quantity == "accuracy" and not best.is_significant


def test_a_metric_is_told_where_it_is_better_block_by_block() -> None:
    question = Question("s", {}, ("lr",))
    for gaps, is_significant in (((0.05, 0.051, 0.049), True), ((0.05, -0.05, 0.02), False)):
        results = [make_result({"lr": 0.1}, repeat, accuracy=0.9) for repeat in range(3)]
        results += [make_result({"lr": 0.3}, repeat, accuracy=0.9 + gap) for repeat, gap in enumerate(gaps)]
        assert interim_best(question, results).is_significant is is_significant
