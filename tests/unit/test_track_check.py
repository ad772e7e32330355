"""Stores are checked before a study runs: a bad one is refused with a hint, and nothing is created."""

from __future__ import annotations

import contextlib
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from raypar.errors import StoreError
from raypar.track.check import _schema_versions, check_writable
from raypar.track.client import artifact_root, local_folder, sqlite_path
from raypar.track.server import free_port
from raypar.track.store import Store, default_tracking_uri


def refusal(uri: str, project: Path) -> StoreError:
    with pytest.raises(StoreError) as error:
        check_writable(uri, project)
    assert error.value.hint
    return error.value


def database(path: Path, version: str) -> str:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE alembic_version (version_num TEXT)")
        connection.execute("INSERT INTO alembic_version VALUES (?)", (version,))
        connection.commit()
    return f"sqlite:///{path}"


def test_an_empty_folder_will_do_and_stays_empty(tmp_path):
    Store(default_tracking_uri(tmp_path), tmp_path).check_writable()
    assert list(tmp_path.iterdir()) == []


def test_a_database_of_the_installed_mlflow_will_do(tmp_path):
    check_writable(database(tmp_path / "mlflow.db", _schema_versions()[0]), tmp_path)


def older(folder: Path) -> str:
    installed, upgradable = _schema_versions()
    return database(folder / "mlflow.db", min(upgradable - {installed}))


def newer(folder: Path) -> str:
    return database(folder / "mlflow.db", "ffffffffffff")


def no_database(folder: Path) -> str:
    (folder / "mlflow.db").write_text("a note" * 1000)
    return f"sqlite:///{folder}/mlflow.db"


def of_another_program(folder: Path) -> str:
    with contextlib.closing(sqlite3.connect(folder / "other.db")) as connection:
        connection.execute("CREATE TABLE pets (name TEXT)")
    return f"sqlite:///{folder}/other.db"


@pytest.mark.parametrize(
    ("store", "problem", "hint"),
    [
        (older, "older MLflow", "mlflow db upgrade sqlite:///"),
        (newer, "newer MLflow", "pip install -U mlflow"),
        (no_database, "can't be written", "--tracking-uri"),
        (of_another_program, "not one of MLflow's", "--tracking-uri"),
        ("./mlruns", "in folders any more", "sqlite:////"),
        ("file:///tmp/mlruns", "in folders any more", "sqlite:////"),
        ("", "in folders any more", "sqlite:////"),
        ("htpp://host:5000", "no tracking store that MLflow knows", "http://"),
        ("redis://x", "no tracking store that MLflow knows", "http://"),
        ("sqlite:///:memory:", "in memory", "sqlite:////"),
    ],
)
def test_a_bad_store_is_refused_with_a_hint(
    tmp_path: Path, store: str | Callable[[Path], str], problem: str, hint: str
) -> None:
    error = refusal(store if isinstance(store, str) else store(tmp_path), tmp_path)
    assert problem in error.message and hint in str(error.hint)


@pytest.mark.parametrize("where", ["project", "database", "artifacts"])
def test_a_folder_that_can_not_be_written_is_refused(tmp_path, where):
    (tmp_path / "in_the_way").write_text("")
    if where == "artifacts":
        (tmp_path / "mlartifacts").write_text("")
    bad = tmp_path / "in_the_way"
    uri = f"sqlite:///{bad if where == 'database' else tmp_path}/mlflow.db"
    assert "can't be written" in refusal(uri, bad if where == "project" else tmp_path).message


def test_a_missing_server_is_refused_at_once_and_without_its_password(tmp_path):
    error = refusal(f"http://me:secret@127.0.0.1:{free_port(20000)}", tmp_path)
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
    path = local_folder(uri)
    assert (path and path.as_posix()) == folder


def test_a_database_path_is_taken_from_its_uri():
    assert str(sqlite_path("sqlite:////a/b.db")) == "/a/b.db"
    assert str(sqlite_path("sqlite:///b.db")) == "b.db"
    assert sqlite_path("postgresql://host/b") is None


def test_mlflow_is_not_imported_before_it_is_needed():
    modules = "raypar.track.store, raypar.track.recorder, raypar.track.server"
    code = f"import sys, {modules}; print(sorted({{'mlflow', 'sqlalchemy', 'torch', 'ray'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
