"""Ctrl-C and its like: the first one ends a study where nothing is lost by it, the second one ends everything at once.

SIGINT, SIGTERM and SIGHUP are taken alike; the exit code, 128 + the signal's number, tells which it was. The first
raises `Interrupted` in the main thread, or, inside `uninterrupted`, at its end. From then on nothing is raised, so that
what has to be put away can be. The second is taken by a thread of its own, since the main thread may be waiting in
foreign code: it ends all processes that were started from here, and then this one. What was ignored when the program
started (nohup, a shell's background) stays ignored. What another thread finds out that ends the study (`break_off`) is
raised in the main thread in the same way.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

BREAK_OFF = getattr(signal, "SIGUSR2", None)  # wakes the main thread; SIGUSR1 is Tune's
SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
EXIT_CODES = tuple(128 + number for number in SIGNALS)
# One request may arrive more than once: `timeout` signals its child and then the child's group, a closed terminal sends
# SIGHUP by itself and through the shell.
SAME_REQUEST_S = 0.5


class Interrupted(KeyboardInterrupt):
    """The study was asked to stop; every trial that ended has been told."""

    def __init__(self, signal_number: int = signal.SIGINT) -> None:
        super().__init__(f"signal {signal_number}")
        self.signal_number = signal_number

    @property
    def exit_code(self) -> int:
        return 128 + self.signal_number


class Broken(KeyboardInterrupt):
    """What the work stands on is gone, as `error` says.

    No Exception: who catches those would ask it to tidy up. Ray lets nothing but a KeyboardInterrupt out of its calls,
    and makes a new one of it, so that `what_broke` is to be asked of any.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class _Interruptions:
    """What has been asked of this process since `heeded`; one for the process, as signals are."""

    def __init__(self) -> None:
        self.is_heeded = False
        self.depth = 0  # of `uninterrupted`
        self.noted: int | None = None
        self.fault: Broken | None = None
        self.was_raised = False
        self.at_once: list[Callable[[], object]] = []

    def note(self, number: int, *_: object) -> None:
        """The handler; what a second one does is up to the thread."""
        if self.noted is None:
            self.noted = number
        if self.depth == 0:
            self.raise_if_noted()

    def wake(self, *_: object) -> None:
        """The handler of `BREAK_OFF`."""
        if self.depth == 0:
            self.raise_if_noted()

    def pending(self) -> BaseException | None:
        """What is to be raised and was not yet."""
        if self.was_raised:
            return None
        return Interrupted(self.noted) if self.noted is not None else self.fault

    def raise_if_noted(self) -> None:
        if (error := self.pending()) is not None:
            self.was_raised = True
            raise error

    def leave_at_once(self, exit_code: int, last_words: str = "") -> None:
        for call in self.at_once:
            with contextlib.suppress(Exception):
                call()
        if last_words:
            with contextlib.suppress(OSError):
                os.write(2, last_words.encode())
        with contextlib.suppress(Exception):
            end_descendants()
        os._exit(exit_code)


_now = _Interruptions()


@contextlib.contextmanager
def heeded(*, ends_descendants: bool = True) -> Iterator[None]:
    """Take signals as this module says, for a program's whole work; in a thread that is not the main one, do nothing.

    Args:
        ends_descendants: where a signal came, nothing that was started from this process outlives this.
    """
    global _now
    if threading.current_thread() is not threading.main_thread() or _now.is_heeded:
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    before = {number: old for number, old in before.items() if old not in (signal.SIG_IGN, None)}
    _now = _Interruptions()
    _now.is_heeded = True
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    old_fd = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    watch = threading.Thread(target=_watch, args=(ours, _now, frozenset(before)), daemon=True)
    watch.start()
    for number in before:
        signal.signal(number, _now.note)
    old_wake = signal.signal(BREAK_OFF, _now.wake) if BREAK_OFF else None
    try:
        yield
    finally:
        _now.was_raised = True  # nothing more is: what follows puts away
        if _now.noted is not None and ends_descendants:
            end_descendants()
        for number, old in before.items():
            signal.signal(number, old)
        if BREAK_OFF:
            signal.signal(BREAK_OFF, old_wake)
        signal.set_wakeup_fd(old_fd)
        theirs.close()
        watch.join()
        ours.close()
        _now.is_heeded = False


