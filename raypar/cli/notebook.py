"""`Study.run`: a study that runs in a process of its own, and is shown in a notebook or on a terminal.

The process runs the study like ``raypar study``. It sends its events, which the notebook shows, and ends with the
notebook: on an interrupt, and when the notebook's connection is lost.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypar.cli import common
from raypar.cli.flags import words_of
from raypar.cli.study import Beginning, load, options_here, print_outcome
from raypar.errors import RayparError, cut, message_of, suggest
from raypar.execution.flags import RunFlags
from raypar.run.runner import Notice
from raypar.signals import handle_signals, uninterrupted
from raypar.study.pickled import write_study
from raypar.study.study import Study

if TYPE_CHECKING:
    from rich.console import Console

    from raypar.execution.plan import ExecutionPlan
    from raypar.reporting.frame import StudyFrame
    from raypar.reporting.live import LiveView
    from raypar.run.runner import Listener

END_S = 60.0  # for the process to end after an interrupt; then it is killed
POLL_S = 0.5
REFUSED = {"dry_run": "`raypar plan FILE` shows the plan", "part": "`raypar study FILE` runs a part"}


def run_study(study: Study, **flags: Any) -> StudyFrame:
    """Run a study in a process of its own, and show its progress and its report; see `Study.run`."""
    from raypar.execution.frame import frame_of_study

    given = _flags(flags)
    folder = Path.cwd()
    file = write_study(study, folder)
    here, there = multiprocessing.Pipe()
    command = [sys.executable, "-c", f"from {__name__} import main; main({there.fileno()})"]
    # A session of its own: an interrupt of the notebook's process group reaches it only through `_interrupt`.
    with subprocess.Popen(
        command, pass_fds=[there.fileno()], stdin=subprocess.DEVNULL, env=_environment(), start_new_session=True
    ) as process:
        there.close()
        try:
            here.send(RunRequest(file, given))
            interrupted = _follow(here, process)
        finally:
            here.close()  # if it still runs, it ends now
            _end(process)
    if interrupted:
        raise KeyboardInterrupt
    return frame_of_study(study.name, folder, given.tracking_uri)


@dataclass(frozen=True)
class RunRequest:
    """Study file to run, and its flags."""

    file: Path
    flags: RunFlags


@dataclass(frozen=True)
class Failed:
    """End of an execution that could not begin."""

    message: str
    hint: str


def _flags(given: Mapping[str, Any]) -> RunFlags:
    """Return the flags. Raises RayparError for others than those of ``raypar study``."""
    names = [each.name for each in fields(RunFlags)]
    for name, value in given.items():
        if name not in names:
            raise RayparError(f"study.run({name}=…): unknown flag", hint=suggest(name, names))
        if value and name in REFUSED:
            raise RayparError(f"study.run({name}=…): not in Python", hint=REFUSED[name])
    if (address := str(given.get("address") or "")).startswith(("http://", "https://")):
        hint = "`raypar study FILE --address` submits a study; here, name a Ray: auto or host:port"
        raise RayparError(f"study.run(address={address!r}): is a dashboard", hint=hint)
    values = {"set": (), **given}
    settings = [values["set"]] if isinstance(values["set"], str) else values["set"]
    return RunFlags(**{**values, "set": tuple(settings)})


def _environment() -> dict[str, str]:
    """Return the environment, with the folders that this process imports from besides those of its Python."""
    of_python = tuple({sys.prefix, sys.base_prefix, sys.exec_prefix})
    folders = [folder for folder in sys.path if folder and not folder.startswith(of_python)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}


def _follow(connection: Connection, process: subprocess.Popen[bytes]) -> bool:
    """Show what the process sends until it ends; return whether it was interrupted. Raises its RayparError."""
    from raypar.reporting.notebook import COLUMNS, open_notebook
    from raypar.reporting.text import TerminalConsole

    notebook = open_notebook()
    options: dict[str, Any] = {"width": COLUMNS, "force_jupyter": False} if notebook else {}
    output, was_interrupted = _Output(notebook, TerminalConsole(**options)), False
    with contextlib.closing(output):
        while True:
            try:
                match message := _next(connection, output):
                    case None:
                        return was_interrupted
                    case Failed(text, hint):
                        raise RayparError(text, hint=hint)
                output.show(message)
            except KeyboardInterrupt:
                if was_interrupted:
                    raise
                was_interrupted = True
                common.say(output.console, "interrupted: ending the trials that run")
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGINT)


def _next(connection: Connection, output: _Output) -> Any:
    """Return the next message; None at the end."""
    with contextlib.suppress(EOFError, ConnectionError):
        while not connection.poll(POLL_S):
            output.refresh()
        return connection.recv()
    return None


class _Output:
    """Output of a run, in a cell of the notebook or, without one, on the console."""

    def __init__(self, notebook: Any, console: Console) -> None:
        self._notebook, self.console = notebook, console
        self._view: LiveView | None = None

    def show(self, message: Any) -> None:
        """Show a message: its text, or a change of the view."""
        from raypar.reporting.notebook import CellDisplay, Printed

        match message:
            case Beginning():
                display = partial(CellDisplay, self._notebook) if self._notebook else None
                self._view = message.view(self.console, display).__enter__()
            case Printed() if self._notebook:
                self.close()
                self._notebook.display.display(message)
            case Printed():
                self.close()
                self.console.print(message.text, end="", highlight=False, soft_wrap=True)
            case Notice(text) if self._view is None:
                common.say(self.console, text)
            case _ if self._view is not None:
                self._view(message)
                self.refresh()

    def refresh(self) -> None:
        if self._view is not None and self._notebook:
            self._view.refresh()

    def close(self) -> None:
        """End the view."""
        if self._view is not None:
            self._view.__exit__()
            self._view = None


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait for the end of the process, which has been asked for; kill it with all of its own after a while."""
    with uninterrupted():
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
            return
        import psutil

        with contextlib.suppress(psutil.NoSuchProcess):
            family = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            for child in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()


