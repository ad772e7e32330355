"""What waits on disk reaches the store, each record once; what is damaged holds up nothing."""

from __future__ import annotations

import json
import logging

import pytest
from recording import new_store
from store_parts import DATA, Clock, block, client, data_sets, make_result, recorder, runs, stripped, unblock

from raypar.errors import StoreError
from raypar.track import journal
from raypar.track.journal import Journal, journal_paths, write_ack
from raypar.track.recorder import Execution, Recorder
from raypar.track.store import Store, default_tracking_uri
from raypar.track.uploader import sync


def test_replaying_a_whole_spool_changes_nothing(project, uri):
    rec = recorder(project, uri, execution={"params": {"a": "1"}, "description": "d"})
    rec.record(make_result(32, data=DATA))
    rec.record_metrics([("scaling/speedup", 1.0, 1)])
    rec.record_trial_inputs({make_result(32).spec.identity: DATA}, ["test"])
    (path,) = journal_paths(project)
    write_ack(path, uri, 0)
    assert rec.close("finished") == 0
    (parent,), (child,) = runs(uri, kind="execution"), runs(uri)
    assert len(client(uri).get_metric_history(parent.info.run_id, "scaling/speedup")) == 1
    assert len(client(uri).get_metric_history(child.info.run_id, "accuracy")) == 2
    assert {context for context, _, _ in data_sets(uri)} == {"train", "val", "test"}


def test_a_sync_beside_a_running_study_uploads_but_leaves_its_spool(project):
    uri = block(project)
    rec = recorder(project, uri, clock=Clock())
    rec.record(make_result(32))
    unblock(project)
    assert sync(project).num_left == 0
    assert len(journal_paths(project)) == 1
    assert [run.info.status for run in runs(uri, kind="execution")] == ["RUNNING"]
    rec.record(make_result(64))
    assert rec.close("finished") == 0
    assert len(runs(uri)) == 2


def test_a_record_made_while_a_sync_holds_the_lock_waits_for_the_next(project, uri):
    rec = recorder(project, uri)
    with journal.upload_lock(project):
        rec.record(make_result(32))
        assert runs(uri) == []
    rec.record(make_result(64))
    assert len(runs(uri)) == 2
    rec.close("finished")


def test_a_sync_that_waits_too_long_for_another_says_so(project, uri):
    rec = recorder(project, uri)
    with journal.upload_lock(project), pytest.raises(StoreError, match="taking long"):
        sync(project, lock_timeout_s=0)
    rec.close("finished")


def test_a_damaged_line_is_skipped_with_a_warning_that_names_it(project, caplog):
    uri = block(project)
    rec = recorder(project, uri)
    rec.record(make_result(32))
    (path,) = journal_paths(project)
    with path.open("ab") as file:
        file.write(b'{"kind": "trial", "study\xff\n')
    rec.record(make_result(64))
    rec.close("finished")
    unblock(project)
    assert len(Store(uri, project).results("mnist")) == 2
    assert f"{path}, line 3: is damaged, skipped" in caplog.text
    report = sync(project)
    assert report.problems == (f"{path}, line 3: is damaged, skipped",)
    assert (len(runs(uri)), report.num_left) == (2, 0)


def test_trials_whose_execution_record_is_damaged_still_get_a_parent(project, caplog):
    uri = block(project)
    rec = recorder(project, uri)
    rec.record(make_result(32))
    rec.close("finished")
    (path,) = journal_paths(project)
    data = path.read_bytes()
    path.write_bytes(b"#" * data.index(b"\n") + data[data.index(b"\n") :])
    unblock(project)
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
    (path,) = journal_paths(project)
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


def test_a_sync_to_another_store_brings_the_whole_execution_there(project, uri):
    rec = recorder(project, uri)
    rec.record(make_result(32))
    (path,) = journal_paths(project)
    rec._release()  # as if the process had died
    (project / "other").mkdir()
    new_store(project / "other")
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
