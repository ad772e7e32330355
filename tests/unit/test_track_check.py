from __future__ import annotations

import base64
import contextlib
import json
import socket
import sqlite3
import subprocess
import sys
import zlib
from typing import Any

import pytest

from raypar.errors import StoreError
from raypar.track.check import _schema_versions, check_writable
from raypar.track.client import artifact_root, local_folder, sqlite_path
from raypar.track.server import free_port, start_server
from raypar.track.store import Store, default_tracking_uri
from raypar.track.view import Shown, experiment_url, saved_view


def told(uri, project) -> StoreError:
    with pytest.raises(StoreError) as error:
        check_writable(uri, project)
    assert error.value.hint
    return error.value


def database(path, version):
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE alembic_version (version_num TEXT)")
        connection.execute("INSERT INTO alembic_version VALUES (?)", (version,))
        connection.commit()
    return f"sqlite:///{path}"


def test_a_folder_that_is_empty_will_do_and_stays_empty(tmp_path):
    Store(default_tracking_uri(tmp_path), tmp_path).check_writable()
    assert list(tmp_path.iterdir()) == []


def test_a_database_of_the_installed_mlflow_will_do(tmp_path):
    check_writable(database(tmp_path / "mlflow.db", _schema_versions()[0]), tmp_path)


def test_a_database_of_an_older_mlflow_is_to_be_upgraded(tmp_path):
    ours, known = _schema_versions()
    uri = database(tmp_path / "mlflow.db", min(known - {ours}))
    error = told(uri, tmp_path)
    assert "older MLflow" in error.message
    assert f"mlflow db upgrade {uri}" in str(error.hint)


def test_a_database_of_a_newer_mlflow_asks_for_a_newer_mlflow(tmp_path):
    error = told(database(tmp_path / "mlflow.db", "ffffffffffff"), tmp_path)
    assert "newer MLflow" in error.message
    assert "pip install -U mlflow" in str(error.hint) and "mlflow db upgrade" in str(error.hint)


def test_a_file_that_is_no_database_is_told(tmp_path):
    (tmp_path / "mlflow.db").write_text("a note" * 1000)
    assert "can't be written" in told(f"sqlite:///{tmp_path}/mlflow.db", tmp_path).message


def test_a_database_of_something_else_is_told(tmp_path):
    with contextlib.closing(sqlite3.connect(tmp_path / "other.db")) as connection:
        connection.execute("CREATE TABLE pets (name TEXT)")
    assert "not one of MLflow's" in told(f"sqlite:///{tmp_path}/other.db", tmp_path).message


@pytest.mark.parametrize("where", ["project", "database", "artifacts"])
def test_a_folder_that_can_not_be_written_is_told(tmp_path, where):
    (tmp_path / "in_the_way").write_text("")
    if where == "artifacts":
        (tmp_path / "mlartifacts").write_text("")
    bad = tmp_path / "in_the_way"
    uri = f"sqlite:///{bad if where == 'database' else tmp_path}/mlflow.db"
    assert "can't be written" in told(uri, bad if where == "project" else tmp_path).message


@pytest.mark.parametrize("uri", ["./mlruns", "file:///tmp/mlruns", ""])
def test_a_store_of_files_is_told_to_be_gone(tmp_path, uri):
    assert "in folders any more" in told(uri, tmp_path).message


@pytest.mark.parametrize("uri", ["ftp://host/x", "htpp://host:5000", "redis://x"])
def test_an_unknown_store_is_told(tmp_path, uri):
    assert "no tracking store that MLflow knows" in told(uri, tmp_path).message


def test_a_database_in_memory_is_told(tmp_path):
    assert "in memory" in told("sqlite:///:memory:", tmp_path).message


def test_a_server_that_is_not_there_is_told_at_once_and_without_its_password(tmp_path):
    uri = f"http://me:secret@127.0.0.1:{free_port(20000)}"
    error = told(uri, tmp_path)
    assert "http://me:***@127.0.0.1" in error.message and "secret" not in str(error)
    assert "mlflow server" in str(error.hint)


