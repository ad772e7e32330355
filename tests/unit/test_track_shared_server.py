"""Who may use a cluster's MLflow, and where that is written. No server is started here."""

from __future__ import annotations

import configparser
import stat
from pathlib import Path

import pytest

from raypar.errors import StoreError
from raypar.track import shared_server
from raypar.track.client import unreachable
from raypar.track.shared_server import CREDENTIALS, ensure_server, main, write_users

ANSWER = "MlflowException: API request to endpoint /api/… failed with error code 401 != 200. Response body: 'You are …'"


def section(path: Path) -> dict[str, str]:
    found = configparser.ConfigParser()  # as MLflow reads it
    found.read(path)
    return dict(found["mlflow"])


def written(home: Path) -> tuple[tuple[str, str], tuple[str, str]]:
    """User and password, as the server and as its clients have them."""
    (home / "mlflow").mkdir(exist_ok=True)
    write_users(home / "mlflow", home)
    server, clients = section(home / "mlflow" / "users.ini"), section(home / ".mlflow" / "credentials")
    user, password = (clients[key] for key in CREDENTIALS)
    return (server["admin_username"], server["admin_password"]), (user, password)


def test_the_password_is_made_up_once_and_read_by_its_owner_only(tmp_path: Path) -> None:
    server, clients = written(tmp_path)
    assert server == clients and len(server[1]) >= 32
    assert written(tmp_path) == (server, clients)
    for path in (tmp_path / "mlflow" / "users.ini", tmp_path / ".mlflow" / "credentials"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (tmp_path / "other").mkdir()
    assert written(tmp_path / "other")[0] != server


def test_a_user_and_a_password_that_are_there_are_taken(tmp_path: Path) -> None:
    path = tmp_path / ".mlflow" / "credentials"
    path.parent.mkdir()
    text = "[mlflow]\nmlflow_tracking_username = ann\nmlflow_tracking_password = 100%%-of-it\n"
    path.write_text(text)
    assert written(tmp_path) == (("ann", "100%-of-it"), ("ann", "100%-of-it"))
    assert path.read_text() == text


def test_credentials_that_were_lost_are_written_again(tmp_path: Path) -> None:
    server, _ = written(tmp_path)
    (tmp_path / ".mlflow" / "credentials").unlink()
    assert written(tmp_path) == (server, server)


def test_without_what_asks_for_a_password_no_server_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shared_server, "find_spec", lambda name: None)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main([]) == 2
    assert "pip install 'raypar[cluster]'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_port_that_somebody_else_has_is_left_to_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_server, "find_spec", lambda name: object())
    monkeypatch.setattr(shared_server, "_is_taken", lambda port: True)
    with pytest.raises(StoreError, match="Port 5000 is another's"):
        ensure_server(tmp_path / "mlflow", tmp_path)
    assert not (tmp_path / ".mlflow").exists()


@pytest.mark.parametrize(
    ("given", "told"),
    [({}, "asks for a user and a password"), ({"USERNAME": "u", "PASSWORD": "p"}, "takes neither the user nor the")],
)
def test_whom_a_store_refuses_is_told_what_to_give(
    given: dict[str, str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("USERNAME", "PASSWORD"):
        monkeypatch.delenv(f"MLFLOW_TRACKING_{name}", raising=False)
    for name, value in given.items():
        monkeypatch.setenv(f"MLFLOW_TRACKING_{name}", value)
    error = unreachable("http://head:5000", ANSWER)
    assert str(error).startswith(f"The tracking store http://head:5000 {told}")
    assert "MLFLOW_TRACKING_USERNAME" in str(error) and "~/.mlflow/credentials" in str(error)
