"""No result is lost while a store is away, nor where the disk is full."""

from __future__ import annotations

from dataclasses import replace

import pytest
from store_parts import Clock, block, client, make_result, recorder, runs, stripped, unblock

from raypar.errors import StoreError
from raypar.study.trial import TrialState
from raypar.track.journal import journal_paths
from raypar.track.store import Store
from raypar.track.uploader import RunWriter, SyncReport, Uploader, sync


def test_nothing_is_left_in_the_spool_of_a_finished_study(project, uri):
    rec = recorder(project, uri)
    rec.record(make_result(64))
    assert rec.close("finished") == 0
    assert rec.close("finished") == 0
    assert journal_paths(project) == ()
    assert sync(project) == SyncReport()


def test_a_result_is_in_the_journal_before_the_store_is_asked(project, uri, monkeypatch):
    seen = []
    rec = recorder(project, uri)
    monkeypatch.setattr(Uploader, "apply", lambda *_, **__: seen.append(journal_paths(project)[0].read_text()))
    rec.record(make_result(64))
    assert make_result(64).to_json() in seen[0]


def test_an_outage_costs_no_result_and_is_tried_again_after_a_while(project):
    uri, clock = block(project), Clock()
    rec = recorder(project, uri, clock=clock, retry_after_s=30.0)
    rec.record(make_result(32))
    assert "FileExistsError" in rec.outage or "NotADirectoryError" in rec.outage
    assert [r.spec.point["batch_size"] for r in Store(uri, project)._pending_results("mnist")] == [32]
    unblock(project)
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


def test_the_store_is_tried_at_close_however_short_the_outage(project):
    uri = block(project)
    rec = recorder(project, uri, clock=Clock())
    rec.record(make_result(32))
    unblock(project)
    assert rec.close("failed") == 0
    assert [run.info.status for run in runs(uri, kind="execution")] == ["FAILED"]


def test_what_is_left_after_close_is_told_readable_and_brought_by_sync(project):
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
    identity = make_result(32).spec.identity
    assert store.step_times("mnist", identity) == make_result(32).step_times_s
    before = store.results("mnist")

    report = sync(project)
    assert (report.num_uploaded, report.num_left, report.problems) == (4, 0, ())
    assert sync(project) == SyncReport()
    assert journal_paths(project) == ()
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
