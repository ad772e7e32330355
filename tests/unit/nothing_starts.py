"""The command line in this process, while nothing may be started, and what a folder holds, byte for byte."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests  # noqa: F401 - when it is imported, it binds a socket once, to learn about IPv6
import typer

from raypar.cli.app import app

STARTS = (
    "subprocess.Popen",
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.spawn",
    "os.startfile",
    "os.system",
    "pty.spawn",
    "socket.bind",
    "socket.connect",
    "webbrowser.open",
)
# Where nobody listens: a server that refuses.
NOWHERE = "http://127.0.0.1:9"
_UNSET = ("MLFLOW_TRACKING_URI", "RAY_ADDRESS", "RAYPAR_DATA_DIR", "XDG_CACHE_HOME")


class Started(BaseException):
    """Something was about to be started."""


@dataclass
class _Watch:
    is_on: bool = False
    is_hooked: bool = False
    seen: list[str] = field(default_factory=list)

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.is_on or event not in STARTS:
            return
        if event == "socket.connect" and arguments[1:] == (("127.0.0.1", 9),):
            return
        self.seen.append(f"{event}{arguments!r}"[:300])
        raise Started(self.seen[-1])


_WATCH = _Watch()


@contextlib.contextmanager
def nothing_starts() -> Iterator[None]:
    """No process is started, no port opened and no server called but one that refuses.

    Raises:
        AssertionError: at the end, where something tried.
    """
    if not _WATCH.is_hooked:  # an audit hook stays for good
        sys.addaudithook(_WATCH.hook)
        _WATCH.is_hooked = True
    _WATCH.seen.clear()
    _WATCH.is_on = True
    try:
        yield
    finally:
        _WATCH.is_on = False
        assert not _WATCH.seen, _WATCH.seen


@dataclass(frozen=True)
class Done:
    """What a command came to."""

    code: int
    out: str
    err: str


def raypar(arguments: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None) -> Done:
    """`raypar` in the folder, in this process; what it changes in the process is undone.

    Raises:
        AssertionError: it was about to start something.
    """
    with _as_it_was(folder, environment or {}), _output() as streams:
        with nothing_starts():
            try:
                typer.main.get_command(app).main(list(arguments), prog_name="raypar")
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        texts = []
        for stream in streams:
            stream.seek(0)
            texts.append(stream.read().decode("utf-8", "replace"))
    return Done(code, *texts)


@contextlib.contextmanager
def _as_it_was(folder: Path, environment: Mapping[str, str]) -> Iterator[None]:
    here, path, modules, variables = Path.cwd(), list(sys.path), set(sys.modules), dict(os.environ)
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        for key in _UNSET:
            os.environ.pop(key, None)
        os.environ.update({"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb", **environment})
        os.chdir(folder)
        yield
    finally:
        sys.dont_write_bytecode = writes
        os.chdir(here)
        os.environ.clear()
        os.environ.update(variables)
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            file = getattr(sys.modules[name], "__file__", None) or ""
            if name.startswith("raypar_study_") or file.startswith(f"{folder}{os.sep}"):
                del sys.modules[name]


@contextlib.contextmanager
def _output() -> Iterator[tuple[io.BufferedRandom, io.BufferedRandom]]:
    """Files that standard output and standard error go into: those of the process, not Python's alone."""
    with contextlib.ExitStack() as stack:
        files = tuple(stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
        before = (sys.stdout, sys.stderr)
        for stream in before:
            stream.flush()
        saved = [os.dup(fd) for fd in (1, 2)]
        try:
            for fd, file in zip((1, 2), files, strict=True):
                os.dup2(file.fileno(), fd)
            # Not to be closed with the wrappers.
            sys.stdout, sys.stderr = (
                io.TextIOWrapper(io.FileIO(fd, "w", closefd=False), encoding="utf-8", write_through=True)
                for fd in (1, 2)
            )
            yield files  # type: ignore[misc]
        finally:
            sys.stdout, sys.stderr = before
            for fd, original in zip((1, 2), saved, strict=True):
                os.dup2(original, fd)
                os.close(original)


def contents(folder: Path) -> dict[str, tuple[str, str]]:
    """Every path below a folder: what it is, with its permissions, and its bytes (their hash) or its target."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        kind = stat.filemode(status.st_mode)
        if stat.S_ISREG(status.st_mode):
            held = hashlib.sha256(path.read_bytes()).hexdigest()
        elif stat.S_ISLNK(status.st_mode):
            held = str(path.readlink())
        else:
            held = ""
        found[str(path.relative_to(folder))] = (kind, held)
    return found
