"""Searches without Ray: searcher and scheduler are asked as Ray Tune asks them, trial by trial."""

import math
from dataclasses import replace

import pytest

from raypar import Study, StudyError, choice, grid, loguniform
from raypar.execution.plan import make_plan
from raypar.run.cluster import Cluster
from raypar.run.local_search import LocalSearch
from raypar.run.runner import TrialEnded, TrialReported, TrialStarted
from raypar.run.search import for_run, informed, inner, tune_space
from raypar.study.options import ON_CPU
from raypar.study.trial import TrialResult, TrialState
from raypar.workloads import digits

schedulers = pytest.importorskip("ray.tune.schedulers")
search = pytest.importorskip("ray.tune.search")
optuna = pytest.importorskip("optuna")
OptunaSearch = pytest.importorskip("ray.tune.search.optuna").OptunaSearch
ONE_NODE = Cluster(({"CPU": 2},), is_own=True)
SPACE = {"lr": loguniform(0.01, 1.0), "batch_size": choice(32, 64)}
EPOCHS = 4


def a_search(**changes):
    return Study(**{"workload": digits, "name": "s", "space": SPACE, "num_trials": 12, "seed": 3, **changes})


def ran(study, accuracy_of, specs=(), states=None):
    """Run a search with made-up reports; return each trial's spec and number of reports."""
    stopped, ended = [], []
    local = LocalSearch(study, specs, ON_CPU, stopped.append)
    for spec in local.specs():
        local.note(TrialStarted(spec, 1))
        num_reports, state = 0, (states or {}).get(len(ended), TrialState.FINISHED)
        while num_reports < EPOCHS and spec not in stopped:
            num_reports += 1
            metrics = {"accuracy": accuracy_of(spec.point, num_reports), "train_time_s": 1.0}
            local.note(TrialReported(spec, metrics))
        local.note(TrialEnded(TrialResult(spec, state)))
        ended.append((spec, num_reports))
    return ended


def result_of(spec, accuracy_of):
    """Return the stored result of a finished trial."""
    reports = [{"accuracy": accuracy_of(spec.point, n + 1), "train_time_s": 1.0} for n in range(EPOCHS)]
    return TrialResult(spec, TrialState.FINISHED, reports=tuple(reports))


def rising(point, epoch):
    return point["lr"] / 2 + epoch / 20


def test_random_points_are_reproducible_and_a_continued_search_draws_others():
    points = [spec.point for spec, _ in ran(a_search(), rising)]
    assert points == [spec.point for spec, _ in ran(a_search(), rising)]
    assert len({point["lr"] for point in points}) == 12 and {point["batch_size"] for point in points} == {32, 64}
    assert all(0.01 <= point["lr"] < 1 for point in points)
    done = [spec for spec, _ in ran(a_search(), rising)[:5]]
    more = ran(a_search(), rising, done)
    assert len(more) == 7 and not {spec.point["lr"] for spec, _ in more} & {point["lr"] for point in points}


@pytest.mark.parametrize(("num_done", "target"), [(5, None), (15, None), (15, 0.5)])
def test_a_continued_search_of_optuna_knows_what_is_done_and_repeats_no_point(num_done, target):
    def accuracy(point, epoch):  # best at 0.1
        return (0.9 - abs(math.log10(point["lr"]) + 1)) * (1 + epoch / EPOCHS) / 2

    study = a_search(
        num_trials=num_done + 10, searcher=search.ConcurrencyLimiter(OptunaSearch(seed=0), 1), target=target
    )
    done = [spec for spec, _ in ran(replace(study, num_trials=num_done), accuracy)]
    results = [result_of(spec, accuracy) for spec in done]
    more = [spec.point for spec, _ in ran(informed(study, results), accuracy, done)]
    assert len(more) == 10 and not {point["lr"] for point in more} & {spec.point["lr"] for spec in done}
    assert next(spec.point for spec, _ in ran(study, accuracy, done)) == done[0].point  # otherwise it begins again
    searcher, _ = for_run(informed(study, results))
    searcher.set_search_properties(None, None, tune_space(study))
    known = [(trial.params, trial.value) for trial in inner(searcher)._ot_study.trials]
    assert [params for params, _ in known] == [spec.point for spec in done]
    reached = [accuracy(spec.point, EPOCHS) >= (target or 0.0) for spec in done]
    if target is None:
        assert [value for _, value in known] == [accuracy(spec.point, EPOCHS) for spec in done]
    else:
        assert [value <= EPOCHS for _, value in known] == reached and len({*reached}) == 2


