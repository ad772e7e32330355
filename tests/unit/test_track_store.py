"""Recorder, Store and sync over the real embedded database."""

from __future__ import annotations

import base64
import json
import logging
import shutil
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from raypar.errors import StoreError
from raypar.study.trial import Failure, FailureKind, TrialResult, TrialSpec, TrialState
from raypar.track import spool
from raypar.track.recorder import Execution, Recorder
from raypar.track.spool import Journal, spools, write_ack
from raypar.track.store import Store, default_tracking_uri
from raypar.track.sync import SyncReport, sync
from raypar.track.upload import Uploader
from raypar.track.writer import RunWriter

CONFIG = {"num_workers": 2, "batch_size": 64, "lr": 0.1, "hidden": (128, 64), "device": "cpu", "schedule": None}
HOSTILE = ["../../x", "a/b", 'it\'s "quoted" `so`', "naïve 研究", "x" * 300, "x" * 600, "..", " spaced ", "%2e%2e"]


def make_result(batch_size: int = 64, *, study: str = "mnist", repeat: int = 0, **changes) -> TrialResult:
    spec = TrialSpec(study, "mlp", {"batch_size": batch_size}, {**CONFIG, "batch_size": batch_size}, repeat, repeat)
    result = TrialResult(
        spec=spec,
        state=TrialState.FINISHED,
        started_at=1_700_000_000.0 + batch_size,
        wall_s=10.0,
        startup_s=1.0,
        warmup_s=0.5,
        train_time_s=6.0,
        eval_time_s=2.0,
        throughput_samples_per_s=100.0,
        reports=({"epoch": 1, "accuracy": 0.5}, {"epoch": 2, "accuracy": 0.9}),
        step_times_s=((0.1, 0.2), (0.2, 0.1)),
        environment={"node": "n1", "cores": [[0], [1]]},
    )
    return replace(result, **changes)


def stripped(result: TrialResult) -> TrialResult:
    return replace(result, step_times_s=())


def unpacked(view: str) -> str:
    packed = json.loads(view)["state"].removeprefix("deflate;")
    return zlib.decompress(base64.b64decode(packed)).decode()


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory):
    """Making the tables takes seconds: once."""
    from raypar.track.client import connect

    path = tmp_path_factory.mktemp("db") / "mlflow.db"
    connect(f"sqlite:///{path}")
    return path


