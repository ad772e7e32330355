"""The command line in this process, while nothing may be started, and what a folder holds, byte for byte."""

import contextlib
import hashlib
import os
import stat
import sys
from typing import NamedTuple
from unittest.mock import patch

import requests  # noqa: F401 - when it is imported, it binds a socket once, to learn about IPv6
from typer.testing import CliRunner

from raypar.cli.app import app

STARTS = {
    *("os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.startfile", "os.system", "pty.spawn"),
    *("socket.bind", "socket.connect", "subprocess.Popen", "webbrowser.open"),
}
# Where nobody listens: a server that refuses.
NOWHERE = "http://127.0.0.1:9"
_UNSET = ("MLFLOW_TRACKING_URI", "RAY_ADDRESS", "RAYPAR_DATA_DIR", "XDG_CACHE_HOME")


class Started(BaseException):
    """Something was about to be started."""


_seen = None  # what tried to start; None: nobody looks


def _hook(event, arguments):
    if _seen is None or event not in STARTS:
        return
    if event == "socket.connect" and arguments[1:] == (("127.0.0.1", 9),):
        return
    _seen.append(f"{event}{arguments!r}"[:300])
    raise Started(_seen[-1])


sys.addaudithook(_hook)  # it stays for good


@contextlib.contextmanager
def nothing_starts():
    """No process is started, no port opened and no server called but one that refuses.

    Raises:
        AssertionError: at the end, where something tried.
    """
    global _seen
    seen = _seen = []
    try:
        yield
    finally:
        _seen = None
        assert not seen, seen


class Done(NamedTuple):
    """What a command came to."""

    code: int
    out: str
    err: str


def raypar(arguments, folder, environment=None):
    """`raypar` in the folder, in this process; what it changes in the process is undone.

    Raises:
        AssertionError: it was about to start something.
    """
    with _as_it_was(folder, environment or {}), nothing_starts():
        done = CliRunner().invoke(app, list(arguments), prog_name="raypar")
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
    return Done(done.exit_code, done.stdout, done.stderr)


@contextlib.contextmanager
def _as_it_was(folder, environment):
    modules, same = set(sys.modules), patch.multiple(sys, path=list(sys.path), dont_write_bytecode=True)
    with contextlib.chdir(folder), patch.dict(os.environ), same:
        for key in _UNSET:
            os.environ.pop(key, None)
        os.environ.update({"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb", **environment})
        yield
    for name in set(sys.modules) - modules:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if name.startswith("raypar_study_") or file.startswith(f"{folder}{os.sep}"):
            del sys.modules[name]


def contents(folder):
    """Every path below a folder: what it is, with its permissions, and its bytes (their hash) or its target."""
    by_path = {}
    for path in sorted(folder.rglob("*")):
        mode, content = path.lstat().st_mode, ""
        if stat.S_ISREG(mode):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        elif stat.S_ISLNK(mode):
            content = str(path.readlink())
        by_path[str(path.relative_to(folder))] = (stat.filemode(mode), content)
    return by_path
