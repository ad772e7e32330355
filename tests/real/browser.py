"""Pages in a real browser: chromium without a window, driven by chromedriver.

with browser() as chromium:
    page = chromium("http://127.0.0.1:5000/")               # or a Path
    page.until("document.querySelector('h1')")              # a script that becomes true
    page.run("document.title"), page.text()
    assert not page.errors()
"""

import contextlib
import json
import re
import shutil
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import requests

TIMEOUT_S = 120.0
FLAGS = (
    *("--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update"),
    "--no-sandbox",  # the pages are the project's own, and machines for tests often have no sandbox
)


class Page:
    """Page in a browser that has its own profile."""

    def __init__(self, driver, binary):
        options = {"binary": binary, "args": FLAGS}
        logs = {"browser": "ALL", "performance": "ALL"}
        match = {"goog:chromeOptions": options, "goog:loggingPrefs": logs}
        session = _post(f"{driver}/session", capabilities={"alwaysMatch": match})
        self._url = f"{driver}/session/{session['sessionId']}"
        self._errors: list[str] = []
        self.resize(1440, 1000)
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)  # without the focus, it would lose keys

    def go(self, where):
        """Load a page with its resources. Its scripts may still run afterwards; see `until`."""
        _post(f"{self._url}/url", url=where.absolute().as_uri() if isinstance(where, Path) else where)

    def run(self, script):
        """Return the value of a JavaScript expression, as JSON has it; wait for a promise."""
        how = {"returnByValue": True, "awaitPromise": True, "userGesture": True}
        answer = self.call("Runtime.evaluate", expression=script, **how)
        assert "exceptionDetails" not in answer, f"{script}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    def until(self, script, *, timeout_s=TIMEOUT_S):
        """Wait for an expression to become true."""
        before_s = time.monotonic() + timeout_s
        while not self.run(script):
            assert time.monotonic() < before_s, f"still not: {script}\n{self.errors()[:5]}\n{self.text()[:2000]}"
            time.sleep(0.1)

    def text(self):
        """Return the text in view, without hidden parts."""
        return str(self.run("document.body ? document.body.innerText : ''"))

    def resize(self, width, height, *, is_phone=False):
        """Set the view's size in CSS pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": is_phone}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def emulate(self, media="", **features):
        """Set media features, hyphens as underscores: ``prefers_color_scheme="dark"``; ``media="print"`` for paper."""
        pairs = [{"name": key.replace("_", "-"), "value": value} for key, value in features.items()]
        self.call("Emulation.setEmulatedMedia", media=media, features=pairs)

    def errors(self):
        """Return uncaught exceptions and console errors of the page's scripts, and what could not be loaded."""
        entries = _post(f"{self._url}/se/log", type="browser")
        self._errors += [entry["message"] for entry in entries if entry["level"] == "SEVERE"]
        return self._errors

    def requests(self):
        """Return the addresses requested by the page since the last call."""
        entries = [json.loads(entry["message"]) for entry in _post(f"{self._url}/se/log", type="performance")]
        events = [entry["message"] for entry in entries]
        return [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]

    def call(self, method, **params):
        """Call the DevTools protocol; https://chromedevtools.github.io/devtools-protocol lists its methods."""
        return _post(f"{self._url}/goog/cdp/execute", cmd=method, params=params)


def _post(address, **body):
    value = requests.post(address, json=body, timeout=TIMEOUT_S).json()["value"]
    assert not (isinstance(value, dict) and "error" in value), value["message"]
    return value


@contextlib.contextmanager
def browser():
    """Yield a function that opens a page; end all browsers afterwards. Skip the test if none starts."""
    driver, binary = shutil.which("chromedriver"), shutil.which("chromium") or shutil.which("google-chrome")
    if driver is None or binary is None:
        pytest.skip("no chromium and chromedriver on this machine")
    with tempfile.TemporaryFile("w+") as log, psutil.Popen([driver, "--port=0"], stdout=log, stderr=log) as process:
        try:
            before_s, started = time.monotonic() + TIMEOUT_S, None
            while not started:
                assert process.poll() is None and time.monotonic() < before_s
                log.seek(0)
                started = re.search(r"started successfully on port (\d+)", log.read())
                time.sleep(0.05)

            def open_page(where):
                page = Page(f"http://127.0.0.1:{started[1]}", binary)
                page.go(where)
                return page

            yield open_page
        finally:
            for each in [*process.children(recursive=True), process]:
                with contextlib.suppress(psutil.Error):
                    each.kill()
