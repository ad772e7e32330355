"""Journalled records reach the store exactly once, whatever fails; damaged ones block nothing."""

import json
import logging
import math
import threading
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from recording import (
    DATA,
    Clock,
    block,
    client,
    data_sets,
    history,
    make_result,
    new_store,
    recorder,
    results_of,
    runs,
    stripped,
    unblock,
)

from raypar.errors import StoreError
from raypar.study.trial import TrialState
from raypar.track import journal
from raypar.track.client import Unreachable
from raypar.track.journal import Journal, journal_paths, write_ack
from raypar.track.run_writer import RunWriter
from raypar.track.runs import PointRun
from raypar.track.store import Store, default_tracking_uri
from raypar.track.uploader import Uploader, UploadReport, delete_study, end_abandoned, sync

OLD_JOURNAL = Path(__file__).parents[1] / "golden" / "journal.jsonl"
SMALL, MEDIUM, LARGE = map(make_result, (32, 64, 128))


def statuses(uri):
    return [run.info.status for run in runs(uri, kind="execution")]


# ---- in the background


def test_records_wait_for_no_upload_and_reach_the_store_once_in_order(project, uri, monkeypatch):
    began, goes_on, apply, uploaded = threading.Event(), threading.Event(), Uploader.apply, []

    def slow(self, record, **how):
        began.set()
        assert goes_on.wait(60)
        apply(self, record, **how)
        uploaded.append((record["kind"], how))

    monkeypatch.setattr(Uploader, "apply", slow)
    rec = recorder(project, uri, in_background=True)
    rec.record(SMALL)
    assert not began.is_set(), "only `upload` begins an upload"
    rec.upload()
    assert began.wait(60)
    rec.record(MEDIUM)  # during the upload
    rec.upload()
    rec.record(LARGE)
    assert not uploaded and len(results_of(uri, project)) == 3, "journalled results count"
    goes_on.set()
    assert rec.close("finished") == 0 and journal_paths(project) == ()
    assert uploaded == [(kind, {"is_new": True}) for kind in ("execution", "trial", "trial", "trial", "close")], (
        "no search for what only this process can have stored"
    )
    assert [results_of(uri, project).count(each) for each in stripped(SMALL, MEDIUM, LARGE)] == [1, 1, 1]
    assert statuses(uri) == ["FINISHED"]


def test_an_upload_in_the_background_leaves_other_uploads_their_turn(project, uri):
    rec = recorder(project, uri, in_background=True)
    rec.record(SMALL)
    rec.flush()
    assert sync(project, lock_timeout_s=0).num_left == 0
    rec.upload()  # nothing is left
    rec.record(MEDIUM)
    rec.flush()
    assert rec.close("finished") == 0 and len(results_of(uri, project)) == 2


def test_a_connection_made_ahead_is_used_and_its_failure_left_to_the_first_record(project):
    uri = block(project)
    rec = recorder(project, uri, clock=Clock(), retry_after_s=0.0)
    rec.connect()
    rec.record(SMALL)
    assert "no such folder" in rec.outage
    unblock(project)
    rec.connect()
    rec.record(MEDIUM)
    assert (rec.outage, rec.close("finished"), len(results_of(uri, project))) == ("", 0, 2)


# ---- outages


def test_a_finished_study_leaves_no_journal_and_prints_nothing(project, capfd, caplog):
    caplog.set_level(logging.WARNING, logger="raypar")
    uri = default_tracking_uri(project)
    rec = recorder(project, uri)
    rec.record(MEDIUM)
    assert rec.close("finished") == rec.close("finished") == 0
    assert (journal_paths(project), sync(project)) == ((), UploadReport())
    unreachable = recorder(project, block(project), "e2")
    unreachable.record(SMALL)
    unreachable.close("finished")
    assert capfd.readouterr() == ("", "")


def test_a_result_is_in_the_journal_before_the_store_is_asked(project, uri, monkeypatch):
    seen = []
    rec = recorder(project, uri)
    monkeypatch.setattr(Uploader, "apply", lambda *_, **__: seen.append(journal_paths(project)[0].read_text()))
    rec.record(MEDIUM)
    assert json.dumps(MEDIUM.to_json()) in seen[0]


