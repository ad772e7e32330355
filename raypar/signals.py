"""Ctrl-C, SIGTERM and SIGHUP: end a study in good order.

The first signal raises `Interrupted` in the main thread, or at the end of the outermost `uninterrupted`. That is lost
where it is raised in a destructor or in a callback at a fork, of which Ray's start has many: `raise_again` stands where
a study would go on. Later signals are ignored while everything is put away, except a second Ctrl-C: it kills all that
was started and exits. Signals that were ignored when the program started (nohup, a shell's background) stay ignored.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Iterator
from os import _exit  # not the one that stands in for it while a study file is loaded
from typing import IO

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
EXIT_CODES = tuple(128 + number for number in SIGNALS)
ABORT_SIGNAL = getattr(signal, "SIGUSR2", None)  # wakes the main thread; SIGUSR1 is Tune's
EXIT_NOBODY_READS = 141  # 128 + SIGPIPE
SHOW_CURSOR = b"\x1b[?25h\n"


class Interrupted(KeyboardInterrupt):
    """Signal that asks the program to end."""

    def __init__(self, signal_number: int | None = None) -> None:
        """Name the signal; None: the one that came, else Ctrl-C."""
        self.signal_number = signal_number or (_state.is_handling and _state.signal_number) or signal.SIGINT
        super().__init__(f"signal {self.signal_number}")

    @property
    def exit_code(self) -> int:
        return 128 + self.signal_number


class _State:
    """Signals of this process since `handle_signals` began."""

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
        """Return what is to be raised, once."""
        if self.was_raised or (self.signal_number is None and self.fault is None):
            return None
        self.was_raised = True
        # A fault is no Exception either: whoever catches those would try to clean up with what was lost.
        return KeyboardInterrupt(str(self.fault)) if self.signal_number is None else Interrupted(self.signal_number)


_state = _State()
_stderr_fd = 2


@contextlib.contextmanager
def handle_signals() -> Iterator[None]:
    """Handle signals as this module describes; after one, kill all child processes at the end.

    Does nothing when nested, or in a thread other than the main one.
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
        raise Interrupted(_state.signal_number) from error  # a library has raised its own
    finally:
        _state.was_raised = True  # nothing may interrupt the cleanup
        if _state.signal_number is not None:
            end_descendants()
        for number, old in before.items():
            signal.signal(number, old)
        _state.is_handling = False


def reinstall_handlers() -> None:
    """Take back the signals that a library has taken: `ray.init` takes SIGTERM."""
    if _state.is_handling and threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                signal.signal(number, _state.handle)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Defer a signal to the end of the outermost block. Without `handle_signals` Ctrl-C is Python's."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    state = _state
    state.depth += 1
    try:
        yield
    except Exception as error:
        # What fails now may fail because of the signal, which other processes got too.
        if state.depth == 1 and (pending := state.take()) is not None:
            raise pending from error
        raise
    finally:
        state.depth -= 1
    if state.depth == 0 and (pending := state.take()) is not None:
        raise pending


def is_closed(stream: IO[str]) -> bool:
    """Return whether nobody reads a pipe any more, as after ``| head``."""
    try:
        poll = select.poll()
        poll.register(stream.fileno(), 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    except (OSError, ValueError, AttributeError):  # no file, or a system without poll
        return False


def discard(stream: IO[str]) -> None:
    """Let a stream that nobody reads any more take what is still written, and drop it."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def was_interrupted() -> bool:
    """Return whether a signal came."""
    return _state.is_handling and _state.signal_number is not None


def raise_again() -> None:
    """Raise `Interrupted` where it was raised before, and yet the program goes on."""
    if was_interrupted() and _state.was_raised and _state.signal_number is not None:
        raise Interrupted(_state.signal_number)


def abort(error: Exception) -> bool:
    """Raise a KeyboardInterrupt in the main thread, from another thread; `abort_reason` then has the error.

    Returns:
        False where signals are not handled here or one came before; nothing is raised then.
    """
    state = _state
    if not state.is_handling or state.signal_number is not None or state.was_raised or ABORT_SIGNAL is None:
        return False
    state.fault = error
    signal.pthread_kill(threading.main_thread().ident or 0, ABORT_SIGNAL)
    return True


def abort_reason() -> Exception | None:
    """Return the error that `abort` has raised in the main thread, if it has."""
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
    """Kill all child processes and end this one, from any thread. Finished trials are in the journal."""
    with contextlib.suppress(OSError):
        if os.isatty(_stderr_fd):
            os.write(_stderr_fd, SHOW_CURSOR)  # a live view has hidden it
        os.write(_stderr_fd, message.encode())
    with contextlib.suppress(Exception):
        end_descendants()
    _exit(exit_code)


def is_running(pid: int) -> bool:
    """Return True for a process that has not ended, reaped or not."""
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def end_descendants(but: frozenset[int] = frozenset()) -> None:
    """Kill every process that descends from this one.

    Args:
        but: process ids of children to keep, with their descendants.
    """
    import psutil

    for _ in range(10):  # a process that is killed may just have started another
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