def test_results_outside_of_the_space_or_without_a_metric_do_not_inform_a_search():
    study = a_search(searcher=OptunaSearch(seed=0))
    points = [{"lr": 5.0, "batch_size": 32}, {"lr": 0.5, "batch_size": 48}, {"lr": 0.5, "batch_size": 32}]
    results = [TrialResult(study.trial(point, 0), TrialState.FAILED) for point in points]
    assert informed(study, results) is study
    finished = [result_of(result.spec, rising) for result in results]
    searcher = informed(study, finished).searcher
    assert (searcher._points_to_evaluate, searcher._evaluated_rewards) == ([points[2]], [rising(points[2], EPOCHS)])
    assert informed(a_search(), finished).searcher is None


def test_a_grid_beside_a_drawn_value_is_complete_in_each_draw():
    study = a_search(space={"lr": loguniform(0.1, 1), "batch_size": grid(32, 64)}, num_trials=3)
    assert sorted(spec.point["batch_size"] for spec, _ in ran(study, rising)) == [32] * 3 + [64] * 3


def test_a_point_that_is_drawn_again_is_a_repeat():
    trials = ran(a_search(space={"batch_size": choice(32, 64)}), lambda *_: 0.5)
    assert len({spec.identity for spec, _ in trials}) == 12
    assert {spec.repeat for spec, _ in trials} > {0, 1, 2}


def test_asha_stops_what_it_stops_in_ray_tune():
    """Each rung keeps the values so far: below their percentile a trial stops."""
    scheduler = schedulers.ASHAScheduler(metric="accuracy", mode="max", max_t=EPOCHS, reduction_factor=2)
    values = [0.1, 0.9, 0.4, 0.95, 0.2]
    space = {"lr": choice(*values)}
    study = a_search(space=space, searcher=OptunaSearch(points_to_evaluate=[{"lr": v} for v in values]), num_trials=5)
    study = a_search(**{**vars(study), "scheduler": scheduler})
    assert [num for _, num in ran(study, rising)] == [4, 4, 1, 4, 1]


def test_optuna_learns_from_earlier_trials():
    study = a_search(num_trials=40, searcher=OptunaSearch(seed=1))
    lrs = [spec.point["lr"] for spec, _ in ran(study, lambda point, _: -abs(point["lr"] - 0.3))]
    early, late = (sum(abs(lr - 0.3) for lr in part) / 10 for part in (lrs[:10], lrs[-10:]))
    assert late < early / 2


def test_a_failed_trial_teaches_the_searcher_nothing():
    told = []

    class Told(OptunaSearch):
        def on_trial_complete(self, trial_id, result=None, error=False):
            told.append((result and result["accuracy"], error))

    ran(a_search(num_trials=2, searcher=Told(seed=1)), lambda *_: 0.5, states={0: TrialState.FAILED})
    assert told == [(None, True), (0.5, False)]


def test_a_trial_ends_at_the_target():
    study = a_search(target=0.4, num_trials=3, space={"lr": choice(0.1)})
    assert [num for _, num in ran(study, lambda _, epoch: epoch / 5)] == [2, 2, 2]


def test_reports_of_a_retry_are_not_counted_twice():
    stopped = []
    median = schedulers.MedianStoppingRule(grace_period=0, min_samples_required=1)
    local = LocalSearch(a_search(scheduler=median), (), ON_CPU, stopped.append)
    spec = next(local.specs())
    for attempt, num_reports in ((1, 2), (2, 3)):
        local.note(TrialStarted(spec, attempt))
        for _ in range(num_reports):
            local.note(TrialReported(spec, {"accuracy": 0.5, "train_time_s": 1.0}))
    assert local._running[spec.identity].reports.last["trained_s"] == 3.0


@pytest.mark.parametrize(
    "fields", [{}, {"scheduler": schedulers.ASHAScheduler(max_t=4)}, {"searcher": OptunaSearch(), "target": 0.9}]
)
def test_a_search_without_ray_is_planned(fields):
    assert make_plan(a_search(**fields), ONE_NODE, (), with_ray=False).num_missing == 12


def test_what_needs_ray_is_refused_without():
    with pytest.raises(StudyError, match="needs Ray"):
        make_plan(a_search(searcher=search.BasicVariantGenerator()), ONE_NODE, (), with_ray=False)
