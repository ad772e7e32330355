"""Locks between the studies of a machine: one execution of a study at a time, and one study on a core or a GPU.

A lock is a file in a folder that all users of the machine can write to. `flock(2)` holds it, so that it ends with its
process, however that ends; its text says who holds it.
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
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import chain
from pathlib import Path
from typing import TypeAlias

import psutil

from raypar import units
from raypar.errors import RayparError, cut
from raypar.gpus import Gpu
from raypar.masking import masked
from raypar.run.runner import Listener, Notice
from raypar.signals import is_running
from raypar.train.affinity import CAN_PIN, Core, pin

# Not in the user's own folder of temporary files: users have to agree on it.
FOLDER = Path("/tmp/.raypar-locks")
FOLDER_VARIABLE = "RAYPAR_LOCK_DIR"
POLL_S = 1.0
WAITING = "waiting for cores: {}; Ctrl-C ends this, `raypar study --share-machine` would run at the same time"
WAITING_FOR_GPUS = "waiting for GPUs: {}; Ctrl-C ends this, `raypar study --share-machine` would run at the same time"
SHARING = "--share-machine: shares cores with {}; the trials of both are marked in their results"
SHARING_GPUS = "--share-machine: shares GPUs with {}; the trials of both are marked in their results"
_MAX_TEXT_BYTES = 4096
_MAX_CHARS = 500


@dataclass(frozen=True)
class Holder:
    """Process that holds a lock: the study that it runs, its user and its command line."""

    study: str
    pid: int
    user: str
    command: str

    @classmethod
    def here(cls, study: str, command: Sequence[str]) -> Holder:
        """Return this process."""
        return cls(study, os.getpid(), _user(), cut(masked(shlex.join(command)), _MAX_CHARS))

    @classmethod
    def parse(cls, text: bytes) -> Holder | None:
        """Return whom a lock's file names; None where it names nobody. Others may have written anything there."""
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
    except (OSError, KeyError):  # a container's user without a name
        return str(os.getuid())


def _printable(text: str) -> str:
    return cut("".join(character for character in text if character.isprintable()), _MAX_CHARS)


class Lock:
    """Lock of this name, which one process at a time can hold."""

    def __init__(self, name: str) -> None:
        self._name, self._fd = name, -1

    def acquire(self) -> bool:
        """Take the lock; return False where another process has it. Raises RayparError without a usable folder."""
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
            os.close(fd)  # its last holder has removed it meanwhile

    def sign(self, holder: Holder) -> None:
        """Let others read who holds the lock."""
        self._write(json.dumps(asdict(holder)).encode())

    def release(self, *, remove: bool = False) -> None:
        """Give the lock back, if it is held here; `remove`: nobody may need it soon."""
        if self._fd >= 0:
            self._write(b"")
            if remove:
                with contextlib.suppress(OSError):  # another user's
                    (_folder() / self._name).unlink()
            os.close(self._fd)
            self._fd = -1

    def _write(self, text: bytes) -> None:
        with contextlib.suppress(OSError):  # a full disk, or a file that another user keeps from us: it is locked still
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, text, 0)

    def holder(self) -> Holder | None:
        """Return who has signed it and still runs; None where nobody has, or it can't be read."""
        try:
            fd = _open(self._name, create=False)
        except RayparError:  # somebody tampers with the folder: that ends no study
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
    """Open a lock's file; return -1 where there is none and none is to be made.

    Links are not followed, nor files taken that have a second name elsewhere: other users can put what they like there.
    """
    folder = _folder()
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            folder.chmod(0o1777)  # whatever the umask
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
            raise OSError(0, f"{name} is no plain file")
    except OSError as error:
        hint = f"have that fixed by its owner, or name another folder for all users in {FOLDER_VARIABLE}"
        raise RayparError(f"{folder}: studies can't lock cores there: {error.strerror}", hint=hint) from error
    return fd


def _open_in(folder_fd: int, name: str, create: bool) -> int:
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a child that outlives this process must not hold the lock
    while True:
        # With O_CREAT alone, Linux refuses others' files in such a folder (fs.protected_regular).
        with contextlib.suppress(FileNotFoundError):
            try:
                return os.open(name, flags | os.O_RDWR, dir_fd=folder_fd)
            except PermissionError:  # its owner was killed before it let others write
                return os.open(name, flags | os.O_RDONLY, dir_fd=folder_fd)
        if not create:
            return -1
        with contextlib.suppress(FileExistsError):
            fd = os.open(name, flags | os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=folder_fd)
            os.fchmod(fd, 0o666)  # whatever the umask
            return fd


@contextlib.contextmanager
def one_execution(me: Holder, store: str) -> Iterator[None]:
    """Hold the lock of a study's executions on this machine.

    Args:
        store: where its results go; studies of other stores are other studies.

    Raises:
        RayparError: another process runs the study.
    """
    lock = _execution_lock(me.study, store)
    if not lock.acquire():
        by = lock.holder()
        who = f"{by.process} (`{by.command}`)" if by else "another process"
        hint = "wait for its end, or end it: finished trials are kept"
        raise RayparError(f"study `{me.study}` is being run already, by {who}", hint=hint)
    try:
        lock.sign(me)
        yield
    finally:
        lock.release(remove=True)


