"""A real MLflow server, and real deaths: of the server, and of the process that writes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import urllib.request
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from raypar.errors import StoreError
from raypar.study.trial import Failure, FailureKind, TrialResult, TrialSpec, TrialState
from raypar.track.check import check_writable
from raypar.track.client import connect
from raypar.track.journal import journal_paths
from raypar.track.recorder import Execution, Recorder
from raypar.track.server import free_port, start_server
from raypar.track.store import Store, default_tracking_uri
from raypar.track.uploader import UploadReport, sync

pytestmark = pytest.mark.mlflow

NAN = float("nan")
HERE = str(Path(__file__).parent)


def make_result(n: int, **changes) -> TrialResult:
    spec = TrialSpec("mnist", "mlp", {"lr": n / 100}, {"lr": n / 100, "num_workers": 2, "note": "", "x": None}, 0, 0, n)
    fields = {
        "state": TrialState.FINISHED,
        "started_at": 1_700_000_000.0 + n,
        "wall_s": 10.0,
        "train_time_s": 5.0,
        "reports": tuple({"epoch": e, "accuracy": e / 10, "loss": 1 / e} for e in range(1, 11)),
        "step_times_s": ((0.1,) * 50, (0.2,) * 50),
        "environment": {"node": "n1"},
    }
    return TrialResult(spec=spec, **{**fields, **changes})


def recorder(project, uri, uid="e1", **kwargs) -> Recorder:
    execution = Execution(
        uid,
        "mnist",
        1_700_000_000.0,
        {"a": "1"},
        {"raypar.question": '{"q": 1}'},
        description="why?",
        study_source="src",
    )
    rec = Recorder(execution, tracking_uri=uri, project_dir=project, **kwargs)
    rec.start()
    return rec


def everything_once(uri: str, project, numbers) -> None:
    """Each result is in the store exactly once, whole, and under one execution."""
    store = Store(uri, project)
    assert [r.spec.order for r in store.results("mnist")] == list(numbers)
    client, experiment_id = connect(uri), store.experiment_id("mnist")
    children = client.search_runs([experiment_id], "tags.`raypar.kind` = 'trial'")
    (parent,) = client.search_runs([experiment_id], "tags.`raypar.kind` = 'execution'")
    assert Counter(run.data.tags["raypar.order"] for run in children) == Counter(str(n) for n in numbers)
    for run in children:
        assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert run.info.status == "FINISHED"
        history = client.get_metric_history(run.info.run_id, "accuracy")
        assert sorted((m.step, m.value) for m in history) == [(e, e / 10) for e in range(1, 11)]
        identity = run.data.tags["raypar.identity"]
        assert store.step_times("mnist", identity) == ((0.1,) * 50, (0.2,) * 50)
    assert parent.data.tags["raypar.num_finished"] == str(len(numbers))


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return tmp_path


@pytest.fixture
def database(tmp_path_factory):
    """What the server keeps, away from the project of the study."""
    return tmp_path_factory.mktemp("server")


def test_a_server_killed_in_the_middle_and_back_again_has_every_result_once(project, database):
    with start_server(default_tracking_uri(database), database, port=22000) as server:
        uri, port = server.url, int(server.url.rpartition(":")[2])
        check_writable(uri, project)
        rec = recorder(project, uri, clock=lambda: 0.0)
        rec.record(make_result(0))
        rec.record(make_result(1))
        assert len(Store(uri, project).results("mnist")) == 2
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        rec.record(make_result(2))
        rec.record(make_result(3))
        assert rec.outage
        assert rec.close("finished") == 3
        assert sync(project).num_left == 3
    with start_server(default_tracking_uri(database), database, port=port) as server:
        assert server.url == uri
        report = sync(project)
        assert (report.num_uploaded, report.num_left, report.problems) == (3, 0, ())
        assert sync(project) == UploadReport()
        assert journal_paths(project) == ()
        everything_once(uri, project, range(4))
        store = Store(uri, project)
        assert (store.study_source("mnist"), store.question("mnist")) == ("src", {"q": 1})
        assert store.results("mnist")[2] == make_result(2, step_times_s=())


@pytest.mark.core
def test_a_server_that_comes_back_during_the_study_gets_what_it_missed(project, database):
    clock_s = [0.0]
    with start_server(default_tracking_uri(database), database, port=22100) as server:
        uri, port = server.url, int(server.url.rpartition(":")[2])
        rec = recorder(project, uri, clock=lambda: clock_s[0])
        rec.record(make_result(0))
    rec.record(make_result(1))
    with start_server(default_tracking_uri(database), database, port=port):
        clock_s[0] += 31
        rec.record(make_result(2))
        assert rec.close("finished") == 0
        everything_once(uri, project, range(3))


def test_odd_results_go_through_a_server(project, database):
    odd = [
        make_result(0, reports=({"epoch": 1, "loss": NAN, "inf": float("inf"), "acc@1": 0.5, "../up": 1.0},)),
        make_result(
            1,
            state=TrialState.FAILED,
            failure=Failure(FailureKind.ERROR, "ü\0" * 9000, 0, "trace" * 9000),
            environment={"a/../b": "ü" * 9000, "": None},
        ),
        make_result(2, reports=tuple({"epoch": e, "loss": 1 / (e + 1)} for e in range(3000))),
    ]
    with start_server(default_tracking_uri(database), database, port=22200) as server:
        rec = recorder(project, server.url)
        for result in odd:
            rec.record(result)
        rec.record_metrics([("scaling/speedup", 1.9, 2), ("scaling/speedup", NAN, 4)])
        rec.record_trial_metrics({odd[2].spec.identity: {"speedup": 1.9}})
        rec.add_artifact("report/a.html", "<p>")
        assert rec.close("finished") == 0
        assert journal_paths(project) == () and list(project.rglob("*.rejected")) == []
        got = Store(server.url, project).results("mnist")
        # As texts: NaN is not equal to itself.
        assert [r.to_json() for r in got] == [replace(r, step_times_s=()).to_json() for r in odd]
        client = connect(server.url)
        (run,) = client.search_runs([Store(server.url, project).experiment_id("mnist")], "tags.`raypar.order` = '0'")
        assert run.data.metrics["acc_1"] == 0.5
        assert run.data.metrics["loss"] != run.data.metrics["loss"]


def test_a_server_is_two_processes_and_leaves_none(database):
    def members(group: int) -> list[str]:
        listed = subprocess.run(["ps", "-A", "-o", "pgid=,pid="], capture_output=True, text=True, check=True).stdout
        return [pid for pgid, pid in map(str.split, listed.splitlines()) if pgid == str(group)]

    with start_server(default_tracking_uri(database), database, port=22300) as server:
        assert len(members(server.pid)) <= 3
        with urllib.request.urlopen(server.home_url, timeout=5) as page:
            assert page.status == 200
        os.kill(server.pid, signal.SIGKILL)  # its children stay on the port
    assert members(server.pid) == []


def test_a_page_that_is_served_ends_with_sigterm_and_leaves_nothing(database):
    code = textwrap.dedent(
        f"""
        from pathlib import Path
        from raypar.track.server import serve
        from raypar.track.store import default_tracking_uri
        folder = Path({str(database)!r})
        serve(default_tracking_uri(folder), folder, port=22400, announce=lambda url: print(url, flush=True))
        """
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        port = int(url.rpartition(":")[2].partition("/")[0])
        assert url == f"http://127.0.0.1:{port}/?workflowType=machine_learning"
        assert free_port(port) > port
        process.terminate()
        assert process.wait() == 0
    assert free_port(port) == port


def test_no_server_is_tried_over_a_database_that_is_none(database):
    (database / "mlflow.db").write_text("a note" * 1000)
    with pytest.raises(StoreError, match="can't be written"):
        start_server(default_tracking_uri(database), database, port=22500)


DYING = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {here!r})
from test_mlflow_server import make_result, recorder
import raypar.track.{module} as module

project, uri = Path({project!r}), {uri!r}
rec = recorder(project, uri)
rec.record(make_result(0))

def die(*args, **kwargs):
    {before}
    os.kill(os.getpid(), signal.SIGKILL)

owner = {owner}
real = owner.{name}
owner.{name} = die
rec.record(make_result(1))
print("still alive")
"""


