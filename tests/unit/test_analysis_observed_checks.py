"""Checks of observed training code: each kind of mistake is found, and clean code gives no finding."""

import json
from dataclasses import replace
from fnmatch import fnmatch

import pytest
from results import make_result

from raypar.analysis.analyse import Question, analyse
from raypar.analysis.recommend import Constraints, recommend
from raypar.study.observation import BY_BACKWARD, Observation, ObservedDdp, ObservedLoader, ObservedRank
from raypar.study.profile import BACKWARD, PARTS, Breakdown
from raypar.study.trial import result_from_json

STEP = Breakdown(0.01, {**dict.fromkeys(PARTS, 0.0), BACKWARD: 0.01}, 0.0)
LOADER = ObservedLoader(site="/home/me/train.py:41", num_iterations=3, batch_s=0.001, first_batch_s=0.002)


def clean_rank(rank=0, num_ranks=1, **changes):
    loader = replace(LOADER, digests=((10 + rank, 20), (30 + rank, 40)), **changes.pop("loader", {}))
    facts = {
        "num_steps": 101,
        "num_warmup_steps": 11,
        "samples_per_step": 64 / num_ranks,
        "losses": ((1, 2.0), (2, 1.5), (3, 1.25)),
        "parameters": ((1, 3.5), (2, 3.25)),
        "learning_rates": (0.1,),
        "num_threads": 1,
        "num_cores": 2,
        "loaders": (loader,),
        "ddp": (ObservedDdp(),) if num_ranks > 1 else (),
    }
    return ObservedRank(rank=rank, num_ranks=num_ranks, breakdown=STEP, **{**facts, **changes})


def findings(*, one=None, two=None, of_both=None, **environment):
    """Return the sentences on a study with one and with two workers; `environment`: conditions of its ranks."""
    one = one or [clean_rank()]
    two = two or [clean_rank(rank, 2, **(of_both or {})) for rank in (0, 1)]
    results = [
        replace(
            make_result(
                {"num_workers": num}, repeat, 4.0 / num, environment={"steps_from": ["optimizer steps"], **environment}
            ),
            observation=Observation(ranks=tuple(ranks)),
        )
        for repeat in range(3)
        for num, ranks in ((1, one), (2, two))
    ]
    stored = [result_from_json(result.to_json()) for result in results]
    assert [r.observation for r in stored] == [r.observation for r in results]
    analysis = analyse(Question("mine", {"num_workers": 1}, ("num_workers",)), stored)
    return {finding.check: finding.detail for finding in analysis.warnings}


QUIET = findings().keys()


def test_clean_code_has_no_finding():
    assert not QUIET & {*MISTAKES, "unproven_work", "reported_steps"}


DIGESTS = ((10, 20), (30, 40))
SAME_ORDER = {"digests": ((1, 2), (1, 2)), "sampler": "DistributedSampler", "is_shuffled": True}
MISTAKES = {
    "counted_backward_passes": ({"counted_by": BY_BACKWARD}, "No optimizer of torch made a step, *"),
    "batch_norm_of_ranks": ({"num_batch_norms": 3}, "BatchNorm normalises *: 32 samples (num_workers=2)."),
    "more_threads_than_cores": ({"num_threads": 2}, "Torch *: 4 threads on 2 cores (num_workers=2)."),
    "more_loaders_than_cores": ({"loader": {"num_workers": 2}}, "More *: 4 processes on 2 cores (num_workers=2)."),
    "slow_start_of_epochs": (
        {"loader": {"num_workers": 1, "first_batch_s": 0.4}},
        "Every epoch waits *: 0.40 s for the first batch, loader of train.py:41 (num_workers=2).",
    ),
    "long_evaluation": ({"eval_s": 2.0}, "*evaluates longer than it trains: 2.00 s beside 1.01 s of training *"),
    "long_checkpoints": ({"save_s": 0.8}, "*saves checkpoints for more than 50 % *: 0.80 s beside 1.01 s *"),
    "needless_search": ({"ddp": (ObservedDdp(find_unused_parameters=True),)}, "*and there are none: all have a *"),
    "waits_for_gpu": ({"num_item_calls": 1.0}, "Each step reads values from the GPU, *: 1.0 values a step *"),
    "blocking_copies": ({"num_blocking_copies": 2.0}, "Copies *: 2.0 copies a step (num_workers=2)."),
    "different_batches": ({"samples_per_step": 64}, "The samples of a training step differ: 64 (*1), 128 (*2), with *"),
}


@pytest.mark.parametrize("check", MISTAKES)
def test_a_mistake_is_found_and_nothing_else(check):
    changes, sentence = MISTAKES[check]
    found = findings(of_both=changes)
    assert fnmatch(found[check].replace("[", "("), sentence), found[check]
    assert found.keys() - QUIET == {check}


