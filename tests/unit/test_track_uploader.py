"""Journalled records reach the store, each once, whatever fails on the way; damaged ones hold up nothing."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
from recording import new_store
from store_parts import DATA, Clock, block, client, data_sets, make_result, recorder, runs, stripped, unblock

from raypar.errors import StoreError
from raypar.study.trial import TrialState
from raypar.track import journal
from raypar.track.client import Unreachable
from raypar.track.journal import Journal, journal_paths, write_ack
from raypar.track.recorder import Execution, Recorder
from raypar.track.store import Store, default_tracking_uri
from raypar.track.uploader import RunWriter, Uploader, UploadReport, sync

OLD_JOURNAL = Path(__file__).parents[1] / "golden" / "journal.jsonl"


def full(*_):
    raise OSError(28, "No space left on device")


def full_store():
    raise Unreachable("database or disk is full")


# ---- outages


def test_a_finished_study_leaves_no_journal(project, uri):
    rec = recorder(project, uri)
    rec.record(make_result(64))
    assert rec.close("finished") == 0
    assert rec.close("finished") == 0
    assert journal_paths(project) == ()
    assert sync(project) == UploadReport()


def test_a_result_is_in_the_journal_before_the_store_is_asked(project, uri, monkeypatch):
    seen = []
    rec = recorder(project, uri)
    monkeypatch.setattr(Uploader, "apply", lambda *_, **__: seen.append(journal_paths(project)[0].read_text()))
    rec.record(make_result(64))
    assert make_result(64).to_json() in seen[0]


def test_an_outage_costs_no_result_and_is_retried_after_a_while(project):
    uri, clock = block(project), Clock()
    rec = recorder(project, uri, clock=clock, retry_after_s=30.0)
    rec.record(make_result(32))
    assert "FileExistsError" in rec.outage or "NotADirectoryError" in rec.outage
    unblock(project)
    clock.now_s = 29.0
    rec.record(make_result(64))
    assert runs(uri) == []
    assert len(Store(uri, project).results("mnist")) == 2, "journalled results count"
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


def test_the_store_is_retried_at_close_however_short_the_outage(project):
    uri = block(project)
    rec = recorder(project, uri, clock=Clock())
    rec.record(make_result(32))
    unblock(project)
    assert rec.close("failed") == 0
    assert [run.info.status for run in runs(uri, kind="execution")] == ["FAILED"]


def test_records_left_after_close_are_readable_and_brought_by_sync(project):
    uri = block(project)
    rec = recorder(project, uri, execution={"tags": {"raypar.question": '{"q": 1}'}, "study_source": "src"})
    rec.record(make_result(32))
    rec.record(make_result(64, state=TrialState.FAILED))
    assert rec.close("finished") == 4
    assert sync(project).num_left == 4
    assert "can't be reached" in sync(project).problems[0]
    unblock(project)

    store = Store(uri, project)
    (summary,) = store.studies()
    assert (summary.name, summary.num_finished, summary.num_failed) == ("mnist", 1, 1)
    assert (store.question("mnist"), store.study_source("mnist")) == ({"q": 1}, "src")
    assert store.step_times("mnist", make_result(32).spec.identity) == make_result(32).step_times_s
    before = store.results("mnist")

    report = sync(project)
    assert (report.num_uploaded, report.num_left, report.problems) == (4, 0, [])
    assert sync(project) == UploadReport()
    assert journal_paths(project) == ()
    assert Store(uri, project).results("mnist") == before
    (after,) = Store(uri, project).studies()
    assert replace(after, experiment_id="") == summary
    assert Store(uri, project).question("mnist") == {"q": 1}


@pytest.mark.parametrize("method", ["experiment", "create", "log", "write_file", "end", "find"])
def test_an_outage_in_the_middle_of_a_record_neither_loses_nor_doubles(project, uri, monkeypatch, method):
    clock = Clock()
    rec = recorder(project, uri, clock=clock)
    real, calls = getattr(RunWriter, method), []

    def flaky(self, *args, **kwargs):
        """Do every call, and lose every second answer."""
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


# ---- journals of other processes


def test_a_journal_of_an_older_raypar_is_read_and_brought_by_sync(project, uri):
    path = journal.journal_path(project, "mnist", "e1")
    path.parent.mkdir(parents=True)
    path.write_bytes(OLD_JOURNAL.read_bytes())
    write_ack(path, uri, 0)

    def state() -> tuple[object, ...]:
        store = Store(uri, project)
        finished, failed = store.results("mnist")
        times = store.step_times("mnist", finished.spec.identity)
        kept = store.question("mnist"), store.resume_info("mnist"), store.study_source("mnist")
        return finished, failed, times, kept, store.artifact("mnist", "report/study.html")

    pending = state()
    assert pending[0] == stripped(make_result(32, data=DATA)) and pending[2] == make_result(32).step_times_s
    assert pending[3:] == (({"space": ["batch_size"]}, {"file": "mnist.py"}, "study = 1\n"), "<p>done</p>")
    report = sync(project)
    assert (report.num_uploaded, report.num_rejected, report.num_left, report.problems) == (8, 0, 0, [])
    assert state() == pending
    (parent,) = runs(uri, kind="execution")
    assert parent.info.status == "KILLED"
    assert parent.data.metrics["scaling/speedup"] == 1.9
    (trial,) = [run for run in runs(uri) if run.info.status == "FINISHED"]
    expected = {"speedup": 1.9, "accuracy": 0.9, "system/cpu_utilization_percentage": 42.5}
    assert expected.items() <= trial.data.metrics.items()
    assert {i.tags[0].value for i in trial.inputs.dataset_inputs} == {"train", "val", "test"}


def test_replaying_a_whole_journal_changes_nothing(project, uri):
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


def test_a_sync_beside_a_running_study_uploads_but_leaves_its_journal(project):
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
        with pytest.raises(StoreError, match="taking long"):
            sync(project, lock_timeout_s=0)
    rec.record(make_result(64))
    assert len(runs(uri)) == 2
    rec.close("finished")


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


# ---- damage


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
    assert report.problems == [f"{path}, line 3: is damaged, skipped"]
    assert (len(runs(uri)), report.num_left) == (2, 0)


def test_trials_whose_execution_record_is_damaged_still_get_a_parent(project, caplog):
    uri = block(project)
    rec = recorder(project, uri)
    rec.record(make_result(32))
    rec.close("finished")
    (path,) = journal_paths(project)
    first, newline, rest = path.read_bytes().partition(b"\n")
    path.write_bytes(b"#" * len(first) + newline + rest)
    unblock(project)
    sync(project)
    (parent,), (child,) = runs(uri, kind="execution"), runs(uri)
    assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert len(Store(uri, project).results("mnist")) == 1


COMPLETE = {"study": "mnist", "execution": "e1", "at": 1.0, "totals": {}}


@pytest.mark.parametrize(
    "odd",
    [
        {**COMPLETE, "kind": "trial", "uid": "u", "result": {}},
        {"kind": "trial"},
        {**COMPLETE, "kind": "of the future"},
        {**COMPLETE, "kind": "metrics", "points": [["a", "x", 1]]},
        {**COMPLETE, "kind": "metrics", "at": -5.0, "points": [["a", 1, 1]]},
    ],
)
def test_a_record_that_the_store_refuses_is_kept_aside_and_holds_up_nothing(project, uri, odd, caplog):
    rec = recorder(project, uri)
    (path,) = journal_paths(project)
    writer = Journal(path)
    writer.append(json.dumps(odd))
    writer.close()
    rec.record(make_result(32))
    assert len(Store(uri, project).results("mnist")) == 1
    assert rec.close("finished") == 0
    assert json.loads(path.with_suffix(".rejected").read_text())["record"] == odd
    assert "refused" in caplog.text


def test_a_full_disk_under_the_journal_is_no_loss_while_the_store_takes_results(project, uri, monkeypatch):
    rec = recorder(project, uri)
    monkeypatch.setattr(Journal, "append", full)
    rec.record(make_result(32))
    monkeypatch.undo()
    assert rec.close("finished") == 0
    assert Store(uri, project).results("mnist") == (stripped(make_result(32)),)


@pytest.mark.parametrize("method", ["create", "log", "write_file", "end"])
def test_a_result_that_can_be_kept_nowhere_is_an_error_and_does_not_count(project, uri, monkeypatch, method):
    rec = recorder(project, uri)
    rec.record(make_result(32))
    monkeypatch.setattr(Journal, "append", full)
    monkeypatch.setattr(RunWriter, method, lambda *_, **__: full_store())
    with pytest.raises(StoreError, match="No space left on device") as error:
        rec.record(make_result(64))
    assert "free some space" in str(error.value)
    monkeypatch.undo()
    rec.record(make_result(128))
    assert rec.close("failed") == 0
    store = Store(uri, project)
    assert store.results("mnist") == (stripped(make_result(32)), stripped(make_result(128)))
    assert store.step_times("mnist", make_result(64).spec.identity) == ()
    assert store.studies()[0].num_finished == 2


def test_a_journal_folder_that_can_not_be_made_is_an_error_with_a_hint(project, uri):
    (project / ".raypar").write_text("in the way")
    with pytest.raises(StoreError, match="can't be written") as error:
        recorder(project, uri)
    assert error.value.hint


def test_recording_outside_start_and_close_is_a_mistake_in_the_caller(project, uri):
    rec = Recorder(Execution("e1", "mnist", 1.0), tracking_uri=uri, project_dir=project)
    with pytest.raises(RuntimeError, match="between start"):
        rec.record(make_result())


def test_mlflow_prints_nothing(project, capfd, caplog):
    caplog.set_level(logging.WARNING, logger="raypar")
    for uid, uri in (("e1", block(project)), ("e2", default_tracking_uri(project))):
        rec = recorder(project, uri, uid)
        rec.record(make_result(32))
        rec.close("finished")
    assert capfd.readouterr() == ("", "")
