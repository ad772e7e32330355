"""Locks between the studies of a machine.

At any time, a study has one execution, and a core or GPU has one study. A lock is a file in a folder that all users of
the machine can write to. It is held with `flock(2)`, so it is released however its process ends. The file's text names
the holder.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import hashlib
import json
import os
import shlex
import stat
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Self

from raypar import units
from raypar.errors import RayparError, cut
from raypar.gpus import Gpu
from raypar.masking import masked
from raypar.run.runner import Listener, Notice
from raypar.signals import is_running
from raypar.train.affinity import Core

# All users must use the same folder, so it is not in TMPDIR.
FOLDER = Path("/tmp/.raypar-locks")
FOLDER_VARIABLE = "RAYPAR_LOCK_DIR"
POLL_S = 1.0
WAITING = {"core": "waiting for cores: {}", "GPU": "waiting for GPUs: {}"}
INSTEAD_OF_WAITING = "; `raypar study --share-machine` would run at the same time"
PRESENT = "present-"  # name prefix of the locks of studies that run trials
_MAX_TEXT_BYTES = 4096
_MAX_CHARS = 500


@dataclass(frozen=True)
class Holder:
    """Process that holds a lock: its study, its user and its command line."""

    study: str
    pid: int
    user: str
    command: str

    @classmethod
    def here(cls, study: str, command: Sequence[str]) -> Holder:
        """Return this process."""
        return cls(study, os.getpid(), _user(), cut(masked(shlex.join(command)), _MAX_CHARS))

    @classmethod
    def parse(cls, text: bytes) -> Self | None:
        """Return the holder that a lock file names, if any. The text is not trusted: other users can write it."""
        try:
            stored = json.loads(text)
            values = {name.name: stored[name.name] for name in fields(cls)}
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        pid = values.pop("pid")
        if type(pid) is not int or not 0 < pid < 2**31 or not all(isinstance(value, str) for value in values.values()):
            return None
        return cls(pid=pid, **{name: _printable(value) for name, value in values.items()})

    @property
    def process(self) -> str:
        return f"process {self.pid}" + ("" if self.user == _user() else f" of {self.user}")

    def __str__(self) -> str:
        return f"study `{self.study}` ({self.process})"


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user may have no name
        return str(os.getuid())


def _printable(text: str) -> str:
    return cut("".join(character for character in text if character.isprintable()), _MAX_CHARS)


class Lock:
    """Named lock that one process at a time can hold."""

    def __init__(self, name: str) -> None:
        self._name, self._fd = name, -1

    def acquire(self) -> bool:
        """Take the lock; return False if another process has it. Raises RayparError without a usable folder."""
        while True:
            fd = _open(self._name, create=True)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                return False
            if os.fstat(fd).st_nlink:
                self._fd = fd
                return True
            os.close(fd)  # its previous holder removed the file meanwhile

    def sign(self, holder: Holder) -> None:
        """Write the holder into the lock file."""
        self._write(json.dumps(asdict(holder)).encode())

    def release(self, *, remove: bool = False) -> None:
        """Release the lock if it is held here. With `remove`, delete its file."""
        if self._fd >= 0:
            self._write(b"")
            if remove:
                with contextlib.suppress(OSError):  # another user's
                    (_folder() / self._name).unlink()
            os.close(self._fd)
            self._fd = -1

    def _write(self, text: bytes) -> None:
        with contextlib.suppress(OSError):  # disk full, or not writable for us: it is locked anyway
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, text, 0)

    def holder(self) -> Holder | None:
        """Return the running process that signed it; None: there is none, or the file can't be read."""
        try:
            fd = _open(self._name, create=False)
        except RayparError:  # tampering with the folder must not end a study
            return None
        if fd < 0:
            return None
        try:
            signed = Holder.parse(os.pread(fd, _MAX_TEXT_BYTES, 0))
        finally:
            os.close(fd)
        return signed if signed and is_running(signed.pid) else None


def _folder() -> Path:
    return Path(os.environ.get(FOLDER_VARIABLE) or FOLDER)


def _open(name: str, *, create: bool) -> int:
    """Open a lock's file; return -1 if it doesn't exist and `create` is False.

    Refuses symbolic links and files with several hard links, which other users could have put into the folder.
    """
    folder = _folder()
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            folder.chmod(0o1777)  # regardless of the umask
        folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fd = _open_in(folder_fd, name, create)
        finally:
            os.close(folder_fd)
        if fd < 0:
            return fd
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            os.close(fd)
            raise OSError(0, f"{name} is not a regular file")
    except OSError as error:
        hint = f"have that fixed by its owner, or name another folder for all users in {FOLDER_VARIABLE}"
        raise RayparError(f"{folder}: studies can't lock cores there: {error.strerror}", hint=hint) from error
    return fd


def _open_in(folder_fd: int, name: str, create: bool) -> int:
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # children that outlive this process must not hold the lock
    while True:
        # First without O_CREAT, with which Linux refuses others' files in such a folder (fs.protected_regular).
        with contextlib.suppress(FileNotFoundError):
            try:
                return os.open(name, flags | os.O_RDWR, dir_fd=folder_fd)
            except PermissionError:  # its owner was killed before making it writable for others
                return os.open(name, flags | os.O_RDONLY, dir_fd=folder_fd)
        if not create:
            return -1
        with contextlib.suppress(FileExistsError):
            fd = os.open(name, flags | os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=folder_fd)
            os.fchmod(fd, 0o666)  # regardless of the umask
            return fd