def test_places_where_scripts_would_have_logged_are_named():
    found = findings(logged_elsewhere=[["experiment 'mine'", "2 runs that it started"]])
    assert found["logged_elsewhere"] == (
        "What 6 of 6 trials logged to MLflow is in the trials' runs instead of the script's: experiment 'mine', 2 runs "
        "that it started."
    )


def test_ranks_that_train_on_the_same_samples_are_found():
    ranks = [replace(clean_rank(i, 2), loaders=(replace(LOADER, digests=DIGESTS),)) for i in (0, 1)]
    assert findings(two=ranks)["same_samples_on_ranks"] == (
        "All ranks train on the same samples: loader of train.py:41 (num_workers=2)."
    )
    # Ranks that share one model's layers rather than the samples.
    parts = [replace(rank, ddp=(), parameters=()) for rank in ranks]
    assert "same_samples_on_ranks" not in findings(two=parts)


def test_an_epoch_in_the_order_of_the_last_one_is_found_if_the_sampler_shuffles():
    def ranks(**loader):
        return [
            replace(clean_rank(i, 2), loaders=(replace(LOADER, **{**SAME_ORDER, **loader}, num_workers=0),))
            for i in (0, 1)
        ]

    assert "same_order_in_epochs" in findings(two=ranks())
    for other in ({"is_shuffled": False}, {"digests": ((1, 2), (3, 4))}, {"digests": ((1, 2),)}):
        assert "same_order_in_epochs" not in findings(two=ranks(**other))


def test_parameters_that_differ_between_ranks_are_found():
    ranks = [clean_rank(0, 2), clean_rank(1, 2, parameters=((1, 3.5), (2, 3.2501)))]
    assert findings(two=ranks)["different_parameters"] == (
        "The ranks train different parameters: from step 2 on (num_workers=2)."
    )
    for fact in ({"sends": True}, {"num_parameters": (7,)}):  # stages of a pipeline have other parameters
        stages = [replace(ranks[0], **fact), ranks[1]]
        assert "different_parameters" not in findings(two=stages)
    shards = [clean_rank(i, 2, parameters=((1, float("nan")),)) for i in (0, 1)]
    assert "different_parameters" not in {**findings_without_comparison(shards)}


def findings_without_comparison(ranks):
    """Findings of ranks with NaN, which is not equal to itself."""
    result = replace(make_result({"num_workers": 2}), observation=Observation(ranks=tuple(ranks)))
    analysis = analyse(Question("mine", {}, ("num_workers",)), [result])
    return {finding.check: finding.detail for finding in analysis.warnings}


def test_another_number_of_processes_than_workers_is_found():
    assert findings(two=[clean_rank()])["other_number_of_processes"].endswith("of workers: 1 at num_workers=2.")


@pytest.mark.parametrize(
    ("losses", "sentence"),
    [
        (((1, 2.0), (2, 1.5004), (3, 1.25)), None),
        (
            ((1, 2.0), (2, 1.6), (3, 1.7)),
            "* losses of num_workers=1 and num_workers=2 differ by more than 0.1 % from step 2 on: 1.5 and 1.6.",
        ),
        (((7, 2.0),), "* losses of num_workers=1 and num_workers=2 have no step in common."),
    ],
)
def test_losses_prove_equal_work(losses, sentence):
    found = findings(of_both={"losses": losses}).get("unproven_work")
    assert found is None if sentence is None else fnmatch(found, sentence)


def losses_of(change):
    """Return 300 losses, those from step 200 on multiplied by a factor."""
    return tuple((step, (1.0 + 1.0 / step) * (change if step >= 200 else 1.0)) for step in range(1, 301))


@pytest.mark.parametrize(
    ("change", "sentence"), [(1.01, None), (1.03, "* differ by more than 2 % at the end: 1.004 and 1.034.")]
)
def test_rounding_that_grows_is_no_other_work(change, sentence):
    one = [clean_rank(losses=losses_of(1.0))]
    found = findings(one=one, of_both={"losses": losses_of(change)}).get("unproven_work")
    assert found is None if sentence is None else fnmatch(found, sentence), found


def test_batches_that_digests_do_not_identify_are_not_called_the_same():
    unknown = replace(LOADER, digests=((0, 0), (0, 0)), is_shuffled=True)
    ranks = [replace(clean_rank(i, 2), loaders=(unknown,)) for i in (0, 1)]
    assert findings(two=ranks).keys() <= QUIET


