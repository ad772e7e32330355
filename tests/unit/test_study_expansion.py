"""A study becomes trials: every point once in every block, in a random but fixed order."""

import itertools
import json
import pickle
import re
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from enum import Enum, IntEnum
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raypar import Option, Study, Workload, choice, grid, uniform
from raypar.errors import StudyError
from raypar.study.options import Auto, resolve
from raypar.study.trial import spec_from_dict

WORKLOAD = Workload(name="w", model=lambda c: None, data=lambda c: None, options={"width": 8})
VALUES = {
    "num_workers": st.sampled_from([1, 2, 4]),
    "batch_size": st.sampled_from([32, 64, 128]),
    "lr": st.sampled_from([0.01, 0.1, 1.0]),
    "optimizer": st.sampled_from(["sgd", "adam"]),
    "width": st.integers(1, 50),
    "drop_last": st.booleans(),
}


def a_study(**changes):
    return Study(**{"workload": WORKLOAD, "name": "s", "space": {"num_workers": grid(1, 2)}, **changes})


def identities(**changes):
    return {trial.identity for trial in a_study(**changes).trials()}


@st.composite
def studies(draw):
    keys = draw(st.lists(st.sampled_from(sorted(VALUES)), unique=True, max_size=4))
    space = {k: grid(*draw(st.lists(VALUES[k], min_size=1, max_size=3, unique=True))) for k in keys}
    return a_study(space=space, num_repeats=draw(st.integers(1, 4)), seed=draw(st.integers(0, 10**6)))


@given(studies())
def test_every_block_has_every_point_once_placement_by_placement_and_its_own_seed(study):
    product = Counter(itertools.product(*(d.values for d in study.space.values())))
    trials = study.trials()
    assert trials == study.trials()
    num_trials = sum(product.values()) * study.num_repeats
    assert [t.order for t in trials] == list(range(num_trials))
    assert [t.repeat for t in trials] == sorted(t.repeat for t in trials)
    seeds = set()
    for repeat in range(study.num_repeats):
        block = [t for t in trials if t.repeat == repeat]
        assert Counter(tuple(t.point[k] for k in study.space) for t in block) == product
        placements = [p for p, _ in itertools.groupby(t.placement for t in block)]
        assert len(placements) == len(set(placements))
        (seed,) = {t.seed for t in block}
        seeds.add(seed)
    assert len(seeds) == study.num_repeats


@given(studies())
def test_identities_are_unique_and_do_not_depend_on_the_order(study):
    trials = study.trials()
    assert len({t.identity for t in trials}) == len(trials)
    for trial in trials:
        assert study.trial(dict(reversed(list(trial.point.items()))), trial.repeat, order=99).identity == trial.identity


def test_a_block_is_shuffled_differently_from_the_next_and_by_the_seed():
    study = a_study(space={"width": grid(*range(1, 30))}, num_repeats=2)
    first, second = ([t.point["width"] for t in study.trials() if t.repeat == r] for r in (0, 1))
    other = [t.point["width"] for t in a_study(space=study.space, seed=7).trials() if t.repeat == 0]
    assert first != second and first != other and sorted(first) == sorted(second) == sorted(other)


CHANGES = {"lr": 0.2, "epochs": 2, "width": 9, "precision": "fp64", "num_warmup_steps": 0, "drop_last": True}


def test_any_changed_hyperparameter_the_seed_and_the_name_change_the_identity():
    for changes in (*({"config": {k: v}} for k, v in CHANGES.items()), {"seed": 5}, {"name": "other"}):
        assert not identities() & identities(**changes), changes


def test_the_same_values_are_the_same_trials_and_more_repeats_add_some():
    assert identities(config={"lr": 1}) == identities(config={"lr": 1.0})
    assert identities(config={"lr": 0.1, "nodes": "pack", "node_label": None}) == identities()
    assert identities(num_repeats=3) < identities(num_repeats=4)


def test_a_spec_survives_being_written_and_read_also_from_before_there_were_nodes():
    spec = a_study(config={"width": 3}).trials()[0]
    again = spec_from_dict(json.loads(json.dumps(asdict(spec))))
    assert again == spec and again.identity == spec.identity and resolve(WORKLOAD, dict(spec.config)) == spec.config
    older = replace(spec, config={k: v for k, v in spec.config.items() if k not in ("nodes", "node_label")})
    assert (older.identity, older.placement) == (spec.identity, spec.placement)


