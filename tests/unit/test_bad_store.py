"""Every command refuses an unusable store in one message with a hint, and does not change it."""

import shutil
import sqlite3
from contextlib import closing

import pytest
from bad_input import GOOD
from nothing_starts import NOWHERE, contents, raypar
from recording import new_store
from test_bad_input import assert_one_message

from raypar.errors import StoreError
from raypar.track.check import check_writable
from raypar.track.client import schema_versions
from raypar.track.server import free_port
from raypar.track.store import Store, default_tracking_uri

READING = (
    *("list", "store show s", "report s", "store resume s", "recommend s", "store compare s t", "model fit s"),
    *("model predict s --workers 4", "store export s t.csv", "model generate s --prompt x", "plan good.py"),
)


def _altered(path, *statements):
    with closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            connection.execute(statement)


def of_version(path, version):
    _altered(path, f"UPDATE alembic_version SET version_num = '{version}'")
    _altered(path, "PRAGMA journal_mode = DELETE")


def older(path):
    installed, upgradable = schema_versions()
    of_version(path, min(upgradable - {installed}))


def of_another_program(path):
    path.unlink()
    _altered(path, "CREATE TABLE mine (x)")


def a_folder(path):
    path.unlink()
    path.mkdir()


def a_link(path):
    path.rename(path.with_name("moved.db"))
    path.symlink_to("gone.db")


# Function that damages the database, part of the message, part of the hint for writing.
STORES = {
    "older": (older, "older MLflow", "mlflow db upgrade sqlite:///"),
    "newer": (lambda path: of_version(path, "ffffffffffff"), "newer MLflow", "pip install -U mlflow"),
    "no database": (lambda path: path.write_bytes(b"mine, and dear to me\n" * 100), "mlflow.db", "--tracking-uri"),
    "of another program": (of_another_program, "not a database of MLflow", "--tracking-uri"),
    "cut off": (lambda path: path.write_bytes(path.read_bytes()[:99_999]), "mlflow.db", "--tracking-uri"),
    "a link to nowhere": (a_link, "mlflow.db is a link to gone.db, which does not exist", "remove the link"),
    "a folder": (a_folder, "mlflow.db", "--tracking-uri"),
}
BAD_URIS = [
    *((uri, "no longer stores results in folders", "sqlite:////") for uri in ("./mlruns", "file:///tmp/mlruns", "")),
    *((uri, "not a tracking store that MLflow supports", "http://") for uri in ("htpp://host:5000", "redis://x")),
    ("sqlite:///:memory:", "in memory", "sqlite:////"),
    ("sqlite:////no/such/dir/x.db", "no such folder: /no/such/dir", "mkdir -p /no/such/dir"),
]


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    return new_store(tmp_path_factory.mktemp("store"))


@pytest.fixture(params=STORES)
def spoiled(request, complete, tmp_path):
    spoil, word, hint = STORES[request.param]
    shutil.copy(complete, tmp_path / "mlflow.db")
    spoil(tmp_path / "mlflow.db")
    return tmp_path, word, hint


@pytest.mark.parametrize("command", READING)
def test_an_unreadable_database_is_reported_and_not_changed(spoiled, command):
    folder, word, _ = spoiled
    (folder / "good.py").write_text(GOOD)
    before = contents(folder)
    done = raypar(command.split(), folder)
    assert_one_message(done)
    assert word in done.err, done.err
    assert contents(folder) == before


@pytest.mark.parametrize("command", READING)
@pytest.mark.parametrize(
    "uri",
    ["foo://bar", "./mlruns", NOWHERE, "sqlite:///no/such/folder/mlflow.db"],
    ids=["unknown", "a-folder", "no-server", "in-no-folder"],
)
def test_an_impossible_store_is_reported_and_not_created(uri, command, tmp_path):
    (tmp_path / "good.py").write_text(GOOD)
    before = contents(tmp_path)
    done = raypar([*command.split(), "--tracking-uri", uri], tmp_path)
    assert_one_message(done)
    assert uri in done.err
    assert contents(tmp_path) == before


# ---- before a study writes


def refusal(uri, project):
    with pytest.raises(StoreError) as error:
        check_writable(uri, project)
    assert error.value.hint
    return error.value


def test_checking_an_empty_folder_or_a_good_database_changes_nothing(complete, tmp_path):
    Store(default_tracking_uri(tmp_path), tmp_path).check_writable()
    assert list(tmp_path.iterdir()) == []
    check_writable(f"sqlite:///{complete}", tmp_path)


def test_an_unwritable_database_is_refused_with_a_hint(spoiled):
    folder, word, hint = spoiled
    error = refusal(f"sqlite:///{folder}/mlflow.db", folder)
    assert word in error.message and hint in str(error.hint)


@pytest.mark.parametrize(("uri", "problem", "hint"), BAD_URIS)
def test_an_invalid_address_is_refused_with_a_hint(tmp_path, uri, problem, hint):
    error = refusal(uri, tmp_path)
    assert problem in error.message and hint in str(error.hint)


@pytest.mark.parametrize("where", ["project", "database", "artifacts"])
def test_an_unwritable_folder_is_refused(tmp_path, where):
    bad = tmp_path / "in_the_way"
    bad.write_text("")
    if where == "artifacts":
        (tmp_path / "mlartifacts").write_text("")
    uri = f"sqlite:///{bad if where == 'database' else tmp_path}/mlflow.db"
    assert "can't be written" in refusal(uri, bad if where == "project" else tmp_path).message


@pytest.mark.parametrize("command", ["study good.py", "store sync", "ui"])
def test_a_store_in_a_missing_folder_is_refused_and_not_created(command, tmp_path):
    (tmp_path / "good.py").write_text(GOOD)
    before = contents(tmp_path)
    done = raypar([*command.split(), "--tracking-uri", f"sqlite:///{tmp_path}/no/such/x.db"], tmp_path)
    assert_one_message(done)
    assert f"no such folder: {tmp_path}/no/such" in done.err
    assert contents(tmp_path) == before


def test_a_missing_server_is_refused_at_once_and_without_its_password(tmp_path):
    error = refusal(f"http://me:secret@127.0.0.1:{free_port(20000)}", tmp_path)
    assert "http://me:***@127.0.0.1" in error.message and "secret" not in str(error)
    assert "mlflow server" in str(error.hint)