def _execution_lock(study: str, store: str) -> Lock:
    return Lock("study-" + hashlib.sha256(f"{store}\n{study}".encode()).hexdigest()[:16])


# Chooses cores for a study out of free ones; none where they are too few.
Choice: TypeAlias = Callable[[Sequence[Core]], Collection[int]]


def first_cores(count: int) -> Choice:
    """Return the choice of the first free cores."""
    return lambda free: [core.number for core in free[:count]] if len(free) >= count else []


class Lease:
    """Lease of parts of this machine, all of one kind, to the study of this process.

    Args:
        kind: "core" or "GPU".
        names: of the locks of the parts that the study may use.

    Attributes:
        names: as given.
        held: names of those that it has.
    """

    def __init__(self, me: Holder, kind: str, names: Sequence[str]) -> None:
        self.held: frozenset[str] = frozenset()
        self.names, self._me, self._kind = names, me, kind
        self._locks: list[Lock] = []

    def take_by_name(self, choose: Callable[[Sequence[str]], Collection[str]]) -> bool:
        """Take free parts; none where they are too few, so that `choose` chooses none."""
        locks = {name: Lock(name) for name in self.names}
        self._locks = [*locks.values()]
        free = [name for name, lock in locks.items() if lock.acquire()]
        self.held = frozenset(choose(free))
        for name in free:
            if name in self.held:
                locks[name].sign(self._me)
            else:
                locks[name].release()
        return bool(self.held)

    def wait_until(self, take: Callable[[], bool], waiting: str, notice: Listener) -> None:
        """Take parts as soon as they are free, one waiting study after the other.

        Args:
            waiting: what `notice` gets, with {} for those that have the parts.
        """
        turn, has_turn, last_text = Lock("turn" if self._kind == "core" else f"turn-{self._kind}"), False, ""
        try:
            while True:
                has_turn = has_turn or turn.acquire()
                if has_turn and take():
                    return
                if has_turn:
                    turn.sign(self._me)
                ahead = None if has_turn else turn.holder()
                if has_turn or ahead:  # else another study is just choosing its parts
                    text = self._obstacles(ahead)
                    if text != last_text:
                        notice(Notice(waiting.format(text)))
                    last_text = text
                time.sleep(POLL_S)
        finally:
            turn.release()

    def _obstacles(self, ahead: Holder | None) -> str:
        num_held = Counter(holder for name in self.names if (holder := Lock(name).holder()))
        total = units.counted(len(self.names), self._kind)
        texts = [f"{holder} has {count} of {total}" for holder, count in num_held.items()]
        if ahead is not None:
            texts.append(f"{ahead} is next")
        return ", ".join(texts) or "another process has them"

    def share_by_name(self, names: Collection[str]) -> None:
        """Take parts at once, those of other studies too."""
        self.held = frozenset(names)
        for lock in chain.from_iterable((Lock(name), _guest_lock(name)) for name in self.held):
            self._locks.append(lock)
            if lock.acquire():
                lock.sign(self._me)

    def release(self) -> None:
        for lock in self._locks:
            lock.release()
        self._locks.clear()

    def companions(self) -> frozenset[Holder]:
        """Return the other studies that share some of the parts at the moment."""
        locks = chain.from_iterable((Lock(name), _guest_lock(name)) for name in self.held)
        return frozenset(holder for lock in locks if (holder := lock.holder()) and holder.pid != self._me.pid)


class CoreLease(Lease):
    """Lease of cores.

    Args:
        machine: the cores that the study may use.
    """

    def __init__(self, me: Holder, machine: Sequence[Core]) -> None:
        super().__init__(me, "core", [_core_name(core.number) for core in machine])
        self._machine = machine

    @property
    def cores(self) -> frozenset[int]:
        """Numbers of the cores that the study has."""
        return frozenset(core.number for core in self._machine if _core_name(core.number) in self.held)

    def take(self, choose: Choice) -> bool:
        """Take free cores; none where they are too few. Those whose physical core is free as a whole come first."""

        def names(free_names: Sequence[str]) -> list[str]:
            free = [core for core in self._machine if _core_name(core.number) in free_names]
            in_use = {core.physical for core in set(self._machine).difference(free)}
            chosen = choose([core for core in free if core.physical not in in_use]) or choose(free)
            return list(map(_core_name, chosen))

        return self.take_by_name(names)

    def wait(self, choose: Choice, notice: Listener) -> None:
        """Take cores as soon as they are free."""
        self.wait_until(lambda: self.take(choose), WAITING, notice)

    def share(self, choose: Choice) -> None:
        """Take cores at once: free ones, or where they are too few, those of other studies too."""
        if not self.take(choose):
            self.share_by_name(list(map(_core_name, choose(self._machine))))

    def _foreign(self) -> frozenset[int]:
        """Return the cores that other studies have to themselves."""
        others = (core.number for core in self._machine if core.number not in self.cores)
        return frozenset(number for number in others if Lock(_core_name(number)).holder())

    @contextlib.contextmanager
    def keeping_off_others(self) -> Iterator[None]:
        """Keep this process, and what it starts, off the cores of other studies, also those that begin later."""
        if not CAN_PIN:
            yield
            return
        before, over, foreign = os.sched_getaffinity(0), threading.Event(), self._foreign()
        pin({core.number for core in self._machine} - foreign)
        watch = threading.Thread(target=self._move_when_needed, args=(foreign, over), daemon=True, name="core-watch")
        watch.start()
        try:
            yield
        finally:
            over.set()
            watch.join()
            pin(before)

    def _move_when_needed(self, avoided: frozenset[int], over: threading.Event) -> None:
        num_moves = 0
        while not over.wait(POLL_S):
            if (foreign := self._foreign()) != avoided:
                avoided, num_moves = foreign, 2  # again for what was started meanwhile
            if num_moves:
                _move_off(avoided, self.cores)
                num_moves -= 1


