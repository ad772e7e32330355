"""Ports, passwords and refusals of MLflow servers. No server is started here."""

import socket
import stat
import subprocess

import pytest

from raypar.errors import StoreError
from raypar.track import server
from raypar.track.client import unreachable
from raypar.track.server import credentials, ensure_shared_server, free_port

ANSWER = "MlflowException: API request to endpoint /api/… failed with error code 401 != 200. Response body: 'You are …'"


def test_a_taken_port_is_skipped_and_refused_by_the_shared_server(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert free_port(port) > port
        with pytest.raises(StoreError, match=f"another program uses port {port}"):
            ensure_shared_server(tmp_path, port=port)
    assert not (tmp_path / ".mlflow").exists()


def test_the_password_is_generated_once_and_private(tmp_path):
    made_up = credentials(tmp_path)
    assert len(made_up[1]) >= 32 and credentials(tmp_path) == made_up
    path = tmp_path / ".mlflow" / "credentials"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert credentials(tmp_path / "other") != made_up
    text = "[mlflow]\nmlflow_tracking_username = ann\nmlflow_tracking_password = 100%%-of-it\n"
    path.write_text(text)
    assert credentials(tmp_path) == ("ann", "100%-of-it") and path.read_text() == text


@pytest.mark.parametrize(("given", "problem"), [("", "asks for a user and"), ("x", "refuses this user and password")])
def test_a_refused_user_gets_a_hint(given, problem, tmp_path, monkeypatch):
    for name in ("HOME", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.setenv(name, str(tmp_path) if name == "HOME" else given)
    error = unreachable("http://head:5000", ANSWER)
    assert str(error).startswith(f"The tracking store http://head:5000 {problem}")
    assert "MLFLOW_TRACKING_USERNAME" in str(error) and "~/.mlflow/credentials" in str(error)


def test_a_user_without_the_permission_gets_a_hint():
    error = unreachable("http://head:5000", ANSWER.replace("401", "403"))
    assert str(error).startswith("The tracking store http://head:5000 does not permit this user to change the study")
    assert "permission EDIT" in str(error) and "start the server" not in str(error)


def test_a_server_imports_nothing_from_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_UVICORN_OPTS", "--timeout-keep-alive 30")
    for name in ("click", "colorama", "json", "mlflow", "uvicorn"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')")
    started = []

    class Started(BaseException):
        pass

    def start(command, **flags):
        started.append((command, flags["env"]))
        raise Started

    monkeypatch.setattr(server.subprocess, "Popen", start)
    with pytest.raises(Started), (tmp_path / "log").open("w+b") as log:
        server._launch("127.0.0.1", 5000, (), {}, log, None)
    monkeypatch.undo()
    ((command, environment),) = started
    options = command[command.index("--uvicorn-opts") + 1].split()
    assert options[:2] == ["--timeout-keep-alive", "30"]
    # uvicorn's own command line, as MLflow starts it, with an application that isn't there.
    uvicorn = [command[0], "-m", "uvicorn", *options, "cmd:absent", "--port", "0"]
    for each in ([*command[:3], "--version"], uvicorn):
        done = subprocess.run(each, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert "Traceback" not in done.stderr and not (tmp_path / "mark").exists(), done
    assert 'Attribute "absent" not found' in done.stderr, done
