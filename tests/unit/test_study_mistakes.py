"""A mistake in a study is told before anything runs: which field, which value, and the way out; all of them at once."""

from __future__ import annotations

import math
from typing import Any

import pytest

from raypar import Study, StudyError, Workload, choice, grid, loguniform, randint, uniform
from raypar.workloads import digits

LOOP = Workload.from_train_loop(lambda config: None, name="loop")


def a_model(config: Any) -> None:
    return None


# field, value as shown, what the way out holds, what the study is given
MISTAKES: list[tuple[str, str, str, dict[str, Any]]] = [
    ("workload", "'mnist'", "raypar.workloads", {"workload": "mnist"}),
    ("workload", "None", "raypar.workloads", {"workload": None}),
    ("workload.model", "None", "model=", {"workload": Workload(name="w", data=a_model)}),
    ("workload.data", "3", "data=", {"workload": Workload(name="w", model=a_model, data=3)}),  # type: ignore[arg-type]
    (
        "workload.options['width']",
        "None",
        "its type is the option's",
        {"workload": Workload(name="w", model=a_model, data=a_model, options={"width": None})},
    ),
    (
        "workload.defaults['epoch']",
        "3",
        "did you mean 'epochs'?",
        {"workload": Workload(name="w", model=a_model, data=a_model, defaults={"epoch": 3})},
    ),
    (
        "workload.defaults['lr']",
        "-1.0",
        "learning rate",
        {"workload": Workload(name="w", model=a_model, data=a_model, defaults={"lr": -1.0})},
    ),
    ("name", "'a/b'", "another name", {"name": "a/b"}),
    ("name", "'../up'", "another name", {"name": "../up"}),
    ("num_repeats", "0", "num_repeats=1", {"num_repeats": 0}),
    ("num_repeats", "2.5", "num_repeats=1", {"num_repeats": 2.5}),
    ("num_repeats", "True", "num_repeats=1", {"num_repeats": True}),
    ("price_per_node_hour", "-2.5", "price_per_node_hour=2.5", {"price_per_node_hour": -2.5}),
    ("price_per_node_hour", "0", "price_per_node_hour=2.5", {"price_per_node_hour": 0}),
    ("price_per_node_hour", "inf", "price_per_node_hour=2.5", {"price_per_node_hour": math.inf}),
    ("price_per_node_hour", "'2'", "price_per_node_hour=2.5", {"price_per_node_hour": "2"}),
    ("price_per_node_hour", "True", "price_per_node_hour=2.5", {"price_per_node_hour": True}),
    ("max_retries", "-1", "max_retries=0", {"max_retries": -1}),
    ("num_trials", "0", "num_trials=1", {"num_trials": 0}),
    ("max_concurrent_trials", "0", "max_concurrent_trials=1", {"max_concurrent_trials": 0}),
    ("mode", "'maximum'", 'mode="max"', {"mode": "maximum"}),
    ("seed", "-1", "seed=0", {"seed": -1}),
    ("seed", "'zero'", "seed=0", {"seed": "zero"}),
    ("space", "[1, 2]", "space={", {"space": [1, 2]}),
    ("config", "'lr=0.1'", "config={", {"config": "lr=0.1"}),
    ("baseline", "1", "baseline={", {"baseline": 1}),
    ("space['batch_size']", "[32, 64]", "grid(32, 64)", {"space": {"batch_size": [32, 64]}}),
    ("space['batch_size']", "64", "grid(64)", {"space": {"batch_size": 64}}),
    ("space['batch_size']", "Grid(values=())", "values", {"space": {"batch_size": grid()}}),
    ("space['batch_size']", "Grid(values=(64, 64))", "differ", {"space": {"batch_size": grid(64, 64)}}),
    ("space['lr']", "Uniform(low=1, high=0)", "low < high", {"space": {"lr": uniform(1, 0)}}),
    ("space['lr']", "LogUniform(low=0, high=1)", "low < high", {"space": {"lr": loguniform(0, 1)}}),
    ("space['epochs']", "RandInt(low=3, high=3)", "low < high", {"space": {"epochs": randint(3, 3)}}),
    (
        "space['batch_size']",
        "Grid(values=(1, 2))",
        "write choice(1, 2)",
        {"space": {"batch_size": grid(1, 2)}, "searcher": object()},
    ),
    ("space['bach_size']", "Grid(values=(1, 2))", "did you mean 'batch_size'?", {"space": {"bach_size": grid(1, 2)}}),
    ("space['epochs']", "0", "passes over the training set", {"space": {"epochs": grid(0, 1)}}),
    ("space['epochs']", "1.5", "passes over the training set", {"space": {"epochs": choice(1, 1.5)}}),
    ("space['lr']", "-0.1", "learning rate", {"space": {"lr": uniform(-0.1, 0.1)}}),
    ("space['optimizer']", "'sdg'", "sgd", {"space": {"optimizer": grid("sgd", "sdg")}}),
    ("config['epoch']", "3", "did you mean 'epochs'?", {"config": {"epoch": 3}}),
    ("config['nonsense_at_all']", "3", "choose from: ", {"config": {"nonsense_at_all": 3}}),
    ("config['lr']", "'fast'", "float, by default 0.1", {"config": {"lr": "fast"}}),
    ("config['lr']", "0", "learning rate", {"config": {"lr": 0}}),
    ("config['epochs']", "True", "int", {"config": {"epochs": True}}),
    ("config['epochs']", "None", "int, by default 8", {"config": {"epochs": None}}),
    ("config['hidden_size']", "'big'", "int, by default 1024", {"config": {"hidden_size": "big"}}),
    ("config['num_workers']", "2", "one of the two", {"config": {"num_workers": 2}}),
    ("config['device']", "'gpu'", "cuda", {"config": {"device": "gpu"}}),
    ("baseline['num_workers']", "4", "take one of 1, 2", {"baseline": {"num_workers": 4}}),
    ("baseline['lr']", "0.1", "choose from: num_workers", {"baseline": {"lr": 0.1}}),
    ("baseline['num_worker']", "1", "did you mean 'num_workers'?", {"baseline": {"num_worker": 1}}),
    ("baseline['num_workers']", "1", "add it to `space`", {"space": {}, "baseline": {"num_workers": 1}}),
    ("baseline['lr']", "0.1", "grid(...)", {"space": {"lr": uniform(0.1, 1)}, "baseline": {"lr": 0.1}}),
    (
        "per_worker_batch_size",
        "32",
        "leave one out",
        {"config": {"per_worker_batch_size": 32, "batch_size": 64}},
    ),
    ("num_workers=2.batch_size", "1", "at least 2", {"config": {"batch_size": 1}}),
    ("num_workers=1.batch_size", "2000", "smaller batch_size", {"config": {"batch_size": 2000}}),
    ("num_workers=1.num_samples", "5000", "fewer", {"config": {"num_samples": 5000}}),
    ("num_workers=1.batch_size", "64", "larger num_samples", {"config": {"num_samples": 10}}),
    ("num_workers=1.num_loader_workers", "2", 'loader="dataloader"', {"config": {"num_loader_workers": 2}}),
    (
        "space",
        "'1,000,000 points'",
        "choice/uniform",
        {"space": {"hidden_size": grid(*range(1, 1001)), "epochs": grid(*range(1, 1001))}},
    ),
    ("config['num_workers']", "0", "ranks", {"workload": LOOP, "space": {}, "config": {"num_workers": 0}}),
    (
        "baseline['mine']",
        "9",
        "take one of 1, 2",
        {"workload": LOOP, "space": {"mine": grid(1, 2)}, "baseline": {"mine": 9}},
    ),
]


