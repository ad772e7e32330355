"""One-time link to MLflow's page, as `raypar ui` prints it: other users of the machine are refused.

The link's token is exchanged, once, for a cookie with a key, which holds as long as the server runs and the browser
keeps it for a day. A second browser needs a link of its own, from another `raypar ui`: one that worked twice would
admit whoever reads it later in a terminal's log or over a shoulder. raypar itself sends the key as a password: it reads
it from a file that only the user can read. Neither token nor key is on a command line.

MLflow's server runs `create_app`, as the app that raypar's entry point of the group ``mlflow.app`` names.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import os
import secrets
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hmac import compare_digest
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlencode, urlsplit, urlunsplit

from raypar.files import make_private_folder, open_private
from raypar.signals import is_running

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

APP_NAME = "raypar"  # of the entry point
TOKEN_VARIABLE, KEY_VARIABLE = "RAYPAR_UI_TOKEN", "RAYPAR_UI_KEY"
USER = "raypar"
LOOPBACK = ("127.0.0.1", "localhost")
COOKIE_AGE_S = 86_400
HEALTH = "/health"  # says that the server runs, and nothing else
# Takes the token out of the address before it is in the browser's history. By a script: a redirect would be part of
# the click on the link, and after a click on a page of another site (a terminal in a browser, say) without the cookie.
ENTRANCE = """<!doctype html><meta charset="utf-8"><title>MLflow</title><script>
const url = new URL(location); url.searchParams.delete("token"); location.replace(url)</script>"""
FORWARD = "<!doctype html><title>MLflow</title><script>location.replace({})</script>"
REFUSAL = (
    "401: this page is for the user who started it, by the link that `raypar ui` printed. It works once, in one "
    "browser: for another one run `raypar ui` again.\n"
)


@dataclass(frozen=True)
class Access:
    """Secrets of one server: the token of its link, and the key that a browser gets for it."""

    token: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    key: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the server's process: its user alone can read them."""
        return {TOKEN_VARIABLE: self.token, KEY_VARIABLE: self.key}

    def link(self, url: str) -> str:
        """Return the address with the token, which a browser opens once."""
        parts = urlsplit(url)
        query = "&".join(filter(None, [urlencode({"token": self.token}), parts.query]))
        return urlunsplit(parts._replace(path=parts.path or "/", query=query))

    @contextmanager
    def shared_by_file(self, port: int) -> Iterator[None]:
        """Let this user's other processes find the key meanwhile, by the server's port."""
        path = _key_path(port)
        make_private_folder(path.parent)
        path.unlink(missing_ok=True)
        with os.fdopen(open_private(path, os.O_EXCL), "w") as file:
            file.write(f"{os.getpid()} {self.key}")
        try:
            yield
        finally:
            path.unlink(missing_ok=True)

    @contextmanager
    def page(self, url: str) -> Iterator[Path]:
        """Yield a page that leads to the link, for this user alone: others see the command line of a browser."""
        path = _key_path(urlsplit(url).port or 80).with_suffix(".html")
        make_private_folder(path.parent)
        path.unlink(missing_ok=True)
        with os.fdopen(open_private(path, os.O_EXCL), "w") as file:
            file.write(FORWARD.format(json.dumps(self.link(url))))
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)


def log_in(tracking_uri: str) -> None:
    """Let MLflow's client in this process send the key of a server that this user's `raypar ui` runs, if it is one."""
    parts = urlsplit(tracking_uri)
    if parts.scheme == "http" and parts.hostname in LOOPBACK and parts.port:
        with contextlib.suppress(OSError, ValueError):
            pid, key = _key_path(parts.port).read_text().split()
            if is_running(int(pid)):
                os.environ.update(MLFLOW_TRACKING_USERNAME=USER, MLFLOW_TRACKING_PASSWORD=key)


def _key_path(port: int) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser()
    return cache / "raypar" / "ui" / f"{socket.gethostname()}-{port}"


class OneTimeLink:
    """ASGI middleware: passes on what has the key, by cookie or as a password."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._key = app, access.key
        self._token: str | None = access.token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] == HEALTH:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._answer(scope, receive, send)
        else:  # a websocket, of which MLflow has none
            await send({"type": "websocket.close", "code": 1008})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        from starlette.requests import Request
        from starlette.responses import HTMLResponse, PlainTextResponse

        request = Request(scope)
        port = request.headers.get("host", "").rpartition(":")[2]
        cookie = f"raypar-ui-{port if port.isdecimal() else 80}"  # a browser's cookies are of all ports of a host
        token = request.query_params.get("token")
        if token is not None and (scope["method"], scope["path"]) == ("GET", "/"):
            scope["query_string"] = b""  # uvicorn logs it
            answer = HTMLResponse(ENTRANCE, headers={"Cache-Control": "no-store", "Referrer-Policy": "no-referrer"})
            if self._token is not None and _is_equal(token, self._token):
                self._token = None
                answer.set_cookie(cookie, self._key, COOKIE_AGE_S, httponly=True, samesite="strict")
            await answer(scope, receive, send)
        elif _is_equal(request.cookies.get(cookie, ""), self._key) or self._has_password(request.headers):
            await self._app(scope, receive, send)
        else:
            challenge = {"WWW-Authenticate": "Link", "Cache-Control": "no-store"}  # no browser asks for a password
            await PlainTextResponse(REFUSAL, 401, challenge)(scope, receive, send)

    def _has_password(self, headers: Mapping[str, str]) -> bool:
        scheme, _, credentials = headers.get("authorization", "").partition(" ")
        try:
            password = base64.b64decode(credentials, validate=True).decode().partition(":")[2]
        except (binascii.Error, ValueError):
            return False
        return scheme.lower() == "basic" and _is_equal(password, self._key)


def _is_equal(given: str, secret: str) -> bool:
    """Compare in constant time."""
    return compare_digest(given.encode(errors="surrogatepass"), secret.encode())


def create_app() -> ASGIApp:
    """Return MLflow's app behind the link whose secrets this process's environment has."""
    from mlflow.server.fastapi_app import app

    return OneTimeLink(app, Access(os.environ.pop(TOKEN_VARIABLE), os.environ.pop(KEY_VARIABLE)))
