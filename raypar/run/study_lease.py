"""Lease of a study: a file in its store's folder, for nodes that share this folder but have no common lock.

Shared file systems may lack locks, so the file is created exclusively (``O_EXCL``), and its modification time is the
holder's heartbeat. Ages are differences of such times, which all come from the file system's clock.
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
    """Owner of a lease. `machine` distinguishes boots and containers, which reuse process ids."""

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
        """Return the owner that a file names; None if the file doesn't exist or names none (yet)."""
        try:
            owner = cls(**json.loads(path.read_text()))
            holder = Holder.parse(json.dumps({**asdict(owner), "pid": int(owner.pid)}).encode())
            return None if holder is None else owner
        except (OSError, ValueError, TypeError):
            return None

    @property
    def has_ended(self) -> bool:
        """Return whether it is an ended process of this machine. For other machines this is unknown."""
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
    """Return an id shared by processes that see each other: those of the same boot and container."""
    parts = []
    for read in (Path("/proc/sys/kernel/random/boot_id").read_text, Path("/proc/self/ns/pid").readlink):
        with contextlib.suppress(OSError):
            parts.append(str(read()).strip())
    return "/".join(parts) or socket.gethostname()


@contextlib.contextmanager
def leased_study(me: Holder, path: Path) -> Iterator[None]:
    """Hold the lease of a study, a file in a folder that other machines may share.

    If the file can't be written, there is no lease: the store is in the same place, and its error message is better.

    Args:
        path: its two folders are created if the store's exists, and removed at the end if they are empty.

    Raises:
        RayparError: another process holds it and has a recent heartbeat.
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
    """Create the file or take it over. Raises RayparError if its owner is alive, OSError if it can't be written."""
    try:
        _write(owner, path, os.O_EXCL)
        return
    except FileExistsError:
        pass
    _check_abandoned(owner, path)
    # If several processes find it abandoned, the one that creates this file takes it over.
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
        # Opening the file refreshes this node's cached attributes.
        with path.open("rb") as file:
            return probe.stat().st_mtime - os.fstat(file.fileno()).st_mtime
    finally:
        probe.unlink(missing_ok=True)


def _beat(owner: _Owner, path: Path, over: threading.Event) -> None:
    while not over.wait(BEAT_S):
        if _Owner.read(path) == owner:  # not taken over, for example while this process was suspended
            with contextlib.suppress(OSError):
                os.utime(path)