def test_an_outage_loses_no_result_and_is_retried_later_and_at_the_end(project):
    uri, clock = block(project), Clock()
    rec = recorder(project, uri, clock=clock, retry_after_s=30.0)
    rec.record(SMALL)
    assert "no such folder" in rec.outage
    unblock(project)
    clock.now_s = 29.0
    rec.record(MEDIUM)
    assert runs(uri) == []
    assert len(results_of(uri, project)) == 2, "journalled results count"
    clock.now_s = 31.0
    rec.record(LARGE)
    assert (len(runs(uri)), rec.outage) == (3, "")
    rec._retry_at_s = float("inf")
    assert rec.close("failed") == 0
    assert (len(results_of(uri, project)), statuses(uri)) == (3, ["FAILED"])


def test_an_unopenable_database_is_not_retried(project, monkeypatch):
    from mlflow.store.db import utils

    (project / "down.db").mkdir()
    uri = f"sqlite:///{project}/down.db"
    client(f"sqlite:///{project}/mlflow.db")
    monkeypatch.setattr(utils.time, "sleep", lambda s: pytest.fail(f"slept {s} s"))
    rec = recorder(project, uri)
    rec.record(SMALL)
    assert rec.close("finished") == 3
    with pytest.raises(StoreError, match=r"down\.db can't be read"):
        results_of(uri, project)


def test_records_left_after_close_are_readable_and_uploaded_by_sync(project):
    uri = block(project)
    rec = recorder(project, uri, execution={"tags": {"raypar.question": '{"q": 1}'}, "study_source": "src"})
    rec.record(SMALL)
    rec.record(replace(MEDIUM, state=TrialState.FAILED))
    assert rec.close("finished") == 4
    outage = sync(project)
    assert outage.num_left == 4 and "can't be used" in outage.problems[0]
    unblock(project)

    def state():
        store = Store(uri, project)
        (summary,) = store.studies()
        times = store.step_times("mnist", SMALL.spec.identity)
        kept = store.question("mnist"), store.study_source("mnist"), times
        return replace(summary, experiment_id=""), *kept, results_of(uri, project)

    before = state()
    assert (before[0].name, before[0].counts["num_finished"], before[0].counts["num_failed"]) == ("mnist", 1, 1)
    assert before[1:4] == ({"q": 1}, "src", SMALL.step_times_s)
    report = sync(project)
    assert (report.num_uploaded, report.num_left, report.problems) == (4, 0, [])
    assert (sync(project), journal_paths(project)) == (UploadReport(), ())
    assert state() == before


@pytest.mark.parametrize("method", ["experiment", "create", "log", "write_file", "end", "find", "point_runs"])
def test_an_outage_within_a_record_neither_loses_nor_duplicates(project, uri, monkeypatch, method):
    clock = Clock()
    rec = recorder(project, uri, clock=clock)
    real, calls = getattr(RunWriter, method), []

    def flaky(self, *args, **kwargs):
        """Execute every call, and lose every second answer."""
        calls.append(method)
        answer = real(self, *args, **kwargs)
        if len(calls) % 2:
            raise Unreachable("the answer was lost")
        return answer

    monkeypatch.setattr(RunWriter, method, flaky)
    for result in (SMALL, MEDIUM, LARGE):
        rec.record(result)
        clock.now_s += 60
    of_small = PointRun(SMALL.spec.point_identity, "bs=32", {}, {"num_trials": 1.0}, {})
    for _ in range(3):
        rec.record_summary("d", [of_small])
        clock.now_s += 60
    monkeypatch.undo()
    assert rec.close("finished") == 0
    assert (len(runs(uri)), statuses(uri)) == (3, ["FINISHED"])
    points = runs(uri, kind="point")
    assert sorted(run.data.tags["raypar.point"] for run in points) == sorted(
        result.spec.point_identity for result in (SMALL, MEDIUM, LARGE)
    )
    assert [run.data.metrics for run in points if run.info.run_name == "bs=32"] == [{"num_trials": 1.0}]
    assert results_of(uri, project) == stripped(SMALL, MEDIUM, LARGE)
    assert all(history(uri, run, "accuracy") == [(1, 0.5), (2, 0.9)] for run in runs(uri))


def test_metrics_that_no_longer_hold_can_not_be_sorted_by(project, uri):
    times = iter(range(1_700_000_000, 1_800_000_000))
    rec = recorder(project, uri, now=lambda: next(times))
    rec.record(SMALL)
    point = PointRun(SMALL.spec.point_identity, "bs=32", {}, {"num_trials": 1.0, "median_speedup": 2.5}, {})
    doubtful = point._replace(metrics={"num_trials": 2.0}, withdrawn=("median_speedup", "median_speedup_low"))
    shown = []
    for content in (point, doubtful, doubtful, point):
        rec.record_summary("a", [content])
        (run,) = runs(uri, kind="point")
        shown.append({key: None if math.isnan(value) else value for key, value in run.data.metrics.items()})
    first = {"num_trials": 1.0, "median_speedup": 2.5}
    assert shown == [first, *[{"num_trials": 2.0, "median_speedup": None}] * 2, first]
    assert len(history(uri, run, "median_speedup")) == 3
    rec.close("finished")


