"""A real MLflow server, and kills of the server and of the writing process."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import psutil
import pytest
import requests
from harness import HERE
from recording import Clock, make_result, record, recorder, runs, stripped

from raypar.errors import RayparError
from raypar.signals import is_running
from raypar.study.conditions import Conditions
from raypar.study.trial import Failure, FailureKind, TrialState
from raypar.track.client import connect
from raypar.track.journal import journal_paths
from raypar.track.server import home_url, start_server
from raypar.track.store import Store, default_tracking_uri
from raypar.track.uploader import UploadReport, delete_study, rename_study, sync

pytestmark = pytest.mark.mlflow

NAN = float("nan")


def everything_once(uri, project, numbers):
    """Check that the result of each number is in the store exactly once, complete, and under one execution."""
    store, client = Store(uri, project), connect(uri)
    assert sorted(r.spec.config["batch_size"] for r in store.results("mnist")) == list(numbers)
    (parent,) = runs(uri, kind="execution")
    assert sorted(int(run.data.params["batch_size"]) for run in runs(uri)) == list(numbers)
    points = {run.info.run_name: run for run in runs(uri, kind="point")}
    assert sorted(points) == sorted(f"bs={number}" for number in numbers)
    for point in points.values():
        assert (point.info.status, point.data.tags["mlflow.parentRunId"]) == ("FINISHED", parent.info.run_id)
    for run in runs(uri):
        point = points[run.info.run_name.partition(" ")[0]]
        assert (run.info.status, run.data.tags["mlflow.parentRunId"]) == ("FINISHED", point.info.run_id)
        history = client.get_metric_history(run.info.run_id, "accuracy")
        assert sorted((m.step, m.value) for m in history) == [(1, 0.5), (2, 0.9)]
        assert store.step_times("mnist", run.data.tags["raypar.identity"]) == make_result().step_times_s
    assert parent.data.tags["raypar.num_finished"] == str(len(numbers))


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return tmp_path


@pytest.fixture
def serve(tmp_path_factory):
    """Start a server over one database, which is outside of the study's project."""
    folder = tmp_path_factory.mktemp("server")
    return lambda port: start_server(default_tracking_uri(folder), folder, port=port)


@pytest.mark.core
def test_a_server_killed_and_restarted_during_a_study_has_every_result_once(project, serve):
    clock, execution = Clock(), {"tags": {"raypar.question": '{"q": 1}'}, "study_source": "src"}
    with serve(22000) as server:
        uri, port = server.url, int(server.url.rpartition(":")[2])
        rec = recorder(project, uri, execution=execution, clock=clock)
        rec.record(make_result(1))
        assert len(Store(uri, project).results("mnist")) == 1
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        rec.record(make_result(2))
        assert rec.outage and sync(project).num_left
    with serve(port) as server:
        assert server.url == uri
        clock.now_s += 31
        rec.record(make_result(3))
        assert rec.close("finished") == 0
        assert sync(project) == UploadReport() and journal_paths(project) == ()
        everything_once(uri, project, (1, 2, 3))
        store = Store(uri, project)
        assert (store.study_source("mnist"), store.question("mnist")) == ("src", {"q": 1})
        assert stripped(make_result(2))[0] in store.results("mnist")


def test_odd_results_go_through_a_server(project, serve):
    failure = Failure(FailureKind.ERROR, "ü\0" * 9000, 0, "trace" * 9000)
    not_finite = {"epoch": 1, "loss": NAN, "inf": float("inf"), "acc@1": 0.5, "../up": 1.0}
    odd = [
        make_result(1, state=TrialState.DIVERGED, reports=(not_finite,)),
        make_result(2, state=TrialState.FAILED, failure=failure, conditions=Conditions(node=("ü" * 9000,))),
        make_result(3, reports=tuple({"epoch": e, "loss": 1 / (e + 1)} for e in range(3000))),
    ]
    with serve(22200) as server:
        rec = recorder(project, server.url)
        for result in odd:
            rec.record(result)
        rec.record_metrics([("scaling/speedup", 1.9, 2), ("scaling/speedup", NAN, 4)])
        rec.record_trial_metrics({odd[2].spec.identity: {"speedup": 1.9}})
        rec.add_artifact("report/a.html", "<p>")
        assert rec.close("finished") == 0
        assert journal_paths(project) == () and list(project.rglob("*.rejected")) == []
        results = Store(server.url, project).results("mnist")
        # As JSON, since NaN is not equal to itself.
        assert [r.to_json() for r in results] == [replace(r, step_times_s=()).to_json() for r in odd]
        (metrics,) = [run.data.metrics for run in runs(server.url) if run.data.params["batch_size"] == "1"]
        assert metrics["acc_1"] == 0.5 and metrics["loss"] != metrics["loss"]


