"""Scratch folders among the temporary files, locked by their process so that abandoned ones can be removed.

A lock ends with its process: a scratch folder whose lock is free is abandoned. Other programs' files have no such lock
and are left alone, as are other users'.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path

if sys.platform != "win32":
    import fcntl

PREFIX = "raypar-"
_NAME_LENGTH = len(PREFIX) + 8  # tempfile adds 8 characters
SHORT = Path("/tmp")  # short enough for a socket's path, whatever TMPDIR is
MAX_SOCKET_LENGTH = 103  # macOS's; Linux has 107
LOCK_FILE = "raypar.lock"
LOGS_PREFIX = f"{PREFIX}logs-"  # folders of logs on the nodes of a cluster
STALE_LOGS_S = 30 * 86400.0

_locks: dict[Path, int] = {}  # by folder of this process: the file descriptor that holds the lock


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make a folder for the duration of the block."""
    folder = make_folder()
    try:
        yield folder
    finally:
        remove_folder(folder)


def make_folder(parent: Path | None = None, *, socket: int = 0) -> Path:
    """Make a private folder (mode 0700) after removing abandoned ones.

    It is in use until `remove_folder`, or until this process ends.

    Args:
        parent: created if missing; None: the folder of temporary files.
        socket: length of the longest socket path inside the folder; see `room_for`.
    """
    parent = parent or Path(tempfile.gettempdir())
    if socket:
        parent = room_for(_NAME_LENGTH + 1 + socket, parent)
    parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(parent)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        try:
            _locks[folder] = _lock(folder / LOCK_FILE, os.O_CREAT | os.O_EXCL)
        except (BlockingIOError, FileNotFoundError):  # another process removed it before it was locked
            continue
        except OSError:  # a file system without locks: it never counts as abandoned
            pass
        return folder


def room_for(length: int, parent: Path) -> Path:
    """Return the parent if a socket path of this length fits below it, else /tmp."""
    return parent if len(os.fsencode(parent)) + 1 + length <= MAX_SOCKET_LENGTH else SHORT


def remove_folder(folder: Path) -> None:
    """Remove a folder of `make_folder`, and abandoned ones beside it."""
    shutil.rmtree(folder, ignore_errors=True)
    if (fd := _locks.pop(folder, None)) is not None:
        os.close(fd)
    remove_abandoned(folder.parent)


def remove_abandoned(parent: Path | None = None) -> None:
    """Remove this user's scratch folders whose process ended without removing them."""
    for lock_file in Path(parent or tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK_FILE}"):
        with contextlib.suppress(OSError):  # in use, another user's, or removed meanwhile
            if lock_file.parent.lstat().st_uid != os.getuid():
                continue
            fd = _lock(lock_file)
            try:
                shutil.rmtree(lock_file.parent, ignore_errors=True)
            finally:
                os.close(fd)


def remove_logs(name: str, kept: Collection[str]) -> None:
    """Remove this machine's logs of an execution, and this user's logs that are older than a month.

    Args:
        name: name of their folder among the temporary files.
        kept: names of entries to keep, for instance those of failed trials.
    """
    parent = Path(tempfile.gettempdir())
    with contextlib.suppress(OSError):
        for path in (parent / name).iterdir():
            if path.name not in kept and path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name not in kept:
                path.unlink()
        (parent / name).rmdir()
    for folder in parent.glob(f"{LOGS_PREFIX}*"):
        with contextlib.suppress(OSError):
            status = folder.lstat()
            if status.st_uid == os.getuid() and time.time() - status.st_mtime > STALE_LOGS_S:
                shutil.rmtree(folder, ignore_errors=True)


def _lock(path: Path, flags: int = 0) -> int:
    """Return a descriptor that holds the lock of this file. Raises OSError if it is taken."""
    if sys.platform == "win32":
        raise OSError("no locks of this kind")
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | flags, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.lstat()  # raises if its last owner has just removed it
    except BaseException:
        os.close(fd)
        raise
    return fd