def test_placements_that_differ_in_nodes_have_separate_gangs_and_say_so():
    trials = a_study(space={"nodes": grid("pack", "spread", 1, 2)}, config={"num_workers": 2}, num_repeats=1).trials()
    ends = ("", ", spread over the nodes", " on 1 node", " on 2 nodes")
    assert {str(trial.placement) for trial in trials} == {f"2 workers × 1 core{end}" for end in ends}
    assert len({trial.identity for trial in trials}) == 4


def test_auto_becomes_the_device_of_the_cluster_and_shapes_the_placement():
    trials = a_study().trials(auto=Auto("cuda"))
    assert {t.config["device"] for t in trials} == {"cuda"} == {t.placement.device for t in trials}
    assert [trial.point for trial in a_study(space={}, num_repeats=1).trials()] == [{}]


def test_a_drawn_domain_makes_a_search_and_grids_alone_do_not():
    assert all(a_study(space={"lr": drawn}).is_search for drawn in (uniform(0.1, 0.2), choice(0.1, 0.2)))
    assert a_study(space={}, searcher=object()).is_search and not a_study().is_search


def test_a_train_loop_keeps_its_own_keys_whatever_they_are_called():
    loop = Workload.from_train_loop(lambda config: None, name="loop")
    for trial in a_study(workload=loop, config={"batch_size": "large", "mine": 3}).trials():
        assert trial.config["batch_size"] == "large" and trial.config["mine"] == 3


class Mode(str, Enum):  # noqa: UP042 - as people write it
    SGD = "sgd"


class Size(IntEnum):
    BIG = 32


class Ratio(float):
    pass


class Pair(NamedTuple):
    low: Any
    high: Any


OF_CLASSES = {
    "mode": (Mode.SGD, "sgd"),
    "size": (Size.BIG, 32),
    "ratio": (Ratio(0.5), 0.5),
    "name": (np.str_("x"), "x"),
    "flag": (np.bool_(True), True),
    "scale": (np.float64(0.25), 0.25),
    "steps": (torch.tensor(3), 3),
    "pair": (Pair(Size.BIG, np.int64(2)), (32, 2)),
    "nested": ({Mode.SGD: [Size.BIG, {"a": Mode.SGD}]}, {"sgd": [32, {"a": "sgd"}]}),
}


@pytest.mark.parametrize("key", OF_CLASSES)
def test_values_of_classes_reach_trials_as_pythons_own_types(key):
    value, plain = OF_CLASSES[key]
    loop = Workload.from_train_loop(print, options={"mine": value} if key != "nested" else {})
    study = Study(workload=loop, space={key: grid(value, "other")}, config={f"{key}_too": value}, baseline={key: value})
    config = study.trials()[0].config
    for reached in (config[f"{key}_too"], study.baseline[key], config.get("mine", plain)):
        assert repr(reached) == repr(plain) and not re.search(rb"test_study|numpy|torch", pickle.dumps(reached))


def test_an_option_whose_kind_is_an_enumeration_takes_its_members_and_their_values():
    loop = Workload.from_train_loop(print, options={"mode": Option(Mode.SGD, Mode, "optimizer"), "size": Size.BIG})
    for value in (Mode.SGD, "sgd"):
        trial = Study(workload=loop, space={"mode": grid(value)}, config={"size": 64}).trials()[0]
        assert (type(trial.config["mode"]), trial.config["mode"], trial.config["size"]) == (str, "sgd", 64)


class Colour(Enum):
    RED = "red"


@dataclass
class WeightedLoss:
    weight: float = field(init=False)

    def __call__(self, outputs, targets):
        return self.weight * (outputs - targets).mean()


def test_a_function_of_a_workload_may_be_an_object_with_any_fields():
    loss = WeightedLoss()
    loss.weight = loss
    for each in (WeightedLoss(), loss):
        assert a_study(workload=replace(WORKLOAD, loss=each, metrics={"own": each})).workload.loss is each


@pytest.mark.parametrize("options", [{}, {"colour": ()}])
@pytest.mark.parametrize("value", [(Colour.RED,), (1, (Colour.RED,))])
def test_a_value_that_no_trial_could_be_given_is_refused(options, value):
    with pytest.raises(StudyError, match="can't be kept with the results"):
        Study(workload=Workload.from_train_loop(print, options=options), space={"colour": grid(value)})


def test_a_commands_value_that_is_no_text_or_number_is_refused():
    with pytest.raises(StudyError, match="can't be kept with the results"):
        Study(workload=Workload.from_command("train {colour}"), space={"colour": grid(Colour.RED)})