@pytest.mark.parametrize(
    ("module", "owner", "name", "goes_on"),
    [
        ("uploader", "module.Uploader", "apply", False),  # journalled, nothing uploaded
        ("uploader", "module.RunWriter", "create", True),  # the run made, its id never heard of
        ("uploader", "module.RunWriter", "log", True),  # metrics in, nothing said of it
        ("uploader", "module.RunWriter", "end", False),
        ("journal", "module", "write_ack", False),  # all uploaded, not noted
        ("journal", "module.Journal", "append", "half"),  # in the middle of a line
    ],
)
def test_a_writer_killed_anywhere_leaves_what_sync_completes(project, module, owner, name, goes_on):
    uri = default_tracking_uri(project)
    before = {True: "real(*args, **kwargs)", False: "pass", "half": "os.write(args[0]._fd, args[1].encode()[:999])"}
    code = DYING.format(
        here=HERE,
        module=module,
        project=str(project),
        uri=uri,
        owner=owner,
        name=name,
        before=before[goes_on],
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGKILL, "", "")
    numbers = range(1 if goes_on == "half" else 2)
    assert len(Store(uri, project).results("mnist")) == len(numbers), "before any sync"
    report = sync(project)
    assert report.num_left == 0
    assert len(report.problems) == (goes_on == "half")
    everything_once(uri, project, numbers)
    client = connect(uri)
    (parent,) = client.search_runs([Store(uri, project).experiment_id("mnist")], "tags.`raypar.kind` = 'execution'")
    assert parent.info.status == "KILLED"
    assert sync(project) == UploadReport()
    assert journal_paths(project) == ()


def test_syncs_at_once_double_nothing(project, tmp_path_factory):
    uri = default_tracking_uri(project)
    (project / "mlflow.db").mkdir()  # a store that is out of reach
    rec = recorder(project, uri)
    for n in range(8):
        rec.record(make_result(n))
    assert rec.close("finished") == 10
    (project / "mlflow.db").rmdir()
    code = "from pathlib import Path; from raypar.track.uploader import sync; print(sync(Path({!r})).num_left)"
    code = code.format(str(project))
    syncs = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate()[0] for process in syncs] == ["0\n"] * 3
    everything_once(uri, project, range(8))


def test_a_first_use_and_an_outage_are_silent(project):
    code = textwrap.dedent(
        f"""
        import sys
        from pathlib import Path
        sys.path.insert(0, {HERE!r})
        from test_mlflow_server import make_result, recorder
        from raypar.track.store import Store, default_tracking_uri
        project = Path({str(project)!r})
        for uid, uri in (("a", default_tracking_uri(project)), ("b", "http://127.0.0.1:9")):
            rec = recorder(project, uri, uid)
            rec.record(make_result(1))
            rec.close("finished")
        Store(default_tracking_uri(project), project).results("mnist")
        """
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