@pytest.fixture
def project(tmp_path, empty_database, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    return tmp_path


@pytest.fixture
def uri(project):
    return default_tracking_uri(project)


def recorder(project: Path, uri: str, uid: str = "e1", study: str = "mnist", **kwargs) -> Recorder:
    execution = Execution(uid, study, started_at=1_700_000_000.0, **kwargs.pop("execution", {}))
    made = Recorder(execution, tracking_uri=uri, project_dir=project, **kwargs)
    made.start()
    return made


def client(uri: str):
    from raypar.track.client import connect

    return connect(uri)


def runs(uri: str, study: str = "mnist", kind: str = "trial"):
    experiment = client(uri).get_experiment_by_name(study)
    if experiment is None:
        return []
    return list(client(uri).search_runs([experiment.experiment_id], f"tags.`raypar.kind` = '{kind}'"))


def block(project: Path) -> str:
    """A store that can't be reached until `unblock`."""
    (project / "down").write_text("")
    return f"sqlite:///{project}/down/mlflow.db"


def unblock(project: Path, empty_database: Path) -> None:
    (project / "down").unlink()
    (project / "down").mkdir()
    shutil.copy(empty_database, project / "down" / "mlflow.db")


# --- what is written is what is read


def test_results_come_back_equal(project, uri):
    written = [make_result(32), make_result(64), make_result(64, repeat=1, started_at=1_800_000_000.0)]
    rec = recorder(project, uri)
    for result in written:
        rec.record(result)
    assert rec.close("finished") == 0
    assert Store(uri, project).results("mnist") == tuple(map(stripped, written))


@pytest.mark.parametrize(
    "changes",
    [
        {"state": TrialState.STOPPED},
        {"train_time_s": None, "step_times_s": (), "reports": ()},
        {"reports": tuple({"epoch": e, "accuracy": e / 3, "loss": 1 / (e + 1)} for e in range(1500))},
        {"environment": {"odd/../key": {"nested": [1, None, "ü"]}, "": 1, "long": "x" * 20_000}},
        {"attempts": 3, "environment": {}},
        {
            "state": TrialState.FAILED,
            "failure": Failure(FailureKind.CRASH, "died\0\n" * 2000, 1, "trace\n" * 5000, "/log"),
        },
    ],
    ids=["stopped", "bare", "1500 epochs", "odd environment", "retried", "failed"],
)
def test_every_kind_of_result_comes_back_equal(project, uri, changes):
    result = make_result(**changes)
    rec = recorder(project, uri)
    rec.record(result)
    assert rec.close("finished") == 0
    assert Store(uri, project).results("mnist") == (stripped(result),)
    assert Store(uri, project).step_times("mnist", result.spec.identity) == result.step_times_s


def test_a_result_too_long_for_tags_is_read_from_its_file(project, uri):
    noise = "".join(chr(0x4E00 + (i * 7919) % 20000) for i in range(300_000))
    result = make_result(environment={"noise": noise})
    rec = recorder(project, uri)
    rec.record(result)
    rec.close("finished")
    assert "raypar.result" not in runs(uri)[0].data.tags
    assert Store(uri, project).results("mnist") == (stripped(result),)


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
def test_a_hostile_study_name_stays_in_its_folders_and_is_found_again(project, uri, name):
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
    for uid, result in (("e1", good), ("e2", bad)):
        rec = recorder(project, uri, uid)
        rec.record(result)
        rec.close("finished")
    assert Store(uri, project).results("mnist") == (stripped(good),)
    (summary,) = Store(uri, project).studies()
    assert (summary.num_executions, summary.num_finished, summary.num_failed) == (2, 1, 1)


def test_metrics_reach_a_trial_of_an_earlier_execution(project, uri):
    rec = recorder(project, uri, "e1")
    rec.record(make_result(64))
    rec.close("finished")
    rec = recorder(project, uri, "e2")
    rec.record_trial_metrics({make_result(64).spec.identity: {"speedup": 2.0}, "unknown": {"speedup": 1.0}})
    assert rec.close("finished") == 0
    assert runs(uri)[0].data.metrics["speedup"] == 2.0


def test_a_run_deleted_by_hand_counts_no_more(project, uri):
    rec = recorder(project, uri)
    rec.record(make_result(32))
    rec.record(make_result(64))
    rec.close("finished")
    client(uri).delete_run(runs(uri)[0].info.run_id)
    assert len(Store(uri, project).results("mnist")) == 1


def test_a_study_deleted_by_hand_starts_anew_and_stays_deleted(project, uri):
    rec = recorder(project, uri, "e1")
    rec.record(make_result(32))
    rec.close("finished")
    client(uri).delete_experiment(Store(uri, project).experiment_id("mnist"))
    assert Store(uri, project).results("mnist") == ()
    rec = recorder(project, uri, "e2")
    rec.record(make_result(64))
    assert rec.close("finished") == 0
    assert Store(uri, project).results("mnist") == (stripped(make_result(64)),)


def test_a_study_deleted_by_hand_while_it_runs_loses_no_later_result(project, uri):
    rec = recorder(project, uri)
    rec.record(make_result(32))
    client(uri).delete_experiment(Store(uri, project).experiment_id("mnist"))
    rec.record(make_result(64))
    assert rec.close("finished") == 0
    assert Store(uri, project).results("mnist") == (stripped(make_result(64)),)


def test_a_project_that_was_moved_keeps_its_step_times(project, uri, tmp_path_factory):
    rec = recorder(project, uri)
    rec.record(make_result(64))
    rec.close("finished")
    moved = tmp_path_factory.mktemp("elsewhere") / "project"
    project.rename(moved)
    store = Store(default_tracking_uri(moved), moved)
    assert store.step_times("mnist", make_result(64).spec.identity) == make_result(64).step_times_s
    moved.rename(project)


def test_reading_where_nothing_is_makes_nothing(tmp_path):
    store = Store(default_tracking_uri(tmp_path), tmp_path)
    assert store.results("mnist") == ()
    assert store.studies() == ()
    assert store.step_times("mnist", "0" * 16) == ()
    assert (store.study_source("mnist"), store.question("mnist"), store.experiment_id("mnist")) == (None, {}, None)
    assert list(tmp_path.iterdir()) == []


def test_an_identity_can_not_break_out_of_its_query(project, uri):
    rec = recorder(project, uri)
    rec.record(make_result(64))
    rec.close("finished")
    assert Store(uri, project).step_times("mnist", "' OR 1=1 --") == ()


# --- the spool


def test_nothing_is_left_in_the_spool_of_a_finished_study(project, uri):
    rec = recorder(project, uri)
    rec.record(make_result(64))
    assert rec.close("finished") == 0
    assert rec.close("finished") == 0
    assert spools(project) == ()
    assert sync(project) == SyncReport()


def test_a_result_is_in_the_journal_before_the_store_is_asked(project, uri, monkeypatch):
    seen = []
    rec = recorder(project, uri)
    monkeypatch.setattr(Uploader, "apply", lambda *_, **__: seen.append(spools(project)[0].read_text()))
    rec.record(make_result(64))
    assert make_result(64).to_json() in seen[0]


def test_an_outage_costs_no_result_and_is_tried_again_after_a_while(project, empty_database):
    uri, clock = block(project), Clock()
    rec = recorder(project, uri, clock=clock, retry_after_s=30.0)
    rec.record(make_result(32))
    assert "FileExistsError" in rec.outage or "NotADirectoryError" in rec.outage
    assert [r.spec.point["batch_size"] for r in Store(uri, project)._pending_results("mnist")] == [32]
    unblock(project, empty_database)
    clock.now_s = 29.0
    rec.record(make_result(64))
    assert runs(uri) == []
    assert len(Store(uri, project).results("mnist")) == 2, "what is in the spool counts"
    clock.now_s = 31.0
    rec.record(make_result(128))
    assert (len(runs(uri)), rec.outage) == (3, "")
    assert rec.close("finished") == 0
    assert len(Store(uri, project).results("mnist")) == 3


def test_a_database_that_can_not_be_opened_is_not_waited_for(project, monkeypatch):
    from mlflow.store.db import utils

    (project / "down.db").mkdir()
    uri = f"sqlite:///{project}/down.db"
    client(f"sqlite:///{project}/mlflow.db")
    monkeypatch.setattr(utils.time, "sleep", lambda s: pytest.fail(f"slept {s} s"))
    rec = recorder(project, uri)
    rec.record(make_result(32))
    assert rec.close("finished") == 3
    with pytest.raises(StoreError, match=r"down\.db can't be read"):
        Store(uri, project).results("mnist")


def test_the_store_is_tried_at_close_however_short_the_outage(project, empty_database):
    uri = block(project)
    rec = recorder(project, uri, clock=Clock())
    rec.record(make_result(32))
    unblock(project, empty_database)
    assert rec.close("failed") == 0
    assert [run.info.status for run in runs(uri, kind="execution")] == ["FAILED"]


def test_what_is_left_after_close_is_told_readable_and_brought_by_sync(project, empty_database):
    uri = block(project)
    rec = recorder(project, uri, execution={"tags": {"raypar.question": '{"q": 1}'}, "study_source": "src"})
    rec.record(make_result(32))
    rec.record(make_result(64, state=TrialState.FAILED))
    assert rec.close("finished") == 4
    assert sync(project).num_left == 4
    assert "can't be reached" in sync(project).problems[0]
    unblock(project, empty_database)

    store = Store(uri, project)
    (summary,) = store.studies()
    assert (summary.name, summary.num_finished, summary.num_failed) == ("mnist", 1, 1)
    assert (store.question("mnist"), store.study_source("mnist")) == ({"q": 1}, "src")
    identity = make_result(32).spec.identity
    assert store.step_times("mnist", identity) == make_result(32).step_times_s
    before = store.results("mnist")

    report = sync(project)
    assert (report.num_uploaded, report.num_left, report.problems) == (4, 0, ())
    assert sync(project) == SyncReport()
    assert spools(project) == ()
    assert Store(uri, project).results("mnist") == before
    (after,) = Store(uri, project).studies()
    assert replace(after, experiment_id="") == summary
    assert Store(uri, project).question("mnist") == {"q": 1}


@pytest.mark.parametrize("method", ["experiment", "create", "log", "write_file", "end", "find"])
def test_an_outage_in_the_middle_of_a_record_neither_loses_nor_doubles(project, uri, monkeypatch, method):
    from raypar.track.client import Unreachable

    clock = Clock()
    rec = recorder(project, uri, clock=clock)
    real, calls = getattr(RunWriter, method), []

    def flaky(self, *args, **kwargs):
        """Every second call is done, and its answer lost."""
        calls.append(method)
        answer = real(self, *args, **kwargs)
        if len(calls) % 2:
            raise Unreachable("the answer was lost")
        return answer

    monkeypatch.setattr(RunWriter, method, flaky)
    written = [make_result(32), make_result(64), make_result(128)]
    for result in written:
        rec.record(result)
        clock.now_s += 60
    monkeypatch.undo()
    assert rec.close("finished") == 0
    assert len(runs(uri)) == 3
    assert len(runs(uri, kind="execution")) == 1
    assert Store(uri, project).results("mnist") == tuple(map(stripped, written))
    for run in runs(uri):
        history = client(uri).get_metric_history(run.info.run_id, "accuracy")
        assert [(m.step, m.value) for m in history] == [(1, 0.5), (2, 0.9)]


DATA = {
    "name": "MNIST",
    "source": "raypar.workloads.mnist_mlp:_data",
    "splits": {
        "train": {
            "num_samples": 60000,
            "digest": "0123456789abcdef",
            "inputs": {"dtype": "uint8", "shape": [28, 28]},
            "targets": {"dtype": "int64", "shape": []},
        },
        "val": {"num_samples": 10000},
        "test": {"num_samples": 5000, "digest": "fedcba9876543210"},
    },
}


def data_sets(uri: str) -> set[tuple[str, str, str]]:
    """Context, name and digest of each input of the only trial."""
    (child,) = runs(uri)
    found = [(i.tags[0].value, i.dataset.name, i.dataset.digest) for i in child.inputs.dataset_inputs]
    assert len(set(found)) == len(found)
    return set(found)


def test_what_a_trial_was_trained_and_judged_on_are_its_data_sets_and_the_test_split_once_it_was_seen(project, uri):
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


def test_replaying_a_whole_spool_changes_nothing(project, uri):
    rec = recorder(project, uri, execution={"params": {"a": "1"}, "description": "d"})
    rec.record(make_result(32, data=DATA))
    rec.record_metrics([("scaling/speedup", 1.0, 1)])
    rec.record_trial_inputs({make_result(32).spec.identity: DATA}, ["test"])
    (path,) = spools(project)
    write_ack(path, uri, 0)
    assert rec.close("finished") == 0
    (parent,), (child,) = runs(uri, kind="execution"), runs(uri)
    assert len(client(uri).get_metric_history(parent.info.run_id, "scaling/speedup")) == 1
    assert len(client(uri).get_metric_history(child.info.run_id, "accuracy")) == 2
    assert {context for context, _, _ in data_sets(uri)} == {"train", "val", "test"}


def test_a_sync_beside_a_running_study_uploads_but_leaves_its_spool(project, empty_database):
    uri = block(project)
    rec = recorder(project, uri, clock=Clock())
    rec.record(make_result(32))
    unblock(project, empty_database)
    assert sync(project).num_left == 0
    assert len(spools(project)) == 1
    assert [run.info.status for run in runs(uri, kind="execution")] == ["RUNNING"]
    rec.record(make_result(64))
    assert rec.close("finished") == 0
    assert len(runs(uri)) == 2


def test_a_record_made_while_a_sync_holds_the_lock_waits_for_the_next(project, uri):
    rec = recorder(project, uri)
    with spool.upload_lock(project):
        rec.record(make_result(32))
        assert runs(uri) == []
    rec.record(make_result(64))
    assert len(runs(uri)) == 2
    rec.close("finished")


def test_a_sync_that_waits_too_long_for_another_says_so(project, uri):
    rec = recorder(project, uri)
    with spool.upload_lock(project), pytest.raises(StoreError, match="taking long"):
        sync(project, lock_timeout_s=0)
    rec.close("finished")


def test_a_damaged_line_is_skipped_with_a_warning_that_names_it(project, empty_database, caplog):
    uri = block(project)
    rec = recorder(project, uri)
    rec.record(make_result(32))
    (path,) = spools(project)
    with path.open("ab") as file:
        file.write(b'{"kind": "trial", "study\xff\n')
    rec.record(make_result(64))
    rec.close("finished")
    unblock(project, empty_database)
    assert len(Store(uri, project).results("mnist")) == 2
    assert f"{path}, line 3: is damaged, skipped" in caplog.text
    report = sync(project)
    assert report.problems == (f"{path}, line 3: is damaged, skipped",)
    assert (len(runs(uri)), report.num_left) == (2, 0)


def test_trials_whose_execution_record_is_damaged_still_get_a_parent(project, empty_database, caplog):
    uri = block(project)
    rec = recorder(project, uri)
    rec.record(make_result(32))
    rec.close("finished")
    (path,) = spools(project)
    data = path.read_bytes()
    path.write_bytes(b"#" * data.index(b"\n") + data[data.index(b"\n") :])
    unblock(project, empty_database)
    sync(project)
    (parent,), (child,) = runs(uri, kind="execution"), runs(uri)
    assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert len(Store(uri, project).results("mnist")) == 1


@pytest.mark.parametrize(
    "odd",
    [
        {"kind": "trial", "study": "mnist", "execution": "e1", "at": 1.0, "totals": {}, "uid": "u", "result": {}},
        {"kind": "trial"},
        {"kind": "of the future", "study": "mnist", "execution": "e1", "at": 1.0, "totals": {}},
        {"kind": "metrics", "study": "mnist", "execution": "e1", "at": 1.0, "totals": {}, "points": [["a", "x", 1]]},
        {"kind": "metrics", "study": "mnist", "execution": "e1", "at": -5.0, "totals": {}, "points": [["a", 1, 1]]},
    ],
)
def test_a_record_that_the_store_refuses_is_set_aside_and_holds_up_nothing(project, uri, odd, caplog):
    rec = recorder(project, uri)
    (path,) = spools(project)
    journal = Journal(path)
    journal.append(json.dumps(odd))
    journal.close()
    rec.record(make_result(32))
    assert len(Store(uri, project).results("mnist")) == 1
    assert rec.close("finished") == 0
    assert json.loads(path.with_suffix(".rejected").read_text())["record"] == odd
    assert "refused" in caplog.text


def test_a_full_disk_under_the_spool_is_no_loss_while_the_store_takes_results(project, uri, monkeypatch):
    rec = recorder(project, uri)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Journal, "append", full)
    rec.record(make_result(32))
    monkeypatch.undo()
    assert rec.close("finished") == 0
    assert Store(uri, project).results("mnist") == (stripped(make_result(32)),)


