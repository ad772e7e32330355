from __future__ import annotations

from dataclasses import replace

import pytest

from raypar.study.trial import Failure, FailureKind, TrialResult, TrialSpec, TrialState
from raypar.track.runs import child_run, latest, result_from_tags, without_step_times

CONFIG = {"num_workers": 2, "batch_size": 64, "lr": 0.1, "hidden": (128, 64), "device": "cpu", "schedule": None}
SPEC = TrialSpec("mnist", "mlp", {"batch_size": 64, "num_workers": 2}, CONFIG, repeat=0, seed=7, order=3)
RESULT = TrialResult(
    spec=SPEC,
    state=TrialState.FINISHED,
    started_at=1000.0,
    wall_s=10.0,
    startup_s=1.0,
    warmup_s=0.5,
    train_time_s=6.0,
    eval_time_s=2.0,
    throughput_samples_per_s=100.0,
    reports=(
        {"epoch": 1, "accuracy": 0.5, "train_time_s": 3.0},
        {"epoch": 2, "accuracy": 0.9, "train_time_s": 3.0},
    ),
    step_times_s=((0.1, 0.2, 0.3), (0.3, 0.1, 0.1)),
    environment={"node": "n1", "cores": [[0], [1]], "cpu_wait_share": [0.1, 0.2]},
)


def child(result: TrialResult):
    return child_run(result, result_json=result.to_json(), recorded_at=2000.0)


def values(result: TrialResult, key: str) -> list[tuple[int, float]]:
    return [(p.step, p.value) for p in child(result).points if p.key == key]


def test_a_run_is_named_for_people_and_lasts_as_long_as_the_trial():
    run = child(RESULT)
    assert run.name == "batch_size=64 num_workers=2 #1"
    assert (run.start_ms, run.end_ms) == (1_000_000, 1_010_000)


def test_every_hyperparameter_is_a_param():
    assert child(RESULT).params == {
        "num_workers": "2",
        "batch_size": "64",
        "lr": "0.1",
        "hidden": "128,64",
        "device": "cpu",
        "schedule": "None",
    }


def test_numbers_that_sort_badly_as_params_are_metrics_as_well():
    assert values(RESULT, "num_workers") == [(0, 2.0)]
    assert values(RESULT, "batch_size") == [(0, 64.0)]


def test_step_times_are_those_of_the_slowest_rank():
    assert values(RESULT, "step_time_median_s") == [(0, 0.3)]
    assert values(RESULT, "step_time_p95_s")[0][1] == pytest.approx(0.3)


def test_reports_are_series_over_epochs_at_times_within_the_trial():
    assert values(RESULT, "accuracy") == [(1, 0.5), (2, 0.9)]
    times = [p.time_ms for p in child(RESULT).points if p.key == "accuracy"]
    assert times == [1_005_000, 1_010_000]


def test_a_figure_of_the_trial_and_the_same_figure_per_epoch_are_two_metrics():
    assert values(RESULT, "train_time_s") == [(0, 6.0)]
    assert values(RESULT, "epoch/train_time_s") == [(1, 3.0), (2, 3.0)]


@pytest.mark.parametrize("epochs", [(1, 1), (1.5, 2.5), (float("nan"), 1), (None, None), (True, False)])
def test_reports_without_an_epoch_each_are_counted(epochs):
    reports = tuple({"epoch": e, "loss": 1.0} for e in epochs)
    assert values(replace(RESULT, reports=reports), "loss") == [(0, 1.0), (1, 1.0)]


@pytest.mark.parametrize("odd", ["text", None, True, [1], 10**400])
def test_what_is_no_number_is_no_metric(odd):
    assert values(replace(RESULT, reports=({"epoch": 1, "odd": odd},)), "odd") == []


def test_infinity_is_the_largest_number_that_mlflow_holds():
    ((_, value),) = values(replace(RESULT, reports=({"epoch": 1, "loss": float("inf")},)), "loss")
    assert value == 1.7976931348623157e308


def test_a_time_that_is_not_known_is_no_metric():
    assert values(replace(RESULT, train_time_s=None), "train_time_s") == []


@pytest.mark.parametrize(
    ("state", "status"),
    [(TrialState.FINISHED, "FINISHED"), (TrialState.STOPPED, "KILLED"), (TrialState.FAILED, "FAILED")],
)
def test_the_run_ends_as_the_trial_did(state, status):
    run = child(replace(RESULT, state=state))
    assert (run.status, run.tags["raypar.state"]) == (status, state.value)


def test_a_failure_is_told_and_its_traceback_kept():
    failure = Failure(FailureKind.CRASH, "rank 1 died", rank=1, traceback="Traceback …", log_path="/logs/1")
    run = child(replace(RESULT, state=TrialState.FAILED, failure=failure, started_at=0.0, wall_s=None))
    assert run.tags["raypar.failure"] == run.tags["mlflow.note.content"] == "rank 1 died"
    assert (run.tags["raypar.failure_kind"], run.tags["raypar.failure_rank"]) == ("crash", "1")
    assert run.files["traceback.txt"] == "Traceback …"
    assert (run.start_ms, run.end_ms) == (2_000_000, 2_000_000)


def test_the_environment_is_readable():
    tags = child(RESULT).tags
    assert (tags["raypar.env.node"], tags["raypar.env.cores"]) == ("n1", "[[0], [1]]")


def test_the_whole_result_is_a_file():
    assert TrialResult.from_json(child(RESULT).files["trial.json"]) == RESULT


@pytest.mark.parametrize("num_epochs", [0, 2, 1000])
def test_a_result_comes_back_from_its_tags_whatever_its_length(num_epochs):
    reports = tuple({"epoch": e, "accuracy": e / 7, "val_loss": 1 / (e + 1)} for e in range(num_epochs))
    result = replace(RESULT, reports=reports)
    assert result_from_tags(child(result).tags) == without_step_times(result)


@pytest.mark.parametrize("text", ["", "{}", "null", "[]", '{"spec": 1}', "zlib;!!", '{"failure": null}'])
def test_a_damaged_tag_is_no_result(text):
    assert result_from_tags({"raypar.result": text}) is None


def test_the_latest_complete_result_of_an_identity_wins():
    first, second = replace(RESULT, started_at=1.0), replace(RESULT, started_at=2.0, state=TrialState.STOPPED)
    failed = replace(RESULT, started_at=3.0, state=TrialState.FAILED)
    assert latest([second, failed, first]) == (second,)


def test_a_failed_result_counts_where_none_is_complete():
    failed = [replace(RESULT, started_at=t, state=TrialState.FAILED) for t in (1.0, 5.0, 3.0)]
    assert latest(failed) == (failed[1],)
