"""Analysis of results: times, speedups and efficiencies of the points."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from results import make_result, make_spec

from raypar import Study, Workload, grid, uniform
from raypar.analysis.analyse import Question, StudyAnalysis, analyse, pair_speedups, question_of
from raypar.analysis.points import PointAnalysis
from raypar.analysis.stats import Method
from raypar.study.trial import TrialResult, TrialState

QUESTION = Question("mnist", {"num_workers": 1}, ("batch_size", "num_workers"), num_repeats=3)

WORKLOAD = Workload(name="mnist_mlp", model=lambda config: None, data=lambda config: None)


def trials(point, times, **more) -> list[TrialResult]:
    return [make_result(point, repeat, time_s, **more) for repeat, time_s in enumerate(times)]


def scaling(*, one=(4.0, 4.4, 4.2), two=(2.0, 2.2, 2.1), batch_size=64, **more) -> list[TrialResult]:
    return [
        *trials({"batch_size": batch_size, "num_workers": 1}, one, **more),
        *trials({"batch_size": batch_size, "num_workers": 2}, two, **more),
    ]


def at(analysis: StudyAnalysis, **point) -> PointAnalysis:
    return next(p for p in analysis.points if p.point == point)


def test_speedup_is_baseline_time_over_time_block_by_block() -> None:
    two = at(analyse(QUESTION, scaling()), batch_size=64, num_workers=2)
    assert two.speedup.value == pytest.approx(2.0)
    # Every pair says 2 exactly, however much the blocks differ from each other.
    assert (two.speedup.low, two.speedup.high) == (pytest.approx(2.0), pytest.approx(2.0))
    assert two.speedup.num_samples == 3
    assert two.time_s.value == 2.1


def test_a_point_is_compared_with_the_one_that_differs_only_in_the_baseline() -> None:
    results = [*scaling(batch_size=64), *scaling(batch_size=128, one=(9.0, 9.0, 9.0), two=(3.0, 3.0, 3.0))]
    analysis = analyse(QUESTION, results)
    assert at(analysis, batch_size=64, num_workers=2).speedup.value == pytest.approx(2.0)
    assert at(analysis, batch_size=128, num_workers=2).speedup.value == pytest.approx(3.0)


def test_a_baseline_is_one_by_definition() -> None:
    one = at(analyse(QUESTION, scaling()), batch_size=64, num_workers=1)
    assert one.is_baseline
    assert (one.speedup.value, one.speedup.method) == (1.0, Method.REFERENCE)


def test_efficiency_is_per_worker_and_relative_to_the_workers_of_the_baseline() -> None:
    question = replace(QUESTION, baseline={"num_workers": 2})
    results = [
        *trials({"batch_size": 64, "num_workers": 2}, (4.0, 4.0, 4.0)),
        *trials({"batch_size": 64, "num_workers": 8}, (2.0, 2.0, 2.0)),
    ]
    eight = at(analyse(question, results), batch_size=64, num_workers=8)
    assert eight.speedup.value == pytest.approx(2.0)
    assert eight.efficiency.value == pytest.approx(0.5)
    assert eight.num_workers == 8


def test_a_baseline_that_leaves_the_workers_alone_has_no_parallel_efficiency() -> None:
    question = Question("mnist", {"optimizer": "sgd"}, ("optimizer",))
    results = [*trials({"optimizer": "sgd"}, (4.0, 4.0)), *trials({"optimizer": "adam"}, (5.0, 5.0))]
    adam = at(analyse(question, results), optimizer="adam")
    assert adam.speedup.value == pytest.approx(0.8)
    assert adam.efficiency is None


def test_a_study_without_baseline_has_no_speedups() -> None:
    analysis = analyse(replace(QUESTION, baseline={}), scaling())
    assert all(p.speedup is None and p.efficiency is None and not p.is_baseline for p in analysis.points)
    assert not any(" as fast as 1" in v for v in analysis.verdicts)


def test_weak_scaling_over_the_same_samples_compares_times() -> None:
    question = Question("mnist", {"num_workers": 1}, ("num_workers",))
    config = {"per_worker_batch_size": 64}
    results = [
        *trials({"num_workers": 1}, (4.0, 4.0), config=config),
        *trials({"num_workers": 2}, (2.5, 2.5), config=config | {"batch_size": 128}),
    ]
    assert at(analyse(question, results), num_workers=2).speedup.value == pytest.approx(1.6)


def test_rates_are_compared_where_a_dropped_batch_makes_the_work_unequal() -> None:
    question = Question("mnist", {"num_workers": 1}, ("num_workers",))
    results = [
        *trials({"num_workers": 1}, (4.0, 4.0, 4.0), num_samples=1000),
        *trials({"num_workers": 2}, (2.0, 2.0, 2.0), num_samples=900),
    ]
    assert at(analyse(question, results), num_workers=2).speedup.value == pytest.approx(450 / 250)
    assert sorted(pair_speedups(question, results).values()) == pytest.approx([1.0] * 3 + [1.8] * 3)


def test_stopped_and_failed_trials_are_counted_but_not_timed() -> None:
    results = [
        *scaling(),
        make_result({"batch_size": 64, "num_workers": 2}, 3, 0.01, state=TrialState.STOPPED),
        make_result({"batch_size": 64, "num_workers": 2}, 4, state=TrialState.FAILED),
    ]
    two = at(analyse(QUESTION, results), batch_size=64, num_workers=2)
    assert (two.num_finished, two.num_stopped, two.num_failed, two.num_trials) == (3, 1, 1, 5)
    assert two.time_s.value == 2.1


def test_a_repeat_without_baseline_is_left_out_of_the_pairs() -> None:
    results = [r for r in scaling(two=(2.0, 2.2, 7.0)) if (r.spec.point["num_workers"], r.spec.repeat) != (1, 2)]
    two = at(analyse(QUESTION, results), batch_size=64, num_workers=2)
    assert two.speedup.num_samples == 2
    assert two.speedup.value == pytest.approx(2.0)


def test_a_single_common_block_is_no_reason_to_give_up_the_interval() -> None:
    one = {"batch_size": 64, "num_workers": 1}
    results = [*(make_result(one, r, t) for r, t in ((2, 4.0), (8, 4.2), (9, 4.1))), *scaling()[3:]]
    two = at(analyse(QUESTION, results), batch_size=64, num_workers=2)
    assert (two.speedup.num_samples, two.speedup.method) == (3, Method.T_LOG)


def test_points_that_share_no_block_are_compared_as_independent_samples() -> None:
    one = {"batch_size": 64, "num_workers": 1}
    results = [*(make_result(one, r, t) for r, t in ((7, 4.0), (8, 4.2), (9, 4.1))), *scaling()[3:]]
    two = at(analyse(QUESTION, results), batch_size=64, num_workers=2)
    assert two.speedup.value == pytest.approx(4.1 / 2.1)
    assert two.speedup.low < two.speedup.value < two.speedup.high


def test_a_trial_that_was_run_again_counts_once_and_by_its_last_complete_result() -> None:
    point = {"batch_size": 64, "num_workers": 2}
    again = [
        make_result(point, 0, 9.0, started_at=50.0),
        make_result(point, 1, state=TrialState.FAILED, started_at=90.0),
        make_result(point, 2, state=TrialState.FAILED, started_at=-1.0),
    ]
    two = at(analyse(QUESTION, [*again, *scaling(), *again]), batch_size=64, num_workers=2)
    assert (two.num_finished, two.num_failed) == (3, 0)
    assert two.time_s.value == 2.2  # of 9.0, 2.2 and 2.1


def test_whole_trials_are_timed_where_a_train_loop_can_not_be_looked_into() -> None:
    results = [
        make_result({"num_workers": workers}, repeat, None, wall_s=wall)
        for workers, wall in ((1, 8.0), (2, 5.0))
        for repeat in range(3)
    ]
    analysis = analyse(Question("loop", {"num_workers": 1}, ("num_workers",)), results)
    assert analysis.time_metric == "wall_s"
    two = at(analysis, num_workers=2)
    assert two.speedup.value == pytest.approx(1.6)
    assert two.throughput is None


def test_the_slowest_rank_makes_a_step() -> None:
    steps = (tuple([0.1] * 100), tuple([0.2] * 90 + [0.5] * 10))
    result = make_result({"num_workers": 2}, step_times_s=steps)
    point = analyse(Question("s", {}, ("num_workers",)), [result]).points[0]
    assert point.step_time_median_s == pytest.approx(0.2)
    assert point.step_time_p95_s == pytest.approx(0.5)


def test_points_come_in_the_order_of_their_values_whatever_the_order_of_execution() -> None:
    results = [make_result({"batch_size": b, "num_workers": w}) for b in (8, 16, 128) for w in (1, 2, 10)]
    random.Random(1).shuffle(results)
    analysis = analyse(QUESTION, results)
    order = [(p.point["batch_size"], p.point["num_workers"]) for p in analysis.points]
    assert order == [(b, w) for b in (8, 16, 128) for w in (1, 2, 10)]


def test_words_come_in_the_order_in_which_the_study_lists_them() -> None:
    names = ("none", "fp16", "bf16")
    points = tuple({"compression": name} for name in names)
    question = Question("s", {"compression": "none"}, ("compression",), points=points, num_repeats=1)
    results = [make_result(point, 0, 4.0) for point in reversed(points)]
    assert [p.point["compression"] for p in analyse(question, results).points] == list(names)


def test_values_of_different_types_can_be_told_apart_and_put_in_order() -> None:
    values = (True, 1, None, "a", (64, 32), 2.5)
    results = [make_result({"x": value}) for value in values]
    assert len(analyse(Question("s", {"x": 1}, ("x",)), results).points) == len(values)
    assert [p.is_baseline for p in analyse(Question("s", {"x": 1.0}, ("x",)), results).points].count(True) == 1


def test_the_metric_is_that_of_the_last_report() -> None:
    result = replace(make_result({"x": 1}), reports=({"val_loss": 0.9}, {"val_loss": 0.4}))
    point = analyse(Question("s", {}, ("x",), metric="val_loss", mode="min"), [result]).points[0]
    assert point.metric.value == 0.4


def test_a_study_says_what_is_asked_and_which_points_are_still_to_come() -> None:
    study = Study(
        name="scaling",
        workload=WORKLOAD,
        space={"batch_size": grid(64, 128), "num_workers": grid(1, 2)},
        baseline={"num_workers": 1},
        num_repeats=5,
    )
    question = question_of(study)
    assert (question.study_name, question.num_repeats, len(question.points)) == ("scaling", 5, 4)
    own = [replace(r, spec=study.trial(r.spec.point, r.spec.repeat)) for r in scaling()]
    analysis = analyse(study, own)
    assert [p.num_trials for p in analysis.points] == [3, 3, 0, 0]
    assert at(analysis, batch_size=128, num_workers=2).time_s is None


def test_a_search_lists_no_points_beforehand() -> None:
    study = Study(name="s", workload=WORKLOAD, space={"lr": uniform(0.1, 0.2), "num_workers": grid(1, 2)})
    assert question_of(study).points == ()


def test_no_results_are_no_error() -> None:
    analysis = analyse(QUESTION, [])
    assert analysis.points == ()
    assert analysis.verdicts == ("No trial finished: there is nothing to compare.",)


def test_each_trial_has_a_speedup_over_the_baseline_of_its_own_block() -> None:
    results = scaling(one=(4.0, 6.0, 4.0), two=(2.0, 2.0, 1.0))
    speedups = pair_speedups(QUESTION, results[1:])  # the first baseline trial is missing
    two = [make_spec({"batch_size": 64, "num_workers": 2}, repeat).identity for repeat in range(3)]
    assert two[0] not in speedups
    assert [speedups[i] for i in two[1:]] == [3.0, 4.0]
    assert pair_speedups(replace(QUESTION, baseline={}), results) == {}