def recreated(**changes):
    """Return both ranks with a new loader in each of two epochs."""
    made = []
    for i in (0, 1):
        rank = clean_rank(i, 2)
        loaders = [replace(rank.loaders[0], num_iterations=1, digests=(), **changes) for _ in range(2)]
        made.append(replace(rank, loaders=tuple(loaders)))
    return made


def test_loaders_that_are_created_anew_in_each_epoch_count_as_one():
    assert findings(two=recreated(num_workers=1)).keys() <= QUIET, "2 processes on 2 cores at a time"
    slow = recreated(num_workers=1, persistent_workers=True, first_batch_s=0.4)
    assert findings(two=slow).keys() - QUIET == {"slow_start_of_epochs"}
    ranks = [
        replace(
            rank, loaders=tuple(replace(each, is_shuffled=True, digests=((rank.rank, 7),)) for each in rank.loaders)
        )
        for rank in recreated()
    ]
    assert findings(two=ranks).keys() - QUIET == {"same_order_in_epochs"}


@pytest.mark.parametrize(
    ("environment", "num_cores", "is_found"),
    [
        ({"node": ["a", "a"]}, 1, True),
        ({"node": ["a", "b"]}, 1, False),
        ({"node": ["a", "a"], "cores": [[0], [1]]}, 1, False),
        ({"node": ["a", "a"], "cores": [[0, 1], None]}, 2, False),
    ],
)
def test_threads_are_compared_with_the_cores_of_the_ranks_on_one_machine(environment, num_cores, is_found):
    ranks = tuple(clean_rank(i, 2, num_cores=num_cores) for i in (0, 1))
    result = make_result({"num_workers": 2}, environment={"steps_from": ["optimizer steps"] * 2, **environment})
    analysis = analyse(Question("mine", {}, ("num_workers",)), [replace(result, observation=Observation(ranks=ranks))])
    assert ("more_threads_than_cores" in {finding.check for finding in analysis.warnings}) == is_found


def test_batch_norm_without_a_backward_pass_is_found():
    changes = {"num_batch_norms": 1, "passes_per_step": 0.0, "samples_per_step": 0.0}
    found = findings(of_both=changes)["batch_norm_of_ranks"]
    assert found.endswith(": an unknown number of samples (num_workers=2).")


def test_counterfactuals_are_not_compared_by_metrics_losses_or_parameters():
    apart = [clean_rank(i, 2, parameters=((1, float(i)),), losses=((1, 9.0 + i),)) for i in (0, 1)]
    same = [replace(rank, loaders=(replace(LOADER, **SAME_ORDER),), num_threads=9) for rank in apart]
    ranks = {"none": [clean_rank(0, 2), clean_rank(1, 2)], "no communication": apart, "no loading": same}
    results = [
        replace(
            make_result(
                {"num_workers": 2, "what_if": what_if},
                repeat,
                4.0 if what_if == "none" else 1.0,
                0.9 if what_if == "none" else 0.99,
                environment={"steps_from": ["optimizer steps"]},
            ),
            observation=Observation(ranks=tuple(of_point)),
        )
        for repeat in range(3)
        for what_if, of_point in ranks.items()
    ]
    question = Question("mine", {"what_if": "none"}, ("num_workers", "what_if"))
    analysis = analyse(question, results)
    assert {finding.check for finding in analysis.warnings} <= QUIET
    assert [p.metric is not None for p in analysis.points] == [p.point["what_if"] == "none" for p in analysis.points]
    advice = recommend(question, results, Constraints())
    assert advice.chosen is not None and advice.chosen.point["what_if"] == "none"
    assert {c.exclusion for c in advice.candidates} == {
        "",
        "no communication: a counterfactual",
        "no loading: a counterfactual",
    }
    assert [c.point["what_if"] for c in advice.candidates if c.is_on_front] == ["none"]


def test_settings_of_a_script_should_not_change_its_losses():
    results = [
        replace(
            make_result({"change": change}, environment={"steps_from": ["optimizer steps"]}),
            observation=Observation(ranks=(clean_rank(losses=((1, loss),)),)),
        )
        for change, loss in (("none", 2.0), ("tf32=True", 2.1))
    ]
    analysis = analyse(Question("mine", {"change": "none"}, ("change",)), results)
    found = {finding.check: finding.detail for finding in analysis.warnings}
    assert fnmatch(found["unproven_work"], "*differ by more than 0.1 % from step 1 on: 2 and 2.1.")


def test_an_observation_of_another_format_is_none():
    result = make_result({"num_workers": 1})
    stored = {**json.loads(result.to_json()), "observation": {"ranks": [{"rank": 0}]}}
    assert result_from_json(json.dumps(stored)).observation is None
