"""Study files that can't be read or run."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from bad_cases import GOOD, HEAD, Case, at, flags, source


def _socket(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        here = Path.cwd()
        os.chdir(folder)  # a socket's address is short
        try:
            made.bind("bad.py")
        finally:
            os.chdir(here)


def _loop(folder: Path) -> None:
    (folder / "bad.py").symlink_to("other.py")
    (folder / "other.py").symlink_to("bad.py")


STUDY_FILES = (
    flags("no such file", "study god.py", "god.py", "no such file", "did you mean good.py?"),
    flags("no such folder", "study nowhere/good.py", "nowhere/good.py", "there is no folder nowhere"),
    flags("no suffix", "plan good", "good: there is no such file", "did you mean good.py?"),
    flags("a folder", "study .", "is a folder", "good.py"),
    Case("no Python file", ("plan", "study.txt"), ("study.txt", "not a Python file", ".py"), {"study.txt": GOOD}),
    flags("a path of a file's name below a file", "plan good.py/bad.py", "good.py/bad.py", "no folder good.py"),
    flags("a name that is too long", f"plan {'x' * 300}.py", "xxx.py", "can't be read: File name too long"),
    flags("an empty name", "plan " + "\N{NO-BREAK SPACE}.py", "no such file"),
    at("a folder that ends in .py", lambda folder: (folder / "bad.py").mkdir(), "is a folder"),
    at("a FIFO", lambda folder: os.mkfifo(folder / "bad.py"), "is no regular file", "a study file"),
    at("a socket", _socket, "is no regular file"),
    at("a device", lambda folder: (folder / "bad.py").symlink_to("/dev/full"), "is no regular file"),
    at("a link to nowhere", lambda folder: (folder / "bad.py").symlink_to("gone.py"), "no such file"),
    at("links in a circle", _loop, "can't be read", "links"),
    source("an empty file", "", "defines no Study", "study = Study("),
    source("a syntax error", "x = (\n", "line 1", "syntax error", "'(' was never closed"),
    source("a syntax error after a long line", f"x = {'1 + ' * 1000}\n", "line 1", "syntax error"),
    source("tabs and spaces", "if 1:\n\tx = 1\n        y = 2\n", "line 3", "tabs"),
    source("not UTF-8", b"# caf\xe9\nx = 1\n", "line 1", "byte 0xe9 is not UTF-8", "save the file as UTF-8"),
    source("UTF-16", GOOD.encode("utf-16"), "line 1", "is not UTF-8"),
    source("a null byte", b"x = 1\0\n", "null bytes"),
    source("nested too deeply", f"x = {'-' * 100_000}1\n", "nested too deeply"),
    source("many brackets", f"x = {'(' * 1000}\n", "syntax error", "too many nested"),
    source("endless recursion", "def f(): f()\nf()\n", "RecursionError", "line 1"),
    source("sys.exit", "import sys\nsys.exit(3)\n", "line 2", "SystemExit: 3", "leave sys.exit() out"),
    source("an exception", "x = 1 / 0\n", "line 1", "ZeroDivisionError", "fix that line"),
    source("an exception without a text", "raise BaseException\n", "line 1", "BaseException"),
    source(
        "an exception that can't be shown",
        "class E(Exception):\n    def __str__(self): raise ValueError\nraise E\n",
        "line 3",
        "str() failed",
    ),
    source("a long exception", "assert False, 'x' * 5000\n", "line 1", "AssertionError", " … "),
    source("a module that is missing", "import nowhere_to_be\n", "line 1", "install nowhere_to_be", "spelling"),
    source("a name that raypar lacks", "from raypar import Studdy\n", "line 1", "did you mean 'Study'?"),
    source("a workload that there is not", "from raypar.workloads import digit\n", "did you mean 'digits'?"),
    source("no study", GOOD.replace("study = Study", "asked = dict"), "defines no Study"),
    source("a list of studies", GOOD + "study = [study]\n", "is a list, not a Study"),
    source("the class itself", HEAD + "study = Study\n", "is a type, not a Study"),
    source("two studies", GOOD.replace("study = ", "one = ") + "two = Study(workload=digits)\n", "one, two", "`study`"),
    source("no workload", HEAD + "study = Study()\n", "line 4", "workload", "raypar.workloads"),
    source("a workload by position", HEAD + "study = Study(digits)\n", "line 4", "positional"),
    source("prints", "print('hello')\n" + HEAD + "study = Study(workload=digits, seed=-1)\n", "seed", out="hello\n"),
    source("goes elsewhere", "import os\nos.chdir('/')\n" + GOOD.replace("0.2", "0.1"), "duplicate values: 0.1"),
    Case(
        "a syntax error in a module beside it",
        ("plan", "bad.py"),
        ("helper_of_bad.py", "line 2", "syntax error"),
        {"bad.py": "import helper_of_bad\n", "helper_of_bad.py": "\nx = = 1\n"},
    ),
)
