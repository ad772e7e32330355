"""Searchers and schedulers of Ray Tune, called as in its documentation: they can run, or the plan names the fix."""

import pytest

from raypar import Study, StudyError, Workload, choice, grid, loguniform, randint
from raypar.execution.plan import make_plan
from raypar.run.cluster import Cluster
from raypar.run.search import NOT_REACHED_S, TIME_TO_TARGET, for_run, inner, time_to_target_s, tune_space
from raypar.run.tune import BrokeredTrial
from raypar.study.trial import SINCE_LAUNCH, TRAINED
from raypar.workloads import digits

schedulers = pytest.importorskip("ray.tune.schedulers")
search = pytest.importorskip("ray.tune.search")
optuna = pytest.importorskip("optuna")
OptunaSearch = pytest.importorskip("ray.tune.search.optuna").OptunaSearch
ASHA, HyperBand, Median = (
    schedulers.ASHAScheduler,
    schedulers.HyperBandScheduler,
    schedulers.MedianStoppingRule,
)
PBT = schedulers.PopulationBasedTraining
ONE_NODE = Cluster(({"CPU": 2},), is_own=True)
SPACE = {"lr": loguniform(0.01, 1.0), "batch_size": choice(32, 64)}


def a_search(**changes):
    return Study(**{"workload": digits, "name": "s", "space": SPACE, "num_trials": 4, **changes})


def train(config):
    """Report nothing."""