@contextlib.contextmanager
def locked_cores(me: Holder, numbers: Collection[int], machine: Sequence[Core]) -> Iterator[Mapping[int, str]]:
    """Hold cores of this machine for the time of a trial, all or none. Raises RayparError where none can be held.

    Args:
        machine: the cores that the study may use.

    Yields:
        Who has cores that the trial can't have; empty where it has its cores.
    """
    with contextlib.ExitStack() as stack:
        for number in sorted(numbers):  # of two trials that want the same ones, one gets the first and so the others
            lock = Lock(_core_name(number))
            if not lock.acquire():
                stack.close()
                taken = {number: str(lock.holder() or "another process")}
                holders = ((core.number, Lock(_core_name(core.number)).holder()) for core in machine)
                yield taken | {n: str(holder) for n, holder in holders if holder and holder.study != me.study}
                return
            stack.callback(lock.release)
            lock.sign(me)
        yield {}


def _core_name(number: int) -> str:
    return f"core-{number}"


def _guest_lock(name: str) -> Lock:
    """The lock of a study that shares a part of the machine which another study has."""
    return Lock(f"guest-{name}")


class GpuLease(Lease):
    """Lease of GPUs.

    Args:
        machine: the GPUs that the study may use.
    """

    def __init__(self, me: Holder, machine: Sequence[Gpu]) -> None:
        self._by_name = {f"gpu-{gpu.uuid or gpu.bus_id}": gpu for gpu in machine}
        super().__init__(me, "GPU", list(self._by_name))

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """GPUs that the study has, in the machine's order."""
        return tuple(gpu for name, gpu in self._by_name.items() if name in self.held)


def _move_off(avoided: Collection[int], last_resort: Collection[int]) -> None:
    """Move the threads of this process and its descendants off some cores."""
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            for thread in process.threads():
                with contextlib.suppress(OSError):  # it has ended
                    cores = os.sched_getaffinity(thread.id)
                    if not cores.isdisjoint(avoided):
                        os.sched_setaffinity(thread.id, cores.difference(avoided) or last_resort)


@contextlib.contextmanager
def leased_cores(
    me: Holder, machine: Sequence[Core], choose: Choice, notice: Listener, *, share: bool = False
) -> Iterator[CoreLease]:
    """Lease cores of this machine to a study, for as long as the context lasts. Raises RayparError where none can be.

    Args:
        machine: the cores that it may use.
        choose: has to find some where all cores are free.
        notice: gets what the study waits for, or with whom it shares.
        share: take cores that other studies have, where too few are free, instead of waiting for them.
    """
    lease = CoreLease(me, machine)
    try:
        if share:
            lease.share(choose)
            if companions := lease.companions():
                notice(Notice(SHARING.format(", ".join(sorted(map(str, companions))))))
        else:
            lease.wait(choose, notice)
        yield lease
    finally:
        lease.release()


@contextlib.contextmanager
def leased_gpus(
    me: Holder, machine: Sequence[Gpu], least: int, most: int, notice: Listener, *, share: bool = False
) -> Iterator[GpuLease]:
    """Lease GPUs of this machine to a study, for as long as the context lasts. Raises RayparError where none can be.

    Args:
        machine: the GPUs that it may use, `least` or more.
        least: so many it waits for.
        most: so many it takes where they are free.
        notice, share: as of `leased_cores`.
    """
    lease = GpuLease(me, machine)

    def take() -> bool:
        return lease.take_by_name(lambda free: free[:most] if len(free) >= least else [])

    try:
        if share:
            if not take():
                lease.share_by_name(lease.names[:most])
            if companions := lease.companions():
                notice(Notice(SHARING_GPUS.format(", ".join(sorted(map(str, companions))))))
        else:
            lease.wait_until(take, WAITING_FOR_GPUS, notice)
        yield lease
    finally:
        lease.release()
