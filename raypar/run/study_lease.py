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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from raypar.errors import RayparError
from raypar.files import make_private_folder, open_private
from raypar.run.locks import Holder
from raypar.signals import is_running

BEAT_S = 10.0
# A node may see the time of a file a minute late (NFS, attribute cache).
STALE_S = 120.0


@dataclass(frozen=True)
class _Owner(Holder):
    """Owner of a lease. `machine` distinguishes boots and containers, which reuse process ids."""

    host: str
    machine: str
    token: str

    @classmethod
    def of(cls, me: Holder) -> _Owner:
        return cls(**asdict(me), host=socket.gethostname(), machine=_machine(), token=uuid.uuid4().hex)

    @classmethod
    def read(cls, path: Path) -> _Owner | None:
        """Return the owner that a file names; None if the file doesn't exist or names none (yet)."""
        try:
            return cls.parse(path.read_bytes())
        except OSError:
            return None

    def holds(self, path: Path) -> bool:
        """Return whether it holds this lease. Another process takes it over if this one was suspended for long."""
        by = self.read(path)
        return by is not None and by.token == self.token

    @property
    def has_ended(self) -> bool:
        """Return whether it is an ended process of this machine. For other machines this is unknown."""
        return self.machine == _machine() and not is_running(self.pid)

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
def leased_study(me: Holder, path: Path, rivals: Callable[[], Iterable[Path]] = tuple) -> Iterator[None]:
    """Hold the lease of a study, or of a part of it: a file in a folder that other machines may share.

    If the file can't be written, there is no lease: the store is in the same place, and its error message is better.

    Args:
        path: its two folders are created if the store's exists, and removed at the end if they are empty.
        rivals: returns leases that nobody may hold at the same time.

    Raises:
        RayparError: another process holds it and has a recent heartbeat.
    """
    owner, over = _Owner.of(me), threading.Event()
    missing = [folder for folder in (path.parent, path.parent.parent) if not folder.exists()]
    beat = threading.Thread(target=_beat, args=(owner, path, over), daemon=True, name="study-lease")
    try:
        with contextlib.suppress(OSError):
            if path.parents[2].is_dir():
                make_private_folder(path.parent)
                _take(owner, path)
                for rival in rivals():  # after taking this one: of two rivals at least one sees the other
                    with contextlib.suppress(FileNotFoundError):
                        _check_abandoned(owner, rival)
        beat.start()
        yield
    finally:
        over.set()
        with contextlib.suppress(OSError):
            if owner.holds(path):
                path.unlink()
            for folder in missing:
                folder.rmdir()


def _take(owner: _Owner, path: Path) -> None:
    """Create the file or take it over. Raises RayparError if its owner may be alive, OSError if it can't be written."""
    with contextlib.suppress(FileExistsError):
        _write(owner, path)
        return
    _check_abandoned(owner, path)
    # If several processes find it abandoned, the one that creates this file takes it over.
    takeover = path.with_name(f"{path.name}.takeover")
    with contextlib.suppress(FileNotFoundError):
        if _age_s(takeover, owner) > STALE_S:
            takeover.unlink(missing_ok=True)
    try:
        _write(owner, takeover)
    except FileExistsError:
        raise _refusal(owner.study, None, 0.0) from None
    try:
        _check_abandoned(owner, path)
        takeover.replace(path)
    finally:
        takeover.unlink(missing_ok=True)


def _write(owner: _Owner, path: Path) -> None:
    with os.fdopen(open_private(path, os.O_EXCL), "w") as file:
        json.dump(asdict(owner), file)


def _check_abandoned(me: _Owner, path: Path) -> None:
    """Raise RayparError if the owner of a file may be alive."""
    try:
        age_s = _age_s(path, me)
    except FileNotFoundError:  # just given back
        return
    by = _Owner.read(path)
    if age_s <= STALE_S and not (by is not None and by.has_ended):
        raise _refusal(me.study, by, age_s)


def _refusal(study: str, by: _Owner | None, age_s: float) -> RayparError:
    who = f"{by}, last seen {max(0.0, age_s):.0f} s ago" if by else "another process"
    hint = (
        f"wait until it ends, or stop it: finished trials are kept. If it was killed, try again after {STALE_S:.0f} s"
    )
    return RayparError(f"study `{study}` is already running in {who}", hint=hint)


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
        if owner.holds(path):
            with contextlib.suppress(OSError):
                os.utime(path)