MUTATIONS = {"lr": [0.1, 0.01]}
BOTH = {"metric": "accuracy", "mode": "max"}
RUN = {
    "metric and mode of the study": lambda: {"scheduler": ASHA(metric="accuracy", mode="max", max_t=4)},
    "only the metric": lambda: {"scheduler": ASHA("training_iteration", "accuracy", max_t=4)},
    "only the mode": lambda: {"scheduler": ASHA(mode="max")},
    "neither": lambda: {"scheduler": ASHA(max_t=10, grace_period=1, reduction_factor=2)},
    "by epoch": lambda: {"scheduler": schedulers.AsyncHyperBandScheduler("epoch", max_t=4)},
    "by seconds of training": lambda: {"scheduler": ASHA(time_attr=TRAINED, max_t=60, grace_period=5)},
    "by seconds of Tune": lambda: {"scheduler": ASHA(time_attr="time_total_s", max_t=60)},
    "another metric that the study names": lambda: {
        "scheduler": ASHA(metric="val_loss", mode="min"),
        "metric": "val_loss",
    },
    "median": lambda: {"scheduler": Median(time_attr="training_iteration", grace_period=1, min_samples_required=2)},
    "first in, first out": lambda: {"scheduler": schedulers.FIFOScheduler()},
    "Optuna": lambda: {"searcher": OptunaSearch()},
    "Optuna with metric": lambda: {"searcher": OptunaSearch(metric="accuracy", mode="max", seed=1)},
    "Optuna with a sampler": lambda: {"searcher": OptunaSearch(sampler=optuna.samplers.RandomSampler(seed=1))},
    "Optuna with points": lambda: {"searcher": OptunaSearch(points_to_evaluate=[{"lr": 0.1, "batch_size": 32}])},
    "Optuna with storage": lambda: {"searcher": OptunaSearch(storage=optuna.storages.InMemoryStorage())},
    "Optuna and ASHA": lambda: {"searcher": OptunaSearch(**BOTH), "scheduler": ASHA(**BOTH)},
    "limited": lambda: {"searcher": search.ConcurrencyLimiter(OptunaSearch(**BOTH), max_concurrent=4)},
    "repeated": lambda: {"searcher": search.Repeater(OptunaSearch(**BOTH), repeat=3)},
    "random": lambda: {"searcher": search.BasicVariantGenerator(random_state=1)},
    "by name": lambda: {"searcher": search.create_searcher("optuna", **BOTH)},
    "ASHA by name": lambda: {"scheduler": schedulers.create_scheduler("async_hyperband", **BOTH, max_t=4)},
    "ASHA for a grid": lambda: {"scheduler": ASHA(max_t=4), "space": {"lr": grid(0.1, 0.2)}},
    "whatever a train loop reports": lambda: {
        "workload": Workload.from_train_loop(train),
        "scheduler": ASHA("steps", "reward", "max"),
        "metric": "reward",
        "mode": "max",
    },
}
OPTUNA_SPACE = {"lr": optuna.distributions.FloatDistribution(0.01, 1.0, log=True)}
REFUSED = {
    "another metric": (
        lambda: {"scheduler": ASHA(metric="mean_accuracy", mode="max")},
        "scheduler.metric = 'mean_accuracy'",
        "leave metric and mode out of AsyncHyperBandScheduler(): the study's are used (accuracy, max)",
    ),
    "another metric that trials report": (
        lambda: {"scheduler": ASHA(metric="val_loss", mode="min")},
        "trials are judged by accuracy",
        'Study(metric="val_loss")',
    ),
    "the other mode": (
        lambda: {"searcher": OptunaSearch(metric="accuracy", mode="min")},
        "searcher.mode = 'min'",
        'Study(mode="min")',
    ),
    "the other mode inside": (
        lambda: {"searcher": search.ConcurrencyLimiter(OptunaSearch(metric="accuracy", mode="min"), 2)},
        "searcher.mode = 'min'",
        "leave it out of OptunaSearch()",
    ),
    "an unknown time": (lambda: {"scheduler": ASHA("epochs")}, "scheduler.time_attr = 'epochs'", 'mean "epoch"'),
    "a time of other code": (lambda: {"scheduler": ASHA("timesteps")}, "'timesteps'", "training_iteration"),
    "HyperBand": (lambda: {"scheduler": HyperBand(**BOTH)}, "pauses trials", "ASHAScheduler()"),
    "BOHB": (lambda: {"scheduler": schedulers.HyperBandForBOHB(**BOTH)}, "pauses trials", "ASHAScheduler()"),
    "PBT": (
        lambda: {"scheduler": PBT(perturbation_interval=2, hyperparam_mutations=MUTATIONS, **BOTH)},
        "changes the hyperparameters of a running trial",
        "make a whole population one trial",
    ),
    "resources": (lambda: {"scheduler": schedulers.ResourceChangingScheduler()}, "cores of a running", "fix num_wor"),
    "a median that pauses": (lambda: {"scheduler": Median(hard_stop=False)}, "pauses trials", "leave hard_stop out"),
    "two metrics": (
        lambda: {"searcher": OptunaSearch(metric=["accuracy", "val_loss"], mode=["max", "min"])},
        "more than one metric",
        "leave metric and mode out of OptunaSearch()",
    ),
    "a space": (lambda: {"searcher": OptunaSearch(OPTUNA_SPACE, **BOTH)}, "a space of its own", "Study(space={…}"),
    "points of another space": (
        lambda: {"searcher": OptunaSearch(points_to_evaluate=[{"learning_rate": 0.1, "batch_size": 1}, {}])},
        "Ray Tune refuses it",
        "documentation of OptunaSearch",
    ),
    "Optuna's sampler": (
        lambda: {"searcher": optuna.samplers.TPESampler()},
        "is not a searcher",
        "searcher=OptunaSearch(sampler=TPESampler(…))",
    ),
    "Optuna's pruner": (lambda: {"scheduler": optuna.pruners.MedianPruner()}, "is not a scheduler", "MedianStoppingR"),
    "Optuna's study": (lambda: {"searcher": optuna.create_study()}, "is not a searcher", "OptunaSearch()"),
    "a scheduler as the searcher": (lambda: {"searcher": ASHA()}, "is not a searcher", "searcher=OptunaSearch()"),
}


@pytest.mark.parametrize("fields", RUN.values(), ids=RUN)
def test_what_the_documentation_of_ray_tune_shows_runs(fields):
    study = a_search(**fields())
    assert make_plan(study, ONE_NODE, ()).num_trials >= 4
    for _ in range(2):  # again after a lost broker
        searcher, scheduler = for_run(study)
        metric = study.judged_by.name
        if searcher is not None:
            assert searcher.set_search_properties(None, None, tune_space(study))
            assert searcher.metric == inner(searcher).metric == metric
            assert inner(searcher) is not inner(study.searcher)
        if scheduler is not None:
            assert scheduler.set_search_properties(None, None)
            assert scheduler.metric == metric and scheduler is not study.scheduler


