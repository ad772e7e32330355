"""Durable file names: a new file whose bytes are on disk survives only if its folder's entry does."""

from __future__ import annotations

import os
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Write a folder's entries to disk: the names of files that were just created or renamed in it (fsync(2)).

    Raises:
        OSError: if the folder can't be opened or written.
    """
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
