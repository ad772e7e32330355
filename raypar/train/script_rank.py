"""A script's process, as a fork of the rank that runs its command (see `raypar.train.script_launch`)."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import gc
import importlib.machinery
import io
import json
import os
import random
import signal
import sys
import tempfile
import threading
import traceback
import types
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from raypar import observe, search_path
from raypar.observe.start import start as start_observer


@dataclass(frozen=True)
class ScriptRank:
    """One process of a script.

    Attributes:
        argv: the script as given, and its arguments.
        orig_argv: ``sys.orig_argv``.
        environment: all of its variables.
        folder: in which it runs.
        mapped_bytes: resident bytes of files that the fork server has mapped. A fork begins without most of them.
    """

    argv: tuple[str, ...]
    orig_argv: tuple[str, ...]
    environment: Mapping[str, str]
    folder: Path
    mapped_bytes: int


def run(rank: ScriptRank, output: int) -> NoReturn:
    """Run a script in this process, a new fork, and end the process.

    Args:
        output: descriptor for its output.
    """
    code = 70
    try:
        _become(rank, output)
        code = _execute(rank)
    except BaseException:
        with contextlib.suppress(Exception):
            os.write(2, traceback.format_exc().encode(errors="replace"))
    finally:
        os._exit(code)


def _become(rank: ScriptRank, output: int) -> None:
    """Make this process like a new interpreter, as far as a script can see."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # The parent's objects stay, with descriptors that are closed here: nothing of theirs may run in this process.
    gc.freeze()
    for finalizer in [*weakref.finalize._registry]:  # type: ignore[attr-defined]
        finalizer.atexit = False
    os.dup2(output, 1)
    os.dup2(output, 2)
    for link in [*Path("/proc/self/fd").iterdir()]:
        if (fd := int(link.name)) > 2:
            with contextlib.suppress(OSError):  # that of the listing
                os.close(fd)
    os.environ.clear()
    os.environ.update(rank.environment)
    os.chdir(rank.folder)
    search_path.restore()
    if not os.environ.get("PYTHONSAFEPATH"):
        sys.path.insert(0, str(Path(rank.argv[0]).resolve().parent))
    sys.argv[:], sys.orig_argv[:] = rank.argv, rank.orig_argv
    tempfile.tempdir = None
    for name, fd in (("stdout", 1), ("stderr", 2)):
        before: io.TextIOWrapper = getattr(sys, f"__{name}__")
        raw = io.FileIO(fd, "w", closefd=False)
        raw.name = f"<{name}>"
        text = io.TextIOWrapper(raw, before.encoding, before.errors, write_through=True)
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)
    _reseed()
    _set_threads()
    try:
        recorder = start_observer(os.environ[observe.FOLDER], json.loads(os.environ[observe.SETTINGS]))
        recorder.mapped_bytes = rank.mapped_bytes
    except Exception as error:
        print(f"raypar: this process is not observed: {type(error).__name__}: {error}", file=sys.stderr)


def _reseed() -> None:
    """Seed the generators of imported modules from the system, as these do on import."""
    random.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


def _set_threads() -> None:
    """Set the numbers of threads that the imported libraries of linear algebra would have read from the environment."""
    from threadpoolctl import ThreadpoolController

    if number := os.environ.get("OMP_NUM_THREADS"):
        sys.modules["torch"].set_num_threads(int(number))
        number = os.environ.get("OPENBLAS_NUM_THREADS", number)
        ThreadpoolController().select(internal_api="openblas").limit(limits=int(number))


def _execute(rank: ScriptRank) -> int:
    """Run the script as ``__main__``, up to the end of what it has left to run; return the exit code."""
    path = str(Path.cwd() / rank.argv[0])
    main = types.ModuleType("__main__")
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    names: dict[str, Any] = {"__file__": path, "__cached__": None, "__loader__": loader, "__builtins__": builtins}
    vars(main).update(names, __annotations__={})
    sys.modules["__main__"] = main
    code = 0
    try:
        exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), vars(main))
    except SystemExit as error:
        code = _exit_code(error)
    except BaseException as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # without this function
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    # As at the end of an interpreter (Py_FinalizeEx).
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    return code


def _exit_code(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    print(error.code, file=sys.stderr)
    return 1
