"""Recorded results are read back equal from a real embedded database."""

import math
import os
import stat
import tarfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from recording import (
    DATA,
    client,
    data_sets,
    history,
    make_result,
    new_store,
    record,
    recorder,
    results_of,
    runs,
    stripped,
    unpacked,
)
from results import stored_conditions

from raypar.study.trial import REVISION, Failure, FailureKind, TrialState
from raypar.track.names import short_label
from raypar.track.runs import PointRun, run_params
from raypar.track.store import Store, default_tracking_uri
from raypar.track.view import links

OLD_STORE = Path(__file__).parents[1] / "golden" / "store.tar.gz"

HOSTILE = ["../../x", "a/b", 'it\'s "quoted" `so`', "naïve 研究", "x" * 300, "x" * 600, "..", " spaced ", "%2e%2e"]
SMALL, MEDIUM = make_result(32), make_result(64)
NEEDS = Failure(FailureKind.DOES_NOT_FIT, "needs 3.00 GB of memory on a worker, more than max_memory=2.00 GB")
TOO_LARGE = make_result(256, state=TrialState.DOES_NOT_FIT, failure=NEEDS)


def modes(*paths):
    return [stat.S_IMODE(path.stat().st_mode) for path in paths]


def test_a_projects_store_is_private_from_its_next_write_on(project, uri):
    kept = [project / ".raypar", project / ".raypar" / "spool", project / "mlartifacts"]
    before = os.umask(0o022)
    try:
        record(project, uri, SMALL)
        assert modes(*kept, project / "mlflow.db") == [0o700, 0o700, 0o700, 0o600]
        for path in (*kept, project / "mlflow.db"):
            path.chmod(0o777)
        record(project, uri, MEDIUM, uid="e2")
        assert modes(*kept, project / "mlflow.db") == [0o700, 0o700, 0o700, 0o700]
    finally:
        os.umask(before)


def test_a_shared_database_stays_open_to_its_users(project, tmp_path_factory):
    team = tmp_path_factory.mktemp("team")
    new_store(team)
    (team / "mlartifacts").mkdir()
    shared = (team / "mlflow.db", team / "mlartifacts")
    for path in shared:
        path.chmod(0o777)
    record(project, f"sqlite:///{team}/mlflow.db", SMALL)
    assert modes(*shared) == [0o777] * 2


FAILURE = Failure(FailureKind.CRASH, "died\0\n" * 2000, 1, "trace\n" * 5000, "/log")
RESULTS = {
    "stopped": {"state": TrialState.STOPPED},
    "bare": {"warmup_s": None, "train_time_s": None, "step_times_s": (), "reports": ()},
    "untrained": {"train_time_s": None, "conditions": stored_conditions({"is_untrained": [True]})},
    "1500 epochs": {"reports": tuple({"epoch": e, "accuracy": e / 3, "loss": 1 / (e + 1)} for e in range(1500))},
    "odd environment": {"conditions": stored_conditions({"node": ["odd/../ü", "x" * 20_000], "cores": [[0], None]})},
    "too long for tags": {
        "conditions": stored_conditions({"node": ["".join(chr(0x4E00 + i * 7919 % 20000) for i in range(300_000))]})
    },
    "retried": {"attempts": 3, "conditions": stored_conditions({})},
    "failed": {"state": TrialState.FAILED, "failure": FAILURE},
    "diverged": {"state": TrialState.DIVERGED, "reports": ({"epoch": 1, "train_loss": 2.0, "val_loss": math.inf},)},
}


@pytest.mark.parametrize("changes", RESULTS.values(), ids=RESULTS)
def test_every_kind_of_result_is_read_back_equal(project, uri, changes):
    result = make_result(**changes)
    record(project, uri, result)
    assert results_of(uri, project) == stripped(result)
    assert Store(uri, project).step_times("mnist", result.spec.identity) == result.step_times_s
    assert Store(uri, project).step_times("mnist", "' OR 1=1 --") == ()
    is_too_long = any(len(node) > 100_000 for node in result.conditions.node)
    assert ("raypar.result" in runs(uri)[0].data.tags) is not is_too_long


