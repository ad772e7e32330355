"""Login of MLflow's pages: the one-time link that `raypar ui` prints, or a password. It keeps out other users.

The link's token is exchanged once for a cookie with a key. The key is valid while the server runs, and the browser
keeps the cookie for a day. A second browser needs another link from another `raypar ui`: a reusable link would let in
anyone who reads it later in a terminal's log. raypar itself sends the key as a password, which it reads from a private
file. A cluster's shared server has no link, only the password. Neither token nor key is on a command line.

MLflow's server runs `create_app`, named by raypar's entry point in the group ``mlflow.app``.
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

from raypar.files import cache_dir, make_private_folder, open_private
from raypar.signals import is_running

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

APP_NAME = "raypar"  # the entry point
TOKEN_VARIABLE, KEY_VARIABLE = "RAYPAR_UI_TOKEN", "RAYPAR_UI_KEY"
USER = "raypar"
LOOPBACK = ("127.0.0.1", "localhost")
COOKIE_AGE_S = 86_400
HEALTH = "/health"  # only shows that the server runs
# Removes the token from the address before it gets into the browser's history. A redirect would belong to the click on
# the link, and if that was on a page of another site (such as a terminal in a browser), it would lack the cookie.
ENTRANCE = """<!doctype html><meta charset="utf-8"><title>MLflow</title><script>
const url = new URL(location); url.searchParams.delete("token"); location.replace(url)</script>"""
FORWARD = "<!doctype html><title>MLflow</title><script>location.replace({})</script>"
REFUSED_LINK = (
    "401: open this page with the link that `raypar ui` printed. The link works once, in one browser; for another "
    "browser run `raypar ui` again.\n"
)
REFUSED_PASSWORD = "401: the user and the password are in ~/.mlflow/credentials of the user who runs the server.\n"


@dataclass(frozen=True)
class Access:
    """Secrets of a server: the token of its link (empty: no link), and the key, which is a cookie or a password."""

    token: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    key: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the server's process, which only its user can read."""
        return {TOKEN_VARIABLE: self.token, KEY_VARIABLE: self.key}

    def link(self, url: str) -> str:
        """Return the address with the token, which works once."""
        parts = urlsplit(url)
        query = "&".join(filter(None, [urlencode({"token": self.token}), parts.query]))
        return urlunsplit(parts._replace(path=parts.path or "/", query=query))

    @contextmanager
    def shared_by_file(self, port: int) -> Iterator[None]:
        """Let this user's other processes find the key by the server's port during the block."""
        with _private_file(_key_path(port), f"{os.getpid()} {self.key}"):
            yield

    @contextmanager
    def page(self, url: str) -> Iterator[Path]:
        """Yield a private page that forwards to the link, since other users can see a browser's command line."""
        path = _key_path(urlsplit(url).port or 80).with_suffix(".html")
        with _private_file(path, FORWARD.format(json.dumps(self.link(url)))):
            yield path


def log_in(tracking_uri: str) -> None:
    """Give MLflow's client the key if the address is that of a server of this user's `raypar ui`."""
    parts = urlsplit(tracking_uri)
    if parts.scheme == "http" and parts.hostname in LOOPBACK and parts.port:
        with contextlib.suppress(OSError, ValueError):
            pid, key = _key_path(parts.port).read_text().split()
            if is_running(int(pid)):
                os.environ.update(MLFLOW_TRACKING_USERNAME=USER, MLFLOW_TRACKING_PASSWORD=key)


@contextmanager
def _private_file(path: Path, text: str) -> Iterator[None]:
    make_private_folder(path.parent)
    path.unlink(missing_ok=True)
    with os.fdopen(open_private(path, os.O_EXCL), "w") as file:
        file.write(text)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _key_path(port: int) -> Path:
    return cache_dir() / "ui" / f"{socket.gethostname()}-{port}"


class OneTimeLink:
    """ASGI middleware that only passes requests with the key, in a cookie or as a password."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._key = app, access.key
        self._token: str | None = access.token or None
        # Browsers ask for a password only if it is the way to log in.
        self._refusal, self._challenge = REFUSED_PASSWORD, 'Basic realm="MLflow"'
        if access.token:
            self._refusal, self._challenge = REFUSED_LINK, "Link"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] == HEALTH:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._answer(scope, receive, send)
        else:  # a websocket, which MLflow doesn't use
            await send({"type": "websocket.close", "code": 1008})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        from starlette.requests import Request
        from starlette.responses import HTMLResponse, PlainTextResponse

        request = Request(scope)
        port = request.headers.get("host", "").rpartition(":")[2]
        cookie = f"raypar-ui-{port if port.isdecimal() else 80}"  # browsers share cookies between the ports of a host
        token = request.query_params.get("token")
        if token is not None and (scope["method"], scope["path"]) == ("GET", "/"):
            scope["query_string"] = b""  # uvicorn would log it
            answer = HTMLResponse(ENTRANCE, headers={"Cache-Control": "no-store", "Referrer-Policy": "no-referrer"})
            if self._token is not None and _is_equal(token, self._token):
                self._token = None
                answer.set_cookie(cookie, self._key, COOKIE_AGE_S, httponly=True, samesite="strict")
            await answer(scope, receive, send)
        elif _is_equal(request.cookies.get(cookie, ""), self._key) or self._has_password(request.headers):
            await self._app(scope, receive, send)
        else:
            challenge = {"WWW-Authenticate": self._challenge, "Cache-Control": "no-store"}
            await PlainTextResponse(self._refusal, 401, challenge)(scope, receive, send)

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
    """Return MLflow's app behind the link whose secrets are in this process's environment."""
    from mlflow.server.fastapi_app import app

    return OneTimeLink(app, Access(os.environ.pop(TOKEN_VARIABLE), os.environ.pop(KEY_VARIABLE)))
