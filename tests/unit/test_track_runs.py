"""A trial's result as the fields of an MLflow run, and back."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from raypar.study.options import OPTIONS
from raypar.study.trial import Failure, FailureKind, TrialResult, TrialSpec, TrialState, latest
from raypar.track.names import MAX_TAG_LENGTH, MAX_TAG_PARTS
from raypar.track.runs import child_run, result_from_tags, result_tags, series_keys, without_step_times

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


def test_a_run_shows_the_trial():
    run = child(RESULT)
    assert run.name == "batch_size=64 num_workers=2 #1"
    assert (run.start_ms, run.end_ms) == (1_000_000, 1_010_000)
    expected = {"num_workers": "2", "batch_size": "64", "lr": "0.1", "hidden": "128,64"}
    assert run.params == {**expected, "device": "cpu", "schedule": "None"}
    assert (run.tags["raypar.env.node"], run.tags["raypar.env.cores"]) == ("n1", "[[0], [1]]")
    assert TrialResult.from_json(run.files["trial.json"]) == RESULT


@pytest.mark.parametrize(
    ("key", "value"),
    # Numbers that sort badly as params; step times of the slowest rank.
    [("num_workers", 2.0), ("batch_size", 64.0), ("step_time_median_s", 0.3), ("step_time_p95_s", 0.3)],
)
def test_figures_of_the_trial_are_metrics(key: str, value: float):
    assert values(RESULT, key) == [(0, pytest.approx(value))]


@pytest.mark.parametrize(("times", "p95"), [((1.0,), 1.0), ((2.0, 1.0), 1.95), (tuple(range(1, 22)), 20.0)])
def test_the_95th_percentile_of_step_times_is_interpolated(times, p95):
    result = replace(RESULT, step_times_s=(times,))
    assert values(result, "step_time_p95_s") == [(0, pytest.approx(p95))]


def test_reports_are_series_over_epochs_at_times_within_the_trial():
    assert values(RESULT, "accuracy") == [(1, 0.5), (2, 0.9)]
    times = [p.time_ms for p in child(RESULT).points if p.key == "accuracy"]
    assert times == [1_005_000, 1_010_000]


def test_a_figure_of_the_trial_and_the_same_figure_per_epoch_are_two_metrics():
    assert values(RESULT, "train_time_s") == [(0, 6.0)]
    assert values(RESULT, "train/runtime_s") == [(1, 3.0), (2, 3.0)]
    of_a_loop = replace(RESULT, train_time_s=None, reports=({"epoch": 1, "wall_s": 3.0},))
    assert values(of_a_loop, "wall_s") == [(0, 10.0)]
    assert values(of_a_loop, "epoch/wall_s") == [(1, 3.0)]


REPORT = {
    "epoch": 0.5,
    "step": 8,
    "train_loss": 0.9,
    "val_loss": 0.8,
    "accuracy": 0.7,
    "lr": 0.1,
    "grad_norm": 2.0,
    "train_time_s": 3.0,
    "eval_time_s": 1.0,
    "throughput_samples_per_s": 100.0,
    "eval_samples_per_s": 200.0,
    "eval_steps_per_s": 20.0,
}
REPORTS = (REPORT, {**REPORT, "epoch": 1, "step": 16})


def test_reports_of_the_training_loop_are_sorted_into_sections_by_step():
    result = replace(RESULT, reports=REPORTS)
    assert "step" not in series_keys(result)
    assert {p.key: p.value for p in child(result).points if p.step == 8} == {
        "train/epoch": 0.5,
        "train/loss": 0.9,
        "train/learning_rate": 0.1,
        "train/grad_norm": 2.0,
        "train/runtime_s": 3.0,
        "train/samples_per_second": 100.0,
        "eval/loss": 0.8,
        "eval/runtime_s": 1.0,
        "eval/samples_per_second": 200.0,
        "eval/steps_per_second": 20.0,
        "accuracy": 0.7,
    }
    assert values(result, "train/epoch") == [(8, 0.5), (16, 1.0)]
    assert values(result, "throughput_samples_per_s") == [(0, 100.0)]


def test_reports_of_a_user_s_train_loop_keep_their_names_and_stand_by_epoch():
    reports = ({"epoch": 1, "step": 8, "train_loss": 0.9, "lr": 0.1}, {"epoch": 2, "step": 16})
    result = replace(RESULT, train_time_s=None, reports=reports)
    assert values(result, "train_loss") == [(1, 0.9)]
    assert values(result, "lr") == [(1, 0.1)]
    assert values(result, "step") == [(1, 8.0), (2, 16.0)]
    assert not [p for p in child(result).points if "/" in p.key]


def test_a_failed_trial_has_the_same_names_as_a_finished_one():
    config = {key: option.default for key, option in OPTIONS.items()}
    failed = replace(RESULT, spec=replace(SPEC, config=config), train_time_s=None, reports=REPORTS)
    assert values(failed, "train/loss") == [(8, 0.9), (16, 0.9)]


def test_a_metric_called_as_a_section_stays_distinct():
    result = replace(RESULT, reports=({**REPORT, "eval/loss": 5.0},))
    assert (values(result, "eval/loss"), values(result, "epoch/eval/loss")) == ([(8, 0.8)], [(8, 5.0)])


@pytest.mark.parametrize("epochs", [(1, 1), (1.5, 2.5), (float("nan"), 1), (None, None), (True, False)])
def test_reports_without_an_epoch_each_are_counted(epochs):
    reports = tuple({"epoch": e, "loss": 1.0} for e in epochs)
    assert values(replace(RESULT, reports=reports), "loss") == [(0, 1.0), (1, 1.0)]


@pytest.mark.parametrize(
    ("value", "stored"),
    [*((odd, []) for odd in ("text", None, True, [1], 10**400)), (float("inf"), [(1, 1.7976931348623157e308)])],
)
def test_only_numbers_are_metrics_and_infinity_is_the_largest(value, stored):
    assert values(replace(RESULT, reports=({"epoch": 1, "odd": value},)), "odd") == stored


def test_an_unmeasured_time_is_no_metric():
    assert values(replace(RESULT, train_time_s=None), "train_time_s") == []


@pytest.mark.parametrize(
    ("state", "status"),
    [(TrialState.FINISHED, "FINISHED"), (TrialState.STOPPED, "KILLED"), (TrialState.FAILED, "FAILED")],
)
def test_the_run_ends_as_the_trial_did(state, status):
    run = child(replace(RESULT, state=state))
    assert (run.status, run.tags["raypar.state"]) == (status, state.value)


def test_a_failure_is_shown_and_its_traceback_kept():
    failure = Failure(FailureKind.CRASH, "rank 1 died", rank=1, traceback="Traceback …", log_path="/logs/1")
    run = child(replace(RESULT, state=TrialState.FAILED, failure=failure, started_at=0.0, wall_s=None))
    assert run.tags["raypar.failure"] == run.tags["mlflow.note.content"] == "rank 1 died"
    assert (run.tags["raypar.failure_kind"], run.tags["raypar.failure_rank"]) == ("crash", "1")
    assert run.files["traceback.txt"] == "Traceback …"
    assert (run.start_ms, run.end_ms) == (2_000_000, 2_000_000)


def evaluated(num_reports: int) -> TrialResult:
    """Return a trial that evaluated often; its numbers have as many digits as measured ones."""
    draw = random.Random(num_reports).random
    reports = tuple({**{key: draw() for key in REPORT}, "step": i, "epoch": i / 938} for i in range(num_reports))
    return replace(RESULT, reports=reports)


@pytest.mark.parametrize("num_reports", [0, 2, 500])
def test_a_result_comes_back_from_its_tags(num_reports):
    result = evaluated(num_reports)
    tags = result_tags(result)
    assert tags is not None and max(map(len, tags.values())) <= MAX_TAG_LENGTH and len(tags) <= MAX_TAG_PARTS
    assert result_from_tags(child(result).tags) == without_step_times(result)


def test_with_thousands_of_evaluations_the_file_alone_holds_the_result():
    result = evaluated(5000)
    assert result_tags(result) is None
    run = child(result)
    assert not any(key.startswith("raypar.result") for key in run.tags)
    assert TrialResult.from_json(run.files["trial.json"]) == result


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