def test_a_result_that_can_be_kept_nowhere_is_an_error_with_a_way_out(project, monkeypatch):
    rec = recorder(project, block(project))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Journal, "append", full)
    with pytest.raises(StoreError, match="No space left on device") as error:
        rec.record(make_result(32))
    assert "free some space" in str(error.value)


def test_a_spool_folder_that_can_not_be_made_is_an_error_with_a_way_out(project, uri):
    (project / ".raypar").write_text("in the way")
    with pytest.raises(StoreError, match="can't be written") as error:
        recorder(project, uri)
    assert error.value.hint


def test_recording_outside_start_and_close_is_a_mistake_in_the_caller(project, uri):
    rec = Recorder(Execution("e1", "mnist", 1.0), tracking_uri=uri, project_dir=project)
    with pytest.raises(RuntimeError, match="between start"):
        rec.record(make_result())


def test_a_sync_to_another_store_brings_the_whole_execution_there(project, uri, empty_database):
    rec = recorder(project, uri)
    rec.record(make_result(32))
    (path,) = spools(project)
    rec._let_go()  # as if the process had died
    (project / "other").mkdir()
    shutil.copy(empty_database, project / "other" / "mlflow.db")
    other = f"sqlite:///{project}/other/mlflow.db"
    sync(project, other)
    assert Store(other, project).results("mnist") == (stripped(make_result(32)),)
    assert [run.info.status for run in runs(other, kind="execution")] == ["KILLED"]
    assert not path.exists()


def test_two_studies_in_one_folder_do_not_mix(project, uri):
    recs = {name: recorder(project, uri, uid=f"e-{name}", study=name) for name in ("a", "b")}
    for i, name in enumerate(("a", "b", "a")):
        recs[name].record(make_result(32 + i, study=name))
    assert {name: len(Store(uri, project).results(name)) for name in recs} == {"a": 2, "b": 1}
    assert {name: rec.close("finished") for name, rec in recs.items()} == {"a": 0, "b": 0}
    assert {s.name: s.num_finished for s in Store(uri, project).studies()} == {"a": 2, "b": 1}


def test_mlflow_says_nothing(project, capfd, caplog):
    caplog.set_level(logging.WARNING, logger="raypar")
    uri = block(project)
    rec = recorder(project, uri)
    rec.record(make_result(32))
    rec.close("finished")
    rec = recorder(project, default_tracking_uri(project), "e2")
    rec.record(make_result(32))
    rec.close("finished")
    assert capfd.readouterr() == ("", "")