def test_the_default_store_is_a_file_in_the_folder_unless_the_environment_says_otherwise(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert default_tracking_uri(tmp_path) == f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://head:5000")
    assert default_tracking_uri(tmp_path) == "http://head:5000"


def test_files_lie_beside_an_embedded_database_and_where_a_server_says(tmp_path):
    assert artifact_root("sqlite:////data/mlflow.db", tmp_path).as_posix() == "/data/mlartifacts"
    assert artifact_root("postgresql://db/x", tmp_path) == tmp_path / "mlartifacts"
    assert artifact_root("http://head:5000", tmp_path) is None


@pytest.mark.parametrize(
    ("uri", "folder"),
    [("file:///a%20b/c", "/a b/c"), ("/a/b", "/a/b"), ("s3://bucket/x", None), ("mlflow-artifacts:/1/x", None)],
)
def test_only_a_local_artifact_folder_is_written_directly(uri, folder):
    found = local_folder(uri)
    assert (found and found.as_posix()) == folder


def test_a_database_path_is_taken_from_its_uri():
    assert str(sqlite_path("sqlite:////a/b.db")) == "/a/b.db"
    assert str(sqlite_path("sqlite:///b.db")) == "b.db"
    assert sqlite_path("postgresql://host/b") is None


def test_links_open_the_page_for_runs():
    assert experiment_url("http://h:5000/", "3") == "http://h:5000/#/experiments/3/runs?workflowType=machine_learning"
    charts = experiment_url("http://h:5000", "3", charts=True)
    assert charts.endswith("runs?workflowType=machine_learning&viewStateShareKey=raypar-v2&compareRunsMode=CHART")


def test_a_saved_view_is_the_same_each_time_and_left_out_where_it_is_too_long():
    lr = Shown({"lr": True}, "accuracy", ["accuracy"])
    assert saved_view(lr, at_ms=1) == saved_view(lr, at_ms=1)
    assert saved_view(Shown({}), at_ms=1)
    noise = [f"{i * 7919 % 1_000_003:x}{i * 104729 % 999_983:x}" for i in range(5000)]
    assert saved_view(Shown(dict.fromkeys(noise, True)), at_ms=1) is None


def state_of(view: str | None) -> dict[str, Any]:
    assert view is not None
    packed = json.loads(view)["state"].removeprefix("deflate;")
    state: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(packed)))
    return state


def titles(shown: Shown) -> dict[str, list[str]]:
    """Title of each section to its charts': axes of scatters, curves of lines."""
    state = state_of(saved_view(shown, at_ms=1))

    def title(chart: dict[str, Any]) -> str:
        if chart["type"] == "SCATTER":
            return f"{chart['yaxis']['key']} by {chart['xaxis']['key']}"
        return ", ".join(chart.get("selectedMetricKeys", [chart["type"]]))

    return {
        section["name"]: [title(c) for c in state["compareRunCharts"] if c["metricSectionId"] == section["uuid"]]
        for section in state["compareRunSections"]
    }


def test_a_saved_view_shows_what_there_is_and_draws_the_telling_curves_first():
    dull = ["train/epoch", "train/runtime_s", "train/samples_per_second", "eval/runtime_s", "eval/steps_per_second"]
    search = Shown({"lr": True}, "macro_f1", [*dull, "train/loss", "eval/loss", "macro_f1"])
    columns = set(state_of(saved_view(search, at_ms=1))["selectedColumns"])
    assert {"params.`lr`", "metrics.`eval/loss`", "metrics.`macro_f1`", "metrics.`train_time_s`"} <= columns
    assert not {"metrics.`accuracy`", "metrics.`val_loss`", "metrics.`speedup`"} & columns
    assert titles(search) == {
        "Training time": ["train_time_s by lr"],
        "macro_f1: what it costs, what it depends on": ["macro_f1 by train_time_s", "macro_f1 by lr"],
        "While training": ["train/loss", "eval/loss", "macro_f1", *dull[:3]],
    }


def test_a_timed_study_s_view_begins_with_its_speedups_beside_the_ideal_one():
    of = [f"scaling/{name} batch_size 64{side}" for name in ("speedup", "efficiency") for side in ("", " low", " high")]
    swept = {"strategy": False, "num_workers": True}
    timed = Shown(swept, "accuracy", ["accuracy"], compares=True, curves=[*of, "scaling/karp_flatt", "scaling/ideal"])
    found = titles(timed)
    assert next(iter(found)) == "Speedup"
    assert found["Speedup"] == [f"{of[0]}, scaling/ideal", of[3], "speedup by strategy", "speedup by num_workers"]
    charts = state_of(saved_view(timed, at_ms=1))["compareRunCharts"]
    axes = {c["xaxis"]["key"]: c["xaxis"]["type"] for c in charts if c["type"] == "SCATTER"}
    assert axes == {"strategy": "PARAM", "num_workers": "METRIC", "train_time_s": "METRIC"}


def test_a_taken_port_is_passed_over():
    with contextlib.closing(socket.socket()) as taken:
        port = free_port(21000)
        taken.bind(("127.0.0.1", port))
        taken.listen()
        assert free_port(port) > port


def test_no_server_is_started_over_a_server(tmp_path):
    with pytest.raises(StoreError, match="is a server already"):
        start_server("http://head:5000", tmp_path)


def test_mlflow_is_not_imported_before_it_is_needed():
    modules = "raypar.track.store, raypar.track.recorder, raypar.track.uploader, raypar.track.server"
    code = f"import sys, {modules}; print(sorted({{'mlflow', 'sqlalchemy', 'torch', 'ray'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