@contextlib.contextmanager
def one_execution(me: Holder, store: str) -> Iterator[None]:
    """Hold the lock of a study's executions on this machine.

    Args:
        store: store of its results. Studies in different stores are different studies.

    Raises:
        RayparError: another process runs the study.
    """
    lock = _execution_lock(me.study, store)
    if not lock.acquire():
        by = lock.holder()
        who = f"{by.process} (`{by.command}`)" if by else "another process"
        hint = "wait until it ends, or stop it: finished trials are kept"
        raise RayparError(f"study `{me.study}` is already running in {who}", hint=hint)
    try:
        lock.sign(me)
        yield
    finally:
        lock.release(remove=True)


def _execution_lock(study: str, store: str) -> Lock:
    return Lock("study-" + hashlib.sha256(f"{store}\n{study}".encode()).hexdigest()[:16])


@contextlib.contextmanager
def leased_cores(me: Holder, machine: Sequence[Core], notice: Listener, *, share: bool = False) -> Iterator[None]:
    """Hold all cores of this machine that a study may use, as long as the context lasts.

    Trials disturb each other through caches and memory even on separate cores, so a study holds all of them.

    Args:
        machine: cores that the study may use.
        notice: called with a message that names the studies that this one waits for.
        share: hold only the free cores, without waiting for others.

    Raises:
        RayparError: this machine has no usable folder for locks.
    """
    names, least = [_core_name(core.number) for core in machine], 0 if share else len(machine)
    with _leased(me, "core", names, notice, least=least, most=len(machine)):
        yield


@contextlib.contextmanager
def leased_gpus(
    me: Holder, machine: Sequence[Gpu], least: int, most: int, notice: Listener, *, share: bool = False
) -> Iterator[tuple[Gpu, ...]]:
    """Hold GPUs of this machine, as long as the context lasts.

    Args:
        machine: the GPUs that the study may use, `least` or more.
        least: number of GPUs to wait for.
        most: number of GPUs to take if they are free.
        notice, share: as for `leased_cores`.

    Yields:
        The study's GPUs. With `share`, these include GPUs of other studies if too few are free.
    """
    by_name = {f"gpu-{gpu.uuid or gpu.bus_id}": gpu for gpu in machine}
    with _leased(me, "GPU", list(by_name), notice, least=0 if share else least, most=most) as held:
        others = [name for name in by_name if name not in held]
        chosen = {*held, *others[: most - len(held)]} if share and len(held) < least else {*held}
        yield tuple(gpu for name, gpu in by_name.items() if name in chosen)


@contextlib.contextmanager
def _leased(
    me: Holder, kind: str, names: Sequence[str], notice: Listener, *, least: int, most: int
) -> Iterator[Collection[str]]:
    """Hold the locks of free parts of this machine, all of one kind. Waiting studies take turns.

    Yields:
        The names of the held parts.
    """
    locks: dict[str, Lock] = {}
    turn, has_turn, last_text = Lock(f"turn-{kind}"), False, ""
    try:
        while True:
            has_turn = has_turn or not least or turn.acquire()
            if has_turn and _take(locks, names, least, most):
                break
            if has_turn:
                turn.sign(me)
            ahead = None if has_turn else turn.holder()
            if has_turn or ahead:  # otherwise another study is about to get its parts
                if (text := _obstacles(kind, names, ahead)) != last_text:
                    notice(Notice(WAITING[kind].format(text) + INSTEAD_OF_WAITING))
                last_text = text
            time.sleep(POLL_S)
        turn.release()
        for lock in locks.values():
            lock.sign(me)
        yield locks.keys()
    finally:
        turn.release()
        for lock in locks.values():
            lock.release()


def _take(locks: dict[str, Lock], names: Sequence[str], least: int, most: int) -> bool:
    """Add the locks of free parts, up to `most`; none if fewer than `least` are free."""
    for name in names:
        lock = Lock(name)
        if len(locks) < most and lock.acquire():
            locks[name] = lock
    if len(locks) >= least:
        return True
    for lock in locks.values():
        lock.release()
    locks.clear()
    return False


def _obstacles(kind: str, names: Sequence[str], ahead: Holder | None) -> str:
    num_held = Counter(holder for name in names if (holder := Lock(name).holder()))
    total = units.counted(len(names), kind)
    texts = [f"{holder} has {count} of {total}" for holder, count in num_held.items()]
    if ahead is not None:
        texts.append(f"{ahead} is next")
    return ", ".join(texts) or "another process has them"


@contextlib.contextmanager
def present(me: Holder) -> Iterator[Callable[[], frozenset[Holder]]]:
    """Show other studies of this machine that this one runs trials on it.

    Yields:
        A function that returns the other studies that run trials here at the moment.
    """
    lock = Lock(f"{PRESENT}{me.pid}")
    try:
        if lock.acquire():
            lock.sign(me)
        yield lambda: frozenset(holder for holder in _present() if holder.pid != me.pid)
    finally:
        lock.release(remove=True)


def _present() -> Iterator[Holder]:
    with contextlib.suppress(OSError, RayparError):
        for path in _folder().glob(f"{PRESENT}*"):
            lock = Lock(path.name)
            if holder := lock.holder():  # a file that is not signed may be about to be locked
                if lock.acquire():  # its study was killed, and another process has its id now
                    lock.release(remove=True)
                else:
                    yield holder


@contextlib.contextmanager
def locked_cores(me: Holder, numbers: Collection[int]) -> Iterator[str]:
    """Hold cores of this machine during a trial, all or none. Raises RayparError if locks can't be used.

    Yields:
        The holder of a core that is not free; empty if the trial has its cores.
    """
    with contextlib.ExitStack() as stack:
        for number in sorted(numbers):  # in order, so one of two trials that need the same cores gets all
            lock = Lock(_core_name(number))
            if not lock.acquire():
                stack.close()
                yield str(lock.holder() or "another process")
                return
            stack.callback(lock.release)
            lock.sign(me)
        yield ""


def _core_name(number: int) -> str:
    return f"core-{number}"
