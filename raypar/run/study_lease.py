"""Lease of a study: a file in its store's folder, for the nodes that share this folder, which have no lock in common.

Shared file systems need not have locks, so the file is made exclusively (``O_EXCL``), and its time of modification is
the holder's sign of life. Ages are differences of such times, which one clock sets: the file system's.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from raypar.errors import RayparError
from raypar.files import make_private_folder, open_private
from raypar.run.locks import Holder

BEAT_S = 10.0
# A node may see the time of a file a minute late (NFS, attribute cache).
STALE_S = 120.0


@dataclass(frozen=True)
class _Owner:
    """Owner of a lease; `machine` tells boots and containers apart, whose process ids mean different processes."""

    study: str
    user: str
    command: str
    host: str
    pid: int
    machine: str
    started_at: float
    token: str

    @classmethod
    def here(cls, me: Holder) -> _Owner:
        started_at = psutil.Process().create_time()
        host, token = socket.gethostname(), uuid.uuid4().hex
        return cls(me.study, me.user, me.command, host, me.pid, _machine(), started_at, token)

    @classmethod
    def read(cls, path: Path) -> _Owner | None:
        """Return whom a file names; None where there is none, or it names nobody (yet)."""
        try:
            owner = cls(**json.loads(path.read_text()))
            holder = Holder.parse(json.dumps({**asdict(owner), "pid": int(owner.pid)}).encode())
            return None if holder is None else owner
        except (OSError, ValueError, TypeError):
            return None

    @property
    def has_ended(self) -> bool:
        """Return whether it is a process of this machine that has ended; of other machines nobody knows."""
        if self.machine != _machine():
            return False
        try:
            process = psutil.Process(self.pid)
            return process.status() == psutil.STATUS_ZOMBIE or abs(process.create_time() - self.started_at) > 1.0
        except psutil.NoSuchProcess:
            return True

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (`{self.command}`)"


def _machine() -> str:
    """Return what the processes have in common that see each other: a boot of a machine, and a container of it."""
    parts = []
    for read in (Path("/proc/sys/kernel/random/boot_id").read_text, Path("/proc/self/ns/pid").readlink):
        with contextlib.suppress(OSError):
            parts.append(str(read()).strip())
    return "/".join(parts) or socket.gethostname()


@contextlib.contextmanager
def leased_study(me: Holder, path: Path) -> Iterator[None]:
    """Hold the lease of a study, a file in a folder that other machines may share.

    Where it can't be written there is no lease: the message of the store, which is there too, is better.

    Args:
        path: its two folders are made where the store's is there, and removed at the end if they are empty then.

    Raises:
        RayparError: another process has it, and has shown signs of life.
    """
    owner, over = _Owner.here(me), threading.Event()
    missing = [folder for folder in (path.parent, path.parent.parent) if not folder.exists()]
    beat = threading.Thread(target=_beat, args=(owner, path, over), daemon=True, name="study-lease")
    try:
        with contextlib.suppress(OSError):
            if path.parents[2].is_dir():
                make_private_folder(path.parent)
                _take(owner, path)
        beat.start()
        yield
    finally:
        over.set()
        with contextlib.suppress(OSError):
            if _Owner.read(path) == owner:
                path.unlink()
            for folder in missing:
                folder.rmdir()


def _take(owner: _Owner, path: Path) -> None:
    """Make the file, or take it over. Raises RayparError where its owner lives, OSError where it can't be written."""
    try:
        _write(owner, path, os.O_EXCL)
        return
    except FileExistsError:
        pass
    _check_abandoned(owner, path)
    # Of several that find it abandoned one takes it over: the one that makes this file.
    takeover = path.with_name(f"{path.name}.takeover")
    with contextlib.suppress(FileNotFoundError):
        if _age_s(takeover, owner) > STALE_S:
            takeover.unlink(missing_ok=True)
    try:
        os.close(open_private(takeover, os.O_EXCL))
    except FileExistsError:
        raise _refusal(owner.study, None, 0.0) from None
    try:
        _check_abandoned(owner, path)
        new = path.with_name(f"{path.name}.{owner.token}")
        _write(owner, new, os.O_EXCL)
        new.replace(path)
    finally:
        takeover.unlink(missing_ok=True)


def _write(owner: _Owner, path: Path, flag: int) -> None:
    with os.fdopen(open_private(path, flag), "w") as file:
        json.dump(asdict(owner), file)


def _check_abandoned(me: _Owner, path: Path) -> None:
    """Raise RayparError where the owner of a file may be alive."""
    try:
        age_s = _age_s(path, me)
    except FileNotFoundError:  # just given back
        return
    by = _Owner.read(path)
    if age_s <= STALE_S and not (by is not None and by.has_ended):
        raise _refusal(me.study, by, age_s)


def _refusal(study: str, by: _Owner | None, age_s: float) -> RayparError:
    who = f"{by}, last seen {max(0.0, age_s):.0f} s ago" if by else "another process"
    hint = f"wait for its end, or end it: finished trials are kept. {STALE_S:.0f} s after it was killed, run this again"
    return RayparError(f"study `{study}` is being run already, by {who}", hint=hint)


def _age_s(path: Path, me: _Owner) -> float:
    """Return how old a file is, by the clock of its file system. Raises OSError."""
    probe = path.with_name(f"{path.name}.{me.token}.now")
    try:
        os.close(open_private(probe, os.O_EXCL))
        # Opening it brings what this node knows of it up to date.
        with path.open("rb") as file:
            return probe.stat().st_mtime - os.fstat(file.fileno()).st_mtime
    finally:
        probe.unlink(missing_ok=True)


def _beat(owner: _Owner, path: Path, over: threading.Event) -> None:
    while not over.wait(BEAT_S):
        if _Owner.read(path) == owner:  # not taken over, while this process was stopped, say
            with contextlib.suppress(OSError):
                os.utime(path)