def test_a_journal_left_by_an_outage_is_older_than_the_latest_execution(project):
    uri = block(project)

    def execute(uid, started_at):
        execution = {"started_at": started_at, "tags": {"raypar.resume": f'{{"file": "{uid}"}}'}, "study_source": uid}
        rec = recorder(project, uri, uid, execution=execution, now=lambda: started_at + 1)
        rec.add_artifact("report.html", uid)
        return rec.close("finished")

    def latest():
        store = Store(uri, project)
        return store.resume_info("mnist")["file"], store.study_source("mnist"), store.artifact("mnist", "report.html")

    assert execute("old", 1.6e9) == 3
    unblock(project)
    assert execute("new", 1.7e9) == 0
    assert len(journal_paths(project)) == 1 and latest() == ("new",) * 3
    sync(project)
    assert latest() == ("new",) * 3


# ---- journals of other processes


def test_a_journal_of_an_older_raypar_is_read_and_uploaded(project, uri):
    path = journal.journal_path(project, "mnist", "e1")
    path.parent.mkdir(parents=True)
    path.write_bytes(OLD_JOURNAL.read_bytes())
    write_ack(path, uri, 0)

    def state():
        store = Store(uri, project)
        finished, failed = store.results("mnist")
        times = store.step_times("mnist", finished.spec.identity)
        kept = store.question("mnist"), store.resume_info("mnist"), store.study_source("mnist")
        return finished, failed, times, kept, store.artifact("mnist", "report/study.html")

    pending = state()
    assert (pending[0], pending[2]) == (*stripped(replace(SMALL, data=DATA)), SMALL.step_times_s)
    assert pending[3:] == (({"space": ["batch_size"]}, {"file": "mnist.py"}, "study = 1\n"), "<p>done</p>")
    report = sync(project)
    assert (report.num_uploaded, report.num_rejected, report.num_left, report.problems) == (8, 0, 0, [])
    assert (state(), statuses(uri)) == (pending, ["KILLED"])
    (parent,) = runs(uri, kind="execution")
    assert parent.data.metrics["scaling/speedup"] == 1.9
    (trial,) = [run for run in runs(uri) if run.info.status == "FINISHED"]
    expected = {"speedup": 1.9, "accuracy": 0.9, "system/cpu_utilization_percentage": 42.5}
    assert expected.items() <= trial.data.metrics.items()
    assert {i.tags[0].value for i in trial.inputs.dataset_inputs} == {"train", "val", "test"}


def test_replaying_a_complete_journal_changes_nothing(project, uri):
    rec = recorder(project, uri, execution={"params": {"a": "1"}, "description": "d"})
    rec.record(replace(SMALL, data=DATA))
    rec.record_metrics([("scaling/speedup", 1.0, 1)])
    rec.record_trial_inputs([replace(SMALL, data=DATA)], ["test"])
    point = PointRun(SMALL.spec.point_identity, "bs=32", {"batch_size": "32"}, {"median_accuracy": 0.9}, {})
    rec.record_summary("d", [point])
    (path,) = journal_paths(project)
    write_ack(path, uri, 0)
    assert rec.close("finished") == 0
    (parent,), (child,) = runs(uri, kind="execution"), runs(uri)
    (of_point,) = runs(uri, kind="point")
    assert history(uri, of_point, "median_accuracy") == [(0, 0.9)]
    assert (len(history(uri, parent, "scaling/speedup")), len(history(uri, child, "accuracy"))) == (1, 2)
    assert {context for context, _, _ in data_sets(uri)} == {"train", "val", "test"}


def test_a_sync_beside_a_running_study_uploads_but_leaves_its_journal(project):
    uri = block(project)
    rec = recorder(project, uri, clock=Clock())
    rec.record(SMALL)
    unblock(project)
    assert sync(project).num_left == 0
    assert (len(journal_paths(project)), statuses(uri)) == (1, ["RUNNING"])
    rec.record(MEDIUM)
    assert (rec.close("finished"), len(runs(uri))) == (0, 2)


