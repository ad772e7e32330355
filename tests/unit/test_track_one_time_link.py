"""The one-time link to MLflow's page, its key, and the file through which raypar finds the key."""

import asyncio
import base64
import contextlib
import os
import re
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from command import raypar
from recording import make_result, record

import raypar.track.server as server_module
from raypar.cli import common
from raypar.track.client import connect
from raypar.track.one_time_link import Access, OneTimeLink, create_app, log_in

PAGE = b"the runs"
HOST = {"host": "127.0.0.1:5000"}


class Server:
    """App behind the link; `get` returns status, headers and body of an answer."""

    def __init__(self, access=None):
        self.access = access or Access()
        self.token = self.access.token
        self.app = OneTimeLink(self._page, self.access)

    async def _page(self, scope, receive, send):
        self.passed_on = scope
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": PAGE})

    def get(self, path="/", query="", method="GET", kind="http", **headers):
        sent = []

        async def send(message):
            sent.append(message)

        fields = [(key.encode(), value.encode("latin-1")) for key, value in {**HOST, **headers}.items()]
        self.scope = {"type": kind, "method": method, "path": path, "query_string": query.encode(), "headers": fields}
        asyncio.run(self.app(self.scope, None, send))
        body = b"".join(message.get("body", b"") for message in sent)
        fields = dict(sent[0].get("headers", ()))
        return sent[0].get("status"), {key.decode(): value.decode() for key, value in fields.items()}, body

    def status(self, *args, **kwargs):
        return self.get(*args, **kwargs)[0]

    def enter(self, **how):
        """Open the link; return the cookie."""
        return self.get(query=f"token={self.token}", **how)[1].get("set-cookie", "").partition(";")[0]


@pytest.fixture
def server():
    return Server()


@pytest.mark.parametrize("path", ["/", "/ajax-api/2.0/mlflow/runs/search", "/get-artifact", "/static-files/a.js"])
@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "OPTIONS"])
def test_nothing_is_shown_without_the_key(server, path, method):
    status, _, body = server.get(path, method=method, cookie="raypar-ui-5000=x", authorization="Basic eDp4")
    assert status == 401 and b"raypar ui" in body and PAGE not in body
    assert server.status(path, method=method, cookie=f"a=b; {server.enter()}") == 200


def test_the_link_gives_one_browser_a_protected_cookie(server):
    status, headers, body = server.get(query=f"token={server.token}&workflowType=machine_learning")
    assert status == 200 and PAGE not in body and b'searchParams.delete("token")' in body
    assert re.fullmatch(
        r"raypar-ui-5000=[\w-]{43}; HttpOnly; Max-Age=86400; Path=/; SameSite=strict", headers["set-cookie"]
    )
    assert (headers["cache-control"], headers["referrer-policy"]) == ("no-store", "no-referrer")
    assert server.token.encode() not in server.scope["query_string"], "the server logs requests"
    assert "set-cookie" not in server.get(query=f"token={server.token}")[1], "used up"
    assert server.status(cookie=headers["set-cookie"].partition(";")[0]) == 200


@pytest.mark.parametrize("query", ["token=", "token=\u00fc"])
def test_a_wrong_token_gives_no_cookie(server, query):
    assert "set-cookie" not in server.get(query=query)[1]
    assert server.enter() != ""


def test_only_opening_the_link_uses_the_token(server):
    query = f"token={server.token}"
    assert server.status(query=query, method="HEAD") == server.status("/other", query) == 401
    assert server.enter() != ""


@pytest.mark.parametrize("host", ["x:y", "", "[::1]:80"])
def test_odd_hosts_are_handled(server, host):
    cookie = server.enter(host=host)
    assert re.fullmatch(r"raypar-ui-80=[\w-]{43}", cookie) and server.status(cookie=cookie, host=host) == 200


@pytest.mark.parametrize("header", ["", "Basic", "Basic \xff", "Bearer {key}", "basic {user}", "Basic {key}"])
def test_the_key_is_accepted_as_a_password(server, header):
    encoded = {
        name: base64.b64encode(f"raypar:{value}".encode()).decode()
        for name, value in {"key": server.access.key, "user": server.access.key[:-1]}.items()
    }
    status = server.status("/api/2.0/mlflow/runs/search", method="POST", authorization=header.format(**encoded))
    assert status == (200 if header == "Basic {key}" else 401)


def test_a_shared_server_has_no_link_and_browsers_ask_for_its_password():
    shared = Server(Access(token="", key="of the owner"))
    status, headers, body = shared.get()
    assert (status, headers["www-authenticate"]) == (401, 'Basic realm="MLflow"') and b"~/.mlflow/credentials" in body
    assert "set-cookie" not in shared.get(query="token=")[1]
    password = base64.b64encode(b"admin:of the owner").decode()
    assert shared.status(authorization=f"Basic {password}") == 200