def mistakes_of(**changes: Any) -> StudyError:
    with pytest.raises(StudyError) as caught:
        Study(**{"workload": digits, "name": "s", "space": {"num_workers": grid(1, 2)}, **changes})
    return caught.value


@pytest.mark.parametrize(("field", "value", "way_out", "given"), MISTAKES, ids=[f"{m[0]}={m[1]}" for m in MISTAKES])
def test_a_mistake_is_told_with_its_field_value_and_way_out(
    field: str, value: str, way_out: str, given: dict[str, Any]
) -> None:
    error = mistakes_of(**given)
    lines = [str(m) for m in error.mistakes]
    assert any(line.startswith(f"{field} = {value}: ") for line in lines), lines
    told = next(m for m in error.mistakes if str(m).startswith(f"{field} = {value}: "))
    assert told.hint and way_out in told.hint
    assert "Traceback" not in str(error) and str(told) in str(error)


def test_there_are_enough_kinds_of_mistakes_here() -> None:
    assert len(MISTAKES) >= 40


def test_all_mistakes_are_told_at_once() -> None:
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


def test_one_mistake_is_counted_as_one() -> None:
    assert str(mistakes_of(num_repeats=0)).startswith("1 mistake in the study")


def test_a_mistake_of_many_points_is_told_for_each_point_once() -> None:
    error = mistakes_of(space={"num_workers": grid(1, 2), "batch_size": grid(1, 64)})
    assert [m.field for m in error.mistakes] == ["num_workers=2 batch_size=1.batch_size"]


def test_a_file_is_named_before_the_mistakes() -> None:
    assert str(mistakes_of(num_repeats=0).at("my.py")).startswith("my.py: 1 mistake")


def test_a_good_study_is_no_mistake() -> None:
    Study(workload=digits, space={"num_workers": grid(1, 2)}, baseline={"num_workers": 1}, config={"lr": 1})