def test_studies_on_a_server_are_renamed_and_deleted_unless_they_run_elsewhere(project, serve, tmp_path_factory):
    with serve(22200) as server:
        uri, elsewhere = server.url, tmp_path_factory.mktemp("elsewhere")
        record(project, uri, make_result(1), make_result(2))
        steps = Store(uri, project).step_times("mnist", make_result(1).spec.identity)
        running = recorder(elsewhere, uri, "e2")
        running.record(make_result(3))
        for change in (
            lambda: rename_study("mnist", "digits", uri, project),
            lambda: delete_study("mnist", uri, project),
        ):
            with pytest.raises(RayparError, match="is running, maybe on another machine"):
                change()
        running.close("finished")
        rename_study("mnist", "digits", uri, project)
        store = Store(uri, project)
        renamed = store.results("digits")
        assert len(renamed) == 3 and store.results("mnist") == ()
        assert steps and store.step_times("digits", renamed[0].spec.identity) == steps
        experiment_id = delete_study("digits", uri, project)
        assert store.studies() == ()
        record(project, uri, make_result(4, study="digits"), uid="e3", study="digits")
        assert len(store.results("digits")) == 1
        connect(uri).restore_experiment(experiment_id)
        assert len(store.results(f"digits (deleted, {experiment_id})")) == 3


def test_a_server_has_few_processes_and_leaves_none(serve):
    with serve(22300) as server:
        started = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
        assert len(started) <= 3
        assert requests.get(home_url(server.url), timeout=5).status_code == 200
        os.kill(server.pid, signal.SIGKILL)  # its children stay on the port
    assert not any(is_running(process.pid) for process in started)


START = f"""
import os, signal, sys
from pathlib import Path
sys.path.append({str(HERE.parent / "unit")!r})
from recording import make_result, recorder
from raypar.track import journal, run_writer, uploader
from raypar.track.store import Store, default_tracking_uri
project = Path(sys.argv[1])
uri = default_tracking_uri(project)
"""
DYING = """
def die(*args, **kwargs):
    {before}
    os.kill(os.getpid(), signal.SIGKILL)

rec = recorder(project, uri)
rec.record(make_result(1))
real, {owner}.{name} = {owner}.{name}, die
rec.record(make_result(2))
print("still alive")
"""
SILENT = """
for uid, where in (("a", uri), ("b", "http://127.0.0.1:9")):
    rec = recorder(project, where, uid)
    rec.record(make_result(1))
    rec.close("finished")
Store(uri, project).results("mnist")
"""


def run_code(project, code):
    done = subprocess.run([sys.executable, "-c", START + code, project], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("owner", "name", "before"),
    [
        ("uploader.Uploader", "apply", "pass"),  # journalled, nothing uploaded
        ("run_writer.RunWriter", "create", "real(*args, **kwargs)"),  # the run created, its id unknown
        ("run_writer.RunWriter", "log", "real(*args, **kwargs)"),  # metrics uploaded, not noted
        ("run_writer.RunWriter", "end", "pass"),
        ("journal", "write_ack", "pass"),  # all uploaded, not noted
        ("journal.Journal", "append", "os.write(args[0]._fd, args[1].encode()[:99])"),  # in the middle of a line
    ],
)
def test_sync_completes_what_a_killed_writer_left(project, owner, name, before):
    uri = default_tracking_uri(project)
    code = DYING.format(owner=owner, name=name, before=before)
    assert run_code(project, code) == (-signal.SIGKILL, "", "")
    is_torn = name == "append"
    numbers = (1,) if is_torn else (1, 2)
    assert len(Store(uri, project).results("mnist")) == len(numbers), "before any sync"
    report = sync(project)
    assert (report.num_left, len(report.problems)) == (0, is_torn)
    everything_once(uri, project, numbers)
    (parent,) = runs(uri, kind="execution")
    assert parent.info.status == "KILLED"
    assert sync(project) == UploadReport() and journal_paths(project) == ()


def test_concurrent_syncs_duplicate_nothing(project):
    uri = default_tracking_uri(project)
    (project / "mlflow.db").mkdir()  # an unreachable store
    rec = recorder(project, uri)
    for n in range(1, 9):
        rec.record(make_result(n))
    assert rec.close("finished") == 10
    (project / "mlflow.db").rmdir()
    with ThreadPoolExecutor(3) as pool:
        ends = list(pool.map(lambda _: run_code(project, "print(uploader.sync(project).num_left)"), range(3)))
    assert ends == [(0, "0\n", "")] * 3
    everything_once(uri, project, range(1, 9))


def test_a_first_use_and_an_outage_are_silent(project):
    assert run_code(project, SILENT) == (0, "", "")
