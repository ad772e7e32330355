"""Trials with settings other than the latest ones of a study are excluded everywhere."""

import json
from dataclasses import replace

import pytest
from results import make_result

from raypar import Study, grid
from raypar.analysis.analyse import analyse, pair_speedups
from raypar.analysis.compare import Side, compare
from raypar.analysis.question import current_results, question_from_dict, question_of, question_to_dict
from raypar.analysis.recommend import Constraints, recommend
from raypar.analysis.scaling import worker_groups
from raypar.execution.plan import make_plan
from raypar.reporting.export import rows_of
from raypar.run.cluster import this_machine
from raypar.study.options import Auto
from raypar.study.space import Choice
from raypar.study.trial import TrialResult, TrialState
from raypar.workloads import digits

WORKERS = {"num_workers": grid(1, 2)}
FAST = 0.5  # time of trials with other settings, relative to the study's own


def study(config, space=WORKERS, **more):
    settings = {"num_repeats": 2, **more}
    return Study(name="one", workload=digits, space=space, config=config, baseline={"num_workers": 1}, **settings)


def ran(of, factor=1.0, started_at=0.0):
    """A result for every trial: 10 s with one worker, 5 s with two."""
    more = {"started_at": started_at, "environment": {"node": ["here"]}}
    times = [factor * 10 / spec.config["num_workers"] * (1 + spec.repeat / 100) for spec in of.trials()]
    trials = zip(of.trials(), times, strict=True)
    return [replace(make_result(spec.point, spec.repeat, time_s, **more), spec=spec) for spec, time_s in trials]


def as_stored(question):
    return question_from_dict(json.loads(json.dumps(question_to_dict(question))))


ASKED = study({"epochs": 3})
OTHERS = (
    (study({"epochs": 1}), "epochs=1 instead of 3"),
    (study({"epochs": 3, "num_threads": 2}), "num_threads=2 instead of 1"),
    (study({"epochs": 3, "cpus_per_worker": 2}), "cpus_per_worker=2 instead of 1"),
    (study({"epochs": 3, "per_worker_batch_size": 16}), "per_worker_batch_size=16 instead of None"),
    (study({"epochs": 3, "hidden_size": 7}), "hidden_size=7 instead of"),
    (study({"epochs": 3}, seed=5), "seed=5 instead of 0"),
    (study({}, {**WORKERS, "epochs": grid(1, 2)}), "epochs=1 and 2 instead of 3"),
)


@pytest.mark.parametrize(("other", "sentence"), OTHERS, ids=[sentence for _, sentence in OTHERS])
def test_trials_of_other_settings_are_excluded_and_named(other, sentence):
    own, others = ran(ASKED), ran(other, FAST, started_at=9.0)
    parted = current_results(as_stored(question_of(ASKED, Auto())), [*own, *others])
    assert (list(parted.results), list(parted.excluded)) == (own, others)
    assert parted.sentence.startswith(f"{len(others)} trials of other settings excluded: ")
    assert sentence in parted.sentence


@pytest.mark.parametrize(
    "asked",
    [
        study({"per_worker_batch_size": 16}),
        study({"cpu_affinity": 1}),
        study({"device": "auto"}),
        study({}, {**WORKERS, "cpus_per_worker": grid(1, 2)}),
        study({}, {**WORKERS, "per_worker_batch_size": grid(16, 32)}),
    ],
)
def test_settings_that_follow_from_others_exclude_nothing(asked):
    assert not current_results(as_stored(question_of(asked)), ran(asked)).excluded


@pytest.mark.parametrize("config", [{"device": "cuda"}, {}])
def test_a_question_has_its_chosen_device_and_cores(config):
    eight, four = (study(config).trials(auto=Auto("cuda", cores)) for cores in (8, 4))
    of_eight = [TrialResult(spec, TrialState.FINISHED) for spec in eight]
    question = as_stored(question_of(study(config), Auto("cuda", 8)))
    parted = current_results(question, [*of_eight, *(TrialResult(spec, TrialState.FINISHED) for spec in four)])
    assert parted.results == tuple(of_eight)
    assert "cpus_per_worker=4 instead of 8" in parted.sentence
    asked = study({}, {**WORKERS, "device": grid("cpu", "cuda")})
    both = [TrialResult(spec, TrialState.FINISHED) for spec in asked.trials(auto=Auto("cuda", 8))]
    assert not current_results(as_stored(question_of(asked, Auto("cuda", 8))), both).excluded


def test_other_swept_values_and_numbers_of_repeats_are_kept():
    results = ran(study({"epochs": 3}, {"num_workers": grid(1, 2, 4)}, num_repeats=4))
    assert not current_results(question_of(ASKED), results).excluded


def test_trials_of_an_earlier_space_are_assigned_to_points():
    wider = ran(study({}, {**WORKERS, "epochs": grid(2, 3)}))
    parted = current_results(question_of(ASKED), wider)
    assert {tuple(r.spec.point) for r in parted.results} == {("num_workers",)}
    assert len(parted.results) == len(parted.excluded) == 4
    assert [len(p.samples) for p in analyse(ASKED, wider).points] == [2, 2]
    asked = study({}, {**WORKERS, "epochs": grid(2, 3)})
    points = analyse(asked, ran(ASKED)).points
    assert [len(p.samples) for p in points if p.point["epochs"] == 3] == [2, 2]
    assert len(points) == 4


def test_an_older_store_without_settings_keeps_all_trials():
    results = [*ran(ASKED), *ran(study({"epochs": 1}))]
    parted = current_results(replace(question_of(ASKED), config={}, seed=None, workload=""), results)
    assert parted.results == tuple(results)
    assert not parted.sentence


def test_every_reader_excludes_trials_of_other_settings():
    question = question_of(ASKED)
    own = ran(ASKED)
    mixed = [*own, *ran(study({"epochs": 1}), FAST, started_at=9.0)]
    sentence = "4 trials of other settings excluded: epochs=1 instead of 3."

    alone, both = analyse(question, own), analyse(question, mixed)
    assert both.points == alone.points and both.statements == alone.statements
    assert [(w.check, w.detail) for w in both.warnings if w not in alone.warnings] == [("other_settings", sentence)]

    assert pair_speedups(question, mixed) == pair_speedups(question, own)
    advice = recommend(question, mixed, Constraints())
    assert advice.candidates == recommend(question, own, Constraints()).candidates
    assert advice.excluded == sentence
    (group,), (same,) = (worker_groups(question, current_results(question, rs).points) for rs in (mixed, own))
    assert group.runs == same.runs
    compared = compare(Side(question, tuple(own), {}), Side(question, tuple(mixed), {}))
    assert compared.excluded == ("", sentence)
    assert [p.time.estimate.value for p in compared.matched if p.time.estimate] == [1.0, 1.0]
    rows = rows_of(question, mixed)
    assert [row["set_aside"] for row in rows] == [False] * 4 + [True] * 4
    assert [row["speedup"] is None for row in rows] == [False] * 4 + [True] * 4


def test_a_search_does_not_count_trials_of_other_settings_as_done():
    space = {"lr": Choice((0.1, 0.2))}
    of_both = {"name": "s", "workload": digits, "space": space, "num_trials": 4}
    asked, other = (Study(**of_both, config={"epochs": epochs}) for epochs in (3, 1))
    done = [TrialResult(of.trial({"lr": 0.1}, r), TrialState.FINISHED) for of in (asked, other) for r in (0, 1)]
    assert make_plan(asked, this_machine(), done).num_missing == 2
