"""A store that can't be used is told in one message by whatever reads it, and stays as it is."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from bad_input import GOOD
from nothing_starts import NOWHERE, contents, raypar
from recording import new_store
from test_bad_input import assert_one_message

READING = (
    *("list", "show s", "report s", "resume s", "recommend s", "compare s t", "fit s", "predict s --workers 4"),
    *("export s t.csv", "generate s --prompt x", "plan good.py"),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_store(tmp_path_factory.mktemp("store"))


def _version(path: Path, version: str) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE alembic_version SET version_num = ?", (version,))
        connection.commit()
        connection.execute("PRAGMA journal_mode = DELETE")


def older(path: Path) -> None:
    from raypar.track.check import _schema_versions

    ours, known = _schema_versions()
    _version(path, min(known - {ours}))


def newer(path: Path) -> None:
    _version(path, "ffffffffffff")


def no_database(path: Path) -> None:
    path.write_bytes(b"mine, and dear to me\n" * 100)


def of_another_program(path: Path) -> None:
    path.unlink()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE mine (x)")
        connection.commit()


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 3])


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


STORES: tuple[tuple[Callable[[Path], None], str], ...] = (
    (older, "older MLflow"),
    (newer, "newer MLflow"),
    (no_database, "mlflow.db"),
    (of_another_program, "not one of MLflow's"),
    (cut_off, "mlflow.db"),
    (a_folder, "mlflow.db"),
)


@pytest.mark.parametrize("command", READING)
@pytest.mark.parametrize(("spoil", "word"), STORES, ids=lambda value: getattr(value, "__name__", "_"))
def test_a_database_that_can_not_be_read_is_told_and_not_changed(
    spoil: Callable[[Path], None], word: str, command: str, whole: Path, tmp_path: Path
) -> None:
    (tmp_path / "good.py").write_text(GOOD)
    shutil.copy(whole, tmp_path / "mlflow.db")
    spoil(tmp_path / "mlflow.db")
    before = contents(tmp_path)
    done = raypar(command.split(), tmp_path)
    assert_one_message(done)
    assert word in done.err, done.err
    assert contents(tmp_path) == before


@pytest.mark.parametrize("command", READING)
@pytest.mark.parametrize("uri", ["foo://bar", "./mlruns", NOWHERE], ids=["unknown", "a-folder", "no-server"])
def test_a_store_that_there_is_not_is_told(uri: str, command: str, tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text(GOOD)
    before = contents(tmp_path)
    done = raypar([*command.split(), "--tracking-uri", uri], tmp_path)
    assert_one_message(done)
    assert uri in done.err
    assert contents(tmp_path) == before
