"""Recorded results are read back equal, over the real embedded database."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from store_parts import DATA, client, data_sets, make_result, recorder, runs, stripped, unpacked

from raypar.study.trial import Failure, FailureKind, TrialResult, TrialState
from raypar.track.store import Store, default_tracking_uri

HOSTILE = ["../../x", "a/b", 'it\'s "quoted" `so`', "naïve 研究", "x" * 300, "x" * 600, "..", " spaced ", "%2e%2e"]


def record(project: Path, uri: str, *results: TrialResult, uid: str = "e1", **kwargs: Any) -> None:
    rec = recorder(project, uri, uid, **kwargs)
    for result in results:
        rec.record(result)
    assert rec.close("finished") == 0


def test_results_come_back_equal(project, uri):
    written = make_result(32), make_result(64), make_result(64, repeat=1, started_at=1_800_000_000.0)
    record(project, uri, *written)
    assert Store(uri, project).results("mnist") == tuple(map(stripped, written))


@pytest.mark.parametrize(
    "changes",
    [
        {"state": TrialState.STOPPED},
        {"train_time_s": None, "step_times_s": (), "reports": ()},
        {"reports": tuple({"epoch": e, "accuracy": e / 3, "loss": 1 / (e + 1)} for e in range(1500))},
        {"environment": {"odd/../key": {"nested": [1, None, "ü"]}, "": 1, "long": "x" * 20_000}},
        {"environment": {"noise": "".join(chr(0x4E00 + (i * 7919) % 20000) for i in range(300_000))}},
        {"attempts": 3, "environment": {}},
        {
            "state": TrialState.FAILED,
            "failure": Failure(FailureKind.CRASH, "died\0\n" * 2000, 1, "trace\n" * 5000, "/log"),
        },
    ],
    ids=["stopped", "bare", "1500 epochs", "odd environment", "too long for tags", "retried", "failed"],
)
def test_every_kind_of_result_comes_back_equal(project, uri, changes):
    result = make_result(**changes)
    record(project, uri, result)
    assert Store(uri, project).results("mnist") == (stripped(result),)
    assert Store(uri, project).step_times("mnist", result.spec.identity) == result.step_times_s
    is_too_long = "noise" in result.environment
    assert ("raypar.result" in runs(uri)[0].data.tags) is not is_too_long


def test_plain_mlflow_sees_params_metrics_tags_and_the_parent(project, uri):
    rec = recorder(
        project,
        uri,
        execution={
            "params": {"num_repeats": "3"},
            "tags": {"raypar.question": '{"space": ["batch_size"]}'},
            "description": "What does batch size buy?",
            "about": "What does batch size buy?\n\n- **Sweeps:** `batch_size`",
            "score": "accuracy",
            "study_file": Path("studies/mnist.py"),
            "study_source": "study = 1\n",
        },
    )
    rec.record(make_result(64))
    rec.record_metrics([("scaling/speedup", 1.0, 1), ("scaling/speedup", 1.9, 2)])
    rec.record_trial_metrics({make_result(64).spec.identity: {"speedup": 1.9, "efficiency": 0.95}})
    rec.add_artifact("report/study.html", "<p>done</p>")
    rec.close("finished")

    (parent,), (child,) = runs(uri, kind="execution"), runs(uri)
    assert parent.info.status == child.info.status == "FINISHED"
    assert parent.data.params == {"num_repeats": "3"}
    assert parent.data.tags["mlflow.source.name"] == "studies/mnist.py"
    assert [(m.step, m.value) for m in client(uri).get_metric_history(parent.info.run_id, "scaling/speedup")] == [
        (1, 1.0),
        (2, 1.9),
    ]
    assert child.info.run_name == "batch_size=64 #1"
    assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert child.data.params["hidden"] == "128,64"
    expected = {"train_time_s": 6.0, "num_workers": 2.0, "accuracy": 0.9, "speedup": 1.9, "efficiency": 0.95}
    assert {k: child.data.metrics[k] for k in expected} == expected
    history = client(uri).get_metric_history(child.info.run_id, "accuracy")
    assert [(m.step, m.value) for m in history] == [(1, 0.5), (2, 0.9)]
    assert (child.info.start_time, child.info.end_time) == (1_700_000_064_000, 1_700_000_074_000)
    assert [f.path for f in client(uri).list_artifacts(child.info.run_id)] == ["trial.json"]
    assert {f.path for f in client(uri).list_artifacts(parent.info.run_id)} == {"report", "study.py"}
    experiment = client(uri).get_experiment_by_name("mnist")
    assert parent.data.tags["mlflow.note.content"] == "What does batch size buy?"
    note = experiment.tags["mlflow.note.content"]
    assert note.startswith(f"[Charts](#/experiments/{experiment.experiment_id}/runs?")
    assert note.endswith(" · What does batch size buy?\n\n- **Sweeps:** `batch_size`")
    view = experiment.tags["mlflow.sharedViewState.raypar-v2"]
    assert view.startswith('{"name": "raypar charts"') and "scaling/speedup" in unpacked(view)
    assert experiment.artifact_location == (project / "mlartifacts" / "mnist").as_uri()
    store = Store(uri, project)
    assert store.experiment_id("mnist") == experiment.experiment_id
    assert store.question("mnist") == {"space": ["batch_size"]}
    assert store.study_source("mnist") == "study = 1\n"


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_study_name_stays_in_its_folders_and_is_read_again(project, uri, name):
    rec = recorder(project, uri, study=name, execution={"study_source": "x"})
    result = make_result(study=name)
    rec.record(result)
    rec.add_artifact("../../../escape.txt", "caught")
    assert rec.close("finished") == 0
    store = Store(uri, project)
    assert store.results(name) == (stripped(result),)
    assert store.study_source(name) == "x"
    assert [summary.name for summary in store.studies()] == [name]
    assert {p.name for p in project.iterdir()} == {"mlflow.db", "mlartifacts", ".raypar"}
    assert [p.parts[-3:-1] for p in project.rglob("escape.txt")] != []


def test_a_complete_result_of_an_earlier_execution_outlives_a_later_failure(project, uri):
    good = make_result(64)
    bad = make_result(64, state=TrialState.FAILED, started_at=1_900_000_000.0)
    record(project, uri, good, uid="e1")
    record(project, uri, bad, uid="e2")
    assert Store(uri, project).results("mnist") == (stripped(good),)
    (summary,) = Store(uri, project).studies()
    assert (summary.num_executions, summary.num_finished, summary.num_failed) == (2, 1, 1)


def test_metrics_reach_a_trial_of_an_earlier_execution(project, uri):
    record(project, uri, make_result(64))
    rec = recorder(project, uri, "e2")
    rec.record_trial_metrics({make_result(64).spec.identity: {"speedup": 2.0}, "unknown": {"speedup": 1.0}})
    assert rec.close("finished") == 0
    assert runs(uri)[0].data.metrics["speedup"] == 2.0


def test_a_run_deleted_by_hand_counts_no_more(project, uri):
    record(project, uri, make_result(32), make_result(64))
    client(uri).delete_run(runs(uri)[0].info.run_id)
    assert len(Store(uri, project).results("mnist")) == 1


def test_a_study_deleted_by_hand_starts_anew_and_stays_deleted(project, uri):
    record(project, uri, make_result(32))
    client(uri).delete_experiment(Store(uri, project).experiment_id("mnist"))
    assert Store(uri, project).results("mnist") == ()
    record(project, uri, make_result(64), uid="e2")
    assert Store(uri, project).results("mnist") == (stripped(make_result(64)),)


def test_a_study_deleted_by_hand_while_it_runs_loses_no_later_result(project, uri):
    rec = recorder(project, uri)
    rec.record(make_result(32))
    client(uri).delete_experiment(Store(uri, project).experiment_id("mnist"))
    rec.record(make_result(64))
    assert rec.close("finished") == 0
    assert Store(uri, project).results("mnist") == (stripped(make_result(64)),)


def test_a_project_that_was_moved_keeps_its_step_times(project, uri, tmp_path_factory):
    record(project, uri, make_result(64))
    moved = tmp_path_factory.mktemp("elsewhere") / "project"
    project.rename(moved)
    store = Store(default_tracking_uri(moved), moved)
    assert store.step_times("mnist", make_result(64).spec.identity) == make_result(64).step_times_s
    moved.rename(project)


def test_reading_an_empty_folder_creates_nothing(tmp_path):
    store = Store(default_tracking_uri(tmp_path), tmp_path)
    assert store.results("mnist") == ()
    assert store.studies() == ()
    assert store.step_times("mnist", "0" * 16) == ()
    assert (store.study_source("mnist"), store.question("mnist"), store.experiment_id("mnist")) == (None, {}, None)
    assert list(tmp_path.iterdir()) == []


def test_an_identity_can_not_break_out_of_its_query(project, uri):
    record(project, uri, make_result(64))
    assert Store(uri, project).step_times("mnist", "' OR 1=1 --") == ()


def test_data_sets_of_a_trial_are_its_splits_and_the_test_split_once_it_was_seen(project, uri):
    rec = recorder(project, uri)
    rec.record(make_result(data=DATA))
    shown = {("train", "MNIST", "0123456789abcdef"), ("val", "MNIST, val", "none")}
    assert data_sets(uri) == shown
    rec.record_trial_inputs({make_result().spec.identity: DATA}, ["test"])
    assert data_sets(uri) == shown | {("test", "MNIST", "fedcba9876543210")}
    (child,) = runs(uri)
    train = next(i.dataset for i in child.inputs.dataset_inputs if i.tags[0].value == "train")
    assert json.loads(train.profile) == {"num_rows": 60000}
    features = json.loads(json.loads(train.schema)["mlflow_tensorspec"]["features"])
    assert features[0]["tensor-spec"] == {"dtype": "uint8", "shape": [-1, 28, 28]}
    assert "raypar.workloads.mnist_mlp" in train.source
    assert Store(uri, project).results("mnist")[0].data == DATA