def test_diverged_trials_are_failed_runs_with_their_own_count(project, uri):
    """Includes a pending journal that is older than this state."""
    bad = {"reports": ({"epoch": 1, "train_loss": math.nan},)}
    new, old = make_result(32, state=TrialState.DIVERGED, **bad), make_result(64, **bad)
    record(project, uri, SMALL, new, old, TOO_LARGE, make_result(128, state=TrialState.STOPPED))
    diverged = [run for run in runs(uri) if run.data.tags["raypar.state"] == "diverged"]
    assert [run.info.status for run in diverged] == ["FAILED"] * 2
    assert {run.data.tags["mlflow.note.content"] for run in diverged} == {"diverged: train_loss=nan at epoch 1"}
    (summary,) = Store(uri, project).studies()
    counts = tuple(summary.counts.values())
    assert counts == (3, 1, 1, 0)


def summary_of(*results):
    """Return a point run for each point of the results."""
    by_point = {result.spec.point_identity: result.spec for result in results}
    metrics = {"median_train_time_s": 6.0, "num_trials": 1.0}
    return [
        PointRun(identity, short_label(spec.point), run_params(spec), metrics, {"raypar.recommended": "no"})
        for identity, spec in by_point.items()
    ]


def test_mlflow_has_the_execution_its_points_their_trials_and_the_experiment(project, uri):
    """The content of a trial's run is in golden/cases/runs.txt."""
    about = {
        "description": "What does it buy? More.",
        "about": "- **Sweeps:** `batch_size`",
        "answer": "What? Nothing.",
    }
    about |= {"params": {"num_repeats": "3"}, "score": "accuracy", "study_file": Path("studies/mnist.py")}
    rec = recorder(project, uri, execution={**about, "study_source": "study = 1\n"})
    rec.record(MEDIUM)
    rec.record_metrics([("scaling/speedup", 1.0, 1), ("scaling/speedup", 1.9, 2)])
    rec.record_trial_metrics({MEDIUM.spec.identity: {"speedup": 1.9, "efficiency": 0.95}})
    rec.add_artifact("report/study.html", "<p>done</p>")
    (point,) = runs(uri, kind="point")
    assert (point.info.status, point.data.metrics) == ("RUNNING", {})
    rec.record_summary("What? Much.", summary_of(MEDIUM))
    rec.close("finished")

    (parent,), (point,), (child,) = runs(uri, kind="execution"), runs(uri, kind="point"), runs(uri)
    assert parent.info.status == point.info.status == child.info.status == "FINISHED"
    assert (point.info.run_name, point.data.tags["mlflow.parentRunId"]) == ("bs=64", parent.info.run_id)
    assert point.data.metrics == {"median_train_time_s": 6.0, "num_trials": 1.0}
    assert point.data.params == child.data.params
    assert parent.data.params == {"num_repeats": "3"}
    assert parent.data.tags["mlflow.source.name"] == "studies/mnist.py"
    assert history(uri, parent, "scaling/speedup") == [(1, 1.0), (2, 1.9)]
    assert (child.info.run_name, child.data.params["hidden"]) == ("bs=64 #1", "128,64")
    assert child.data.tags["mlflow.parentRunId"] == point.info.run_id
    metrics = {"num_workers": 2.0, "accuracy": 0.9, "speedup": 1.9, "efficiency": 0.95}
    assert metrics.items() <= child.data.metrics.items()
    assert history(uri, child, "accuracy") == [(1, 0.5), (2, 0.9)]
    assert [f.path for f in client(uri).list_artifacts(child.info.run_id)] == ["trial.json"]
    assert {f.path for f in client(uri).list_artifacts(parent.info.run_id)} == {"report", "study.py"}
    experiment = client(uri).get_experiment_by_name("mnist")
    assert parent.data.tags["mlflow.note.content"] == about["description"]
    note = experiment.tags["mlflow.note.content"]
    assert note == f"What? Much.\n\n{links(experiment.experiment_id)}\n\n{about['about']}"
    for view, kind in (("raypar-v2", "point"), ("raypar-trials", "trial"), ("raypar-speedup", "execution")):
        state = unpacked(experiment.tags[f"mlflow.sharedViewState.{view}"])
        assert state["searchFilter"] == f"tags.`raypar.kind` = '{kind}'"
    assert experiment.artifact_location == (project / "mlartifacts" / "mnist").as_uri()


SOURCE = {"mlflow.source.git.commit": "c" * 40, "mlflow.source.git.branch": "main"}