def break_off(error: Exception) -> bool:
    """From another thread: raise `Broken` by the error in the main thread, as a signal would raise `Interrupted`.

    False where signals are not heeded, or one came before: nothing is raised then.
    """
    mine = _now
    if not mine.is_heeded or mine.noted is not None or mine.was_raised or BREAK_OFF is None:
        return False
    mine.fault = mine.fault or Broken(error)
    signal.pthread_kill(threading.main_thread().ident or 0, BREAK_OFF)
    return True


def give_up(error: Exception) -> None:
    """From another thread, where `break_off` did not help since the main thread waits in foreign code: end this process
    and all that it started. What was told is kept."""
    _now.leave_at_once(1, f"error: {error}\nbroke off; `raypar resume` runs the rest\n")


def what_broke() -> Exception | None:
    """What `break_off` has raised in the main thread, where it has."""
    return _now.fault.error if _now.is_heeded and _now.fault and _now.was_raised and _now.noted is None else None


def reheed() -> None:
    """Take back the handlers that a library has taken (`ray.init` takes SIGTERM's)."""
    if _now.is_heeded and threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                signal.signal(number, _now.note)


@contextlib.contextmanager
def uninterrupted(*, then_raise: bool = True) -> Iterator[None]:
    """What must not be torn: a signal is noted, and raised at the end of the outermost; `then_raise`: or not at all.

    Harmless where signals are not heeded: Ctrl-C is then what it always is.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    mine = _now
    mine.depth += 1
    try:
        yield
    except Exception as error:
        mine.depth -= 1
        pending = mine.pending()
        if mine.depth == 0 and then_raise and pending is not None:
            mine.was_raised = True
            raise pending from error  # what fails now may fail for the signal, which others got too
        raise
    except BaseException:
        mine.depth -= 1
        raise
    mine.depth -= 1
    if mine.depth == 0 and then_raise:
        mine.raise_if_noted()


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Inside `uninterrupted`: a wait that may be torn. Raises `Interrupted` at once if a signal is noted already."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    mine = _now
    depth, mine.depth = mine.depth, 0
    try:
        mine.raise_if_noted()
        yield
    finally:
        mine.depth = depth


def interrupted_by() -> int | None:
    """The number of the first signal that came; None as long as none did."""
    return _now.noted if _now.is_heeded else None


@contextlib.contextmanager
def when_leaving_at_once(call: Callable[[], object]) -> Iterator[None]:
    """While inside: what a second signal does before it ends this process. Short, and from another thread."""
    mine = _now
    mine.at_once.append(call)
    try:
        yield
    finally:
        mine.at_once.remove(call)


def end_descendants(but: frozenset[int] = frozenset()) -> None:
    """Kill every process that descends from this one, save those and theirs."""
    import psutil

    me = psutil.Process()
    for _ in range(10):  # what is killed may just have started another
        found = [child for child in me.children() if child.pid not in but]
        for child in list(found):
            with contextlib.suppress(psutil.Error):
                found.extend(child.children(recursive=True))
        alive = [process for process in found if _is_alive(process)]
        if not alive:
            return
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(alive, timeout=1.0)


def _is_alive(process: object) -> bool:
    import psutil

    assert isinstance(process, psutil.Process)
    with contextlib.suppress(psutil.Error):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def _watch(line: socket.socket, mine: _Interruptions, heeded_signals: frozenset[int]) -> None:
    """The thread that gets the number of each signal, whatever the main thread does."""
    first_s: float | None = None
    while numbers := line.recv(64):
        for number in numbers:
            if number not in heeded_signals:
                continue
            now_s = time.monotonic()
            if first_s is None:
                first_s = now_s
            # A hang-up asks once, however often it comes.
            elif number != getattr(signal, "SIGHUP", None) and now_s - first_s > SAME_REQUEST_S:
                mine.leave_at_once(128 + (mine.noted or signal.SIGINT))