def main(descriptor: int) -> None:
    """Run the study that the connection asks for, and send what happens."""
    connection, lock = Connection(descriptor), threading.Lock()

    def send(message: object) -> None:
        with lock, contextlib.suppress(OSError):  # the notebook may have ended
            connection.send(message)

    request: RunRequest = connection.recv()
    sys.argv = ["raypar", "study", request.file.name, *words_of(request.flags)]
    with handle_signals():
        threading.Thread(target=_end_with, args=[connection], daemon=True).start()
        try:
            _run(request, send)
        except RayparError as error:
            send(Failed(error.message, error.hint or ""))
        except Exception as error:
            send(Failed(f"{type(error).__name__}: {cut(message_of(error))}", ".raypar/logs has more"))
        except KeyboardInterrupt:
            pass


def _end_with(connection: Connection) -> None:
    """End this process like Ctrl-C once the notebook's side of the connection is closed."""
    with contextlib.suppress(EOFError, OSError):
        connection.poll(None)
        connection.recv()
    os.kill(os.getpid(), signal.SIGTERM)


def _run(request: RunRequest, send: Callable[[object], None]) -> None:
    """Execute the study and send its report."""
    from raypar.execution.execute import execute, new_log_dir
    from raypar.reporting.notebook import Printed

    loaded = load(request.file, request.flags)
    options = options_here(request.flags)
    log_dir = new_log_dir(options.project_dir)

    @contextlib.contextmanager
    def view(plan: ExecutionPlan) -> Iterator[Listener]:
        send(Beginning.of(options, plan))
        yield send

    with common.quiet(log_dir / common.DRIVER_LOG):
        outcome = execute(loaded, options, log_dir, view, send)
        with uninterrupted():
            send(Printed.of(lambda console: print_outcome(console, outcome, "study.run()")))
    if outcome.broke_off:
        raise outcome.broke_off