def test_a_record_written_during_a_sync_is_uploaded_with_the_next(project, uri, monkeypatch):
    rec = recorder(project, uri)
    with journal.upload_lock(project):
        rec.record(SMALL)
        assert runs(uri) == []
        monkeypatch.setattr("raypar.track.uploader.LOCK_TIMEOUT_S", 0)
        for change in (lambda: sync(project, lock_timeout_s=0), lambda: delete_study("mnist", uri, project)):
            with pytest.raises(StoreError, match=r"another upload from .* is still running"):
                change()
    rec.record(MEDIUM)
    assert len(runs(uri)) == 2
    rec.close("finished")


def test_a_sync_to_another_store_uploads_the_complete_execution(project, uri):
    rec = recorder(project, uri)
    rec.record(SMALL)
    rec._release()  # as if the process had died
    (project / "other").mkdir()
    new_store(project / "other")
    other = f"sqlite:///{project}/other/mlflow.db"
    sync(project, other)
    assert (results_of(other, project), statuses(other)) == (stripped(SMALL), ["KILLED"])
    assert journal_paths(project) == ()


def test_only_executions_of_killed_processes_become_killed(project, uri, tmp_path_factory):
    killed, alive = recorder(project, uri, "killed"), recorder(project, uri, "alive")
    elsewhere = recorder(tmp_path_factory.mktemp("elsewhere"), uri, "elsewhere")
    for rec, result in ((killed, SMALL), (alive, MEDIUM), (elsewhere, LARGE)):
        rec.record(result)
    killed._release()  # as the end of its process would
    end_abandoned(project, uri)
    by_uid = {run.data.tags["raypar.uid"]: run.info.status for run in runs(uri, kind="execution")}
    assert by_uid == {"killed": "KILLED", "alive": "RUNNING", "elsewhere": "RUNNING"}
    assert results_of(uri, project) == stripped(SMALL, MEDIUM, LARGE)
    assert [journal.read_ack(path)[0] for path in journal_paths(project)] == [uri]
    assert (alive.close("finished"), elsewhere.close("finished")) == (0, 0)


def test_a_trial_half_uploaded_by_a_killed_process_is_completed_or_not_counted(project, uri, monkeypatch):
    rec = recorder(project, uri)
    rec.record(SMALL)
    with monkeypatch.context() as patch:
        patch.setattr(RunWriter, "end", Mock(side_effect=Unreachable("killed")))
        rec.record(MEDIUM)
        patch.setattr(Journal, "append", Mock(side_effect=OSError(28, "No space left on device")))
        with pytest.raises(StoreError):
            rec.record(LARGE)
    rec._release()
    assert [run.info.status for run in runs(uri)].count("RUNNING") == 2
    end_abandoned(project, uri)
    assert (statuses(uri), {run.info.status for run in runs(uri)}) == (["KILLED"], {"FINISHED"})
    assert {run.info.status for run in runs(uri, kind="point")} == {"FINISHED"}
    (lost,) = runs(uri, kind="incomplete trial")
    assert lost.info.status == "KILLED" and results_of(uri, project) == stripped(SMALL, MEDIUM)
    assert journal_paths(project) == ()


def test_records_that_can_not_be_uploaded_wait(project, monkeypatch):
    monkeypatch.setattr("raypar.track.uploader.ABANDONED_LOCK_TIMEOUT_S", 0)
    uri = block(project)
    recorder(project, uri).record(SMALL)
    end_abandoned(project, uri)
    unblock(project)
    assert results_of(uri, project) == stripped(SMALL)
    with journal.upload_lock(project):
        end_abandoned(project, uri)
    assert len(journal_paths(project)) == 1
    end_abandoned(project, uri)
    assert (statuses(uri), journal_paths(project)) == (["KILLED"], ())


# ---- damage


def test_a_damaged_line_is_skipped_with_a_warning(project, caplog):
    uri = block(project)
    rec = recorder(project, uri)
    rec.record(SMALL)
    (path,) = journal_paths(project)
    with path.open("ab") as file:
        file.write(b'{"kind": "trial", "study\xff\n')
    rec.record(MEDIUM)
    rec.close("finished")
    unblock(project)
    problem = f"{path}, line 3: is damaged, skipped"
    assert len(results_of(uri, project)) == 2 and problem in caplog.text
    report = sync(project)
    assert (report.problems, len(runs(uri)), report.num_left) == ([problem], 2, 0)


