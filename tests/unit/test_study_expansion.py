"""A study becomes trials: every point in every block once, in a random but settled order."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypar import Study, Workload, choice, grid, uniform
from raypar.study.options import resolve
from raypar.study.trial import TrialSpec

WORKLOAD = Workload(name="w", model=lambda c: None, data=lambda c: None, options={"width": 8})

VALUES: dict[str, st.SearchStrategy[Any]] = {
    "num_workers": st.sampled_from([1, 2, 4]),
    "batch_size": st.sampled_from([32, 64, 128]),
    "lr": st.sampled_from([0.01, 0.1, 1.0]),
    "optimizer": st.sampled_from(["sgd", "adam"]),
    "width": st.integers(1, 50),
    "drop_last": st.booleans(),
}


@st.composite
def studies(draw: st.DrawFn) -> Study:
    keys = draw(st.lists(st.sampled_from(sorted(VALUES)), unique=True, max_size=4))
    space = {k: grid(*draw(st.lists(VALUES[k], min_size=1, max_size=3, unique=True))) for k in keys}
    return Study(
        workload=WORKLOAD,
        space=space,
        num_repeats=draw(st.integers(1, 4)),
        seed=draw(st.integers(0, 10**6)),
        name="s",
    )


@given(studies())
def test_every_block_holds_every_point_exactly_once(study: Study) -> None:
    product = Counter(itertools.product(*(d.values for d in study.space.values())))  # type: ignore[union-attr]
    trials = study.trials()
    for repeat in range(study.num_repeats):
        block = [t for t in trials if t.repeat == repeat]
        assert Counter(tuple(t.point[k] for k in study.space) for t in block) == product
    assert len(trials) == sum(product.values()) * study.num_repeats


@given(studies())
def test_blocks_follow_each_other_and_order_counts_up(study: Study) -> None:
    trials = study.trials()
    assert [t.order for t in trials] == list(range(len(trials)))
    assert [t.repeat for t in trials] == sorted(t.repeat for t in trials)


@given(studies())
def test_the_same_study_gives_the_same_trials(study: Study) -> None:
    assert study.trials() == study.trials()


@given(studies())
def test_all_trials_of_a_block_share_a_seed_and_blocks_differ_in_it(study: Study) -> None:
    seeds = {t.repeat: set[int]() for t in study.trials()}
    for trial in study.trials():
        seeds[trial.repeat].add(trial.seed)
    assert all(len(s) == 1 for s in seeds.values())
    assert len(set.union(*seeds.values())) == study.num_repeats


@given(studies())
def test_the_trials_of_a_placement_are_together_in_a_block(study: Study) -> None:
    for repeat in range(study.num_repeats):
        runs = [p for p, _ in itertools.groupby(t.placement for t in study.trials() if t.repeat == repeat)]
        assert len(runs) == len(set(runs))


@given(studies())
def test_identities_are_unique_and_do_not_depend_on_the_order(study: Study) -> None:
    trials = study.trials()
    assert len({t.identity for t in trials}) == len(trials)
    for trial in trials:
        assert study.trial(dict(reversed(list(trial.point.items()))), trial.repeat, order=99).identity == trial.identity


def a_study(**changes: Any) -> Study:
    return Study(**{"workload": WORKLOAD, "name": "s", "space": {"num_workers": grid(1, 2)}, **changes})


def test_a_block_is_shuffled_differently_from_the_next_and_by_the_seed() -> None:
    study = a_study(space={"width": grid(*range(1, 30))}, num_repeats=2)
    first, second = ([t.point["width"] for t in study.trials() if t.repeat == r] for r in (0, 1))
    other = [t.point["width"] for t in a_study(space=study.space, seed=7).trials() if t.repeat == 0]
    assert first != second and first != other and sorted(first) == sorted(second) == sorted(other)  # type: ignore[type-var]


@pytest.mark.parametrize(
    ("key", "value"),
    [("lr", 0.2), ("epochs", 2), ("width", 9), ("precision", "fp64"), ("num_warmup_steps", 0), ("drop_last", True)],
)
def test_any_changed_hyperparameter_changes_the_identity(key: str, value: Any) -> None:
    before = {t.identity for t in a_study().trials()}
    after = {t.identity for t in a_study(config={key: value}).trials()}
    assert not before & after


def test_the_seed_and_the_name_change_the_identity() -> None:
    identities = [{t.identity for t in s.trials()} for s in (a_study(), a_study(seed=5), a_study(name="other"))]
    assert all(not a & b for a, b in itertools.combinations(identities, 2))


def test_a_whole_number_for_a_float_is_the_same_trial() -> None:
    assert a_study(config={"lr": 1}).trials()[0].identity == a_study(config={"lr": 1.0}).trials()[0].identity


def test_saying_a_default_is_the_same_trial_as_leaving_it_out() -> None:
    assert a_study(config={"lr": 0.1}).trials()[0].identity == a_study().trials()[0].identity


def test_more_repeats_keep_the_trials_that_there_were() -> None:
    three, four = ({t.identity for t in a_study(num_repeats=n).trials()} for n in (3, 4))
    assert three < four


def test_a_study_that_sweeps_nothing_has_one_point() -> None:
    [trial] = a_study(space={}, num_repeats=1).trials()
    assert trial.point == {} and trial.label == "the only point #1"


def test_auto_becomes_the_device_of_the_cluster_and_shapes_the_placement() -> None:
    trials = a_study().trials(default_device="cuda")
    assert {t.config["device"] for t in trials} == {"cuda"} == {t.placement.device for t in trials}


def test_the_baseline_of_a_point_differs_only_in_the_baselines_keys() -> None:
    study = a_study(space={"num_workers": grid(1, 2), "lr": grid(0.1, 0.2)}, baseline={"num_workers": 1})
    assert study.baseline_of({"num_workers": 2, "lr": 0.2}) == {"num_workers": 1, "lr": 0.2}
    assert study.baseline_of({"num_workers": 1, "lr": 0.2}) == {"num_workers": 1, "lr": 0.2}


def test_a_drawn_domain_makes_a_search_and_grids_alone_do_not() -> None:
    assert a_study(space={"lr": uniform(0.1, 0.2)}).is_search
    assert a_study(space={"lr": choice(0.1, 0.2)}).is_search
    assert a_study(space={}, baseline={}, searcher=object()).is_search
    assert not a_study().is_search


def test_a_train_loop_keeps_its_own_keys_whatever_they_are_called() -> None:
    loop = Workload.from_train_loop(lambda config: None, name="loop")
    study = Study(workload=loop, name="s", config={"batch_size": "large", "mine": 3}, space={"num_workers": grid(1, 2)})
    assert all(t.config["batch_size"] == "large" and t.config["mine"] == 3 for t in study.trials())


def test_ten_thousand_trials_are_planned_within_seconds() -> None:
    study = a_study(space={"width": grid(*range(1, 101)), "epochs": grid(*range(1, 101))}, num_repeats=1)
    assert len(study.trials()) == 10_000


def test_a_spec_survives_being_written_and_read() -> None:
    import json
    from dataclasses import asdict

    from raypar.study.trial import spec_from_dict

    spec: TrialSpec = a_study(config={"width": 3}).trials()[0]
    again = spec_from_dict(json.loads(json.dumps(asdict(spec))))
    assert again == spec and again.identity == spec.identity
    assert resolve(WORKLOAD, dict(spec.config)) == spec.config
