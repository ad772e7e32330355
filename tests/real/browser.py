"""Pages in a real browser: chromium without a window, driven over a pipe (DevTools protocol), nothing installed for it.

with browser() as chromium:
    page = chromium.open("http://127.0.0.1:5000/")          # or a Path
    page.until("document.querySelector('h1')")              # a script that becomes true
    page.run("document.title"), page.html(), page.text()
    page.screenshot(tmp_path / "page.png")
    assert not page.errors
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TIMEOUT_S = 120.0
SIZE = (1440, 1000)
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


class Gone(AssertionError):
    """The browser ended, or does not answer."""


class Page:
    """A tab.

    Attributes:
        errors: uncaught exceptions and console errors of the page's scripts, as far as they came in.
        requests: the addresses that the page asked for.
    """

    def __init__(self, chromium: Browser, session: str) -> None:
        self._chromium, self._session = chromium, session
        self.errors: list[str] = []
        self.requests: list[str] = []

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression, as JSON has it; a promise is waited for."""
        answer = self._call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True, userGesture=True
        )
        if thrown := answer.get("exceptionDetails"):
            raise AssertionError(f"{script}: {_thrown(thrown)}")
        return answer["result"].get("value")

    def until(self, script: str, *, timeout_s: float = TIMEOUT_S) -> Any:
        """Wait for an expression to become true; its value then."""
        before_s = time.monotonic() + timeout_s
        while not (value := self.run(script)):
            if time.monotonic() > before_s:
                raise AssertionError(f"still not: {script}\nerrors: {self.errors[:5]}\n{self.text()[:2000]}")
            self._chromium.listen(0.1)
        return value

    def go(self, where: str | Path) -> None:
        """Load a page; returns when it and what it names has been loaded. Scripts may still be at work: `until`."""
        url = where.absolute().as_uri() if isinstance(where, Path) else where
        if failure := self._call("Page.navigate", url=url).get("errorText"):
            raise AssertionError(f"{url}: {failure}")
        self.until("document.readyState === 'complete'")

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def html(self) -> str:
        return str(self.run("document.documentElement.outerHTML"))

    def text(self) -> str:
        """What is to be read on it, hidden parts left out."""
        return str(self.run("document.body ? document.body.innerText : ''"))

    def screenshot(self, path: Path, *, whole: bool = False) -> Path:
        """A PNG of what is in view, or of the whole page."""
        answer = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))
        return path

    def resize(self, width: int, height: int, *, is_phone: bool = False) -> None:
        """Set the view's size in CSS pixels."""
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=is_phone
        )

    def emulate(self, **features: str) -> None:
        """Media features, hyphens as underscores: ``prefers_color_scheme="dark"``; ``media="print"`` for paper."""
        media = features.pop("media", "")
        pairs = [{"name": key.replace("_", "-"), "value": value} for key, value in features.items()]
        self._call("Emulation.setEmulatedMedia", media=media, features=pairs)

    def heard(self, event: dict[str, Any]) -> None:
        said = event.get("params", {})
        match event["method"]:
            case "Runtime.exceptionThrown":
                self.errors.append(_thrown(said["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if said["type"] == "error":
                self.errors.append(" ".join(str(a.get("value", a.get("description", ""))) for a in said["args"]))
            case "Network.requestWillBeSent":
                self.requests.append(said["request"]["url"])

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._chromium.call(method, params, self._session)


class Browser:
    """A running chromium with a profile of its own."""

    def __init__(self, to_fd: int, from_fd: int) -> None:
        self._to, self._from = to_fd, from_fd
        self._count = 0
        self._rest = b""
        self._answers: dict[int, dict[str, Any]] = {}
        self._pages: dict[str, Page] = {}

    def open(self, where: str | Path = "about:blank") -> Page:
        """A new tab in a window of `SIZE`, with storage of its own (as in a private window)."""
        context = self.call("Target.createBrowserContext", {})["browserContextId"]
        wanted = {"url": "about:blank", "browserContextId": context, "width": SIZE[0], "height": SIZE[1]}
        target = self.call("Target.createTarget", wanted)["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Network"):
            self.call(f"{domain}.enable", {}, session)
        page.resize(*SIZE)
        page.go(where)
        return page

    def call(self, method: str, params: dict[str, Any], session: str | None = None) -> dict[str, Any]:
        """One call of the DevTools protocol; https://chromedevtools.github.io/devtools-protocol lists them."""
        self._count += 1
        mine = self._count
        message: dict[str, Any] = {"id": mine, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        before_s = time.monotonic() + TIMEOUT_S
        while mine not in self._answers:
            if time.monotonic() > before_s:
                raise Gone(f"chromium does not answer {method}")
            self.listen(1.0)
        answer = self._answers.pop(mine)
        if "error" in answer:
            raise AssertionError(f"{method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result

    def listen(self, timeout_s: float) -> None:
        """Take in what chromium says, for so long at most."""
        if not select.select([self._from], [], [], timeout_s)[0]:
            return
        if not (chunk := os.read(self._from, 1 << 20)):
            raise Gone("chromium has ended")
        *whole, self._rest = (self._rest + chunk).split(b"\0")
        for text in whole:
            message = json.loads(text)
            if "id" in message:
                self._answers[message["id"]] = message
            elif (page := self._pages.get(message.get("sessionId", ""))) is not None:
                page.heard(message)


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """A chromium for a test, ended with all that it started. The test is skipped where there is none that starts."""
    path = next((found for name in _NAMES if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("no chromium on this machine")
    # Not under pytest's folder: a socket's path in a profile must be short.
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True))
        their_in, to_fd = os.pipe()
        from_fd, their_out = os.pipe()
        for fd in (to_fd, from_fd):
            stack.callback(os.close, fd)
        log = stack.enter_context((Path(folder) / "log").open("w+"))
        command = [
            path,
            "--headless=new",
            "--remote-debugging-pipe",
            f"--user-data-dir={folder}",
            # The pages are the project's own, and where tests run there is often no sandbox to be had.
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--disable-component-update",
            "--no-first-run",
            "--hide-scrollbars",
        ]
        # The protocol wants file descriptors 3 and 4.
        wiring = f'exec "$@" 3<&{their_in} 4>&{their_out}'
        process = subprocess.Popen(
            ["bash", "-c", wiring, "bash", *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(their_in, their_out),
            env={**os.environ, "HOME": folder},
            start_new_session=True,
        )
        stack.callback(_end, process)
        os.close(their_in)
        os.close(their_out)
        chromium = Browser(to_fd, from_fd)
        try:
            chromium.call("Browser.getVersion", {})
        except (Gone, BrokenPipeError):
            log.seek(0)
            pytest.skip(f"{path} does not start here: {log.read()[-500:]}")
        yield chromium


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _thrown(details: dict[str, Any]) -> str:
    return str(details.get("exception", {}).get("description") or details.get("text", ""))