def test_executions_and_trials_have_the_commit_in_mlflows_tags(project, uri):
    origin = {"tags": {**SOURCE, "host": "n1"}, "study_file": Path("s.py")}
    record(project, uri, MEDIUM, execution=origin)
    for kind in ("execution", "trial"):
        (run,) = runs(uri, kind=kind)
        wanted = {**SOURCE, "mlflow.source.name": "s.py", "mlflow.source.type": "LOCAL"}
        assert wanted.items() <= run.data.tags.items()


def test_trials_of_two_revisions_do_not_have_the_commit_of_the_working_tree(project, uri):
    spec = replace(MEDIUM.spec, point={**MEDIUM.spec.point, REVISION: "main"})
    record(project, uri, replace(MEDIUM, spec=spec), execution={"tags": SOURCE})
    (trial,) = runs(uri)
    assert not [key for key in trial.data.tags if key.startswith("mlflow.source.git")]


def test_a_logged_model_has_its_trial_its_step_and_the_metrics_of_that_step(project, uri):
    from mlflow.models import Model

    folder = project / ".raypar" / "logs" / "model"
    folder.mkdir(parents=True)
    Model().save(str(folder / "MLmodel"))
    rec = recorder(project, uri)
    rec.record(MEDIUM)
    for name, report in (("kept_model", 1), ("kept_model", 1), ("first_model", 0)):
        rec.record_model(MEDIUM, folder, name, report)
    rec.close("finished")
    (trial,) = runs(uri)
    models = client(uri).search_logged_models([trial.info.experiment_id])
    assert {model.name: model.source_run_id for model in models} == dict.fromkeys(
        ("kept_model", "first_model"), trial.info.run_id
    )
    assert len(models) == 2 and all(model.params["batch_size"] == "64" for model in models)
    metrics = {model.name: [(m.key, m.value, m.step) for m in model.metrics] for model in models}
    assert metrics == {"kept_model": [("accuracy", 0.9, 2)], "first_model": [("accuracy", 0.5, 1)]}
    steps = {output.model_id: output.step for output in trial.outputs.model_outputs}
    assert {model.name: steps[model.model_id] for model in models} == {"kept_model": 2, "first_model": 1}
    assert history(uri, trial, "accuracy") == [(1, 0.5), (2, 0.9)]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_study_name_stays_in_its_folders(project, uri, name):
    rec = recorder(project, uri, study=name, execution={"study_source": "x"})
    result = make_result(study=name)
    rec.record(result)
    rec.add_artifact("../../../escape.txt", "caught")
    assert rec.close("finished") == 0
    store = Store(uri, project)
    assert (store.results(name), store.study_source(name)) == (stripped(result), "x")
    assert [summary.name for summary in store.studies()] == [name]
    assert {p.name for p in project.iterdir()} == {"mlflow.db", "mlartifacts", ".raypar"}
    assert [p.parts[-3:-1] for p in project.rglob("escape.txt")] != []


def test_metrics_reach_a_trial_of_an_earlier_execution(project, uri):
    record(project, uri, MEDIUM)
    rec = recorder(project, uri, "e2")
    rec.record_trial_metrics({MEDIUM.spec.identity: {"speedup": 2.0}, "unknown": {"speedup": 1.0}})
    assert (rec.close("finished"), runs(uri)[0].data.metrics["speedup"]) == (0, 2.0)


def test_a_point_has_one_run_over_all_executions(project, uri, monkeypatch):
    monkeypatch.setattr("raypar.track.run_writer._MAX_RUNS", 1)  # several pages
    for uid, results in (("e1", [SMALL, MEDIUM]), ("e2", [make_result(64, repeat=1)])):
        rec = recorder(project, uri, uid)
        for result in results:
            rec.record(result)
        before = results_of(uri, project), Store(uri, project).studies()
        rec.record_summary("What? Much.", summary_of(SMALL, MEDIUM))
        rec.record_summary("What? Much.", summary_of(SMALL, MEDIUM))
        assert results_of(uri, project) == before[0]
        rec.close("finished")
    (summary,) = Store(uri, project).studies()
    assert (summary.num_executions, summary.counts["num_finished"]) == (2, 3)
    points = {run.info.run_name: run for run in runs(uri, kind="point")}
    children = Counter(run.data.tags["mlflow.parentRunId"] for run in runs(uri))
    assert children == {points["bs=32"].info.run_id: 1, points["bs=64"].info.run_id: 2}
    latest = next(run for run in runs(uri, kind="execution") if run.data.tags["raypar.uid"] == "e2")
    assert {run.data.tags["mlflow.parentRunId"] for run in points.values()} == {latest.info.run_id}
    assert {run.info.status for run in points.values()} == {"FINISHED"}
    order = sorted(points, key=lambda name: points[name].data.tags["raypar.order"])
    assert (order, len(points)) == (["bs=32", "bs=64"], 2)


