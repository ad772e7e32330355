"""Orderly end of a study on Ctrl-C, SIGTERM and SIGHUP.

The first signal raises `Interrupted` in the main thread, or at the end of the outermost `uninterrupted`. Python drops
an exception raised in a destructor or a fork callback, of which Ray's start has many, so a study calls `raise_again`
between its steps. Later signals are ignored during cleanup, except a second Ctrl-C, which kills all child processes and
exits. Signals that were ignored when the program started (nohup, a shell's background) stay ignored.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Iterator
from os import _exit  # the original: it is replaced while a study file is loaded
from pathlib import Path
from typing import IO

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
OUT_OF_TIME = getattr(signal, "SIGUSR1", 10)  # the number of a study that stops because its machines are needed back
EXIT_CODES = tuple(128 + number for number in (*SIGNALS, OUT_OF_TIME))
ABORT_SIGNAL = getattr(signal, "SIGUSR2", None)  # wakes the main thread; SIGUSR1 is Tune's
EXIT_NOBODY_READS = 141  # 128 + SIGPIPE
SHOW_CURSOR = b"\x1b[?25h\n"


class Interrupted(KeyboardInterrupt):
    """Signal that asks the program to end."""

    def __init__(self, signal_number: int | None = None) -> None:
        """Store the signal; None: the one received, else SIGINT."""
        self.signal_number = signal_number or (_state.is_handling and _state.signal_number) or signal.SIGINT
        super().__init__(f"signal {self.signal_number}")

    @property
    def exit_code(self) -> int:
        return 128 + self.signal_number


class _State:
    """Signals received by this process since `handle_signals` began."""

    def __init__(self) -> None:
        self.is_handling = False
        self.depth = 0  # of `uninterrupted`
        self.signal_number: int | None = None
        self.fault: Exception | None = None
        self.was_raised = False

    def handle(self, number: int, *_: object) -> None:
        if number in SIGNALS:
            if self.signal_number is not None and number == signal.SIGINT:
                exit_now(128 + self.signal_number)
            self.signal_number = self.signal_number or number
        if self.depth == 0 and (error := self.take()) is not None:
            raise error

    def take(self) -> KeyboardInterrupt | None:
        """Return the exception to raise; None if there is none or it was raised before."""
        if self.was_raised or (self.signal_number is None and self.fault is None):
            return None
        self.was_raised = True
        # A fault is a KeyboardInterrupt too: handlers of Exception would clean up with the lost connection.
        return KeyboardInterrupt(str(self.fault)) if self.signal_number is None else Interrupted(self.signal_number)


_state = _State()
_stderr_fd = 2


@contextlib.contextmanager
def handle_signals() -> Iterator[None]:
    """Handle signals as described above; after a signal, kill all child processes at the end.

    Does nothing if nested, or outside of the main thread.
    """
    global _state
    if threading.current_thread() is not threading.main_thread() or _state.is_handling:
        yield
        return
    _state = _State()
    _state.is_handling = True
    numbers = SIGNALS if ABORT_SIGNAL is None else (*SIGNALS, ABORT_SIGNAL)
    before = {n: signal.signal(n, _state.handle) for n in numbers if signal.getsignal(n) not in (signal.SIG_IGN, None)}
    try:
        yield
    except KeyboardInterrupt as error:
        if isinstance(error, Interrupted) or _state.signal_number is None:
            raise
        raise Interrupted(_state.signal_number) from error  # raised by a library
    finally:
        _state.was_raised = True  # nothing may interrupt the cleanup
        if _state.signal_number is not None:
            end_descendants()
        for number, old in before.items():
            signal.signal(number, old)
        _state.is_handling = False


def reinstall_handlers() -> None:
    """Reinstall handlers that a library has replaced: `ray.init` takes SIGTERM."""
    if _state.is_handling and threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                signal.signal(number, _state.handle)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Defer a signal to the end of the outermost block. Without `handle_signals`, Ctrl-C acts as in plain Python."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    state = _state
    state.depth += 1
    try:
        yield
    except Exception as error:
        # The error may be a result of the signal, which other processes received too.
        if state.depth == 1 and (pending := state.take()) is not None:
            raise pending from error
        raise
    finally:
        state.depth -= 1
    if state.depth == 0 and (pending := state.take()) is not None:
        raise pending


def is_closed(stream: IO[str]) -> bool:
    """Return True if a pipe's reader has ended, as after ``| head``."""
    try:
        poll = select.poll()
        poll.register(stream.fileno(), 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    except (OSError, ValueError, AttributeError):  # not a file, or a system without poll
        return False


def discard(stream: IO[str]) -> None:
    """Discard all further output to a stream whose reader has ended."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def was_interrupted() -> bool:
    """Return True if a signal was received."""
    return _state.is_handling and _state.signal_number is not None


def raise_again() -> None:
    """Raise `Interrupted` again if it was raised before but got lost."""
    if was_interrupted() and _state.was_raised and _state.signal_number is not None:
        raise Interrupted(_state.signal_number)


def abort(error: Exception) -> bool:
    """Raise a KeyboardInterrupt in the main thread from another thread; `abort_reason` returns the error.

    Returns:
        False if nothing is raised: signals are not handled here, or one was received before.
    """
    state = _state
    if not state.is_handling or state.signal_number is not None or state.was_raised or ABORT_SIGNAL is None:
        return False
    state.fault = error
    signal.pthread_kill(threading.main_thread().ident or 0, ABORT_SIGNAL)
    return True


def abort_reason() -> Exception | None:
    """Return the error of `abort`, if it has interrupted the main thread."""
    state = _state
    return state.fault if state.is_handling and state.was_raised and state.signal_number is None else None


@contextlib.contextmanager
def redirected_stderr(terminal_fd: int) -> Iterator[None]:
    """Let `exit_now` write to this file descriptor while standard error goes elsewhere."""
    global _stderr_fd
    before, _stderr_fd = _stderr_fd, terminal_fd
    try:
        yield
    finally:
        _stderr_fd = before


def exit_now(exit_code: int, message: str = "") -> None:
    """Kill all child processes and exit, from any thread. Finished trials are in the journal."""
    with contextlib.suppress(OSError):
        if os.isatty(_stderr_fd):
            os.write(_stderr_fd, SHOW_CURSOR)  # the live view hides it
        os.write(_stderr_fd, message.encode())
    with contextlib.suppress(Exception):
        end_descendants()
    _exit(exit_code)


def is_running(pid: int) -> bool:
    """Return True for a process that has not ended; zombies have."""
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def is_stopped(pid: int) -> bool:
    """Return True for a process that a signal or a debugger has stopped."""
    import psutil

    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.NoSuchProcess:
        return False


def child_pids() -> set[int] | None:
    """Return the ids of this process's children, in 0.1 ms where psutil takes 3; None if the kernel lists none."""
    lists = [*Path("/proc/self/task").glob("*/children")]
    children: set[int] = set()
    for path in lists:
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            children.update(map(int, path.read_text().split()))
    return children if lists else None


def end_descendants(but: frozenset[int] = frozenset()) -> None:
    """Kill every process that descends from this one.

    Args:
        but: ids of child processes to keep, with their descendants.
    """
    import psutil

    for _ in range(10):  # a killed process may just have started another
        family = [child for child in psutil.Process().children() if child.pid not in but]
        for child in list(family):
            with contextlib.suppress(psutil.Error):
                family += child.children(recursive=True)
        running = [process for process in family if is_running(process.pid)]
        if not running:
            return
        for process in running:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(running, timeout=1.0)
