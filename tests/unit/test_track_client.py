"""An embedded database gets MLflow's tables all at once: whatever is killed meanwhile, the next command makes them."""

import contextlib
import os
import shutil
import signal
import sqlite3
import stat
import time
from contextlib import closing
from types import SimpleNamespace

import pytest
from recording import make_result, new_store, record, results_of, stripped

from raypar.track import client
from raypar.track.check import check_writable
from raypar.track.client import connect, familiar_schema, is_blank, make_tables, schema_versions
from raypar.track.store import Store


def uri_of(folder):
    return f"sqlite:///{folder}/mlflow.db"


def schema_of(path):
    with closing(sqlite3.connect(path)) as database:
        return sorted(database.execute("SELECT type, name, tbl_name FROM sqlite_master"))


@pytest.fixture(scope="module")
def statements():
    return client._statements()


@pytest.fixture
def quick(statements, monkeypatch):
    """MLflow's migrations run once for all tests."""
    monkeypatch.setattr(client, "_statements", lambda: statements)


@pytest.fixture(scope="module")
def half_made(tmp_path_factory):
    """Databases as MLflow leaves them that is killed at any statement of their making, abandoned for long."""
    from mlflow.store.db import utils
    from sqlalchemy import create_engine, event

    folder, copies = tmp_path_factory.mktemp("half-made"), {}

    def keep(statement):
        if not statement.lstrip().startswith(("CREATE", "DROP", "ALTER", "INSERT", "UPDATE", "COMMIT")):
            return
        with closing(sqlite3.connect(folder / "mlflow.db")) as database:
            tables = schema_of(folder / "mlflow.db")
            version = client.schema_version(database)
        if (state := repr((tables, version))) not in copies:
            copies[state] = shutil.copy(folder / "mlflow.db", folder / f"{len(copies)}.db")
            os.utime(copies[state], (0, 0))

    engine = create_engine(uri_of(folder))

    @event.listens_for(engine, "connect")
    def watch(connection, _):
        connection.execute("PRAGMA synchronous = OFF")
        connection.set_trace_callback(keep)

    utils._initialize_tables(engine)
    engine.dispose()
    assert len(copies) > 100
    return list(copies.values())[1:-1:6]


def put(copy, folder):
    shutil.copy2(copy, folder / "mlflow.db")
    return folder


def in_fork(act):
    """Return the exit status of a fork that does this."""
    if (pid := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            act()
            os._exit(0)
        os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_database_that_mlflow_left_half_made_is_made_anew_and_reads_as_empty(half_made, quick, tmp_path):
    complete = schema_of(new_store(tmp_path))
    for copy in half_made:
        uri, content = uri_of(put(copy, tmp_path)), copy.read_bytes()
        check_writable(uri, tmp_path)
        assert Store(uri, tmp_path).studies() == ()
        assert (tmp_path / "mlflow.db").read_bytes() == content
        make_tables(uri)
        assert schema_of(tmp_path / "mlflow.db") == complete
    record(tmp_path, uri, make_result(32))
    assert results_of(uri, tmp_path) == stripped(make_result(32))


def test_one_with_anything_in_it_is_not(half_made, tmp_path):
    path = put(half_made[-1], tmp_path) / "mlflow.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("INSERT INTO experiments (experiment_id, name) VALUES (0, 'Default')")
        assert is_blank(database)
        for statement in (
            "INSERT INTO experiments (experiment_id, name) VALUES (1, 'mine')",
            "INSERT INTO metrics (key, value, timestamp, run_uuid) VALUES ('loss', 0.5, 1, 'r')",
            "CREATE TABLE mine (x)",
            "UPDATE alembic_version SET version_num = 'ffffffffffff'",
        ):
            database.execute("BEGIN")
            database.execute(statement)
            assert not is_blank(database), statement
            database.execute("ROLLBACK")
        assert is_blank(database)


def test_one_that_mlflow_is_making_is_waited_for(half_made, quick, tmp_path, monkeypatch):
    record(tmp_path, uri_of(new_store(tmp_path).parent), make_result(32))
    path = tmp_path / "mlflow.db"
    complete = path.rename(tmp_path / "complete.db")
    os.utime(put(half_made[10], tmp_path) / "mlflow.db")

    def finish(_):
        with closing(sqlite3.connect(complete)) as source, closing(sqlite3.connect(path)) as target:
            source.backup(target)

    monkeypatch.setattr(client, "time", SimpleNamespace(time=time.time, sleep=finish))
    make_tables(uri_of(tmp_path))
    assert results_of(uri_of(tmp_path), tmp_path) == stripped(make_result(32))


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.75, 1.0])
def test_a_kill_at_any_statement_leaves_a_database_that_works(statements, quick, tmp_path, monkeypatch, share):
    last, plain = int(share * len(statements)), sqlite3.connect
    num_run = 0

    def kill(statement):
        nonlocal num_run
        num_run += statement.startswith(("CREATE", "INSERT", "COMMIT"))
        if num_run > last:
            os.kill(os.getpid(), signal.SIGKILL)

    def traced(*args, **kwargs):
        database = plain(*args, **kwargs)
        database.set_trace_callback(kill)
        return database

    def killed():
        client.sqlite3.connect = traced
        make_tables(uri_of(tmp_path))

    assert in_fork(killed) == -signal.SIGKILL
    check_writable(uri_of(tmp_path), tmp_path)
    assert Store(uri_of(tmp_path), tmp_path).studies() == ()
    connect(uri_of(tmp_path)).create_experiment("mine")
    assert schema_of(tmp_path / "mlflow.db") == schema_of(new_store(tmp_path))
    assert stat.S_IMODE((tmp_path / "mlflow.db").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["mlflow.db"]


def test_two_processes_at_once_make_one_database(statements, monkeypatch, tmp_path):
    """The second to come finds what the first has put there meanwhile, and keeps it."""
    uri = uri_of(tmp_path)

    def first():
        client._statements = lambda: statements
        record(tmp_path, uri, make_result(32))

    def statements_of_the_second():
        assert in_fork(first) == 0
        return statements

    monkeypatch.setattr(client, "_statements", statements_of_the_second)
    make_tables(uri)
    assert results_of(uri, tmp_path) == stripped(make_result(32))


def test_reading_undoes_what_a_killed_process_was_writing(tmp_path):
    path, uri = new_store(tmp_path), uri_of(tmp_path)
    record(tmp_path, uri, make_result(32))

    def killed():
        database = sqlite3.connect(path, isolation_level=None)
        database.execute("PRAGMA cache_size = 1")  # so that it writes to the file before the end
        database.execute("BEGIN")
        database.execute("DELETE FROM tags")
        database.execute("UPDATE runs SET name = 'x' || hex(randomblob(50000))")
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_fork(killed) == -signal.SIGKILL
    assert (tmp_path / "mlflow.db-journal").exists()
    assert results_of(uri, tmp_path) == stripped(make_result(32))
    assert not (tmp_path / "mlflow.db-journal").exists()


def test_the_installed_mlflow_s_schema_is_familiar():
    """Otherwise MLflow is imported to read and to serve a store, which takes seconds."""
    assert familiar_schema() == schema_versions()[0]
