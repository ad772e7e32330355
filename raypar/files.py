"""Files that raypar keeps: on disk when it says so, and open to nobody but their user."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path


def make_private_folder(path: Path) -> Path:
    """Make a folder, and the missing ones above it, or close the one that is there; return it. Raises OSError."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    close_to_others(path)
    return path


def close_to_others(path: Path) -> None:
    """Take the rights of group and others from what is this user's; harmless where it is not, or nothing is there."""
    with contextlib.suppress(OSError):
        status = path.stat()
        if status.st_uid == os.geteuid() and status.st_mode & 0o077:
            path.chmod(stat.S_IMODE(status.st_mode) & ~0o077)


def open_private(path: Path, flag: int) -> int:
    """Open a file for writing, such that a new one is its user's alone; return the descriptor. Raises OSError."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | flag, 0o600)


def sync_folder(folder: Path) -> None:
    """Write a folder's entries to disk: the names of files that were just created or renamed in it (fsync(2)).

    A new file whose bytes are on disk survives only if its folder's entry does.

    Raises:
        OSError: if the folder can't be opened or written.
    """
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