@pytest.mark.parametrize(("fields", "problem", "fix"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_run_is_refused_with_the_fix(fields, problem, fix):
    with pytest.raises(StudyError) as refused:
        make_plan(a_search(**fields()), ONE_NODE, (), where="s.py")
    (mistake,) = refused.value.mistakes
    assert problem in str(mistake) and fix in mistake.hint and str(refused.value).startswith("s.py")


def test_a_study_that_is_drawn_at_random_needs_neither():
    assert for_run(a_search(space={"lr": loguniform(0.1, 1), "hidden_size": randint(8, 9)})) == (None, None)


@pytest.mark.parametrize(
    ("reports", "trained"),
    [
        ([{"train_time_s": 2.0}, {"train_time_s": 3.0, "train_loss": float("nan")}, {"train_time_s": 1.5}], [2.0, 6.5]),
        ([{SINCE_LAUNCH: 4.0}, {SINCE_LAUNCH: 9.0}], [4.0, 9.0]),
    ],
)
def test_schedulers_see_the_seconds_of_training(monkeypatch, reports, trained):
    trial, left = BrokeredTrial.__new__(BrokeredTrial), [*reports]
    trial.config = {"in_lockstep": True, "study_metric": "accuracy", "mode": "max", "target": None}
    monkeypatch.setattr(BrokeredTrial, "trial_id", "a")
    trial.reset_config(trial.config)
    follow = type("Follow", (), {"remote": lambda *_: ([left.pop(0)], None)})
    trial._broker = type("Broker", (), {"follow": follow()})
    monkeypatch.setattr("raypar.run.tune.ray.get", lambda ref: ref)
    assert [trial.step()[TRAINED] for _ in trained] == trained


def test_a_trial_ends_at_the_target_and_the_searcher_sees_its_time(monkeypatch):
    study = a_search(target=0.9, searcher=OptunaSearch(**BOTH), scheduler=ASHA(**BOTH, time_attr=TRAINED, max_t=9))
    assert make_plan(study, ONE_NODE, ()).num_trials == 4
    searcher, scheduler = for_run(study)
    assert (searcher.metric, searcher.mode, scheduler.metric) == (TIME_TO_TARGET, "min", "accuracy")
    trial = BrokeredTrial.__new__(BrokeredTrial)
    trial.config = {"in_lockstep": True, "study_metric": "accuracy", "mode": "max", "target": study.target}
    monkeypatch.setattr(BrokeredTrial, "trial_id", "a")
    trial.reset_config(trial.config)
    left = [{"train_time_s": 2.0, "accuracy": accuracy} for accuracy in (0.5, 0.7, 0.9)]
    follow = type("Follow", (), {"remote": lambda *_: ([left.pop(0)], None)})
    trial._broker = type("Broker", (), {"follow": follow()})
    monkeypatch.setattr("raypar.run.tune.ray.get", lambda ref: ref)
    first, second, third = (trial.step() for _ in range(3))
    assert first[TIME_TO_TARGET] > second[TIME_TO_TARGET] > NOT_REACHED_S > third[TIME_TO_TARGET] == 6.0
    assert [report["done"] for report in (first, second, third)] == [False, False, True]


@pytest.mark.parametrize(("mode", "best"), [("max", 0.95), ("min", 0.05)])
def test_time_to_target_orders_trials_by_time_and_then_by_distance(mode, best):
    target = {"max": 0.9, "min": 0.1}[mode]
    objectives = [time_to_target_s(target, mode, value, s) for value, s in ((best, 3.0), (best, 5.0), (0.5, 1.0))]
    assert objectives == sorted(objectives) and objectives[:2] == [3.0, 5.0] and objectives[2] > NOT_REACHED_S
