"""A trial's result is restored from the tags and files of its MLflow run (`golden/cases/runs.txt` shows a run)."""

import random
from dataclasses import replace

import pytest
from recording import make_result
from results import stored_conditions

from raypar import workloads
from raypar.study.options import OPTIONS, resolve
from raypar.study.strategy import STRATEGIES
from raypar.study.trial import Failure, FailureKind, TrialSpec, TrialState, latest, result_from_json
from raypar.track.names import MAX_TAG_LENGTH, MAX_TAG_PARTS
from raypar.track.runs import (
    SECTIONS,
    UNPLOTTED,
    child_run,
    result_from_tags,
    result_tags,
    run_params,
    series_keys,
    without_step_times,
)

RESULT = make_result()


@pytest.mark.parametrize("num_reports", [0, 2, 500, 5000])
def test_a_result_is_restored_from_its_tags_or_its_file(num_reports):
    draw = random.Random(num_reports).random  # with as many digits as measured numbers
    keys = (*SECTIONS, *UNPLOTTED)
    reports = tuple({**{key: draw() for key in keys}, "step": i, "epoch": i / 938} for i in range(num_reports))
    result = replace(RESULT, reports=reports)
    assert "step" not in series_keys(result)
    tags, run = result_tags(result), child_run(result, result_json=result.to_json(), recorded_at=2000.0)
    assert (tags is None) is (num_reports == 5000)
    if tags is None:
        assert not any(key.startswith("raypar.result") for key in run.tags)
    else:
        assert max(map(len, tags.values())) <= MAX_TAG_LENGTH and len(tags) <= MAX_TAG_PARTS
        assert result_from_tags(run.tags) == without_step_times(result)
    assert result_from_json(run.files["trial.json"]) == result


@pytest.mark.parametrize("text", ["", "{}", "null", "[]", '{"spec": 1}', "zlib;!!", '{"failure": null}'])
def test_a_damaged_tag_gives_no_result(text):
    assert result_from_tags({"raypar.result": text}) is None


def test_the_latest_complete_result_wins():
    first, second = replace(RESULT, started_at=1.0), replace(RESULT, started_at=2.0, state=TrialState.STOPPED)
    failed = [replace(RESULT, started_at=t, state=TrialState.FAILED) for t in (3.0, 5.0, 4.0)]
    assert latest([second, *failed, first]) == (second,)
    assert latest(failed) == (failed[1],)


WORKLOADS = [getattr(workloads, name) for name in workloads.__all__]


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.name)
def test_a_trial_has_at_most_20_params_16_metrics_and_12_tags(workload):
    point = {"batch_size": 64, "num_workers": 2}
    keys = (*SECTIONS, *UNPLOTTED, "step", "accuracy")
    reports = tuple({key: float(i + n) for n, key in enumerate(keys)} for i in range(3))
    environment = {**RESULT.conditions.to_stored(), "other_load_cores": [0.1]}
    spec = TrialSpec("s", workload.name, point, {**resolve(workload, point), "clip_grad_norm": 1.0}, 0, 0)
    failure = Failure(FailureKind.CRASH, "died", 1, "trace", "/log")
    result = replace(
        RESULT,
        spec=spec,
        reports=reports,
        conditions=stored_conditions(environment),
        energy_j=1.0,
        failure=failure,
    )
    run = child_run(result, result_json=result.to_json(), recorded_at=2000.0)
    added = {"raypar.uid", "raypar.execution", "mlflow.runName", "mlflow.parentRunId"}
    metrics = {p.key for p in run.points} | {"speedup", "efficiency"}
    assert (len(run.params) <= 20, len(metrics) <= 16, len({*run.tags, *added}) <= 12) == (True, True, True)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_only_params_with_an_effect_are_logged(strategy):
    """Each option differs from its default."""
    defaults = {key: option.default for key, option in OPTIONS.items()}
    others = {key: "other" for key in OPTIONS if key not in ("strategy", "compression", "lr_scaling")}
    shown = run_params(TrialSpec("s", "w", {}, {**defaults, **others, "strategy": strategy}, 0, 0))
    of_others = {key for key, option in OPTIONS.items() if option.strategies and strategy not in option.strategies}
    features_off = {"powersgd_rank", "compression", "lr_base_batch_size", "lr_scaling", "num_threads"}
    assert shown.keys() == OPTIONS.keys() - of_others - features_off
    swept = TrialSpec("s", "w", {"zero_stage": 1}, {**defaults, "zero_stage": 1}, 0, 0)
    assert run_params(swept)["zero_stage"] == "1", "even if it has no effect"


def test_a_learning_rate_is_a_curve_only_if_it_changes():
    def keys(*rates):
        reports = tuple({"epoch": i, "lr": rate} for i, rate in enumerate(rates))
        return series_keys(replace(RESULT, reports=reports))

    assert (keys(0.1, 0.1), keys(0.1, 0.05)) == ({}, {"lr": "train/learning_rate"})