def test_health_is_public_and_other_protocols_are_refused(server):
    assert server.get("/", kind="websocket", cookie=server.enter())[0] is None and not hasattr(server, "passed_on")
    assert server.status("/health") == 200


def test_the_link_is_required_unless_switched_off(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    given = []
    monkeypatch.setattr(server_module, "start_server", lambda *args, access, **flags: given.append(access) or Stopped())
    for flags in ([], ["--no-auth"]):
        code, out, _ = raypar("ui", "--port", "5999", *flags, width=200)
        assert code == 0 and ("?token=" in out, "works once" in out) == (not flags,) * 2
        assert out.startswith("http://127.0.0.1:5999/?") and "workflowType=machine_learning\n" in out
    assert isinstance(given[0], Access) and given[1] is None


@pytest.mark.parametrize("flags", [(), ("--no-auth",), ("--no-open",)], ids=str)
def test_the_browser_opens_the_study_without_the_token_on_its_command_line(uri, project, monkeypatch, flags):
    record(project, uri, make_result())
    opened, pages = [], []

    def launch(url):
        opened.append(url)
        pages.append(Path(url.removeprefix("file://")).read_text() if url.startswith("file:") else "")

    monkeypatch.setattr(server_module, "start_server", lambda *_, **__: Stopped())
    monkeypatch.setattr(typer, "launch", launch)
    monkeypatch.setattr(common, "has_browser", lambda: True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(project / "cache"))
    monkeypatch.chdir(project)
    code, out, _ = raypar("ui", "--port", "5999", *flags, width=200)
    first, second, *_ = out.splitlines()
    view = "/#/experiments/1/runs?workflowType=machine_learning&viewStateShareKey=raypar-v2"
    assert code == 0 and first.startswith("mnist: http://127.0.0.1:5999/") and first.endswith(view[1:])
    assert second.startswith("all studies: http://127.0.0.1:5999/?")
    if "--no-open" in flags:
        assert opened == []
    elif "--no-auth" in flags:
        assert opened == [f"http://127.0.0.1:5999{view}"]
    else:
        assert first.removeprefix("mnist: ") in pages[0] and "token" not in opened[0]
    assert list(project.glob("cache/**/*.html")) == []


SEATS = {
    "at a terminal": ({"DISPLAY": ":0"}, True, True),
    "on wayland": ({"WAYLAND_DISPLAY": "wayland-0"}, True, True),
    "in a pipe": ({"DISPLAY": ":0"}, False, False),
    "without a display": ({}, True, False),
    "from another machine": ({"DISPLAY": ":10", "SSH_CONNECTION": "10.0.0.1 1 10.0.0.2 22"}, True, False),
}


@pytest.mark.parametrize("seat", SEATS)
def test_a_browser_opens_only_at_a_local_terminal(monkeypatch, seat):
    environment, is_terminal, expected = SEATS[seat]
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SSH_CONNECTION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("sys.stdout", SimpleNamespace(isatty=lambda: is_terminal))
    is_open = common.has_browser()
    monkeypatch.undo()
    assert is_open is expected


class Stopped(contextlib.nullcontext):
    """A server that has ended."""

    url = "http://127.0.0.1:5999"

    def __enter__(self):
        return self

    def wait(self):
        return 0


def test_secrets_are_in_no_repr():
    access = Access()
    assert access != Access() and access.token not in repr(access) and access.key not in repr(access)
    link = access.link("http://h:1/#/experiments/2?a=b")
    assert link == f"http://h:1/?token={access.token}#/experiments/2?a=b"
    assert access.link("http://h:1/?w=m") == f"http://h:1/?token={access.token}&w=m"


VARIABLES = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")


def test_the_key_of_the_users_running_server_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in VARIABLES:
        monkeypatch.setenv(name, "before")
    access, folder = Access(), tmp_path / "raypar" / "ui"
    with access.shared_by_file(5000):
        (file,) = folder.iterdir()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600 and stat.S_IMODE(folder.stat().st_mode) == 0o700
        for other in ("http://127.0.0.1:5001", "https://127.0.0.1:5000", "http://elsewhere:5000", "sqlite:////a:5000"):
            log_in(other)
        text = file.read_text()
        file.write_text(text.replace(str(os.getpid()), str(2**30)))  # a server that was killed
        log_in("http://127.0.0.1:5000")
        assert [os.environ[name] for name in VARIABLES] == ["before"] * 2
        file.write_text(text)
        connect("http://localhost:5000")
        assert [os.environ[name] for name in VARIABLES] == ["raypar", access.key]
    assert list(folder.iterdir()) == []


@pytest.mark.filterwarnings("ignore:starlette.middleware.wsgi")
def test_mlflows_app_is_behind_the_link_and_its_environment_is_cleared(monkeypatch):
    access = Access()
    for name, value in access.environment.items():
        monkeypatch.setenv(name, value)
    assert isinstance(create_app(), OneTimeLink)
    assert not {*access.environment} & {*os.environ}
    with pytest.raises(KeyError):
        create_app()