def test_trials_of_a_search_are_its_points(project, uri):
    rec = recorder(project, uri, execution={"has_points": False})
    rec.record(SMALL)
    rec.close("finished")
    (parent,), (child,) = runs(uri, kind="execution"), runs(uri)
    assert (child.data.tags["mlflow.parentRunId"], runs(uri, kind="point")) == (parent.info.run_id, [])


def test_a_point_deleted_by_hand_is_created_again(project, uri):
    rec = recorder(project, uri)
    rec.record(SMALL)
    client(uri).delete_run(runs(uri, kind="point")[0].info.run_id)
    rec.record_summary("What?", summary_of(SMALL))
    assert rec.close("finished") == 0 and list(project.rglob("*.rejected")) == []
    assert [run.data.metrics["num_trials"] for run in runs(uri, kind="point")] == [1.0]


def test_an_older_store_gets_points(tmp_path):
    """Its trials are nested under their execution, and have more params, metrics and tags."""
    with tarfile.open(OLD_STORE) as tar:
        tar.extractall(tmp_path, filter="data")
    uri = default_tracking_uri(tmp_path)
    before = Store(uri, tmp_path).results("digits")
    again = replace(before[0], spec=replace(before[0].spec, repeat=9), started_at=2e9)
    rec = recorder(tmp_path, uri, "new", "digits")
    rec.record(again)
    rec.record_summary("What?", summary_of(*before, again))
    assert rec.close("finished") == 0
    assert Store(uri, tmp_path).results("digits") == (*before, replace(again, step_times_s=()))
    identities = {result.spec.point_identity for result in before}
    assert {run.data.tags["raypar.point"] for run in runs(uri, "digits", "point")} == identities


def test_runs_deleted_by_hand_do_not_count_and_stay_deleted(project, uri):
    record(project, uri, SMALL, MEDIUM)
    client(uri).delete_run(runs(uri)[0].info.run_id)
    assert len(results_of(uri, project)) == 1
    client(uri).delete_experiment(Store(uri, project).experiment_id("mnist"))
    assert results_of(uri, project) == ()
    record(project, uri, MEDIUM, uid="e2")
    assert results_of(uri, project) == stripped(MEDIUM)


def test_a_study_deleted_by_hand_while_it_runs_keeps_later_results(project, uri):
    rec = recorder(project, uri)
    rec.record(SMALL)
    client(uri).delete_experiment(Store(uri, project).experiment_id("mnist"))
    rec.record(MEDIUM)
    assert (rec.close("finished"), results_of(uri, project)) == (0, stripped(MEDIUM))


def test_a_moved_project_keeps_its_step_times(project, uri, tmp_path_factory):
    record(project, uri, MEDIUM)
    moved = tmp_path_factory.mktemp("elsewhere") / "project"
    project.rename(moved)
    store = Store(default_tracking_uri(moved), moved)
    assert store.step_times("mnist", MEDIUM.spec.identity) == MEDIUM.step_times_s
    moved.rename(project)


def test_reading_an_empty_folder_creates_nothing(tmp_path):
    store = Store(default_tracking_uri(tmp_path), tmp_path)
    assert store.results("mnist") == store.studies() == store.step_times("mnist", "0" * 16) == ()
    assert (store.study_source("mnist"), store.question("mnist"), store.experiment_id("mnist")) == (None, {}, None)
    assert list(tmp_path.iterdir()) == []


def test_data_sets_of_a_trial_are_the_splits_it_has_used(project, uri):
    rec = recorder(project, uri)
    rec.record(make_result(data=DATA))
    shown = {("train", "MNIST", "0123456789abcdef"), ("val", "MNIST, val", "none")}
    assert data_sets(uri) == shown
    rec.record_trial_inputs([make_result(data=DATA)], ["test"])
    assert data_sets(uri) == shown | {("test", "MNIST", "fedcba9876543210")}
    assert results_of(uri, project)[0].data == DATA