def test_trials_get_a_parent_even_if_its_record_is_damaged(project, caplog):
    uri = block(project)
    recorder(project, uri).record(SMALL)
    (path,) = journal_paths(project)
    first, newline, rest = path.read_bytes().partition(b"\n")
    path.write_bytes(b"#" * len(first) + newline + rest)
    assert journal.study_of(path) == "mnist"
    unblock(project)
    sync(project)
    (parent,), (point,), (child,) = runs(uri, kind="execution"), runs(uri, kind="point"), runs(uri)
    assert point.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert child.data.tags["mlflow.parentRunId"] == point.info.run_id
    assert len(results_of(uri, project)) == 1


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
def test_a_rejected_record_is_kept_in_a_file_and_blocks_nothing(project, uri, odd, caplog):
    rec = recorder(project, uri)
    (path,) = journal_paths(project)
    Journal(path).append(json.dumps(odd))
    rec.record(SMALL)
    assert (len(results_of(uri, project)), rec.close("finished")) == (1, 0)
    assert json.loads(path.with_suffix(".rejected").read_text())["record"] == odd
    assert "refused" in caplog.text


# No database can store such a step, and MLflow reports only a general error.
NEVER_TAKEN = {**COMPLETE, "kind": "metrics", "points": [["a", 1.0, 10**30]]}


@pytest.mark.parametrize("has_outage", [False, True])
def test_sync_rejects_records_that_always_fail_unless_the_store_refuses_all(project, uri, monkeypatch, has_outage):
    rec = recorder(project, uri)
    (path,) = journal_paths(project)
    Journal(path).append(json.dumps(NEVER_TAKEN))
    rec.record(SMALL)
    assert rec.close("finished") == 3 and rec.outage, "a running study waits"
    if has_outage:
        monkeypatch.setattr(RunWriter, "check_takes", Mock(side_effect=Unreachable("the disk is full")))
        sent = sync(project)
        assert (sent.num_left, sent.num_rejected) == (3, 0) and "the disk is full" in sent.problems[0]
        monkeypatch.undo()
    sent = sync(project)
    assert (sent.num_uploaded, sent.num_left, sent.num_rejected) == (2, 0, 1) and "was refused" in sent.problems[0]
    assert json.loads(path.with_suffix(".rejected").read_text())["record"] == NEVER_TAKEN
    assert results_of(uri, project) == stripped(SMALL) and statuses(uri) == ["FINISHED"]
    assert sync(project) == UploadReport()


def test_lone_surrogates_in_a_record_block_nothing(project, uri):
    text = "a\ud800b"
    rec = recorder(project, uri, execution={"tags": {text: text}, "params": {text: text}, "description": text})
    rec.record(replace(SMALL, spec=replace(SMALL.spec, point={text: text}), reports=({text: 1.0},)))
    tags = {"mlflow.note.content": text}
    rec.record_summary(text, [PointRun(identity, text, {"key": text}, {text: 1.0}, tags) for identity in ("a", "b")])
    rec.add_artifact("x", text)
    assert rec.close("finished") == 0 and {run.info.run_name for run in runs(uri, kind="point")} >= {"a?b"}
    assert list(project.rglob("*.rejected")) == []


def test_an_execution_stays_finished_though_its_journal_lacks_the_end(project, uri, monkeypatch):
    rec = recorder(project, uri)
    rec.record(SMALL)
    monkeypatch.setattr(Journal, "append", Mock(side_effect=OSError(28, "No space left on device")))
    rec.record(MEDIUM)
    assert rec.close("finished") == 0
    monkeypatch.undo()
    end_abandoned(project, uri)
    assert (statuses(uri), journal_paths(project)) == (["FINISHED"], ())
    assert Store(uri, project).studies()[0].counts["num_finished"] == 2


@pytest.mark.parametrize("method", ["", "create", "log", "write_file", "end"])
def test_without_a_journal_a_result_is_stored_or_an_error_is_raised(project, uri, monkeypatch, method):
    rec = recorder(project, uri)
    rec.record(SMALL)
    monkeypatch.setattr(Journal, "append", Mock(side_effect=OSError(28, "No space left on device")))
    if method:
        monkeypatch.setattr(RunWriter, method, Mock(side_effect=Unreachable("database or disk is full")))
        with pytest.raises(StoreError, match="No space left on device\n  → free some space"):
            rec.record(MEDIUM)
    else:
        rec.record(MEDIUM)
    monkeypatch.undo()
    rec.record(LARGE)
    assert rec.close("failed") == 0
    kept = (SMALL, LARGE) if method else (SMALL, MEDIUM, LARGE)
    assert results_of(uri, project) == stripped(*kept)
    store = Store(uri, project)
    assert bool(store.step_times("mnist", MEDIUM.spec.identity)) is (not method)
    assert store.studies()[0].counts["num_finished"] == len(kept)
