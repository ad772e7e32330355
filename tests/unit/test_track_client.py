"""An embedded database is created completely or not at all, even if its process is killed."""

import contextlib
import errno
import os
import signal
import sqlite3
import stat
from contextlib import closing

from recording import make_result, new_store, record, results_of, stripped

from raypar.track import client
from raypar.track.check import check_writable
from raypar.track.client import VERSIONS, familiar_schema, make_database, schema_version, schema_versions, table_names


def uri_of(folder):
    return f"sqlite:///{folder}/mlflow.db"


def in_fork(act):
    """Return the exit status of a fork that calls `act`."""
    if (pid := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            act()
            os._exit(0)
        os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_new_database_is_complete_and_private(tmp_path):
    from mlflow.store.db.utils import Base

    make_database(uri_of(tmp_path))
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
        assert table_names(database) == {*Base.metadata.tables, VERSIONS}
        assert schema_version(database) == [schema_versions()[0]]
    assert stat.S_IMODE((tmp_path / "mlflow.db").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["mlflow.db"]


def test_a_kill_while_a_database_is_created_leaves_none(tmp_path):
    def killed():
        client.os.link = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        make_database(uri_of(tmp_path))

    assert in_fork(killed) == -signal.SIGKILL
    assert not (tmp_path / "mlflow.db").exists()
    (draft,) = tmp_path.glob(".mlflow.db-*")
    backup = tmp_path / ".mlflow.db-backup"  # the user's
    backup.touch()
    for path in (draft, backup):
        os.utime(path, (0, 0))
    check_writable(uri_of(tmp_path), tmp_path)
    record(tmp_path, uri_of(tmp_path), make_result(32))
    assert results_of(uri_of(tmp_path), tmp_path) == stripped(make_result(32))
    assert backup.exists() and not draft.exists()


def test_a_database_created_by_another_process_is_kept(monkeypatch, tmp_path):
    uri, link = uri_of(tmp_path), os.link

    def first():
        client.os.link = link
        record(tmp_path, uri, make_result(32))

    def link_of_the_second(*paths):
        assert in_fork(first) == 0
        link(*paths)

    monkeypatch.setattr(client.os, "link", link_of_the_second)
    make_database(uri)
    assert results_of(uri, tmp_path) == stripped(make_result(32))
    assert not list(tmp_path.glob(".mlflow.db-*"))


def test_mlflow_creates_the_database_on_file_systems_without_links(monkeypatch, tmp_path):
    def refuse(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(client.os, "link", refuse)
    record(tmp_path, uri_of(tmp_path), make_result(32))
    assert results_of(uri_of(tmp_path), tmp_path) == stripped(make_result(32))


def test_reading_rolls_back_the_transaction_of_a_killed_process(tmp_path):
    path, uri = new_store(tmp_path), uri_of(tmp_path)
    record(tmp_path, uri, make_result(32))

    def killed():
        database = sqlite3.connect(path, isolation_level=None)
        database.execute("PRAGMA cache_size = 1")  # forces writes to the file before the commit
        database.execute("BEGIN")
        database.execute("DELETE FROM tags")
        database.execute("UPDATE runs SET name = 'x' || hex(randomblob(50000))")
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_fork(killed) == -signal.SIGKILL
    assert (tmp_path / "mlflow.db-journal").exists()
    assert results_of(uri, tmp_path) == stripped(make_result(32))
    assert not (tmp_path / "mlflow.db-journal").exists()


def test_the_installed_mlflows_schema_is_familiar():
    """Otherwise MLflow is imported to read and to serve a store, which takes seconds."""
    assert familiar_schema() == schema_versions()[0]
